"""What the time and the memory of a point consist of: compute, exposed communication by axis, what is held.

The time of a rank is its compute plus what is exposed: the time in which it does not compute. Of that, a collective or
a send under way has its part (one is under way at a time); receives have what is left of theirs; the rest is idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forerun.astrasim.astra.lower import LoweredTrace
from forerun.astrasim.astra.replay import Replay
from forerun.astrasim.astra.statistics import peak_memory
from forerun.astrasim.chakra.trace import CommType, NodeKind
from forerun.core.program.types import I64

_PIPELINE = "pp"
_ALL_RANKS = "all ranks"
SEND, RECEIVE = "send", "receive"


@dataclass(frozen=True, slots=True)
class Communication:
    """All collectives of one kind over one axis, or all sends or receives."""

    axis: str
    kind: str
    """all-reduce, all-gather and so on; send, receive"""
    calls: int
    size_bytes: int
    """as the trace counts: of an all-gather the local shard, of others the full buffer"""
    exposed_ns: int


@dataclass(frozen=True, slots=True)
class Terms:
    """What makes up the time of the rank that ends last, and the memory of the rank that needs most.

    `compute_ns`, what is exposed of every communication, and `idle_ns` add up to the time of the rank.
    """

    operations: int
    compute_ns: int
    communication: tuple[Communication, ...]
    idle_ns: int
    held_bytes: int
    """of the peak: weights and inputs, there before the first node"""
    made_bytes: int
    """of the peak: activations and gradients, made by nodes"""


def terms_of(replay: Replay, last: int, largest: int, axes: Sequence[str]) -> Terms:
    """The terms of the ranks `last` (of time) and `largest` (of memory).

    `axes` are those with more than one rank: column `group` of a generated trace numbers them.
    """
    lowered, rows = _of_rank(replay, last)
    found = _communication(lowered, replay.run.result.start_ns[rows], replay.run.result.end_ns[rows], axes)
    statistics = replay.statistics[last]
    exposed_ns = statistics.exposed_communication
    operations = lowered.trace.num_ops[lowered.row][lowered.trace.kind[lowered.row] == NodeKind.COMP].sum()
    held, rows = _of_rank(replay, largest)
    result = replay.run.result
    peak = peak_memory(held, result.start_ns[rows], result.end_ns[rows], result.done_order[rows])
    return Terms(
        int(operations),
        statistics.wall_cycles_finished - exposed_ns,
        tuple(found),
        exposed_ns - sum(one.exposed_ns for one in found),
        peak.held_bytes,
        peak.n_bytes - peak.held_bytes,
    )


def _of_rank(replay: Replay, rank: int) -> tuple[LoweredTrace, slice]:
    """What stands for a rank: its trace, and where its nodes are."""
    actor, first = replay.actor_of_rank[rank], replay.program.nodes.first
    return replay.program.traces[actor], slice(int(first[actor]), int(first[actor + 1]))


def _communication(lowered: LoweredTrace, start: I64, end: I64, axes: Sequence[str]) -> list[Communication]:
    trace, row = lowered.trace, lowered.row
    kind = trace.kind[row]
    compute = (kind == NodeKind.COMP) & ~trace.is_cpu[row]
    collective, send, receive = (kind == one for one in (NodeKind.COLLECTIVE, NodeKind.SEND, NodeKind.RECV))
    exposed_ns = _outside(start, end, *_union(start[compute], end[compute]))
    before = compute | collective | send
    waiting_ns = _outside(*_union(start[receive], end[receive]), *_union(start[before], end[before]))
    size = trace.comm_size[row]

    found = []
    group, comm = trace.group[row], trace.comm_type[row]
    for number, which in sorted({*zip(group[collective].tolist(), comm[collective].tolist(), strict=True)}):
        mine = collective & (group == number) & (comm == which)
        axis, words = axes[number] if number >= 0 else _ALL_RANKS, CommType(which).name.lower().replace("_", "-")
        found.append(Communication(axis, words, int(mine.sum()), int(size[mine].sum()), int(exposed_ns[mine].sum())))
    for words, mine, exposed in ((SEND, send, exposed_ns[send]), (RECEIVE, receive, waiting_ns)):
        if mine.any():
            found.append(Communication(_PIPELINE, words, int(mine.sum()), int(size[mine].sum()), int(exposed.sum())))
    return found


def _union(start: I64, end: I64) -> tuple[I64, I64]:
    """Intervals that do not overlap and cover the same, in their order."""
    order = np.argsort(start, kind="stable")
    start, reached = start[order], np.maximum.accumulate(end[order])
    if not len(start):
        return start, reached
    new = np.flatnonzero(start[1:] > reached[:-1]) + 1
    return start[np.append(0, new)], reached[np.append(new - 1, len(start) - 1)]


def _outside(start: I64, end: I64, covered_start: I64, covered_end: I64) -> I64:
    """How much of each interval lies outside the covered ones, which do not overlap."""
    return (end - start) - (_covered(end, covered_start, covered_end) - _covered(start, covered_start, covered_end))


def _covered(until: I64, start: I64, end: I64) -> I64:
    """How much lies in the intervals before each of the times `until`."""
    if not len(start):
        return np.zeros(len(until), np.int64)
    total = np.concatenate([[0], np.cumsum(end - start)])
    last = np.searchsorted(start, until, side="right") - 1
    inside = np.minimum(until, end[last]) - start[last]
    covered: I64 = np.where(last >= 0, total[np.maximum(last, 0)] + inside, 0)
    return covered
