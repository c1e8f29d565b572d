"""The optimizer step (gradient norm, update, gather of updated parameters) and its resident memory."""

from __future__ import annotations

from forerun.core.program.builder import BlockBuilder
from forerun.core.program.types import N_CATEGORIES, Block, Category, Collective, Phase, Stream
from forerun.describe.plan import rules
from forerun.describe.plan.rules import DTYPE_BYTES
from forerun.sources.symbolic.data_parallel import REDUCED
from forerun.sources.symbolic.exchanges import parts, shard_axis, shard_elements
from forerun.sources.symbolic.kernels import PlanKernels
from forerun.sources.symbolic.states import (
    clipping_bytes,
    resident_states,
    tensors_per_launch,
    unfused_kernels,
    update_gradient_bytes,
    update_of,
)
from forerun.sources.symbolic.weights import Weights


def local_elements(kernels: PlanKernels, weights: Weights) -> int:
    """Returns the elements that this rank updates."""
    return shard_elements(kernels.plan, weights) if kernels.plan.shards_optimizer else weights.total


def cast_elements(weights: Weights) -> int:
    """Returns the elements of `weights` that matrix products in fp8 read."""
    return sum(weights.matrices) - weights.wide + weights.expert


def optimizer_block(kernels: PlanKernels, weights: Weights, grads_allocated: int) -> Block:
    """Returns the block that clips, updates and gathers parameters, then frees `grads_allocated` bytes of gradients."""
    plan, stack, block = kernels.plan, kernels.stack, BlockBuilder()
    phase, local = Phase.OPTIMIZER, local_elements(kernels, weights)
    grad = update_gradient_bytes(plan, DTYPE_BYTES[kernels.accumulate_dtype])
    n_tensors = len(weights.tensors)
    launches = max(1, n_tensors // tensors_per_launch())
    block.node(kernels.marker, phase=phase, module=kernels.optimizer_module, wait=(REDUCED,))
    _sum_over_tp(kernels, block, weights, grad)
    if stack.clip_grad:
        read, scaled = (local * size for size in clipping_bytes(grad))
        norm = kernels.ops.memory("grad_norm", read, 0, max(launches, n_tensors // 20))
        node = block.node(norm, phase=phase, module=kernels.optimizer_module)
        for axis, norms in _norm_reductions(kernels, weights):
            op = kernels.collective_op("grad_norm.reduce", Collective.ALL_REDUCE, axis, 4 * norms, "fp32")
            node = block.node(op, Stream.REDUCE, phase, kernels.optimizer_module, after=(node,))
        block.node(
            kernels.ops.memory("grad_clip", scaled / 2, scaled / 2, launches),
            phase=phase,
            module=kernels.optimizer_module,
            after=(node,),
        )
    _update(kernels, block, local, grad, launches, n_tensors)
    _gather_updated(kernels, block, weights)
    if kernels.caches_casts:
        for (op, stream), *_ in kernels.casts("weights", cast_elements(weights)):
            block.node(op, stream, phase, kernels.optimizer_module)
    if rules.keeps_gradient_buffer(kernels.stack):
        buffer = weights.gradients * DTYPE_BYTES[kernels.accumulate_dtype]
        block.node(kernels.ops.memory("zero_grad", 0, buffer), phase=phase, module=kernels.optimizer_module)
    if stack.step_us:
        idle = kernels.ops.delay("step", int(stack.step_us * 1e6))
        block.node(idle, phase=phase, module=kernels.optimizer_module)
    if grads_allocated:
        block.tensor(grads_allocated, Category.GRADIENT, -1, len(block) - 1)
    return block.build("optimizer")


def _norm_reductions(kernels: PlanKernels, weights: Weights) -> list[tuple[str, int]]:
    """Returns (mesh axis, number of values) of every reduction that the norm of all gradients takes.

    DTensor reduces the norms of all tensors of one mesh together, over each axis that shards them, and not over axes
    that replicate them. Other stacks are assumed to reduce one value once.
    """
    axes = ("dp_shard" if kernels.plan.shards_optimizer else "dp_all", "tp", "pp")
    if not kernels.stack.dtensor:
        axis = next((axis for axis in axes if kernels.group_size.get(axis, 1) > 1), None)
        return [] if axis is None else [(axis, 1)]
    dense, experts = len(weights.matrices) + len(weights.vectors), len(weights.experts)
    found = []
    if kernels.plan.shards_parameters:
        found += [("dp_shard", dense + (0 if kernels.plan.experts_apart else experts))]
        found += [("dp_shard", experts)] if kernels.plan.experts_apart and experts else []
    found += [("tp", dense)] if kernels.plan.tp > 1 else []
    return found + ([("pp", 1)] if kernels.plan.pp > 1 else [])


def _sum_over_tp(kernels: PlanKernels, block: BlockBuilder, weights: Weights, grad: int) -> None:
    """Appends the sums over tp of gradients of weights that tensor-parallel ranks hold whole.

    Without FSDP2 these gradients are still partial sums after the backward pass: the norm and the update each sum them.
    """
    if not kernels.stack.dtensor or kernels.plan.shards_parameters:
        return
    for size in weights.shared * (2 if kernels.stack.clip_grad else 1):
        op = kernels.collective_op("shared_gradients", Collective.ALL_REDUCE, "tp", size * grad, "fp32")
        block.node(op, Stream.REDUCE, Phase.OPTIMIZER, kernels.optimizer_module, after=(len(block) - 1,))


def _update(kernels: PlanKernels, block: BlockBuilder, local: int, grad: int, launches: int, n_tensors: int) -> None:
    plan = kernels.plan
    update = update_of(plan, kernels.stack, grad)
    if plan.optimizer_impl != "fused":
        launches = unfused_kernels(plan.optimizer) * (launches if plan.optimizer_impl == "foreach" else n_tensors)
    op = kernels.ops.memory("optimizer", local * update.read, local * update.written, launches)
    if plan.offload == "params":  # the host updates at about the rate of the host link
        moved = kernels.ops.host_copy("optimizer.on_host", local * (update.read + update.written))
        node = block.node(moved, Stream.COPY, Phase.OPTIMIZER, kernels.optimizer_module, after=(len(block) - 1,))
        block.node(kernels.marker, phase=Phase.OPTIMIZER, module=kernels.optimizer_module, after=(node,))
        return
    if plan.offload == "optimizer":
        copy = kernels.ops.host_copy("optimizer.offload", local * update.to_host)
        node = block.node(copy, Stream.COPY, Phase.OPTIMIZER, kernels.optimizer_module, after=(len(block) - 1,))
        block.node(op, phase=Phase.OPTIMIZER, module=kernels.optimizer_module, after=(node,))
        back = block.node(copy, Stream.COPY, Phase.OPTIMIZER, kernels.optimizer_module, after=(len(block) - 1,))
        block.node(kernels.marker, phase=Phase.OPTIMIZER, module=kernels.optimizer_module, after=(back,))
        return
    block.node(op, phase=Phase.OPTIMIZER, module=kernels.optimizer_module)


def _gather_updated(kernels: PlanKernels, block: BlockBuilder, weights: Weights) -> None:
    """Appends the gather of the parameters that other ranks updated (ZeRO-1 and ZeRO-2)."""
    plan, stack = kernels.plan, kernels.stack
    if not plan.gathers_updates:
        return
    size = weights.total * kernels.weight_bytes
    first = last = len(block) - 1
    if stack.owner_broadcast_us:
        owners = plan.state_ranks
        op = kernels.ops.delay("parameters.broadcast", int(stack.owner_broadcast_us * 1e6 * owners))
        block.node(op, phase=Phase.OPTIMIZER, module=kernels.optimizer_module)
        return
    for expert, tensors in parts(weights):
        axis = shard_axis(plan, expert)
        if kernels.group_size.get(axis, 1) > 1:
            share = size * sum(tensors) / max(1, weights.total)
            op = kernels.collective_op("parameters.gather", Collective.ALL_GATHER, axis, share, kernels.wide_dtype)
            last = block.node(op, Stream.GATHER, Phase.OPTIMIZER, kernels.optimizer_module, after=(last,))
    end = block.node(kernels.marker, phase=Phase.OPTIMIZER, module=kernels.optimizer_module, after=(last,))
    if stack.step_elements:
        copied = min(weights.total, stack.step_elements) * kernels.weight_bytes
        block.tensor(copied, Category.COMMUNICATION, first, end)


def resident_bytes(kernels: PlanKernels, weights: Weights) -> list[int]:
    """Returns the bytes of each category that stay through the whole step on a rank with `weights`."""
    plan = kernels.plan
    gradients = weights.gradients * DTYPE_BYTES[kernels.accumulate_dtype]
    states = resident_states(plan, kernels.stack, weights.total, local_elements(kernels, weights), gradients)
    resident = [0] * N_CATEGORIES
    resident[Category.PARAMETER], resident[Category.GRADIENT] = states.parameter, states.gradient
    resident[Category.OPTIMIZER] = states.optimizer
    if kernels.caches_casts and not kernels.stack.fp8_params:  # casts in both layouts, counted beside bf16 weights
        resident[Category.PARAMETER] += 2 * cast_elements(weights) * DTYPE_BYTES[plan.precision]
    if rules.keeps_bucket_copies(plan, kernels.stack):
        resident[Category.COMMUNICATION] = weights.gradients * DTYPE_BYTES[kernels.reduce_dtype]
    if kernels.stack.dummy_weight_grads:
        sizes = {size for size in weights.matrices if size != kernels.tied_elements}
        resident[Category.GRADIENT] += sum(sizes) * kernels.grad_bytes
    return resident
