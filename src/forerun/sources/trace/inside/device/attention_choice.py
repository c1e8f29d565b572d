"""Chooses the kernel that scaled_dot_product_attention runs on a CUDA device, and calls the operator of that kernel.

A torch built for the CPU lacks CUDA's chooser and would run its unfused fallback for every tensor of the virtual
device. The rules here are those of sdp_utils.cpp and attention.cpp of torch 2.13 (its headers are in the wheel) for
dense tensors, with CUDA 13 and the cuDNN that its wheels bring.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch._C import DispatchKey

from forerun.sources.trace.inside.device.virtual_device import torch_build
from forerun.sources.trace.inside.unseen import rebind

Choice = Literal["flash", "efficient", "cudnn", "math"]
Capability = tuple[int, int]
Tensor = torch.Tensor

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


@dataclass(frozen=True)
class _Inputs:
    """The inputs of one call: tensors (batch, heads, seq, head size), and the device's compute capability."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout_p: float
    is_causal: bool
    enable_gqa: bool
    capability: Capability

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    def has_four_dims(self) -> bool:
        return all(tensor.dim() == 4 for tensor in self.tensors)

    def has_equal_dtypes(self, *allowed: torch.dtype) -> bool:
        return self.query.dtype in allowed and self.query.dtype == self.key.dtype == self.value.dtype

    def has_tokens(self) -> bool:
        return self.query.shape[-2] != 0 and self.key.shape[-2] != 0

    def half_dtypes(self) -> tuple[torch.dtype, ...]:
        return _HALF if self.capability[0] >= 8 else (torch.float16,)

    def last_dim_is_dense(self, ignore_singleton: bool) -> bool:
        dense = all(tensor.stride(-1) == 1 for tensor in self.tensors)
        dense = dense or (ignore_singleton and self.query.shape[-1] == 1)
        return dense and (self.mask is None or self.mask.stride(-1) == 1)

    def heads_match(self, grouped: bool, same_heads: bool = True) -> bool:
        """Returns whether batch sizes are equal, and the numbers of heads too; with `grouped` those of keys and values
        have to divide that of the queries."""
        if not self.query.shape[0] == self.key.shape[0] == self.value.shape[0]:
            return False
        heads, key_heads, value_heads = (tensor.shape[-3] for tensor in self.tensors)
        if not grouped:
            return bool(heads == key_heads == value_heads)
        if same_heads and key_heads != value_heads:
            return False
        return bool(heads % key_heads == 0 and (same_heads or heads % value_heads == 0))

    def mask_fits(self) -> bool:
        """Returns whether the mask needs no gradient and has 2 or 4 dims, each of size 1 or as in the scores."""
        mask, query = self.mask, self.query
        if mask is None:
            return True
        if mask.requires_grad or mask.dim() not in (2, 4):
            return False
        scores = (query.shape[0], query.shape[1], query.shape[2], self.key.shape[2])[-mask.dim() :]
        return all(size in (1, full) for size, full in zip(mask.shape, scores, strict=True))


def choose(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    enable_gqa: bool = False,
    capability: Capability = (9, 0),
) -> Choice:
    """Returns the kernel for queries (batch, heads, seq, head size) and their keys and values on a device of
    `capability`.

    It is the first one of torch's priority order (`sdpa_kernel(..., set_priority=True)`) that is enabled and accepts
    the inputs. `install` puts cuDNN first where torch would.

    Raises:
        RuntimeError: no enabled kernel accepts the inputs; the message is torch's own.
    """
    given = _Inputs(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, capability)
    for backend in map(int, torch._C._get_sdp_priority_order()):
        if backend == _FLASH and _flash_accepts(given):
            return "flash"
        if backend == _EFFICIENT and _efficient_accepts(given):
            return "efficient"
        if backend == _CUDNN and _cudnn_accepts(given):
            return "cudnn"
        if backend == _MATH and torch._C._get_math_sdp_enabled():
            return "math"
    raise RuntimeError("No available kernel. Aborting execution.")


def prefers_cudnn(capability: Capability) -> bool:
    """Returns whether torch puts cuDNN first on the device: on Hopper and on Blackwell for data centres."""
    switched_off = os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED", "")
    if switched_off in ("1", "ON", "YES", "TRUE", "Y", "on", "yes", "true", "y"):
        return False
    return torch_build().cudnn > 91500 and capability[0] in (9, 10) and capability[1] in (0, 3)


def _needs_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _flash_accepts(given: _Inputs) -> bool:
    capability, head_dim = given.capability, given.query.shape[-1]
    if not torch._C._get_flash_sdp_enabled() or not given.has_four_dims() or given.mask is not None:
        return False
    if not (head_dim == given.key.shape[-1] == given.value.shape[-1] and head_dim <= _MAX_HEAD_DIM):
        return False
    if not _OLDEST <= capability <= _NEWEST:
        return False
    if (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1):
        no_backward = 192 < head_dim <= 224 or (head_dim > 224 and given.dropout_p > 0.0)
        if no_backward and _needs_gradient(*given.tensors):
            return False
    if given.is_causal and given.query.shape[-2] != given.key.shape[-2]:
        return False
    fp8 = (torch.float8_e4m3fn,) if capability[0] >= 9 and torch._C._get_fa3_sdp_enabled() else ()
    return (
        given.has_equal_dtypes(*given.half_dtypes(), *fp8)
        and given.heads_match(given.enable_gqa)
        and given.has_tokens()
        and given.last_dim_is_dense(ignore_singleton=True)
    )


