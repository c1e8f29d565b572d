"""What every stream of a rank class does over the step, in as many slices as people can look at."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forerun.analysis.breakdown import N_CAUSES, Cause, node_causes
from forerun.analysis.reading import Simulation
from forerun.program.types import I64, Stream

HOST = "host"
_SLICES = 3000
"""of a timeline, unless asked for more"""


@dataclass(frozen=True, slots=True)
class Slice:
    """Nodes of one stream that run one after the other, shown as one."""

    start_ps: int
    end_ps: int
    busy_ps: int
    """of it in which a node runs"""
    cause: Cause
    """what most of that time is: on a communication stream, what waiting for it would be"""
    count: int
    """nodes"""
    text: str
    """what runs, where in the model"""


@dataclass(frozen=True, slots=True)
class Lane:
    """One stream."""

    name: str
    slices: tuple[Slice, ...]


@dataclass(frozen=True, slots=True)
class _Nodes:
    """Nodes of a stream in order, or runs of them; columns of (n,)."""

    start: I64
    end: I64
    first: I64
    """number of the first node"""
    count: I64
    busy: I64
    """picoseconds in which a node runs"""
    cause: I64

    def merged(self, starts: I64) -> _Nodes:
        """One entry for each run; `starts` are the first entries of the runs."""
        lengths = np.diff(np.append(starts, len(self.start)))
        by_cause = np.zeros((len(starts), N_CAUSES), np.int64)
        np.add.at(by_cause, (np.repeat(np.arange(len(starts)), lengths), self.cause), self.busy)
        return _Nodes(
            self.start[starts],
            self.end[starts + lengths - 1],
            self.first[starts],
            np.add.reduceat(self.count, starts),
            by_cause.sum(axis=1),
            by_cause.argmax(axis=1),
        )


def lanes(simulation: Simulation, rank_class: int, slices: int = _SLICES) -> list[Lane]:
    """The streams of a rank class that have nodes, in their order, the host last; about `slices` slices in all.

    Where there are more nodes, those of one block and cause that follow each other closely become one slice, and what
    is too short to be seen joins its neighbours. Nothing that takes no time has a slice.
    """
    flat, timeline = simulation.flat, simulation.timeline
    nodes = np.arange(int(flat.class_ptr[rank_class]), int(flat.class_ptr[rank_class + 1]))
    stream = flat.stream[nodes]
    numbers = np.unique(stream).tolist()
    most = max(1, slices // (len(numbers) + 1))
    least_ps = max(1, timeline.end_of_step_ps // most)
    out = []
    for number in numbers:
        mine = nodes[stream == number]
        mine = mine[timeline.end_ps[mine] > timeline.start_ps[mine]]
        if len(mine):
            rows = _rows(
                timeline.start_ps[mine], timeline.end_ps[mine], mine, node_causes(flat, simulation.program, mine)
            )
            rows = _shortened(rows, flat.step[mine], most, least_ps)
            out.append(Lane(Stream(number).name.lower(), _slices(simulation, rank_class, rows)))
    issue = simulation.costs.issue_ps[flat.op[nodes]]
    issued = nodes[issue > 0]
    if len(issued):
        end = timeline.issue_end_ps[issued]
        rows = _rows(end - issue[issue > 0], end, issued, np.full(len(issued), int(Cause.HOST)))
        out.append(Lane(HOST, _slices(simulation, rank_class, _shortened(rows, flat.step[issued], most, least_ps))))
    return out


def _rows(start: I64, end: I64, nodes: I64, cause: I64) -> _Nodes:
    return _Nodes(start, end, nodes, np.ones(len(nodes), np.int64), end - start, cause)


def _shortened(rows: _Nodes, step: npt.NDArray[np.int32], most: int, least_ps: int) -> _Nodes:
    """At most about twice `most` rows. What is further apart than `least_ps` stays apart."""
    if len(rows.start) <= most:
        return rows
    close = rows.start[1:] - rows.end[:-1] <= least_ps
    rows = rows.merged(_first(~(close & (step[1:] == step[:-1]) & (rows.cause[1:] == rows.cause[:-1]))))
    if len(rows.start) <= most:
        return rows
    short, place = rows.end - rows.start < least_ps, rows.start // least_ps
    return rows.merged(_first(~(short[1:] & short[:-1] & (place[1:] == place[:-1]))))


def _first(new: npt.NDArray[np.bool_]) -> I64:
    """The first entries of runs; `new` says for all entries but the first whether a run begins."""
    return np.flatnonzero(np.concatenate(([True], new)))


def _slices(simulation: Simulation, rank_class: int, rows: _Nodes) -> tuple[Slice, ...]:
    columns = (rows.start, rows.end, rows.busy, rows.cause, rows.count, rows.first)
    return tuple(
        Slice(start, end, busy, Cause(cause), count, _text(simulation, rank_class, node, count))
        for start, end, busy, cause, count, node in zip(*(column.tolist() for column in columns), strict=True)
    )


def _text(simulation: Simulation, rank_class: int, node: int, count: int) -> str:
    program, flat = simulation.program, simulation.flat
    cls, step = program.rank_classes[rank_class], int(flat.step[node])
    name = program.ops.name[int(flat.op[node])]
    what = name if count == 1 else f"{name} and {count - 1:,} more"
    layer = int(cls.layer[step])
    where = program.blocks[int(cls.block[step])].name + (f" of layer {layer}" if layer >= 0 else "")
    return f"{what}, {where}, micro batch {int(cls.microbatch[step])}"
