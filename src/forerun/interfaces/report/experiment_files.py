"""The files of a run or a study: configuration, results, tables, pictures and the page; all of them or none.

Files are first written to a temporary folder and moved only when all of them are complete, so a full disk leaves
earlier results unchanged. The same result gives the same files.
"""

from __future__ import annotations

import csv
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import yaml

from forerun.answers.analysis.history import COLUMNS, History
from forerun.answers.experiment.records import plain, study_record
from forerun.answers.experiment.result import Comparison, RunResult, ScalingStudy, StragglerStudy
from forerun.answers.experiment.run_history import run_history
from forerun.common.errors import ForerunError
from forerun.common.files import TEMPORARY, make_folder
from forerun.interfaces.report.documents_of_runs import bottlenecks_of, run_document
from forerun.interfaces.report.documents_of_studies import comparison_document, scaling_document, straggler_document
from forerun.interfaces.report.drawing import drawing_is_possible
from forerun.interfaces.report.page import Document, page
from forerun.interfaces.report.perfetto import write_run_trace
from forerun.interfaces.report.pictures_of_results import Pictures, run_pictures, study_pictures
from forerun.interfaces.report.written import to_json, write_rows

if TYPE_CHECKING:
    from forerun.answers.experiment.answers import Answers

Result: TypeAlias = RunResult | ScalingStudy | Comparison | StragglerStudy
PAGE = "report.html"
_LONGEST_NAME = 100
_PIECES = 100
"""pieces of the critical path that are written"""
_OF_ADVICE = ("kind", "aim", "title", "text", "change", "gain", "before", "after", "caveat")


@dataclass(frozen=True, slots=True)
class Exported:
    """The files that an export wrote."""

    folder: Path
    paths: list[Path]
    notes: tuple[str, ...]
    """the files that are missing and why, one line each"""


def export(
    result: Result, folder: str | Path, answers: Answers | None = None, *, history: bool = False, command: str = ""
) -> Exported:
    """Writes the files of `result` into `folder`, and makes the folder if it is missing.

    `{name}_config.yaml`, `{name}_results.json`, a CSV table, pictures and report.html; of a run with `answers` also
    `{name}_bottlenecks.json`, with `history` every event of its first iterations as CSV and as a Perfetto trace.
    Without matplotlib there are no pictures; `notes` say so.

    Args:
        command: the command line that repeats the study, for the page.

    Raises ForerunError if the files can't be written; those that were there are as they were.
    """
    place, name = Path(folder), file_name(result.request.name)
    with _stage(place) as stage:
        _tables(stage, name, result, answers)
        notes = tuple(_shown(stage, result, answers, command))
        if history and isinstance(result, RunResult):
            notes += _history(stage, name, result)
        return Exported(place, _move(stage, place), notes)


def write_pictures(result: Result, folder: str | Path, answers: Answers | None = None) -> list[Path]:
    """Writes the pictures of `result` into `folder`, all or none; returns their paths.

    Raises ForerunError if matplotlib is not installed, or the files can't be written.
    """
    if not drawing_is_possible():
        raise ForerunError("pictures need matplotlib: pip install 'forerun[plot]'")
    place = Path(folder)
    with _stage(place) as stage:
        for name, draw in _pictures(result, answers).items():
            (stage / f"{name}.png").write_bytes(draw())
        return _move(stage, place)


def file_name(name: str) -> str:
    """Returns `name` as the beginning of a file name: letters, digits, `-`, `_` and `.` stay, other characters become
    `_`."""
    kept = "".join(each if each.isalnum() or each in "-_." else "_" for each in name).lstrip(".")
    short = kept.encode()[:_LONGEST_NAME].decode(errors="ignore")
    return short or "experiment"


def document_of(result: Result, answers: Answers | None = None, command: str = "") -> Document:
    """Returns the contents of the page of a run or a study."""
    if isinstance(result, RunResult):
        return run_document(result, answers, command)
    if isinstance(result, ScalingStudy):
        return scaling_document(result, command)
    return (
        comparison_document(result, command) if isinstance(result, Comparison) else straggler_document(result, command)
    )


# -- what is written ---------------------------------------------------------------------------------------------------


