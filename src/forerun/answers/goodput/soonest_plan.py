"""Finds the plan that finishes a run soonest, with a proof that no other plan does.

Runs with the same seed meet the same failures, whatever their plan. An ideal run (`undisturbed`) loses no finished
step, saves in no time and restarts as fast as any run. It trains whenever a run with the same or a slower step trains.
So a plan cannot be the best if its step is so slow that even its ideal run does not beat the best known run. A search
finds all plans with a faster step, and each of them is simulated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from forerun.answers.goodput.best_plans import FoundPlan, PlansOfRun
from forerun.answers.goodput.request import CheckpointLevel, RunRequest
from forerun.answers.goodput.study import RunStudy, time_to_train
from forerun.common.errors import ForerunError
from forerun.describe.plan.plan import Plan

_FIRST = 4
"""plans with the fastest steps that are simulated before it is known how slow a step may be"""
_WIDER = 1.1
_ACCURACY = 1e-3
"""relative, of the slowest step that is searched; it is rounded up"""

Study = Callable[[RunRequest], RunStudy]


@dataclass(frozen=True)
class SoonestPlans:
    """The plans that were simulated, the best first, and why no other one is better."""

    studies: tuple[RunStudy, ...]
    proof: str


def soonest_plans(plans: PlansOfRun, study: Study) -> SoonestPlans:
    """Returns the run of a file under the plan with which it trains soonest of all, and under those simulated for that.

    Args:
        plans: the plans of the run's GPUs, whose step is all that tells how fast it goes (`check_one_step`).
        study: simulates a run, always under the same seeds.

    Raises ForerunError if no plan can do the run, or as `search` does.
    """
    found = _Soonest(plans, study)
    for plan in plans.fastest(_FIRST):
        found.simulate(plan)
    slowest_s = found.slowest_step_s()
    for plan in plans.within(slowest_s):
        if not found.may_win(plan.step_s):
            slowest_s = plan.step_s
            break
        found.simulate(plan)
    return SoonestPlans(tuple(found.ranked), found.proof(slowest_s))


def undisturbed(request: RunRequest, step_s: float, plan_slows: frozenset[str] = frozenset()) -> RunRequest:
    """Returns a run that is never behind `request` under the same seed, nor behind any other plan of its GPUs and batch
    whose step takes `step_s` or longer.

    It saves every step at once and loads in no time, and it goes on after a failure as soon as any run can. Nodes that
    fail keep it from training only while no other ones are there; where replicas go on without them, not even then.

    Args:
        plan_slows: slow periods whose effect follows from the plan; they do not slow this run.
    """
    recovery, failures = request.recovery, request.failures
    if request.elastic is not None:
        recovery = replace(recovery, restart_s=0.0, communicators_s=0.0, warmup_s=0.0)
        failures = tuple(replace(kind, nodes=0) for kind in failures)
    return replace(
        request,
        phases=tuple(replace(phase, step_s=step_s) for phase in request.phases),
        levels=(CheckpointLevel("every step", 1, 0.0, 0.0, 0.0, "domain"),),
        save_every_s=step_s,
        searches_interval=False,
        recovery=recovery,
        failures=failures,
        slowdowns=tuple(replace(one, factor=1.0) if one.name in plan_slows else one for one in request.slowdowns),
        elastic=None,
    )


class _Soonest:
    """The plans simulated so far, and how slow the step of a better one may be."""

    def __init__(self, plans: PlansOfRun, study: Study) -> None:
        self._plans, self._study = plans, study
        self._seen: set[Plan] = set()
        self._refused: list[str] = []
        self._studies: list[RunStudy] = []

    @property
    def ranked(self) -> list[RunStudy]:
        """Returns the studies, the best first."""
        return sorted(self._studies, key=self._key)

    def _key(self, study: RunStudy) -> tuple[float, float, float]:
        return time_to_train(study, self._plans.by_the_clock)

    def simulate(self, plan: FoundPlan) -> None:
        """Simulates the run under a plan, once; takes note of a plan under which the file makes no sense."""
        if plan.plan in self._seen:
            return
        self._seen.add(plan.plan)
        try:
            request = self._plans.run(plan)
        except ForerunError as error:
            self._refused.append(str(error))
            return
        self._studies.append(self._study(request))

    def may_win(self, step_s: float) -> bool:
        """Returns whether a plan with this step may be better than all that are known."""
        best = self.ranked[0]
        if step_s < best.request.phases[0].step_s:
            return True
        ahead = self._study(undisturbed(best.request, step_s, self._plans.plan_slows))
        return self._key(ahead) < self._key(best)

    def slowest_step_s(self) -> float:
        """Returns a step so slow that no plan with a slower one can be better than the best one known."""
        if not self._studies:
            raise ForerunError(f"no plan can run what the file describes: {self._refused[0]}")
        low = self.ranked[0].request.phases[0].step_s
        high = low
        while self.may_win(high):
            low, high = high, _WIDER * high
        while high - low > _ACCURACY * high:
            middle = (low + high) / 2.0
            low, high = (middle, high) if self.may_win(middle) else (low, middle)
        return high

    def proof(self, slowest_s: float) -> str:
        """Returns why the best one is the best of all, in a sentence or two."""
        best = self.ranked[0].request.name
        said = (
            f"Of all plans that fit, {best} finishes the run soonest. Forerun simulated"
            f" {len(self._studies):,} plans. A plan with a step of {slowest_s:.4g} s or longer cannot be"
            " better, even with instant checkpoints and no lost step."
        )
        if self._refused:
            said += f" {len(self._refused):,} faster plans cannot run what the file describes: {self._refused[0]}."
        return said
