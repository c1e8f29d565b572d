"""The workspaces of cuBLAS, which PyTorch and Transformer Engine allocate once and keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from forerun.common.shipped import shipped
from forerun.common.units import KIB
from forerun.core.program.types import I8, I32, Category, Mask, Phase, Program, RankClass

_OTHER = "other"


@dataclass(frozen=True, slots=True)
class WorkspaceModel:
    """Everything in workspaces.yaml."""

    blas_kib: dict[str, int]
    """size by the architecture of the device"""
    blas_source: str
    transformer_engine_kib: dict[str, int]
    """size of Transformer Engine's own by the architecture of the device"""
    transformer_engine_source: str


def workspace_bytes(architecture: str, count: int, transformer_engine: bool = False) -> int:
    """Returns the bytes of `count` workspaces on a device of `architecture`, and of Transformer Engine's own."""
    model = shipped(WorkspaceModel, "forerun.core.memory", "workspaces.yaml")
    size, own = (sizes.get(architecture, sizes[_OTHER]) for sizes in (model.blas_kib, model.transformer_engine_kib))
    return (size * count + own * transformer_engine) * KIB


def with_workspaces(program: Program, counts: Sequence[int], architecture: str) -> Program:
    """Returns `program` with the workspaces of each rank class, `counts`, as memory that lasts through the step."""

    def with_own(cls: RankClass, count: int) -> RankClass:
        more = np.zeros_like(cls.resident_bytes)
        more[Category.TEMPORARY] = workspace_bytes(architecture, count)
        return replace(cls, resident_bytes=cls.resident_bytes + more)

    classes = map(with_own, program.rank_classes, counts)
    return replace(program, rank_classes=tuple(classes))


def workspace_count(products: Mask, phase: I8, stream: I32) -> int:
    """Returns how many workspaces a step has: one for each stream and thread with matrix products.

    The columns are those of the nodes of a rank; `products` says which are matrix products. The backward pass, with
    what it computes again, runs in a thread of its own.
    """
    behind = np.isin(phase[products], (Phase.BACKWARD, Phase.RECOMPUTE))
    return len(set(zip(behind.tolist(), stream[products].tolist(), strict=True)))
