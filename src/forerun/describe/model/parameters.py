"""Exact parameter counts by formula, in elements, and the model FLOPs that follow from them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import lru_cache

from forerun.describe.model.spec import IndexerSpec, MLASpec, ModelSpec, MoESpec

_TABLES = ("embedding", "position_embedding", "token_type_embedding", "layer_input_table")


def layer_parameters(spec: ModelSpec, layer: int) -> dict[str, int]:
    """Returns the parameters of layer number `layer` (from 0) by part, for the parts that the layer has.

    Parts: attention, scan, norm (every norm of the layer, those inside attention included), norm_gate,
    shared_block, conv, residual, mlp, router, experts (all of them), shared_experts (with their gate), layer_input,
    other.
    """
    return kind_parameters(spec.layer(layer))


def kind_parameters(layer: ModelSpec) -> dict[str, int]:
    """Returns the parameters of a model of one layer by part, as `layer_parameters` does."""
    if layer.shortcut:
        once = kind_parameters(dense_half(layer))
        experts = kind_parameters(replace(layer, shortcut=False))
        return {part: 2 * count for part, count in once.items()} | {
            part: count for part, count in experts.items() if part in ("router", "experts", "shared_experts")
        }
    parts = {
        "attention": _attention(layer),
        "scan": layer.scan.parameters(layer.hidden) if layer.scan else 0,
        "norm": _layer_norms(layer),
        "shared_block": _shared_block(layer),
        "norm_gate": 2 * layer.hidden * layer.norm_gate_rank * gated_norms(layer),
        "mlp": 0 if layer.moe else _feed_forward(layer, layer.ffn_hidden),
        "layer_input": 2 * layer.hidden * layer.layer_input,
        "streams": layer.streams.layer_parameters(layer.hidden, halves(layer)) if layer.streams else 0,
        "conv": layer.conv_taps * sum(conv_widths(layer)) + _head_convolutions(layer),
        "residual": 4 * layer.hidden * halves(layer) * layer.residual_scales,
        "laurel": 2 * layer.hidden * layer.laurel_rank,
        "other": layer.other_parameters,
    }
    if layer.moe:
        moe = layer.moe
        parts["router"] = sum(n * m for n, m in router_products(layer, moe)) + moe.choices * moe.router_bias
        parts["router"] += 4 * moe.router_width  # three biases and a norm
        parts["experts"] = moe.n_experts * _feed_forward(layer, moe.expert_ffn)
        if moe.shared_ffn:
            parts["shared_experts"] = _feed_forward(layer, moe.shared_ffn) + moe.shared_gate * layer.hidden
    return {part: count for part, count in parts.items() if count}


def dense_half(layer: ModelSpec) -> ModelSpec:
    """Returns half a layer with a `shortcut`: attention and dense feed-forward, without the experts."""
    return replace(layer, shortcut=False, moe=None)


def outer_parameters(spec: ModelSpec) -> dict[str, int]:
    """Returns the parameters outside the layers by part, for the parts that the model has; a tied head adds no matrix.

    Parts: embedding, position_embedding, token_type_embedding, layer_input_table, layer_input_projection, streams,
    embedding_norm, final_norm, pooler, head_transform, head, mtp.
    """
    hidden, norm, inputs = spec.hidden, _norm(spec, spec.hidden), spec.n_layers * spec.layer_input
    parts = {
        "embedding": spec.vocab * hidden,
        "position_embedding": spec.max_positions * hidden if spec.position == "learned" else 0,
        "token_type_embedding": spec.token_types * hidden,
        "layer_input_table": spec.layer_input_vocab * inputs,
        "layer_input_projection": hidden * inputs + bool(inputs) * _norm(spec, spec.layer_input),
        "streams": spec.streams.outer_parameters(hidden) if spec.streams else 0,
        "embedding_norm": norm * spec.embedding_norm,
        "final_norm": norm * spec.final_norm,
        "pooler": spec.pooler * (hidden * hidden + hidden) + spec.pooler_classes * (hidden + 1),
        "head_transform": spec.head_transform * (hidden * hidden + spec.head_transform_bias * hidden + norm),
        "head": spec.vocab * (hidden * (not spec.tied_embeddings) + spec.head_bias),
        "mtp": spec.mtp_modules * _beside_layer(spec),
    }
    return {part: count for part, count in parts.items() if count}


def _beside_layer(spec: ModelSpec) -> int:
    """Returns the parameters of a module that predicts a further token, but for its layer: norms and a projection."""
    return 3 * _norm(spec, spec.hidden) + 2 * spec.hidden * spec.hidden


def parameter_count(spec: ModelSpec) -> int:
    """Returns the number of all parameters; a tied embedding counts once."""
    return sum(outer_parameters(spec).values()) + sum(
        n * sum(kind_parameters(layer).values()) for layer, n in layer_counts(spec)
    )


def active_parameter_count(spec: ModelSpec) -> int:
    """Returns the number of parameters that compute one token: all but those of experts that it doesn't reach.

    Where a router may choose experts without weights, it is the mean over tokens.
    """
    idle = sum(
        n * (layer.moe.n_experts - layer.moe.mean_reached) * _feed_forward(layer, layer.moe.expert_ffn)
        for layer, n in layer_counts(spec)
        if layer.moe
    )
    idle += sum(n * _idle_of_attention(layer) for layer, n in layer_counts(spec) if layer.n_heads)
    return parameter_count(spec) - round(idle)


@lru_cache(maxsize=256)
def compute_parameter_count(spec: ModelSpec) -> int:
    """Returns the number of active parameters that multiply: no look-up tables, but the head's matrix, tied or not,
    once for each token that is predicted, and blocks that layers share as often as they run."""
    outer = outer_parameters(spec)
    tables = sum(outer.get(part, 0) for part in _TABLES)
    reused = sum(n * block_parameters(layer) for layer, n in layer_counts(spec) if _reuses(layer))
    heads = (spec.tied_embeddings + spec.mtp_modules) * spec.vocab * spec.hidden
    return active_parameter_count(spec) - tables + heads + reused


@lru_cache(maxsize=256)
def model_flops_per_token(spec: ModelSpec, seq_len: int) -> float:
    """Returns the model FLOPs of both passes for one token of a sequence of `seq_len` tokens: 6 N + 12 L h s.

    PaLM (arXiv 2204.02311), appendix B: N = `compute_parameter_count`, L layers, h = heads x head width, s = seq_len.
    Neither causal masks nor sliding windows reduce the attention term, and recomputation does not count.
    Compressed keys count by those that a query reads on average.
    Where keys and values differ in width (latent attention), h is the mean of both over all heads. A recurrence has 3
    times its forward FLOPs in place of the attention term.
    """
    pairs = sum(n * _mean_attention_width(layer) * _keys(layer, seq_len) for layer, n in layer_counts(spec))
    scans = sum(n * layer.scan.flops_per_token() for layer, n in layer_counts(spec) if layer.scan)
    return 6.0 * compute_parameter_count(spec) + 12.0 * pairs + 3.0 * scans


def layer_counts(spec: ModelSpec) -> list[tuple[ModelSpec, int]]:
    """Returns every distinct layer as a model of one layer, and the number of layers that are alike, those of modules
    that predict further tokens included."""
    counts = Counter(spec.kind_of_layer)
    counts[spec.kind_of_layer[-1]] += spec.mtp_modules
    return [(layer, counts[place]) for place, layer in enumerate(spec.kinds)]


def _linear(rows: int, columns: int, bias: bool) -> int:
    return rows * columns + bias * columns


def _norm(spec: ModelSpec, width: int) -> int:
    if not spec.norm_weight:
        return 0
    return width * (2 if spec.norm == "layernorm" and spec.norm_bias else 1)


def _attention(spec: ModelSpec) -> int:
    if not spec.n_heads:
        return 0
    sinks = spec.sinks * spec.n_heads + spec.head_gate * spec.n_heads * spec.hidden
    if spec.mla:
        return _latent_attention(spec, spec.mla) + sinks
    if spec.compressed:
        products = spec.compressed.products(spec.hidden, spec.n_heads, spec.head_dim)
        indexer = _indexer(spec, spec.indexer) if spec.indexer else 0
        return sum(n * m for n, m in products) + spec.compressed.vectors(spec.head_dim) + indexer + sinks
    if spec.attention_experts:
        return sum(n * m * count for n, m, count in attention_expert_products(spec)) + sinks
    read = spec.n_heads * spec.value_dim
    scales = 4 * spec.head_dim * spec.differential + spec.relative_rank * spec.relative_extent
    return (
        scales
        + _linear(spec.attention_input or spec.hidden, projected_width(spec), spec.qkv_bias)
        + _linear(read, spec.hidden, spec.out_bias)
        + sinks
    )


def attention_expert_products(spec: ModelSpec) -> list[tuple[int, int, int]]:
    """Returns (columns that are read, rows that are made, matrices) of an attention with experts: its router, queries,
    outputs, and keys and values together."""
    inside, hidden, count = spec.n_kv_heads * spec.head_dim, spec.hidden, spec.attention_experts
    return [(hidden, count, 1), (hidden, inside, count), (inside, hidden, count), (hidden, 2 * inside, 1)]


def _idle_of_attention(spec: ModelSpec) -> int:
    """Returns the parameters of a layer's attention that a token does not reach."""
    chosen = spec.n_heads // spec.n_kv_heads
    each = 2 * spec.hidden * spec.n_kv_heads * spec.head_dim
    return (spec.attention_experts - chosen) * each if spec.attention_experts else 0


