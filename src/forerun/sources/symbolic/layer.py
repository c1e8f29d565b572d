"""Writes one layer of a transformer on a tape: attention and feed-forward, with its checkpoint regions."""

from __future__ import annotations

from forerun.sources.symbolic.attention import attention
from forerun.sources.symbolic.checkpoints import settle_activations
from forerun.sources.symbolic.cross_attention import cross_attention
from forerun.sources.symbolic.expert import experts, routed_experts
from forerun.sources.symbolic.feed_forward import feed_forward
from forerun.sources.symbolic.kernels import ENCODED, TransformerKernels
from forerun.sources.symbolic.linear import Section
from forerun.sources.symbolic.products import ATTENTION, ATTENTION_NORM, FFN, FFN_NORM, Product
from forerun.sources.symbolic.queries_keys_values import SHARED
from forerun.sources.symbolic.recurrence import scan
from forerun.sources.symbolic.shared_block import EMBEDDED, with_shared_block
from forerun.sources.symbolic.streams import after_half, after_layer, before_half, before_layer, stream_bytes
from forerun.sources.symbolic.tape import Tape, TapeOp
from forerun.sources.symbolic.weights import Weights


def layer_section(kernels: TransformerKernels, checkpointed: bool) -> Section:
    """Returns the section (tape and weights) of the layer that `kernels.model` describes."""
    model = kernels.model
    shared = [(name, 0) for name in SHARED] if model.shared_kv else []
    shared += [(EMBEDDED, 0)] if model.shared_block else []
    shared += [(ENCODED, 0)] if model.cross_attention != "none" else []
    section = Section(kernels, Tape([], kernels.marker), Weights())
    section.tape.inputs = (("x", stream_bytes(section)), *shared)
    write_layer(section)
    section.freeze()
    settle_activations(kernels, section.tape, checkpointed)
    return section


def write_layer(section: Section) -> None:
    """Writes the layer that reads the stream `x` and makes the stream `y`."""
    model = section.kernels.model
    if model.parallel:
        _parallel_halves(section)
    elif model.shortcut:
        _shortcut(section)
    else:
        _halves_in_turn(section)
    section.weights.vectors += [model.other_parameters] * (model.other_parameters > 0)


def _halves_in_turn(section: Section) -> None:
    """Writes a layer whose feed-forward reads the stream after the mixer's output is added."""
    model, corrects = section.kernels.model, section.kernels.model.streams
    altup = corrects is not None and corrects.rule == "altup"
    start = stream = before_layer(section, "x", ATTENTION)
    ends = ["y"] + ["f"] * (model.layer_input > 0) + ["c"] * altup
    """names of the stream behind the last half, the corrected streams and the layer, last first"""
    if model.has_mixer:
        branch = _half(section, stream, ATTENTION)
        after = "h" if model.has_feed_forward else ends[-1]
        mixed = "g" if model.laurel_rank else after
        after_half(section, "attention_residual", stream, branch, mixed, ATTENTION)
        if model.laurel_rank:
            _laurel_sum(section, mixed, after)
        stream = after
    if model.cross_attention == "behind":
        stream = _cross_half(section, stream)
    if model.has_feed_forward:
        branch = _half(section, stream, FFN)
        after_half(section, "ffn_residual", stream, branch, ends[-1], FFN)
    if altup:
        after_layer(section, start, ends.pop(), ends[-1], FFN)
    if model.layer_input:
        _layer_input(section, ends.pop(), ends[-1])


def _cross_half(section: Section, stream: str) -> str:
    """Writes the norms and the attention to the encoder's output behind the mixer; returns the stream behind them."""
    section.tape.rename("self.", (stream,))
    inside = _normed(section, stream, ATTENTION)
    cross_attention(section, inside, "cross.y", ATTENTION)
    branch = _normed_branch(section, "cross.y", ATTENTION)
    after_half(section, "cross_residual", stream, branch, "cross.h", ATTENTION)
    return "cross.h"


def _laurel(section: Section, x: str) -> None:
    """Writes the learned residual of the normed `x`: x plus the norm of a product of low rank."""
    kernels, s, rank = section.kernels, section.kernels.shapes, section.kernels.model.laurel_rank
    section.weights.add_matrix(s.hidden, rank)
    section.weights.add_matrix(rank, s.hidden)
    section.fan_out("laurel", x, s.tokens_sp * s.hidden, 3, ATTENTION)
    section.linear(Product("laurel.left", x, "laurel.low", s.hidden, rank, False, ATTENTION), s.tokens_sp)
    section.linear(Product("laurel.right", "laurel.low", "laurel.out", rank, s.hidden, False, ATTENTION), s.tokens_sp)
    section.norm("laurel.norm", "laurel.out", "laurel.normed", s.tokens_sp, ATTENTION_NORM)
    forward, backward = kernels.pattern("residual", s.tokens_sp * s.hidden, kernels.stack.residual)
    makes, reads = (("laurel.y", s.tokens_sp * s.hidden * s.act_bytes),), (x, "laurel.normed")
    section.tape.add(TapeOp("laurel.residual", "residual", ATTENTION, forward, backward, reads=reads, makes=makes))


