"""Recording: the work of one rank in a real training step, as plain columns without torch.

Nodes are in the order in which the host issued them. Streams have the numbers that they had in the program: 0 is the
default stream, and process groups have streams of their own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from forerun.common.array_files import read_arrays
from forerun.common.errors import ForerunError
from forerun.common.files import whole_file
from forerun.core.program.kinds import OpKind
from forerun.core.program.stored_ops import VERSION, arrays_of, header_of, read_ops
from forerun.core.program.types import I8, I32, I64, N_CATEGORIES, OpRow, OpTable, Phase

FORMAT = "forerun-recording"


@dataclass(frozen=True, slots=True)
class Recording:
    """One optimizer step of one rank. N nodes, T tensors."""

    rank: int
    ops: OpTable
    """`group` is an index into `groups`"""
    op: I32
    """(N,) row of `ops`"""
    stream: I32
    phase: I8
    module: I32
    """Index into `modules`."""
    peer: I32
    """The global rank at the other end of a send or receive, -1 for other nodes."""
    sync: I8
    """1 if the host waits for the end of the node."""
    compiled: I8
    """1 if the kernel belongs to a region under torch.compile."""
    line: I32
    """Index into `lines`, -1 if source lines were not recorded."""
    wait_ptr: I64
    """(N + 1,) CSR rows of `wait`."""
    wait: I32
    """The earlier nodes on other streams that the node's stream waits for."""
    tensor_bytes: I64
    """(T,) Bytes, rounded as the caching allocator does."""
    tensor_category: I8
    tensor_alloc: I32
    """The node before which the tensor is allocated, -1: before the step."""
    tensor_free: I32
    """The node after which it is freed, -1: after the step."""
    groups: tuple[tuple[str, tuple[int, ...]], ...]
    """The name of each process group and its global ranks in the group's order."""
    modules: tuple[str, ...]
    lines: tuple[str, ...] = ()
    meta: dict[str, Any] = field(default_factory=dict)
    """name, world_size, gpus_per_node, notes, tokens (of this rank), torch, imported (modules of the program)."""

    def __len__(self) -> int:
        return len(self.op)


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
_DAMAGE = (ValueError, KeyError, IndexError, TypeError, AttributeError)


def save_recording(recording: Recording, path: str | Path) -> None:
    """Writes `recording` to `path`, completely or not at all: one .npz of plain arrays with a JSON header."""
    header = {"format": FORMAT, "version": VERSION} | {name: getattr(recording, name) for name in _PLAIN}
    header |= header_of(recording.ops)
    arrays: dict[str, Any] = {name: getattr(recording, name) for name in _ARRAYS} | arrays_of(recording.ops)
    with whole_file(path) as file:
        np.savez(file, header=np.frombuffer(json.dumps(header).encode(), np.uint8), **arrays)


def load_recording(path: str | Path) -> Recording:
    """Reads a file of `save_recording`. Nothing in the file is executed.

    Raises:
        ForerunError: the file can't be read, is not a recording, or is damaged.
    """
    header, stored = read_arrays(path, "a recording")
    if header.get("format") != FORMAT or header.get("version") not in range(1, VERSION + 1):
        raise ForerunError(f"{path}: not a recording of this version of forerun")
    try:
        arrays = {name: stored[name].astype(dtype, casting="same_kind") for name, dtype in _ARRAYS.items()}
        recording = Recording(
            rank=int(header["rank"]),
            ops=read_ops(header, stored),
            groups=tuple((str(name), tuple(map(int, ranks))) for name, ranks in header["groups"]),
            modules=tuple(header["modules"]),
            lines=tuple(header["lines"]),
            meta=dict(header["meta"]),
            **arrays,
        )
        _check(recording)
    except _DAMAGE as error:
        raise ForerunError(f"{path}: damaged or not a recording ({error})") from error
    return recording


def _check(recording: Recording) -> None:
    """Raises ValueError where numbers point outside their tables."""
    ops, n, t = recording.ops, len(recording), len(recording.tensor_bytes)
    lengths = {name: len(getattr(recording, name)) for name in ("stream", "phase", "module", "peer", "sync", "line")}
    lengths |= {"wait_ptr": len(recording.wait_ptr) - 1, "compiled": len(recording.compiled)}
    tensors = (recording.tensor_category, recording.tensor_alloc, recording.tensor_free)
    if any(length != n for length in lengths.values()) or any(len(column) != t for column in tensors):
        raise ValueError("columns of different lengths")
    if any(len(getattr(ops, name)) != len(ops) for name in OpRow._fields):
        raise ValueError("an operation table of different lengths")
    node = np.repeat(np.arange(n), np.diff(recording.wait_ptr)) if n else np.zeros(0, np.int64)
    ranges = (
        ("op", recording.op, 0, len(ops)),
        ("phase", recording.phase, 0, len(Phase)),
        ("module", recording.module, 0, len(recording.modules)),
        ("line", recording.line, -1, len(recording.lines)),
        ("wait", recording.wait, 0, node),
        ("kind", ops.kind, 0, len(OpKind)),
        ("group", ops.group, -1, len(recording.groups)),
        ("tensor_category", recording.tensor_category, 0, N_CATEGORIES),
        ("tensor_alloc", recording.tensor_alloc, -1, max(n, 1)),
        ("tensor_free", recording.tensor_free, -1, max(n, 1)),
        ("tensor_bytes", recording.tensor_bytes, 0, np.inf),
    )
    if len(recording.wait) != len(node):
        raise ValueError("wait_ptr does not span wait")
    for name, column, low, high in ranges:
        if not ((column >= low) & (column < high)).all():
            raise ValueError(f"{name} out of range")
