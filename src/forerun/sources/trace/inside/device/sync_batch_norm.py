"""Output shapes of the kernels of SyncBatchNorm, which torch has for CUDA only and without fake versions."""

from __future__ import annotations

from typing import Any

import torch

_library: Any = torch.library.Library("aten", "IMPL", "Meta")


def install() -> None:
    """Lets SyncBatchNorm run on fake tensors."""
    for name, shapes in (
        ("batch_norm_stats", _two_statistics),
        ("batch_norm_update_stats", _two_statistics),
        ("batch_norm_gather_stats", _two_statistics),
        ("batch_norm_gather_stats_with_counts", _two_statistics),
        ("batch_norm_elemt", _like_first),
        ("batch_norm_backward_elemt", _like_first),
        ("batch_norm_backward_reduce", _gradients),
    ):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
            _library.impl(name, shapes)


def _statistics(tensor: torch.Tensor) -> torch.Tensor:
    """Returns one number per channel, in fp32 for half-precision inputs (at::acc_type)."""
    dtype = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype
    return tensor.new_empty(tensor.shape[1], dtype=dtype)


def _two_statistics(tensor: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _statistics(tensor), _statistics(tensor)


def _like_first(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(tensor)


def _gradients(
    _grad: torch.Tensor,
    tensor: torch.Tensor,
    mean: torch.Tensor,
    _invstd: torch.Tensor,
    weight: torch.Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[torch.Tensor, ...]:
    """Returns two sums for the input's gradient and the gradients of weight and bias; empty ones where they are not
    asked for."""
    like = mean if weight is None else weight
    channels = tensor.shape[1]
    sums = [mean.new_empty(channels if input_g else 0) for _ in range(2)]
    return *sums, like.new_empty(channels if weight_g else 0), like.new_empty(channels if bias_g else 0)
