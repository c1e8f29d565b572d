"""A lower bound of the step time: what a rank's own layers take when nothing keeps them waiting.

A plan's stages are made of units that were run by themselves; a rank runs all its micro batches through its stages one
after the other. Data parallelism, pipeline transfers, the optimizer and the host only add to that.
"""

from __future__ import annotations

from itertools import accumulate

from forerun.plan.plan import Plan
from forerun.search.units import EMBEDDING, HEAD, UnitRun
from forerun.symbolic.schedule import SPLIT, layers_of_stages, stage_rank


def least_step_s(plan: Plan, units: UnitRun) -> float:
    """Seconds that a step of `plan` takes at least.

    A rank runs all its micro batches. Without weight passes apart, the last rank moreover waits until one micro batch
    has come through the stages before it, and its gradients have to go back through them.
    """
    stages = _stages(plan, units)
    ranks = [0.0] * plan.pp
    for stage, time_s in enumerate(stages):
        ranks[stage_rank(plan, stage)] += time_s
    busiest = plan.n_microbatches * max(ranks)
    if plan.pp > 1 and plan.pp_schedule in SPLIT:
        return busiest
    return max(busiest, plan.n_microbatches * ranks[-1] + sum(stages[: plan.pp - 1]))


def _stages(plan: Plan, units: UnitRun) -> list[float]:
    """Seconds of one micro batch in each stage."""
    until = units.until_layer_s
    ends = list(accumulate(layers_of_stages(len(until) - 1, plan)))
    stages = [until[end] - until[start] for start, end in zip([0, *ends], ends, strict=False)]
    stages[0] += units.end_s(EMBEDDING)
    stages[-1] += units.end_s(HEAD)
    return stages
