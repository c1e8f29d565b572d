"""Finds questionable settings of a valid run; the output shows these warnings beside the figures."""

from __future__ import annotations

from forerun.describe.model.inputs import unused_encoder
from forerun.describe.model.layered import LayeredModel
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.plan import Plan

_MUCH_BUBBLE = 0.4
"""share of a step; a pipeline with as many micro batches as stages loses less than half"""


def doubts_of_input(model: ModelSpec | LayeredModel, plan: Plan) -> tuple[str, ...]:
    """Returns a line for each field of the plan that has no effect on the model, and for a part that is left out."""
    is_dense = isinstance(model, LayeredModel) or model.moe is None
    left_out = () if isinstance(model, LayeredModel) else unused_encoder(model)
    if is_dense and plan.expert_imbalance > 1:
        line = f"expert_imbalance {plan.expert_imbalance:g} changes nothing, as {model.name} has no experts"
        return (line, *left_out)
    return left_out


def doubts_of_step(plan: Plan | None, bubble_s: float, step_s: float) -> tuple[str, ...]:
    """Returns a line where a pipeline waits for most of the step."""
    if plan is None or plan.pp == 1 or bubble_s < _MUCH_BUBBLE * step_s:
        return ()
    least = plan.pp * 2
    line = f"{bubble_s / step_s:.0%} of the step is pipeline bubble: {_micro_batches(plan)} for {plan.n_stages} stages"
    return (f"{line}; try n_microbatches {least}" if plan.n_microbatches < least else line,)


def _micro_batches(plan: Plan) -> str:
    return "one micro batch" if plan.n_microbatches == 1 else f"{plan.n_microbatches} micro batches"
