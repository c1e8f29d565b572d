"""Stands for the kernels beside attention that the package flash_attn brings: rotary embeddings, norms, cross entropy.

Rotary embeddings and cross entropy are one kernel in each direction; its cost follows from the bytes that it reads and
writes. Norms are torch's fused ones.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@torch.library.custom_op("flash_attn::rotary", mutates_args=())
def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("flash_attn::rotary_", mutates_args=("x",))
def _rotate_in_place(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    pass


_rotate.register_fake(lambda x, cos, sin: torch.empty_like(x))
_rotate_in_place.register_fake(lambda x, cos, sin: None)


class _Rotary(torch.autograd.Function):
    """The package's function: in place it writes to its input forward and to the gradient backward.

    Of a tensor that packs queries, keys and values it rotates the first `parts` only (0: it packs nothing).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, inplace: bool, parts: int) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.inplace, ctx.parts = inplace, parts
        if not inplace:
            made: Tensor = _rotate(x, cos, sin)
            return made
        ctx.mark_dirty(x)
        _rotate_in_place(x[:, :, :parts] if parts else x, cos, sin)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = grads[0]
        if not ctx.inplace:
            return _rotate(grad.contiguous(), *ctx.saved_tensors), None, None, None, None
        _rotate_in_place(grad[:, :, : ctx.parts] if ctx.parts else grad, *ctx.saved_tensors)
        return grad, None, None, None, None


def apply_rotary_emb(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, inplace: bool = False, *_: Any, **__: Any
) -> Tensor:
    """Returns the rotary embedding of (batch, sequence, heads, head size): one kernel that reads and writes `x`."""
    made: Tensor = _Rotary.apply(x, cos, sin, inplace, 0)
    return made


def apply_rotary_emb_qkv_(qkv: Tensor, cos: Tensor, sin: Tensor, *_: Any, **__: Any) -> Tensor:
    """Rotates the queries and keys of (batch, sequence, 3, heads, head size) in place."""
    made: Tensor = _Rotary.apply(qkv, cos, sin, True, 2)
    return made


def apply_rotary_emb_kv_(kv: Tensor, cos: Tensor, sin: Tensor, *_: Any, **__: Any) -> Tensor:
    """Rotates the keys of (batch, sequence, 2, heads, head size) in place."""
    made: Tensor = _Rotary.apply(kv, cos, sin, True, 1)
    return made


class RotaryEmbedding(nn.Module):
    """The package's module: tables of cosines and sines as long as the longest sequence so far.

    Its attributes have the package's names, as subclasses make the tables in ways of their own.
    """

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        pos_idx_in_fp32: bool = True,
        device: Any = None,
    ) -> None:
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        self.pos_idx_in_fp32, self.scale = pos_idx_in_fp32, None
        self._cos_k_cached, self._sin_k_cached = None, None
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        self._seq_len_cached = 0
        self._cos_cached: Tensor | None = None
        self._sin_cached: Tensor | None = None

    def _compute_inv_freq(self, device: Any = None) -> Tensor:
        steps = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        made: Tensor = 1.0 / (self.base ** (steps / self.dim))
        return made

    def _update_cos_sin_cache(self, seqlen: int, device: Any = None, dtype: Any = None) -> None:
        made = self._cos_cached
        if seqlen > self._seq_len_cached or made is None or made.device != device or made.dtype != dtype:
            at = torch.outer(torch.arange(seqlen, device=device).float(), cast("Tensor", self.inv_freq).to(device))
            self._seq_len_cached, self._cos_cached, self._sin_cached = seqlen, at.cos().to(dtype), at.sin().to(dtype)

    def forward(
        self, qkv: Tensor, kv: Tensor | None = None, seqlen_offset: Any = 0, *_: Any, **kwargs: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        longest = kwargs.get("max_seqlen") or qkv.shape[1] + (seqlen_offset if isinstance(seqlen_offset, int) else 0)
        self._update_cos_sin_cache(longest, qkv.device, qkv.dtype)
        cos, sin = cast("Tensor", self._cos_cached), cast("Tensor", self._sin_cached)
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin)
        return apply_rotary_emb(qkv, cos, sin, inplace=True), apply_rotary_emb_kv_(kv, cos, sin)


@torch.library.custom_op("flash_attn::cross_entropy", mutates_args=())
def _losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return _of_rows(logits, labels)


@torch.library.custom_op("flash_attn::cross_entropy_backward", mutates_args=())
def _gradient(dlosses: Tensor, logits: Tensor, lse: Tensor, labels: Tensor) -> Tensor:
    return torch.empty_like(logits)


@torch.library.custom_op("flash_attn::cross_entropy_backward_", mutates_args=("logits",))
def _gradient_in_place(dlosses: Tensor, logits: Tensor, lse: Tensor, labels: Tensor) -> None:
    pass


def _of_rows(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    rows = logits.new_empty((logits.shape[0],), dtype=torch.float32)
    return rows, torch.empty_like(rows)


_losses.register_fake(_of_rows)
_gradient.register_fake(lambda dlosses, logits, lse, labels: torch.empty_like(logits))
_gradient_in_place.register_fake(lambda dlosses, logits, lse, labels: None)


class _CrossEntropy(torch.autograd.Function):
    """The package's function, whose gradient takes the place of the logits where the program says so."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, inplace: bool) -> tuple[Tensor, Tensor]:
        losses, lse = _losses(logits, labels)
        ctx.save_for_backward(logits, lse, labels)
        ctx.inplace = inplace
        ctx.mark_non_differentiable(lse)
        return losses, lse

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        logits, lse, labels = ctx.saved_tensors
        if not ctx.inplace:
            return _gradient(grads[0], logits, lse, labels), None, None
        own = logits.detach()
        _gradient_in_place(grads[0], own, lse, labels)
        return own, None, None


def cross_entropy_loss(
    logits: Tensor,
    labels: Tensor,
    *_: Any,
    inplace_backward: bool = False,
    process_group: Any = None,
    **__: Any,
) -> tuple[Tensor, Tensor]:
    """Returns the loss of each row of logits (rows, words), and its part that keeps logits small.

    Raises:
        NotImplementedError: the words of a row are spread over ranks.
    """
    if process_group is not None:
        raise NotImplementedError("flash_attn's cross entropy of logits that are spread over a process group")
    losses, lse = _CrossEntropy.apply(logits, labels, inplace_backward)
    return losses, lse


def layer_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *_: Any,
    eps: float = 1e-6,
    prenorm: bool = False,
    is_rms_norm: bool = False,
    **__: Any,
) -> Any:
    """Normalizes `x` after adding `residual`; with `prenorm` it returns the sum too."""
    total = x if residual is None else x + residual
    shape = weight.shape
    out = F.rms_norm(total, shape, weight, eps) if is_rms_norm else F.layer_norm(total, shape, weight, bias, eps)
    return (out, total) if prenorm else out


def rms_norm_fn(x: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
    """Normalizes as `layer_norm_fn` without subtracting the mean."""
    return layer_norm_fn(x, weight, bias, *args, **{**kwargs, "is_rms_norm": True})


ROTARY = (apply_rotary_emb, apply_rotary_emb_qkv_, apply_rotary_emb_kv_, RotaryEmbedding)
NORMS = (layer_norm_fn, rms_norm_fn)
