"""The operators of FlashAttention-2 that code calls by their private names, such as attention in a ring.

Forward returns the log-sum-exp of each query, with which parts of a sequence are put together, and backward writes to
gradients that its caller allocated. Both have the names and parameters of the package's own operators, by which
describe/kernels/attention.yaml knows them. The package registers the same names, so this module is imported only
where it is not installed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Results = tuple[Tensor, Tensor, Tensor, Tensor]
"""Output, log-sum-exp in fp32, the probabilities (which only tests ask for) and the state of the random numbers."""


def _results(q: Tensor, v: Tensor, rows: tuple[int, ...]) -> Results:
    return (
        q.new_empty((*q.shape[:-1], v.shape[-1])),
        q.new_empty(rows, dtype=torch.float32),
        q.new_empty((0,)),
        q.new_empty((2,), dtype=torch.int64),
    )


@torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=())
def _flash_attn_forward(  # noqa: PLR0913 - the parameters of the package's own operator
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _of_batches(q, k, v)


def _of_batches(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Results:
    batch, length, heads, _size = q.shape
    return _results(q, v, (batch, heads, length))


@torch.library.custom_op("flash_attn::_flash_attn_varlen_forward", mutates_args=())
def _flash_attn_varlen_forward(  # noqa: PLR0913 - the parameters of the package's own operator
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _of_packed(q, k, v)


def _of_packed(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Results:
    tokens, heads, _size = q.shape
    return _results(q, v, (heads, tokens))


@torch.library.custom_op("flash_attn::_flash_attn_backward", mutates_args=("dq", "dk", "dv"))
def _flash_attn_backward(  # noqa: PLR0913 - the parameters of the package's own operator
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    return torch.empty_like(softmax_lse)


@torch.library.custom_op("flash_attn::_flash_attn_varlen_backward", mutates_args=("dq", "dk", "dv"))
def _flash_attn_varlen_backward(  # noqa: PLR0913 - the parameters of the package's own operator
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    return torch.empty_like(softmax_lse)


_flash_attn_forward.register_fake(_of_batches)
_flash_attn_varlen_forward.register_fake(_of_packed)
for _backward in (_flash_attn_backward, _flash_attn_varlen_backward):
    _backward.register_fake(lambda dout, q, k, v, out, softmax_lse, *_, **__: torch.empty_like(softmax_lse))

OPERATORS = {
    "_flash_attn_forward": _flash_attn_forward,
    "_flash_attn_backward": _flash_attn_backward,
    "_flash_attn_varlen_forward": _flash_attn_varlen_forward,
    "_flash_attn_varlen_backward": _flash_attn_varlen_backward,
}
"""What `flash_attn.flash_attn_interface` has beside its functions."""
