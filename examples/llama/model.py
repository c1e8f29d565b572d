"""A Llama in plain PyTorch: RMSNorm, rotary positions, grouped-query attention, SwiGLU, and mixture-of-experts layers.

The parts have the names that torchtitan gives them (`tok_embeddings`, `layers.N.attention.wq`, `feed_forward.w1`,
`norm`, `output`), so plans by module name fit. Nothing here knows about parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama."""

    dim: int = 256
    n_layers: int = 4
    n_heads: int = 8
    n_kv_heads: int = 4
    ffn_dim: int = 768
    vocab_size: int = 4096
    seq_len: int = 1024
    rope_theta: float = 500000.0
    norm_eps: float = 1e-5
    n_experts: int = 0
    """0: every layer has one feed-forward network"""
    top_k: int = 2
    expert_dim: int = 0
    """hidden width of an expert, 0: ffn_dim"""
    moe_every: int = 1
    """every n-th layer (the last of each n) is a mixture of experts"""


SIZES = {
    "debug": LlamaConfig(),
    "8B": LlamaConfig(4096, 32, 32, 8, 14336, 128256, 8192),
    "70B": LlamaConfig(8192, 80, 64, 8, 28672, 128256, 8192),
    "405B": LlamaConfig(16384, 126, 128, 8, 53248, 128256, 8192),
}


def rotations(config: LlamaConfig) -> Tensor:
    """(seq_len, head_dim / 2) complex: by how much each pair of a head's elements is turned at each position."""
    half = config.dim // config.n_heads // 2
    frequencies = config.rope_theta ** (-torch.arange(half).float() / half)
    angles = torch.outer(torch.arange(config.seq_len).float(), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def turned(x: Tensor, turns: Tensor) -> Tensor:
    """`x` (batch, seq, heads, head_dim) at its rotary positions."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[: x.shape[1], None, :]).flatten(3).type_as(x)


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.n_heads
        self.wq = nn.Linear(config.dim, config.n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(config.n_heads * self.head_dim, config.dim, bias=False)
        self.repeats = config.n_heads // config.n_kv_heads

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        # -1 heads: under tensor parallelism a rank has a part of them.
        q, k, v = (w(x).view(batch, seq, -1, self.head_dim) for w in (self.wq, self.wk, self.wv))
        q, k = turned(q, turns), turned(k, turns)
        k, v = (t.repeat_interleave(self.repeats, dim=2) for t in (k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(batch, seq, -1))


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class GroupedExperts(nn.Module):
    """All experts of a layer, each weight one tensor whose first dimension is the expert."""

    def __init__(self, dim: int, hidden: int, n_experts: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(n_experts, hidden, dim))
        self.w2 = nn.Parameter(torch.empty(n_experts, dim, hidden))
        self.w3 = nn.Parameter(torch.empty(n_experts, hidden, dim))
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor, tokens_per_expert: Tensor) -> Tensor:
        """`x` (tokens, dim) in order of experts, `tokens_per_expert` (experts,)."""
        ends = tokens_per_expert.cumsum(0, dtype=torch.int32)
        x = x.bfloat16()
        w1, w2, w3 = (w.bfloat16().transpose(-2, -1) for w in (self.w1, self.w2, self.w3))
        hidden = F.silu(F.grouped_mm(x, w1, offs=ends)) * F.grouped_mm(x, w3, offs=ends)
        return F.grouped_mm(hidden, w2, offs=ends)


class MoE(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.n_experts, self.top_k = config.n_experts, config.top_k
        self.gate = nn.Linear(config.dim, config.n_experts, bias=False)
        self.experts = GroupedExperts(config.dim, config.expert_dim or config.ffn_dim, config.n_experts)

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        scores, chosen = torch.topk(F.softmax(self.gate(x).float(), dim=-1), self.top_k, dim=-1)
        tokens_per_expert = torch.bincount(chosen.flatten(), minlength=self.n_experts)
        order = torch.argsort(chosen.flatten(), stable=True)
        token = order // self.top_k
        out = self.experts(x[token], tokens_per_expert)
        weighted = out.float() * scores.flatten()[order, None]
        mixed = torch.zeros_like(x).scatter_add(0, token[:, None].expand_as(weighted), weighted.to(x.dtype))
        return mixed.reshape(shape)


class Block(nn.Module):
    def __init__(self, config: LlamaConfig, number: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, config.norm_eps)
        if config.n_experts and number % config.moe_every == config.moe_every - 1:
            self.moe = MoE(config)
        else:
            self.feed_forward = FeedForward(config.dim, config.ffn_dim)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        mix = self.moe if hasattr(self, "moe") else self.feed_forward
        return x + mix(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.register_buffer("turns", rotations(config), persistent=False)
        self.layers = nn.ModuleDict({str(i): Block(config, i) for i in range(config.n_layers)})
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, seq, vocabulary) of token ids (batch, seq)."""
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x, self.turns)
        return self.output(self.norm(x))
