"""Times predicted with nothing fitted on the row's source: read, judged, and turned into bands."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path

import pytest
from measured_rows import prediction, write_rows
from rich.console import Console

from forerun.common.errors import ForerunError
from forerun.describe.cluster.types import Cluster
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.plan import Plan
from forerun.evidence.validation.bands import of_sources
from forerun.evidence.validation.left_out import left_out, read_left_out
from forerun.evidence.validation.report import build_report
from forerun.evidence.validation.rows import read_measurements
from forerun.evidence.validation.run import RowResult, run
from forerun.evidence.validation.tables import print_report

HEADER = "id,source,family,measured_s,left_out_s\n"


@pytest.fixture
def results(tmp_path: Path) -> list[RowResult]:
    """Two rows of 1.5 s, one that took 3 s under a stack on which nothing was fitted, one that can't be expressed."""

    def two_seconds(model: ModelSpec, plan: Plan, cluster: Cluster) -> object:
        return replace(prediction(2.0, 44.0, 50.0, fits=True), plan=plan)

    changes = ({}, {}, {"framework": "nanotron", "tier": "B", "step_time_s": "3"}, {"gpu": "Abacus"})
    rows = read_measurements(write_rows(tmp_path / "rows.csv", *changes))
    return run(rows, {}, {}, two_seconds)  # type: ignore[arg-type]


def written(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "left-out.csv"
    path.write_text(HEADER + "".join(f"{line}\n" for line in lines))
    return path


def test_errors_by_source_and_the_bands_of_new_sources(results: list[RowResult], tmp_path: Path) -> None:
    path = written(tmp_path, "row-1,lab,titans,1.5,1.2", "row-2,other,titans,1.5,1.5", "row-4,lab,titans,1.5,")
    found = left_out(results, read_left_out(path))
    assert list(found.by_source) == ["all", "lab", "other"]
    assert found.by_source["lab"].signed == pytest.approx(-0.2)
    assert found.by_source["other"].mape == 0
    assert found.by_source["all"].compared == found.held.rows == 2
    assert found.over_sources == pytest.approx(0.1)
    assert set(found.quantiles) == {"few"}
    assert (found.quantiles["few"].rows, found.quantiles["few"].sources) == (2, 1)
    assert found.quantiles["few"].low == pytest.approx(0)
    assert found.quantiles["few"].high == pytest.approx(math.log(1.25))


def test_every_source_counts_once_in_a_band() -> None:
    many = [("a", score / 100) for score in range(100)]
    few = [(name, 2.0) for name in "bcdefghij"]
    assert of_sources(many).high == pytest.approx(0.89)
    both = of_sources([*many, *few])
    assert (both.low, both.high, both.rows, both.sources) == (pytest.approx(0.99), 2.0, 109, 10)


def test_the_report_prints_them(results: list[RowResult], tmp_path: Path) -> None:
    found = left_out(results, read_left_out(written(tmp_path, "row-1,lab,titans,1.5,1.2")))
    report = build_report(results, found)
    assert report["left_out"]["step_time"]["lab"]["signed"] == pytest.approx(-0.2)
    out = io.StringIO()
    print_report(report, Console(file=out, width=160))
    assert "nothing fitted on the row's source" in out.getvalue()
    assert "Mean over sources 20.00%" in out.getvalue()
    assert "few: +0.223 to +0.223 (1 rows of 1 sources)" in out.getvalue()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("id,source\nrow-1,x\n", r"left-out.csv line 1: the header lacks column\(s\) left_out_s"),
        ("", r"left-out.csv line 1: the header lacks column\(s\) id, source, left_out_s"),
        (HEADER, "no row has left_out_s; write it with forerun fit --leave-out source --out"),
        (HEADER + "row-1,lab,x,1.5,fast\n", "left-out.csv line 2: left_out_s is 'fast', expected a positive number"),
        (HEADER + "row-1,lab,x,1.5,-1\n", "left_out_s is '-1', expected a positive number"),
        (HEADER + "row-1,lab,x,1.5,nan\n", "left_out_s is 'nan', expected a positive number"),
        (b"id,source,left_out_s\n\xff\xfe,x,1\n", "not UTF-8 text"),
    ],
)
def test_a_bad_file_gives_one_line(tmp_path: Path, text: str | bytes, message: str) -> None:
    path = tmp_path / "left-out.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ForerunError, match=message) as error:
        read_left_out(path)
    assert "\n" not in str(error.value)


def test_a_missing_file_and_one_of_another_table_are_told(results: list[RowResult], tmp_path: Path) -> None:
    with pytest.raises(ForerunError, match=r"absent\.csv: can't be read: No such file"):
        read_left_out(tmp_path / "absent.csv")
    with pytest.raises(ForerunError, match="none of its rows is in the table"):
        left_out(results, read_left_out(written(tmp_path, "another,lab,x,1.5,1.2")))
