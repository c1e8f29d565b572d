"""The optimizer step (gradient norm, update, gather of updated parameters) and its resident memory."""

from __future__ import annotations

from forerun.core.program.builder import BlockBuilder
from forerun.core.program.types import N_CATEGORIES, Block, Category, Collective, Phase, Stream
from forerun.describe.kernels.optimizers import TENSORS_PER_LAUNCH, optimizer
from forerun.describe.plan import rules
from forerun.describe.plan.plan import Plan
from forerun.describe.plan.rules import DTYPE_BYTES
from forerun.sources.symbolic.data_parallel import REDUCED
from forerun.sources.symbolic.exchanges import held_frozen_bytes, parts, shard_axis, shard_elements
from forerun.sources.symbolic.kernels import PlanKernels
from forerun.sources.symbolic.matrix_optimizer import (
    matrices_of,
    matrix_state_bytes,
    ranks_of,
    update_matrices,
)
from forerun.sources.symbolic.shapes import ceil_div
from forerun.sources.symbolic.states import (
    clipping_bytes,
    resident_states,
    runs_fused,
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
    launches = max(1, n_tensors // TENSORS_PER_LAUNCH)
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
    _update(kernels, block, weights, grad)
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


def _update(kernels: PlanKernels, block: BlockBuilder, weights: Weights, grad: int) -> None:
    plan, own = kernels.plan, matrices_of(kernels.plan)
    update = update_of(plan, kernels.stack, grad)
    local = local_elements(kernels, weights)
    each = _element_wise(plan, weights, local)
    launches = _launches(plan, len(weights.tensors) - (len(weights.shapes) if own else 0))
    op = kernels.ops.memory("optimizer", each * update.read, each * update.written, launches)
    if plan.offload == "params":  # the host updates at about the rate of the host link
        moved = kernels.ops.host_copy("optimizer.on_host", local * (update.read + update.written))
        node = block.node(moved, Stream.COPY, Phase.OPTIMIZER, kernels.optimizer_module, after=(len(block) - 1,))
        block.node(kernels.marker, phase=Phase.OPTIMIZER, module=kernels.optimizer_module, after=(node,))
        return
    copy = -1
    if plan.offload == "optimizer":
        moved_bytes = local * update.to_host
        if own:
            masters = local * (update.to_host - optimizer(plan.optimizer).elements.least_bytes(_moment_size(plan)))
            moved_bytes = masters + moment_bytes(plan, weights, local)
        copy = kernels.ops.host_copy("optimizer.offload", moved_bytes)
        node = block.node(copy, Stream.COPY, Phase.OPTIMIZER, kernels.optimizer_module, after=(len(block) - 1,))
        block.node(op, phase=Phase.OPTIMIZER, module=kernels.optimizer_module, after=(node,))
    else:
        block.node(op, phase=Phase.OPTIMIZER, module=kernels.optimizer_module)
    if own:
        update_matrices(kernels, block, weights, own)
    if copy >= 0:
        back = block.node(copy, Stream.COPY, Phase.OPTIMIZER, kernels.optimizer_module, after=(len(block) - 1,))
        block.node(kernels.marker, phase=Phase.OPTIMIZER, module=kernels.optimizer_module, after=(back,))


def _launches(plan: Plan, n_tensors: int) -> int:
    """Returns the kernels that update `n_tensors` parameters element by element."""
    unfused = optimizer(plan.optimizer).elements.unfused
    lists = max(1, n_tensors // TENSORS_PER_LAUNCH)
    if unfused is None:
        return max(1, n_tensors)
    if runs_fused(plan):
        return lists
    return unfused.kernels * (lists if plan.optimizer_impl == "foreach" else max(1, n_tensors))


def _element_wise(plan: Plan, weights: Weights, local: int) -> int:
    """Returns how many of the `local` elements that a rank updates it updates one by one."""
    if matrices_of(plan) is None:
        return local
    return max(0, local - sum(ceil_div(matrix.elements, ranks_of(plan, matrix)) for matrix in weights.shapes))


def _moment_size(plan: Plan) -> int:
    return DTYPE_BYTES[plan.moment_dtype]


def moment_bytes(plan: Plan, weights: Weights, local: int) -> float:
    """Returns the bytes of the optimizer's own states on a rank that updates `local` elements of `weights`."""
    elements, own = optimizer(plan.optimizer).elements, matrices_of(plan)
    if own is not None:
        each = _element_wise(plan, weights, local)
        return elements.state_bytes(each, _moment_size(plan)) + matrix_state_bytes(plan, weights)
    if elements.blocks is None:
        return elements.state_bytes(local, _moment_size(plan))
    share = local / max(1, weights.total)
    return sum(elements.state_bytes(size * share, _moment_size(plan)) for size in weights.tensors)


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


def whole_moment_bytes(plan: Plan, weights: Weights) -> float:
    """Returns the bytes of the optimizer's own states for all of `weights`, as one copy of the model has them."""
    elements = optimizer(plan.optimizer).elements
    if matrices_of(plan) is None:
        return sum(elements.state_bytes(size, _moment_size(plan)) for size in weights.tensors)
    each = weights.total - sum(matrix.elements for matrix in weights.shapes)
    return elements.state_bytes(each, _moment_size(plan)) + matrix_state_bytes(plan, weights, whole=True)


def resident_bytes(kernels: PlanKernels, weights: Weights) -> list[int]:
    """Returns the bytes of each category that stay through the whole step on a rank with `weights`."""
    plan = kernels.plan
    gradients = weights.gradients * DTYPE_BYTES[kernels.accumulate_dtype]
    local = local_elements(kernels, weights)
    moments = moment_bytes(plan, weights, local)
    states = resident_states(plan, kernels.stack, weights.total, local, gradients, moments)
    resident = [0] * N_CATEGORIES
    resident[Category.PARAMETER], resident[Category.GRADIENT] = states.parameter, states.gradient
    resident[Category.OPTIMIZER] = round(states.optimizer)
    if plan.offload != "params":
        resident[Category.PARAMETER] += round(held_frozen_bytes(plan, weights))
    if kernels.caches_casts and not kernels.stack.fp8_params:  # casts in both layouts, counted beside bf16 weights
        resident[Category.PARAMETER] += 2 * cast_elements(weights) * DTYPE_BYTES[plan.precision]
    if rules.keeps_bucket_copies(plan, kernels.stack):
        resident[Category.COMMUNICATION] = weights.gradients * DTYPE_BYTES[kernels.reduce_dtype]
    if kernels.stack.dummy_weight_grads:
        sizes = {size for size in weights.matrices if size != kernels.tied_elements}
        resident[Category.GRADIENT] += sum(sizes) * kernels.grad_bytes
    return resident