def _gemm_alignment(dtype: torch.dtype, capability: Capability) -> int:
    """Returns the number of elements to which CUTLASS wants rows aligned."""
    half = dtype in _HALF
    if capability[0] >= 8 or (capability[0] == 7 and half):
        return 8 if half else 4
    return 1


def _efficient_accepts(given: _Inputs) -> bool:
    capability = given.capability
    if not torch._C._get_mem_efficient_sdp_enabled() or not (5, 0) <= capability <= _NEWEST:
        return False
    if not given.has_four_dims():
        return False
    alignment = _gemm_alignment(given.query.dtype, capability)
    head_dim, value_dim = given.query.shape[-1], given.value.shape[-1]
    if head_dim != given.key.shape[-1] or not head_dim or not value_dim:
        return False
    if head_dim % alignment or value_dim % alignment:
        return False
    return (
        given.has_tokens()
        and given.last_dim_is_dense(ignore_singleton=False)
        and given.heads_match(grouped=False)
        and given.has_equal_dtypes(torch.float32, *given.half_dtypes())
    )


def _cudnn_accepts(given: _Inputs) -> bool:
    capability, query = given.capability, given.query
    strict = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    if not torch._C._get_cudnn_sdp_enabled() or not given.has_four_dims() or strict:
        return False
    if not _OLDEST <= capability <= _NEWEST or not given.has_equal_dtypes(*given.half_dtypes()):
        return False
    head_dim, value_dim = query.shape[3], given.value.shape[3]
    limit = 128
    if capability == (9, 0):
        limit = _MAX_HEAD_DIM
    elif capability[0] == 10 and (head_dim, value_dim) == (192, 128):
        limit = 192
    if max(head_dim, value_dim) > limit or head_dim % 8 or value_dim % 8:
        return False
    if given.key.shape[2] == 1 or (query.shape[2] == 1 and given.dropout_p != 0.0):
        return False
    return (
        given.mask_fits()
        and given.has_tokens()
        and given.last_dim_is_dense(ignore_singleton=True)
        and given.heads_match(given.enable_gqa, same_heads=False)
    )


# -- the operator ------------------------------------------------------------------------------------------------


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
    """Runs scaled_dot_product_attention as on a CUDA device of `capability`: the chosen operator, with torch's own work
    around it.

    Raises:
        RuntimeError: torch refuses the inputs.
    """
    aten = torch.ops.aten
    _check(query, key, value, attn_mask)
    choice = choose(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa=enable_gqa, capability=capability)
    tensors = (query, key, value)
    if choice == "flash":
        head_dim = query.shape[-1]
        q, k, v = (_padded(tensor) for tensor in tensors)
        out: Tensor = aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
        return out[..., :head_dim] if out.shape[-1] != head_dim else out
    gradient = _needs_gradient(*tensors)
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


def _given(params: Any, capability: Capability) -> _Inputs:
    """Returns the inputs that a program, or torch itself for nested tensors, asks about."""
    q, k, v = (_one_token(one) if one.is_nested else one for one in (params.query, params.key, params.value))
    return _Inputs(q, k, v, params.attn_mask, params.dropout, params.is_causal, params.enable_gqa, capability)


def _one_token(nested: Tensor) -> Tensor:
    """Returns a dense tensor that stands for a nested one, of whose ragged size torch asks nothing here."""
    batch, heads, head_dim = nested.size(0), nested.size(1), nested.size(-1)
    size = (batch, heads, 1, head_dim)
    return torch.empty(size, dtype=nested.dtype, device="meta", requires_grad=nested.requires_grad)


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

    def answers(accepts: Callable[[_Inputs], bool]) -> Callable[..., bool]:
        return lambda params, debug=False: accepts(_given(params, capability))

    cuda: Any = torch.backends.cuda
    asked = {"flash": _flash_accepts, "efficient": _efficient_accepts, "cudnn": _cudnn_accepts}
    rebind({id(getattr(cuda, f"can_use_{name}_attention")): answers(accepts) for name, accepts in asked.items()})
    if prefers_cudnn(capability):
        torch._C._set_sdp_priority_order(_CUDNN_FIRST)
    library: Any = torch.library.Library("aten", "IMPL")
    for key in ("AutogradCUDA", "CUDA"):
        library.impl("scaled_dot_product_attention", chosen, key)
    op.py_impl(DispatchKey.CompositeImplicitAutograd)(composite)
    _installed.append(library)
