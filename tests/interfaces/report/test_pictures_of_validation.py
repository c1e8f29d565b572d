"""Pictures of a validation run are whole PNG files, the same for the same rows, and none is drawn of nothing."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from forerun.answers.analysis.predict import predict
from forerun.answers.analysis.prediction import Prediction
from forerun.common.errors import ForerunError
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan
from forerun.evidence.validation import metrics
from forerun.evidence.validation.rows import Measurement
from forerun.evidence.validation.run import RowResult
from forerun.interfaces.report import pictures_of_validation
from forerun.interfaces.report.pictures_of_validation import validation_pictures, write_validation_pictures

NAMES = {"step_time", "residuals_by_device", "residuals_by_class", "residuals_by_gpus", "memory"}
GPUS = ("H100-SXM", "A100-SXM", r"an $\frac GPU of a name that is much longer than others")


@pytest.fixture(scope="module")
def made() -> Prediction:
    return predict(load_model("gpt2-small"), Plan(seq_len=1024, dp_shard=8), load_cluster("h100-sxm"))


def row(**cells: object) -> Measurement:
    nothing = {
        name: None if "None" in str(field.type) else "" for name, field in Measurement.__dataclass_fields__.items()
    }
    fixed = {"line": 2, "tier": "A", "outcome": "ok", "gpu": "H100-SXM", "n_gpus": 8, "zero_stage": 3}
    return Measurement(**{**nothing, **fixed, **cells})  # type: ignore[arg-type]


def many(made: Prediction, count: int = 60) -> list[RowResult]:
    dice = random.Random(1)
    out = []
    for number in range(count):
        time, memory = dice.lognormvariate(0, 2), dice.lognormvariate(3, 1)
        cells = {
            "id": f"row-{number}",
            "tier": "AB"[number % 2],
            "gpu": GPUS[number % 3],
            "step_time_s": time,
            "peak_mem_gib": memory,
            "peak_mem_kind": ("allocated", "reserved", "nvidia-smi")[number % 3],
            "tp": 1 + number % 2,
            "is_moe": number % 7 == 0,
        }
        off = dice.lognormvariate(0, 0.5)
        found = replace(made, step_time_s=time * off, peak_allocated_gib=memory * off, peak_reserved_gib=memory * off)
        out.append(RowResult(row(**cells), prediction=found))
    return out


def is_whole(png: bytes) -> bool:
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    kinds, at = [], 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        kind, body = png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        assert struct.unpack(">I", png[at + 8 + length : at + 12 + length])[0] == zlib.crc32(kind + body)
        kinds.append(kind)
        at += 12 + length
    return kinds[0] == b"IHDR" and kinds[-1] == b"IEND" and b"tIME" not in kinds


def test_every_picture_is_written_whole_and_the_same_each_time(made: Prediction, tmp_path: Path) -> None:
    results = many(made)
    written = write_validation_pictures(tmp_path / "new" / "pictures", results)
    assert {path.stem for path in written} == NAMES
    assert {path.name for path in (tmp_path / "new" / "pictures").iterdir()} == {f"{name}.png" for name in NAMES}
    again = validation_pictures(results)
    for path in written:
        content = path.read_bytes()
        assert is_whole(content), path.name
        assert content == again[path.stem]
        assert len(content) < 200_000


@pytest.mark.parametrize(
    ("change", "left"),
    [
        ({"step_time_s": None}, {"memory"}),
        ({"peak_mem_gib": None}, NAMES - {"memory"}),
        ({"outcome": "oom"}, set()),
        ({"tier": "C", "peak_mem_gib": None}, set()),
    ],
    ids=["no times", "no memory", "out of memory", "not compared"],
)
def test_a_picture_of_nothing_is_left_out(made: Prediction, change: dict[str, object], left: set[str]) -> None:
    results = [replace(each, row=replace(each.row, **change)) for each in many(made, 12)]  # type: ignore[arg-type]
    assert set(validation_pictures(results)) == left


def test_every_row_is_a_point_at_its_measured_and_predicted_value(
    made: Prediction, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = []
    monkeypatch.setattr(pictures_of_validation, "png", lambda figure: figures.append(figure) or b"")
    results = many(made, 24)
    names = list(validation_pictures(results))
    for name, kinds, predicted in (
        ("step_time", {"allocated", "reserved", "nvidia-smi"}, lambda one: one.prediction.step_time_s),
        ("memory", {"allocated", "reserved"}, lambda one: one.prediction.peak_reserved_gib),
    ):
        drawn = {
            (x, y)
            for axes in figures[names.index(name)].axes
            for line in axes.lines
            if line.get_linestyle() == "None"
            for x, y in zip(*line.get_data(), strict=True)
        }
        rows = [each for each in results if each.row.peak_mem_kind in kinds]
        measured = [each.row.step_time_s if name == "step_time" else each.row.peak_mem_gib for each in rows]
        assert drawn == {(value, predicted(each)) for value, each in zip(measured, rows, strict=True)}


def test_a_picture_names_its_axes_and_its_parts(made: Prediction, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = []
    monkeypatch.setattr(pictures_of_validation, "png", lambda figure: figures.append(figure) or b"")
    names = list(validation_pictures(many(made, 24)))
    said = {
        name: [(axes.get_title(loc="left"), axes.get_xlabel(), axes.get_ylabel()) for axes in figure.axes]
        for name, figure in zip(names, figures, strict=True)
    }
    error = "predicted / measured step time - 1, %; beyond 60 at the edge"
    assert said == {
        "step_time": [
            ("tier A: all inputs stated", "measured step time, s", "predicted step time, s"),
            ("tier B: some inputs assumed", "measured step time, s", ""),
        ],
        "residuals_by_device": [("Errors by device (rows of tiers A + B)", error, "")],
        "residuals_by_class": [("Errors by parallelism (rows of tiers A + B)", error, "")],
        "residuals_by_gpus": [("Errors by number of GPUs (rows of tiers A + B)", error, "")],
        "memory": [("allocated peak memory", "measured, GiB", "predicted, GiB"),
                   ("reserved peak memory", "measured, GiB", "")],
    }  # fmt: skip


class Drawn:
    """Axes that keep what is drawn."""

    def __init__(self) -> None:
        self.lines: list[tuple[list[float], list[float]]] = []

    def plot(self, x: Sequence[float], y: Sequence[float], *_: object, **__: object) -> None:
        self.lines.append(([round(each, 6) for each in x], [round(each, 6) for each in y]))


def test_errors_are_a_strip_and_a_box() -> None:
    strip, box, none = Drawn(), Drawn(), Drawn()
    pictures_of_validation._strip(strip, 2.0, [0.7, -0.1, -0.9, 0.2, 0.3, 0.4, 0.5, 0.6], "c", "f")
    x, y = strip.lines[0]
    assert x == [-60.0, -10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 60.0]
    assert y[:7] == [1.85, 2.0, 2.15, 1.95, 2.1, 1.9, 2.05]
    assert y[7] == y[0]
    pictures_of_validation._box(box, 1.0, [each / 10 - 0.4 for each in range(11)])
    assert box.lines == [([-30.0, 50.0], [1, 1]), ([-15.0, 35.0], [1, 1]), ([10.0], [1])]
    pictures_of_validation._box(none, 1.0, [0.1] * (metrics.MIN_GROUP - 1))
    assert none.lines == []


def test_rows_without_a_prediction_are_no_points(made: Prediction) -> None:
    results = many(made, 12)
    without: Sequence[RowResult] = [*results, RowResult(row(id="x", step_time_s=1.0), reason="no such model")]
    assert validation_pictures(without) == validation_pictures(results)


def test_bad_folders_and_a_missing_library_are_told(
    made: Prediction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ForerunError, match=r"file: can't be made a folder: File exists"):
        write_validation_pictures(tmp_path / "file", many(made, 4))
    monkeypatch.setattr(pictures_of_validation, "drawing_is_possible", lambda: False)
    with pytest.raises(ForerunError, match=r"--plots needs matplotlib: pip install 'forerun\[plot\]'"):
        write_validation_pictures(tmp_path / "none", many(made, 4))
    assert not (tmp_path / "none").exists()
