"""Allocated memory of a Program over its steps, by category, with the owner of the peak.

Allocation follows the host's issue order, as PyTorch's caching allocator counts it, not the device's time. A block's
rise and fall is computed once; a rank class is the running sum over its blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from forerun.core.program.types import I64, N_CATEGORIES, Block, Category, Program


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
        """Block and operation at which the peak stands, in words."""
        cls = program.rank_classes[rank]
        block = program.blocks[int(cls.block[self.peak_step])]
        op = program.ops.name[int(block.op[min(self.peak_node, len(block) - 1)])] if len(block) else "what is kept"
        layer = int(cls.layer[self.peak_step])
        where = f" of layer {layer}" if layer >= 0 else ""
        return f"{op} in {block.name}{where}, micro batch {int(cls.microbatch[self.peak_step])}"


@dataclass(frozen=True, slots=True)
class _Shape:
    """The rise and fall of one block's memory."""

    net: I64
    """bytes left behind by category"""
    peak: int
    """highest total above the block's start"""
    node: int


def _times(block: Block) -> tuple[I64, I64, I64, I64]:
    """(time, bytes) of allocations and frees; node i allocates at 2 i and frees at 2 i + 1."""
    alloc, free = block.tensor_alloc >= 0, block.tensor_free >= 0
    return (
        2 * block.tensor_alloc[alloc].astype(np.int64),
        block.tensor_bytes[alloc],
        2 * block.tensor_free[free].astype(np.int64) + 1,
        block.tensor_bytes[free],
    )


def _shape(block: Block) -> _Shape:
    net = np.zeros(N_CATEGORIES, np.int64)
    kept = (block.tensor_alloc >= 0) & (block.tensor_free < 0)
    gone = (block.tensor_alloc < 0) & (block.tensor_free >= 0)
    np.add.at(net, block.tensor_category[kept], block.tensor_bytes[kept])
    np.subtract.at(net, block.tensor_category[gone], block.tensor_bytes[gone])
    t_alloc, b_alloc, t_free, b_free = _times(block)
    if not len(t_alloc):
        return _Shape(net, 0, 0)
    change = np.zeros(2 * max(1, len(block)) + 2, np.int64)
    np.add.at(change, t_alloc, b_alloc)
    np.subtract.at(change, t_free, b_free)
    level = np.cumsum(change)
    at = int(np.argmax(level))
    return _Shape(net, max(0, int(level[at])), at // 2)


IN_GRAPHS = (Category.ACTIVATION, Category.TEMPORARY, Category.UNSHARDED)
"""what compiled code makes; of what eager code makes beside it, gradients, optimizer states and logits are apart"""


def profile(program: Program, without: Sequence[Category] = ()) -> list[MemoryProfile]:
    """One MemoryProfile for each rank class, `without` tensors of some categories."""
    if without:
        left = tuple(_without(block, without) for block in program.blocks)
        program = replace(program, blocks=left)
    shapes = [_shape(block) for block in program.blocks]
    net = np.array([shape.net for shape in shapes], np.int64).reshape(-1, N_CATEGORIES)
    rise = np.array([shape.peak for shape in shapes], np.int64)
    profiles = []
    for cls in program.rank_classes:
        total = net.sum(axis=1)[cls.block]
        start = int(cls.resident_bytes.sum()) + np.concatenate(([0], np.cumsum(total)[:-1]))
        peaks = start + rise[cls.block]
        step = int(np.argmax(peaks))
        node = shapes[int(cls.block[step])].node
        by_category = cls.resident_bytes + net[cls.block[:step]].sum(axis=0)
        by_category = by_category + _within(program.blocks[int(cls.block[step])], node)
        names = {Category(i).name.lower(): int(n) for i, n in enumerate(by_category) if n}
        profiles.append(MemoryProfile(cls.name, int(peaks[step]), step, node, names, start))
    return profiles


def _without(block: Block, categories: Sequence[Category]) -> Block:
    kept = ~np.isin(block.tensor_category, categories)
    columns = ("tensor_bytes", "tensor_category", "tensor_alloc", "tensor_free")
    return replace(block, **{name: getattr(block, name)[kept] for name in columns})


def _within(block: Block, node: int) -> I64:
    """Bytes by category above the block's start, at the moment `node` runs."""
    out = np.zeros(N_CATEGORIES, np.int64)
    made = (block.tensor_alloc >= 0) & (block.tensor_alloc <= node)
    freed = (block.tensor_free >= 0) & (block.tensor_free < node)
    np.add.at(out, block.tensor_category[made], block.tensor_bytes[made])
    np.subtract.at(out, block.tensor_category[freed], block.tensor_bytes[freed])
    return out
