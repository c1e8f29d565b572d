"""The Pareto front: the plans that no other plan matches or beats in every figure that is compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forerun.answers.analysis.prediction import Prediction
from forerun.answers.search.executor import AnswersPlans
from forerun.describe.plan.plan import Plan

_BATCH = 256
"""plans simulated between two updates of the front; fixed, so that every machine simulates the same plans"""
MOST_SIMULATED = 5000
"""default limit on the plans that are simulated for a front"""


@dataclass(frozen=True, slots=True)
class Front:
    """The plans that fit and that no other plan matches or beats in both step time and peak reserved memory."""

    places: tuple[Prediction, ...]
    """the fastest first, which needs the most memory"""
    exact_below_s: float
    """step time up to which the front is complete; infinite if the whole front is exact. Among slower plans, one
    that was not simulated may need less memory"""
    simulated: int
    """number of plans that were simulated for the front beside those of the search"""

    @property
    def is_exact(self) -> bool:
        """Returns whether the whole front is exact."""
        return self.exact_below_s == float("inf")

    @property
    def certainty(self) -> str:
        """Returns the part of the front that is exact, in words."""
        after = f"after {self.simulated:,} more plans were simulated"
        if self.is_exact:
            return f"exact, {after}"
        return f"exact below {self.exact_below_s:.4g} s, {after}; a slower plan may need less memory"


def pareto(rows: Sequence[Sequence[float]]) -> list[int]:
    """Returns the numbers of the rows that no other row matches or beats in all columns, by the first column.

    Lower values are better.

    The first of equal rows is kept.
    """
    if not rows:
        return []
    values = np.array(rows, np.float64)
    kept: list[int] = []
    front = np.empty_like(values)
    for number in np.lexsort(values.T[::-1]):  # in this order, a row comes after all rows that beat it
        if not (front[: len(kept)] <= values[number]).all(axis=1).any():
            front[len(kept)] = values[number]
            kept.append(int(number))
    return kept


def time_and_memory_front(
    simulated: Sequence[Prediction],
    least_s: NDArray[np.float64],
    least_gib: NDArray[np.float64],
    plan_of: Callable[[int], Plan],
    answers: AnswersPlans,
    most: int = MOST_SIMULATED,
    closer: Callable[[int], float] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Front:
    """Finds the front of step time and peak reserved memory.

    Simulates, of the plans that a search skipped, those whose bounds no plan on the front matches or beats, in order
    of their bounds of time, at most `most` of them. The front is then exact up to the time bound of the first plan
    that is left.

    Args:
        simulated: the plans that the search simulated and that fit.
        least_s: lower bounds, in seconds, of the step time of the n plans that were skipped, (n,).
        least_gib: lower bounds of their memory, (n,).
        plan_of: returns the plan at an index of these bounds.
        answers: simulates plans.
        most: the largest number of plans to simulate.
        closer: returns a closer bound of the time of the plan at an index; called before that plan is simulated.
        progress: called with the number of decided plans, and n.
    """
    found, least_s, asked = list(simulated), least_s.copy(), 0
    rest, is_close = np.arange(len(least_s)), np.full(len(least_s), closer is None)
    while True:
        rest = rest[~_dominated(found, least_s[rest], least_gib[rest])]
        rest = rest[np.argsort(least_s[rest], kind="stable")]
        if progress:
            progress(len(least_s) - len(rest), len(least_s))
        batch = rest[: min(_BATCH, most - asked)]
        if not len(batch):
            break
        loose = batch[~is_close[batch]]
        if closer is not None and len(loose):
            least_s[loose] = [max(float(least_s[place]), closer(int(place))) for place in loose]
            is_close[loose] = True
            continue
        rest = rest[len(batch) :]
        asked += len(batch)
        for answer in answers.run([plan_of(int(place)) for place in batch]):
            if isinstance(answer, Prediction) and answer.fits:
                found.append(answer)
    places = pareto([(each.step_time_s, each.peak_reserved_gib) for each in found])
    until = float(least_s[rest[0]]) if len(rest) else float("inf")
    return Front(tuple(found[place] for place in places), until, asked)


def _dominated(found: Sequence[Prediction], time_s: NDArray[np.float64], gib: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Returns a mask of the pairs of `time_s` and `gib`, (n,), that some plan of `found` matches or beats in both."""
    if not found:
        return np.zeros(len(time_s), np.bool_)
    times = np.array([each.step_time_s for each in found])
    order = np.argsort(times, kind="stable")
    least = np.minimum.accumulate(np.array([each.peak_reserved_gib for each in found])[order])
    faster = np.searchsorted(times[order], time_s, side="right") - 1
    return (faster >= 0) & (least[np.maximum(0, faster)] <= gib)
