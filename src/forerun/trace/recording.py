"""Recording: what one rank of a real training step did, as the tracer saw it. Plain columns, no torch.

Nodes stand in the order in which the host issued them. Streams have the numbers that they had in the program: 0 is the
default stream, process groups have streams of their own.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from forerun.errors import ForerunError
from forerun.files import whole_file
from forerun.program.types import F64, I8, I16, I32, I64, OpTable

FORMAT = "forerun-recording"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Recording:
    """One optimizer step of one rank. N nodes, T tensors."""

    rank: int
    ops: OpTable
    """`group` is an index into `groups`; P2P rows have dims[0] 1 for a send, -1 for a receive"""
    op: I32
    """(N,) row of `ops`"""
    stream: I32
    phase: I8
    module: I32
    """index into `modules`"""
    peer: I32
    """global rank at the other end of a send or receive, -1 for other nodes"""
    sync: I8
    """1 where the host waits for the end of the node"""
    compiled: I8
    """1 where the kernel belongs to a region under torch.compile"""
    line: I32
    """index into `lines`, -1 where source lines were not recorded"""
    wait_ptr: I64
    """(N + 1,) CSR rows of `wait`"""
    wait: I32
    """earlier nodes, on other streams, that the node's stream was told to wait for"""
    tensor_bytes: I64
    """(T,) as the caching allocator rounds them"""
    tensor_category: I8
    tensor_alloc: I32
    """node before which the tensor is allocated, -1: before the step"""
    tensor_free: I32
    """node after which it is freed, -1: it outlives the step"""
    groups: tuple[tuple[str, tuple[int, ...]], ...]
    """name of each process group and its global ranks, in the group's order"""
    modules: tuple[str, ...]
    lines: tuple[str, ...] = ()
    meta: dict[str, Any] = field(default_factory=dict)
    """name, world_size, gpus_per_node, notes, tokens (of this rank), torch"""

    def __len__(self) -> int:
        return len(self.op)


_OP_ARRAYS: dict[str, type[np.generic]] = {
    "kind": np.int8,
    "dims": np.int64,
    "flops": np.float64,
    "bytes_read": np.float64,
    "bytes_written": np.float64,
    "collective": np.int8,
    "group": np.int16,
    "bytes_comm": np.float64,
    "launches": np.int16,
}
_ARRAYS: dict[str, type[np.generic]] = {
    "op": np.int32,
    "stream": np.int32,
    "phase": np.int8,
    "module": np.int32,
    "peer": np.int32,
    "sync": np.int8,
    "compiled": np.int8,
    "line": np.int32,
    "wait_ptr": np.int64,
    "wait": np.int32,
    "tensor_bytes": np.int64,
    "tensor_category": np.int8,
    "tensor_alloc": np.int32,
    "tensor_free": np.int32,
}
_PLAIN = ("rank", "groups", "modules", "lines", "meta")
_DAMAGE = (ValueError, KeyError, TypeError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error)


def save_recording(recording: Recording, path: str | Path) -> None:
    """Write `recording` to `path`: one .npz of plain arrays with a JSON header. Whole or not at all."""
    header = {"format": FORMAT, "version": VERSION} | {name: getattr(recording, name) for name in _PLAIN}
    header |= {"op_names": recording.ops.name, "op_dtypes": recording.ops.dtype}
    arrays: dict[str, Any] = {name: getattr(recording, name) for name in _ARRAYS}
    arrays |= {f"ops.{name}": getattr(recording.ops, name) for name in _OP_ARRAYS}
    with whole_file(path) as file:
        np.savez(file, header=np.frombuffer(json.dumps(header).encode(), np.uint8), **arrays)


def load_recording(path: str | Path) -> Recording:
    """Read what `save_recording` wrote; nothing in the file is executed.

    Raises:
        ForerunError: the file can't be read, is no recording, or is damaged.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            header = json.loads(file["header"].tobytes())
            if header.get("format") != FORMAT or header.get("version") != VERSION:
                raise ForerunError(f"{path}: not a recording of this version of forerun")
            arrays = {name: file[name].astype(dtype, casting="same_kind") for name, dtype in _ARRAYS.items()}
            ops = {name: file[f"ops.{name}"].astype(dtype, casting="same_kind") for name, dtype in _OP_ARRAYS.items()}
    except OSError as error:
        raise ForerunError(f"{path}: can't be read: {error.strerror or error}") from error
    except _DAMAGE as error:
        raise ForerunError(f"{path}: damaged or not a recording ({type(error).__name__})") from error
    table = OpTable(name=tuple(header["op_names"]), dtype=tuple(header["op_dtypes"]), **ops)
    groups = tuple((name, tuple(ranks)) for name, ranks in header["groups"])
    return Recording(
        rank=header["rank"],
        ops=table,
        groups=groups,
        modules=tuple(header["modules"]),
        lines=tuple(header["lines"]),
        meta=header["meta"],
        **arrays,
    )


def same_step(one: Recording, other: Recording) -> bool:
    """Whether two ranks recorded the same work: everything equal but ranks, peers and the members of groups."""
    skipped = {"rank", "peer", "groups", "meta", "ops"}
    columns = [f.name for f in fields(Recording) if f.name not in skipped]
    if any(not np.array_equal(getattr(one, name), getattr(other, name)) for name in columns):
        return False
    if one.ops.name != other.ops.name or one.ops.dtype != other.ops.dtype:
        return False
    return all(np.array_equal(getattr(one.ops, name), getattr(other.ops, name)) for name in _OP_ARRAYS)


__all__ = ["F64", "I8", "I16", "I32", "I64", "Recording", "load_recording", "same_step", "save_recording"]
