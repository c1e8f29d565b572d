"""The terms of a point's time and memory: compute, exposed communication by axis, idle time; held and made tensors.

The time of a rank is its compute time plus its exposed time, in which it doesn't compute. In exposed time, the current
collective or send (at most one at a time) counts first, then receives; the rest is idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forerun.astrasim.astra.lower import LoweredTrace
from forerun.astrasim.astra.replay import Replay
from forerun.astrasim.astra.statistics import peak_memory
from forerun.astrasim.chakra.trace import CommType, NodeKind
from forerun.common.arrays import pointers, union
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
    """in the trace's bytes: the local shard of an all-gather, the full buffer of others"""
    exposed_ns: int


@dataclass(frozen=True, slots=True)
class Terms:
    """The time of the rank that ends last, and the memory of the rank that needs most, split into terms.

    `compute_ns`, `idle_ns` and the exposed time of all communication add up to the time of the rank.
    """

    operations: int
    compute_ns: int
    communication: tuple[Communication, ...]
    idle_ns: int
    held_bytes: int
    """the part of the peak in weights and inputs, which exist before the first node"""
    made_bytes: int
    """the part of the peak in activations and gradients, which nodes make"""


def terms_of(replay: Replay, last: int, largest: int, axes: Sequence[str]) -> Terms:
    """Returns the terms of time of rank `last` and of memory of rank `largest`.

    `axes` are those with several ranks, in the order in which column `group` of a generated trace numbers them.
    """
    lowered, rows = _of_rank(replay, last)
    found = _communication(lowered, replay.run.result.start_ns[rows], replay.run.result.end_ns[rows], axes)
    statistics = replay.statistics_of(last)
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
    """Returns the trace of the simulated rank that stands for `rank`, and the slice of its nodes."""
    actor = replay.actor_of_rank[rank]
    return replay.traces[actor], replay.rows(actor)


def _communication(lowered: LoweredTrace, start: I64, end: I64, axes: Sequence[str]) -> list[Communication]:
    trace, row = lowered.trace, lowered.row
    kind = trace.kind[row]
    compute = (kind == NodeKind.COMP) & ~trace.is_cpu[row]
    collective, send, receive = (kind == one for one in (NodeKind.COLLECTIVE, NodeKind.SEND, NodeKind.RECV))
    exposed_ns = _outside(start, end, *union(start[compute], end[compute]))
    before = compute | collective | send
    waiting_ns = _outside(*union(start[receive], end[receive]), *union(start[before], end[before]))
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


def _outside(start: I64, end: I64, covered_start: I64, covered_end: I64) -> I64:
    """Returns how much of each interval lies outside the covered ones, which don't overlap."""
    return (end - start) - (_covered(end, covered_start, covered_end) - _covered(start, covered_start, covered_end))


def _covered(until: I64, start: I64, end: I64) -> I64:
    """Returns how much of the intervals lies before each time of `until`."""
    if not len(start):
        return np.zeros(len(until), np.int64)
    total = pointers(end - start)
    last = np.searchsorted(start, until, side="right") - 1
    inside = np.minimum(until, end[last]) - start[last]
    covered: I64 = np.where(last >= 0, total[np.maximum(last, 0)] + inside, 0)
    return covered
