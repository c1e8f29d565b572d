"""Stands for FlashAttention-3, which installs only beside CUDA: the functions of `flash_attn_interface`.

The two operators have the names of the package's own, by which describe/kernels/attention.yaml knows its kernel. A
function that is missing here is an ImportError or AttributeError by its name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from forerun.common.errors import ForerunError


@torch.library.custom_op("flash_attn_3::_flash_attn_forward", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
) -> tuple[Tensor, Tensor]:
    return _results(q, v)


def _results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the output, in bf16 for inputs of 8 bits, and the log-sum-exp of each query and head."""
    *outer, heads, _ = q.shape
    dtype = torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype
    rows = (*outer[:-1], heads, outer[-1])
    return q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=dtype), q.new_empty(rows, dtype=torch.float32)


@torch.library.custom_op("flash_attn_3::_flash_attn_backward", mutates_args=())
def _backward(  # noqa: PLR0913 - the parameters of the package's own operator
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


_kernels: Any = torch.library.Library("flash_attn_3", "FRAGMENT")
"""The kernels themselves, as `activate_flash_attention_impl("FA3")` looks for them: they run in place of torch's
operators of attention, which the tracer records.
"""
_kernels.define(
    "fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor? out, Tensor? cu_seqlens_q,"
    " Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q,"
    " int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos,"
    " Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale,"
    " float? softmax_scale, bool is_causal, int window_size_left, int window_size_right, int attention_chunk,"
    " float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa,"
    " int sm_margin) -> (Tensor, Tensor, Tensor, Tensor)"
)
_kernels.define(
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor? dq, Tensor? dk, Tensor? dv,"
    " Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q,"
    " int? max_seqlen_k, float? softmax_scale, bool is_causal, int window_size_left, int window_size_right,"
    " float softcap, bool deterministic, int sm_margin) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_forward.register_fake(lambda q, k, v, *_: _results(q, v))
_backward.register_fake(lambda dout, q, k, v, *_: tuple(map(torch.empty_like, (q, k, v))))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:5])
    ctx.mask = inputs[5:]


def _gradients(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Any, ...]:
    q, k, v, out, softmax_lse, *lengths = ctx.saved_tensors
    return (*_backward(dout, q, k, v, out, softmax_lse, *lengths, *ctx.mask), *(None,) * 5)


_forward.register_autograd(_gradients, setup_context=_keep)


def flash_attn_func(  # noqa: PLR0913 - the parameters of the package's own function
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Returns the attention of (batch, sequence, heads, head size)."""
    out, softmax_lse = _forward(q, k, v, None, None, causal, *window_size)
    return (out, softmax_lse) if return_attn_probs else out


def flash_attn_varlen_func(  # noqa: PLR0913 - the parameters of the package's own function
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Returns the attention of packed sequences, (tokens, heads, head size), with their cumulative lengths."""
    out, softmax_lse = _forward(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, *window_size)
    return (out, softmax_lse) if return_attn_probs else out


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Returns the attention of (batch, sequence, 3, heads, head size)."""
    q, k, v = qkv.unbind(2)
    return flash_attn_func(q, k, v, *args, **kwargs)


def flash_attn_with_kvcache(*_: Any, **__: Any) -> Any:
    """Refuses: only inference uses a cache of keys and values."""
    raise ForerunError("flash_attn_with_kvcache: inference with a cache can't be traced")


FUNCTIONS = (flash_attn_func, flash_attn_varlen_func, flash_attn_qkvpacked_func, flash_attn_with_kvcache)
"""The functions of `flash_attn_interface`."""