def _tables(stage: Path, name: str, result: Result, answers: Answers | None) -> None:
    """Writes configuration, results and rows, for other programs to read."""
    config = yaml.safe_dump(result.request.config, sort_keys=False, allow_unicode=True, width=100)
    (stage / f"{name}_config.yaml").write_text(config, encoding="utf-8")
    (stage / f"{name}_results.json").write_text(to_json(study_record(result)) + "\n", encoding="utf-8")
    write_rows(stage / f"{name}_{_rows_are(result)}.csv", result.to_rows())
    if answers is not None:
        (stage / f"{name}_bottlenecks.json").write_text(to_json(answers_record(answers)) + "\n", encoding="utf-8")


def _rows_are(result: Result) -> str:
    if isinstance(result, ScalingStudy):
        return "scales"
    return "variants" if isinstance(result, Comparison) else "iterations"


def answers_record(answers: Answers) -> dict[str, Any]:
    """Returns bottlenecks, critical path, sensitivities and advice as plain data."""
    path = answers.path
    return {
        "bottlenecks": [usage.name for usage in answers.bottlenecks.found],
        **plain(answers.bottlenecks),
        "critical_path": {
            "step_ps": path.step_ps,
            "by_cause_ps": path.by_cause_ps,
            "by_class_ps": path.by_class_ps,
            "contributors": plain(path.contributors[:_PIECES]),
        },
        "sensitivities": plain(answers.sensitivities),
        "advice": [{name: plain(getattr(each, name)) for name in _OF_ADVICE} for each in answers.advice],
    }


def _shown(stage: Path, result: Result, answers: Answers | None, command: str) -> Iterator[str]:
    """Writes pictures and the page, and yields a line where pictures are impossible."""
    if drawing_is_possible():
        for name, draw in _pictures(result, answers).items():
            (stage / f"{name}.png").write_bytes(draw())
    else:
        yield "no pictures: they need matplotlib; pip install 'forerun[plot]'"
    (stage / PAGE).write_bytes(page(document_of(result, answers, command)))


def _pictures(result: Result, answers: Answers | None) -> Pictures:
    """Returns the maker of each picture by its name."""
    if isinstance(result, RunResult):
        return run_pictures(result, bottlenecks_of(result, answers).usages)
    return study_pictures(result)


def _history(stage: Path, name: str, result: RunResult) -> tuple[str, ...]:
    """Writes every event as a table and as a trace. Returns notes on missing events."""
    history = run_history(result)
    with (stage / f"{name}_events.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(History(history.iterations).rows())
    trace = stage / f"{name}_events.perfetto.json"
    write_run_trace(trace, history.iterations, result.simulation.program.meta)
    return (history.note,) if history.note else ()


# -- all or none -------------------------------------------------------------------------------------------------------


@contextmanager
def _stage(folder: Path) -> Iterator[Path]:
    """Yields a temporary empty folder inside `folder`. An OSError while it is in use becomes a ForerunError."""
    is_new = not folder.exists()
    make_folder(folder)
    for left in folder.glob(TEMPORARY):  # an export that was killed left it
        shutil.rmtree(left, ignore_errors=True)
    try:
        stage = Path(tempfile.mkdtemp(prefix=".forerun-", suffix=".tmp", dir=folder))
    except OSError as error:
        raise ForerunError(f"{folder}: can't be written: {error.strerror or error}") from None
    try:
        yield stage
    except OSError as error:
        raise ForerunError(f"{folder}: can't be written: {error.strerror or error}") from None
    except ForerunError as error:
        raise ForerunError(str(error).replace(f"{stage}/", f"{folder}/")) from None
    finally:
        shutil.rmtree(stage, ignore_errors=True)
        if is_new:
            with suppress(OSError):  # the folder is not empty
                folder.rmdir()


def _move(stage: Path, folder: Path) -> list[Path]:
    """Moves the files of `stage` into `folder`."""
    names: Sequence[str] = sorted(path.name for path in stage.iterdir())
    for name in names:
        if os.path.lexists(folder / name) and ((folder / name).is_symlink() or not (folder / name).is_file()):
            raise ForerunError(f"{folder / name}: can't be written: it is not a plain file; remove it")
    for name in names:
        (stage / name).replace(folder / name)
    return [folder / name for name in names]
