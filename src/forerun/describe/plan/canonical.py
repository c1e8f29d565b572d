"""canonical: the plan that represents all plans that execute the same step.

In some plans, some fields make no difference. If nothing is sharded, a rank may belong to dp_shard or to dp_replicate;
without tensor parallelism, `sequence_parallel` splits nothing. A `Naming` states in which plans fields make no
difference, and which values then represent all others. Its arithmetic works on a Plan and on a table of plans, as the
rules of `constraints` do. Two plans with equal canonical forms build equal Programs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, get_args

import numpy as np

from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.columns import Column, Plans, having, no, ranks_between, values_of
from forerun.describe.plan.plan import DEFAULT_ORDER, MESH_AXES, LoraTarget, Plan
from forerun.describe.plan.routing import BALANCED
from forerun.describe.plan.rules import gathers_parameters, wide_dtype
from forerun.describe.stacks.catalog import load_stack
from forerun.describe.stacks.stack import Stack, gradient_dtype


@dataclass(frozen=True, slots=True)
class Naming:
    """Fields that make no difference in some plans."""

    fields: tuple[str, ...]
    where: Callable[[ModelSpec, Plans], Column]
    """says whether the fields make no difference: a truth value, or one for each plan of a table"""
    values: Callable[[Plans], tuple[Column, ...]]
    """returns the value of each field that represents all its values there"""


def canonical(model: ModelSpec, plan: Plan) -> Plan:
    """Returns the plan that represents all plans that execute the same step as `plan`."""
    for naming in NAMINGS:
        if naming.where(model, plan):
            values = (value.item() if isinstance(value, np.generic) else value for value in naming.values(plan))
            plan = replace(plan, **dict(zip(naming.fields, values, strict=True)))
    return plan


def _usual(field: str, value: Any, where: Callable[[ModelSpec, Plans], Column]) -> Naming:
    """Sets `field` to `value` where it makes no difference."""
    return Naming((field,), where, lambda plan: (value,))


def _as_stack(field: str, where: Callable[[ModelSpec, Plans], Column]) -> Naming:
    """Sets `field` to the value of the plan's stack where it makes no difference; plans of a table have the same."""

    def values(plan: Plans) -> tuple[Column, ...]:
        stack = next(name for name, _ in values_of(plan.stack))
        return (getattr(load_stack(stack), field),)

    return Naming((field,), where, values)


def _in_stack(plan: Plans, holds: Callable[[Stack], Column]) -> Column:
    """Says in which plans the software stack has the property `holds`."""
    return having(plan.stack, lambda name: holds(load_stack(name)))


def _alone(model: ModelSpec, plan: Plans) -> Column:
    """Says in which plans a rank shares its weights with no other rank."""
    alone = plan.dp * plan.cp == 1
    return alone if model.moe is None else alone & ((plan.tp == plan.ep * plan.etp) | no(plan.experts_apart))


def _gathers(plan: Plans) -> Column:
    """Says in which plans parameters are gathered, fetched or cast before a unit uses them."""
    return _in_stack(plan, lambda stack: gathers_parameters(plan, stack))


# -- the mesh ------------------------------------------------------------------------------------------------


def _least_shard(plan: Plans) -> Column:
    """Returns the least dp_shard that expert parallelism needs beside cp and tp."""
    needed = plan.ep * plan.etp
    return needed // np.gcd(needed, plan.cp * plan.tp)


def _replicated(model: ModelSpec, plan: Plans) -> Column:
    """Says in which plans dp_shard shards nothing and lies beside dp_replicate, so that both are one axis.

    Expert groups are cut out of dp_shard x cp, so with expert parallelism the axes must be in the usual order.
    """

    def beside(order: str) -> Column:
        between = ranks_between(plan, order, "dp_shard", "dp_replicate")
        return (between == 1) & ((plan.ep == 1) | (order == DEFAULT_ORDER))

    return having(plan.mesh_order, beside) & (plan.zero_stage == 0) & (plan.dp_shard > _least_shard(plan))


def _unsharded(model: ModelSpec, plan: Plans) -> Column:
    """Says in which plans ZeRO-1 or ZeRO-2 has one rank to shard over, and so runs as stage 0.

    Stacks that keep copies of gradient buckets keep them at stage 0 only, which makes a difference there.
    """
    stages = (plan.zero_stage == 1) | (plan.zero_stage == 2)
    copies = _in_stack(plan, lambda stack: stack.bucket_copies)
    return stages & (plan.fsdp == 1) & (no(copies) | (plan.dp == 1))


def _usual_order(model: ModelSpec, plan: Plans) -> Column:
    """Says in which plans the axes of more than one rank are in the usual order."""

    def usual(order: str) -> Column:
        turned: Column = False
        for axis, later in combinations(MESH_AXES, 2):
            if order.split("-").index(later) < order.split("-").index(axis):
                turned |= (getattr(plan, axis) > 1) & (getattr(plan, later) > 1)
        return no(turned)

    return having(plan.mesh_order, usual)


# -- data parallelism ----------------------------------------------------------------------------------------


def _as_by_default(model: ModelSpec, plan: Plans) -> Column:
    """Returns a mask of the plans whose reshard policy equals `default`, or has no parameters to free."""
    freed = (plan.reshard_after_forward == "always") & (plan.pp == 1)
    kept = (plan.reshard_after_forward == "never") & (plan.pp > 1)
    return freed | kept | no(_gathers(plan))


