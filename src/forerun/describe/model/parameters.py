"""Exact parameter counts by formula, in elements, and the model FLOPs that follow from them."""

from __future__ import annotations

from forerun.describe.model.spec import MLASpec, ModelSpec


def layer_parameters(spec: ModelSpec, layer: int) -> dict[str, int]:
    """Returns the parameters of layer number `layer` (from 0) by part, for the parts that the layer has.

    Parts: attention, norm (every norm of the layer, those inside attention included), mlp, router, experts (all of
    them), shared_experts (with their gate).
    """
    parts = {
        "attention": _attention(spec),
        "norm": _layer_norms(spec),
        "mlp": 0 if spec.is_moe_layer(layer) else _feed_forward(spec, spec.ffn_hidden),
    }
    if spec.moe and spec.is_moe_layer(layer):
        moe = spec.moe
        parts["router"] = moe.n_experts * (spec.hidden + moe.router_bias)
        parts["experts"] = moe.n_experts * _feed_forward(spec, moe.expert_ffn)
        if moe.shared_ffn:
            parts["shared_experts"] = _feed_forward(spec, moe.shared_ffn) + moe.shared_gate * spec.hidden
    return {part: count for part, count in parts.items() if count}


def outer_parameters(spec: ModelSpec) -> dict[str, int]:
    """Returns the parameters outside the layers by part, for the parts that the model has; a tied head adds no matrix.

    Parts: embedding, position_embedding, token_type_embedding, embedding_norm, final_norm, pooler, head_transform,
    head.
    """
    hidden, norm = spec.hidden, _norm(spec, spec.hidden)
    parts = {
        "embedding": spec.vocab * hidden,
        "position_embedding": spec.max_positions * hidden if spec.position == "learned" else 0,
        "token_type_embedding": spec.token_types * hidden,
        "embedding_norm": norm * spec.embedding_norm,
        "final_norm": norm * spec.final_norm,
        "pooler": spec.pooler * (hidden * hidden + hidden) + spec.pooler_classes * (hidden + 1),
        "head_transform": spec.head_transform * (hidden * hidden + hidden + norm),
        "head": spec.vocab * (hidden * (not spec.tied_embeddings) + spec.head_bias),
    }
    return {part: count for part, count in parts.items() if count}


def parameter_count(spec: ModelSpec) -> int:
    """Returns the number of all parameters; a tied embedding counts once."""
    return sum(outer_parameters(spec).values()) + sum(
        n * sum(layer_parameters(spec, layer).values()) for layer, n in _layer_kinds(spec)
    )


def active_parameter_count(spec: ModelSpec) -> int:
    """Returns the number of parameters that compute one token: all but those of experts that it doesn't reach."""
    if spec.moe is None:
        return parameter_count(spec)
    idle = (spec.moe.n_experts - spec.moe.top_k) * _feed_forward(spec, spec.moe.expert_ffn)
    return parameter_count(spec) - idle * (spec.n_layers - spec.moe.n_dense_layers)


def compute_parameter_count(spec: ModelSpec) -> int:
    """Returns the number of active parameters that multiply: no look-up tables, but the head's matrix, tied or not."""
    outer = outer_parameters(spec)
    tables = sum(outer.get(part, 0) for part in ("embedding", "position_embedding", "token_type_embedding"))
    return active_parameter_count(spec) - tables + spec.tied_embeddings * spec.vocab * spec.hidden


def model_flops_per_token(spec: ModelSpec, seq_len: int) -> float:
    """Returns the model FLOPs of both passes for one token of a sequence of `seq_len` tokens: 6 N + 12 L h s.

    PaLM (arXiv 2204.02311), appendix B: N = `compute_parameter_count`, L layers, h = heads x head width, s = seq_len.
    Neither causal masks nor sliding windows reduce the attention term, and recomputation does not count.
    Where keys and values differ in width (latent attention), h is the mean of both over all heads.
    """
    width = _mean_attention_width(spec)
    return 6.0 * compute_parameter_count(spec) + 12.0 * spec.n_layers * width * seq_len


def _layer_kinds(spec: ModelSpec) -> list[tuple[int, int]]:
    """Returns one layer number of each kind of layer, and the number of layers of that kind."""
    if spec.moe is None:
        return [(0, spec.n_layers)]
    dense = spec.moe.n_dense_layers
    kinds = [(0, dense), (spec.n_layers - 1, spec.n_layers - dense)]
    return [(layer, n) for layer, n in kinds if n]


def _linear(rows: int, columns: int, bias: bool) -> int:
    return rows * columns + bias * columns


def _norm(spec: ModelSpec, width: int) -> int:
    return width * (2 if spec.norm == "layernorm" and spec.norm_bias else 1)


def _attention(spec: ModelSpec) -> int:
    if not spec.n_heads:
        return 0
    if spec.mla:
        return _latent_attention(spec, spec.mla)
    query, key_value = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    qkv = _linear(spec.hidden, query + 2 * key_value, spec.qkv_bias)
    return qkv + _linear(query, spec.hidden, spec.out_bias)


def _latent_attention(spec: ModelSpec, mla: MLASpec) -> int:
    """DeepSeek-V2 (arXiv 2405.04434), section 2.1: queries and keys/values through low-rank projections.

    A bias, where there is one, sits on the projections from the hidden state and on the output, as in the family's
    published code.
    """
    query = spec.n_heads * (mla.qk_nope_dim + mla.qk_rope_dim)
    if mla.q_lora_rank is None:
        queries = _linear(spec.hidden, query, bias=False)
    else:
        queries = _linear(spec.hidden, mla.q_lora_rank, spec.qkv_bias) + _linear(mla.q_lora_rank, query, bias=False)
    down = _linear(spec.hidden, mla.kv_lora_rank + mla.qk_rope_dim, spec.qkv_bias)
    up = _linear(mla.kv_lora_rank, spec.n_heads * (mla.qk_nope_dim + mla.v_head_dim), bias=False)
    return queries + down + up + _linear(spec.n_heads * mla.v_head_dim, spec.hidden, spec.out_bias)


def _layer_norms(spec: ModelSpec) -> int:
    halves = 2 if spec.n_heads else 1
    count = spec.block_norms * halves * _norm(spec, spec.hidden)
    if spec.n_heads and spec.mla:
        count += _norm(spec, spec.mla.kv_lora_rank) + _norm(spec, spec.mla.q_lora_rank or 0)
    elif spec.n_heads and spec.qk_norm:
        count += 2 * _norm(spec, spec.head_dim)
    return count


def _feed_forward(spec: ModelSpec, width: int) -> int:
    up = _linear(spec.hidden, width, spec.mlp_bias)
    return up * (2 if spec.gated_mlp else 1) + _linear(width, spec.hidden, spec.mlp_bias)


def _mean_attention_width(spec: ModelSpec) -> float:
    if spec.mla:
        return spec.n_heads * (spec.mla.qk_nope_dim + spec.mla.qk_rope_dim + spec.mla.v_head_dim) / 2
    return float(spec.n_heads * spec.head_dim)
