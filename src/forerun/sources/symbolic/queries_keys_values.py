"""Queries, keys and values: their projections, norms, rotary embedding and copies."""

from __future__ import annotations

from forerun.describe.model.layer_parameters import own_kv, qk_norm_widths
from forerun.describe.stacks.stack import NormStyle, Stack
from forerun.sources.symbolic.attention_experts import queries_of_experts
from forerun.sources.symbolic.compressed import compressed_inputs, key_name
from forerun.sources.symbolic.indexer import indexer
from forerun.sources.symbolic.linear import Section
from forerun.sources.symbolic.products import Product
from forerun.sources.symbolic.shapes import ceil_div
from forerun.sources.symbolic.tape import TapeOp
from forerun.sources.symbolic.weights import Matrix

SHARED = ("k.shared", "v.shared")
"""keys and values that an earlier layer has made"""


def queries_keys_values(section: Section, x: str, module: int) -> None:
    """Writes the inputs of an attention kernel (`query_names`) from the normed input `x`."""
    model = section.kernels.model
    if model.compressed:
        compressed_inputs(section, model.compressed, x, module)
        _layout_copies(section, module)
        return
    if model.attention_experts:
        queries_of_experts(section, x, module)
    elif model.mla:
        _latent_projections(section, x, module)
    else:
        _projections(section, x, module)
    if model.relative_rank:
        _relative_biases(section, module)
    if model.conv_taps:
        _convolved_keys_values(section, module)
    if model.qk_conv_taps:
        _convolved_heads(section, module)
    _rope_and_norms(section, module)
    _repeat_kv(section, module)
    _layout_copies(section, module)


def attention_bytes(section: Section) -> tuple[int, int, int, int]:
    """Returns the bytes of queries, of keys, of values, and of the attention output."""
    s = section.kernels.shapes
    return (
        s.tokens * s.heads * s.head_dim * s.act_bytes,
        s.tokens * s.kv_heads * s.head_dim * s.act_bytes,
        s.tokens * s.kv_heads * s.v_head_dim * s.act_bytes,
        s.tokens * s.heads * s.v_head_dim * s.act_bytes,
    )


def _projections(section: Section, x: str, module: int) -> None:
    kernels, s = section.kernels, section.kernels.shapes
    q, k, v = s.heads * s.head_dim, s.kv_heads * s.head_dim, s.kv_heads * s.v_head_dim
    hidden = kernels.model.attention_input or s.hidden
    own, gates = own_kv(kernels.model), kernels.model.attention_gate
    if kernels.stack.fused_qkv:
        width = q * (1 + gates) + sum((k, v)[:own])
        outs = [("attention.qkv", "q", width), *_further_products(section)]
        section.column("attention.qkv", x, hidden, outs, kernels.model.qkv_bias, module)
        apart = [q * (1 + gates), *(k, v)[:own]]  # an optimizer of matrices takes the parts one by one
        at = len(section.weights.shapes) - len(outs)
        section.weights.shapes[at : at + 1] = [Matrix(rows, hidden) for rows in apart]
    else:
        outs = [("attention.q", "q", q), ("attention.k", "k", k), ("attention.v", "v", v)]
        outs = [*outs[: 1 + own], *([("attention.gate_in", "gate", q)] if gates else [])]
        outs += _further_products(section)
        section.column("attention.qkv", x, hidden, outs, kernels.model.qkv_bias, module)
    if kernels.model.qkv_bias and not kernels.model.key_bias and own:
        _drop_key_bias(section.weights.vectors, len(outs), k)


def _drop_key_bias(vectors: list[int], outs: int, width: int) -> None:
    """Removes the bias of keys of `width` from those of the last `outs` products: of one for all, or of the second."""
    if vectors[-outs] > width:
        vectors[-outs] -= width
    else:
        del vectors[1 - outs]


def _further_products(section: Section) -> list[tuple[str, str, int]]:
    """Returns (name, tensor, width) of further products of the normed input: a gate for each head, and the vectors from
    which heads mix the biases of relative positions.
    """
    model, heads = section.kernels.model, section.kernels.shapes.heads
    gate = [("attention.head_gate", "head_gate", heads)] if model.head_gate else []
    return gate + ([("attention.relative", "relative", heads * model.relative_rank)] if model.relative_rank else [])


def _relative_biases(section: Section, module: int) -> None:
    """Writes the bias that each head of a token adds to its scores at each distance; whole on each tensor-parallel
    rank are the profiles that it mixes."""
    s, model = section.kernels.shapes, section.kernels.model
    section.weights.add_matrix(model.relative_rank, model.relative_extent)
    sizes = (model.relative_rank, model.relative_extent)
    product = Product("attention.relative_bias", "relative", "relative.bias", *sizes, False, module)
    section.linear(product, s.tokens * s.heads)


