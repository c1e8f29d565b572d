"""Tensors: the tensors of several blocks as columns, so that readers process all blocks at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forerun.core.program.types import I8, I32, I64, Block, Mask


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensors of several blocks, block by block; each column is (n_tensors,)."""

    block: I64
    """number of the block that each tensor is in"""
    size_bytes: I64
    category: I8
    alloc: I32
    """node of the block before which the tensor is allocated; -1: it is allocated before the block"""
    free: I32
    """node after which it is freed; -1: it outlives the block"""

    def take(self, kept: Mask) -> Tensors:
        """Returns the tensors where `kept` (n_tensors,) holds."""
        return Tensors(self.block[kept], self.size_bytes[kept], self.category[kept], self.alloc[kept], self.free[kept])


def tensors_of(blocks: Sequence[Block]) -> Tensors:
    """Returns the tensors of `blocks`, a non-empty list."""
    return Tensors(
        np.repeat(np.arange(len(blocks)), [len(block.tensor_bytes) for block in blocks]),
        np.concatenate([block.tensor_bytes for block in blocks]),
        np.concatenate([block.tensor_category for block in blocks]),
        np.concatenate([block.tensor_alloc for block in blocks]),
        np.concatenate([block.tensor_free for block in blocks]),
    )
