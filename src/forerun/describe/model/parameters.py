"""Exact parameter counts of a model, in elements, and the model FLOPs that follow from them."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from forerun.describe.model.encoder import EncoderSpec
from forerun.describe.model.layer_parameters import (
    block_parameters,
    cross_elements,
    feed_forward_elements,
    idle_of_attention,
    kind_parameters,
    norm_elements,
)
from forerun.describe.model.spec import ModelSpec

_TABLES = ("embedding", "position_embedding", "token_type_embedding", "layer_input_table")


def outer_parameters(spec: ModelSpec) -> dict[str, int]:
    """Returns the parameters outside the layers by part, for the parts that the model has; a tied head adds no matrix.

    Parts: embedding, position_embedding, token_type_embedding, layer_input_table, layer_input_projection, streams,
    embedding_norm, final_norm, pooler, head_transform, head, mtp, encoder (with its projector).
    """
    hidden, norm, inputs = spec.hidden, norm_elements(spec, spec.hidden), spec.n_layers * spec.layer_input
    parts = {
        "embedding": spec.vocab * hidden,
        "position_embedding": spec.max_positions * hidden if spec.position == "learned" else 0,
        "token_type_embedding": spec.token_types * hidden,
        "layer_input_table": spec.layer_input_vocab * inputs,
        "layer_input_projection": hidden * inputs + bool(inputs) * norm_elements(spec, spec.layer_input),
        "streams": spec.streams.outer_parameters(hidden) if spec.streams else 0,
        "embedding_norm": norm * spec.embedding_norm,
        "final_norm": norm * spec.final_norm,
        "pooler": spec.pooler * (hidden * hidden + hidden) + spec.pooler_classes * (hidden + 1),
        "head_transform": spec.head_transform * (hidden * hidden + spec.head_transform_bias * hidden + norm),
        "head": spec.vocab * (hidden * (not spec.tied_embeddings) + spec.head_bias),
        "mtp": spec.mtp_modules * _beside_layer(spec),
        "encoder": encoder_parameter_count(spec.runs) if spec.runs else 0,
    }
    return {part: count for part, count in parts.items() if count}


def _beside_layer(spec: ModelSpec) -> int:
    """Returns the parameters of a module that predicts a further token, but for its layer: norms and a projection."""
    return 3 * norm_elements(spec, spec.hidden) + 2 * spec.hidden * spec.hidden


def encoder_parameter_count(encoder: EncoderSpec[ModelSpec]) -> int:
    """Returns the number of the parameters of an encoder and its projector. A table of tokens belongs to the model."""
    return _stack_parameters(encoder) + _projector_parameters(encoder)


def _stack_parameters(encoder: EncoderSpec[ModelSpec]) -> int:
    stack = encoder.stack
    outer = outer_parameters(stack)
    own = sum(outer.get(part, 0) for part in ("position_embedding", "embedding_norm", "final_norm"))
    stem = sum(n * m + m * encoder.stem_bias for n, m in encoder.stem)
    return own + stem + _layers_parameters(stack) + encoder.other_parameters


def _projector_parameters(encoder: EncoderSpec[ModelSpec]) -> int:
    products = _projector_products(encoder)
    norm = encoder.projector_norm * (1 + encoder.projector_norm_bias)
    return encoder.projectors * (norm + sum(n * m + m * encoder.projector_bias for n, m in products))


def _projector_products(encoder: EncoderSpec[ModelSpec]) -> list[tuple[int, int]]:
    """Returns (columns that are read, rows that are made) of the products of one projector, with that of its gate."""
    return [*encoder.projector[:1] * encoder.projector_gated, *encoder.projector]


def _layers_parameters(spec: ModelSpec) -> int:
    return sum(n * sum(kind_parameters(layer).values()) for layer, n in layer_counts(spec))


def parameter_count(spec: ModelSpec) -> int:
    """Returns the number of all parameters; a tied embedding counts once."""
    return sum(outer_parameters(spec).values()) + _layers_parameters(spec)


def active_parameter_count(spec: ModelSpec) -> int:
    """Returns the number of parameters that compute one token: all but those of experts that it doesn't reach.

    Where a router may choose experts without weights, it is the mean over tokens.
    """
    idle = sum(
        n * (layer.moe.n_experts - layer.moe.mean_reached) * feed_forward_elements(layer, layer.moe.expert_ffn)
        for layer, n in layer_counts(spec)
        if layer.moe
    )
    idle += sum(n * idle_of_attention(layer) for layer, n in layer_counts(spec) if layer.n_heads)
    return parameter_count(spec) - round(idle)


@lru_cache(maxsize=256)
def compute_parameter_count(spec: ModelSpec) -> int:
    """Returns the number of active parameters that multiply: no look-up tables, but the head's matrix, tied or not,
    once for each token that is predicted, and blocks that layers share as often as they run.

    It excludes parameters that tokens of the sequence don't multiply: an encoder, and projections of its output in
    layers.
    """
    outer = outer_parameters(spec)
    tables = sum(outer.get(part, 0) for part in (*_TABLES, "encoder"))
    tables += sum(n * cross_elements(layer)[1] for layer, n in layer_counts(spec))
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
    times its forward FLOPs in place of the attention term. The FLOPs of an encoder, by its own N, L, h and s, are
    shared out among the tokens of the sequence.
    """
    encoder = 0.0 if spec.runs is None else _encoder_flops(spec, spec.runs) / seq_len
    return 6.0 * compute_parameter_count(spec) + _attention_flops(spec, seq_len) + encoder


