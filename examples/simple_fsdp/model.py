"""A small Llama: RMSNorm, rotary positions, grouped-query attention and SwiGLU."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

aten = torch.ops.aten

ATTENTION_OPS = [
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
]
# Selective checkpointing keeps what is costly to compute and recomputes the rest, the gathering of weights included.
COSTLY_OPS = [aten.mm.default, aten.addmm.default, *ATTENTION_OPS]


@dataclass(frozen=True)
class ModelConfig:
    """The shape of the model. `kv_heads` divides `heads`, and `heads` divides `dim` into heads of even width."""

    vocab: int = 512
    layers: int = 2
    dim: int = 128
    heads: int = 4
    kv_heads: int = 2
    seq_len: int = 64
    rope_base: float = 10_000.0
    tied: bool = False
    checkpoint: str = "none"

    def __post_init__(self) -> None:
        if self.dim % self.heads or self.dim // self.heads % 2:
            raise ValueError(f"dim {self.dim} must be a multiple of heads {self.heads}, with heads of even width")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} must be a multiple of kv_heads {self.kv_heads}")
        if self.checkpoint not in ("none", "full", "selective"):
            raise ValueError(f"checkpoint {self.checkpoint!r} must be none, full or selective")

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def hidden(self) -> int:
        """The width of the feed-forward layer: two thirds of four times `dim`, rounded up to a multiple of 32."""
        return -(-8 * self.dim // 3 // 32) * 32


def run_checkpointed(how: str, block: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    """Run a block under no, full or selective activation checkpointing."""
    if how == "none":
        return block(*args)
    saved_ops = COSTLY_OPS if how == "selective" else []
    # PyTorch 2.13 fails to compile the recomputation of an operator that may be random, as attention is, in a graph
    # that has DTensors as inputs; so there attention is kept.
    if how == "full" and torch.compiler.is_compiling():
        saved_ops = ATTENTION_OPS
    if not saved_ops:
        return checkpoint(block, *args, use_reentrant=False)
    contexts = functools.partial(create_selective_checkpoint_contexts, saved_ops)
    return checkpoint(block, *args, use_reentrant=False, context_fn=contexts)


def rotation(config: ModelConfig, device: torch.device | None = None) -> torch.Tensor:
    """Cosines and sines of the rotary angles, of shape (2, seq_len, head_dim / 2)."""
    half = config.head_dim // 2
    frequencies = config.rope_base ** (-torch.arange(half, device=device, dtype=torch.float32) / half)
    angles = torch.outer(torch.arange(config.seq_len, device=device, dtype=torch.float32), frequencies)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Turn the pairs (i, i + half) of each head of x (batch, heads, seq, head_dim) by their position's angle."""
    cos, sin = angles[:, : x.size(-2)]
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).type_as(x)


class Attention(nn.Module):
    """Causal self-attention in which groups of query heads share a key and value head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        kv_dim = config.kv_heads * config.head_dim
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            linear(x).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
            for linear in (self.wq, self.wk, self.wv)
        )
        q, k = rotate(q, angles), rotate(k, angles)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden, bias=False)
        self.up = nn.Linear(config.dim, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and feed-forward, each after a norm and around a residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim)
        self.ffn = FeedForward(config)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        return x + self.ffn(self.ffn_norm(x))


class Llama(nn.Module):
    """Token ids (batch, seq) to logits (batch, seq, vocab)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        self.output = nn.Linear(config.dim, config.vocab, bias=False)
        nn.init.normal_(self.embedding.weight, std=config.dim**-0.5)
        if config.tied:
            self.output.weight = self.embedding.weight
        self.register_buffer("angles", rotation(config), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = run_checkpointed(self.config.checkpoint, block, x, self.angles)
        return self.output(self.norm(x))
