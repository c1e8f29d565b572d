"""Rules for adapters, reference models, chunked losses and matrix optimizers: which plans cannot run, and why."""

from __future__ import annotations

from collections.abc import Callable

from forerun.describe.cluster.types import Cluster
from forerun.describe.kernels.optimizers import OfMatrices, optimizer
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.columns import Column, Plans, having, where
from forerun.describe.plan.plan import FP8_PRECISIONS, Plan
from forerun.describe.stacks.catalog import load_stack


def unfit_adapters(model: ModelSpec, plan: Plans, cluster: Cluster) -> Column:
    """Returns a mask of the plans in which adapters meet an unsupported setting, or frozen_dtype has no frozen
    weights.
    """
    split = (plan.tp > 1) | (plan.ep > 1) | (plan.etp > 1)
    scaled = having(plan.precision, lambda precision: precision in FP8_PRECISIONS)
    other = having(plan.stack, lambda name: load_stack(name).parametrized) | having(
        plan.lora_targets, lambda targets: not targets
    )
    return where(plan.lora_rank > 0, split | scaled | plan.autocast | other, plan.frozen_dtype != "wide")


def unfit_adapters_why(model: ModelSpec, plan: Plan, cluster: Cluster) -> str:
    """Explains the refusal of one plan."""
    if not plan.lora_rank:
        return f"frozen_dtype {plan.frozen_dtype} needs frozen weights: give lora_rank"
    if not plan.lora_targets:
        return "lora_rank needs lora_targets, the linear layers that have adapters"
    if plan.tp * plan.ep * plan.etp > 1:
        degrees = f"tp {plan.tp}, ep {plan.ep}, etp {plan.etp}"
        return f"lora_rank runs with data, context and pipeline parallelism, not {degrees}"
    if load_stack(plan.stack).parametrized:
        return f"lora_rank: stack {plan.stack} gathers each parameter by itself; use one with FSDP or ZeRO"
    return f"lora_rank needs precision bf16, fp16, fp32 or tf32 without autocast, got {plan.precision}"


def unfit_reference(model: ModelSpec, plan: Plans, cluster: Cluster) -> Column:
    """Returns a mask of the plans in which a reference model meets an unsupported setting."""
    other = having(plan.stack, lambda name: load_stack(name).parametrized)
    return plan.reference & ((plan.pp > 1) | plan.expert_overlap | other)


def unfit_reference_why(model: ModelSpec, plan: Plan, cluster: Cluster) -> str:
    """Explains the refusal of one plan."""
    if plan.pp > 1:
        return f"reference: a reference model runs without pipelines, not with pp {plan.pp}"
    if plan.expert_overlap:
        return "reference: a reference model runs without expert_overlap"
    return f"reference: stack {plan.stack} gathers each parameter by itself; use one with FSDP or ZeRO"


def unfit_loss_chunks(model: ModelSpec, plan: Plans, cluster: Cluster) -> Column:
    """Returns a mask of the plans in which the fused head and loss do not run."""
    wide = (plan.tp > 1) | plan.autocast | having(plan.stack, lambda name: load_stack(name).fused_accumulation)
    return (plan.loss_chunks > 1) & wide


def unfit_loss_chunks_why(model: ModelSpec, plan: Plan, cluster: Cluster) -> str:
    """Explains the refusal of one plan."""
    if plan.tp > 1:
        return f"loss_chunks {plan.loss_chunks}: the fused head and loss are not split over tp {plan.tp}"
    if plan.autocast:
        return f"loss_chunks {plan.loss_chunks}: the fused head and loss run without autocast"
    return f"loss_chunks {plan.loss_chunks}: stack {plan.stack} adds up weight gradients in its own products"


def unfit_modules(model: ModelSpec, plan: Plans, cluster: Cluster) -> Column:
    """Returns a mask of the plans in which the modules that predict further tokens do not run."""
    if not model.mtp_modules:
        return False
    return (plan.lora_rank > 0) | plan.reference | (plan.activation_offload > 0)


def unfit_modules_why(model: ModelSpec, plan: Plan, cluster: Cluster) -> str:
    """Explains the refusal of one plan."""
    field = next(name for name in ("lora_rank", "reference", "activation_offload") if getattr(plan, name))
    return f"{field} {getattr(plan, field)}: modules that predict further tokens (mtp_modules) run without it"


def of_matrices(plan: Plans, holds: Callable[[OfMatrices], bool]) -> Column:
    """Returns a mask of the plans whose optimizer of matrices satisfies `holds`."""

    def of(name: str) -> bool:
        own = optimizer(name).matrices
        return own is not None and holds(own)

    return having(plan.optimizer, of)


def unfit_optimizer(model: ModelSpec, plan: Plans, cluster: Cluster) -> Column:
    """Returns a mask of the plans in which an optimizer of matrices does not find whole matrices on the GPU."""
    gathered = plan.shards_parameters & (plan.tp > 1)
    never = plan.uses_fsdp & of_matrices(plan, lambda own: own.at_fsdp == "never")
    products = of_matrices(plan, lambda own: bool(own.products))
    split = gathered & of_matrices(plan, lambda own: own.at_fsdp == "all_to_all")
    return never | split | ((plan.offload == "params") & products)


def unfit_optimizer_why(model: ModelSpec, plan: Plan, cluster: Cluster) -> str:
    """Explains the refusal of one plan."""
    if plan.offload == "params":
        return f"offload params: optimizer {plan.optimizer} multiplies matrices on the GPU; offload none or optimizer"
    own = optimizer(plan.optimizer).matrices
    if own is not None and own.at_fsdp == "never":
        return f"optimizer {plan.optimizer} needs whole matrices: use zero_stage 0 to 2 instead of 3"
    return f"optimizer {plan.optimizer} at zero_stage 3 gathers one dimension of a matrix, not also tp {plan.tp}"
