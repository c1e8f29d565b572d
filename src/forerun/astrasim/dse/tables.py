"""Writes the rows of an exploration as CSV, Parquet and JSON files, which appear whole or not at all."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from forerun.astrasim.dse.points import key_of
from forerun.astrasim.dse.result import PairResult, Row
from forerun.common.files import whole_file

CSV_NAME = "results.csv"
PARQUET_NAME = "results.parquet"
_TEXTS = ("workload", "system", "status", "error")
_FLAGS = ("weight_sharded", "activation_recompute", "fits")


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Writes a line for each point; unknown values are empty, flags are true or false.

    Raises ForerunError if the file can't be written.
    """
    with whole_file(path) as file:
        file.write(_csv([row.flat() for row in rows]))


def _csv(flat: Sequence[dict[str, Any]]) -> bytes:
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, list(flat[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in flat)
    return file.getvalue().encode()


def metrics_name(workload: str, system: str) -> str:
    """Returns the file name of a pair's metrics, with an underscore for each character that files can't have."""
    return re.sub(r"[^\w.+-]", "_", f"{workload}_{system}") + ".json"


def write_metrics(path: Path, pair: PairResult) -> None:
    """Writes the metrics of rank 0 of every simulated point, by `dp_tp_sp_pp_ar`, as one JSON object.

    Times are in ns, memory in the trace's bytes. Raises ForerunError if the file can't be written.
    """
    metrics = {key_of(row.point.strategy): _metrics(row) for row in pair.rows if row.figures}
    with whole_file(path) as binary, io.TextIOWrapper(binary, encoding="utf-8") as file:
        json.dump(metrics, file, indent=4)


def _metrics(row: Row) -> dict[str, Any]:
    assert row.figures
    rank_0, split = row.figures.rank_0, row.point.strategy
    return {
        "wall_time": rank_0.wall_time,
        "gpu_time": rank_0.gpu_time,
        "comm_time": rank_0.comm_time,
        "per_comp_bound": rank_0.compute_bound_pct,
        "comp_util": rank_0.avg_compute_util_pct,
        "mem_util": rank_0.avg_mem_util_pct,
        "op_intensity": rank_0.avg_op_intensity,
        "peak_memory_usage": rank_0.peak_memory_bytes,
        **{axis: getattr(split, axis) for axis in ("dp", "tp", "sp", "pp")},
        "ar": int(split.activation_recompute),
    }


def _cell(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else "" if value is None else value


def parquet_is_possible() -> bool:
    """Returns whether pyarrow is installed."""
    return find_spec("pyarrow") is not None


def write_parquet(path: Path, rows: Sequence[Row]) -> None:
    """Writes the rows of `write_csv` with types; unknown values are null.

    Raises ForerunError if the file can't be written.
    """
    import pyarrow
    import pyarrow.csv
    import pyarrow.parquet

    flat = [row.flat() for row in rows]
    types = {name: _arrow_type(pyarrow, name) for name in flat[0]}
    # Arrow imports pandas for values of Python, which takes half a second, and not for those of a CSV.
    converted = pyarrow.csv.ConvertOptions(column_types=types, null_values=[""])
    lines = pyarrow.csv.ParseOptions(newlines_in_values=True)
    table = pyarrow.csv.read_csv(io.BytesIO(_csv(flat)), parse_options=lines, convert_options=converted)
    with whole_file(path) as file:
        pyarrow.parquet.write_table(table, file)


def _arrow_type(pyarrow: Any, name: str) -> Any:
    if name in _TEXTS:
        return pyarrow.string()
    if name in _FLAGS:
        return pyarrow.bool_()
    is_mean = name.endswith(("_pct", "_gib")) or name == "avg_op_intensity"
    return pyarrow.float64() if is_mean else pyarrow.int64()
