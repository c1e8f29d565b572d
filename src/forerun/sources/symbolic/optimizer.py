"""The optimizer step: gradient norm, update, and the gathering of updated parameters; and what it keeps in memory."""

from __future__ import annotations

from forerun.core.program.builder import BlockBuilder
from forerun.core.program.types import N_CATEGORIES, Block, Category, Collective, Phase, Stream
from forerun.sources.symbolic.data_parallel import REDUCED, DataParallel, persistent_gradients, shard_elements
from forerun.sources.symbolic.kernels import PlanKernels
from forerun.sources.symbolic.shapes import DTYPE_BYTES
from forerun.sources.symbolic.weights import Weights

_STATES = {"adamw": 2, "adam": 2, "sgd": 1}
_TENSORS_PER_LAUNCH = 60
"""tensors of one multi-tensor kernel: its argument block holds about so many"""
_UNFUSED = {"adamw": (52, 32, 8), "adam": (48, 28, 7), "sgd": (28, 16, 4)}
"""bytes read and written per fp32 element, and kernels (of many tensors or of one): torch/optim/adam.py scales the
parameter (AdamW), lerps the first moment, scales the second and adds the square, then takes root, quotient, sum and
update; sgd.py adds decay, scales the momentum and adds to it, and updates"""


def state_tensors(optimizer: str) -> int:
    """Tensors that an optimizer keeps for each parameter."""
    return _STATES[optimizer]


def local_elements(kernels: PlanKernels, weights: Weights) -> int:
    """Elements that this rank updates."""
    return weights.total if kernels.plan.zero_stage == 0 else shard_elements(kernels.plan, weights)


def cast_elements(weights: Weights) -> int:
    """Elements of `weights` that products read in fp8 where products are in fp8."""
    return sum(weights.matrices) - weights.wide + weights.expert