def _convolved_keys_values(section: Section, module: int) -> None:
    """Writes the short convolutions of keys and values."""
    kernels, s = section.kernels, section.kernels.shapes
    _, kv, values, _ = attention_bytes(section)
    widths = [s.kv_heads * s.head_dim, s.kv_heads * s.v_head_dim]
    section.weights.vectors += [width * kernels.model.conv_taps for width in widths]
    reads = ("q",) if _fused(section) else ("k", "v")
    makes, elements = (("k.conv", kv), ("v.conv", values)), s.tokens * sum(widths)
    style = kernels.stack.activation
    section.pointwise("attention.kv_conv", "residual_conv", elements, style, reads, makes, reads, module)


def _convolved_heads(section: Section, module: int) -> None:
    """Writes the convolutions of queries and keys, by channel and by head, and the sum with their inputs. The second
    convolution is a product of each head.
    """
    kernels, s, model = section.kernels, section.kernels.shapes, section.kernels.model
    heads, size = s.heads + s.kv_heads, s.act_bytes
    elements = s.tokens * heads * s.head_dim
    section.weights.vectors += [heads * s.head_dim * (model.qk_conv_taps + 2)]
    section.weights.add_matrix(s.head_dim * model.head_conv_taps, heads * s.head_dim)
    reads = ("q",) if _fused(section) else ("q", "k")
    style, made = kernels.stack.activation, (("qk.conv", elements * size),)
    section.pointwise("attention.qk_conv", "short_conv", elements, style, reads, made, reads, module)
    sizes = (s.head_dim * model.head_conv_taps, s.head_dim)
    section.linear(Product("attention.head_conv", "qk.conv", "qk.heads", *sizes, False, module, heads), s.tokens)
    made = (("qk.mixed", elements * size),)
    section.pointwise("attention.qk_sum", "residual", elements, "composed", ("qk.heads", *reads), made, (), module)


def _latent_projections(section: Section, x: str, module: int) -> None:
    """Writes the projections of multi-head latent attention: low-rank down (replicated over tp), norms, up."""
    s, mla = section.kernels.shapes, section.kernels.model.mla
    assert mla is not None
    tokens = s.tokens_sp
    query = x
    section.fan_out("attention.down", x, tokens * s.hidden, 2, module)
    if mla.q_lora_rank:
        section.weights.add_matrix(s.hidden, mla.q_lora_rank)
        section.linear(Product("attention.q_down", x, "q_low", s.hidden, mla.q_lora_rank, False, module), tokens)
        section.norm("attention.q_norm", "q_low", "q_normed", tokens, module, mla.q_lora_rank)
        query = "q_normed"
    rank, outs = mla.q_lora_rank or s.hidden, [("attention.q_up", "q", s.heads * s.head_dim)]
    gates = [("attention.gate_in", "gate", s.heads * s.v_head_dim)]
    read = query
    if mla.gated_query:
        outs, read, rank = outs + gates, "q_both", 2 * rank
        made = ((read, tokens * rank * s.act_bytes),)
        section.pointwise("attention.q_both", "copy", tokens * rank, "fused", ("q_low", query), made, module=module)
    section.column("attention.q_up", read, rank, outs, False, module)
    width = mla.kv_lora_rank + mla.qk_rope_dim
    section.weights.add_matrix(s.hidden, width)
    section.linear(Product("attention.kv_down", x, "kv_low", s.hidden, width, False, module), tokens)
    section.norm("attention.kv_norm", "kv_low", "kv_normed", tokens, module, mla.kv_lora_rank)
    up = s.heads * (mla.qk_nope_dim + mla.v_head_dim)
    section.column("attention.kv_up", "kv_normed", mla.kv_lora_rank, [("attention.kv_up", "kv", up)], False, module)
    chooser = section.kernels.model.indexer
    apart = _further_products(section) + gates * (section.kernels.model.attention_gate and not mla.gated_query)
    if apart:
        section.column(apart[0][0], x, s.hidden, apart, False, module)
    if chooser and not chooser.shared:
        indexer(section, chooser, x, query, module)
    keys = s.tokens * s.heads * s.head_dim * s.act_bytes
    values = s.tokens * s.heads * s.v_head_dim * s.act_bytes
    elements = s.tokens * s.heads * (s.head_dim + s.v_head_dim)
    section.pointwise(
        "attention.assemble", "copy", elements, "fused", ("kv",), (("k", keys), ("v", values)), module=module
    )