def projected_width(spec: ModelSpec) -> int:
    """Returns the width of a layer's queries, gates, relative positions, keys and values together."""
    keys, values = spec.n_kv_heads * spec.head_dim, spec.n_kv_heads * spec.value_dim
    own = own_kv(spec)
    queries = spec.n_heads * (spec.head_dim * (1 + spec.attention_gate) + spec.relative_rank)
    return queries + keys * (own > 0) + values * (own > 1)


def conv_widths(spec: ModelSpec) -> list[int]:
    """Returns the channels of each short convolution of a layer with `conv_taps`: of keys, of values, of each half."""
    heads = spec.n_kv_heads if spec.n_heads else 0
    keys_values = [heads * width for width in (spec.head_dim, spec.value_dim)[: own_kv(spec)]]
    return [*keys_values, *[spec.hidden] * halves(spec)]


def _head_convolutions(spec: ModelSpec) -> int:
    """Returns the elements of the convolutions of queries and keys: taps of each channel, and of all pairs of channels
    of a head, and a bias for each channel of both."""
    if not spec.n_heads or not spec.qk_conv_taps:
        return 0
    channels = (spec.n_heads + spec.n_kv_heads) * spec.head_dim
    return channels * (spec.qk_conv_taps + spec.head_dim * spec.head_conv_taps + 2)


