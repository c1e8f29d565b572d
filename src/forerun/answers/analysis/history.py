"""The event history of a run: a table with one row for every start and every end, in order of time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from forerun.answers.analysis.reading import Simulation
from forerun.common.errors import ForerunError, UnknownName
from forerun.common.units import PS_PER_S
from forerun.core.engine.simulate import Timeline
from forerun.core.program.kinds import Work
from forerun.core.program.types import I8, I64, N_STREAMS, FlatProgram, Phase, Program, Stream

if TYPE_CHECKING:
    import pandas

COLUMNS = (
    "iteration",
    "time_ps",
    "event",
    "rank_class",
    "stream",
    "op",
    "phase",
    "micro_batch",
    "layer",
    "block",
    "module",
    "duration_ps",
    "node",
    "kind",
)
"""`time_ps` counts from the beginning of the run; `event` is start or end; `stream` is `host` for the launch of an op;
`duration_ps` is from start to end; `node` counts in the issue order of the rank class; `kind` is one of KINDS"""
KINDS = (*(work.name.lower() for work in Work), "host")
"""kernels; collectives and transfers between GPUs; copies between GPU and host memory; fixed times, and marks that
take no time; launches by the host"""
_NAMED = ("event", "rank_class", "stream", "op", "phase", "block", "module", "kind")
_EVENTS = np.array(["start", "end"], object)
_STREAMS = np.array([*(stream.name.lower() for stream in Stream), "host"], object)
_KIND_NAMES = np.array(KINDS, object)
_PHASES = np.array([phase.name.lower() for phase in Phase], object)


@dataclass(frozen=True, slots=True)
class Event:
    """One start or end: a row of the history, with its columns (COLUMNS) as attributes."""

    iteration: int
    time_ps: int
    event: str
    rank_class: str
    stream: str
    op: str
    phase: str
    micro_batch: int
    layer: int
    block: str
    module: str
    duration_ps: int
    node: int
    kind: str

    @property
    def event_type(self) -> str:
        """Returns the kind of the event and whether it is a start or an end, in one word: compute_start,
        communication_end."""
        return f"{self.kind}_{self.event}"

    @property
    def timestamp(self) -> float:
        """Returns the seconds since the beginning of the run."""
        return self.time_ps / PS_PER_S


EVENT_TYPES = tuple(f"{kind}_{event}" for kind in KINDS for event in _EVENTS)


@dataclass(frozen=True, slots=True)
class RunIteration:
    """One optimizer step of a run, with the times of its nodes."""

    start_ps: int
    """picoseconds since the beginning of the run"""
    program: Program
    flat: FlatProgram
    timeline: Timeline
    issue_ps: I64
    """the host's time for each op, as given to `engine.simulate`, (n_ops,)"""

    @staticmethod
    def of(simulation: Simulation, start_ps: int = 0) -> RunIteration:
        """Returns the iteration that `simulation` ran, from `start_ps` on."""
        return RunIteration(
            start_ps, simulation.program, simulation.flat, simulation.timeline, simulation.costs.issue_ps
        )


@dataclass(frozen=True)
class History:
    """The events of iterations that follow each other.

    Rows are in order of (iteration, time, rank class, stream with the host last, node, start before end), so a stream's
    own events are in their order also where they take no time. Launches that take no time have no rows.
    """

    iterations: Iterable[RunIteration]
    """every table reads them once, so a generator is enough for one table only"""

    def tables(self) -> Iterator[dict[str, np.ndarray[Any, Any]]]:
        """Yields the columns COLUMNS of each iteration in turn, (rows,) each."""
        for number, iteration in enumerate(self.iterations):
            yield _table(number, iteration)

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """Yields each row, in the order of COLUMNS; one iteration is in memory at a time."""
        for table in self.tables():
            yield from zip(*(table[column].tolist() for column in COLUMNS), strict=True)

    def events(self, kind: str | None = None) -> Iterator[Event]:
        """Yields each event; with `kind` only those of one of KINDS or EVENT_TYPES.

        Raises UnknownName if there is no such kind.
        """
        if kind is not None and kind not in (*KINDS, *EVENT_TYPES):
            raise UnknownName("kind of event", kind, [*KINDS, *EVENT_TYPES])
        every = (Event(*row) for row in self.rows())
        return (each for each in every if kind is None or kind in (each.kind, each.event_type))

    def to_rows(self) -> list[dict[str, Any]]:
        """Returns all rows as dicts."""
        return [dict(zip(COLUMNS, row, strict=True)) for row in self.rows()]

    def to_dataframe(self) -> pandas.DataFrame:
        """Returns all rows with names as categories. Raises ForerunError if pandas is not installed."""
        try:
            import pandas
        except ImportError:
            raise ForerunError(
                "the event history as a table needs pandas: pip install 'forerun[data]'; events() works without"
            ) from None
        frames = [pandas.DataFrame(table, columns=COLUMNS) for table in self.tables()]
        frame = pandas.concat(frames, ignore_index=True) if frames else pandas.DataFrame(columns=COLUMNS)
        return frame.astype(dict.fromkeys(_NAMED, "category"))


def _table(number: int, iteration: RunIteration) -> dict[str, np.ndarray[Any, Any]]:
    program, flat, timeline = iteration.program, iteration.flat, iteration.timeline
    issue = iteration.issue_ps[flat.op]
    launched = np.flatnonzero(issue > 0)
    end = np.concatenate([timeline.end_ps, timeline.issue_end_ps[launched]])
    start = np.concatenate([timeline.start_ps, timeline.issue_end_ps[launched] - issue[launched]])
    node = np.concatenate([np.arange(len(flat)), launched])
    stream: I8 = np.concatenate([flat.stream, np.full(len(launched), N_STREAMS, np.int8)])
    owner = np.searchsorted(flat.class_ptr, node, side="right") - 1
    kind = np.where(stream == N_STREAMS, KINDS.index("host"), program.ops.work[flat.op[node]])
    n = len(node)
    time, event = np.concatenate([start, end]), np.repeat(np.arange(2), n)
    order = np.lexsort((event, np.tile(node, 2), np.tile(stream, 2), np.tile(owner, 2), time))
    row = order % max(n, 1)
    node, owner = node[row], owner[row]
    first_step = np.cumsum([0, *(len(cls.block) for cls in program.rank_classes)])
    step = first_step[owner] + flat.step[node]
    blocks = [cls.block for cls in program.rank_classes]
    return {
        "iteration": np.full(len(row), number),
        "time_ps": iteration.start_ps + time[order],
        "event": _EVENTS[event[order]],
        "rank_class": _names(flat.class_names)[owner],
        "stream": _STREAMS[stream[row]],
        "op": _names(program.ops.name)[flat.op[node]],
        "phase": _PHASES[flat.phase[node]],
        "micro_batch": np.concatenate([cls.microbatch for cls in program.rank_classes])[step],
        "layer": np.concatenate([cls.layer for cls in program.rank_classes])[step],
        "block": _names(one.name for one in program.blocks)[np.concatenate(blocks)[step]],
        "module": _names((*program.modules, ""))[np.minimum(flat.module[node], len(program.modules))],
        "duration_ps": (end - start)[row],
        "node": node - flat.class_ptr[owner],
        "kind": _KIND_NAMES[kind[row]],
    }


def _names(names: Iterable[str]) -> np.ndarray[Any, Any]:
    return np.array(list(names), object)
