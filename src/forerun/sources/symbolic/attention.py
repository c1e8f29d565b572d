"""Self-attention: queries, keys and values, the attention itself, and the output product."""

from __future__ import annotations

from forerun.describe.kernels.attention import attention_kernel
from forerun.describe.plan.rules import drops_attention
from forerun.sources.symbolic.attention_experts import output_of_experts
from forerun.sources.symbolic.attention_kernel import kernel_name, kernel_op, kernel_tape_op, kernel_tensors
from forerun.sources.symbolic.compressed import grouped_output
from forerun.sources.symbolic.context_parallel import context_parallel
from forerun.sources.symbolic.linear import Section
from forerun.sources.symbolic.queries_keys_values import attention_bytes, queries_keys_values, query_names, repeats_kv
from forerun.sources.symbolic.tape import TapeOp, on_compute
from forerun.sources.symbolic.unfused_flex import Sizes, unfused_flex


def attention(section: Section, x: str, y: str, module: int) -> None:
    """Writes self-attention from the normed input `x` to the branch output `y`."""
    queries_keys_values(section, x, module)
    context = section.kernels.plan.cp
    form = attention_kernel(kernel_name(section)).form
    if form == "products":
        attention_products(section, query_names(section), section.kernels.plan.seq_len, module)
    elif form == "operations":
        _unfused_flex(section, module)
    elif context == 1:
        _fused(section, module)
    else:
        context_parallel(section, module)
    kernels, shapes = section.kernels, section.kernels.shapes
    inside = _difference(section, module) if kernels.model.differential else "o"
    rows = _output_gate(section, inside, module)
    if kernels.model.attention_experts:
        output_of_experts(section, rows, y, module)
        return
    if kernels.model.compressed:
        grouped_output(section, kernels.model.compressed, rows, y, module)
        return
    if kernels.stack.sequence_first and kernels.plan.micro_batch > 1:
        inside, rows, (*_, size) = rows, "o.rows", attention_bytes(section)
        elements = size // shapes.act_bytes
        section.pointwise("attention.layout_out", "copy", elements, "fused", (inside,), ((rows, size),), module=module)
    section.row(
        "attention.out", rows, y, shapes.heads * shapes.v_head_dim, shapes.hidden, kernels.model.out_bias, module
    )


def _output_gate(section: Section, o: str, module: int) -> str:
    """Writes the gate on the attention's output `o`, if there is one; returns the name of its result."""
    kernels, (*_, size) = section.kernels, attention_bytes(section)
    if kernels.model.sinks:
        section.weights.vectors.append(kernels.shapes.heads)
    elements, makes, style = size // kernels.shapes.act_bytes, (("o.gated", size),), kernels.stack.activation
    if kernels.model.head_gate:
        reads = (o, "head_gate")
        section.pointwise("attention.gate", "head_gate", elements, style, reads, makes, reads, module=module)
        return "o.gated"
    if not kernels.model.attention_gate:
        return o
    reads = (o, "q" if kernels.stack.fused_qkv and not kernels.model.mla else "gate")
    section.pointwise("attention.gate", "output_gate", elements, style, reads, makes, reads, module=module)
    return "o.gated"


def _difference(section: Section, module: int) -> str:
    """Writes the difference of the outputs of pairs of heads and its norm; returns its name.

    The kernel has run twice, over each half of the value heads, so that its output is twice as wide.
    """
    kernels, (*_, size) = section.kernels, attention_bytes(section)
    section.weights.vectors.append(4 * kernels.shapes.head_dim)
    elements, style, makes = size // kernels.shapes.act_bytes, kernels.stack.activation, (("o.difference", size),)
    section.pointwise("attention.difference", "difference", elements, style, ("o",), makes, ("o",), module=module)
    reads, makes, norm = ("o.difference",), (("o.normed", size),), kernels.stack.norm
    section.pointwise("attention.head_norm", "weightless_norm", elements, norm, reads, makes, reads, module)
    return "o.normed"


def _fused(section: Section, module: int) -> None:
    """Writes a fused kernel over whole sequences."""
    kernels, s = section.kernels, section.kernels.shapes
    forward, backward = kernel_op(
        section, kernels.plan.seq_len, kernels.plan.seq_len, kernels.model.causal, s.heads, s.kv_heads
    )
    calls = 1 + kernels.model.differential
    section.tape.add(kernel_tape_op(section, on_compute(*[forward] * calls), on_compute(*[backward] * calls), module))


def _unfused_flex(section: Section, module: int) -> None:
    """Writes FlexAttention outside of compiled code."""
    kernels, s, plan = section.kernels, section.kernels.shapes, section.kernels.plan
    reads, makes = kernel_tensors(section)
    kv_heads = s.heads if repeats_kv(section) else s.kv_heads
    sizes = Sizes(plan.micro_batch, s.heads, kv_heads, s.seq, s.seq, s.head_dim, s.v_head_dim)
    section.tape.add(unfused_flex(kernels, sizes, reads, makes, module))


def attention_products(section: Section, tensors: tuple[str, str, str], keys: int, module: int) -> None:
    """Writes two batched matrix products around a materialised softmax (no flash kernel) over so many keys; `tensors`
    are the queries, keys and values."""
    kernels, s, stack, plan = section.kernels, section.kernels.shapes, section.kernels.stack, section.kernels.plan
    batch = plan.micro_batch * s.heads
    scores = batch * s.seq * keys
    score_bytes = scores * s.act_bytes
    reads = tuple(dict.fromkeys(tensors))
    gemm = kernels.ops.gemm
    dtype = kernels.wide_dtype

    def product(name: str, n: int, k: int) -> int:
        return gemm(name, s.seq, n, k, batch, 0, dtype)

    qk, pv = product("attention.qk", keys, s.head_dim), product("attention.pv", s.v_head_dim, keys)
    qk_back = [product("attention.dk", s.head_dim, keys), product("attention.dq", s.head_dim, keys)]
    pv_back = [product("attention.dv", s.v_head_dim, keys), product("attention.dp", keys, s.v_head_dim)]
    soft_f, soft_b = kernels.pattern("softmax", scores, stack.softmax)
    value = reads[-1]
    add = section.tape.add
    add(
        TapeOp(
            "attention.qk",
            "core",
            module,
            on_compute(qk),
            on_compute(*qk_back),
            reads=reads[:2],
            saves=reads[:2],
            makes=(("scores", score_bytes),),
        )
    )
    add(
        TapeOp(
            "attention.softmax",
            "core",
            module,
            soft_f,
            soft_b,
            reads=("scores",),
            saves=("probs",),
            makes=(("probs", score_bytes),),
        )
    )
    probs = "probs"
    if drops_attention(kernels.model, stack):
        drop_f, drop_b = kernels.pattern("score_dropout", scores, stack.softmax)
        makes = (("dropped", score_bytes), ("score.mask", scores))
        add(
            TapeOp(
                "attention.dropout",
                "core",
                module,
                drop_f,
                drop_b,
                reads=("probs",),
                saves=("score.mask",),
                makes=makes,
            )
        )
        probs = "dropped"
    out = s.tokens * s.heads * s.v_head_dim * s.act_bytes
    add(
        TapeOp(
            "attention.pv",
            "core",
            module,
            on_compute(pv),
            on_compute(*pv_back),
            reads=(probs, value),
            saves=(probs, value),
            makes=(("o", out),),
        )
    )
