"""The workspaces of cuBLAS, which PyTorch and Transformer Engine allocate once and keep."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from forerun.common.shipped import shipped
from forerun.common.units import KIB
from forerun.core.program.types import I8, I32, Category, Mask, Phase, Program, RankClass
from forerun.describe.stacks.stack import Stack

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


def workspace_bytes(stack: Stack, architecture: str) -> int:
    """Returns the bytes of all workspaces that a rank has under `stack` on a device of `architecture`."""
    model = _model()
    own = _on(model.transformer_engine_kib, architecture) if stack.transformer_engine else 0
    return blas_workspace_bytes(architecture) * stack.blas_workspaces + own


def _model() -> WorkspaceModel:
    return shipped(WorkspaceModel, "forerun.core.memory", "workspaces.yaml")


def _on(sizes_kib: dict[str, int], architecture: str) -> int:
    """Returns the bytes of a workspace on a device of `architecture`."""
    return sizes_kib.get(architecture, sizes_kib[_OTHER]) * KIB


def configured_bytes(setting: str) -> int | None:
    """Returns the bytes of a workspace of cuBLAS under a value of CUBLAS_WORKSPACE_CONFIG, such as `:4096:8`.

    Each `:KIB:NUMBER` adds its buffers, as in parseChosenWorkspaceSize (aten/src/ATen/cuda/CublasHandlePool.cpp).
    Returns None for a value without any, for which PyTorch takes its own size.
    """
    pairs = re.findall(r":([0-9]{1,12}):([0-9]{1,6})", setting)
    return sum(int(kib) * KIB * int(number) for kib, number in pairs) if pairs else None


def blas_workspace_bytes(architecture: str) -> int:
    """Returns the bytes of a workspace of cuBLAS on a device of `architecture` where no setting says another size."""
    return _on(_model().blas_kib, architecture)


def with_workspaces(program: Program, counts: Sequence[int], size: int) -> Program:
    """Returns `program` with the workspaces of each rank class, `counts` of `size` bytes each, allocated throughout."""

    def with_own(cls: RankClass, count: int) -> RankClass:
        more = np.zeros_like(cls.resident_bytes)
        more[Category.TEMPORARY] = size * count
        return replace(cls, resident_bytes=cls.resident_bytes + more)

    classes = map(with_own, program.rank_classes, counts)
    return replace(program, rank_classes=tuple(classes))


def workspace_count(products: Mask, phase: I8, stream: I32) -> int:
    """Returns how many workspaces a step has: one for each stream and thread with matrix products.

    The columns are those of the nodes of a rank; `products` says which are matrix products. The backward pass and its
    recomputation run in a separate thread.
    """
    behind = np.isin(phase[products], (Phase.BACKWARD, Phase.RECOMPUTE))
    return len(set(zip(behind.tolist(), stream[products].tolist(), strict=True)))