def _rope_and_norms(section: Section, module: int) -> None:
    kernels, s = section.kernels, section.kernels.shapes
    q, kv, values, _ = attention_bytes(section)
    fused, own = _fused(section), not kernels.model.shared_kv
    rotated = s.heads + s.kv_heads * own
    elements = s.tokens * s.head_dim * rotated
    makes: tuple[tuple[str, int], ...] = (("q.normed", q), ("k.normed", kv))[: 1 + own]
    reads: tuple[str, ...] = ("q",) if fused or not own else ("q", "k")
    if kernels.model.conv_taps:
        reads = ("q", "k.conv")
    if kernels.model.qk_conv_taps:
        reads = ("qk.mixed",)
    if kernels.model.qk_norm:
        section.weights.vectors += _qk_norm_vectors(section)
        pattern, style = kernels.norm_pattern, _narrow_norm(kernels.stack)
        section.pointwise("attention.qk_norm", pattern, elements, style, reads, makes, reads, module)
        reads = ("q.normed", "k.normed")[: 1 + own]
    if _norms_values(section):
        value, style = s.tokens * s.kv_heads * s.v_head_dim, _narrow_norm(kernels.stack)
        read = ("v.conv" if kernels.model.conv_taps else "q" if fused else "k" if kernels.model.equal_kv else "v",)
        made = (("v.normed", values),)
        section.pointwise("attention.v_norm", "weightless_norm", value, style, read, made, read, module)
    makes = (("q.rotated", q), ("k.rotated", kv))[: 1 + own]
    if fused and own and not _norms_values(section) and not kernels.model.conv_taps:
        makes = (*makes, ("v", values))  # rotation copies queries and keys out of the fused projection
    if kernels.model.position == "rope":
        if kernels.model.mla:
            elements = s.tokens * kernels.model.mla.qk_rope_dim * rotated
        section.pointwise("attention.rope", "rope", elements, kernels.stack.rope, reads, makes, module=module)
    else:
        section.tape.add(TapeOp("attention.split", "view", module, [], [], reads=reads, makes=()))


def _fused(section: Section) -> bool:
    """Returns whether one product makes queries, keys and values."""
    model = section.kernels.model
    return section.kernels.stack.fused_qkv and not (model.mla or model.attention_experts)


def _norms_values(section: Section) -> bool:
    """Returns whether the layer norms its own values; those that are its keys too have a norm to differ from them."""
    model = section.kernels.model
    return (model.value_norm or model.equal_kv) and not model.shared_kv


def _narrow_norm(stack: Stack) -> NormStyle:
    """Returns the style of norms over a head, whose rows are short.

    ATen's kernel gives each row to a block of threads, and most of these threads idle. So it is no faster than one
    kernel for each operation (pytorch/pytorch pull request 150576: slower "in the narrow case").
    """
    return "composed" if stack.norm == "aten" else stack.norm


def _qk_norm_vectors(section: Section) -> list[int]:
    """Returns the elements of the weights (and biases) of the norms on queries and keys."""
    model = section.kernels.model
    if model.mla:
        return [section.kernels.shapes.head_dim] * 2
    local = section.tp if model.qk_norm_over == "all_heads" else 1
    weights = [ceil_div(width, local) for width in qk_norm_widths(model) if width]
    biased = model.norm == "layernorm" and model.norm_bias and model.qk_norm_over == "head"
    return weights * (1 + biased)


def query_names(section: Section) -> tuple[str, str, str]:
    """Returns the names of the tensors that the attention kernel reads: queries, keys, values."""
    compressed = section.kernels.model.compressed
    if compressed:
        keys = key_name(section, compressed)
        return "q.rotated", keys, keys
    query, key, value = _projected_names(section)
    return (query, "k.repeated", "v.repeated") if repeats_kv(section) else (query, key, value)


def _projected_names(section: Section) -> tuple[str, str, str]:
    """Returns the names of queries, keys and values before key and value heads are repeated."""
    model, fused = section.kernels.model, _fused(section)
    if model.shared_kv:
        return "q.rotated" if model.position == "rope" else "q.normed" if model.qk_norm else "q", *SHARED
    value = "v.normed" if _norms_values(section) else "v.conv" if model.conv_taps else "v"
    if model.position == "rope":
        return "q.rotated", "k.rotated", value
    value = "q" if fused and value == "v" else value
    if model.qk_norm:
        return "q.normed", "k.normed", value
    return "q", "k.conv" if model.conv_taps else "q" if fused else "k", value


def repeats_kv(section: Section) -> bool:
    """Returns whether key and value heads are copied to the number of query heads; a compiler fuses the copies away."""
    kernels, s = section.kernels, section.kernels.shapes
    return (
        kernels.stack.repeat_kv
        and s.heads != s.kv_heads
        and not (kernels.model.mla or kernels.model.compressed)
        and not kernels.plan.compiles_layers
    )


def _repeat_kv(section: Section, module: int) -> None:
    """Writes the copies of key and value heads, which the kernel keeps for the backward pass."""
    if not repeats_kv(section):
        return
    kernels, s = section.kernels, section.kernels.shapes
    keys, values = s.tokens * s.heads * s.head_dim, s.tokens * s.heads * s.v_head_dim
    forward, backward = kernels.pattern("copy", keys + values, "composed")
    makes = (("k.repeated", keys * s.act_bytes), ("v.repeated", values * s.act_bytes))
    reads = tuple(dict.fromkeys(_projected_names(section)[1:]))
    section.tape.add(TapeOp("attention.repeat_kv", "pointwise", module, forward, backward, reads=reads, makes=makes))


def _layout_copies(section: Section, module: int) -> None:
    kernels, s = section.kernels, section.kernels.shapes
    copies = kernels.stack.qkv_copies
    if not copies:
        return
    forward, backward = kernels.pattern("copy", copies * s.tokens * s.heads * s.head_dim, "fused")
    section.tape.add(TapeOp("attention.layout_in", "pointwise", module, forward, backward))
