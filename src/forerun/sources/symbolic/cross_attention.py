"""Attention to the output of an encoder: queries come from the stream, keys and values from the encoder's output.

Its keys have no positions, and no mask.
"""

from __future__ import annotations

from forerun.describe.kernels.attention import attention_kernel
from forerun.describe.model.layer_parameters import memory_width
from forerun.sources.symbolic.attention import attention_products
from forerun.sources.symbolic.attention_kernel import kernel_kind, kernel_name, kernel_op
from forerun.sources.symbolic.kernels import ENCODED
from forerun.sources.symbolic.linear import Section
from forerun.sources.symbolic.tape import TapeOp, on_compute
from forerun.sources.symbolic.unfused_flex import Sizes, unfused_flex

_READS = ("cross.q", "cross.k", "cross.v")


def cross_attention(section: Section, x: str, y: str, module: int) -> None:
    """Writes the attention from the normed input `x` to the branch output `y`."""
    kernels, s = section.kernels, section.kernels.shapes
    model, there = kernels.model, kernels.of_encoded()
    encoded, width = Section(there, section.tape, section.weights, section.adapters), memory_width(model)
    keys, values = s.kv_heads * s.head_dim, s.kv_heads * s.v_head_dim
    section.column("cross.q", x, s.hidden, [("cross.q", "cross.q", s.heads * s.head_dim)], model.qkv_bias, module)
    encoded.fan_out("cross", ENCODED, there.shapes.tokens * width, 2, module)
    encoded.column(
        "cross.kv", ENCODED, width, [("cross.k", "cross.k", keys), ("cross.v", "cross.v", values)], False, module
    )
    if model.qkv_bias:
        section.weights.vectors += [keys] * model.key_bias + [values]
    form = attention_kernel(kernel_name(section)).form
    if form == "products":
        attention_products(section, _READS, there.shapes.seq, module)
    elif form == "operations":
        sizes = Sizes(kernels.plan.micro_batch, s.heads, s.kv_heads, s.seq, there.shapes.seq, s.head_dim, s.v_head_dim)
        section.tape.add(unfused_flex(kernels, sizes, _READS, _makes(section), module))
    else:
        _fused(section, there.shapes.seq, module)
    section.row("cross.out", "o", y, s.heads * s.v_head_dim, s.hidden, model.out_bias, module)


def _fused(section: Section, keys: int, module: int) -> None:
    """Writes a fused kernel over all keys."""
    s, makes = section.kernels.shapes, _makes(section)
    forward, backward = kernel_op(section, s.seq, keys, False, s.heads, s.kv_heads)
    section.tape.add(
        TapeOp(
            "cross.kernel",
            kernel_kind(section),
            module,
            on_compute(forward),
            on_compute(backward),
            reads=_READS,
            saves=(*_READS, *(name for name, _ in makes)),
            makes=makes,
        )
    )


def _makes(section: Section) -> tuple[tuple[str, int], ...]:
    """Returns the tensors that the kernel makes as (name, bytes): the output, and statistics of each query and head."""
    s = section.kernels.shapes
    statistics = [(name, s.tokens * s.heads * 4) for name in attention_kernel(kernel_name(section)).keeps]
    return (("o", s.tokens * s.heads * s.v_head_dim * s.act_bytes), *statistics)
