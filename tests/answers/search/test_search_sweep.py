"""Sweeps: a search for each number of GPUs and each batch, and the best of them."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
from kept_search import CLUSTER, TINY

import forerun
from forerun.answers.search.search import search
from forerun.answers.search.store import Remembering
from forerun.answers.search.sweep import Sweep, sweep, tokens_per_s
from forerun.common.errors import ForerunError

FIXED = {"cp": 1, "pp": [1, 2], "tp": 1, "zero_stage": 3, "micro_batch": [1, 4]}
OPTIONS: dict[str, Any] = {"fixed": FIXED, "memory_limit_gib": 1.3, "workers": 1}
GPUS, BATCHES = (4, 8, 16), (16, 64)
Swept = Callable[..., Sweep]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Swept:
    """Sweeps of one question, which share what they simulate."""
    store = tmp_path_factory.mktemp("sweeps") / "plans.sqlite"

    @lru_cache(maxsize=8)
    def run(objective: str = "tokens", pareto: int | None = None) -> Sweep:
        options = {**OPTIONS, "objective": objective, "store": store}
        return sweep(TINY, CLUSTER, GPUS, 512, BATCHES, pareto=pareto, **options)

    return run


def test_every_point_is_a_search(swept):
    found = swept()
    assert [(point.n_gpus, point.global_batch) for point in found.points] == [(n, b) for n in GPUS for b in BATCHES]
    for point in found.points:
        alone = search(TINY, CLUSTER, point.n_gpus, 512, point.global_batch, keep=1, **OPTIONS)
        assert point.best == alone.best
        assert point.counts == alone.counts


@pytest.mark.parametrize(
    ("objective", "key"),
    [
        ("time", lambda plan: plan.step_time_s),
        ("tokens", lambda plan: -tokens_per_s(plan)),
        ("cost", lambda plan: plan.dollars_per_billion_tokens),
        ("memory", lambda plan: plan.peak_reserved_gib),
    ],
)
def test_the_best_point_has_the_least_of_its_objective(swept, objective, key):
    found = swept(objective)
    assert found.best is not None
    assert key(found.best.best) == min(key(point.best) for point in found.points if point.best is not None)


def test_objectives_choose_different_points(swept):
    best = {objective: swept(objective).best for objective in ("time", "tokens", "cost", "memory")}
    assert len({(point.n_gpus, point.global_batch) for point in best.values() if point is not None}) > 2


def test_only_the_least_memory_says_nothing_of_a_front(swept):
    """The plans that need least memory are not the fastest of their points."""
    assert swept("memory").front == ()
    for objective in ("time", "tokens", "cost"):
        fastest = max(tokens_per_s(point.best) for point in swept(objective).points)
        assert tokens_per_s(swept(objective).front[0][1]) == fastest


def test_efficiency_is_that_of_a_gpu_over_the_fewest_gpus_with_the_same_batch(swept):
    found = swept()
    for point in found.points:
        first = next(p for p in found.points if p.global_batch == point.global_batch)
        assert first.best is not None
        assert point.best is not None
        expected = point.best.tokens_per_s_per_gpu / first.best.tokens_per_s_per_gpu
        assert found.efficiency(point) == pytest.approx(expected)
    assert {found.efficiency(point) for point in found.points if point.n_gpus == GPUS[0]} == {1.0}


def test_no_plan_on_the_front_is_beaten_and_every_other_point_is(swept):
    found = swept(pareto=10_000)
    front = [found._wishes(plan) for _, plan in found.front]
    assert len(front[0]) == 4
    for point in found.points:
        for plan in point.front:
            mine = found._wishes(plan)
            better = [
                other for other in front if other != mine and all(a <= b for a, b in zip(other, mine, strict=True))
            ]
            assert (mine in front) != bool(better)
    assert found.wishes == "more tokens/s, cheaper tokens, fewer GPUs and less memory"
    assert {id(point) for point, _ in swept().front} <= {id(point) for point in swept().points}
    assert swept("memory").front == ()


def test_points_without_a_plan_say_why():
    found = sweep(TINY, CLUSTER, [3, 8], 512, [16], fixed={"tp": 2}, workers=1)
    assert found.points[0].reason.startswith("no plan: the fixed degrees do not divide 3 GPUs; ")
    assert found.best is found.points[1]
    assert found.efficiency(found.points[0]) is None
    small = sweep(TINY, CLUSTER, [1, 2], 512, [16], fixed=FIXED, memory_limit_gib=0.2, workers=1)
    assert small.best is None
    assert small.front == ()
    assert small.points[0].reason.startswith("nothing fits: the nearest miss needs at least ")
    assert [row["step_time_s"] for row in small.to_rows()] == [None, None]


def test_a_sweep_that_was_broken_off_simulates_only_what_is_missing(tmp_path, monkeypatch):
    question = (TINY, CLUSTER, [4, 8, 16], 512, [16])
    options = {**OPTIONS, "store": tmp_path / "plans.sqlite", "pareto": 20}
    asked: list[int] = []
    run = Remembering.run

    def counted(self, plans):
        asked.append(sum(plan not in self._store.known(plans) for plan in plans))
        return run(self, plans)

    monkeypatch.setattr(Remembering, "run", counted)

    def broken_off(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(*question, progress=broken_off, **options)
    first = sum(asked)
    again = sweep(*question, **options)
    second = sum(asked) - first
    whole = sweep(*question, **{**options, "store": None})
    assert again == whole
    assert sweep(*question, **options) == whole
    assert sum(asked) == first + second
    assert min(first, second) > 0


def test_a_sweep_needs_a_point():
    with pytest.raises(ForerunError, match="at least one number of GPUs and one global batch"):
        sweep(TINY, CLUSTER, [], 512, [16])


def test_python_has_it_by_name():
    fixed = {**FIXED, "micro_batch": 1, "reshard_after_forward": "always"}
    found = forerun.sweep("gpt2-small", "h100-sxm", [2, 4], 512, [16], fixed=fixed, workers=1)
    assert [point.n_gpus for point in found.points] == [2, 4]
    assert found.best is found.points[1]
