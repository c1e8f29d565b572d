"""Checks that a Program is well formed. Builders do not call it; readers of files do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.common.errors import ForerunError
from forerun.core.program.kinds import KINDS, N_DETAILS, OpKind
from forerun.core.program.types import (
    F64,
    N_CATEGORIES,
    N_STREAMS,
    Block,
    Channel,
    Collective,
    OpRow,
    OpTable,
    Phase,
    Program,
    RankClass,
)

_MOST = {"flops": 1e24, "bytes_read": 2.0**60, "bytes_written": 2.0**60, "bytes_comm": 2.0**60, "launches": 2**15}
"""limit that no operation of one device exceeds; a hundred times as much would not fit in 64 bits of picoseconds"""
_MOST_SIZE = 2**40
"""of one dimension of an operation"""
_MOST_BACKWARD = 3.0
"""FLOPs of attention's backward kernel over those of its forward kernel, where keys are wider than values"""
_SHAPE_TOLERANCE, _FEW_FLOPS = 1.05, 1e6
"""a kernel whose FLOPs a user states has a cube of whole sides for a shape"""
_MOST_PS = 2**60
_MOST_BYTES = 2**60
_LISTED = 3
"""most problems that the message of `check` lists"""


def check(program: Program) -> None:
    """Raises an error for a Program that is not well formed.

    Raises:
        ForerunError: one line with the first problems; each names the block and node, op, rank class or channel.
    """
    found = problems(program)
    if found:
        more = f"; and {len(found) - _LISTED} more problems" if len(found) > _LISTED else ""
        raise ForerunError(f"program: {'; '.join(found[:_LISTED])}{more}")


def problems(program: Program) -> list[str]:
    """Lists the problems of `program`, one line each; none where it is well formed.

    At most one problem per column is reported, the one of the first row.
    """
    return [
        *_op_problems(program),
        *(p for block in program.blocks for p in _block_problems(block, program)),
        *(p for rank_class in program.rank_classes for p in _class_problems(rank_class, len(program.blocks))),
        *(p for channel in program.channels for p in _channel_problems(channel, len(program.rank_classes))),
    ]


def _outside(where: str, row: str, name: str, column: npt.NDArray[Any], low: float, high: float) -> Iterator[str]:
    """Names the first entry of `column` that is not in [low, high)."""
    bad = np.flatnonzero(~((column >= low) & (column < high)))
    if len(bad):
        allowed = f"{low:g} to {high - 1:g}" if np.isfinite(high) else f"at least {low:g}"
        yield f"{where} {row} {bad[0]}: {name} is {column[bad[0]]}, allowed: {allowed}"


def _unequal(where: str, lengths: dict[str, int], expected: int) -> list[str]:
    return [f"{where}: column {name} has {n} entries, not {expected}" for name, n in lengths.items() if n != expected]


def _op_problems(program: Program) -> Iterator[str]:
    ops = program.ops
    unequal = _unequal("ops", {column: len(getattr(ops, column)) for column in OpRow._fields}, len(ops.kind))
    yield from unequal
    if unequal:
        return
    if ops.details.shape != (len(ops), N_DETAILS):
        yield f"ops: column details has shape {ops.details.shape}, not {(len(ops), N_DETAILS)}"
    yield from _outside("ops", "row", "kind", ops.kind, 0, len(OpKind))
    yield from _outside("ops", "row", "collective", ops.collective, 0, len(Collective))
    yield from _outside("ops", "row", "group", ops.group, -1, len(program.groups))
    for column, most in _MOST.items():
        yield from _outside("ops", "row", column, getattr(ops, column), 0, most)
    is_delay = ops.is_delay
    for name, rows, most in (("duration_ps", is_delay, _MOST_PS), ("a shape", ~is_delay, _MOST_SIZE)):
        least, largest = ops.details.min(axis=1), ops.details.max(axis=1)
        yield from _outside("ops", "row", name, np.where(rows, largest, 0), 0, most)
        yield from _outside("ops", "row", name, np.where(rows, least, 0), -1, most)
    for kind, about in KINDS.items():
        smallest = ops.details[:, : about.sizes].min(axis=1, initial=_MOST_SIZE - 1)
        yield from _outside("ops", "row", "a size", np.where(ops.kind == kind, smallest, 1), 1, _MOST_SIZE)
    allowed = _most_flops(ops)
    more = np.flatnonzero(ops.flops > allowed)
    if len(more):
        row, given, fits = int(more[0]), ops.flops[more[0]], allowed[more[0]]
        yield f"ops row {row}: {ops.name[row]} has {given:.4g} FLOPs, and at most {fits:.4g} fit its shape"


