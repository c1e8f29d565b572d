"""Exact parameter counts of a layer by part, in elements."""

from __future__ import annotations

from dataclasses import replace

from forerun.describe.model.spec import IndexerSpec, MLASpec, ModelSpec, MoESpec


def layer_parameters(spec: ModelSpec, layer: int) -> dict[str, int]:
    """Returns the parameters of layer number `layer` (from 0) by part, for the parts that the layer has.

    Parts: attention, scan, norm (every norm of the layer, those inside attention included), norm_gate,
    cross_attention, shared_block, conv, residual, mlp, router, experts (all of them), shared_experts (with their
    gate), layer_input, other.
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
        "attention": 0 if layer.cross_attention == "instead" else _attention(layer),
        "scan": layer.scan.parameters(layer.hidden) if layer.scan else 0,
        "norm": _layer_norms(layer),
        "shared_block": _shared_block(layer),
        "norm_gate": 2 * layer.hidden * layer.norm_gate_rank * gated_norms(layer),
        "mlp": 0 if layer.moe else feed_forward_elements(layer, layer.ffn_hidden),
        "layer_input": 2 * layer.hidden * layer.layer_input,
        "streams": layer.streams.layer_parameters(layer.hidden, halves(layer)) if layer.streams else 0,
        "conv": layer.conv_taps * sum(conv_widths(layer)) + _head_convolutions(layer),
        "residual": 4 * layer.hidden * halves(layer) * layer.residual_scales,
        "laurel": 2 * layer.hidden * layer.laurel_rank,
        "cross_attention": _cross_attention(layer),
        "other": layer.other_parameters,
    }
    if layer.moe:
        moe = layer.moe
        parts["router"] = sum(n * m for n, m in router_products(layer, moe)) + moe.choices * moe.router_bias
        parts["router"] += 4 * moe.router_width  # three biases and a norm
        parts["experts"] = moe.n_experts * feed_forward_elements(layer, moe.expert_ffn)
        if moe.shared_ffn:
            parts["shared_experts"] = feed_forward_elements(layer, moe.shared_ffn) + moe.shared_gate * layer.hidden
    return {part: count for part, count in parts.items() if count}


def dense_half(layer: ModelSpec) -> ModelSpec:
    """Returns half a layer with a `shortcut`: attention and dense feed-forward, without the experts."""
    return replace(layer, shortcut=False, moe=None)


def _linear(rows: int, columns: int, bias: bool) -> int:
    return rows * columns + bias * columns


def norm_elements(spec: ModelSpec, width: int) -> int:
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
        - spec.n_kv_heads * spec.head_dim * (spec.qkv_bias and not spec.key_bias and own_kv(spec) > 0)
        + _linear(read, spec.hidden, spec.out_bias)
        + sinks
    )


def memory_width(layer: ModelSpec) -> int:
    """Returns the width of the encoder's output, which a layer with `cross_attention` reads."""
    encoder = layer.encoder
    if encoder is None:
        return layer.hidden
    return encoder.projector[-1][1] if encoder.projector else encoder.stack.hidden


def cross_elements(layer: ModelSpec) -> tuple[int, int]:
    """Returns the parameters of a layer's attention to the encoder's output: those that tokens of the sequence
    multiply, and those of keys and values, which tokens of the encoder's output multiply."""
    if layer.cross_attention == "none":
        return 0, 0
    queries, read = layer.n_heads * layer.head_dim, layer.n_heads * layer.value_dim
    keys, values = layer.n_kv_heads * layer.head_dim, layer.n_kv_heads * layer.value_dim
    own = _linear(layer.hidden, queries, layer.qkv_bias) + _linear(read, layer.hidden, layer.out_bias)
    biases = layer.qkv_bias * (keys * layer.key_bias + values)
    return own, memory_width(layer) * (keys + values) + biases


def _cross_attention(layer: ModelSpec) -> int:
    """Returns the parameters of a layer's attention to the encoder's output."""
    return sum(cross_elements(layer))


def attention_expert_products(spec: ModelSpec) -> list[tuple[int, int, int]]:
    """Returns (columns that are read, rows that are made, matrices) of an attention with experts: its router, queries,
    outputs, and keys and values together."""
    inside, hidden, count = spec.n_kv_heads * spec.head_dim, spec.hidden, spec.attention_experts
    return [(hidden, count, 1), (hidden, inside, count), (inside, hidden, count), (hidden, 2 * inside, 1)]


def idle_of_attention(spec: ModelSpec) -> int:
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
    norms = norm_elements(layer, 2 * layer.hidden) + norm_elements(layer, layer.hidden)
    return _attention(block) + feed_forward_elements(block, block.ffn_hidden) + norms


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
    places += spec.cross_attention == "behind"
    count = (spec.block_norms * places * each + beside) * norm_elements(spec, spec.hidden)
    if spec.n_heads and spec.mla:
        count += norm_elements(spec, spec.mla.kv_lora_rank) + norm_elements(spec, spec.mla.q_lora_rank or 0)
    elif spec.n_heads and spec.compressed:
        count += sum(norm_elements(spec, width) for width in spec.compressed.norm_widths(spec.head_dim))
    elif spec.n_heads and spec.qk_norm:
        biased = spec.norm == "layernorm" and spec.norm_bias and spec.qk_norm_over == "head"
        count += sum(qk_norm_widths(spec)) * (1 + biased)
    return count


def qk_norm_widths(spec: ModelSpec) -> tuple[int, ...]:
    """Returns the widths of the weights of the norms on queries and, where the layer has its own, on keys."""
    heads = {"head": (1, 1), "all_heads": (spec.n_heads, spec.n_kv_heads), "plain": (0, 0)}[spec.qk_norm_over]
    widths = tuple(n * spec.head_dim for n in heads)
    return widths[:1] if spec.shared_kv else widths


def feed_forward_elements(spec: ModelSpec, width: int) -> int:
    if not width:
        return 0
    up = _linear(spec.hidden, width, spec.mlp_bias)
    return up * (2 if spec.gated_mlp else 1) + _linear(width, spec.hidden, spec.mlp_bias)
