"""SharedBlockSpec: an attention and a feed-forward in front of a layer's mixer, whose weights several layers share."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.common.errors import ForerunError


@dataclass(frozen=True, slots=True)
class SharedBlockSpec:
    """Attention over the stream and the embedding side by side, then a feed-forward and a product of the layer's own,
    whose result the layer's mixer reads beside the stream (Zamba, arXiv 2405.16712; Zamba2, arXiv 2411.15242).

    The block has no residuals. Adapters are products of low rank beside its own, which each layer has for itself.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_hidden: int
    attention_adapter: int = 0
    """rank of the adapters of queries, keys and values; 0: there are none"""
    ffn_adapter: int = 0
    """rank of the adapter of the feed-forward's first matrices; 0: there is none"""
    rotates: bool = False
    """whether its queries and keys have rotary positions"""
    again: bool = False
    """whether an earlier layer has its weights"""

    def __post_init__(self) -> None:
        if min(self.n_heads, self.n_kv_heads, self.head_dim, self.ffn_hidden) < 1 or self.n_heads % self.n_kv_heads:
            raise ForerunError(f"shared_block: sizes must be at least 1, n_heads a multiple of n_kv_heads: {self}")
        if min(self.attention_adapter, self.ffn_adapter) < 0:
            raise ForerunError(f"shared_block: the rank of an adapter must be at least 0: {self}")
