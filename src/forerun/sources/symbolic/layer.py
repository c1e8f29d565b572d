"""Writes one layer of a transformer on a tape: attention and feed-forward, with its checkpoint regions."""

from __future__ import annotations

from collections.abc import Callable

from forerun.describe.plan.plan import Plan
from forerun.sources.symbolic.attention import attention
from forerun.sources.symbolic.expert import experts
from forerun.sources.symbolic.feed_forward import feed_forward
from forerun.sources.symbolic.kernels import PlanKernels, TransformerKernels
from forerun.sources.symbolic.linear import Section
from forerun.sources.symbolic.tape import Region, Tape, TapeOp, keep_nothing
from forerun.sources.symbolic.weights import Weights

ATTENTION_NORM, ATTENTION, FFN_NORM, FFN = 1, 2, 3, 4
"""module numbers within a layer"""


def layer_section(kernels: TransformerKernels, moe: bool, checkpointed: bool) -> Section:
    """Returns the section (tape and weights) of one layer."""
    shapes, model = kernels.shapes, kernels.model
    size = shapes.tokens_sp * shapes.hidden * kernels.stream_bytes
    tape = Tape([("x", size)], kernels.marker)
    section = Section(kernels, tape, Weights())
    stream = "x"
    if model.n_heads:
        inside = section.narrowed("x", ATTENTION) if not model.block_norms else "x"
        if model.block_norms:
            inside = "x.normed"
            section.norm("attention_norm", "x", inside, shapes.tokens_sp, ATTENTION_NORM)
        attention(section, inside, "attention.y", ATTENTION)
        section.residual("attention_residual", "x", "attention.y", "h", ATTENTION)
        stream = "h"
    inside = section.narrowed(stream, FFN) if not model.block_norms else stream
    if model.block_norms:
        inside = stream + ".normed"
        section.norm("ffn_norm", stream, inside, shapes.tokens_sp, FFN_NORM)
    if moe:
        experts(section, inside, "ffn.y", FFN)
    else:
        feed_forward(section, inside, "ffn.y", FFN)
    section.residual("ffn_residual", stream, "ffn.y", "y", FFN)
    settle_activations(kernels, tape, checkpointed)
    return section


def settle_activations(kernels: PlanKernels, tape: Tape, checkpointed: bool) -> None:
    """Sets which operations of a finished tape run again in backward and what waits in host memory."""
    tape.early_stop = kernels.stack.recompute_early_stop
    tape.compiled = kernels.plan.compile
    tape.weights_first = kernels.whole_graph
    if checkpointed:
        tape.regions = checkpoint_regions(kernels.plan, tape)
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
