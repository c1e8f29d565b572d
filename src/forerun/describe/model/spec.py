"""ModelSpec: the architecture of a transformer, and nothing about how it is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from forerun.common.errors import ForerunError

Mlp = Literal["swiglu", "geglu", "gelu", "relu"]
Norm = Literal["rmsnorm", "layernorm"]
Position = Literal["rope", "learned", "alibi", "sinusoidal", "none"]


@dataclass(frozen=True, slots=True)
class MoESpec:
    """Mixture-of-experts feed-forward. Expert widths are of one expert."""

    n_experts: int
    top_k: int
    expert_ffn: int
    shared_ffn: int = 0
    """total width of the shared experts; 0 for none"""
    n_dense_layers: int = 0
    """number of the first layers that keep a dense feed-forward of width `ffn_hidden`"""
    shared_gate: bool = False
    """a hidden->1 gate on the shared expert (Qwen2-MoE)"""
    router_bias: bool = False
    """a trained or tracked bias per expert on the router (DeepSeek-V3)"""
    capacity_factor: float | None = None
    """each expert pads or drops its tokens to this multiple of the mean; None: it takes all of them"""

    def __post_init__(self) -> None:
        if min(self.n_experts, self.expert_ffn) < 1 or min(self.shared_ffn, self.n_dense_layers) < 0:
            raise ForerunError(f"moe: n_experts and expert_ffn must be at least 1, the others at least 0: {self}")
        if not 0 < self.top_k <= self.n_experts:
            raise ForerunError(f"moe: top_k {self.top_k} must be at most n_experts {self.n_experts}")
        if self.capacity_factor is not None and self.capacity_factor <= 0:
            raise ForerunError(f"moe: capacity_factor must be positive, got {self.capacity_factor}")


@dataclass(frozen=True, slots=True)
class MLASpec:
    """Multi-head latent attention (DeepSeek-V2)."""

    kv_lora_rank: int
    qk_nope_dim: int
    qk_rope_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None

    def __post_init__(self) -> None:
        widths = (self.kv_lora_rank, self.qk_nope_dim, self.qk_rope_dim, self.v_head_dim, self.q_lora_rank or 1)
        if min(widths) < 1:
            raise ForerunError(f"mla: every width must be at least 1: {self}")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder or encoder stack of equal layers between an embedding and a head.

    Widths are in elements. `n_heads == 0` means a stack without attention (feed-forward blocks only).
    """

    name: str
    n_layers: int
    hidden: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_hidden: int
    vocab: int
    mlp: Mlp = "swiglu"
    norm: Norm = "rmsnorm"
    position: Position = "rope"
    max_positions: int = 0
    """rows of a learned position table; without effect for other positions"""
    causal: bool = True
    tied_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    norm_bias: bool = False
    """LayerNorm with a bias (RMSNorm never has one)"""
    head_bias: bool = False
    qk_norm: bool = False
    """a norm of width head_dim on queries and on keys"""
    embedding_norm: bool = False
    """a norm right after the embedding (BLOOM, BERT)"""
    block_norms: bool = True
    """a norm before each half of a layer; a plain residual stack has none"""
    final_norm: bool = True
    token_types: int = 0
    """rows of a token-type embedding (BERT)"""
    pooler: bool = False
    """a hidden x hidden tanh pooler (BERT)"""
    pooler_classes: int = 0
    """width of a classifier on the pooler (BERT's next-sentence head has 2)"""
    head_transform: bool = False
    """dense + activation + norm before the head (BERT's masked-language-model head)"""
    sliding_window: int | None = None
    moe: MoESpec | None = None
    mla: MLASpec | None = None

    def __post_init__(self) -> None:
        for field in ("n_layers", "hidden", "ffn_hidden", "vocab"):
            if getattr(self, field) < 1:
                raise ForerunError(f"model {self.name}: {field} must be at least 1, got {getattr(self, field)}")
        if self.n_heads < 0 or (self.n_heads and self.head_dim < 1):
            raise ForerunError(
                f"model {self.name}: n_heads {self.n_heads} needs a positive head_dim, got {self.head_dim}"
            )
        if self.n_heads and (self.n_kv_heads < 1 or self.n_heads % self.n_kv_heads):
            raise ForerunError(
                f"model {self.name}: n_heads {self.n_heads} is not a multiple of n_kv_heads {self.n_kv_heads}"
            )
        if self.pooler_classes and not self.pooler:
            raise ForerunError(f"model {self.name}: pooler_classes {self.pooler_classes} needs pooler: true")
        for field in ("max_positions", "token_types", "pooler_classes"):
            if getattr(self, field) < 0:
                raise ForerunError(f"model {self.name}: {field} must be at least 0, got {getattr(self, field)}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ForerunError(f"model {self.name}: sliding_window must be at least 1, got {self.sliding_window}")
        if self.moe and not 0 <= self.moe.n_dense_layers <= self.n_layers:
            raise ForerunError(
                f"model {self.name}: n_dense_layers {self.moe.n_dense_layers} exceeds n_layers {self.n_layers}"
            )

    @property
    def gated_mlp(self) -> bool:
        """Whether the feed-forward has three matrices (gate, up, down) instead of two."""
        return self.mlp in ("swiglu", "geglu")

    def is_moe_layer(self, layer: int) -> bool:
        """Returns whether layer number `layer` (from 0) has experts instead of a dense feed-forward."""
        return self.moe is not None and layer >= self.moe.n_dense_layers