def _attention_flops(spec: ModelSpec, seq_len: int) -> float:
    """Returns the FLOPs of both passes of attention and recurrences for one token, without products with weights."""
    pairs = sum(n * _mean_attention_width(layer) * _keys(layer, seq_len) for layer, n in layer_counts(spec))
    scans = sum(n * layer.scan.flops_per_token() for layer, n in layer_counts(spec) if layer.scan)
    return 12.0 * pairs + 3.0 * scans


def _encoder_flops(spec: ModelSpec, encoder: EncoderSpec[ModelSpec]) -> float:
    """Returns the FLOPs of both passes for all inputs of a sample: of the encoder, its projector, and the keys and
    values that layers of `spec` make of its output. What is frozen runs forward alone."""
    products = [n * m for n, m in encoder.stem]
    stem = sum(products) + (encoder.stem_rows - 1) * sum(products[:1])
    each = 6.0 * _layers_parameters(encoder.stack) + _attention_flops(encoder.stack, encoder.tokens)
    inside = encoder.tokens * each + 6.0 * (encoder.tokens - encoder.extra_tokens) * stem
    inside *= encoder.inputs * (1 / 3 if encoder.frozen else 1.0)
    projector = encoder.projectors * sum(n * m for n, m in _projector_products(encoder))
    read = sum(n * cross_elements(layer)[1] for layer, n in layer_counts(spec))
    return inside + 6.0 * encoder.out_tokens * (projector + read)


def layer_counts(spec: ModelSpec) -> list[tuple[ModelSpec, int]]:
    """Returns every distinct layer as a model of one layer, and the number of layers that are alike, those of modules
    that predict further tokens included."""
    counts = Counter(spec.kind_of_layer)
    counts[spec.kind_of_layer[-1]] += spec.mtp_modules
    return [(layer, counts[place]) for place, layer in enumerate(spec.kinds)]


def _reuses(layer: ModelSpec) -> bool:
    return layer.shared_block is not None and layer.shared_block.again


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
    if spec.cross_attention != "none":
        memory = spec.encoder.out_tokens if spec.encoder else 0
        return memory + seq_len * (spec.cross_attention == "behind")
    if spec.compressed is None:
        return seq_len
    most = spec.indexer.top_k if spec.indexer else None
    return spec.compressed.mean_keys(seq_len, spec.sliding_window or seq_len, most)
