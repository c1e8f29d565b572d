"""Simulates the whole run under each of the fastest plans of a search: the fastest step may not finish the run
first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, cast

from forerun.answers.goodput.description import RunEntry
from forerun.answers.goodput.examples import described
from forerun.answers.goodput.read import run_of
from forerun.answers.goodput.request import RunRequest
from forerun.answers.goodput.study import RunStudy
from forerun.answers.search.search import search
from forerun.common.errors import ForerunError
from forerun.common.yaml_files import check
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class FoundPlan:
    """A plan that a search found."""

    place: int
    """among all plans, by the time of their step"""
    step_s: float
    plan: Plan

    @property
    def name(self) -> str:
        """Returns its place and its differences from the others, in words."""
        own = self.plan
        return (
            f"{self.place}. {own.describe()}, micro batch {own.micro_batch}, recomputes {own.activation_checkpointing}"
        )


class PlansOfRun:
    """The plans of the GPUs of a run. Fields that its file gives stay as they are, and a search varies the others."""

    def __init__(self, source: str, executor: str = "local", ray_address: str | None = None) -> None:
        """Raises ForerunError if the file has no plan with a global batch, or as `load_run` does."""
        self._data, self._place = described(source)
        self._entry = check(RunEntry, dict(self._data), self._place)
        self._executor, self._ray_address = executor, ray_address
        plan = self._entry.plan
        if plan is None or plan.global_batch is None or "seq_len" not in plan.fields:
            raise ForerunError(f"{self._place}: a search of plans needs plan, with global_batch and the field seq_len")
        self._plan, self._batch = plan, plan.global_batch

    @property
    def by_the_clock(self) -> bool:
        """Returns whether only the clock ends the run."""
        return self._entry.tokens is None

    @property
    def plan_slows(self) -> frozenset[str]:
        """Returns the slow periods whose effect the plan tells."""
        return frozenset(name for name, one in self._entry.slow.items() if one.factor is None)

    def check_one_step(self) -> None:
        """Raises ForerunError if the time of the searched step does not tell how fast the run goes."""
        given = {
            "schedule": bool(self._entry.schedule),
            "plan: compress_gradients": self._plan.compress_gradients is not None,
            "plan: outer_steps": self._plan.outer_steps is not None,
        }
        for key in (name for name, is_given in given.items() if is_given):
            raise ForerunError(
                f"{self._place}: {key}: the best of all plans is found for runs of one step, which the search predicts;"
                " leave it out, or rank the fastest plans with --plans"
            )

    def fastest(self, number: int) -> list[FoundPlan]:
        """Returns the `number` plans with the fastest steps, the fastest first. Raises as `search` does."""
        return self._search(number, 0.0)[:number]

    def within(self, step_s: float) -> list[FoundPlan]:
        """Returns all plans whose step takes at most `step_s`, the fastest first. Raises as `search` does."""
        return [each for each in self._search(1, step_s) if each.step_s <= step_s]

    def _search(self, keep: int, within_s: float) -> list[FoundPlan]:
        plan = self._plan
        ranked = search(
            load_model(plan.model),
            load_cluster(plan.cluster),
            self._entry.gpus,
            plan.fields["seq_len"],
            self._batch,
            fixed={name: value for name, value in plan.fields.items() if name != "seq_len"},
            keep=keep,
            within_s=within_s,
            executor=cast(Literal["local", "ray"], self._executor),
            ray_address=self._ray_address,
        ).ranked
        return [FoundPlan(i, each.step_time_s, each.own_plan()) for i, each in enumerate(ranked, 1)]

    def run(self, found: FoundPlan) -> RunRequest:
        """Returns the run of the file, without alternatives, under a plan. Raises as `run_of` does."""
        plan, name = found.plan, found.name
        own: dict[str, Any] = {key: value for key, value in self._data.items() if key != "alternatives"}
        given = {field.name: getattr(plan, field.name) for field in fields(plan) if field.init}
        own |= {"plan": {**own["plan"], "fields": given}, "name": name}
        return run_of(own, f"{self._place}: plan {name}")


def about_slower_plans(plans: Sequence[RunStudy], best: RunStudy, asked: int) -> str:
    """Returns a sentence that says whether a plan whose step is slower than those of `plans` may train sooner.

    No run goes faster than its steps without any disturbance. So no plan of fewer tokens a second in its steps than
    `best` makes in the median run can be better.

    Args:
        plans: runs under the `asked` fastest plans, the fastest first, or under all that fit where those are fewer.
    """
    if len(plans) < asked:
        return "These are all plans that fit."
    slowest = plans[-1].request.phases[0]
    least = best.tokens.p50 / best.wall_s.p50
    if slowest.tokens_per_step / slowest.step_s <= least:
        return (
            "No plan with a slower step finishes sooner: even without failures it trains fewer tokens than"
            " the best one."
        )
    return (
        f"A plan with a slower step, of up to {slowest.tokens_per_step / least:.4g} s, may finish sooner;"
        " a larger --plans simulates more of them."
    )
