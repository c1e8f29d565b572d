"""The Pareto front: what no other plan matches or beats in everything that is wished for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forerun.answers.analysis.prediction import Prediction
from forerun.answers.search.executor import AnswersPlans
from forerun.describe.plan.plan import Plan

_BATCH = 256
"""plans simulated between two looks at the front; fixed, so that the same plans are simulated whatever the machine"""
MOST_SIMULATED = 5000
"""plans that are simulated for a front unless somebody asks for more"""


@dataclass(frozen=True, slots=True)
class Front:
    """Plans that fit of which no other matches or beats both step time and peak reserved memory."""

    places: tuple[Prediction, ...]
    """the fastest first, which needs most memory"""
    exact_below_s: float
    """faster plans than this are all that there are: infinite where the whole front is exact. Slower than this, a plan
    that was not simulated may need less memory"""
    simulated: int
    """how many plans were simulated for it beside those of the search"""

    @property
    def is_exact(self) -> bool:
        """Whether the whole front is known."""
        return self.exact_below_s == float("inf")

    @property
    def certainty(self) -> str:
        """How far the front is exact, in words."""
        after = f"after {self.simulated:,} more plans were simulated"
        if self.is_exact:
            return f"exact, {after}"
        return f"exact below {self.exact_below_s:.4g} s, {after}; a slower plan may need less memory"


def pareto(rows: Sequence[Sequence[float]]) -> list[int]:
    """Numbers of the rows that no other row matches or beats in all columns, the least being best, by the first column.

    Of equal rows the first one is kept.
    """
    if not rows:
        return []
    values = np.array(rows, np.float64)
    kept: list[int] = []
    front = np.empty_like(values)
    for number in np.lexsort(values.T[::-1]):  # what beats a row comes before it
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
    """The front of step time and peak reserved memory.

    Of the plans that a search left out, those are simulated whose bounds no plan on the front matches or beats, in the
    order of the bound of their time, at most `most` of them. All that are faster than the first one left over are then
    known.

    Args:
        simulated: what fits, of the search.
        least_s: bounds of the step time of the plans that were not simulated, (n,).
        least_gib: bounds of their memory, (n,).
        plan_of: the plan of one of them, by its place in these.
        answers: what simulates.
        most: how many plans to simulate at most.
        closer: a closer bound of the time of one of them, by its place; asked for those that come up.
        progress: called with how many of these plans are decided, and n.
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
    """Which pairs of time and memory a plan that was found matches or beats in both."""
    if not found:
        return np.zeros(len(time_s), np.bool_)
    times = np.array([each.step_time_s for each in found])
    order = np.argsort(times, kind="stable")
    least = np.minimum.accumulate(np.array([each.peak_reserved_gib for each in found])[order])
    faster = np.searchsorted(times[order], time_s, side="right") - 1
    return (faster >= 0) & (least[np.maximum(0, faster)] <= gib)
