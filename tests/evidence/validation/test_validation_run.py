"""Predicting rows with a stand-in predictor, writing the predictions, reporting the figures."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from measured_rows import prediction, write_rows
from rich.console import Console

from forerun.answers.analysis.prediction import Prediction
from forerun.common.errors import ForerunError, ImpossiblePlan
from forerun.describe.cluster.types import Cluster
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.plan import Plan
from forerun.evidence.validation.hardware import HostFacts, read_hardware
from forerun.evidence.validation.report import build_report
from forerun.evidence.validation.rows import read_measurements
from forerun.evidence.validation.run import Predictor, RowResult, run, write_predictions
from forerun.evidence.validation.tables import print_report, summary_line


def stand_in(model: ModelSpec, plan: Plan, cluster: Cluster) -> Prediction:
    """Two seconds for every 32 sequences; refuses fp16, trips over pp 4, and has no room for long sequences."""
    if plan.precision == "fp16":
        raise ImpossiblePlan("fp16 needs a loss scaler")
    if plan.pp == 4:
        raise ZeroDivisionError("stage 0")
    step = plan.global_batch / 16
    made = prediction(step, 44.0, 50.0, fits=plan.seq_len < 100_000)
    return replace(made, plan=plan, step_time_s=float("nan") if plan.seq_len == 77 else step)


def results_of(tmp_path: Path, *changes: dict[str, str], predictor: Predictor = stand_in) -> list[RowResult]:
    rows = read_measurements(write_rows(tmp_path / "rows.csv", *changes))
    return run(rows, {}, {}, predictor)


ENDS = ("step_time_low_s", "step_time_high_s", "peak_reserved_low_gib", "peak_reserved_high_gib")
BROKEN = {"tp": "2", "pp": "4", "dp_shard": "2", "micro_batch": "8"}
MIXED: tuple[dict[str, str], ...] = (
    {},
    {"precision": "fp16"},
    {"gpu": "Abacus"},
    {"seq_len": "131072", "outcome": "oom", "step_time_s": "", "peak_mem_gib": ""},
    {"tier": "B", "step_time_s": "2.5", "peak_mem_kind": "unspecified(GB)"},
)


def test_no_row_is_dropped(tmp_path: Path) -> None:
    results = results_of(tmp_path, *MIXED)
    assert [result.row.id for result in results] == [f"row-{n}" for n in range(1, 6)]
    assert [result.prediction is not None for result in results] == [True, False, False, True, True]
    assert results[1].reason == "fp16 needs a loss scaler"
    assert "Abacus" in results[2].reason
    assert not any(result.defect for result in results)


def test_progress_is_told_of_every_row(tmp_path: Path) -> None:
    seen: list[str] = []
    rows = read_measurements(write_rows(tmp_path / "rows.csv", *MIXED))
    run(rows, {}, {}, stand_in, lambda result: seen.append(result.row.id))
    assert len(seen) == len(MIXED)


def test_a_fault_costs_one_row_and_is_marked(tmp_path: Path) -> None:
    results = results_of(tmp_path, BROKEN, {"seq_len": "77"}, {})
    assert [result.defect for result in results] == [True, True, False]
    assert results[0].reason == "fault: ZeroDivisionError: stage 0"
    assert "not positive" in results[1].reason
    report = build_report(results)
    assert report["rows"]["faults"] == 2


def test_predictions_file(tmp_path: Path) -> None:
    path = tmp_path / "predictions.csv"
    write_predictions(path, results_of(tmp_path, *MIXED))
    lines = list(csv.reader(path.open()))
    assert lines == [
        [*("id", "step_time_s", "peak_allocated_gib", "peak_reserved_gib", "fits_memory"), *ENDS],
        ["row-1", "2", "44", "50", "yes", "1.8", "2.4", "50", "55"],
        ["row-2"] + 8 * [""],
        ["row-3"] + 8 * [""],
        ["row-4", "2", "44", "50", "no", "1.8", "2.4", "50", "55"],
        ["row-5", "2", "44", "50", "yes", "1.8", "2.4", "50", "55"],
    ]


def test_what_nvidia_smi_shows_is_written_for_rows_that_it_measured(tmp_path: Path) -> None:
    path = tmp_path / "predictions.csv"
    results = results_of(tmp_path, {"peak_mem_kind": "nvidia-smi"})
    write_predictions(path, results)
    assert list(csv.reader(path.open()))[1] == ["row-1", "2", "44", "52", "yes", "1.8", "2.4", "52", "57"]
    assert results[0].forecast.device_gib == 52


def test_nothing_partial_is_left_when_writing_fails(tmp_path: Path) -> None:
    results = results_of(tmp_path, {})
    target = tmp_path / "out"
    target.mkdir()
    (target / "kept").touch()
    with pytest.raises(ForerunError, match=r"out: can't be written"):
        write_predictions(target, results)
    with pytest.raises(ForerunError, match=r"absent/predictions.csv: can't be written"):
        write_predictions(tmp_path / "absent" / "predictions.csv", results)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out", "rows.csv"]


def test_an_existing_file_survives_a_failure_half_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "predictions.csv"
    path.write_text("before")

    def full_disk(source: str, target: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full_disk)
    with pytest.raises(ForerunError, match="No space left"):
        write_predictions(path, results_of(tmp_path, {}))
    assert path.read_text() == "before"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["predictions.csv", "rows.csv"]


def test_report_figures(tmp_path: Path) -> None:
    report = build_report(results_of(tmp_path, *MIXED))
    assert report["rows"]["by_tier"]["A"] == {"rows": 4, "predicted": 2}
    tier_a = report["step_time"]["tier A"]
    assert (tier_a["compared"], tier_a["total"]) == (1, 3)
    by_gpus, by_parameters = report["step_time_by_gpus"]["tiers A+B"], report["step_time_by_parameters"]["tier A"]
    assert {name: stats["total"] for name, stats in by_gpus.items()} == {"9-64 GPUs": 4}
    assert {name: stats["total"] for name, stats in by_parameters.items()} == {"< 1 B": 2, "not expressed": 1}
    held = report["band"]["step_time"]
    assert (held["tier A"]["rows"], held["tier A"]["inside"], held["tier A"]["below"]) == (1, 0, 1)
    assert (held["tiers A+B"]["rows"], held["tiers A+B"]["above"]) == (2, 0.5)
    assert held["MoE, tier A"] == {"rows": 0, "inside": None, "below": None, "above": None, "width": None}
    assert tier_a["signed"] == pytest.approx(1 / 3)
    assert report["step_time_by_stack"]["tier A"]["torchtitan"]["compared"] == 1
    assert report["memory"]["allocated"]["tier A"]["mape"] == pytest.approx(0.1)
    assert report["memory"]["reserved"]["all tiers"]["mape"] is None
    assert report["memory_not_compared"] == {"unspecified(GB)": 1}
    assert report["out_of_memory"]["oom_found"] == 1
    assert [entry["id"] for entry in report["not_expressed"]] == ["row-2", "row-3"]
    errors = [result["error"] for result in report["results"]]
    assert errors == [pytest.approx(1 / 3), None, None, None, pytest.approx(-0.2)]
    assert json.loads(json.dumps(report, allow_nan=False)) == report


def test_report_text_names_what_is_not_covered(tmp_path: Path) -> None:
    report = build_report(results_of(tmp_path, *MIXED, BROKEN))
    out = io.StringIO()
    print_report(report, Console(file=out, width=160), worst=3, verbose=True)
    text = out.getvalue()
    assert "row-2 (tier A): fp16 needs a loss scaler" in text
    assert "1 of these are faults of this program" in text
    assert "+33.33%" in text
    assert "model 'Small-Llama' is not in the models file" in text
    assert summary_line(report) in text
    assert "80 % band holds 0.00% of rows" in summary_line(report)
    assert "Step time by number of parameters, tier A" in text
    assert "tier A step time MAPE 33.33%, mean signed +33.33%, covered 1/4" in summary_line(report)


def test_report_of_nothing_predicted_has_dashes(tmp_path: Path) -> None:
    report = build_report(results_of(tmp_path, {"gpu": "Abacus"}))
    out = io.StringIO()
    print_report(report, Console(file=out, width=160))
    assert "tier A step time MAPE -, mean signed -, covered 0/1" in out.getvalue()


def test_hardware_file(tmp_path: Path) -> None:
    path = tmp_path / "hardware.yaml"
    path.write_text("clusters:\n  lab: {gpu: H100-SXM, inter_node_gbit_s_per_gpu: null, gpus_per_node: 8, note: x}\n")
    assert read_hardware(path) == {"lab": HostFacts(gpu="H100-SXM", gpus_per_node=8)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("clusters: [", "hardware.yaml, line 1: not valid YAML"),
        ("gpus: {}", "key 'clusters' is missing"),
        ("", "expected keys and values, got None"),
        ("clusters: {lab: 8}", "clusters.lab: expected keys and values, got 8"),
        (
            "clusters: {lab: {gpus_per_node: many}}",
            "clusters.lab.gpus_per_node: input should be a valid integer, got 'many'",
        ),
        ("clusters: {lab: {gpu: 7}}", "clusters.lab.gpu: input should be a valid string, got 7"),
    ],
)
def test_a_bad_hardware_file_gives_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "hardware.yaml"
    path.write_text(text)
    with pytest.raises(ForerunError) as error:
        read_hardware(path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_hardware_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ForerunError, match=r"absent.yaml: can't be read: No such file"):
        read_hardware(tmp_path / "absent.yaml")
