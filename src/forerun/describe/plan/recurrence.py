"""Rules for recurrences: tp splits them by heads, and cp cannot, because a state goes from token to token.

The same holds for short convolutions.
"""

from __future__ import annotations

from forerun.describe.cluster.types import Cluster
from forerun.describe.model.scan import ScanSpec
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.columns import Column, Plans
from forerun.describe.plan.plan import Plan


def unsplit_scan(model: ModelSpec, plan: Plans, cluster: Cluster) -> Column:
    """Says in which plans tp does not divide the heads of a recurrence, or cp cuts its sequence."""
    broken: Column = (plan.cp > 1) & _convolves(model)
    for spec in _scans(model):
        broken |= (spec.heads % plan.tp != 0) | (plan.cp > 1)
    return broken


def unsplit_scan_why(model: ModelSpec, plan: Plan, cluster: Cluster) -> str:
    """Explains the refusal of one plan."""
    if plan.cp > 1 and _convolves(model):
        return f"cp {plan.cp} would cut the sequence that the short convolutions of {model.name} run along"
    spec = next(spec for spec in _scans(model) if spec.heads % plan.tp or plan.cp > 1)
    if plan.cp > 1:
        return f"cp {plan.cp} would cut the sequence that the {spec.rule} layers of {model.name} run along"
    return f"{spec.heads} heads of the {spec.rule} layers are not divisible by tp {plan.tp}"


def _convolves(model: ModelSpec) -> bool:
    return any(kind.conv_taps or kind.qk_conv_taps for kind in model.kinds)


def _scans(model: ModelSpec) -> list[ScanSpec]:
    return [kind.scan for kind in model.kinds if kind.scan is not None]


def parted_block(model: ModelSpec, plan: Plans, cluster: Cluster) -> Column:
    """Says in which plans a pipeline parts layers that share a block, or tp does not divide its feed-forward."""
    broken: Column = False
    for block in {kind.shared_block for kind in model.kinds if kind.shared_block is not None}:
        broken |= (plan.pp > 1) | (block.ffn_hidden % plan.tp != 0)
    return broken


def parted_block_why(model: ModelSpec, plan: Plan, cluster: Cluster) -> str:
    """Explains the refusal of one plan."""
    if plan.pp > 1:
        return f"pp {plan.pp} would part the layers of {model.name} that share the weights of a block"
    width = next(kind.shared_block.ffn_hidden for kind in model.kinds if kind.shared_block is not None)
    return f"the shared block's width {width} is not divisible by tp {plan.tp}"
