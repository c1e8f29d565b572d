"""The file format of an op table, in a saved Program or in a recording: arrays, and entries of the JSON header.

The header names the columns of every kind. Files of version 1 have no such names (`_VERSION_1`), and hold some figures
in other columns: the time of a delay as the bytes that it reads, the kernel of attention as its dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.core.program.kinds import KINDS, N_DETAILS, Direction, OpKind, columns_of
from forerun.core.program.types import I8, I64, OpTable

VERSION = 2
"""version of the format of saved Programs and recordings; earlier versions are read too"""

_Arrays = Mapping[str, npt.NDArray[np.generic]]
_TEXTS = {"name": "op_names", "dtype": "op_dtypes", "kernel": "op_kernels"}
"""column -> entry of the header"""
_ARRAYS: dict[str, type[np.generic]] = {
    "kind": np.int8,
    "flops": np.float64,
    "bytes_read": np.float64,
    "bytes_written": np.float64,
    "collective": np.int8,
    "group": np.int16,
    "bytes_comm": np.float64,
    "launches": np.int16,
}
_VERSION_1 = {
    "GEMM": ("m", "n", "k", "batch", "role", "accumulate_bytes", "kernels", "operand_bytes", "result_bytes"),
    "ATTENTION": ("batch", "heads", "kv_heads", "seq_q", "seq_kv", "head_dim", "causal", "backward", "v_head_dim"),
    "P2P": ("direction",),
    "HOST_COPY": ("direction",),
}
_VERSION_1_COPIES = {2: Direction.IN, 3: Direction.OUT}
"""directions of copies, which version 1 stored as the numbers of Chakra's MEM_LOAD and MEM_STORE"""


def header_of(ops: OpTable) -> dict[str, Any]:
    """Returns the entries of the JSON header."""
    texts = {entry: getattr(ops, column) for column, entry in _TEXTS.items()}
    return texts | {"op_details": {kind.name: columns_of(KINDS[kind].details) for kind in OpKind}}


def arrays_of(ops: OpTable) -> dict[str, npt.NDArray[np.generic]]:
    """Returns the arrays by their names in the file."""
    return {f"ops.{column}": getattr(ops, column) for column in (*_ARRAYS, "details")}


def read_ops(header: Mapping[str, Any], arrays: _Arrays) -> OpTable:
    """Reads the table of a file of any version. Raises Python's own errors for a missing entry or a wrong type."""
    old = header["version"] == 1
    columns: dict[str, Any] = {name: _array(arrays, name, dtype) for name, dtype in _ARRAYS.items()}
    named: Mapping[str, Sequence[str]] = _VERSION_1 if old else header["op_details"]
    columns["details"] = _details(columns["kind"], _array(arrays, "dims" if old else "details", np.int64), named)
    for column, entry in _TEXTS.items():
        texts = [""] * len(columns["kind"]) if old and column == "kernel" else header[entry]
        if not isinstance(texts, list):
            raise TypeError(f"{entry} is not a list")
        columns[column] = tuple(texts)
    return _of_version_1(OpTable(**columns)) if old else OpTable(**columns)


def _array(arrays: _Arrays, name: str, dtype: type[np.generic]) -> Any:
    return arrays[f"ops.{name}"].astype(dtype, casting="same_kind")


def _details(kind: I8, stored: I64, named: Mapping[str, Sequence[str]]) -> I64:
    """Reorders `stored`, whose columns are `named` by kind, as in `kinds`. A column that the file lacks is 0."""
    if stored.ndim != 2 or len(stored) != len(kind):
        raise ValueError("a row of details for each operation is missing")
    out = np.zeros((len(kind), N_DETAILS), np.int64)
    for name, columns in named.items():
        number = OpKind[name]
        today, rows = columns_of(KINDS[number].details), np.flatnonzero(kind == number)
        for at, column in enumerate(columns):
            out[rows, today.index(column)] = stored[rows, at]
    return out


def _of_version_1(ops: OpTable) -> OpTable:
    """Moves every figure of a table of version 1 to its column in this version."""
    details, read = ops.details.copy(), ops.bytes_read.copy()
    details[ops.is_delay, 0], read[ops.is_delay] = np.rint(ops.bytes_read[ops.is_delay]), 0.0
    copies = np.flatnonzero(ops.is_host_copy)
    details[copies, 0] = [_VERSION_1_COPIES.get(way, Direction.EITHER) for way in details[copies, 0].tolist()]
    attention = ops.is_attention.tolist()
    return replace(
        ops,
        details=details,
        bytes_read=read,
        dtype=tuple("" if named else dtype for dtype, named in zip(ops.dtype, attention, strict=True)),
        kernel=tuple(dtype if named else "" for dtype, named in zip(ops.dtype, attention, strict=True)),
    )
