"""The rows of an exploration as CSV and Parquet files, which appear whole or not at all."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from forerun.dse.result import Row
from forerun.files import whole_file

CSV_NAME = "results.csv"
PARQUET_NAME = "results.parquet"
_TEXTS = ("workload", "system", "status", "error")
_FLAGS = ("weight_sharded", "activation_recompute", "fits")


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """One line a point; what is not known is empty, flags are true and false.

    Raises ForerunError where the file can't be written.
    """
    with whole_file(path) as binary, io.TextIOWrapper(binary, encoding="utf-8", newline="") as file:
        flat = [row.flat() for row in rows]
        writer = csv.DictWriter(file, list(flat[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in row.items()} for row in flat)


def _cell(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else "" if value is None else value


def parquet_is_possible() -> bool:
    """Whether pyarrow is installed."""
    return find_spec("pyarrow") is not None


def write_parquet(path: Path, rows: Sequence[Row]) -> None:
    """The same with types; what is not known is null.

    Raises ForerunError where the file can't be written.
    """
    import pyarrow
    import pyarrow.parquet

    flat = [row.flat() for row in rows]
    schema = pyarrow.schema([(name, _arrow_type(pyarrow, name)) for name in flat[0]])
    with whole_file(path) as file:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(flat, schema=schema), file)


def _arrow_type(pyarrow: Any, name: str) -> Any:
    if name in _TEXTS:
        return pyarrow.string()
    if name in _FLAGS:
        return pyarrow.bool_()
    is_mean = name.endswith(("_pct", "_gib")) or name == "avg_op_intensity"
    return pyarrow.float64() if is_mean else pyarrow.int64()
