"""Stands for `xformers.ops` where it is not installed: memory-efficient attention on torch's own kernels.

xformers runs FlashAttention where the dtype and the mask allow it, else a kernel that torch has too. A function that is
missing here is an ImportError or AttributeError by its name. An installed xformers runs itself, on torch's kernels.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_HALF = (torch.float16, torch.bfloat16)


def is_being_imported() -> bool:
    """Says whether an installed xformers asks for flash_attn while it is imported, and lets it use torch's attention.

    It would call compiled functions of flash_attn, which the stand-in does not have. Without flash_attn it calls those
    of torch, if it takes itself for built with CUDA, which it does not where its compiled library fits another torch.
    """
    flash: Any = sys.modules.get("xformers.ops.fmha.flash")
    if flash is None or not flash.__spec__._initializing:
        return False
    sys.modules["xformers.ops.fmha.common"].__dict__["_built_with_cuda"] = True
    return True


class AttentionBias:
    """A mask of attention."""


class LowerTriangularMask(AttentionBias):
    """The causal mask."""


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: Any = None,
) -> Tensor:
    """Returns the attention of (batch, sequence, heads, head size), or of (batch, sequence, head size) for one head."""
    if query.dim() == 3:
        q, k, v = (one.unsqueeze(2) for one in (query, key, value))
        return memory_efficient_attention(q, k, v, attn_bias, p, scale).squeeze(2)
    causal = isinstance(attn_bias, LowerTriangularMask)
    operator: Any = torch.ops.aten._flash_attention_forward
    if query.dtype in _HALF and (attn_bias is None or causal):
        lengths = (None, None, query.shape[1], key.shape[1])
        made: Tensor = operator(query, key, value, *lengths, p, causal, False, scale=scale)[0]
        return made
    mask = attn_bias if isinstance(attn_bias, Tensor) else None
    q, k, v = (one.transpose(1, 2) for one in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, mask, p, causal and mask is None, scale=scale).transpose(1, 2)


def unbind(x: Tensor, dim: int) -> tuple[Tensor, ...]:
    """Returns views, whose gradients xformers writes side by side."""
    return x.unbind(dim)


class SwiGLU(nn.Module):
    """The gated feed-forward network, whose first two products are one."""

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        bias: bool = True,
        *,
        _pack_weights: bool = True,
    ) -> None:
        super().__init__()
        self.w12 = nn.Linear(in_features, 2 * hidden_features, bias=bias) if _pack_weights else None
        if not _pack_weights:
            self.w1 = nn.Linear(in_features, hidden_features, bias=bias)
            self.w2 = nn.Linear(in_features, hidden_features, bias=bias)
        self.w3 = nn.Linear(hidden_features, out_features or in_features, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = (self.w1(x), self.w2(x)) if self.w12 is None else self.w12(x).chunk(2, dim=-1)
        out: Tensor = self.w3(F.silu(gate) * up)
        return out


fmha = SimpleNamespace(
    AttentionBias=AttentionBias,
    LowerTriangularMask=LowerTriangularMask,
    attn_bias=SimpleNamespace(AttentionBias=AttentionBias, LowerTriangularMask=LowerTriangularMask),
    memory_efficient_attention=memory_efficient_attention,
)
"""The module `xformers.ops.fmha`."""
CONTENT: dict[str, Any] = {
    "memory_efficient_attention": memory_efficient_attention,
    "AttentionBias": AttentionBias,
    "LowerTriangularMask": LowerTriangularMask,
    "SwiGLU": SwiGLU,
    "unbind": unbind,
    "fmha": fmha,
}
"""The content of `xformers.ops`."""
