"""Reads the CSV files of a user's measurements (docs/cli.md); an error names the file, the line and the column."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from forerun.common.admission import cells_of, read_text
from forerun.common.errors import ForerunError
from forerun.common.units import GIGA, US
from forerun.core.cost.measured import ANY, CollectiveShape, Curve, GemmShape, KernelProfile, Measured, NetworkProfile
from forerun.core.program.types import Collective

KERNEL_COLUMNS = (
    *("kind", "time_us", "dtype", "m", "n", "k", "batch", "heads", "kv_heads", "seq_q", "seq_kv", "head_dim"),
    *("v_head_dim", "causal", "backward", "kernel", "bytes", "op", "layout"),
)
NETWORK_COLUMNS = ("collective", "ranks", "stride", "bytes", "time_us", "algbw_gb_per_s")
_DTYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    **{name: name for name in ("bf16", "fp16", "fp32", "tf32", "fp8", "mxfp8", "nvfp4")},
}
_LAYOUTS = {"forward": 0, "dgrad": 1, "wgrad": 2}
_FLAGS = {"1": 1, "true": 1, "yes": 1, "0": 0, "false": 0, "no": 0}
_COLLECTIVES = {kind.name.lower(): kind for kind in Collective if kind != Collective.NONE}

_MOST = 2**62
"""largest whole number that a cell may hold"""

Choice = TypeVar("Choice")
Key = TypeVar("Key")


def read_measured(kernel_profile: str | Path | None, network_profile: str | Path | None) -> Measured | None:
    """Reads both files, or the one that is given; returns None without any.

    Raises:
        ForerunError: a file can't be read or holds something wrong; the message names the line and the column.
    """
    if kernel_profile is None and network_profile is None:
        return None
    return Measured(
        kernels=None if kernel_profile is None else read_kernel_profile(kernel_profile),
        network=None if network_profile is None else read_network_profile(network_profile),
    )


def read_kernel_profile(path: str | Path) -> KernelProfile:
    """Reads times of kernels by shape from a CSV file. Raises ForerunError as `read_measured`."""
    gemm: _Once[GemmShape] = _Once()
    attention: _Once[tuple[str, tuple[int, ...]]] = _Once()
    layouts: _Once[tuple[int, GemmShape]] = _Once()
    memory: _Once[tuple[str, float]] = _Once()
    host: _Once[tuple[str, float]] = _Once()
    for row in _rows(Path(path), KERNEL_COLUMNS, ("kind", "time_us")):
        time_s = row.number("time_us") * US
        kind = row.choice("kind", {name: name for name in ("gemm", "attention", "memory", "host_copy")})
        if kind == "gemm":
            m, n, k = (row.count(column) for column in ("m", "n", "k"))
            product = (row.choice("dtype", _DTYPES), m, n, k, row.count("batch", 1))
            if row.has("layout"):
                layouts.add(row, (row.choice("layout", _LAYOUTS), product), time_s)
            else:
                gemm.add(row, product, time_s)
        elif kind == "attention":
            shape = [row.count(c) for c in ("batch", "heads", "kv_heads", "seq_q", "seq_kv", "head_dim")]
            shape += [row.choice("causal", _FLAGS), row.choice("backward", _FLAGS), row.count("v_head_dim", shape[-1])]
            attention.add(row, (row.text("kernel", ANY), tuple(shape)), time_s)
        else:
            curve = memory if kind == "memory" else host
            curve.add(row, (row.text("op", ANY) if kind == "memory" else ANY, row.number("bytes")), time_s)
    return KernelProfile(
        gemm.values, attention.values, _curves(memory.values), layouts.values, _curves(host.values).get(ANY)
    )


def read_network_profile(path: str | Path) -> NetworkProfile:
    """Reads times of collectives by kind, ranks and stride from a CSV file. Raises ForerunError as `read_measured`."""
    points: _Once[tuple[CollectiveShape, float]] = _Once()
    for row in _rows(Path(path), NETWORK_COLUMNS, ("collective", "ranks", "bytes")):
        kind = row.choice("collective", _COLLECTIVES)
        ranks, size = row.count("ranks"), row.number("bytes")
        if ranks < 2:
            raise row.wrong("ranks", "at least 2")
        if row.has("time_us"):
            time_s = row.number("time_us") * US
        elif row.has("algbw_gb_per_s"):
            time_s = size / (row.number("algbw_gb_per_s") * GIGA)
        else:
            raise row.error("column time_us: give a time, or the algorithm bandwidth in algbw_gb_per_s")
        points.add(row, ((kind, ranks, row.count("stride", 1)), size), time_s)
    return NetworkProfile(_curves(points.values))


def _curves(points: Mapping[tuple[Key, float], float]) -> dict[Key, Curve]:
    """Returns a curve, in rising order of bytes, through the points of each key."""
    sorted_points: dict[Key, list[tuple[float, float]]] = {}
    for (key, size), time_s in sorted(points.items(), key=lambda item: item[0][1]):
        sorted_points.setdefault(key, []).append((size, time_s))
    return {
        key: Curve(tuple(size for size, _ in found), tuple(time_s for _, time_s in found))
        for key, found in sorted_points.items()
    }


class _Once(Generic[Key]):
    """Values by key; a key may be given only once."""

    def __init__(self) -> None:
        self.values: dict[Key, float] = {}
        self._lines: dict[Key, int] = {}

    def add(self, row: _Row, key: Key, value: float) -> None:
        """Adds a value. Raises ForerunError for a key that was given before."""
        if key in self.values:
            raise row.error(f"the same measurement as line {self._lines[key]}; keep one of them, or their median")
        self._lines[key] = row.line
        self.values[key] = value


@dataclass(frozen=True, slots=True)
class _Row:
    """One line of a file; cells are read by column."""

    path: Path
    line: int
    cells: Mapping[str, str]

    def error(self, problem: str) -> ForerunError:
        return ForerunError(f"{self.path}, line {self.line}: {problem}")

    def wrong(self, column: str, expected: str) -> ForerunError:
        if not self.has(column):
            return self.error(f"column {column} is missing or empty: expected {expected}")
        return self.error(f"column {column}: expected {expected}, got {self.cells[column]!r}")

    def has(self, column: str) -> bool:
        return bool(self.cells.get(column))

    def text(self, column: str, default: str) -> str:
        return self.cells.get(column) or default

    def number(self, column: str) -> float:
        """Returns the cell as a finite number above 0."""
        try:
            value = float(self.cells.get(column, ""))
        except ValueError:
            value = math.nan
        if not (0 < value < math.inf):
            raise self.wrong(column, "a number above 0")
        return value

    def count(self, column: str, default: int | None = None) -> int:
        """Returns the cell as a whole number above 0; `default` for an empty cell."""
        if default is not None and not self.has(column):
            return default
        try:
            value = int(self.cells.get(column, ""))
        except ValueError:
            value = 0
        if not 0 < value < _MOST:
            raise self.wrong(column, "a whole number above 0")
        return value

    def choice(self, column: str, choices: Mapping[str, Choice]) -> Choice:
        """Returns the value in `choices` that the cell names. Case and dashes do not matter."""
        value = self.cells.get(column, "").lower().replace("-", "_")
        if value not in choices:
            raise self.wrong(column, f"one of {', '.join(choices)}")
        return choices[value]


def _rows(path: Path, known: Sequence[str], needed: Sequence[str]) -> Iterator[_Row]:
    """Yields the lines of a CSV file with a header, without empty ones and those that start with #."""
    text = read_text(path)
    header: list[str] | None = None
    n_rows = 0
    for line, raw in enumerate(text.splitlines(), 1):
        if not raw.strip() or raw.lstrip().startswith("#"):
            continue
        cells = _cells(path, line, raw)
        if header is None:
            header = _header(path, line, cells, known, needed)
            continue
        if len(cells) != len(header):
            raise ForerunError(f"{path}, line {line}: {len(cells)} cells under {len(header)} columns")
        n_rows += 1
        yield _Row(path, line, dict(zip(header, cells, strict=True)))
    if n_rows == 0:
        raise ForerunError(f"{path}: no measurements; the columns are {', '.join(known)}")


def _cells(path: Path, line: int, raw: str) -> list[str]:
    return [cell.strip() for cell in cells_of(raw, f"{path}, line {line}")]


def _header(path: Path, line: int, cells: list[str], known: Sequence[str], needed: Sequence[str]) -> list[str]:
    for column in cells:
        if column not in known:
            raise ForerunError(f"{path}, line {line}: unknown column {column!r}; known: {', '.join(known)}")
    twice = [column for column in cells if cells.count(column) > 1]
    if twice:
        raise ForerunError(f"{path}, line {line}: column {twice[0]} is given twice")
    missing = [column for column in needed if column not in cells]
    if missing:
        raise ForerunError(f"{path}, line {line}: column {missing[0]} is missing")
    return cells