def optimizer_block(kernels: PlanKernels, parallel: DataParallel, weights: Weights, grads_allocated: int) -> Block:
    """Clip, update, gather updated parameters; frees `grads_allocated` bytes of gradients at the end."""
    plan, stack, block = kernels.plan, kernels.stack, BlockBuilder()
    phase, local = Phase.OPTIMIZER, local_elements(kernels, weights)
    grad = DTYPE_BYTES[plan.master_dtype] if plan.zero_stage == 3 else DTYPE_BYTES[kernels.accumulate_dtype]
    n_tensors = len(weights.tensors)
    launches = max(1, n_tensors // _TENSORS_PER_LAUNCH)
    block.node(kernels.marker, phase=phase, module=kernels.optimizer_module, wait=(REDUCED,))
    _sum_over_tp(kernels, block, weights, grad)
    if stack.clip_grad:
        norm = kernels.ops.memory("grad_norm", local * grad, 0, max(launches, n_tensors // 20))
        node = block.node(norm, phase=phase, module=kernels.optimizer_module)
        for axis, norms in _norm_reductions(kernels, weights):
            op = kernels.collective_op("grad_norm.reduce", Collective.ALL_REDUCE, axis, 4 * norms, "fp32")
            node = block.node(op, Stream.REDUCE, phase, kernels.optimizer_module, after=(node,))
        block.node(
            kernels.ops.memory("grad_clip", local * grad, local * grad, launches),
            phase=phase,
            module=kernels.optimizer_module,
            after=(node,),
        )
    _update(kernels, block, local, grad, launches, n_tensors)
    _gather_updated(kernels, parallel, block, weights)
    if kernels.caches_casts:
        for (op, stream), *_ in kernels.casts("weights", cast_elements(weights)):
            block.node(op, stream, phase, kernels.optimizer_module)
    if persistent_gradients(kernels):
        buffer = weights.gradients * DTYPE_BYTES[kernels.accumulate_dtype]
        block.node(kernels.ops.memory("zero_grad", 0, buffer), phase=phase, module=kernels.optimizer_module)
    if stack.step_us:
        idle = kernels.ops.delay("step", int(stack.step_us * 1e6))
        block.node(idle, phase=phase, module=kernels.optimizer_module)
    if grads_allocated:
        block.tensor(grads_allocated, Category.GRADIENT, -1, len(block) - 1)
    return block.build("optimizer")


def _norm_reductions(kernels: PlanKernels, weights: Weights) -> list[tuple[str, int]]:
    """(mesh axis, numbers) of every reduction that the norm of all gradients takes.

    DTensor reduces the norms of all tensors of one mesh together, over each axis that they are sharded over, and
    nothing over axes where gradients are the same. Other stacks are taken to reduce one number once.
    """
    sharded = kernels.plan.zero_stage > 0 and kernels.plan.fsdp > 1
    axes = ("dp_shard" if sharded else "dp_all", "tp", "pp")
    if not kernels.stack.dtensor:
        axis = next((axis for axis in axes if kernels.group_size.get(axis, 1) > 1), None)
        return [] if axis is None else [(axis, 1)]
    dense, experts = len(weights.matrices) + len(weights.vectors), len(weights.experts)
    found = []
    if kernels.plan.zero_stage == 3 and kernels.plan.fsdp > 1:
        found += [("dp_shard", dense + (experts if kernels.plan.ep == 1 else 0))]
        found += [("dp_shard", experts)] if kernels.plan.ep > 1 and experts else []
    found += [("tp", dense)] if kernels.plan.tp > 1 else []
    return found + ([("pp", 1)] if kernels.plan.pp > 1 else [])


def _sum_over_tp(kernels: PlanKernels, block: BlockBuilder, weights: Weights, grad: int) -> None:
    """Without FSDP2 nothing sums the gradients of what tensor-parallel ranks hold whole before they are used: the norm
    and the update each do."""
    if not kernels.stack.dtensor or (kernels.plan.zero_stage == 3 and kernels.plan.fsdp > 1):
        return
    for size in weights.shared * (2 if kernels.stack.clip_grad else 1):
        op = kernels.collective_op("shared_gradients", Collective.ALL_REDUCE, "tp", size * grad, "fp32")
        block.node(op, Stream.REDUCE, Phase.OPTIMIZER, kernels.optimizer_module, after=(len(block) - 1,))


def _update(kernels: PlanKernels, block: BlockBuilder, local: int, grad: int, launches: int, n_tensors: int) -> None:
    plan = kernels.plan
    master = 4 if kernels.weight_bytes == 2 or plan.master_dtype == "fp32" else DTYPE_BYTES[plan.master_dtype]
    states = _STATES[plan.optimizer] * 4
    read, write = master + grad + states, master + states
    if has_working_copy(kernels):
        write += kernels.weight_bytes
    if plan.optimizer_impl != "fused":
        read, write, per_tensor = _UNFUSED[plan.optimizer]
        launches = per_tensor * (launches if plan.optimizer_impl == "foreach" else n_tensors)
    op = kernels.ops.memory("optimizer", local * read, local * write, launches)
    if plan.offload == "params":  # the host updates, at about the rate at which its memory feeds the link
        update = kernels.ops.host_copy("optimizer.on_host", local * (read + write))
        node = block.node(update, Stream.COPY, Phase.OPTIMIZER, kernels.optimizer_module, after=(len(block) - 1,))
        block.node(kernels.marker, phase=Phase.OPTIMIZER, module=kernels.optimizer_module, after=(node,))
        return
    if plan.offload == "optimizer":
        copy = kernels.ops.host_copy("optimizer.offload", local * (states + master))
        node = block.node(copy, Stream.COPY, Phase.OPTIMIZER, kernels.optimizer_module, after=(len(block) - 1,))
        block.node(op, phase=Phase.OPTIMIZER, module=kernels.optimizer_module, after=(node,))
        back = block.node(copy, Stream.COPY, Phase.OPTIMIZER, kernels.optimizer_module, after=(len(block) - 1,))
        block.node(kernels.marker, phase=Phase.OPTIMIZER, module=kernels.optimizer_module, after=(back,))
        return
    block.node(op, phase=Phase.OPTIMIZER, module=kernels.optimizer_module)


def _gather_updated(kernels: PlanKernels, parallel: DataParallel, block: BlockBuilder, weights: Weights) -> None:
    """ZeRO-1 and ZeRO-2: every rank gathers the parameters that the others updated."""
    plan, stack = kernels.plan, kernels.stack
    if plan.zero_stage not in (1, 2) or plan.fsdp == 1:
        return
    size = weights.total * kernels.weight_bytes
    first = last = len(block) - 1
    if stack.owner_broadcast_us:
        owners = plan.fsdp
        op = kernels.ops.delay("parameters.broadcast", int(stack.owner_broadcast_us * 1e6 * owners))
        block.node(op, phase=Phase.OPTIMIZER, module=kernels.optimizer_module)
        return
    for axis, tensors in parallel._parts(weights):
        if kernels.group_size.get(axis, 1) > 1:
            share = size * sum(tensors) / max(1, weights.total)
            op = kernels.collective_op("parameters.gather", Collective.ALL_GATHER, axis, share, kernels.wide_dtype)
            last = block.node(op, Stream.GATHER, Phase.OPTIMIZER, kernels.optimizer_module, after=(last,))
    end = block.node(kernels.marker, phase=Phase.OPTIMIZER, module=kernels.optimizer_module, after=(last,))
    if stack.step_elements:
        copied = min(weights.total, stack.step_elements) * kernels.weight_bytes
        block.tensor(copied, Category.COMMUNICATION, first, end)


def has_working_copy(kernels: PlanKernels) -> bool:
    """Whether low-precision parameters live beside the master weights (everything but FSDP, and SimpleFSDP's
    replicas, whose parametrisation casts at each use)."""
    return (
        kernels.plan.zero_stage != 3
        and DTYPE_BYTES[kernels.plan.master_dtype] == 4
        and kernels.weight_bytes == 2
        and not (kernels.stack.autocast or kernels.plan.autocast)
        and not kernels.stack.parametrized
    )


def resident_bytes(kernels: PlanKernels, weights: Weights) -> list[int]:
    """Bytes by category that live through the whole step on a rank with `weights`."""
    plan = kernels.plan
    resident = [0] * N_CATEGORIES
    local = local_elements(kernels, weights)
    master = DTYPE_BYTES[plan.master_dtype]
    states = _STATES[plan.optimizer] * 4
    if plan.zero_stage == 3:
        resident[Category.PARAMETER] = 0 if plan.offload == "params" else local * master
    else:
        working = kernels.weight_bytes if has_working_copy(kernels) else master
        resident[Category.PARAMETER] = weights.total * working
        if has_working_copy(kernels):
            states += 4
        if persistent_gradients(kernels):
            resident[Category.GRADIENT] = weights.gradients * DTYPE_BYTES[kernels.accumulate_dtype]
    if kernels.caches_casts and not kernels.stack.fp8_params:  # in both layouts, beside the two bytes of a bf16 element
        resident[Category.PARAMETER] += 2 * cast_elements(weights) * DTYPE_BYTES[plan.precision]
    if kernels.stack.bucket_copies and plan.zero_stage == 0 and plan.dp * plan.cp > 1:
        resident[Category.COMMUNICATION] = weights.gradients * DTYPE_BYTES[kernels.reduce_dtype]
    if kernels.stack.dummy_weight_grads:
        sizes = {size for size in weights.matrices if size != kernels.tied_elements}
        resident[Category.GRADIENT] += sum(sizes) * kernels.grad_bytes
    if plan.offload == "none":
        resident[Category.OPTIMIZER] = local * states
    return resident
