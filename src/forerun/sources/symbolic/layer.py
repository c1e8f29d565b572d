"""Writes one layer of a transformer on a tape: attention and feed-forward, with its checkpoint regions."""

from __future__ import annotations

from collections.abc import Callable

from forerun.describe.plan.plan import Plan, RecomputedModule
from forerun.sources.symbolic.attention import attention
from forerun.sources.symbolic.expert import experts
from forerun.sources.symbolic.feed_forward import feed_forward
from forerun.sources.symbolic.kernels import PlanKernels, TransformerKernels
from forerun.sources.symbolic.linear import Section
from forerun.sources.symbolic.products import Product
from forerun.sources.symbolic.queries_keys_values import SHARED
from forerun.sources.symbolic.recurrence import scan
from forerun.sources.symbolic.streams import after_half, after_layer, before_half, before_layer, stream_bytes
from forerun.sources.symbolic.tape import Region, Tape, TapeOp, keep_nothing
from forerun.sources.symbolic.weights import Weights

ATTENTION_NORM, ATTENTION, FFN_NORM, FFN = 1, 2, 3, 4
"""module numbers within a layer"""


def layer_section(kernels: TransformerKernels, checkpointed: bool) -> Section:
    """Returns the section (tape and weights) of the layer that `kernels.model` describes."""
    model = kernels.model
    shared = [(name, 0) for name in SHARED] if model.shared_kv else []
    section = Section(kernels, Tape([], kernels.marker), Weights())
    tape = section.tape
    tape.inputs = (("x", stream_bytes(section)), *shared)
    if model.parallel:
        _parallel_halves(section)
    else:
        _halves_in_turn(section)
    section.weights.vectors += [model.other_parameters] * (model.other_parameters > 0)
    section.freeze()
    settle_activations(kernels, tape, checkpointed)
    return section


def _halves_in_turn(section: Section) -> None:
    """Writes a layer whose feed-forward reads what its mixer has added to the stream."""
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
    if model.has_feed_forward:
        branch = _half(section, stream, FFN)
        after_half(section, "ffn_residual", stream, branch, ends[-1], FFN)
    if altup:
        after_layer(section, start, ends.pop(), ends[-1], FFN)
    if model.layer_input:
        _layer_input(section, ends.pop(), ends[-1])


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

    Of several streams the first one gates it, and the others take what the branch gives.
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
    """Writes the norms and the mixer or the feed-forward of a layer; returns the name of what it adds to `stream`."""
    inside = _normed(section, before_half(section, stream, half), half)
    if half == ATTENTION and section.kernels.model.laurel_rank:
        _laurel(section, inside)
    branch = _mixer(section, inside) if half == ATTENTION else _feed_forward(section, inside)
    return _convolved(section, _normed_branch(section, branch, half), half)


def _convolved(section: Section, branch: str, half: int) -> str:
    """Writes the short convolution of what a half gives, if the layer has one; returns the name of its result."""
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
    """Writes the attention, the recurrence, or both side by side; returns the name of what they give."""
    model = section.kernels.model
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
    """Writes the feed-forward, dense or of experts; returns the name of what it gives."""
    (experts if section.kernels.model.moe else feed_forward)(section, x, "ffn.y", FFN)
    return "ffn.y"


def _parallel_halves(section: Section) -> None:
    """Writes a layer whose feed-forward reads what its mixer reads."""
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


def settle_activations(kernels: PlanKernels, tape: Tape, checkpointed: bool) -> None:
    """Sets which operations of a finished tape run again in backward and what waits in host memory."""
    tape.early_stop = kernels.stack.recompute_early_stop
    tape.compiled = kernels.plan.compiles_layers
    tape.weights_first = kernels.whole_graph
    if checkpointed:
        tape.regions = checkpoint_regions(kernels.plan, tape)
        _keep_originals(tape)
    if kernels.fp8:
        _keep_narrow(kernels, tape)
    if kernels.plan.activation_offload:
        tape.offload = kernels.plan.activation_offload
        tape.offload_op = kernels.ops.host_copy("offload", tape.kept_bytes() * tape.offload)


def checkpoint_regions(plan: Plan, tape: Tape) -> list[Region]:
    """Returns the regions that run again in backward under the plan's activation checkpointing."""
    ops = tape.ops
    if plan.activation_checkpointing == "full":
        return [Region(0, len(ops) - 1, keep_nothing)]
    if plan.activation_checkpointing == "none" or plan.selective_policy == "params":
        return []
    if plan.recompute_modules:
        found = [region for name in plan.recompute_modules for region in _regions_of(name, ops)]
        return _without_inner(sorted(found, key=lambda region: (region.first, -region.last)))
    policy = plan.selective_policy
    if policy == "op":
        return [Region(0, len(ops) - 1, _SaveEverySecondMatmul(ops))]
    if policy == "attention":
        return _runs(ops, lambda op: op.kind in ("core", "attention"))
    if policy == "attention-block":
        return _runs(ops, lambda op: op.module == ATTENTION and op.kind != "residual")
    if policy == "mlp":
        return _runs(ops, lambda op: op.module == FFN and op.kind != "residual")
    if policy == "mlp-act-norm":
        return _runs(ops, lambda op: op.kind == "norm" or op.name.endswith(".act"), discard_output=True)
    return _runs(ops, lambda op: op.module == ATTENTION and op.kind != "residual") + _runs(
        ops, lambda op: op.module == FFN and op.kind != "residual"
    )


