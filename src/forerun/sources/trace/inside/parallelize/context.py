"""Context parallelism: splits the sequence of inputs and position tables over ranks and makes attention communicate."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import nn

from forerun.common.errors import ForerunError
from forerun.describe.plan.plan import Plan

_ROTATE = {"ring": "alltoall", "allgather": "allgather"}


def context(plan: Plan, mesh: Any, parts: Sequence[nn.Module], inputs: Sequence[Any]) -> Any:
    """Returns the context in which the forward and backward pass of a micro batch see a part of the sequence.

    Raises:
        ForerunError: no input has the sequence as its second dimension.
    """
    if mesh is None:
        return contextlib.nullcontext()
    experimental = import_module("torch.distributed.tensor.experimental._attention")  # Imports torch's compiler.
    experimental.set_rotate_method(_ROTATE[plan.cp_method])
    experimental._cp_options.enable_load_balance = plan.cp_load_balance == "head_tail"
    split = [t for t in inputs if isinstance(t, torch.Tensor) and t.dim() > 1 and t.shape[1] == plan.seq_len]
    if not split:
        shapes = ", ".join(str(tuple(t.shape)) for t in inputs if isinstance(t, torch.Tensor))
        raise ForerunError(f"cp {plan.cp}: no input has seq_len {plan.seq_len} as its second dimension: {shapes}")
    tables = [(buffer, dim) for part in parts for buffer in part.buffers() if (dim := _sequence(buffer, plan)) >= 0]
    return experimental.context_parallel(
        mesh,
        buffers=[*split, *(buffer for buffer, _ in tables)],
        buffer_seq_dims=[1] * len(split) + [dim for _, dim in tables],
        no_restore_buffers=set(split),
    )


def _sequence(buffer: torch.Tensor, plan: Plan) -> int:
    """Returns the dimension of a table that counts positions, -1 for none."""
    return next((dim for dim, size in enumerate(buffer.shape) if size == plan.seq_len), -1)
