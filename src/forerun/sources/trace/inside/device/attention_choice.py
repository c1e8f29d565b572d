"""Chooses the kernel that scaled_dot_product_attention runs on a CUDA device, and calls the operator of that kernel.

A torch built for the CPU lacks CUDA's chooser and would run its unfused fallback for every tensor of the virtual
device. The rules here are those of sdp_utils.cpp and attention.cpp of torch 2.13 (its headers are in the wheel) for
dense tensors, with CUDA 13 and the cuDNN that its wheels bring.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch._C import DispatchKey

Choice = Literal["flash", "efficient", "cudnn", "math"]
Capability = tuple[int, int]

CUDNN_VERSION = 92000
"""9.20; what the choice asks of it (9.10 for wide heads, 9.15.1 to be preferred) holds for any later one"""
_MATH, _FLASH, _EFFICIENT, _CUDNN, _OVERRIDEABLE = range(5)
"""The values of at::SDPBackend."""
_CUDNN_FIRST = [_CUDNN, _FLASH, _EFFICIENT, _MATH, _OVERRIDEABLE]
_FLASH_ALIGNMENT = 8
_MASK_ALIGNMENT = 8
_CUDNN_LOWEST = -65504.0
"""The value that cuDNN takes for minus infinity."""
_MAX_HEAD_DIM = 256
_HALF = (torch.float16, torch.bfloat16)
_OLDEST, _NEWEST = (8, 0), (12, 1)

Tensor = torch.Tensor


def choose(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    capability: Capability = (9, 0),
) -> Choice:
    """Returns the kernel for queries (batch, heads, seq, head size) and their keys and values on a device of
    `capability`.

    It is the first one of torch's priority order (`sdpa_kernel(..., set_priority=True)`) that is enabled and accepts
    the inputs. `install` puts cuDNN first where torch would.

    Raises:
        RuntimeError: no enabled kernel accepts the inputs; the message is torch's own.
    """
    tensors = (query, key, value)
    takes: dict[int, tuple[Choice, Callable[[], bool]]] = {
        _FLASH: (
            "flash",
            lambda: _flash_takes(tensors, attn_mask, dropout_p, is_causal, enable_gqa, capability),
        ),
        _EFFICIENT: (
            "efficient",
            lambda: _efficient_takes(tensors, attn_mask, enable_gqa, capability),
        ),
        _CUDNN: (
            "cudnn",
            lambda: _cudnn_takes(tensors, attn_mask, dropout_p, enable_gqa, capability),
        ),
        _MATH: ("math", torch._C._get_math_sdp_enabled),
    }
    for backend in torch._C._get_sdp_priority_order():
        name, taken = takes.get(int(backend), ("math", lambda: False))
        if taken():
            return name
    raise RuntimeError("No available kernel. Aborting execution.")


def prefers_cudnn(capability: Capability) -> bool:
    """Returns whether torch puts cuDNN first on the device: on Hopper and on Blackwell for data centres."""
    if os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED", "") in (
        "1",
        "ON",
        "YES",
        "TRUE",
        "Y",
        "on",
        "yes",
        "true",
        "y",
    ):
        return False
    return CUDNN_VERSION > 91500 and capability[0] in (9, 10) and capability[1] in (0, 3)


def _needs_gradient(tensors: tuple[Tensor, ...]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _four_dims(tensors: tuple[Tensor, ...]) -> bool:
    return all(tensor.dim() == 4 for tensor in tensors)


def _heads_match(tensors: tuple[Tensor, ...], grouped: bool, same_heads: bool = True) -> bool:
    """Returns whether batch sizes are equal, and the numbers of heads too; with `grouped` those of keys and values have
    to divide that of the queries."""
    query, key, value = tensors
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        return False
    heads, key_heads, value_heads = (tensor.shape[-3] for tensor in tensors)
    if not grouped:
        return bool(heads == key_heads == value_heads)
    if same_heads and key_heads != value_heads:
        return False
    return bool(heads % key_heads == 0 and (same_heads or heads % value_heads == 0))


def _last_dim_dense(tensors: tuple[Tensor, ...], mask: Tensor | None, ignore_singleton: bool) -> bool:
    dense = all(tensor.stride(-1) == 1 for tensor in tensors)
    dense = dense or (ignore_singleton and tensors[0].shape[-1] == 1)
    return dense and (mask is None or mask.stride(-1) == 1)


def _sequences_not_empty(tensors: tuple[Tensor, ...]) -> bool:
    return bool(tensors[0].shape[-2] != 0 and tensors[1].shape[-2] != 0)


def _half_precision(tensors: tuple[Tensor, ...], capability: Capability, more: tuple[torch.dtype, ...] = ()) -> bool:
    allowed = (*_HALF, *more) if capability[0] >= 8 else (torch.float16, *more)
    return tensors[0].dtype in allowed and len({tensor.dtype for tensor in tensors}) == 1


def _flash_takes(
    tensors: tuple[Tensor, ...],
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
    capability: Capability,
) -> bool:
    query, key, value = tensors
    if not torch._C._get_flash_sdp_enabled() or not _four_dims(tensors) or mask is not None:
        return False
    head_dim = query.shape[-1]
    if not (head_dim == key.shape[-1] == value.shape[-1] and head_dim <= _MAX_HEAD_DIM):
        return False
    if not _OLDEST <= capability <= _NEWEST:
        return False
    if (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1):
        untrained = 192 < head_dim <= 224 or (head_dim > 224 and dropout_p > 0.0)
        if untrained and _needs_gradient(tensors):
            return False
    if is_causal and query.shape[-2] != key.shape[-2]:
        return False
    fp8 = (torch.float8_e4m3fn,) if capability[0] >= 9 and torch._C._get_fa3_sdp_enabled() else ()
    return (
        _half_precision(tensors, capability, fp8)
        and _heads_match(tensors, enable_gqa)
        and _sequences_not_empty(tensors)
        and _last_dim_dense(tensors, mask, True)
    )


def _gemm_alignment(dtype: torch.dtype, capability: Capability) -> int:
    """Returns the number of elements to which CUTLASS wants rows aligned."""
    half = dtype in _HALF
    alignment = 4 if capability[0] >= 8 else 1
    if capability[0] >= 8 or (capability[0] == 7 and half):
        alignment = max(alignment, 8 if half else 4)
    return alignment


def _efficient_takes(
    tensors: tuple[Tensor, ...], mask: Tensor | None, enable_gqa: bool, capability: Capability
) -> bool:
    query, key, value = tensors
    if not torch._C._get_mem_efficient_sdp_enabled() or not (5, 0) <= capability <= _NEWEST:
        return False
    if not _four_dims(tensors):
        return False
    alignment = _gemm_alignment(query.dtype, capability)
    head_dim, value_dim = query.shape[-1], value.shape[-1]
    if head_dim != key.shape[-1] or not head_dim or not value_dim:
        return False
    if head_dim % alignment or value_dim % alignment:
        return False
    dtypes = (torch.float16, torch.float32, *((torch.bfloat16,) if capability[0] >= 8 else ()))
    return (
        _sequences_not_empty(tensors)
        and _last_dim_dense(tensors, mask, False)
        and _heads_match(tensors, grouped=False)
        and query.dtype in dtypes
        and len({tensor.dtype for tensor in tensors}) == 1
    )


def _mask_fits(query: Tensor, key: Tensor, mask: Tensor | None) -> bool:
    """Returns whether a mask needs no gradient and has 2 or 4 dims, each of size 1 or as in the scores."""
    if mask is None:
        return True
    if mask.requires_grad or mask.dim() not in (2, 4):
        return False
    wanted = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])[-mask.dim() :]
    return all(size in (1, full) for size, full in zip(mask.shape, wanted, strict=True))


def _cudnn_takes(
    tensors: tuple[Tensor, ...], mask: Tensor | None, dropout_p: float, enable_gqa: bool, capability: Capability
) -> bool:
    query, key, value = tensors
    strict = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    if not torch._C._get_cudnn_sdp_enabled() or not _four_dims(tensors) or strict:
        return False
    if not _OLDEST <= capability <= _NEWEST or not _half_precision(tensors, capability):
        return False
    head_dim, value_dim, seq_q, seq_kv = query.shape[3], value.shape[3], query.shape[2], key.shape[2]
    limit = 128
    if capability == (9, 0):
        limit = _MAX_HEAD_DIM
    elif capability[0] == 10 and (head_dim, value_dim) == (192, 128):
        limit = 192
    if max(head_dim, value_dim) > limit or head_dim % 8 or value_dim % 8:
        return False
    if seq_kv == 1 or (seq_q == 1 and dropout_p != 0.0):
        return False
    return (
        _mask_fits(query, key, mask)
        and _sequences_not_empty(tensors)
        and _last_dim_dense(tensors, mask, True)
        and _heads_match(tensors, enable_gqa, same_heads=False)
    )


# -- the op ------------------------------------------------------------------------------------------------------


def _additive(mask: Tensor | None, dtype: torch.dtype, lowest: float) -> Tensor | None:
    """Returns the mask in the form that is added to scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.scalar_tensor(lowest, dtype=dtype, device=mask.device))


