"""sweep: searches for each number of GPUs and each global batch, and compares the results.

Every point is a separate search, exact under the model like any search. The searches may share a store, so that an
interrupted sweep continues where it stopped. A point keeps its best plan, or with `pareto` its front of step time and
memory, but not the space that was searched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from forerun.answers.analysis.prediction import Prediction
from forerun.answers.search import front
from forerun.answers.search.result import Objective, SearchResult
from forerun.answers.search.search import search
from forerun.common.errors import ForerunError, ImpossiblePlan
from forerun.common.shown import Shown
from forerun.describe.cluster.types import Cluster
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """The result of the search with one number of GPUs and one global batch."""

    n_gpus: int
    global_batch: int
    best: Prediction | None
    """the best plan; None if no plan fits or can run"""
    front: tuple[Prediction, ...]
    """plans that no other plan of the point beats in both step time and memory, fastest first; without `pareto` only
    the best plan"""
    reason: str
    """the reason why there is no best plan; empty if there is one"""
    uncertain: str
    """the exact part of the front, in words; empty if all of it is exact"""
    counts: Mapping[str, int]
    """`SearchResult.counts`; empty if no plan is possible"""

    @property
    def tokens_per_s(self) -> float | None:
        """Returns the tokens/s of all GPUs together with the best plan."""
        return None if self.best is None else tokens_per_s(self.best)


@dataclass(frozen=True)
class Sweep(Shown):
    """The results of searches with several numbers of GPUs and global batches, by number of GPUs, then batch."""

    model: str
    cluster: str
    seq_len: int
    objective: Objective
    with_memory: bool
    """whether the points have fronts of step time and memory"""
    points: tuple[SweepPoint, ...]

    @property
    def best(self) -> SweepPoint | None:
        """Returns the best point by the objective, with the fewest GPUs among equal ones; None if no plan fits at any
        point."""
        found = [point for point in self.points if point.best is not None]
        return min(found, key=lambda point: _value(self.objective, point), default=None)

    def efficiency(self, point: SweepPoint) -> float | None:
        """Returns the tokens/s per GPU, divided by that of the point with the fewest GPUs and the same global batch;
        None if no plan fits."""
        base = next((p.best for p in self.points if p.global_batch == point.global_batch and p.best is not None), None)
        if base is None or point.best is None:
            return None
        return (point.best.tokens_per_s_per_gpu or 0.0) / (base.tokens_per_s_per_gpu or 1.0)

    @property
    def front(self) -> tuple[tuple[SweepPoint, Prediction], ...]:
        """Returns the plans that no other plan beats or matches in everything: tokens/s, dollars per token if known,
        GPUs, and memory if the points have fronts. Most tokens/s first.

        The front is as exact as the plans of the points. With objective memory the points' best plans are not the
        fastest, so without the points' fronts it is empty.
        """
        if self.objective == "memory" and not self.with_memory:
            return ()
        plans = [(point, plan) for point in self.points for plan in point.front]
        return tuple(plans[i] for i in front.pareto([self._wishes(plan) for _, plan in plans]))

    @property
    def wishes(self) -> str:
        """Returns the figures that the front compares, in words."""
        best = [point.best for point in self.points if point.best is not None]
        priced = any(plan.dollars_per_billion_tokens is not None for plan in best)
        several = ["more tokens/s", *(["cheaper tokens"] if priced else []), "fewer GPUs"]
        several += ["less memory"] if self.with_memory else []
        return f"{', '.join(several[:-1])} and {several[-1]}"

    def _wishes(self, plan: Prediction) -> tuple[float, ...]:
        """Returns the figures of a plan that the front compares, lower being better."""
        memory = (plan.peak_reserved_gib,) if self.with_memory else ()
        return -tokens_per_s(plan), plan.dollars_per_billion_tokens or 0.0, plan.n_gpus, *memory

    def to_rows(self) -> list[dict[str, Any]]:
        """Returns a flat dict for each point: the question, why no plan fits, figures and plan of the best or None."""
        return [self._row(point) for point in self.points]

    def _row(self, point: SweepPoint) -> dict[str, Any]:
        best = point.best
        row: dict[str, Any] = {"n_gpus": point.n_gpus, "global_batch": point.global_batch, "best": point is self.best}
        row |= {"reason": point.reason, "tokens_per_s": point.tokens_per_s, "efficiency": self.efficiency(point)}
        row |= {name: None if best is None else getattr(best, name) for name in _FIGURES}
        row |= {"simulated": point.counts.get("ok"), "considered": point.counts.get("considered")}
        return row | {
            field.name: None if best is None else getattr(best.own_plan(), field.name) for field in fields(Plan)
        }


_FIGURES = (
    *("step_time_s", "tokens_per_s_per_gpu", "mfu", "peak_allocated_gib", "peak_reserved_gib"),
    *("exposed_comm_s", "bubble_s", "dollars_per_billion_tokens"),
)


def sweep(
    model: ModelSpec,
    cluster: Cluster,
    gpus: Sequence[int],
    seq_len: int,
    global_batches: Sequence[int],
    *,
    objective: Objective = "time",
    pareto: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> Sweep:
    """Finds the best plan for each number of GPUs and each global batch.

    Args:
        objective: the best point has the least step time (only to compare points with the same batch), dollars per
            token or memory, or the most tokens/s of all GPUs together.
        pareto: also find the front of step time and memory of each point, simulating at most this many plans for it.
        progress: called with the number of points that are done and the number of all.
        options: options of `forerun.answers.search.search.search`; `keep` is 1.

    Raises ForerunError without a number of GPUs or a batch, or if a search raises it. A point without a possible or
    fitting plan raises nothing; its `reason` says why.
    """
    questions = [(n_gpus, batch) for n_gpus in sorted(set(gpus)) for batch in sorted(set(global_batches))]
    if not questions:
        raise ForerunError("sweep: expected at least one number of GPUs and one global batch")
    points = []
    for done, (n_gpus, batch) in enumerate(questions):
        if progress:
            progress(done, len(questions))
        wishes: dict[str, Any] = {"objective": objective, "keep": 1, "pareto": pareto, **options}
        try:
            found = search(model, cluster, n_gpus, seq_len, batch, **wishes)
        except ImpossiblePlan as error:
            points.append(SweepPoint(n_gpus, batch, None, (), str(error), "", {}))
        else:
            points.append(_point(found))
    if progress:
        progress(len(questions), len(questions))
    return Sweep(model.name, cluster.name, seq_len, objective, pareto is not None, tuple(points))


def tokens_per_s(plan: Prediction) -> float:
    """Returns the tokens/s of all GPUs together."""
    return (plan.tokens_per_s_per_gpu or 0.0) * plan.n_gpus


def _point(found: SearchResult) -> SweepPoint:
    reason = "" if found.best is not None else f"nothing fits: the nearest miss {found.too_large[0].reason}"
    plans: tuple[Prediction, ...] = () if found.best is None else (found.best,)
    uncertain = ""
    if found.front is not None:
        plans = found.front.places
        uncertain = "" if found.front.is_exact else found.front.certainty
    return SweepPoint(found.n_gpus, found.global_batch, found.best, plans, reason, uncertain, found.counts)


def _value(objective: Objective, point: SweepPoint) -> float:
    """Returns the figure of a point that is lowest at the best point."""
    plan = point.best
    assert plan is not None
    if objective == "time":
        return plan.step_time_s
    if objective == "memory":
        return plan.peak_reserved_gib
    if objective == "cost":
        return plan.dollars_per_billion_tokens or 0.0
    return -tokens_per_s(plan)