def _laurel_sum(section: Section, x: str, y: str) -> None:
    """Writes y = (x + learned residual) / sqrt(2)."""
    kernels, s = section.kernels, section.kernels.shapes
    elements, makes = s.tokens_sp * s.hidden, ((y, s.tokens_sp * s.hidden * kernels.stream_bytes),)
    section.pointwise(
        "laurel.sum", "scaled_sum", elements, kernels.stack.residual, (x, "laurel.y"), makes, (), ATTENTION, "residual"
    )


def _layer_input(section: Section, x: str, y: str) -> None:
    """Writes the branch that gates the layer's own input by `x`; every tensor-parallel rank has its weights whole.

    Of several streams the first one gates it. The branch's output is added to the others.
    """
    kernels, s = section.kernels, section.kernels.shapes
    width, style, streams = kernels.model.layer_input, kernels.stack.activation, kernels.model.streams
    gate, product, out = "layer_input.in", "layer_input.product", "layer_input.out"
    section.weights.add_matrix(s.hidden, width)
    section.linear(Product(gate, x, gate, s.hidden, width, False, FFN), s.tokens_sp)
    makes = ((product, s.tokens_sp * width * s.act_bytes),)
    section.pointwise(product, "swiglu", s.tokens_sp * width, style, (gate,), makes, (gate,), FFN)
    section.weights.add_matrix(width, s.hidden)
    section.linear(Product(out, product, out, width, s.hidden, False, FFN), s.tokens_sp)
    section.norm("layer_input.norm", out, out + ".normed", s.tokens_sp, FFN_NORM)
    if streams is None:
        section.residual("layer_input_residual", x, out + ".normed", y, FFN)
        return
    elements, makes = (streams.count - 1) * s.tokens_sp * s.hidden, ((y, stream_bytes(section)),)
    reads = (x, out + ".normed")
    section.pointwise(
        "layer_input_residual", "residual", elements, kernels.stack.residual, reads, makes, (), FFN, "residual"
    )


def _half(section: Section, stream: str, half: int) -> str:
    """Writes the norms and the mixer or the feed-forward of a layer. Returns the name of the tensor to add to
    `stream`.
    """
    read, block = before_half(section, stream, half), section.kernels.model.shared_block
    if block and half == ATTENTION:
        read = with_shared_block(section, block, read)
    inside = _normed(section, read, half)
    if half == ATTENTION and section.kernels.model.laurel_rank:
        _laurel(section, inside)
    branch = _mixer(section, inside) if half == ATTENTION else _feed_forward(section, inside)
    return _convolved(section, _normed_branch(section, branch, half), half)


def _convolved(section: Section, branch: str, half: int) -> str:
    """Writes the short convolution of the output of a half, if the layer has one. Returns the name of the result."""
    kernels, s, y = section.kernels, section.kernels.shapes, f"{branch}.conv"
    if not kernels.model.conv_taps:
        return branch
    section.weights.vectors.append(s.hidden * kernels.model.conv_taps)
    elements, style = s.tokens_sp * s.hidden, kernels.stack.activation
    makes = ((y, elements * s.act_bytes),)
    section.pointwise(f"half{half}.conv", "residual_conv", elements, style, (branch,), makes, (branch,), half)
    return y


def _normed(section: Section, stream: str, half: int) -> str:
    """Writes the norm before a half; returns the name of the tensor that the half reads."""
    model, tokens = section.kernels.model, section.kernels.shapes.tokens_sp
    if not model.block_norms or model.norm_place == "after":
        return section.narrowed(stream, half)
    inside = f"{stream}.normed" if half == ATTENTION or not model.parallel else f"{stream}.ffn_normed"
    name, module = ("attention_norm", ATTENTION_NORM) if half == ATTENTION else ("ffn_norm", FFN_NORM)
    section.norm(name, stream, inside, tokens, module)
    if model.norm_gate_rank and (half == ATTENTION or model.moe):
        return _gated_norm(section, inside, name, half)
    return inside


