"""Dense feed-forward: two matrices around an activation, or three around a gated activation."""

from __future__ import annotations

from forerun.sources.symbolic.linear import Section


def feed_forward(section: Section, x: str, y: str, module: int, width: int | None = None, prefix: str = "ffn") -> None:
    """Writes a dense feed-forward of local width `width` (the model's unless given) from `x` to `y`."""
    kernels, s = section.kernels, section.kernels.shapes
    width = width or s.ffn
    bias = kernels.model.mlp_bias
    size = s.tokens * width * s.act_bytes
    act = f"{prefix}.act"
    if kernels.model.gated_mlp:
        if kernels.stack.fused_qkv:
            outs = [(f"{prefix}.up", f"{prefix}.u", 2 * width)]
        else:
            outs = [(f"{prefix}.gate", f"{prefix}.g", width), (f"{prefix}.up", f"{prefix}.u", width)]
        section.column(f"{prefix}.up", x, s.hidden, outs, bias, module)
        reads = tuple(tensor for _, tensor, _ in outs)
        if kernels.model.sparse_gate:
            reads = (_sparse_gate(section, reads[0], s.tokens * width, module), *reads[1:])
        saves = reads
        makes = [(act, size)]
        if kernels.keeps_steps(kernels.stack.activation):  # the second product reads silu(gate) in backward
            makes.append((f"{prefix}.silu", size))
            saves = (*reads, f"{prefix}.silu")
        section.pointwise(act, "swiglu", s.tokens * width, kernels.stack.activation, reads, tuple(makes), saves, module)
    else:
        section.column(f"{prefix}.up", x, s.hidden, [(f"{prefix}.up", f"{prefix}.u", width)], bias, module)
        pattern = "relu" if kernels.model.mlp in ("relu", "relu2") else "gelu"
        reads = (f"{prefix}.u",)
        section.pointwise(
            act, pattern, s.tokens * width, kernels.stack.activation, reads, ((act, size),), reads, module
        )
    section.row(f"{prefix}.down", act, y, width, s.hidden, bias, module)


def _sparse_gate(section: Section, gate: str, elements: int, module: int) -> str:
    """Writes the cutoff of a gate at some deviations above the mean of each token; returns the name of the result."""
    kernels, y = section.kernels, gate + ".cut"
    makes = ((y, elements * kernels.shapes.act_bytes),)
    section.pointwise(y, "sparse_gate", elements, kernels.stack.activation, (gate,), makes, (gate,), module)
    return y