def _padded(tensor: Tensor) -> Tensor:
    """Appends zeros to the last dim up to a multiple of 8, which flash-attention requires."""
    missing = -tensor.shape[-1] % _FLASH_ALIGNMENT
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _aligned(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Returns the mask with rows that start at multiples of 8 elements, expanded to all batches and heads."""
    strides = mask.stride()
    if strides[-1] != 1 or any(stride % _MASK_ALIGNMENT for stride in strides[:-1]):
        size = mask.shape[-1]
        padding = _MASK_ALIGNMENT - size % _MASK_ALIGNMENT
        mask = torch.nn.functional.pad(mask, (0, padding))[..., :size]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _check(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> None:
    if not query.dtype == key.dtype == value.dtype:
        raise RuntimeError(
            f"Expected query, key, and value to have the same dtype, but got query.dtype: {query.dtype} "
            f"key.dtype: {key.dtype} and value.dtype: {value.dtype} instead."
        )
    if min(query.dim(), key.dim(), value.dim()) < 2:
        raise RuntimeError("Expected query, key, and value to all be at least 2 dimensional")
    if mask is not None and mask.dtype not in (torch.bool, query.dtype) and query.dtype != torch.float32:
        raise RuntimeError(
            f"Expected attn_mask dtype to be bool or float or to match query dtype, but got attn_mask.dtype: "
            f"{mask.dtype} and query.dtype: {query.dtype} instead."
        )


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    capability: Capability = (9, 0),
) -> Tensor:
    """Runs scaled_dot_product_attention as on a CUDA device of `capability`: the chosen operator, with what torch does
    around it.

    Raises:
        RuntimeError: torch refuses the inputs.
    """
    aten = torch.ops.aten
    _check(query, key, value, attn_mask)
    choice = choose(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, capability=capability)
    tensors = (query, key, value)
    if choice == "flash":
        head_dim = query.shape[-1]
        scale = 1.0 / math.sqrt(head_dim) if scale is None else scale
        q, k, v = (_padded(tensor) for tensor in tensors)
        out: Tensor = aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
        return out[..., :head_dim] if out.shape[-1] != head_dim else out
    gradient = _needs_gradient(tensors)
    if choice == "cudnn":
        mask = _additive(attn_mask, query.dtype, _CUDNN_LOWEST)
        made = aten._scaled_dot_product_cudnn_attention(
            *tensors, mask, gradient, dropout_p, is_causal, False, scale=scale
        )
        return made[0]
    mask = _additive(attn_mask, query.dtype, -math.inf)
    if choice == "efficient":
        mask = None if mask is None else _aligned(mask, query, key)
        made = aten._scaled_dot_product_efficient_attention(*tensors, mask, gradient, dropout_p, is_causal, scale=scale)
        return made[0]
    return aten._scaled_dot_product_attention_math(
        *tensors, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]


_installed: list[Any] = []
"""A library's registrations end when the library is deleted."""


def install(capability: Capability = (9, 0)) -> None:
    """Makes scaled_dot_product_attention choose for CUDA tensors as on a device of `capability`, for the rest of the
    process.

    Tensors of other devices keep torch's own implementation. Under inference mode a dispatch mode receives the
    composite operator itself, whose `decompose` makes the choice as well.
    """
    op = torch.ops.aten.scaled_dot_product_attention.default

    def chosen(*args: Any, **kwargs: Any) -> Tensor:
        return attend(*args, **kwargs, capability=capability)

    def composite(*args: Any, **kwargs: Any) -> Any:
        if args[0].device.type == "cuda":
            return chosen(*args, **kwargs)
        return op._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)

    if prefers_cudnn(capability):
        torch._C._set_sdp_priority_order(_CUDNN_FIRST)
    library: Any = torch.library.Library("aten", "IMPL")
    for key in ("AutogradCUDA", "CUDA"):
        library.impl("scaled_dot_product_attention", chosen, key)
    op.py_impl(DispatchKey.CompositeImplicitAutograd)(composite)
    _installed.append(library)
