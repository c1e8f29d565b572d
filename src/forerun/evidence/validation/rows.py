"""Measurement: one measured training run, read from a row of a CSV file."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path

from forerun.common.admission import read_rows
from forerun.common.errors import ForerunError

Cell = str | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One row. None or an empty text means that the source does not state the figure.

    Columns without a default must be in the header; the others may be left out of a file. Sizes are in GiB or GB as
    the name says, times in seconds, networks in Gbit/s per GPU.
    """

    line: int
    """line of the file at which the row ends"""
    id: str
    tier: str
    """A: complete; B: an input is assumed; C: for trends only"""
    source_id: str
    framework: str
    model: str
    n_layers: int | None
    hidden: int | None
    n_heads: int | None
    n_kv_heads: int | None
    head_dim: int | None
    ffn_hidden: int | None
    mlp: str
    vocab: int | None
    seq_len: int | None
    is_moe: bool | None
    gpu: str
    gpu_mem_gb: float | None
    n_gpus: int | None
    gpus_per_node: int | None
    inter_node_gbit_s_per_gpu: float | None
    dp_replicate: int | None
    dp_shard: int | None
    zero_stage: int | None
    tp: int | None
    pp: int | None
    cp: int | None
    micro_batch: int | None
    n_microbatches: int | None
    global_batch_seqs: int | None
    precision: str
    activation_checkpointing: str
    outcome: str
    """ok or oom"""

    split: str = ""
    provenance: str = ""
    source_label: str = ""
    software: str = ""
    n_params_source: float | None = None
    intra_node: str = ""
    hw_key: str = ""
    sp: bool | None = None
    pp_schedule: str = ""
    pp_virtual_stages: int | None = None
    ep: int | None = None
    grad_accum: int | None = None
    param_dtype: str = ""
    grad_reduce_dtype: str = ""
    fp8_recipe: str = ""
    async_tp: bool | None = None
    ac_detail: str = ""
    torch_compile: str = ""
    attention_kernel: str = ""
    optimizer: str = ""
    cpu_offload: str = ""
    step_time_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    mfu_pct: float | None = None
    hfu_pct: float | None = None
    peak_mem_gib: float | None = None
    peak_mem_kind: str = ""
    flops_convention: str = ""
    step_time_s_derived: float | None = None
    notes: str = ""


def _whole(text: str) -> int:
    value = float(text)
    if value != int(value) or value < 0:
        raise ValueError("a whole number, 0 or more")
    return int(value)


def _positive(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or value <= 0:
        raise ValueError("a positive number")
    return value


_PARSERS: dict[str, tuple[Callable[[str], Cell], str]] = {
    "int | None": (_whole, "a whole number, 0 or more"),
    "float | None": (_positive, "a positive number"),
    "bool | None": ({"yes": True, "no": False}.__getitem__, "yes or no"),
}
TIERS = ("A", "B", "C")
"""how much of what a simulation needs a row states: all of it, most, or only enough for a trend"""
_CHOICES = {"tier": TIERS, "outcome": ("ok", "oom"), "zero_stage": (0, 1, 2, 3, None)}
_COLUMNS = [field for field in fields(Measurement) if field.name != "line"]
_REQUIRED = [field.name for field in _COLUMNS if field.default is MISSING]


def read_measurements(path: str | Path) -> list[Measurement]:
    """Returns every row of the CSV file `path`, in its order.

    Raises ForerunError, which names file and line, for a missing file or column, a row with too few or too many cells,
    a cell of the wrong type, a repeated id, or a file cut short.
    """
    rows: list[Measurement] = []
    lines: dict[str, int] = {}
    table = read_rows(path)
    header = [name.strip() for name in next(table, (1, []))[1]]
    _check_header(path, header)
    for line, cells in table:
        row = _parse(f"{path} line {line}", header, cells, line)
        if row.id in lines:
            raise ForerunError(f"{path} line {line}: id {row.id!r} was already given on line {lines[row.id]}")
        lines[row.id] = line
        rows.append(row)
    if not rows:
        raise ForerunError(f"{path}: the file has a header but no rows; add one")
    return rows


def _check_header(path: str | Path, header: list[str]) -> None:
    if not header:
        raise ForerunError(f"{path}: empty file, expected a header line")
    repeated = [name for name, count in Counter(header).items() if count > 1]
    if repeated:
        raise ForerunError(f"{path} line 1: column {repeated[0]!r} appears twice in the header")
    missing = [name for name in _REQUIRED if name not in header]
    if missing:
        raise ForerunError(f"{path} line 1: the header lacks column(s) {', '.join(missing)}")


def _parse(place: str, header: list[str], cells: list[str], line: int) -> Measurement:
    if len(cells) != len(header):
        trouble = "fewer" if len(cells) < len(header) else "more"
        raise ForerunError(f"{place}: {trouble} cells ({len(cells)}) than header columns ({len(header)})")
    texts = dict(zip(header, (cell.strip() for cell in cells), strict=True))
    values = {field.name: _value(place, field.name, str(field.type), texts[field.name])
              for field in _COLUMNS if field.name in texts}  # fmt: skip
    if not values["id"]:
        raise ForerunError(f"{place}: empty id")
    return Measurement(line=line, **values)  # type: ignore[arg-type]


def _value(place: str, column: str, kind: str, text: str) -> Cell:
    value: Cell = text
    if kind in _PARSERS:
        parser, expected = _PARSERS[kind]
        try:
            value = parser(text) if text else None
        except (ValueError, KeyError, OverflowError):
            raise ForerunError(f"{place}: {column} is {text!r}, expected {expected} or an empty cell") from None
    allowed = _CHOICES.get(column)
    if allowed is not None and value not in allowed:
        known = ", ".join(str(choice) for choice in allowed if choice is not None)
        raise ForerunError(f"{place}: {column} is {text!r}, expected one of {known}")
    return value
