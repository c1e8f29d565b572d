"""Assumes recomputation for rows that don't state it and don't fit in memory without it."""

from __future__ import annotations

from dataclasses import replace

from forerun.answers.analysis.memory_need import memory_need
from forerun.common.errors import ImpossiblePlan
from forerun.describe.cluster.types import Cluster
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.constraints import check_plan
from forerun.describe.plan.plan import Plan
from forerun.describe.stacks.catalog import load_stack
from forerun.evidence.validation.plan_mapping import NOT_STATED
from forerun.evidence.validation.rows import Measurement
from forerun.sources.symbolic.build import build


def with_assumed_checkpointing(
    row: Measurement, model: ModelSpec, plan: Plan, cluster: Cluster, notes: list[str]
) -> Plan:
    """Returns `plan` with the least recomputation that fits in memory, where the row states none.

    A plan that fits without any stays as it is. Appends the assumption to `notes`.
    """
    if row.activation_checkpointing or row.ac_detail or _fits(model, plan, cluster):
        return plan
    selective = replace(plan, activation_checkpointing="selective")
    offered = [replace(selective, selective_policy=policy) for policy in load_stack(plan.stack).recomputes]
    for other in (*offered, replace(plan, activation_checkpointing="full")):
        if _fits(model, other, cluster):
            kind = other.activation_checkpointing
            if NOT_STATED in notes:
                notes.remove(NOT_STATED)
            named = f"{kind} ({other.selective_policy})" if kind == "selective" else kind
            notes.append(f"activation_checkpointing not stated: taken as {named}, the least that fits")
            return other
    return plan


def _fits(model: ModelSpec, plan: Plan, cluster: Cluster) -> bool:
    try:
        check_plan(model, plan, cluster)
    except ImpossiblePlan:
        return True  # The prediction then says why the plan can't run.
    return memory_need(build(model, plan, cluster), cluster, load_stack(plan.stack)).held.fits
