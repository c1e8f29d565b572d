"""Quantiles of residuals, and how many measured figures lie in their bands."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from measured_rows import prediction, write_rows

from forerun.answers.analysis.uncertainty import widening
from forerun.describe.cluster.types import Cluster
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.plan import Plan
from forerun.evidence.validation import bands
from forerun.evidence.validation.rows import read_measurements
from forerun.evidence.validation.run import RowResult, run


def results_of(tmp_path: Path, *changes: dict[str, str], coverage: float = 1.0) -> list[RowResult]:
    def stand_in(model: ModelSpec, plan: Plan, cluster: Cluster) -> object:
        """Two seconds, from 1.8 to 2.4; 50 GiB, from 50 to 55."""
        return replace(prediction(2.0, 44.0, 50.0, fits=True), plan=plan, coverage=coverage)

    return run(read_measurements(write_rows(tmp_path / "rows.csv", *changes)), {}, {}, stand_in)  # type: ignore[arg-type]


def steps(*times: float) -> list[dict[str, str]]:
    return [{"step_time_s": str(time)} for time in times]


def test_shares_in_below_and_above_the_band(tmp_path: Path) -> None:
    held = bands.time_held(results_of(tmp_path, *steps(1.7, 1.8, 2.0, 2.4, 2.5), {"gpu": "Abacus"}))
    assert (held.rows, held.inside, held.below, held.above) == (5, pytest.approx(0.6), 0.2, 0.2)
    assert held.width == pytest.approx(2.4 / 1.8 - 1)


def test_nothing_to_compare_is_not_a_number() -> None:
    held = bands.time_held([])
    assert held.rows == 0
    assert math.isnan(held.inside)


def test_only_reserved_peaks_are_compared_with_their_band(tmp_path: Path) -> None:
    reserved = {"peak_mem_kind": "reserved", "peak_mem_gib": "56"}
    held = bands.reserved_held(results_of(tmp_path, {}, reserved))
    assert (held.rows, held.above) == (1, 1.0)


def test_quantiles_are_of_residuals_over_the_widening(tmp_path: Path) -> None:
    times = [2.0 * math.exp(0.01 * i) for i in range(-10, 11)]
    for coverage in (1.0, 0.4):
        found = bands.time_quantiles(results_of(tmp_path, *steps(*times), coverage=coverage))
        assert set(found) == {"fitted"}
        assert found["fitted"].rows == 21
        # the 20th of 21, as ceil(22 * 0.9) = 20
        assert found["fitted"].high == pytest.approx(0.09 / widening(coverage, 0.0))
        assert found["fitted"].low == pytest.approx(-0.09 / widening(coverage, 0.0))


def test_rows_on_devices_with_a_band_of_their_own_inform_no_stack(tmp_path: Path) -> None:
    assert bands.time_quantiles(results_of(tmp_path, {"gpu": "L40S"})) == {}


def test_groups_of_stacks_are_apart(tmp_path: Path) -> None:
    found = bands.time_quantiles(results_of(tmp_path, {}, {"framework": "nanotron", "step_time_s": "3"}))
    assert found["unfitted"].low == found["unfitted"].high == pytest.approx(math.log(1.5))
    assert found["fitted"].high == pytest.approx(math.log(0.75))


def test_a_conformal_band_holds_its_share_of_new_scores() -> None:
    """Skewed scores: 80 % of further ones at least, and not many more."""
    dice = random.Random(5)
    inside = 0
    for _ in range(2000):
        *seen, new = (dice.expovariate(1.0) for _ in range(40))
        found = bands.conformal(seen, 0.8)
        inside += found.low <= new <= found.high
    assert 0.79 <= inside / 2000 <= 0.88


def test_few_scores_give_their_extremes() -> None:
    found = bands.conformal([0.1, -0.2, 0.05], 0.8)
    assert (found.low, found.high, found.rows) == (-0.2, 0.1, 3)


@pytest.mark.parametrize(
    ("kind", "other", "predicted_gib"), [("allocated", "reserved", 44), ("reserved", "allocated", 50)]
)
def test_quantiles_of_memory_are_of_rows_that_state_that_kind(
    kind: str, other: str, predicted_gib: float, tmp_path: Path
) -> None:
    rows = [{"peak_mem_kind": kind, "peak_mem_gib": gib} for gib in ("46", "48")]
    found = bands.memory_quantiles(results_of(tmp_path, *rows, {"peak_mem_kind": other, "peak_mem_gib": "70"}), kind)
    assert found["fitted"].rows == 2
    assert found["fitted"].low == pytest.approx(math.log(46 / predicted_gib))
    assert found["fitted"].high == pytest.approx(math.log(48 / predicted_gib))