def router_products(spec: ModelSpec, moe: MoESpec) -> list[tuple[int, int]]:
    """Returns (columns that are read, rows that are made) of each matrix of a router."""
    width = moe.router_width
    if not width:
        return [(spec.hidden, moe.scores)]
    return [(spec.hidden, width), (width, width), (width, width), (width, moe.scores)]


def own_kv(spec: ModelSpec) -> int:
    """Returns how many projections a layer has for keys and values: 2, 1 for both, or none where it reads others'."""
    return 0 if spec.shared_kv else 1 if spec.equal_kv else 2


def _latent_attention(spec: ModelSpec, mla: MLASpec) -> int:
    """Returns the parameters of section 2.1 of DeepSeek-V2 (arXiv 2405.04434): queries and keys/values through low-rank
    projections.

    A bias, where there is one, sits on the projections from the hidden state and on the output, as in the family's
    published code.
    """
    query = spec.n_heads * (mla.qk_nope_dim + mla.qk_rope_dim)
    gate = spec.n_heads * mla.v_head_dim
    if mla.q_lora_rank is None:
        queries = _linear(spec.hidden, query, bias=False)
    elif mla.gated_query:
        queries = _linear(spec.hidden, mla.q_lora_rank, spec.qkv_bias) + 2 * mla.q_lora_rank * (query + gate)
        gate = 0
    else:
        queries = _linear(spec.hidden, mla.q_lora_rank, spec.qkv_bias) + _linear(mla.q_lora_rank, query, bias=False)
    down = _linear(spec.hidden, mla.kv_lora_rank + mla.qk_rope_dim, spec.qkv_bias)
    up = _linear(mla.kv_lora_rank, spec.n_heads * (mla.qk_nope_dim + mla.v_head_dim), bias=False)
    out = _linear(spec.n_heads * mla.v_head_dim, spec.hidden, spec.out_bias)
    gate *= spec.attention_gate * spec.hidden
    return queries + down + up + out + gate + (_indexer(spec, spec.indexer) if spec.indexer else 0)


def _indexer(spec: ModelSpec, indexer: IndexerSpec) -> int:
    """Returns the products of an indexer with its vectors."""
    return sum(n * m for n, m in indexer_products(spec, indexer)) + indexer_vectors(spec, indexer)


def indexer_products(spec: ModelSpec, indexer: IndexerSpec) -> list[tuple[int, int]]:
    """Returns (columns that are read, rows that are made) of an indexer's matrices.

    These are queries from the latent query, a weight for each head, and one key for all heads; where keys are
    compressed, entries and their weights in place of the keys.
    """
    if indexer.shared:
        return []
    latent = spec.mla or spec.compressed
    rank = (latent.q_lora_rank if latent else None) or spec.hidden
    keys = (spec.hidden, indexer.head_dim)
    if spec.compressed:
        keys = (spec.hidden, spec.compressed.series * indexer.head_dim)
    several = [keys] * (2 if spec.compressed else 1)
    return [(rank, indexer.heads * indexer.head_dim), (spec.hidden, indexer.heads), *several]


def indexer_vectors(spec: ModelSpec, indexer: IndexerSpec) -> int:
    """Returns the elements of an indexer's other parameters: a LayerNorm of its keys, or a norm of its entries and the
    table that weights tokens by their place."""
    if indexer.shared:
        return 0
    if spec.compressed:
        return indexer.head_dim + spec.compressed.vectors(indexer.head_dim)
    return 2 * indexer.head_dim


