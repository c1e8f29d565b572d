"""Saves and loads Programs: one .npz file of plain arrays with a JSON header, never pickles."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.common.errors import ForerunError
from forerun.common.files import whole_file
from forerun.core.program.groups import CommGroup
from forerun.core.program.stored_ops import VERSION, arrays_of, header_of, read_ops
from forerun.core.program.types import I64, N_CATEGORIES, Block, Channel, Program, RankClass
from forerun.core.program.validate import check

FORMAT = "forerun-program"

_EARLIER_CATEGORIES = (8,)
"""numbers of categories that earlier versions had"""
_Array = npt.NDArray[np.generic]
_DAMAGE = (
    ValueError, KeyError, IndexError, TypeError, AttributeError, EOFError, OverflowError, MemoryError, RuntimeError,
    zipfile.BadZipFile, zlib.error,
)  # fmt: skip

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
    try:
        with np.load(path, allow_pickle=False) as file:
            if not isinstance(file, np.lib.npyio.NpzFile) or "header" not in file:
                raise ForerunError(f"{path}: not a saved Program; save one with forerun.core.program.storage.save")
            header = json.loads(file["header"].tobytes())
            if not isinstance(header, dict) or header.get("format") != FORMAT:
                raise ForerunError(f"{path}: not a saved Program; save one with forerun.core.program.storage.save")
            if header.get("version") not in range(1, VERSION + 1):
                raise ForerunError(f"{path}: format version {header.get('version')}, this forerun reads 1 to {VERSION}")
            program = _program(header, file)
    except OSError as error:
        raise ForerunError(f"{path}: can't be read: {error.strerror or error}") from error
    except ForerunError:
        raise
    except _DAMAGE as error:
        raise ForerunError(f"{path}: damaged or not a saved Program ({type(error).__name__}); save it again") from error
    check(program)
    return program


def _program(header: Mapping[str, object], file: Mapping[str, _Array]) -> Program:
    """Makes the Program of a file. Raises one of _DAMAGE for an entry that is missing or of a wrong type."""
    blocks = {c: _split(file, f"blocks.{c}", dtype) for c, dtype in _BLOCK_COLUMNS.items()}
    steps = {c: _split(file, f"classes.{c}", dtype) for c, dtype in _CLASS_COLUMNS.items()}
    steps["resident_bytes"] = [_with_later_categories(column) for column in steps["resident_bytes"]]
    meta = header["meta"]
    if not isinstance(meta, dict):
        raise TypeError("meta is not an object")
    return Program(
        ops=read_ops(header, file),
        blocks=tuple(
            Block(name=name, **{c: blocks[c][i] for c in blocks}) for i, name in enumerate(_entries(header, "blocks"))
        ),
        rank_classes=tuple(
            RankClass(**entry, **{c: steps[c][i] for c in steps})
            for i, entry in enumerate(_entries(header, "rank_classes"))
        ),
        groups=tuple(_group(entry) for entry in _entries(header, "groups")),
        channels=tuple(Channel(e["name"], tuple(e["members"])) for e in _entries(header, "channels")),
        modules=_entries(header, "modules"),
        meta=meta,
    )


def _with_later_categories(resident: I64) -> I64:
    """Returns the bytes of each category, none for categories that came after the file was written."""
    return np.pad(resident, (0, N_CATEGORIES - len(resident))) if len(resident) in _EARLIER_CATEGORIES else resident


def _group(entry: dict[str, Any]) -> CommGroup:
    return CommGroup(**{**entry, "runs": tuple((size, inner) for size, inner in entry.get("runs", ()))})


def _entries(header: Mapping[str, object], key: str) -> tuple[Any, ...]:
    value = header[key]
    if not isinstance(value, list):
        raise TypeError(f"{key} is not a list")
    return tuple(value)


def _column(file: Mapping[str, _Array], key: str, dtype: type[np.generic]) -> Any:
    return file[key].astype(dtype, casting="same_kind")


def _joined(key: str, columns: list[_Array]) -> dict[str, _Array]:
    """Joins the columns of all blocks, or of all classes, in one array, with an array of their starts."""
    ends = np.cumsum([0, *map(len, columns)])
    return {key: np.concatenate([*columns, np.zeros(0, columns[0].dtype if columns else np.int8)]), f"{key}.ptr": ends}


def _split(file: Mapping[str, _Array], key: str, dtype: type[np.generic]) -> list[Any]:
    column = _column(file, key, dtype)
    ptr = _column(file, f"{key}.ptr", np.int64).tolist()
    if ptr[0] != 0 or ptr[-1] != len(column):
        raise ValueError(f"{key}.ptr does not span {key}")
    return [column[a:b].copy() for a, b in pairwise(ptr)]
