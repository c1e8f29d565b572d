"""Allocated memory of a Program over its steps, by category, with the owner of the peak.

Allocation follows the host's issue order, as PyTorch's caching allocator counts it, not the device's time. A block's
rise and fall is computed once; a rank class is the running sum over its blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forerun.common.arrays import pointers
from forerun.core.program.tensors import Tensors, tensors_of
from forerun.core.program.types import I64, N_CATEGORIES, Block, Category, Mask, Program


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Bytes of one rank class. The peak is of allocated bytes (torch.cuda.max_memory_allocated)."""

    rank_class: str
    peak_bytes: int
    peak_step: int
    """step of the rank class at which the peak stands"""
    peak_node: int
    """node of that step's block"""
    by_category: dict[str, int]
    """bytes at the peak; the sum is peak_bytes"""
    step_bytes: I64
    """allocated bytes at the start of each step, (n_steps,)"""

    def owner(self, program: Program, rank: int) -> str:
        """Returns the block and operation at which the peak stands, in words."""
        cls = program.rank_classes[rank]
        block = program.blocks[int(cls.block[self.peak_step])]
        op = program.ops.name[int(block.op[min(self.peak_node, len(block) - 1)])] if len(block) else "what is kept"
        layer = int(cls.layer[self.peak_step])
        where = f" of layer {layer}" if layer >= 0 else ""
        return f"{op} in {block.name}{where}, micro batch {int(cls.microbatch[self.peak_step])}"


IN_GRAPHS = (Category.ACTIVATION, Category.TEMPORARY, Category.UNSHARDED)
"""tensors of compiled code; of the tensors of eager code beside it, gradients, optimizer states and logits have their
own categories
"""


def profile(program: Program, without: Sequence[Category] = ()) -> list[MemoryProfile]:
    """Returns one MemoryProfile for each rank class, `without` tensors of some categories."""
    tensors = tensors_of(program.blocks)
    if without:
        tensors = tensors.take(~np.isin(tensors.category, without))
    net, rise, nodes = _shapes(tensors, program.blocks)
    left_out = np.isin(np.arange(N_CATEGORIES), without)
    profiles = []
    for cls in program.rank_classes:
        total = net.sum(axis=1)[cls.block]
        resident = np.where(left_out, 0, cls.resident_bytes)
        start = int(resident.sum()) + np.concatenate(([0], np.cumsum(total)[:-1]))
        peaks = start + rise[cls.block]
        step = int(np.argmax(peaks))
        block = int(cls.block[step])
        by_category = resident + net[cls.block[:step]].sum(axis=0)
        by_category = by_category + _within(tensors, block, int(nodes[block]))
        names = {Category(i).name.lower(): n for i, n in enumerate(by_category.tolist()) if n}
        profiles.append(MemoryProfile(cls.name, int(peaks[step]), step, int(nodes[block]), names, start))
    return profiles


def rises_and_falls(blocks: Sequence[Block]) -> tuple[I64, I64]:
    """Returns two figures of each of `blocks`, (n_blocks,) each.

    They are the most bytes that it allocates above those at its start, and the bytes that it leaves allocated beside
    those.
    """
    net, rise, _ = _shapes(tensors_of(blocks), blocks)
    return rise, net.sum(axis=1)


def _shapes(tensors: Tensors, blocks: Sequence[Block]) -> tuple[I64, I64, I64]:
    """Returns the rise and fall of the memory of each block.

    They are the bytes left behind by category (n_blocks, N_CATEGORIES), the highest total above the block's start
    (n_blocks,), and the first node at which it stands (n_blocks,).
    """
    made, freed = tensors.alloc >= 0, tensors.free >= 0
    net = _by_category(tensors, made & ~freed, freed & ~made, len(blocks))
    # Each node has two moments, one to allocate at and one to free at; those of all blocks are in one row.
    start = 2 * pointers([max(1, len(block)) for block in blocks])
    change = np.zeros(start[-1], np.int64)
    first = start[tensors.block]
    np.add.at(change, (first + 2 * tensors.alloc)[made], tensors.size_bytes[made])
    np.subtract.at(change, (first + 2 * tensors.free + 1)[freed], tensors.size_bytes[freed])
    level = np.cumsum(change)
    before = level[start[:-1]] - change[start[:-1]]
    highest = np.maximum.reduceat(level, start[:-1])
    at_peak = np.flatnonzero(level == np.repeat(highest, np.diff(start)))
    first_at_peak = at_peak[np.searchsorted(at_peak, start[:-1])]
    return net, highest - before, (first_at_peak - start[:-1]) // 2


def _within(tensors: Tensors, block: int, node: int) -> I64:
    """Returns the bytes by category above the start of `block`, at the moment its `node` runs."""
    here = tensors.take(tensors.block == block)
    made = (here.alloc >= 0) & (here.alloc <= node)
    freed = (here.free >= 0) & (here.free < node)
    within: I64 = _by_category(here, made, freed, block + 1)[block]
    return within


def _by_category(tensors: Tensors, made: Mask, freed: Mask, n_blocks: int) -> I64:
    """Returns the bytes of the tensors `made` less those `freed`, (n_blocks, N_CATEGORIES)."""
    change = made.astype(np.int64) - freed
    out = np.zeros(n_blocks * N_CATEGORIES, np.int64)
    np.add.at(out, tensors.block * N_CATEGORIES + tensors.category, change * tensors.size_bytes)
    return out.reshape(n_blocks, N_CATEGORIES)
