"""Memory of a rank before the first step, at each stage of initialisation, and the bytes that a checkpoint saves.

A script may make its model on the device. Data parallelism then replaces one parameter after the other by its shard, so
that the whole model and the first shard are in memory together. Or a script makes the model on the meta device, which
takes no memory, and `to_empty` allocates the shards. torch.nn.init fills tensors in place and allocates nothing, except
through SimpleFSDP's parametrisation: each access to a parameter gathers it in the dtype of its use.
"""

from __future__ import annotations

from dataclasses import dataclass

from forerun.core.cost.checkpoint import SavedState
from forerun.core.memory.allocator_kernels import MIN_BLOCK
from forerun.describe.cluster.types import Cluster
from forerun.describe.kernels.attention import attention_kernel
from forerun.describe.kernels.optimizers import optimizer
from forerun.describe.model.layered import LayeredModel
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.plan import Plan
from forerun.describe.plan.rules import DTYPE_BYTES, frozen_matrix_bytes, has_working_copy
from forerun.describe.stacks.stack import Stack
from forerun.sources.symbolic.build import staged_model
from forerun.sources.symbolic.exchanges import held_frozen_bytes, shard_elements, sharded
from forerun.sources.symbolic.fsdp_units import Staged
from forerun.sources.symbolic.kernels import PlanKernels
from forerun.sources.symbolic.optimizer import local_elements, moment_bytes, whole_moment_bytes
from forerun.sources.symbolic.schedule import rank_stages
from forerun.sources.symbolic.shapes import ceil_div
from forerun.sources.symbolic.weights import Weights

_INDEX_BYTES = 8
"""bytes of a token's number (int64)"""


@dataclass(frozen=True, slots=True)
class InitStage:
    """Memory of a device at the end of a stage of initialisation."""

    way: str
    """`direct`: the model is made on the device; `meta`: on the meta device; `trace`: as the traced script makes it"""
    name: str
    """stage; `init_weights, gathered` replaces `init_weights` where it goes through the parametrisation"""
    allocated_bytes: int
    peak_bytes: int
    """most bytes allocated so far (torch.cuda.max_memory_allocated)"""


@dataclass(frozen=True, slots=True)
class TrainingState:
    """The checkpoints and the initialisation of a plan."""

    saved: SavedState
    init: tuple[InitStage, ...]
    """stages of initialisation; empty if the stack does not initialise as PyTorch's FSDP does"""


def training_state(model: ModelSpec | LayeredModel, plan: Plan, cluster: Cluster, stack: Stack) -> TrainingState:
    """Returns the state of `model` under `plan` on the rank that has the most."""
    staged = staged_model(model, plan, cluster, stack)
    ranks = _weights_by_rank(staged, plan)
    kernels = staged.kernels
    fullest = max(ranks, key=lambda weights: Weights.joined(weights).held)
    tokens = 0 if isinstance(model, LayeredModel) else plan.micro_batch * plan.seq_len // plan.cp
    mask = _mask_bytes(model, plan, cluster, stack)
    return TrainingState(_saved(kernels, ranks), _stages(kernels, fullest, 2 * tokens * _INDEX_BYTES + mask))


def trained_elements(model: ModelSpec | LayeredModel, plan: Plan, cluster: Cluster, stack: Stack) -> tuple[int, ...]:
    """Returns the trained parameters that a rank of each pipeline rank holds: its shards, or all that it trains."""
    staged = staged_model(model, plan, cluster, stack)
    parts = [Weights.joined(weights) for weights in _weights_by_rank(staged, plan)]
    return tuple(shard_elements(plan, part) if plan.shards_parameters else part.total for part in parts)


def _weights_by_rank(staged: Staged, plan: Plan) -> list[list[Weights]]:
    """Returns the weights of the units of each pipeline rank; tied weights count once on a rank that holds both."""
    ranks = []
    for rank in range(plan.pp):
        units = [unit for stage in rank_stages(plan, rank) for unit, _ in staged.stages[stage]]
        tied = staged.tied and len(units) > 1 and any(unit is staged.first for unit in units)
        weights = [unit.weights for unit in units]
        if tied and units[-1] is staged.stages[-1][-1][0]:
            last = weights[-1] = Weights.joined(weights[-1:])
            last.drop_tied(staged.kernels.tied_elements)
        ranks.append(weights)
    return ranks


# -- checkpoints -------------------------------------------------------------------------------------------------------


def _saved(kernels: PlanKernels, ranks: list[list[Weights]]) -> SavedState:
    """Returns the bytes of a checkpoint; ranks of a stage that have the same weights each save an equal share."""
    plan = kernels.plan
    parts = [Weights.joined(weights) for weights in ranks]
    weight_bytes, master = _element_bytes(kernels)
    copies = plan.dp * plan.cp
    kinds = plan.ep * plan.etp / plan.tp
    shares = [
        (part.dense + part.expert * kinds)
        * (weight_bytes + master + whole_moment_bytes(plan, part) / max(1, part.total))
        / copies
        for part in parts
    ]
    held = [_held_bytes(kernels, part, weight_bytes, master) for part in parts]
    ranks_of_stage = plan.world_size // plan.pp
    return SavedState(
        saved_bytes=max(shares),
        total_bytes=sum(shares) * ranks_of_stage,
        held_bytes=max(held),
        held_total_bytes=sum(held) * ranks_of_stage,
        tensors=max(len(part.tensors) for part in parts) * (1 + optimizer(plan.optimizer).state_tensors),
    )


