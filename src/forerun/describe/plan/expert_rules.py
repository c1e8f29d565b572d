"""Rules for splitting experts over ranks and for overlapping their exchanges: which plans cannot run, and why."""

from __future__ import annotations

import numpy as np

from forerun.describe.cluster.types import Cluster
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.columns import Column, Plans, having, ranks_between, where
from forerun.describe.plan.plan import Plan
from forerun.describe.plan.routing import Routing


def uneven_experts(model: ModelSpec, plan: Plans, cluster: Cluster) -> Column:
    """Says in which plans experts are not divisible by their ranks, or no equal groups hold them."""
    cut = plan.ep * plan.etp > 1
    if cut is False:  # also where no plan of a table has ep or etp above 1
        return False
    n_experts, width = (model.moe.n_experts, model.moe.expert_ffn) if model.moe else (1, 1)
    uneven = (n_experts % plan.ep != 0) | (width % plan.etp != 0)
    ranks = plan.fsdp * plan.tp
    return cut & (uneven | (ranks % (plan.ep * plan.etp) != 0) | _uncut(plan))


def _uncut(plan: Plans) -> Column:
    """Says in which plans tp, cp and dp_shard, with axes between them, can't be cut into equal groups of experts."""

    def uncut(order: str) -> Column:
        inner, middle, outer = sorted(("tp", "cp", "dp_shard"), key=order.split("-").index)
        first, second = (
            ranks_between(plan, order, one, other) > 1 for one, other in ((inner, middle), (middle, outer))
        )
        a, b, c = (getattr(plan, axis) for axis in (inner, middle, outer))
        runs = (
            a * where(first, 1, b * where(second, 1, c)),
            where(first, b * where(second, 1, c), 1),
            where(second, c, 1),
        )
        broken: Column = False
        for degree in (plan.etp, plan.ep):
            left, rest = degree, []
            for size in runs:
                part = np.minimum(left, size)
                broken |= (size % part != 0) | (left % part != 0)
                left = left // part
                rest.append(size // part)
            broken |= left > 1
            runs = (rest[0], rest[1], rest[2])
        return broken

    return having(plan.mesh_order, uncut)


def uneven_experts_why(model: ModelSpec, plan: Plan, cluster: Cluster) -> str:
    """Explains the refusal of one plan."""
    if model.moe is None:
        name = "ep" if plan.ep > 1 else "etp"
        return f"{name} {getattr(plan, name)} needs a mixture of experts, {model.name} is dense"
    if model.moe.n_experts % plan.ep:
        return f"{model.moe.n_experts} experts are not divisible by ep {plan.ep}"
    if model.moe.expert_ffn % plan.etp:
        return f"the experts' width {model.moe.expert_ffn} is not divisible by etp {plan.etp}"
    mesh = f"tp {plan.tp} x cp {plan.cp} x dp_shard {plan.dp_shard}"
    taken = f"ep {plan.ep}" if plan.etp == 1 else f"etp {plan.etp} x ep {plan.ep}"
    if plan.fsdp * plan.tp % (plan.ep * plan.etp):
        return f"{taken} does not divide {mesh}"
    return f"{taken} can't be cut out of {mesh} in mesh_order {plan.mesh_order}"


def unlisted_loads(model: ModelSpec, plan: Plans, cluster: Cluster) -> Column:
    """Says in which plans the measured loads are not one for each expert."""
    n_experts = 0 if model.moe is None else model.moe.n_experts

    def unlisted(text: str) -> bool:
        routing = Routing.parse(text)
        return routing is not None and len(routing.loads) not in (0, n_experts)

    return having(plan.expert_routing, unlisted)


def unlisted_loads_why(model: ModelSpec, plan: Plan, cluster: Cluster) -> str:
    """Explains the refusal of one plan."""
    given = plan.expert_routing.count(":")
    return f"expert_routing has {given} loads, but {model.name} has {model.moe.n_experts if model.moe else 0} experts"


def unpaired_shared_experts(model: ModelSpec, plan: Plans, cluster: Cluster) -> Column:
    """Says in which plans shared experts have no exchange to run beside."""
    lacking = model.moe is None or not model.moe.shared_ffn
    return plan.shared_expert_overlap & (lacking | (plan.ep == 1) | plan.expert_overlap)


def unpaired_shared_experts_why(model: ModelSpec, plan: Plan, cluster: Cluster) -> str:
    """Explains the refusal of one plan."""
    if plan.expert_overlap:
        return "shared_expert_overlap: with expert_overlap other passes run beside the exchanges; leave one of them out"
    if plan.ep == 1:
        return "shared_expert_overlap needs ep above 1: without it there is no exchange of tokens"
    return f"shared_expert_overlap needs shared experts, which {model.name} does not have"


_OVERLAPPED = ("1F1B", "Interleaved1F1B", "DualPipeV", "DualPipe")
"""schedules with a forward pass beside each backward pass of their steady state"""


def unpaired_overlap(model: ModelSpec, plan: Plans, cluster: Cluster) -> Column:
    """Says in which plans expert_overlap finds no passes to pair."""
    schedule = (plan.pp > 1) & having(plan.pp_schedule, lambda name: name not in _OVERLAPPED)
    alone = (plan.ep == 1) | (plan.n_microbatches == 1)
    own = any(kind.shortcut for kind in model.kinds)
    return plan.expert_overlap & (own | alone | schedule | plan.uses_fsdp | (plan.activation_offload != 0))


def unpaired_overlap_why(model: ModelSpec, plan: Plan, cluster: Cluster) -> str:
    """Explains the refusal of one plan."""
    if any(kind.shortcut for kind in model.kinds):
        return f"expert_overlap: layers of {model.name} run beside their own exchanges already; leave it out"
    if plan.ep == 1 or plan.n_microbatches == 1:
        return f"expert_overlap needs ep and n_microbatches above 1, got {plan.ep} and {plan.n_microbatches}"
    if plan.uses_fsdp or plan.activation_offload:
        return f"expert_overlap needs zero_stage below 3 and no activation_offload, got {plan.zero_stage} and" + (
            f" {plan.activation_offload:g}"
        )
    return f"expert_overlap needs one of {', '.join(_OVERLAPPED)}, not {plan.pp_schedule}"


def parted_attention_experts(model: ModelSpec, plan: Plans, cluster: Cluster) -> Column:
    """Says in which plans tp would part experts that are an attention's projections."""
    return (model.attention_experts > 0) & (plan.tp > 1)


def parted_attention_experts_why(model: ModelSpec, plan: Plan, cluster: Cluster) -> str:
    """Explains the refusal of one plan."""
    return f"tp {plan.tp} does not split the {model.attention_experts} experts of the attention of {model.name}"