def _no_overlap(model: ModelSpec, plan: Plans) -> Column:
    """Says in which plans no replicated gradients are reduced, or the stack never reduces them beside backward."""
    return _gathers(plan) | _alone(model, plan) | _in_stack(plan, lambda stack: not stack.grad_reduce_overlap)


def _no_bucket(model: ModelSpec, plan: Plans) -> Column:
    own = _in_stack(plan, lambda stack: plan.ddp_bucket_mib == stack.bucket_mib)
    return own | _no_overlap(model, plan) | no(plan.overlap_grad_reduce)


def _own_reduce_dtype(model: ModelSpec, plan: Plans) -> Column:
    """Says in which plans the dtype of gradient reductions is the stack's default."""

    def own(wide: str) -> Column:
        return _in_stack(plan, lambda stack: plan.reduce_dtype == gradient_dtype(stack.reduce_dtype, wide))

    return having(wide_dtype(plan), own)


# -- tensor, context and expert parallelism ------------------------------------------------------------------


def _balanced_ranks(model: ModelSpec, plan: Plans) -> Column:
    """Says in which plans context-parallel ranks have equal work whichever tokens they hold."""
    return (plan.cp == 1) | (plan.cp_method == "ulysses") | (not model.causal)


def _balanced_experts(model: ModelSpec, plan: Plans) -> Column:
    """Says in which plans the model has no experts, or pads each to its capacity, whatever the router chooses."""
    return True if model.moe is None else model.moe.capacity_factor is not None


# -- pipelines -----------------------------------------------------------------------------------------------


def _no_schedule(model: ModelSpec, plan: Plans) -> Column:
    """Says in which plans there is one pipeline stage, or one micro batch, which GPipe runs as 1F1B does."""
    return (plan.pp == 1) | ((plan.pp_schedule == "GPipe") & (plan.n_microbatches == 1))


MESH_NAMINGS = (
    _usual("mesh_order", DEFAULT_ORDER, _usual_order),
    Naming(("dp_shard", "dp_replicate"), _replicated, lambda plan: (_least_shard(plan), plan.dp // _least_shard(plan))),
    _usual("zero_stage", 0, _unsharded),
    _usual("mesh_order", DEFAULT_ORDER, _usual_order),
)
"""the namings that depend on the mesh, the ZeRO stage and the software stack alone"""
NAMINGS = (
    *MESH_NAMINGS,
    _usual("reshard_after_forward", "default", _as_by_default),
    _usual(
        "prefetch", 1, lambda model, plan: no(_gathers(plan)) | _in_stack(plan, lambda stack: stack.fsdp == "simple")
    ),
    _usual("shard_min_mib", 0.0, lambda model, plan: no(plan.shards_parameters)),
    _usual("overlap_grad_reduce", True, _no_overlap),
    _usual("ddp_bucket_mib", 0.0, _no_bucket),
    _usual("reduce_dtype", "auto", _own_reduce_dtype),
    _as_stack("sequence_parallel", lambda model, plan: plan.tp == 1),
    _usual("loss_parallel", True, lambda model, plan: plan.tp == 1),
    _as_stack("cp_method", lambda model, plan: plan.cp == 1),
    _usual("cp_load_balance", "head_tail", _balanced_ranks),
    _usual("expert_imbalance", 1.0, _balanced_experts),
    _usual("expert_routing", BALANCED, lambda model, plan: _balanced_experts(model, plan) | (plan.ep == 1)),
    _usual("shared_expert_overlap", False, lambda model, plan: model.moe is None),
    _usual("pp_schedule", "1F1B", _no_schedule),
    _usual("layers_per_stage", None, lambda model, plan: plan.n_stages == 1),
    _usual("balance_ends", False, lambda model, plan: (plan.n_stages == 1) | (plan.layers_per_stage != None)),  # noqa: E711  a column
    _usual("recompute_modules", (), lambda model, plan: plan.activation_checkpointing != "selective"),
    _as_stack(
        "selective_policy",
        lambda model, plan: (
            (plan.activation_checkpointing != "selective")
            | (plan.recompute_modules != ()) & (plan.selective_policy != "params")
        ),
    ),
    _usual("checkpoint_every", 1, lambda model, plan: plan.activation_checkpointing == "none"),
    _usual(
        "compile",
        False,
        lambda model, plan: (
            no(plan.compile_model) & (no(plan.compile_loss) | _in_stack(plan, lambda stack: not stack.compiles_loss))
        ),
    ),
    _usual("compile_model", True, lambda model, plan: no(plan.compile)),
    _usual(
        "compile_loss",
        True,
        lambda model, plan: no(plan.compile) | _in_stack(plan, lambda stack: not stack.compiles_loss),
    ),
    _usual("graph_breaks", False, lambda model, plan: no(plan.compile)),
    _usual("lora_targets", get_args(LoraTarget), lambda model, plan: plan.lora_rank == 0),
    _usual(
        "dispatcher", "auto", lambda model, plan: _in_stack(plan, lambda stack: plan.dispatcher == stack.dispatcher)
    ),
    _usual("attention", "auto", lambda model, plan: _in_stack(plan, lambda stack: plan.attention == stack.attention)),
)
"""all namings, in the order in which they are applied: a later one sees the changes of an earlier one"""
