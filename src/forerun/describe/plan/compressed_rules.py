"""Rules for attention with compressed keys and for differential attention: tp can split them, cp cannot."""

from __future__ import annotations

from forerun.describe.cluster.types import Cluster
from forerun.describe.kernels.attention import attention_kernel
from forerun.describe.model.compressed import CompressedSpec
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.columns import Column, Plans, having
from forerun.describe.plan.plan import Plan
from forerun.describe.stacks.catalog import load_stack


def unsplit_entries(model: ModelSpec, plan: Plans, cluster: Cluster) -> Column:
    """Returns a mask of the plans that compressed attention refuses: tp does not divide the groups of an output, cp or
    documents cut the tokens of an entry, or no fused kernel reads only the keys that a query chose.
    """
    broken: Column = False
    for spec in _compressed(model):
        packed = having(plan.document_lengths, lambda lengths: bool(lengths))
        broken |= (spec.out_groups % plan.tp != 0) | (plan.cp > 1) | packed | _unfused(plan)
    return broken


def unsplit_entries_why(model: ModelSpec, plan: Plan, cluster: Cluster) -> str:
    """Explains the refusal of one plan."""
    if plan.cp > 1:
        return f"cp {plan.cp} would cut the sequence whose tokens the compressed keys of {model.name} stand for"
    if plan.document_lengths:
        return f"document_lengths: the compressed keys of {model.name} would stand for tokens of several documents"
    for spec in _compressed(model):
        if spec.out_groups % plan.tp:
            return f"{spec.out_groups} groups of the attention's output are not divisible by tp {plan.tp}"
    return f"attention {_name(plan.stack, plan.attention)} computes all scores; compressed keys need a fused kernel"


def _unfused(plan: Plans) -> Column:
    def of_stack(stack: str) -> Column:
        return having(plan.attention, lambda attention: attention_kernel(_name(stack, attention)).form != "fused")

    return having(plan.stack, of_stack)


def _name(stack: str, attention: str) -> str:
    return load_stack(stack).attention if attention == "auto" else attention


def _compressed(model: ModelSpec) -> list[CompressedSpec]:
    return [kind.compressed for kind in model.kinds if kind.compressed is not None]


def unsplit_pairs(model: ModelSpec, plan: Plans, cluster: Cluster) -> Column:
    """Says in which plans tp parts pairs of heads that are subtracted from each other, or cp cuts their sequence, or no
    fused kernel runs."""
    if not model.differential:
        return False
    return (model.n_kv_heads % (2 * plan.tp) != 0) | (plan.cp > 1) | _unfused(plan)


def unsplit_pairs_why(model: ModelSpec, plan: Plan, cluster: Cluster) -> str:
    """Explains the refusal of one plan."""
    if plan.cp > 1:
        return f"cp {plan.cp} does not run differential attention"
    if model.n_kv_heads % (2 * plan.tp):
        return f"{model.n_kv_heads} key-value heads in pairs are not divisible by tp {plan.tp}"
    return f"attention {_name(plan.stack, plan.attention)} does not run differential attention; choose a fused kernel"
