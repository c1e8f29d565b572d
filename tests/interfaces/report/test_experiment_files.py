"""All files of a run or a study appear together or not at all, and are the same for the same result."""

from __future__ import annotations

import csv
import json
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import results_by_hand as by_hand
import yaml
from documents_by_hand import answers

from forerun.answers.analysis.history import COLUMNS
from forerun.answers.experiment.run import run
from forerun.common.errors import ForerunError
from forerun.interfaces.report import drawing, experiment_files
from forerun.interfaces.report.experiment_files import export, file_name, write_pictures

RUN_FILES = {
    *("study_config.yaml", "study_results.json", "study_bottlenecks.json", "study_iterations.csv", "report.html"),
    *("iteration_breakdown.png", "resource_utilization.png", "memory_over_time.png", "timeline.png"),
}
STUDIES = {
    "scaling": (by_hand.scaling_study, {"study_scales.csv", "scaling_efficiency.png"}),
    "comparison": (by_hand.comparison, {"study_variants.csv", "comparison.png"}),
    "stragglers": (by_hand.straggler_study, {"study_iterations.csv", "straggler_distribution.png"}),
}


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_run_has_all_its_files(tmp_path: Path) -> None:
    done = export(by_hand.run_result("study"), tmp_path / "new" / "out", answers(), command="forerun experiment run x")
    written = content(tmp_path / "new" / "out")
    assert set(written) == RUN_FILES == {path.name for path in done.paths}
    assert done.notes == ()
    assert yaml.safe_load(written["study_config.yaml"]) == by_hand.request("study").config
    assert json.loads(written["study_results.json"])["summary"]["num_iterations"] == 400
    told = json.loads(written["study_bottlenecks.json"])
    assert {usage["name"] for usage in told["usages"]} >= {"compute", "memory", "network"}
    assert sum(told["critical_path"]["by_cause_ps"].values()) == told["critical_path"]["step_ps"]
    assert [row["label"] for row in told["sensitivities"]] == [row.label for row in answers().sensitivities]
    assert len(list(csv.DictReader(written["study_iterations.csv"].decode().splitlines()))) == 400
    assert b"forerun experiment run x" in written["report.html"]


@pytest.mark.parametrize("kind", STUDIES)
def test_a_study_has_all_its_files(tmp_path: Path, kind: str) -> None:
    make, own = STUDIES[kind]
    export(make("study"), tmp_path)
    assert set(content(tmp_path)) == {"study_config.yaml", "study_results.json", "report.html"} | own


def test_the_same_result_gives_the_same_bytes(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        export(by_hand.run_result("study"), tmp_path / folder, answers())
    assert content(tmp_path / "one") == content(tmp_path / "two")


def test_the_history_has_every_node_and_opens_as_a_trace(tmp_path: Path) -> None:
    result = run(replace(by_hand.request("study"), num_iterations=2))
    assert export(result, tmp_path, history=True).notes == ()
    with (tmp_path / "study_events.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert tuple(rows[0]) == COLUMNS
    starts = [row for row in rows[1:] if row[2] == "start" and row[4] != "host"]
    assert len(starts) == 2 * len(result.simulation.flat)
    assert max(int(row[1]) for row in rows[1:]) == round(result.total_s * 1e12)
    assert json.loads((tmp_path / "study_events.perfetto.json").read_text())["traceEvents"]


def test_a_full_disk_gives_one_line_and_leaves_earlier_results_whole(tmp_path: Path) -> None:
    export(by_hand.run_result("study"), tmp_path, answers())
    (tmp_path / "notes.txt").write_text("mine")
    before = content(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # the page and the pictures have more bytes
    try:
        with pytest.raises(ForerunError, match=r"can't be written: File too large") as raised:
            export(by_hand.run_result("study", differing=False), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(raised.value)
    assert content(tmp_path) == before


def test_a_file_that_whole_file_can_not_write_is_named_where_it_belongs(tmp_path: Path, monkeypatch) -> None:
    def refuse(path: Path, rows: object) -> None:
        raise ForerunError(f"{path}: can't be written: No space left on device")

    monkeypatch.setattr(experiment_files, "write_rows", refuse)
    with pytest.raises(ForerunError) as raised:
        export(by_hand.scaling_study("study"), tmp_path / "new")
    assert str(raised.value) == f"{tmp_path}/new/study_scales.csv: can't be written: No space left on device"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_can_not_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ForerunError, match="file/out: can't be made a folder: Not a directory"):
        export(by_hand.scaling_study("study"), tmp_path / "file" / "out")


def test_a_folder_in_the_place_of_a_file_is_named_before_anything_is_moved(tmp_path: Path) -> None:
    (tmp_path / "study_scales.csv").mkdir()
    with pytest.raises(ForerunError, match=r"study_scales\.csv: can't be written: it is not a plain file"):
        export(by_hand.scaling_study("study"), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["study_scales.csv"]


def test_what_a_killed_export_left_is_cleared(tmp_path: Path) -> None:
    left = tmp_path / ".forerun-half.tmp"
    left.mkdir()
    (left / "half.png").write_bytes(b"x")
    export(by_hand.comparison("study"), tmp_path)
    assert not left.exists()
    assert not (tmp_path / "half.png").exists()


def test_without_matplotlib_the_other_files_are_written(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(experiment_files, "drawing_is_possible", lambda: False)
    done = export(by_hand.scaling_study("study"), tmp_path)
    assert set(content(tmp_path)) == {"study_config.yaml", "study_results.json", "study_scales.csv", "report.html"}
    (note,) = done.notes
    assert "pip install 'forerun[plot]'" in note
    with pytest.raises(ForerunError, match="pictures need matplotlib"):
        write_pictures(by_hand.scaling_study("study"), tmp_path)


def test_pictures_alone(tmp_path: Path) -> None:
    assert drawing.drawing_is_possible()
    paths = write_pictures(by_hand.run_result("study"), tmp_path)
    assert {path.name for path in paths} == {name for name in RUN_FILES if name.endswith(".png")}


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "a/b", ".hidden", "", "..", by_hand.NASTY, "x" * 999, "名" * 99, "\0"]
)
def test_odd_names_make_safe_files(tmp_path: Path, name: str) -> None:
    safe = file_name(name)
    assert safe
    assert not safe.startswith(".")
    assert not set(safe) & set("/\\\0<>: ")
    assert len(safe.encode()) <= 100
    study = by_hand.comparison("study")
    export(replace(study, request=by_hand.request(name)), tmp_path / "out")
    assert (tmp_path / "out" / f"{safe}_results.json").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
