"""What iterations meet: draws that depend on nothing but the seed, the iteration and the rank."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.answers.experiment.conditions import Conditions, Weather
from forerun.answers.experiment.request import Disturbance
from forerun.common.errors import ForerunError

WILD = Disturbance(
    seed=5,
    compute_jitter=0.05,
    network_jitter=0.2,
    straggler_probability=0.3,
    straggler_slowdown=1.5,
    straggler_tail=2.0,
)


@given(st.integers(0, 2**63), st.integers(0, 10**9), st.integers(1, 40), st.integers(1, 40))
def test_a_rank_meets_the_same_on_any_number_of_gpus(seed: int, iteration: int, few: int, more: int) -> None:
    wild = Disturbance(
        seed, compute_jitter=0.1, straggler_probability=0.4, straggler_slowdown=1.2, straggler_tail=1.5
    )  # fmt: skip
    first = Weather(wild, few).at(iteration)
    second = Weather(wild, few + more).at(iteration)
    assert np.array_equal(first.compute, second.compute[:few])
    assert first.network == second.network


def test_what_is_drawn_does_not_depend_on_what_else_is() -> None:
    jitter = Weather(Disturbance(5, compute_jitter=0.05), 8).at(7).compute
    stragglers = Weather(
        Disturbance(5, straggler_probability=0.3, straggler_slowdown=1.5, straggler_tail=2.0), 8
    ).at(7).compute  # fmt: skip
    assert np.array_equal(Weather(WILD, 8).at(7).compute, jitter * stragglers)
    assert Weather(WILD, 8).at(7).network == Weather(Disturbance(5, network_jitter=0.2), 1).at(7).network


def test_iterations_and_seeds_differ() -> None:
    first, second = Weather(WILD, 8).at(0), Weather(WILD, 8).at(1)
    assert not first.same(second)
    other = Disturbance(6, compute_jitter=0.05)
    assert not Weather(other, 8).at(0).same(first)


def test_jitter_has_the_spread_that_it_is_said_to_have() -> None:
    weather = Weather(Disturbance(compute_jitter=0.08, network_jitter=0.3), 64)
    logs = np.log([weather.at(i).compute for i in range(400)])
    assert logs.std() == pytest.approx(0.08, rel=0.02)
    assert logs.mean() == pytest.approx(0.0, abs=0.002)
    assert np.log([weather.at(i).network for i in range(400)]).std() == pytest.approx(0.3, rel=0.1)


def test_stragglers_are_as_frequent_and_as_slow_as_they_are_said_to_be() -> None:
    weather = Weather(Disturbance(straggler_probability=0.05, straggler_slowdown=1.5), 100)
    factors = np.array([weather.at(i).compute for i in range(200)])
    assert set(np.unique(factors)) == {1.0, 1.5}
    assert (factors > 1).mean() == pytest.approx(0.05, rel=0.1)


def test_a_tail_makes_stragglers_slower_as_pareto_says() -> None:
    tail = Disturbance(straggler_probability=1.0, straggler_slowdown=1.5, straggler_tail=3.0)
    excess = np.concatenate([Weather(tail, 500).at(i).compute - 1.0 for i in range(20)])
    assert excess.min() >= 0.5
    assert excess.mean() == pytest.approx(0.5 * 3 / (3 - 1), rel=0.05)
    assert (excess > 1.0).mean() == pytest.approx(2**-3, rel=0.1)


def test_the_note_names_stragglers() -> None:
    always = Disturbance(straggler_probability=1.0, straggler_slowdown=1.5)
    assert Weather(always, 1).at(3).note == "straggler 0"
    assert Weather(always, 7).at(3).note == "stragglers 0, 1, 2, 3 and 3 more"


def test_warm_up_falls_to_nothing_linearly() -> None:
    weather = Weather(Disturbance(warmup_iterations=4, warmup_slowdown=3.0, slow_ranks={1: 1.5}), 2)
    assert [weather.at(i).host for i in range(6)] == [3.0, 2.5, 2.0, 1.5, 1.0, 1.0]
    assert weather.at(0).compute.tolist() == [3.0, 4.5]
    assert (weather.at(0).note, weather.at(4).note) == ("warm-up", "")
    assert weather.at(4).same(weather.at(1000))


def test_undisturbed_iterations_are_the_same() -> None:
    weather = Weather(Disturbance(), 8)
    assert weather.at(0).same(weather.at(10**9))
    assert weather.at(0).slowest_rank == -1


def test_slowing_a_rank_leaves_the_conditions_as_they_were() -> None:
    conditions = Conditions(np.ones(4))
    slower = conditions.slow(2, 1.5, "hot").slow(2, 2.0)
    assert slower.compute.tolist() == [1.0, 1.0, 3.0, 1.0]
    assert (slower.note, slower.slowest_rank, slower.middle) == ("hot", 2, 1.0)
    assert conditions.compute.tolist() == [1.0] * 4
    with pytest.raises(ForerunError, match="no rank 4; choose one of the ranks 0 to 3"):
        conditions.slow(4, 1.5)
    with pytest.raises(ForerunError, match="factor of a rank must be above 0"):
        conditions.slow(0, 0.0)


@pytest.mark.parametrize(("ranks", "middle"), [([1, 9], 1), ([1, 5, 9], 5), ([9, 1, 5, 7], 5), ([2], 2)])
def test_the_rank_in_the_middle(ranks: list[float], middle: float) -> None:
    assert Conditions(np.array(ranks, np.float64)).middle == middle


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"seed": -1}, "seed must be at least 0"),
        ({"compute_jitter": -0.1}, "compute_jitter must be at least 0"),
        ({"network_jitter": float("nan")}, "network_jitter must be at least 0"),
        ({"straggler_tail": float("inf")}, "straggler_tail must be at least 0"),
        ({"straggler_probability": 1.5}, "straggler_probability must be between 0 and 1"),
        ({"straggler_slowdown": 0.5}, "straggler_slowdown must be at least 1"),
        ({"warmup_slowdown": 0.0}, "warmup_slowdown must be above 0"),
        ({"slow_ranks": {8: 1.1}}, "slow_ranks: there is no rank 8; choose one of the ranks 0 to 7"),
        ({"slow_ranks": {0: -1.0}}, "the factor of rank 0 must be above 0"),
    ],
)
def test_figures_that_make_no_sense(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(ForerunError, match=message):
        Weather(Disturbance(**wrong), 8)  # type: ignore[arg-type]


def test_draws_that_no_machine_would_survive() -> None:
    heavy = Disturbance(straggler_probability=1.0, straggler_slowdown=2.0, straggler_tail=0.05)
    with pytest.raises(ForerunError, match="raise straggler_tail"):
        Weather(heavy, 64).at(0)
    with pytest.raises(ForerunError, match="lower the jitter"):
        Weather(Disturbance(compute_jitter=1e6), 64).at(0)
