"""Decides which tensors of a unit's tape the backward pass recomputes, which are kept narrow, and which go to host
memory.
"""

from __future__ import annotations

from collections.abc import Callable

from forerun.describe.plan.plan import Plan, RecomputedModule
from forerun.sources.symbolic.kernels import PlanKernels
from forerun.sources.symbolic.products import ATTENTION, ATTENTION_NORM, FFN, FFN_NORM
from forerun.sources.symbolic.tape import Region, Tape, TapeOp, keep_nothing


def settle_activations(kernels: PlanKernels, tape: Tape, checkpointed: bool) -> None:
    """Sets the operations of a finished tape that run again in the backward pass, and the tensors that wait in host
    memory.
    """
    tape.compiled = kernels.plan.compiles_layers
    tape.early_stop = kernels.stack.recompute_early_stop or tape.compiled  # a captured graph has no dead code
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
    """Returns the regions from the norms of latent attention's compressed inputs to the rotation of queries and keys.

    The projection that compresses keys and values lies in between, and is kept.
    """
    firsts = [i for i, op in enumerate(ops) if op.name in ("attention.q_norm", "attention.kv_norm")]
    if any(ops[i].name == "attention.q_norm" for i in firsts):
        firsts = [i for i in firsts if ops[i].name == "attention.q_norm"]
    if not any(op.name == "attention.kv_norm" for op in ops):
        return []
    ends = [op.name for op in ops]
    last = "attention.rope" if "attention.rope" in ends else "attention.assemble"
    return [
        Region(first, ends.index(last, first), lambda op: op.name.startswith("attention.kv_down"), discard_output=True)
        for first in firsts
    ]


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
