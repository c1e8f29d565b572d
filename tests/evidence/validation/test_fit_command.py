"""`forerun fit` on published rows."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from measured_rows import write_rows
from published import HARDWARE, MEASUREMENTS, MODELS, needs_measurements

from forerun.interfaces.cli.main import run

SOURCE = "titan-202412"


@needs_measurements
def test_a_few_published_rows_are_fitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MEASUREMENTS.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    some = [row for row in rows if row["source_id"] == SOURCE and row["tier"] == "A"]
    with (tmp_path / "some.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(some)
    files = [str(tmp_path / "some.csv"), "--models", str(MODELS), "--hardware", str(HARDWARE)]
    assert run(["fit", *files, "--leave-out", "family", "--out", str(tmp_path / "residuals.csv"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fitted"]["MAPE"] < 0.1
    assert found["left_out"]["torchtitan and torchao"]["rows"] == found["fitted"]["rows"] >= 5
    assert len((tmp_path / "residuals.csv").read_text().splitlines()) == found["fitted"]["rows"] + 1


@needs_measurements
def test_sources_are_left_out_one_by_one_and_count_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MEASUREMENTS.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    sources = {"titan-a100-202404", "titan-asynctp-202506", "titan-gb200"}
    with (tmp_path / "some.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(row for row in rows if row["source_id"] in sources)
    files = [str(tmp_path / "some.csv"), "--models", str(MODELS), "--hardware", str(HARDWARE)]
    assert run(["fit", *files, "--leave-out", "source", "--out", str(tmp_path / "left-out.csv"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["left_out_sources"]
    assert set(found["sources"]) == sources
    each = [one["MAPE"] for one in found["sources"].values()]
    assert found["mean_over_sources"]["MAPE"] == pytest.approx(sum(each) / 3)
    assert found["all_rows"]["rows"] == sum(one["rows"] for one in found["sources"].values())
    assert found["mean_over_sources_of_large_models"] == found["mean_over_sources"]
    with (tmp_path / "left-out.csv").open(newline="", encoding="utf-8") as file:
        assert all(float(row["left_out_s"]) > 0 for row in csv.DictReader(file))


def test_rows_of_which_none_is_complete_are_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write_rows(tmp_path / "rows.csv", {"tier": "B"})
    (tmp_path / "models.yaml").write_text("{}\n")
    (tmp_path / "hardware.yaml").write_text("clusters: {}\n")
    files = ("--models", str(tmp_path / "models.yaml"), "--hardware", str(tmp_path / "hardware.yaml"))
    assert run(["fit", str(rows), *files]) == 2
    assert "no row of tier A" in capsys.readouterr().err
