"""Pareto fronts: exact where they say so."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from kept_search import CLUSTER, TINY, small_search

from forerun.answers.analysis.predict import predict
from forerun.answers.analysis.prediction import Prediction
from forerun.answers.search.front import Front, pareto, time_and_memory_front
from forerun.describe.plan.plan import Plan

N = 3000
ONE = predict(TINY, Plan(seq_len=512), CLUSTER)


def wishes(plan: Prediction) -> tuple[float, float]:
    return plan.step_time_s, plan.peak_reserved_gib


@pytest.mark.parametrize("columns", [1, 2, 3, 4])
def test_what_is_kept_is_beaten_by_nothing_and_beats_all_others(columns):
    random = np.random.default_rng(columns)
    rows = random.integers(0, 6, (60, columns)).tolist()
    kept = pareto(rows)
    assert [rows[i] for i in kept] == sorted(rows[i] for i in kept)
    for i, row in enumerate(rows):
        better = any(other != row and all(map(float.__le__, map(float, other), map(float, row))) for other in rows)
        assert (i in kept) == (not better and rows.index(row) == i)


def test_nothing_has_an_empty_front():
    assert pareto([]) == []


class MadeUp:
    """Plans with random times and needs, and bounds below them; the number of a plan is its seq_len less 1."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        share = random.random(N)
        self.time_s = 1 + 4 * share + 3 * random.random(N)
        self.gib = 5 + 60 * (1 - share) + 30 * random.random(N)
        self.least_s = self.time_s * random.uniform(0.9, 1, N)
        self.least_gib = self.gib * random.uniform(0.8, 1, N)
        self.fits = random.random(N) < 0.9
        self.first = np.argsort(self.least_s)[:20]
        """what the search has simulated"""
        self.left = np.setdiff1d(np.arange(N), self.first)
        self.asked: list[int] = []
        self.looked = 0

    def prediction(self, number: int) -> Prediction:
        time_s, gib = float(self.time_s[number]), float(self.gib[number])
        return replace(ONE, step_time_s=time_s, peak_reserved_gib=gib, fits=bool(self.fits[number]))

    def run(self, tasks: Sequence[Plan], /) -> Iterator[Prediction]:
        for plan in tasks:
            self.asked.append(plan.seq_len - 1)
            yield self.prediction(plan.seq_len - 1)

    def front(self, most: int, close: bool = False) -> Front:
        simulated = [self.prediction(number) for number in self.first if self.fits[number]]
        bounds = (self.least_s[self.left], self.least_gib[self.left])
        if close:
            bounds = (0.5 * bounds[0], bounds[1])
        plans = (lambda i: Plan(seq_len=1 + int(self.left[i]))), self
        return time_and_memory_front(simulated, *bounds, *plans, most, self.closer if close else None)

    def closer(self, place: int) -> float:
        self.looked += 1
        return float(self.least_s[self.left[place]])

    def truth(self) -> list[tuple[float, float]]:
        rows = [(float(self.time_s[i]), float(self.gib[i])) for i in range(N) if self.fits[i]]
        return [rows[i] for i in pareto(rows)]


@pytest.mark.parametrize("seed", range(5))
def test_the_front_is_that_of_all_plans_and_few_of_them_are_simulated(seed):
    plans = MadeUp(seed)
    front = plans.front(most=N)
    assert [wishes(each) for each in front.places] == plans.truth()
    assert front.is_exact
    assert front.simulated == len(plans.asked) == len(set(plans.asked)) < N / 2
    assert front.certainty == f"exact, after {front.simulated:,} more plans were simulated"


def test_closer_bounds_are_looked_for_where_plans_come_up():
    plain, plans = MadeUp(3), MadeUp(3)
    front = plans.front(N, close=True)
    assert front == plain.front(N)
    assert front.simulated < plans.looked < len(plans.left)


@pytest.mark.parametrize("most", [0, 1, 300])
def test_a_front_that_was_cut_short_says_how_far_it_is_exact(most):
    plans = MadeUp(7)
    front = plans.front(most)
    assert front.simulated == len(plans.asked) == most
    assert not front.is_exact
    known = [wishes(each) for each in front.places if each.step_time_s < front.exact_below_s]
    assert known == [each for each in plans.truth() if each[0] < front.exact_below_s]
    assert f"exact below {front.exact_below_s:.4g} s" in front.certainty
    assert front.exact_below_s > plans.front(most // 2).exact_below_s or not most


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[float, float]]]:
    """A store of every plan's answer, and the front of them all."""
    store = tmp_path_factory.mktemp("front") / "plans.sqlite"
    rows = [wishes(each) for each in small_search(store, exhaustive=True).ranked]
    return store, [rows[i] for i in pareto(rows)]


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["time", "memory"])
def test_a_search_finds_the_front_of_everything_simulated(simulated, objective):
    store, places = simulated
    found = small_search(store, pareto=10_000, objective=objective, keep=1)
    none = small_search(None, objective=objective, keep=1)
    assert found.front is not None
    assert found.front.is_exact
    assert [wishes(each) for each in found.front.places] == places
    assert none.front is None
    assert (found.ranked, found.counts) == (none.ranked, none.counts)


@pytest.mark.slow
def test_processes_find_the_same_front(simulated):
    kept = small_search(simulated[0], pareto=10_000, keep=1)
    assert small_search(None, pareto=10_000, keep=1, workers=2).front == kept.front