def _element_bytes(kernels: PlanKernels) -> tuple[int, int]:
    """Returns the bytes of an element of the weights that kernels read, and of the weights beside them that the
    optimizer updates."""
    master = DTYPE_BYTES[kernels.plan.master_dtype]
    return (kernels.weight_bytes, master) if has_working_copy(kernels.plan, kernels.stack) else (master, 0)


def _held_bytes(kernels: PlanKernels, part: Weights, weight_bytes: int, master: int) -> float:
    whole = shard_elements(kernels.plan, part) if kernels.plan.shards_parameters else part.total
    local = local_elements(kernels, part)
    own = whole * weight_bytes + local * master + moment_bytes(kernels.plan, part, local)
    return own + held_frozen_bytes(kernels.plan, part)


# -- initialisation ----------------------------------------------------------------------------------------------------


def _stages(kernels: PlanKernels, units: list[Weights], batch_bytes: int) -> tuple[InitStage, ...]:
    plan, stack = kernels.plan, kernels.stack
    simple = stack.fsdp == "simple"
    if plan.offload == "params" or not (simple or (stack.fsdp == "fsdp2" and plan.uses_fsdp)):
        return ()
    ranks = plan.fsdp if plan.shards_parameters else 1
    master = DTYPE_BYTES[plan.master_dtype]
    pairs = []
    for unit in units:
        for size in (*unit.matrices, *unit.vectors, *unit.experts):
            over = max(1, ranks * plan.tp // (plan.ep * plan.etp)) if size in unit.experts else ranks
            pairs.append((_block(size * master), _block(sharded(size, over) * master)))
        wide = [*unit.frozen_wide, *unit.frozen_experts]
        for sizes, width in ((unit.frozen, frozen_matrix_bytes(plan)), (wide, kernels.weight_bytes)):
            pairs += [(_block(round(size * width)), _block(round(sharded(size, ranks) * width))) for size in sizes]
    shards = sum(shard for _, shard in pairs)
    stages = [
        InitStage("meta", "model", 0, 0),
        InitStage("meta", "sharded", 0, 0),
        InitStage("meta", "to_empty", shards, shards),
        InitStage("meta", "init_weights", shards, shards),
    ]
    if simple and ranks > 1:
        most = shards + max(_gathered(kernels, size, ranks) for unit in units for size in unit.tensors)
        stages.append(InitStage("meta", "init_weights, gathered", shards, most))
    batch = _block(batch_bytes)
    stages.append(InitStage("meta", "batch", shards + batch, shards + batch))
    if plan.tp * plan.pp * plan.ep > 1:
        return tuple(stages)  # such a model is made on the meta device, as no rank holds it whole
    whole = sum(size for size, _ in pairs)
    most = _peak_of_sharding(pairs, whole) if ranks > 1 else whole
    stages += [
        InitStage("direct", "model", whole, whole),
        InitStage("direct", "sharded", shards, most),
        InitStage("direct", "batch", shards + batch, max(most, shards + batch)),
    ]
    return tuple(stages)


def _peak_of_sharding(pairs: list[tuple[int, int]], whole: int) -> int:
    """Returns the peak bytes while one parameter after the other is replaced by its shard."""
    now = most = whole
    for size, shard in pairs:
        most = max(most, now + shard)
        now += shard - size
    return most


def _gathered(kernels: PlanKernels, size: int, ranks: int) -> int:
    """Returns the bytes of a unsharded parameter in the dtype of its use, and of the cast of its shard."""
    cast = (
        _block(sharded(size, ranks) * kernels.weight_bytes)
        if kernels.weight_bytes != DTYPE_BYTES[kernels.plan.master_dtype]
        else 0
    )
    return cast + _block(size * kernels.weight_bytes)


def _block(size: int) -> int:
    return ceil_div(size, MIN_BLOCK) * MIN_BLOCK


def _mask_bytes(model: ModelSpec | LayeredModel, plan: Plan, cluster: Cluster, stack: Stack) -> int:
    """Returns the bytes of FlexAttention's BlockMask of one head; 0 for other kernels.

    It stores int32 block indices and counts by rows and by columns, each for full and for partial blocks.
    """
    kernel = attention_kernel(stack.attention_kernel(plan.attention, cluster.device.architecture))
    if isinstance(model, LayeredModel) or not model.n_heads or not kernel.mask_block:
        return 0
    blocks = ceil_div(plan.seq_len, kernel.mask_block)
    return 4 * 4 * (blocks * blocks + blocks)
