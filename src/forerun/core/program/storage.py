"""Saves and loads Programs: one .npz file of plain arrays with a JSON header, never pickles."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from forerun.common.array_files import read_arrays
from forerun.common.errors import ForerunError
from forerun.common.files import whole_file
from forerun.common.yaml_files import Entry
from forerun.common.yaml_files import check as checked
from forerun.core.program.groups import CommGroup
from forerun.core.program.stored_ops import VERSION, arrays_of, header_of, read_ops
from forerun.core.program.types import I64, N_CATEGORIES, Block, Channel, Program, RankClass
from forerun.core.program.validate import check

FORMAT = "forerun-program"

_EARLIER_CATEGORIES = (8,)
"""numbers of categories that earlier versions had"""
_Array = npt.NDArray[np.generic]
_DAMAGE = (ValueError, KeyError, IndexError, TypeError)
_MOST_RANKS = 1 << 24
_Count = Annotated[int, Field(ge=1, le=_MOST_RANKS)]
_CountOrNone = Annotated[int, Field(ge=0, le=_MOST_RANKS)]


class _GroupEntry(Entry):
    axis: str
    size: _Count
    nodes: _Count
    ranks_per_node: _Count
    inner: _Count = 1
    borders: _CountOrNone = 0
    runs: list[Annotated[list[_Count], Field(min_length=2, max_length=2)]] = Field(default=[])

    def group(self) -> CommGroup:
        runs = tuple((size, spacing) for size, spacing in self.runs)
        return CommGroup(self.axis, self.size, self.nodes, self.ranks_per_node, self.inner, self.borders, runs)


class _ClassEntry(Entry):
    name: str
    n_ranks: _Count


class _ChannelEntry(Entry):
    name: str
    members: list[_CountOrNone]


class _Header(Entry):
    """The JSON header of a saved Program, of any version."""

    format: str
    version: int
    op_names: list[str]
    op_dtypes: list[str]
    op_kernels: list[str] = Field(default=[])
    op_details: dict[str, list[str]] = Field(default={})
    blocks: list[str]
    rank_classes: list[_ClassEntry]
    groups: list[_GroupEntry]
    channels: list[_ChannelEntry]
    modules: list[str]
    meta: dict[str, Any]


# Every column and its dtype. Columns of a file are converted to these.
_BLOCK_COLUMNS: dict[str, type[np.generic]] = {
    "op": np.int32,
    "stream": np.int8,
    "phase": np.int8,
    "module": np.int32,
    "pred_ptr": np.int32,
    "pred": np.int32,
    "record": np.int16,
    "channel": np.int16,
    "sync": np.int8,
    "tensor_bytes": np.int64,
    "tensor_category": np.int8,
    "tensor_alloc": np.int32,
    "tensor_free": np.int32,
}
_CLASS_COLUMNS: dict[str, type[np.generic]] = {
    "block": np.int32,
    "microbatch": np.int32,
    "layer": np.int32,
    "resident_bytes": np.int64,
}


def save(program: Program, path: str | Path) -> None:
    """Writes `program` to `path` (.npz). The file appears whole or not at all.

    Raises:
        ForerunError: the folder can't be written, or `program.meta` holds something that is not JSON.
    """
    header = {
        "format": FORMAT,
        "version": VERSION,
        **header_of(program.ops),
        "blocks": [b.name for b in program.blocks],
        "rank_classes": [{"name": c.name, "n_ranks": c.n_ranks} for c in program.rank_classes],
        "groups": [asdict(g) for g in program.groups],
        "channels": [{"name": c.name, "members": c.members} for c in program.channels],
        "modules": program.modules,
        "meta": program.meta,
    }
    try:
        text = json.dumps(header)
    except (TypeError, ValueError) as error:
        raise ForerunError(f"program: meta can't be saved as JSON: {error}") from error
    arrays: dict[str, _Array] = {"header": np.frombuffer(text.encode(), np.uint8), **arrays_of(program.ops)}
    for column in _BLOCK_COLUMNS:
        arrays.update(_joined(f"blocks.{column}", [getattr(b, column) for b in program.blocks]))
    for column in _CLASS_COLUMNS:
        arrays.update(_joined(f"classes.{column}", [getattr(c, column) for c in program.rank_classes]))
    columns: Any = arrays
    with whole_file(path) as file:
        np.savez_compressed(file, **columns)


def load(path: str | Path) -> Program:
    """Reads what `save` wrote, in this version or an earlier one, and checks it.

    Raises:
        ForerunError: the file can't be read, is truncated, is no Program, is of another version, or its Program is
            not well formed (`program.validate.check`).
    """
    data, arrays = read_arrays(path, "a saved Program")
    if data.get("format") != FORMAT:
        raise ForerunError(f"{path}: not a saved Program; save one with forerun.core.program.storage.save")
    if data.get("version") not in range(1, VERSION + 1):
        raise ForerunError(f"{path}: format version {data.get('version')!s:.20}, this forerun reads 1 to {VERSION}")
    header = checked(_Header, data, f"{path}, header")
    try:
        program = _program(header, data, arrays)
    except _DAMAGE as error:
        raise ForerunError(
            f"{path}: damaged or not a saved Program ({type(error).__name__}); write it again with forerun trace"
        ) from error
    check(program)
    return program


def _program(header: _Header, data: Mapping[str, object], file: Mapping[str, _Array]) -> Program:
    """Makes the Program of a file. Raises one of _DAMAGE for an array that is missing or of a wrong type."""
    blocks = {c: _split(file, f"blocks.{c}", dtype, len(header.blocks)) for c, dtype in _BLOCK_COLUMNS.items()}
    n_classes = len(header.rank_classes)
    steps = {c: _split(file, f"classes.{c}", dtype, n_classes) for c, dtype in _CLASS_COLUMNS.items()}
    steps["resident_bytes"] = [_with_later_categories(column) for column in steps["resident_bytes"]]
    return Program(
        ops=read_ops(data, file),
        blocks=tuple(Block(name=name, **{c: blocks[c][i] for c in blocks}) for i, name in enumerate(header.blocks)),
        rank_classes=tuple(
            RankClass(entry.name, entry.n_ranks, **{c: steps[c][i] for c in steps})
            for i, entry in enumerate(header.rank_classes)
        ),
        groups=tuple(entry.group() for entry in header.groups),
        channels=tuple(Channel(entry.name, tuple(entry.members)) for entry in header.channels),
        modules=tuple(header.modules),
        meta=header.meta,
    )


def _with_later_categories(resident: I64) -> I64:
    """Returns the bytes of each category, none for categories that came after the file was written."""
    return np.pad(resident, (0, N_CATEGORIES - len(resident))) if len(resident) in _EARLIER_CATEGORIES else resident


def _column(file: Mapping[str, _Array], key: str, dtype: type[np.generic]) -> Any:
    return file[key].astype(dtype, casting="same_kind")


def _joined(key: str, columns: list[_Array]) -> dict[str, _Array]:
    """Joins the columns of all blocks, or of all classes, in one array, with an array of their starts."""
    ends = np.cumsum([0, *map(len, columns)])
    return {key: np.concatenate([*columns, np.zeros(0, columns[0].dtype if columns else np.int8)]), f"{key}.ptr": ends}


def _split(file: Mapping[str, _Array], key: str, dtype: type[np.generic], n_parts: int) -> list[Any]:
    column = _column(file, key, dtype)
    ends = _column(file, f"{key}.ptr", np.int64)
    if column.ndim != 1 or ends.shape != (n_parts + 1,) or ends[0] != 0 or ends[-1] != len(column):
        raise ValueError(f"{key}.ptr does not span {key}")
    if (np.diff(ends) < 0).any():
        raise ValueError(f"{key}.ptr falls")
    return [column[a:b].copy() for a, b in pairwise(ends.tolist())]