def _most_flops(ops: OpTable) -> F64:
    """Returns the most FLOPs that fit the shape of each product and attention kernel, (n_ops,); no limit elsewhere."""
    most = np.full(len(ops), np.inf)
    products, attention = np.flatnonzero(ops.is_gemm), np.flatnonzero(ops.is_attention)
    gemm, fused = ops.gemm(products), ops.attention(attention)
    most[products] = 2.0 * gemm.m.astype(np.float64) * gemm.n * gemm.k * gemm.batch
    queries, keys = fused.seq_q.astype(np.float64), fused.seq_kv.astype(np.float64)
    pairs = queries * keys - np.where(fused.causal, 0.5, 0.0) * np.minimum(queries, keys) ** 2
    times = np.where(fused.backward, _MOST_BACKWARD, 1.0)
    most[attention] = 2.0 * pairs * fused.batch * fused.heads * (fused.head_dim + fused.v_head_dim) * times
    return most * _SHAPE_TOLERANCE + _FEW_FLOPS


def _block_problems(block: Block, program: Program) -> Iterator[str]:
    where, n = f"block {block.name!r}", len(block.op)
    columns = ("stream", "phase", "module", "record", "channel", "sync")
    unequal = _unequal(where, {c: len(getattr(block, c)) for c in columns}, n)
    unequal += _unequal(where, {"pred_ptr": len(block.pred_ptr)}, n + 1)
    tensor_columns = ("tensor_category", "tensor_alloc", "tensor_free")
    unequal += _unequal(where, {c: len(getattr(block, c)) for c in tensor_columns}, len(block.tensor_bytes))
    yield from unequal
    if unequal:
        return
    yield from _outside(where, "node", "op", block.op, 0, len(program.ops))
    yield from _outside(where, "node", "stream", block.stream, 0, N_STREAMS)
    yield from _outside(where, "node", "phase", block.phase, 0, len(Phase))
    yield from _outside(where, "node", "module", block.module, 0, len(program.modules))
    yield from _outside(where, "node", "record", block.record, -1, np.inf)
    yield from _outside(where, "node", "channel", block.channel, -1, len(program.channels))
    yield from _outside(where, "node", "sync", block.sync, 0, 2)
    yield from _predecessor_problems(where, block)
    yield from _outside(where, "tensor", "bytes", block.tensor_bytes, 0, _MOST_BYTES)
    yield from _outside(where, "tensor", "category", block.tensor_category, 0, N_CATEGORIES)
    yield from _outside(where, "tensor", "alloc", block.tensor_alloc, -1, n)
    yield from _outside(where, "tensor", "free", block.tensor_free, -1, n)
    early = np.flatnonzero((block.tensor_free >= 0) & (block.tensor_free < block.tensor_alloc))
    if len(early):
        alloc, free = block.tensor_alloc[early[0]], block.tensor_free[early[0]]
        yield f"{where} tensor {early[0]}: freed after node {free}, before it is allocated at node {alloc}"


def _predecessor_problems(where: str, block: Block) -> Iterator[str]:
    per_node = np.diff(block.pred_ptr)
    if block.pred_ptr[0] != 0 or block.pred_ptr[-1] != len(block.pred) or (per_node < 0).any():
        yield f"{where}: pred_ptr must rise from 0 to the {len(block.pred)} entries of pred"
        return
    node = np.repeat(np.arange(len(per_node)), per_node)
    forward = np.flatnonzero(block.pred >= node)
    if len(forward):
        yield f"{where} node {node[forward[0]]}: predecessor {block.pred[forward[0]]} is not an earlier node"


def _class_problems(rank_class: RankClass, n_blocks: int) -> Iterator[str]:
    where = f"rank class {rank_class.name!r}"
    lengths = {"microbatch": len(rank_class.microbatch), "layer": len(rank_class.layer)}
    yield from _unequal(where, lengths, len(rank_class.block))
    yield from _unequal(where, {"resident_bytes": len(rank_class.resident_bytes)}, N_CATEGORIES)
    yield from _outside(where, "step", "block", rank_class.block, 0, n_blocks)
    yield from _outside(where, "category", "resident_bytes", rank_class.resident_bytes, 0, _MOST_BYTES)
    if rank_class.n_ranks < 1:
        yield f"{where}: n_ranks is {rank_class.n_ranks}, must be at least 1"


def _channel_problems(channel: Channel, n_classes: int) -> Iterator[str]:
    members = channel.members
    if not members or len(set(members)) != len(members) or not all(0 <= m < n_classes for m in members):
        yield f"channel {channel.name!r}: members {members} must be different rank classes from 0 to {n_classes - 1}"
