"""Reduces the work of every stream of a rank class to a number of slices that a plot can show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from forerun.answers.analysis.breakdown import node_causes
from forerun.answers.analysis.reading import Simulation
from forerun.core.program.causes import N_CAUSES, Cause
from forerun.core.program.origin import PROFILE, Origin
from forerun.core.program.types import I64, Collective, Phase, Stream

HOST = "host"
_FORWARD, _BACKWARD = N_CAUSES, N_CAUSES + 1
WORK = (*(cause.name.lower() for cause in Cause), "forward", "backward")
"""kinds of slices: a cause (on a communication stream, the cause of waiting for it), or a phase of the model"""
_WORDS = {"gather": "data parallel", "reduce": "gradients", "copy": "host copies"}
"""names of streams in words, where they are others"""
_RUNS = {int(Collective.SEND_RECV): "send and receive"}
_SLICES = 5000
"""default number of slices of a timeline"""


@dataclass(frozen=True, slots=True)
class Slice:
    """Consecutive nodes of one stream that are shown as one."""

    start_ps: int
    end_ps: int
    busy_ps: int
    """picoseconds of the slice in which a node runs"""
    work: str
    """the entry of WORK with most of that time"""
    count: int
    """number of nodes"""
    text: str
    """the ops, and their place in the model"""


@dataclass(frozen=True, slots=True)
class Lane:
    """The slices of one stream."""

    name: str
    slices: tuple[Slice, ...]
    runs: tuple[str, ...] = ()
    """collectives of the stream, such as all-reduce; empty for a stream that communicates nothing"""

    @property
    def label(self) -> str:
        """Returns the name that people read: the lane and the work that runs in it, such as `gradients: all-reduce`."""
        words = _WORDS.get(self.name, self.name.replace("_", " "))
        return f"{words}: {', '.join(self.runs)}" if self.runs else words


@dataclass(frozen=True, slots=True)
class _Nodes:
    """Nodes of a stream in order, or runs of nodes, as columns (n,)."""

    start: I64
    end: I64
    first: I64
    """number of the first node"""
    count: I64
    busy: I64
    """picoseconds in which a node runs"""
    work: I64
    """index into WORK"""

    def merged(self, starts: I64) -> _Nodes:
        """Returns one entry for each run; `starts` (runs,) are the first entries of the runs."""
        lengths = np.diff(np.append(starts, len(self.start)))
        by_work = np.zeros((len(starts), len(WORK)), np.int64)
        np.add.at(by_work, (np.repeat(np.arange(len(starts)), lengths), self.work), self.busy)
        return _Nodes(
            self.start[starts],
            self.end[starts + lengths - 1],
            self.first[starts],
            np.add.reduceat(self.count, starts),
            by_work.sum(axis=1),
            by_work.argmax(axis=1),
        )


@dataclass(frozen=True, slots=True)
class _View:
    """A coarser view of nodes: consecutive nodes of one place and one kind of work become one."""

    place: npt.NDArray[np.int32]
    work: I64


def lanes(simulation: Simulation, rank_class: int, slices: int = _SLICES) -> list[Lane]:
    """Returns the streams of a rank class that have nodes, in order, the host last, with about `slices` slices in all.

    Where there are more nodes than slices, nodes are merged as far as needed: first consecutive nodes of one block and
    cause; then, on the compute stream, nodes of one block and phase; then nodes of one micro batch and phase, with
    recomputation as part of the backward pass. Slices that are still too short to be visible join their neighbours.
    Nodes that take no time have no slice. Delays of a profiled step have none either, because the host's lane shows
    them.
    """
    flat, timeline, cls = simulation.flat, simulation.timeline, simulation.program.rank_classes[rank_class]
    nodes = np.arange(int(flat.class_ptr[rank_class]), int(flat.class_ptr[rank_class + 1]))
    stream = flat.stream[nodes]
    numbers = np.unique(stream).tolist()
    most = max(1, slices // (len(numbers) + 1))
    least_ps = max(1, timeline.end_of_step_ps // most)
    profiled = Origin.of(simulation.program).source == PROFILE
    out = []
    for number in numbers:
        mine = nodes[stream == number]
        mine = mine[timeline.end_ps[mine] > timeline.start_ps[mine]]
        fixed = simulation.program.ops.is_delay[flat.op[mine]] & profiled
        name = HOST if fixed.all() and profiled else Stream(number).name.lower()
        mine = mine if name == HOST else mine[~fixed]
        if not len(mine):
            continue
        causes = node_causes(flat, simulation.program, mine)
        step, microbatch = flat.step[mine], cls.microbatch[flat.step[mine]]
        views = [_View(step, causes), _View(microbatch, causes)]
        if number == Stream.COMPUTE:
            phases = _phases(causes, flat.phase[mine])
            passes = np.where(phases == Cause.RECOMPUTE, _BACKWARD, phases)
            views[1:] = [_View(step, phases), _View(microbatch, passes)]
        rows = _rows(timeline.start_ps[mine], timeline.end_ps[mine], mine, causes)
        rows = _shortened(rows, views, most, least_ps)
        kinds = np.unique(simulation.program.ops.collective[flat.op[mine]]).tolist()
        runs = tuple(_RUNS.get(kind, Collective(kind).name.lower().replace("_", "-")) for kind in kinds if kind)
        out.append(Lane(name, _slices(simulation, rank_class, rows), runs))
    issue = simulation.costs.issue_ps[flat.op[nodes]]
    issued = nodes[issue > 0]
    if len(issued):
        end, host = timeline.issue_end_ps[issued], np.full(len(issued), int(Cause.HOST))
        rows = _rows(end - issue[issue > 0], end, issued, host)
        rows = _shortened(rows, [_View(flat.step[issued], host)], most, least_ps)
        out.append(Lane(HOST, _slices(simulation, rank_class, rows)))
    return out


def _rows(start: I64, end: I64, nodes: I64, work: I64) -> _Nodes:
    return _Nodes(start, end, nodes, np.ones(len(nodes), np.int64), end - start, work)


def _phases(causes: I64, phase: npt.NDArray[np.int8]) -> I64:
    """Replaces the causes of forward and backward kernels by their phase, as indices into WORK, (n,)."""
    model = (causes == Cause.MATMUL) | (causes == Cause.ATTENTION) | (causes == Cause.MEMORY_BOUND)
    return np.where(model, np.where(phase == Phase.FORWARD, _FORWARD, _BACKWARD), causes)


def _shortened(rows: _Nodes, views: Sequence[_View], most: int, least_ps: int) -> _Nodes:
    """Merges `rows` to at most about twice `most`. Rows further apart than `least_ps` stay separate."""
    if len(rows.start) <= most:
        return rows
    close = rows.start[1:] - rows.end[:-1] <= least_ps
    for view in views:
        same = (view.place[1:] == view.place[:-1]) & (view.work[1:] == view.work[:-1])
        seen = replace(rows, work=view.work).merged(_first(~(close & same)))
        if len(seen.start) <= most:
            return seen
    short, place = seen.end - seen.start < least_ps, seen.start // least_ps
    return seen.merged(_first(~(short[1:] & short[:-1] & (place[1:] == place[:-1]))))


def _first(new: npt.NDArray[np.bool_]) -> I64:
    """Returns the first entries of runs, (runs,); `new` (n - 1,) marks the entries after the first that begin a run."""
    return np.flatnonzero(np.concatenate(([True], new)))


def _slices(simulation: Simulation, rank_class: int, rows: _Nodes) -> tuple[Slice, ...]:
    columns = (rows.start, rows.end, rows.busy, rows.work, rows.count, rows.first)
    return tuple(
        Slice(start, end, busy, WORK[work], count, _text(simulation, rank_class, node, count))
        for start, end, busy, work, count, node in zip(*(column.tolist() for column in columns), strict=True)
    )


def _text(simulation: Simulation, rank_class: int, node: int, count: int) -> str:
    program, flat = simulation.program, simulation.flat
    cls, step = program.rank_classes[rank_class], int(flat.step[node])
    name = program.ops.name[int(flat.op[node])]
    what = name if count == 1 else f"{name} and {count - 1:,} more"
    layer = int(cls.layer[step])
    where = program.blocks[int(cls.block[step])].name + (f" of layer {layer}" if layer >= 0 else "")
    return f"{what}, {where}, micro batch {int(cls.microbatch[step])}"
