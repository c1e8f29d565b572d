"""Reading a measurement table: types, and one clear line for everything that can be wrong with it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
from measured_rows import ROW, measurement, write_rows

from forerun.common.errors import ForerunError
from forerun.evidence.validation.rows import Measurement, read_measurements


def test_cells_become_typed_values(tmp_path: Path) -> None:
    row = measurement(tmp_path, sp="yes", zero_stage="", step_time_s="2.25", notes="as printed")
    assert (row.n_gpus, row.sp, row.is_moe, row.zero_stage) == (16, True, False, None)
    assert (row.step_time_s, row.tokens_per_s_per_gpu, row.gpu, row.notes) == (2.25, None, "H100-SXM", "as printed")
    assert row.line == 2


def test_columns_that_only_document_may_be_absent(tmp_path: Path) -> None:
    assert {"provenance", "mfu_pct"}.isdisjoint(ROW)
    row = measurement(tmp_path)
    assert row.provenance == ""
    assert row.mfu_pct is None


def test_a_file_with_a_byte_order_mark_and_unknown_columns_is_read(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.csv")
    text = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\ufeff" + "".join(f"{line},extra\n" for line in text), encoding="utf-8")
    assert read_measurements(path)[0].id == "row-1"


@pytest.mark.parametrize(
    ("column", "cell", "message"),
    [
        ("n_gpus", "many", "line 2: n_gpus is 'many', expected a whole number"),
        ("n_gpus", "8.5", "line 2: n_gpus is '8.5', expected a whole number"),
        ("dp_shard", "-4", "line 2: dp_shard is '-4', expected a whole number"),
        ("n_layers", "inf", "line 2: n_layers is 'inf', expected a whole number"),
        ("step_time_s", "fast", "line 2: step_time_s is 'fast', expected a positive number"),
        ("step_time_s", "0", "line 2: step_time_s is '0', expected a positive number"),
        ("peak_mem_gib", "nan", "line 2: peak_mem_gib is 'nan', expected a positive number"),
        ("is_moe", "maybe", "line 2: is_moe is 'maybe', expected yes or no"),
        ("tier", "D", "line 2: tier is 'D', expected one of A, B, C"),
        ("outcome", "", "line 2: outcome is '', expected one of ok, oom"),
        ("zero_stage", "4", "line 2: zero_stage is '4', expected one of 0, 1, 2, 3"),
        ("id", "", "line 2: empty id"),
    ],
)
def test_a_bad_cell_is_named_with_its_line(tmp_path: Path, column: str, cell: str, message: str) -> None:
    path = write_rows(tmp_path / "rows.csv", {column: cell})
    with pytest.raises(ForerunError) as error:
        read_measurements(path)
    assert message in str(error.value)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("column", ["tier", "seq_len", "gpu", "outcome"])
def test_a_missing_column_is_named(tmp_path: Path, column: str) -> None:
    path = write_rows(tmp_path / "rows.csv")
    path.write_text(path.read_text().replace(column, f"{column}_renamed", 1))
    with pytest.raises(ForerunError, match=rf"line 1: the header lacks column\(s\) {column}$"):
        read_measurements(path)


def test_every_required_column_is_in_the_sample() -> None:
    assert set(ROW) < {field.name for field in fields(Measurement)}


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.csv", {}, {})
    path.write_text(path.read_text()[:-60])
    with pytest.raises(ForerunError, match=r"line 3: fewer cells"):
        read_measurements(path)


def test_a_file_cut_inside_a_quoted_cell_is_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.csv", {}, {"notes": "one, two, three"})
    path.write_text(path.read_text()[:-8])
    with pytest.raises(ForerunError, match=r"line 3: not CSV: .*cut short"):
        read_measurements(path)


def test_a_repeated_id_names_both_lines(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.csv", {"id": "same"}, {}, {"id": "same"})
    with pytest.raises(ForerunError, match=r"line 4: id 'same' was already given on line 2"):
        read_measurements(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty file"),
        (",".join(ROW).encode() + b"\n", "a header but no rows"),
        (b"id,id\n1,2\n", "column 'id' appears twice"),
        (b"\xff\xfe\x00", "not UTF-8"),
    ],
)
def test_files_that_hold_no_table_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(content)
    with pytest.raises(ForerunError, match=message):
        read_measurements(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ForerunError, match=r"absent.csv: can't be read: No such file"):
        read_measurements(tmp_path / "absent.csv")
