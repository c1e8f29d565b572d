"""Recurrent mixers: Mamba, gated delta rule, linear attention, short convolutions (`ScanSpec`)."""

from __future__ import annotations

from forerun.core.cost.scan import scan_rates
from forerun.core.program.kinds import Scan
from forerun.core.program.types import Collective, Stream
from forerun.describe.model.scan import ScanSpec
from forerun.sources.symbolic.linear import Section
from forerun.sources.symbolic.products import Product
from forerun.sources.symbolic.shapes import ceil_div
from forerun.sources.symbolic.tape import TapeOp, on_compute


def scan(section: Section, x: str, y: str, module: int) -> None:
    """Writes a recurrent mixer from the normed `x` to the branch output `y`; tensor parallelism splits its heads."""
    spec, hidden = _spec(section), section.kernels.shapes.hidden
    section.weights.vectors.append(ceil_div(spec.vectors, section.tp))
    width = ceil_div(spec.in_width, section.tp)
    section.column("scan.in", x, hidden, [("scan.in", "scan.u", width)], False, module)
    reads = _convolution(section, "scan.u", module)
    _inner(section, reads, module)
    out = _recurrence(section, reads, module) if spec.rule != "none" else reads
    out = _gated(section, out, module)
    section.row("scan.out", out, y, ceil_div(spec.out_width, section.tp), hidden, False, module)


def _spec(section: Section) -> ScanSpec:
    spec = section.kernels.model.scan
    assert spec is not None
    return spec


def _convolution(section: Section, x: str, module: int) -> str:
    """Writes the short causal convolution over the channels of queries, keys and values."""
    spec, s = _spec(section), section.kernels.shapes
    if not spec.conv_channels:
        return x
    channels = ceil_div(spec.conv_channels, section.tp)
    section.weights.vectors.append(channels * spec.conv_taps)
    elements = s.tokens * channels
    makes = (("scan.conv", elements * s.act_bytes),)
    section.pointwise("scan.conv", "short_conv", elements, section.kernels.stack.activation, (x,), makes, (x,), module)
    return "scan.conv"


def _inner(section: Section, x: str, module: int) -> None:
    """Writes the products between input and recurrence; their narrow side is whole on each tensor-parallel rank."""
    spec, s, kernels = _spec(section), section.kernels.shapes, section.kernels
    for number, (rows, columns) in enumerate(spec.inner):
        narrows = rows > columns
        n_in, n_out = (ceil_div(rows, section.tp), columns) if narrows else (rows, ceil_div(columns, section.tp))
        name, made = f"scan.inner{number}", f"scan.inner{number}.y"
        section.weights.add_matrix(n_in, n_out)
        section.linear(Product(name, x, made, n_in, n_out, False, module), s.tokens, keeps_input=True)
        if narrows:
            size = s.tokens * n_out * s.act_bytes
            reduce = kernels.collective(name + ".reduce", Collective.ALL_REDUCE, "tp", size, Stream.TP)
            section.tape.add(TapeOp(name + ".reduce", "view", module, reduce, reduce, reads=(made,)))


def _recurrence(section: Section, x: str, module: int) -> str:
    """Writes the recurrence, whose backward pass reads its inputs and makes the states again."""
    spec, s, kernels = _spec(section), section.kernels.shapes, section.kernels
    heads, keys = ceil_div(spec.heads, section.tp), max(1, (spec.key_heads or spec.heads) // section.tp)
    read = s.tokens * (2 * keys * spec.key_dim + heads * spec.value_dim) * s.act_bytes
    written = s.tokens * heads * spec.value_dim * s.act_bytes
    rates = scan_rates(spec.rule)
    ops = []
    for backward in (0, 1):
        shape = Scan(kernels.plan.micro_batch, heads, keys, s.seq, spec.key_dim, spec.value_dim, backward)
        moved = (read + backward * written, written if not backward else read)
        name = "scan.recurrence" + ".backward" * backward
        flops, launches = rates.flops(shape), rates.kernels * (1 + backward)
        ops.append(kernels.ops.scan(name, shape, spec.rule, kernels.wide_dtype, flops, moved, launches))
    made = (("scan.o", written),)
    section.tape.add(
        TapeOp(
            "scan.recurrence",
            "attention",
            module,
            on_compute(ops[0]),
            on_compute(ops[1]),
            reads=(x,),
            saves=(x,),
            makes=made,
        )
    )
    return "scan.o"


def _gated(section: Section, x: str, module: int) -> str:
    """Writes the norm and the gate on the recurrence's output."""
    s, kernels = section.kernels.shapes, section.kernels
    elements = s.tokens * ceil_div(_spec(section).out_width, section.tp)
    makes, reads = (("scan.gated", elements * s.act_bytes),), (x, "scan.u")
    section.pointwise("scan.gate", "gated_norm", elements, kernels.stack.norm, reads, makes, reads, module, "norm")
    return "scan.gated"
