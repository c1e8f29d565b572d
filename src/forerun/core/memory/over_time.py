"""Allocated memory of one rank class over its step, by category.

Allocation follows the host's order of issue, as in `profile`. The device gets there later, so that a change is shown
when the device has reached its node: the curve lies beside the timeline of the streams.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forerun.core.engine.simulate import Timeline
from forerun.core.program.types import I64, N_CATEGORIES, Block, FlatProgram, Program

_POINTS = 2000
"""how many points a curve keeps unless asked for more"""


@dataclass(frozen=True, slots=True)
class MemoryOverTime:
    """Bytes of one rank class at some moments of its step, which hold until the next one."""

    rank_class: str
    time_ps: I64
    """when the device gets there, never falling, (n,)"""
    by_category: I64
    """allocated bytes, (n, N_CATEGORIES)"""

    @property
    def total(self) -> I64:
        """Returns the allocated bytes, (n,)."""
        total: I64 = self.by_category.sum(axis=1)
        return total

    @property
    def peak(self) -> int:
        """Returns the point at which most is allocated."""
        return int(np.argmax(self.total))


def memory_over_time(
    program: Program, flat: FlatProgram, timeline: Timeline, rank_class: int, points: int = _POINTS
) -> MemoryOverTime:
    """Returns the memory of one rank class; `flat` and `timeline` are of the unfolded `program`.

    With more changes than `points`, every interval of equally many changes keeps its highest and its lowest moment: the
    peak is always there, and is `profile`'s peak_bytes.
    """
    cls = program.rank_classes[rank_class]
    shapes = {number: _changes(program.blocks[number]) for number in np.unique(cls.block).tolist()}
    steps = cls.block.tolist()
    lengths = np.array([len(program.blocks[number]) for number in steps], np.int64)
    first = int(flat.class_ptr[rank_class]) + np.concatenate(([0], np.cumsum(lengths)[:-1]))
    counts = np.array([len(shapes[number].node) for number in steps], np.int64)
    node = _joined([shapes[number].node for number in steps]) + np.repeat(first, counts)
    nets = {number: shape.change.sum(axis=1) for number, shape in shapes.items()}
    kept = _kept(np.cumsum(_joined([nets[number] for number in steps])), points)
    by_category = np.tile(cls.resident_bytes, (len(kept) + 1, 1))
    if len(kept):
        starts = np.concatenate(([0], kept[:-1] + 1))
        for category in range(N_CATEGORIES):  # one after the other: a long step has millions of changes
            change = _joined([shapes[number].change[:, category] for number in steps])
            by_category[1:, category] += np.cumsum(np.add.reduceat(change, starts))
    nodes = slice(int(flat.class_ptr[rank_class]), int(flat.class_ptr[rank_class + 1]))
    reached = np.maximum.accumulate(timeline.start_ps[nodes])
    offset = np.minimum(node[kept] - nodes.start, len(reached) - 1)
    times = reached[offset] if len(reached) else np.zeros(len(kept), np.int64)
    return MemoryOverTime(cls.name, np.concatenate(([0], times)), by_category)


@dataclass(frozen=True, slots=True)
class _Changes:
    """The changes that one block makes to memory, in order."""

    node: I64
    """(n,)"""
    change: I64
    """bytes, (n, N_CATEGORIES)"""


def _changes(block: Block) -> _Changes:
    """Returns the changes of memory. Node i allocates at 2 i and frees at 2 i + 1. Simultaneous events are one
    change.
    """
    alloc, free = block.tensor_alloc >= 0, block.tensor_free >= 0
    moment = np.concatenate(
        [2 * block.tensor_alloc[alloc].astype(np.int64), 2 * block.tensor_free[free].astype(np.int64) + 1]
    )
    size = np.concatenate([block.tensor_bytes[alloc], -block.tensor_bytes[free]])
    category = np.concatenate([block.tensor_category[alloc], block.tensor_category[free]])
    moments, place = np.unique(moment, return_inverse=True)
    change = np.zeros((len(moments), N_CATEGORIES), np.int64)
    np.add.at(change, (place, category), size)
    return _Changes(moments // 2, change)


def _kept(total: I64, points: int) -> I64:
    """Returns the moments to keep: all, or the highest and the lowest of every interval, and the last."""
    if len(total) <= points:
        return np.arange(len(total))
    edges = np.linspace(0, len(total), max(1, points // 2) + 1).astype(np.int64)
    chosen = {len(total) - 1}
    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        chosen |= {low + int(np.argmax(total[low:high])), low + int(np.argmin(total[low:high]))}
    return np.array(sorted(chosen), np.int64)


def _joined(parts: list[I64]) -> I64:
    return np.concatenate([np.zeros(0, np.int64), *parts])
