"""A transformer with layer norms and added positions, and the same without attention: the models of small studies.

Each half of a block, attention and feed-forward, can be checkpointed for itself.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

HEAD_DIM = 128
REMAT = ("none", "attention", "mlp", "both")
ATTENTION = ("sdpa", "flex", "none")


@dataclass(frozen=True)
class TransformerConfig:
    """The shape of the model. Heads are 128 wide, and `grouping` query heads share a key and value head."""

    vocab: int = 32_768
    layers: int = 4
    dim: int = 4096
    grow: int = 4
    grouping: int = 4
    attention: str = "sdpa"
    """`none` makes a model of feed-forward blocks alone"""
    remat: str = "none"
    """the halves of a block that run again in backward"""

    def __post_init__(self) -> None:
        if self.attention != "none" and self.dim % (HEAD_DIM * self.grouping):
            raise ValueError(f"dim {self.dim} must be a multiple of {HEAD_DIM} x grouping {self.grouping}")
        if self.remat not in REMAT or self.attention not in ATTENTION:
            raise ValueError(f"remat must be one of {', '.join(REMAT)}, attention one of {', '.join(ATTENTION)}")


class Attention(nn.Module):
    """Causal self-attention of grouped heads, fused or through flex attention, which is compiled for itself."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        dim, self.flex = config.dim, config.attention == "flex"
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, dim // config.grouping, bias=False)
        self.v = nn.Linear(dim, dim // config.grouping, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)

    def forward(self, x: torch.Tensor, mask: BlockMask | None) -> torch.Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        if self.flex:
            out = compiled_flex_attention(q, k, v, block_mask=mask, enable_gqa=q.size(1) != k.size(1))
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.size(1) != k.size(1))
        return self.o(out.transpose(1, 2).flatten(-2))


compiled_flex_attention: Any = torch.compile(flex_attention)


class FeedForward(nn.Module):
    """Two linear layers with biases around a GELU."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.dim, config.grow * config.dim)
        self.down = nn.Linear(config.grow * config.dim, config.dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """Attention and feed-forward, each after a layer norm and around a residual; without attention, a norm less."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.remat = config.remat
        self.ffn = FeedForward(config)
        self.attention = None
        if config.attention != "none":
            self.attention_norm, self.ffn_norm = nn.LayerNorm(config.dim), nn.LayerNorm(config.dim)
            self.attention = Attention(config)

    def forward(self, x: torch.Tensor, mask: BlockMask | None) -> torch.Tensor:
        if self.attention is None:
            return x + self._run("mlp", self.ffn, x)
        x = x + self._run("attention", self.attention, self.attention_norm(x), mask)
        return x + self._run("mlp", self.ffn, self.ffn_norm(x))

    def _run(self, which: str, half: nn.Module, *args: Any) -> torch.Tensor:
        if self.remat in (which, "both"):
            return checkpoint(half, *args, use_reentrant=False)
        return half(*args)


class Transformer(nn.Module):
    """Token ids (batch, seq) to logits (batch, seq, vocab)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)
        self.output = nn.Linear(config.dim, config.vocab, bias=False)

    def forward(self, tokens: torch.Tensor, mask: BlockMask | None = None) -> torch.Tensor:
        x = self.embedding(tokens)
        if self.config.attention != "none":
            x = x + positions(tokens.size(-1), self.config.dim, x)
        for block in self.blocks:
            x = block(x, mask)
        return self.output(self.norm(x))


def positions(seq_len: int, dim: int, like: torch.Tensor) -> torch.Tensor:
    """Sines and cosines of the positions, of shape (seq_len, dim), in the dtype of `like`."""
    place = torch.arange(seq_len, device=like.device, dtype=torch.float32)
    rates = 10_000.0 ** (-torch.arange(0, dim, 2, device=like.device, dtype=torch.float32) / dim)
    angles = torch.outer(place, rates)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2).type_as(like)


def causal_mask(seq_len: int, device: torch.device) -> BlockMask:
    """The blocks that flex attention computes."""
    return create_block_mask(lambda _b, _h, q, kv: q >= kv, None, None, seq_len, seq_len, device=str(device))
