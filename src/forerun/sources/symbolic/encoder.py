"""An encoder in front of a model: the part that makes its tokens, its layers, and the projector behind them.

The encoder runs on the ranks of the first pipeline stage, on `inputs` texts, images or sounds of each sample. Its
layers are written as those of any model, with the plan's kernels on micro batches of these inputs.
"""

from __future__ import annotations

from forerun.describe.model.encoder import EncoderSpec
from forerun.describe.model.spec import ModelSpec
from forerun.sources.symbolic.embedding_and_head import embedding_section
from forerun.sources.symbolic.kernels import ENCODED, ENCODER, TransformerKernels
from forerun.sources.symbolic.layer import layer_section
from forerun.sources.symbolic.linear import Section
from forerun.sources.symbolic.products import Product
from forerun.sources.symbolic.shapes import ceil_div
from forerun.sources.symbolic.tape import Tape, TapeOp
from forerun.sources.symbolic.weights import Weights


def input_section(kernels: TransformerKernels, encoder: EncoderSpec[ModelSpec]) -> Section:
    """Returns the section that makes the encoder's tokens; `kernels` are the encoder's own.

    A text's tokens come from the model's own table, which this section holds. Its decoder looks them up there too.
    """
    stack, s = kernels.model, kernels.shapes
    if encoder.reads == "text":
        section = embedding_section(kernels)
    else:
        section = Section(kernels, Tape([], kernels.marker), Weights())
        elements, x = s.tokens_sp * s.hidden, _stem(section, encoder)
        if stack.position == "learned":
            section.weights.matrices.append(stack.max_positions * s.hidden)
            made = (("x.placed", elements * s.act_bytes),)
            section.pointwise("encoder.positions", "residual", elements, "composed", (x,), made, module=ENCODER)
            x = "x.placed"
        if stack.embedding_norm:
            section.norm("encoder.input_norm", x, "x.normed", s.tokens_sp, ENCODER)
        section.weights.wide = sum(section.weights.matrices)
    section.weights.vectors += [encoder.other_parameters] * (encoder.other_parameters > 0)
    section.freeze()
    return section


def _stem(section: Section, encoder: EncoderSpec[ModelSpec]) -> str:
    """Writes the products that make tokens from pixels or samples; returns the name of the result."""
    kernels, s, x = section.kernels, section.kernels.shapes, "input"
    made_of = ceil_div(s.tokens_sp * (encoder.tokens - encoder.extra_tokens), encoder.tokens)
    for number, (n_in, n_out) in enumerate(encoder.stem):
        rows = made_of * (encoder.stem_rows if number == 0 else 1)
        if number == 0:
            section.tape.inputs = ((x, rows * n_in * s.act_bytes),)
        y = f"stem{number}"
        section.weights.matrices.append(n_in * n_out)
        section.weights.vectors += [n_out] * encoder.stem_bias
        section.linear(Product(f"encoder.{y}", x, y, n_in, n_out, encoder.stem_bias, ENCODER), rows)
        if number == 0:  # pixels and samples need no gradient
            section.tape.ops[-1].backward, section.tape.ops[-1].gradless = [], True
        x = y
        if encoder.stem_activation:
            x, style = f"{y}.act", kernels.stack.activation
            made = ((x, rows * n_out * s.act_bytes),)
            section.pointwise(f"encoder.{x}", "gelu", rows * n_out, style, (y,), made, (y,), ENCODER)
    return x


def output_section(kernels: TransformerKernels, encoder: EncoderSpec[ModelSpec]) -> Section:
    """Returns the section of the encoder's last norm and of its projector; `kernels` are the encoder's own."""
    stack, s = kernels.model, kernels.shapes
    section, x = Section(kernels, Tape([], kernels.marker), Weights()), "x"
    section.tape.inputs = ((x, s.tokens_sp * s.hidden * kernels.stream_bytes),)
    if stack.final_norm:
        section.norm("encoder.norm", x, "x.normed", s.tokens_sp, ENCODER)
        x = "x.normed"
    if encoder.frozen:  # with the norm ends what is frozen
        section.weights.freeze()
        for op in section.tape.ops:
            op.backward, op.saves, op.gradless = [], (), True
    rows = ceil_div(kernels.plan.micro_batch // encoder.inputs * encoder.out_tokens * s.tokens_sp, s.tokens)
    ends = [_projector(section, encoder, x, rows, f"projector{number}.") for number in range(encoder.projectors)]
    width = encoder.projector[-1][1] if encoder.projector else s.hidden
    made, kept = ((ENCODED, rows * width * s.act_bytes),), (ENCODED,) * (encoder.joins == "attention")
    section.tape.add(TapeOp("encoder.output", "view", ENCODER, [], [], reads=tuple(ends), saves=kept, makes=made))
    section.freeze()
    return section


def _projector(section: Section, encoder: EncoderSpec[ModelSpec], x: str, rows: int, prefix: str) -> str:
    """Writes one projector, which every tensor-parallel rank has whole; returns the name of its result."""
    s, style = section.kernels.shapes, section.kernels.stack.activation
    if encoder.projector_norm:
        width, elements = encoder.projector_norm, rows * encoder.projector[0][0]
        section.weights.vectors += [width] * (1 + encoder.projector_norm_bias)
        makes = ((f"{prefix}normed", elements * s.act_bytes),)
        norm = section.kernels.stack.norm
        section.pointwise(f"{prefix}norm", section.kernels.norm_pattern, elements, norm, (x,), makes, (x,), ENCODER)
        x = f"{prefix}normed"
    for number, (n_in, n_out) in enumerate(encoder.projector):
        gated = encoder.projector_gated and number == 0
        widths = n_out * (1 + gated)
        y = f"{prefix}{number}"
        for _ in range(1 + gated):
            section.weights.add_matrix(n_in, n_out)
            section.weights.vectors += [n_out] * encoder.projector_bias
        section.linear(Product(y, x, y, n_in, widths, encoder.projector_bias, ENCODER), rows)
        x = y
        if number < len(encoder.projector) - 1:
            x, pattern = f"{y}.act", "swiglu" if gated else "gelu"
            made = ((x, rows * n_out * s.act_bytes),)
            section.pointwise(x, pattern, rows * n_out, style, (y,), made, (y,), ENCODER)
    return x


def encoder_layer(kernels: TransformerKernels, checkpointed: bool) -> Section:
    """Returns the section of the encoder's layer that `kernels.model` describes."""
    section = layer_section(kernels, checkpointed)
    for op in section.tape.ops:
        op.module = ENCODER
    return section