def _regions_of(name: RecomputedModule, ops: list[TapeOp]) -> list[Region]:
    """Returns the parts of a layer that Megatron-Core's `--recompute-modules` recomputes under this name."""
    has_experts = any(op.name == "ffn.router" for op in ops)
    if name == "core_attn":
        return _runs(ops, lambda op: op.kind in ("core", "attention"))
    if name == "layernorm":
        return _runs(ops, lambda op: op.module in (ATTENTION_NORM, FFN_NORM) and op.kind == "norm", discard_output=True)
    if name == "mla_up_proj":
        return _latent_region(ops)
    if name == "moe_act":
        return _runs(ops, lambda op: op.name == "ffn.expert.act", discard_output=True)
    if name == "shared_experts":
        return _runs(ops, lambda op: op.name.startswith("shared."))
    wanted = has_experts == (name == "moe")
    return _runs(ops, lambda op: wanted and op.module == FFN and op.kind != "residual")


def _latent_region(ops: list[TapeOp]) -> list[Region]:
    """Returns the region from the norms of latent attention's compressed inputs to the rotation of queries and keys.

    The projection that compresses keys and values lies in between, and is kept.
    """
    names = [op.name for op in ops]
    if "attention.kv_norm" not in names:
        return []
    first = names.index("attention.q_norm" if "attention.q_norm" in names else "attention.kv_norm")
    last = names.index("attention.rope" if "attention.rope" in names else "attention.assemble")
    return [Region(first, last, lambda op: op.name.startswith("attention.kv_down"), discard_output=True)]


def _without_inner(regions: list[Region]) -> list[Region]:
    """Returns `regions`, in the order of their first operation, without those that lie inside another one."""
    kept: list[Region] = []
    for region in regions:
        if not kept or region.first > kept[-1].last:
            kept.append(region)
    return kept


def _keep_originals(tape: Tape) -> None:
    """Lets products keep no fp8 cast of an input that is recomputed: they cast it again (TransformerEngine's
    save_original_input)."""
    again = {
        name
        for region in tape.regions
        if region.discard_output
        for op in tape.ops[region.first : region.last + 1]
        for name, _ in op.makes
    }
    for op in tape.ops:
        casts = {name + ".fp8": name for name in op.reads if name in again}
        op.saves = tuple(casts.get(name, name) for name in op.saves)
        op.makes = tuple(made for made in op.makes if made[0] not in casts)


_KEPT_NARROW = {
    "activation_input": lambda op: op.name.endswith(".act"),
    "attention_output": lambda op: op.name == "attention.out",
}
"""kind of tensor -> the operation that reads it and narrows it"""


def _keep_narrow(kernels: PlanKernels, tape: Tape) -> None:
    """Replaces tensors that wait for the backward pass by narrower copies, where the stack keeps such copies."""
    wide = kernels.act_bytes
    for kind, narrow in kernels.stack.fp8_kept.items():
        for op in filter(_KEPT_NARROW[kind], list(tape.ops)):
            source = op.reads[0]
            size = dict(made for each in tape.ops for made in each.makes)[source]
            kept = int(size * narrow / wide)
            op.forward = [*op.forward, *kernels.traffic(source + ".narrow", size, kept)]
            op.backward = [*kernels.traffic(source + ".wide", kept, size), *op.backward]
            for each in tape.ops:
                each.saves = tuple(
                    source + ".narrow" if name in (source, source + ".fp8") else name for name in each.saves
                )
                each.makes = tuple(made for made in each.makes if made[0] != source + ".fp8")
            op.makes = (*op.makes, (source + ".narrow", kept))
            tape.narrow[source] = source + ".narrow"


class _SaveEverySecondMatmul:
    """torchtitan's selective policy, which keeps every second matrix product.

    It also keeps the outputs of attention and of reduce-scatters and absolute values, where the stack lists them.
    """

    def __init__(self, ops: list[TapeOp]) -> None:
        matmuls = [op.name for op in ops if op.kind == "matmul"]
        self.kept = set(matmuls[::2])

    def __call__(self, op: TapeOp) -> bool:
        return op.kind in ("attention", "reduce", "absolutes") or op.name in self.kept


def _runs(ops: list[TapeOp], wanted: Callable[[TapeOp], bool], discard_output: bool = False) -> list[Region]:
    """Returns the maximal runs of consecutive operations that `wanted` chooses, as regions."""
    regions: list[Region] = []
    start = None
    for i, op in enumerate([*ops, None]):
        inside = op is not None and wanted(op)
        if inside and start is None:
            start = i
        elif not inside and start is not None:
            regions.append(Region(start, i - 1, keep_nothing, discard_output))
            start = None
    return regions