def halves(spec: ModelSpec) -> int:
    """Returns how many halves a layer has: mixer and feed-forward, or one of them."""
    return spec.has_mixer + spec.has_feed_forward


def gated_norms(spec: ModelSpec) -> int:
    """Returns how many norms of a layer have a gate, where `norm_gate_rank` is above 0."""
    return spec.has_mixer + (spec.moe is not None)


def block_of(layer: ModelSpec) -> ModelSpec:
    """Returns a layer's shared block as a model of one layer, whose attention reads the stream and the embedding."""
    block = layer.shared_block
    assert block is not None
    return replace(
        layer,
        scan=None,
        shared_block=None,
        n_heads=block.n_heads,
        n_kv_heads=block.n_kv_heads,
        head_dim=block.head_dim,
        ffn_hidden=block.ffn_hidden,
        attention_input=2 * layer.hidden,
        mlp="geglu",
        position="rope" if block.rotates else "none",
    )


def adapter_products(layer: ModelSpec) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Returns (columns that are read, rows that are made) of both matrices of each adapter beside a shared block."""
    block, hidden = layer.shared_block, layer.hidden
    assert block is not None
    rank, inside = block.attention_adapter, 2 * hidden
    widths = [n * block.head_dim for n in (block.n_heads, block.n_kv_heads, block.n_kv_heads)] if rank else []
    found = [((inside, rank), (rank, width)) for width in widths]
    ffn = block.ffn_adapter
    return found + ([((hidden, ffn), (ffn, 2 * block.ffn_hidden))] if ffn else [])


def block_parameters(layer: ModelSpec) -> int:
    """Returns the parameters that layers share of a shared block: its matrices and its two norms."""
    block = block_of(layer)
    norms = _norm(layer, 2 * layer.hidden) + _norm(layer, layer.hidden)
    return _attention(block) + _feed_forward(block, block.ffn_hidden) + norms


def _reuses(layer: ModelSpec) -> bool:
    return layer.shared_block is not None and layer.shared_block.again


def _shared_block(layer: ModelSpec) -> int:
    """Returns the parameters of a layer's own of its shared block, with the block's where it is the first one."""
    if layer.shared_block is None:
        return 0
    own = layer.hidden**2 + sum(n * r + r * k for (n, r), (_, k) in adapter_products(layer))
    return own if layer.shared_block.again else own + block_parameters(layer)


def _layer_norms(spec: ModelSpec) -> int:
    places = 1 if spec.parallel and spec.shared_norm else halves(spec)
    each = 2 if spec.norm_place == "both" else 1
    beside = bool(spec.layer_input) + bool(spec.laurel_rank)
    count = (spec.block_norms * places * each + beside) * _norm(spec, spec.hidden)
    if spec.n_heads and spec.mla:
        count += _norm(spec, spec.mla.kv_lora_rank) + _norm(spec, spec.mla.q_lora_rank or 0)
    elif spec.n_heads and spec.compressed:
        count += sum(_norm(spec, width) for width in spec.compressed.norm_widths(spec.head_dim))
    elif spec.n_heads and spec.qk_norm:
        biased = spec.norm == "layernorm" and spec.norm_bias and spec.qk_norm_over == "head"
        count += sum(qk_norm_widths(spec)) * (1 + biased)
    return count


def qk_norm_widths(spec: ModelSpec) -> tuple[int, ...]:
    """Returns the widths of the weights of the norms on queries and, where the layer has its own, on keys."""
    heads = {"head": (1, 1), "all_heads": (spec.n_heads, spec.n_kv_heads), "plain": (0, 0)}[spec.qk_norm_over]
    widths = tuple(n * spec.head_dim for n in heads)
    return widths[:1] if spec.shared_kv else widths


def _feed_forward(spec: ModelSpec, width: int) -> int:
    if not width:
        return 0
    up = _linear(spec.hidden, width, spec.mlp_bias)
    return up * (2 if spec.gated_mlp else 1) + _linear(width, spec.hidden, spec.mlp_bias)


def _mean_attention_width(spec: ModelSpec) -> float:
    if spec.shared_block:
        return spec.shared_block.n_heads * spec.shared_block.head_dim
    keys = spec.mla.qk_nope_dim + spec.mla.qk_rope_dim if spec.mla else spec.head_dim
    return spec.n_heads * (keys + spec.value_dim) / 2 * (1 + spec.differential) * (1 + spec.shortcut)


def _keys(spec: ModelSpec, seq_len: int) -> float:
    """Returns the keys that count for each query of a layer: all of the sequence, or those that it reads of compressed
    ones."""
    if not spec.n_heads:
        return seq_len if spec.shared_block else 0.0
    if spec.compressed is None:
        return seq_len
    most = spec.indexer.top_k if spec.indexer else None
    return spec.compressed.mean_keys(seq_len, spec.sliding_window or seq_len, most)
