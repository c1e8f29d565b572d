"""The matrices among a model's parameters, as PyTorch keeps them; low-rank gradient compression works on them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from forerun.describe.model.encoder import EncoderSpec
from forerun.describe.model.layer_parameters import (
    adapter_products,
    attention_expert_products,
    block_of,
    conv_widths,
    dense_half,
    gated_norms,
    halves,
    indexer_products,
    memory_width,
    projected_width,
    router_products,
)
from forerun.describe.model.layered import Layer, LayeredModel
from forerun.describe.model.parameters import layer_counts
from forerun.describe.model.spec import MLASpec, ModelSpec

Matrix = tuple[int, int]
"""rows (the first dimension) and columns (all others together) of a parameter"""


def matrices(model: ModelSpec | LayeredModel) -> Counter[Matrix]:
    """Returns the number of matrices of each shape; queries, keys and values of a layer form one matrix.

    Parameters of custom layers count as vectors, since their shape is unknown.
    """
    if isinstance(model, LayeredModel):
        return Counter(matrix for layer in model.layers for matrix in _of_layer(layer))
    return Counter(_outside_layers(model)) + _in_layers(model) + (_of_encoder(model.runs) if model.runs else Counter())


def _in_layers(model: ModelSpec) -> Counter[Matrix]:
    found = Counter[Matrix]()
    for layer, count in layer_counts(model):
        found.update({matrix: n * count for matrix, n in Counter(_in_layer(layer)).items()})
    return found


def _of_encoder(encoder: EncoderSpec[ModelSpec]) -> Counter[Matrix]:
    """Returns the matrices of an encoder and its projectors that are trained."""
    gates = encoder.projector[:1] * encoder.projector_gated
    found = Counter((n, m) for m, n in [*gates, *encoder.projector] * encoder.projectors)
    if encoder.frozen:
        return found
    stack = encoder.stack
    found.update((n, m) for m, n in encoder.stem)
    found.update([(stack.max_positions, stack.hidden)] if stack.position == "learned" else [])
    return found + _in_layers(stack)


def _of_layer(layer: Layer) -> list[Matrix]:
    if not layer.parameters or layer.layer_type not in ("conv2d", "linear", "attention", "embedding"):
        return []
    weights = layer.parameters[:2] if layer.layer_type == "attention" else layer.parameters[:1]
    if layer.layer_type == "conv2d":
        rows = [layer.output_shape[0]]
    elif layer.layer_type == "attention":
        rows = [3 * layer.output_shape[-1], layer.output_shape[-1]]
    else:
        rows = [layer.output_shape[-1]]
    return [(n, size // n) for n, size in zip(rows, weights, strict=False) if size % n == 0]


def _outside_layers(spec: ModelSpec) -> list[Matrix]:
    hidden = spec.hidden
    found = [(spec.vocab, hidden)] * (1 if spec.tied_embeddings else 2)
    found += [(spec.max_positions, hidden)] if spec.position == "learned" else []
    found += [(spec.token_types, hidden)] if spec.token_types else []
    if spec.layer_input:
        inputs = spec.n_layers * spec.layer_input
        found += [(spec.layer_input_vocab, inputs), (inputs, hidden)]
    if spec.streams and spec.streams.rule == "altup":
        found += [(hidden, hidden)] * (2 * (spec.streams.count - 1))
    elif spec.streams:
        found += [(spec.streams.count, spec.streams.count * hidden)]
    found += [(hidden, hidden)] * (spec.pooler + spec.head_transform)
    return found + ([(spec.pooler_classes, hidden)] if spec.pooler_classes else [])


def _in_layer(spec: ModelSpec) -> list[Matrix]:
    """Returns the matrices of a model of one layer."""
    if spec.shortcut:
        once = _in_layer(dense_half(spec))
        experts = Counter(_in_layer(replace(spec, shortcut=False))) - Counter(_attention(spec))
        return [*once, *once, *experts.elements()]
    found = _attention(spec) if spec.n_heads and spec.cross_attention != "instead" else []
    if spec.cross_attention != "none":
        keys_values = spec.n_kv_heads * (spec.head_dim + spec.value_dim)
        found += [(spec.n_heads * spec.head_dim, spec.hidden), (keys_values, memory_width(spec))]
        found += [(spec.hidden, spec.n_heads * spec.value_dim)]
    found += [(spec.n_heads, spec.hidden)] * spec.head_gate if spec.n_heads else []
    if spec.shared_block:
        found += [] if spec.shared_block.again else _in_layer(block_of(spec))
        found += [(k, n) for adapter in adapter_products(spec) for n, k in adapter] + [(spec.hidden, spec.hidden)]
    if spec.norm_gate_rank:
        rank = spec.norm_gate_rank
        found += [(rank, spec.hidden), (spec.hidden, rank)] * gated_norms(spec)
    if spec.conv_taps:
        found += [(width, spec.conv_taps) for width in conv_widths(spec)]
    if spec.n_heads and spec.qk_conv_taps:
        channels = (spec.n_heads + spec.n_kv_heads) * spec.head_dim
        found += [(channels, spec.qk_conv_taps), (channels, spec.head_dim * spec.head_conv_taps)]
    if spec.n_heads and spec.relative_rank:
        found.append((spec.relative_rank, spec.relative_extent))
    if spec.layer_input:
        found += [(spec.layer_input, spec.hidden), (spec.hidden, spec.layer_input)]
    if spec.laurel_rank:
        found += [(spec.laurel_rank, spec.hidden), (spec.hidden, spec.laurel_rank)]
    if spec.streams and spec.streams.rule == "altup":
        n = spec.streams.count
        found += [(n, spec.hidden), (n, n), (n * n, n)]
    elif spec.streams:
        found += [(spec.streams.coefficients, spec.streams.count * spec.hidden)] * halves(spec)
    if spec.scan is not None:
        scan, hidden = spec.scan, spec.hidden
        found += [(scan.in_width, hidden), (hidden, scan.out_width), *((m, n) for n, m in scan.inner)]
        found += [(scan.conv_channels, scan.conv_taps)] if scan.conv_channels else []
    if spec.moe is None:
        return found + (_feed_forward(spec, spec.ffn_hidden) if spec.ffn_hidden else [])
    moe = spec.moe
    found += [(rows, columns) for columns, rows in router_products(spec, moe)] + moe.n_experts * _feed_forward(
        spec, moe.expert_ffn
    )
    found += _feed_forward(spec, moe.shared_ffn) if moe.shared_ffn else []
    return found + ([(1, spec.hidden)] if moe.shared_gate else [])


def _attention(spec: ModelSpec) -> list[Matrix]:
    hidden = spec.hidden
    if spec.mla is not None:
        return _latent_attention(spec, spec.mla)
    if spec.compressed is not None:
        products = spec.compressed.products(hidden, spec.n_heads, spec.head_dim)
        place = [(spec.compressed.rate, spec.compressed.series * spec.head_dim)] * (spec.compressed.rate > 0)
        return [*((m, n) for n, m in products), *place, *_indexer(spec)]
    if spec.attention_experts:
        return [(rows, columns) for columns, rows, count in attention_expert_products(spec) for _ in range(count)]
    return [(projected_width(spec), spec.attention_input or hidden), (hidden, spec.n_heads * spec.value_dim)]


def _latent_attention(spec: ModelSpec, mla: MLASpec) -> list[Matrix]:
    hidden, query = spec.hidden, spec.n_heads * (mla.qk_nope_dim + mla.qk_rope_dim)
    rank = mla.q_lora_rank
    queries = [(query, hidden)] if rank is None else [(rank, hidden), (query, rank)]
    up = (spec.n_heads * (mla.qk_nope_dim + mla.v_head_dim), mla.kv_lora_rank)
    found = [*queries, (mla.kv_lora_rank + mla.qk_rope_dim, hidden), up, (hidden, spec.n_heads * mla.v_head_dim)]
    gate = spec.n_heads * mla.v_head_dim
    if mla.gated_query and rank is not None:
        found[1] = (query + gate, 2 * rank)
    elif spec.attention_gate:
        found.append((gate, hidden))
    return [*found, *_indexer(spec)]


def _indexer(spec: ModelSpec) -> list[Matrix]:
    if spec.indexer is None or spec.indexer.shared:
        return []
    place = []
    if spec.compressed:
        place = [(spec.compressed.rate, spec.compressed.series * spec.indexer.head_dim)]
    return [*((m, n) for n, m in indexer_products(spec, spec.indexer)), *place]


def _feed_forward(spec: ModelSpec, width: int) -> list[Matrix]:
    return [(width, spec.hidden)] * (2 if spec.gated_mlp else 1) + [(spec.hidden, width)]
