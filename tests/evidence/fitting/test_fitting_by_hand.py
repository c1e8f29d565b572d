"""Rates that a file states, the fit's objective, slopes, groups and origins, each against a second calculation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import optimize

from forerun.common.errors import ForerunError
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.cluster.types import KernelRates
from forerun.describe.stacks.catalog import load_stack
from forerun.evidence.fitting import anchor, left_out, posterior, steps, write
from forerun.evidence.fitting.anchor import Anchor, far_off, rates_of
from forerun.evidence.fitting.anchor_file import _count, with_stated_rates
from forerun.evidence.fitting.constants import Constant, Kind, changed, load_registry
from forerun.evidence.fitting.fit import FittedConstant, priors_of, rounded, row_weights
from forerun.evidence.fitting.left_out import mean_errors
from forerun.evidence.fitting.posterior import Posterior, parse_posterior
from forerun.evidence.fitting.solve import Priors, solve

H100 = load_cluster("h100-sxm")


def _stated(folder: Path, text: str) -> KernelRates:
    path = folder / "rates.yaml"
    path.write_text(text)
    return with_stated_rates(path, replace(H100, rates=KernelRates(gemm=0.5, network=0.8))).rates


def test_stated_rates_are_factors_on_those_of_the_cluster(tmp_path: Path) -> None:
    assert _stated(tmp_path, "rates: {gemm: 0.9, memory: 2, host: 0.25}\n") == KernelRates(
        gemm=0.45, network=0.8, memory=2.0, host=0.25
    )
    assert _stated(tmp_path, "cluster: h100-sxm\nrates: {network: 1.5}\n").network == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("step_time_s: 1\n", "can't be corrected by a measured step, only by rates"),
        ("rates: {}\n", "rates: expected factors by name, which are gemm, attention, attention_backward, memory"),
        ("rates: [1]\n", "expected factors by name"),
        ("rates: {speed: 1}\n", "unknown rate 'speed'; known: gemm"),
        ("rates: {gemm: 0}\n", "rates: gemm: expected a number above 0, got 0"),
        ("rates: {gemm: true}\n", "expected a number above 0, got True"),
        ("rates: {gemm: fast}\n", "expected a number above 0, got 'fast'"),
        ("cluster: a100\nrates: {gemm: 1}\n", "rates are of a100-sxm.*, so they can't correct h100-sxm-80gb"),
        ("cluster: 5\nrates: {gemm: 1}\n", "cluster: expected a name or a file, got 5"),
    ],
)
def test_stated_rates_that_are_wrong_are_one_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ForerunError, match=rf"rates\.yaml: .*{said}|rates\.yaml: {said}"):
        _stated(tmp_path, text)


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "8"])
def test_a_count_is_a_whole_number_from_one(value: object) -> None:
    assert _count("gpus", 1) == 1
    with pytest.raises(ForerunError, match="gpus: expected a whole number above 0"):
        _count("gpus", value)


@pytest.mark.parametrize(("measured_s", "far"), [(2.0, False), (5.9, False), (6.0, True), (0.67, False), (0.66, True)])
def test_a_time_that_is_three_times_another_is_in_doubt(
    monkeypatch: pytest.MonkeyPatch, measured_s: float, far: bool
) -> None:
    found: Any = SimpleNamespace(prediction=SimpleNamespace(step_time_s=2.0))
    monkeypatch.setattr(anchor, "simulate_setup", lambda setup: found)
    lines = far_off(Anchor(None, measured_s), "mine.yaml")  # type: ignore[arg-type]
    if not far:
        assert lines == ()
        return
    (line,) = lines
    assert line.startswith(f"mine.yaml: measured {measured_s:.4g} s, predicted 2 s; are the unit")


def test_a_clock_is_that_of_products_and_attention() -> None:
    whats: Any = ("sustained", "attention_forward", "attention_backward", "memory_rate", "network_rate")
    assert rates_of(whats, np.log([0.8, 0.5, 0.9, 1.2, 0.7])) == KernelRates(
        gemm=pytest.approx(0.8),
        attention=pytest.approx(0.4),
        attention_backward=pytest.approx(0.9),
        memory=pytest.approx(1.2),
        network=pytest.approx(0.7),
    )
    assert rates_of(whats[3:4], np.log([3.0])) == KernelRates(memory=pytest.approx(3.0))


def test_slopes_are_those_of_a_plane() -> None:
    coefficients = np.array([-0.7, 0.0, 0.25])
    found = anchor._slopes(lambda x: 5.0 + float(coefficients @ x), 3)
    assert found == pytest.approx(coefficients)


def _problem(seed: int) -> tuple[Any, ...]:
    random = np.random.default_rng(seed)
    slopes, measured = random.normal(size=(6, 3)), random.normal(size=6)
    lines = np.eye(3) + 0.3 * random.normal(size=(3, 3))
    priors = Priors(lines, random.normal(size=3), random.uniform(0.2, 1.0, 3))
    return slopes, measured, priors, random.uniform(0.2, 2.0, 6), 0.3


@pytest.mark.parametrize("seed", range(5))
def test_the_fit_is_the_minimum_that_its_docstring_states(seed: int) -> None:
    """An optimizer that knows nothing of weights or priors finds the same place and the same curvature."""
    slopes, measured, priors, weights, scale = _problem(seed)

    def objective(x: Any) -> float:
        errors = slopes @ x - measured
        rows = weights * 2 * (np.sqrt(1 + (errors / scale) ** 2) - 1)
        return float(rows.sum() + (((priors.lines @ x - priors.values) / priors.sigma) ** 2).sum())

    start = np.zeros(3)
    found = solve(lambda x: slopes @ x - measured, slopes, priors, weights, scale, start, -measured)
    best = optimize.minimize(objective, start, tol=1e-12).x
    assert found.x == pytest.approx(best, abs=2e-4)
    assert found.errors == pytest.approx(slopes @ best - measured, abs=1e-3)
    each = weights / np.sqrt(1 + (found.errors / scale) ** 2) / scale**2
    own = priors.lines / priors.sigma[:, None]
    assert found.covariance == pytest.approx(np.linalg.inv(own.T @ own + slopes.T @ np.diag(each) @ slopes), rel=1e-2)
    assert found.sigma == pytest.approx(np.sqrt(np.diag(found.covariance)))


def test_without_rows_the_priors_stand() -> None:
    priors = Priors(np.array([[1.0, 0.0], [-1.0, 1.0]]), np.array([0.2, 0.1]), np.array([0.3, 0.4]))
    empty = np.zeros(0)
    found = solve(lambda x: empty, np.zeros((0, 2)), priors, empty, 0.03, np.zeros(2), empty)
    assert found.x == pytest.approx([0.2, 0.3])
    assert found.sigma == pytest.approx([0.3, 0.5])  # 0.3 and 0.4 add up as squares


def test_a_posterior_keeps_its_correlations_in_whole_percent() -> None:
    sigma, correlation = np.array([0.1, 0.2, 0.3]), np.array([[1, 0.254, -0.5], [0.254, 1, 0], [-0.5, 0, 1]])
    text = Posterior(("a", "b", "c"), correlation * np.outer(sigma, sigma)).as_text()
    assert text.splitlines()[3:] == [
        "a: {sigma: 0.1, with: []}",
        "b: {sigma: 0.2, with: [25]}",
        "c: {sigma: 0.3, with: [-50, 0]}",
    ]
    assert parse_posterior(text).covariance[0] == pytest.approx([0.01, 0.005, -0.015])


def test_a_rate_without_a_constant_is_as_unsure_as_the_middle_one() -> None:
    def constant(sigma: float, what: Any = "memory_rate") -> Constant:
        return Constant(what, ("x",), prior=1.0, sigma=sigma)

    several = (constant(0.1), constant(0.4), constant(0.2), constant(9.0, "network_rate"))
    registry = replace(load_registry(), constants=several)
    assert posterior._typical_spread(registry, "memory_rate") == 0.2
    assert posterior._typical_spread(registry, "sustained") == 0.0


def test_a_constant_spreads_as_it_says_or_as_its_kind() -> None:
    kind = Kind("memory_rate", 0.1, 0.25, "here", prior=0.9)
    registry = replace(load_registry(), kinds={"warm": kind})
    assert registry.spread_of(Constant("memory_rate", ("x",), kind="warm")) == 0.25
    assert registry.spread_of(Constant("memory_rate", ("x",), kind="warm", sigma=0.5)) == 0.5
    constants = (Constant("memory_rate", ("x",), kind="warm", factor=2.0), Constant("memory_rate", ("y",), prior=3.0))
    priors = priors_of(replace(registry, constants=(constants[0], replace(constants[1], sigma=0.7))))
    assert priors.sigma.tolist() == [0.1, 0.25, 0.7]
    assert np.exp(priors.mean) == pytest.approx([0.9, 1.8, 3.0])


def test_factors_change_their_own_rates_and_no_other() -> None:
    known = load_stack("megatron-core")
    factors: dict[str, float] = {"gemm_rate": 0.5, "sustained": 0.8, "network_rate": 3.0, "launch_blocking_us": 2.0}
    stack = changed(known, factors)  # type: ignore[arg-type]
    assert stack.gemm_rate == pytest.approx(0.4 * known.gemm_rate)
    assert stack.attention_rate == pytest.approx(0.8 * known.attention_rate)
    assert stack.network_rate == pytest.approx(3 * known.network_rate)
    assert stack.launch_blocking_us == 2 * known.launch_blocking_us
    same = ("memory_rate", "attention_backward_rate", "owner_broadcast_us")
    assert [getattr(stack, name) for name in same] == [getattr(known, name) for name in same]
    assert changed(known, {}) == known


@pytest.mark.parametrize(
    ("value", "digits"), [(0.123449, 0.123), (0.12351, 0.124), (1234.0, 1230.0), (2.0, 2.0), (9.996e-5, 1e-4)]
)
def test_constants_have_three_digits(value: float, digits: float) -> None:
    assert rounded(value) == digits


def test_a_source_of_sixteen_rows_counts_as_eight() -> None:
    rows: Any = [SimpleNamespace(source="many")] * 16 + [
        SimpleNamespace(source="one"),
        SimpleNamespace(source="unused"),
    ]
    weights = row_weights(rows, np.array([True] * 17 + [False]))
    assert weights[:16].sum() == pytest.approx(16**0.75)
    assert weights[16:].tolist() == [1.0, 1.0]


def _step(source: str, cluster: str, model: str) -> Any:
    device, spec = SimpleNamespace(name=cluster), SimpleNamespace(name=model)
    return SimpleNamespace(source=source, setup=SimpleNamespace(cluster=SimpleNamespace(device=device), model=spec))


def test_anchors_are_other_steps_of_the_same_source_and_device() -> None:
    rows = [
        _step("a", "x", "m"),
        _step("a", "y", "m"),
        _step("a", "x", "n"),
        _step("b", "x", "m"),
        _step("a", "x", "m"),
    ]
    groups = left_out._groups(rows, left_out._cluster)
    assert groups == [[0, 2, 4], [1], [0, 2, 4], [3], [0, 2, 4]]
    assert list(left_out._others(groups)) == [[2, 4], [], [0, 4], [], [0, 2]]


def test_an_anchor_moves_the_others_to_first_order() -> None:
    """One rate, on which both times depend in full, and a step whose error is small beside the noise."""
    registry: Any = SimpleNamespace(anchor=SimpleNamespace(sigma={"memory_rate": 0.1}, noise=1.0))
    constants = [{"memory_rate": (1, "x")}, {"memory_rate": (1, "x"), "sustained": (0, "y")}, {}]
    rows = [_step("a", "x", "m")] * 3
    times: Any = SimpleNamespace(registry=registry, constants=constants, steps=rows)
    slopes = np.array([[0.0, -1.0], [-0.5, -0.5], [-1.0, -1.0]])
    assert left_out._slopes_of_rates(times, slopes).tolist() == [[-1.0], [-0.5], [0.0]]
    known: Any = SimpleNamespace(of_rates=lambda registry, setup: np.array([[1.0]]))
    errors = np.array([0.1, -0.04, 0.01])
    found = left_out._anchored_errors(times, slopes, errors, [known] * 3)
    first = 1.0 * 0.1 / (1.0 + 1.0)  # the conditional mean of the rate given the first step
    second = -0.5 * 0.04 / (0.25 + 1.0)
    assert found.same_cluster[0] == pytest.approx([0.1 - second, 0.1], abs=5e-4)
    assert found.same_cluster[1] == pytest.approx([-0.04 - 0.5 * first, -0.04], abs=5e-4)
    assert [one.tolist() for one in found.same_run] == [one.tolist() for one in found.same_cluster]
    assert [len(one) for one in found.best] == [0, 1, 1]  # the first step depends most on what is unsure


def test_mean_errors_leave_out_steps_without_an_anchor() -> None:
    found = mean_errors([np.log([1.1, 0.7]), np.zeros(0), np.log([1.5])])
    assert found == pytest.approx([0.2, 0.5])


def test_only_timed_rows_of_a_tier_that_can_be_expressed_are_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(name: str, tier: str, time_s: float | None = 1.0, **more: Any) -> Any:
        return SimpleNamespace(id=name, tier=tier, source_id="s", time_s=time_s, **more)

    def mapped(one: Any, models: Any, hardware: Any) -> Any:
        if one.id == "odd":
            raise steps.Inexpressible("no")
        return SimpleNamespace(model="m", plan="p", cluster="c")

    monkeypatch.setattr(steps, "map_row", mapped)
    monkeypatch.setattr(steps, "measured_time_s", lambda one: one.time_s)
    monkeypatch.setattr(steps, "Setup", lambda *_: SimpleNamespace(stack=SimpleNamespace(family="f")))
    rows = [row("one", "A"), row("untimed", "A", None), row("odd", "A"), row("b", "B"), row("c", "C")]
    hardware: Any = {}

    def names(tiers: str) -> list[tuple[str, bool]]:
        return [(one.name, one.informs) for one in steps.steps_of(rows, {}, hardware, load_registry(), tiers)]

    assert names("") == [("one", True)]
    assert names("B") == [("one", True), ("b", False)]
    with pytest.raises(ForerunError, match="no row of tier A with a measured time can be expressed"):
        steps.steps_of(rows[1:], {}, hardware, load_registry(), "B")


@pytest.mark.parametrize(
    ("rows_of", "kind", "origin"),
    [
        ({"x": 3, "y": 2}, None, "fitted on 5 published steps (forerun fit)"),
        ({"x": 0, "y": 2}, None, "y's, fitted on 2 published steps (forerun fit)"),
        ({"x": 0, "y": 0}, None, "no published step informs it: a paper"),
        ({"x": 0, "y": 0}, "warm", "no published step informs it: the value of warm that forerun fit finds"),
    ],
)
def test_a_value_says_what_it_comes_from(rows_of: dict[str, int], kind: str | None, origin: str) -> None:
    constant = Constant("memory_rate", ("x", "y"), kind=kind, source="a paper")
    assert write._origin(FittedConstant(constant, 1.0, 0.9, 0.1, rows_of), "x") == origin