def _gated_norm(section: Section, x: str, name: str, half: int) -> str:
    """Writes the gate of low rank that a norm's result `x` makes for itself; returns the name of the product.

    Every tensor-parallel rank has its weights whole.
    """
    kernels, s, rank = section.kernels, section.kernels.shapes, section.kernels.model.norm_gate_rank
    tokens, low, act, gate, y = s.tokens_sp, f"{x}.low", f"{x}.act", f"{x}.gate", f"{x}.gated"
    section.fan_out(name, x, tokens * s.hidden, 2, half)
    section.weights.add_matrix(s.hidden, rank)
    section.linear(Product(f"{name}.down", x, low, s.hidden, rank, False, half), tokens)
    style, makes = kernels.stack.activation, ((act, tokens * rank * s.act_bytes),)
    section.pointwise(act, "gelu", tokens * rank, style, (low,), makes, (low,), half)
    section.weights.add_matrix(rank, s.hidden)
    section.linear(Product(f"{name}.up", act, gate, rank, s.hidden, False, half), tokens)
    makes, reads = ((y, tokens * s.hidden * s.act_bytes),), (x, gate)
    section.pointwise(y, "output_gate", tokens * s.hidden, style, reads, makes, reads, half)
    return y


def _normed_branch(section: Section, branch: str, half: int) -> str:
    """Writes the norm after a half; returns the name of its result."""
    model, tokens = section.kernels.model, section.kernels.shapes.tokens_sp
    if not model.block_norms or model.norm_place == "before":
        return branch
    name, module = ("attention_post_norm", ATTENTION_NORM) if half == ATTENTION else ("ffn_post_norm", FFN_NORM)
    section.norm(name, branch, branch + ".normed", tokens, module)
    return branch + ".normed"


def _mixer(section: Section, x: str) -> str:
    """Writes the attention, the recurrence, or both side by side. Returns the name of their output."""
    model = section.kernels.model
    if model.cross_attention == "instead":
        cross_attention(section, x, "attention.y", ATTENTION)
        return "attention.y"
    if model.scan is None:
        attention(section, x, "attention.y", ATTENTION)
        return "attention.y"
    if not model.n_heads:
        scan(section, x, "scan.y", ATTENTION)
        return "scan.y"
    section.fan_out("mixers", x, section.kernels.shapes.tokens_sp * model.hidden, 2, ATTENTION)
    attention(section, x, "attention.y", ATTENTION)
    scan(section, x, "scan.y", ATTENTION)
    section.residual("mixers_sum", "attention.y", "scan.y", "mixers.y", ATTENTION)
    return "mixers.y"


def _feed_forward(section: Section, x: str) -> str:
    """Writes the feed-forward, dense or of experts. Returns the name of its output."""
    (experts if section.kernels.model.moe else feed_forward)(section, x, "ffn.y", FFN)
    return "ffn.y"


def _parallel_halves(section: Section) -> None:
    """Writes a layer whose feed-forward and mixer read the same input."""
    model, elements = section.kernels.model, section.kernels.shapes.tokens_sp * section.kernels.model.hidden
    section.fan_out("layer", "x", elements, 2, ATTENTION)
    inside = _normed(section, "x", ATTENTION)
    if model.shared_norm:
        section.fan_out("halves", inside, elements, 2, ATTENTION)
        other = inside
    else:
        other = _normed(section, "x", FFN)
    section.residual("attention_residual", "x", _mixer(section, inside), "h", ATTENTION)
    section.residual("ffn_residual", "h", _feed_forward(section, other), "y", FFN)


def _shortcut(section: Section) -> None:
    """Writes a layer with two attentions, two dense feed-forwards and experts. The experts read the input of the first
    feed-forward, and their output is added after the second one. All work between runs beside the exchanges of
    tokens.
    """
    after_half(section, "attention_residual", "x", _half(section, "x", ATTENTION), "first.h", ATTENTION)
    inside = _normed(section, "first.h", FFN)
    section.tape.rename("first.", ("first.h", inside))

    def beside_dispatch() -> None:
        feed_forward(section, inside, "dense.y", FFN, prefix="dense")
        after_half(section, "dense_residual", "first.h", "dense.y", "second.x", FFN)
        branch = _half(section, "second.x", ATTENTION)
        after_half(section, "attention_residual", "second.x", branch, "second.h", ATTENTION)

    def beside_combine() -> None:
        feed_forward(section, _normed(section, "second.h", FFN), "second.dense.y", FFN, prefix="second.dense")
        after_half(section, "dense_residual", "second.h", "second.dense.y", "second.y", FFN)

    routed_experts(section, inside, "routed", FFN, beside_dispatch, beside_combine)
    after_half(section, "ffn_residual", "second.y", "routed", "y", FFN)
