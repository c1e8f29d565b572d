"""Figures of accuracy, against values worked out by hand and by a second method."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measured_rows import measurement, write_rows
from scipy import stats as scipy_stats

from forerun.evidence.validation import metrics
from forerun.evidence.validation.metrics import Forecast
from forerun.evidence.validation.rows import Measurement, read_measurements


def test_error_statistics_by_hand() -> None:
    pairs = [(1.1, 1.0), (0.8, 1.0), (2.0, 2.0), (None, 3.0)]
    stats = metrics.error_stats(pairs)
    assert (stats.compared, stats.total) == (3, 4)
    assert stats.mape == pytest.approx(0.1)
    assert stats.median == pytest.approx(0.1)
    assert stats.p90 == pytest.approx(0.18)
    assert stats.signed == pytest.approx(-1 / 30)
    assert stats.within_10 == pytest.approx(1 / 3)  # 1.1 / 1.0 - 1 is above 0.1 in binary


def test_nothing_compared_is_nan_not_zero() -> None:
    stats = metrics.error_stats([(None, 1.0)])
    assert (stats.compared, stats.total) == (0, 1)
    assert math.isnan(stats.mape)
    assert math.isnan(stats.within_10)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.floats(0, 1))
def test_quantile_is_scipys_linear_one(values: list[float], share: float) -> None:
    expected = scipy_stats.mstats.mquantiles(values, [share], alphap=1, betap=1)[0]
    assert metrics.quantile(values, share) == pytest.approx(expected, abs=1e-6)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=3, max_size=20))
def test_spearman_is_scipys_with_ties(pairs: list[tuple[int, int]]) -> None:
    first, second = [float(a) for a, _ in pairs], [float(b) for _, b in pairs]
    ours = metrics.spearman(first, second)
    if len(set(first)) == 1 or len(set(second)) == 1:
        assert math.isnan(ours)
    else:
        assert ours == pytest.approx(scipy_stats.spearmanr(first, second).statistic)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, 1.5),
        ({"step_time_s": "", "step_time_s_derived": "1.7"}, 1.7),
        ({"step_time_s": "", "tokens_per_s_per_gpu": "4096"}, 2.0),
        ({"step_time_s": "", "tokens_per_s_per_gpu": "4096", "global_batch_seqs": ""}, None),
        ({"outcome": "oom"}, None),
        ({"flops_convention": "simple_pytorch_buggy"}, None),
        ({"flops_convention": "simple_pytorch_buggy", "step_time_s_derived": "1.7"}, 1.5),
        ({"flops_convention": "simple_pytorch_buggy", "step_time_s_derived": "1.7", "step_time_s": ""}, 1.7),
    ],
)
def test_measured_time(tmp_path: Path, change: dict[str, str], expected: float | None) -> None:
    assert metrics.measured_time_s(measurement(tmp_path, **change)) == expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "FSDP/ZeRO-3 only"),
        ({"zero_stage": "1"}, "DP/ZeRO<=2 only"),
        ({"zero_stage": ""}, "DP/ZeRO<=2 only"),
        ({"tp": "2"}, "FSDP+TP/PP"),
        ({"pp": "2", "zero_stage": "1"}, "TP/PP Megatron-style"),
        ({"cp": "2", "tp": "2"}, "CP"),
        ({"is_moe": "yes", "cp": "2"}, "MoE"),
    ],
)
def test_parallelism_class(tmp_path: Path, change: dict[str, str], expected: str) -> None:
    assert metrics.parallelism_class(measurement(tmp_path, **change)) == expected


def rows_of(tmp_path: Path, *times: str) -> list[Measurement]:
    """Equal rows with these step times; an empty one ran out of memory."""
    changes = [{"step_time_s": time, "outcome": "ok" if time else "oom"} for time in times]
    return read_measurements(write_rows(tmp_path / "group.csv", *changes))


def forecasts(*figures: tuple[float | None, bool | None]) -> dict[str, Forecast]:
    return {f"row-{n}": Forecast(step_time_s=time, fits=fits) for n, (time, fits) in enumerate(figures, start=1)}


def test_regret_of_the_second_best_choice(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "1.0", "1.25", "2.0", "4.0")
    summary = metrics.rank_regret(rows, forecasts((1.2, None), (1.1, None), (2.0, None), (3.0, None)))
    assert summary.groups_total == len(summary.groups) == 1
    assert summary.mean == summary.worst == pytest.approx(0.2)
    assert summary.median_spearman == pytest.approx(0.8)


def test_regret_against_covered_rows_forgives_what_was_not_predicted(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "1.0", "1.25", "2.0", "4.0")
    group = metrics.rank_regret(rows, forecasts((None, None), (1.1, None), (2.0, None), (3.0, None))).groups[0]
    assert group.regret == pytest.approx(0.2)
    assert (group.covered_regret, group.covered, group.measured) == (0.0, 3, 4)


def test_ties_share_the_mean(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "1.0", "2.0", "2.0", "4.0")
    summary = metrics.rank_regret(rows, forecasts((1.0, None), (1.0, None), (2.0, None), (2.0, None)))
    assert summary.mean == pytest.approx(0.25)


def test_choosing_a_row_that_ran_out_of_memory_loses_everything(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "", "1.0", "1.0", "1.0", "1.0")
    others = [(1.0, True)] * 4
    assert metrics.rank_regret(rows, forecasts((0.5, True), *others)).mean == 1.0
    assert metrics.rank_regret(rows, forecasts((0.5, False), *others)).mean == 0.0
    assert metrics.rank_regret(rows, forecasts((0.5, None), *others)).mean == 0.0


def test_small_groups_and_trend_rows_are_not_ranked(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "1.0", "1.0", "1.0")
    assert metrics.rank_regret(rows, forecasts(*[(1.0, None)] * 3)).groups_total == 0
    trend = read_measurements(write_rows(tmp_path / "trend.csv", *[{"tier": "C"}] * 5))
    assert metrics.rank_regret(trend, forecasts(*[(1.0, None)] * 5)).groups_total == 0


def test_same_workload_splits_a_group(tmp_path: Path) -> None:
    changes = [{"seq_len": length} for length in ("1024", "2048") for _ in range(4)]
    rows = read_measurements(write_rows(tmp_path / "two.csv", *changes))
    predicted = forecasts(*[(1.0, None)] * 8)
    assert metrics.rank_regret(rows, predicted).groups_total == 1
    assert metrics.rank_regret(rows, predicted, metrics.workload_key).groups_total == 2


def test_out_of_memory_counts(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "", "", "1.0", "1.0", "1.0")
    predicted = forecasts((1.0, False), (1.0, True), (1.0, True), (1.0, False), (1.0, None))
    oom = metrics.out_of_memory(rows, predicted)
    assert (oom.oom_rows, oom.oom_judged, oom.oom_found) == (2, 2, 1)
    assert (oom.ok_rows, oom.ok_judged, oom.ok_refused) == (3, 2, 1)
    assert oom.refused_by_source == {"lab": 1}


def test_memory_is_compared_with_the_figure_of_its_kind(tmp_path: Path) -> None:
    kinds = ("allocated", "reserved", "nvidia-smi", "unspecified(GB)")
    rows = read_measurements(write_rows(tmp_path / "memory.csv", *[{"peak_mem_kind": kind} for kind in kinds]))
    predicted = {row.id: Forecast(1.0, 44.0, peak_reserved_gib=50.0, device_gib=52.0) for row in rows}
    signed = {kind: metrics.memory_stats(rows, predicted, kind).signed for kind in metrics.COMPARED_MEMORY}
    assert signed == pytest.approx({"allocated": 0.1, "reserved": 0.25, "nvidia-smi": 0.3})


def test_the_group_with_most_regret_is_told_first(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, *("1.0", "1.25", "2.0", "4.0") * 2)
    right, wrong = (
        ((1.0, None), (1.25, None), (2.0, None), (4.0, None)),
        ((1.2, None), (1.1, None), (2.0, None), (3.0, None)),
    )
    groups = metrics.rank_regret(rows, forecasts(*right, *wrong), lambda row: (row.id > "row-4",)).groups
    assert [(group.key, group.regret) for group in groups] == [(("True",), pytest.approx(0.2)), (("False",), 0.0)]
