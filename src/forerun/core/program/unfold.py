"""Expands the repeat blocks of a Program for the engine."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from forerun.common.errors import ForerunError
from forerun.common.jit import kernel, njit
from forerun.core.program.types import I8, I16, I32, I64, FlatProgram, Program


class _BlockTables(NamedTuple):
    """The nodes of all blocks, one block after the other."""

    ptr: I64
    """first node of each block, (blocks + 1,)"""
    pred_base: I64
    """first edge of each block, (blocks + 1,)"""
    op: I32
    stream: I8
    phase: I8
    module: I32
    pred_end: I32
    """end of each node's edges, counted from the first edge of its block, (nodes,)"""
    pred: I32
    record: I16
    channel: I16
    sync: I8
    n_slots: int
    """number of event slots"""


def _block_tables(program: Program) -> _BlockTables:
    """Joins the blocks of `program` in columns. Raises ForerunError if it has no block or no rank class."""
    blocks, classes = program.blocks, program.rank_classes
    if not blocks or not classes:
        raise ForerunError(f"program: {len(blocks)} blocks and {len(classes)} rank classes; needs one of each at least")
    ptr = np.zeros(len(blocks) + 1, np.int64)
    np.cumsum([len(b.op) for b in blocks], out=ptr[1:])
    pred_base = np.zeros(len(blocks) + 1, np.int64)
    np.cumsum([len(b.pred) for b in blocks], out=pred_base[1:])
    record = np.concatenate([b.record for b in blocks])
    return _BlockTables(
        ptr,
        pred_base,
        np.concatenate([b.op for b in blocks]),
        np.concatenate([b.stream for b in blocks]),
        np.concatenate([b.phase for b in blocks]),
        np.concatenate([b.module for b in blocks]),
        np.concatenate([b.pred_ptr[1:] for b in blocks]),
        np.concatenate([b.pred for b in blocks]),
        record,
        np.concatenate([b.channel for b in blocks]),
        np.concatenate([b.sync for b in blocks]),
        int(record.max(initial=-1)) + 1,
    )


def _step_sequence(program: Program) -> tuple[I64, I32]:
    """Returns the first step of each rank class, (classes + 1,), and the block of every step."""
    classes = program.rank_classes
    class_step = np.zeros(len(classes) + 1, np.int64)
    np.cumsum([len(c.block) for c in classes], out=class_step[1:])
    return class_step, np.concatenate([c.block for c in classes])


def unfold(program: Program) -> FlatProgram:
    """Expands the block sequence of every rank class.

    A wait on an event slot becomes a predecessor: the node of the same rank class that last recorded the slot before
    it in issue order (no predecessor where none has). The k-th nodes on a channel, one in each of its member classes,
    meet. Indices are not checked here: `program.validate.check` finds those out of range.

    Raises:
        ForerunError: the members of a channel have different numbers of nodes on it, or a class that is not a member
            has some.
    """
    tables = _block_tables(program)
    class_step, steps = _step_sequence(program)
    class_ptr, n_pred, counts = _count(
        class_step, steps, tables.ptr, tables.pred_base, tables.channel, len(program.channels)
    )
    _check_channels(program, counts)
    # Members agree, so the largest count of a column is the number of meetings of that channel.
    meetings = counts.max(axis=0)
    meeting_base = np.zeros(len(meetings) + 1, np.int64)
    np.cumsum(meetings, out=meeting_base[1:])
    sizes = np.array([len(c.members) for c in program.channels], np.int32)

    nodes = _expand(class_step, steps, tables, int(class_ptr[-1]), n_pred, meeting_base)
    return FlatProgram(
        n_ops=len(program.ops),
        class_ptr=class_ptr,
        op=nodes.op,
        stream=nodes.stream,
        phase=nodes.phase,
        step=nodes.step,
        module=nodes.module,
        pred_ptr=nodes.pred_ptr,
        pred=nodes.pred,
        meeting=nodes.meeting,
        sync=nodes.sync,
        meeting_size=np.repeat(sizes, meetings),
        meeting_channel=np.repeat(np.arange(len(meetings), dtype=np.int32), meetings),
        class_names=tuple(c.name for c in program.rank_classes),
        channel_names=tuple(c.name for c in program.channels),
    )


def _check_channels(program: Program, counts: I64) -> None:
    """Raises ForerunError for channels whose members would wait for ever. `counts` is nodes by (class, channel)."""
    for number, channel in enumerate(program.channels):
        column = counts[:, number]
        members = [int(column[c]) for c in channel.members]
        if len(set(members)) > 1 or sum(members) != int(column.sum()):
            found = ", ".join(f"{c.name}: {int(column[i])}" for i, c in enumerate(program.rank_classes) if column[i])
            names = ", ".join(program.rank_classes[c].name for c in channel.members)
            raise ForerunError(
                f"program: channel {channel.name!r} joins {names}, which need equal numbers of nodes on it; "
                f"found {found or 'none'}"
            )


@njit
def _count(
    class_step: I64, steps: I32, block_ptr: I64, pred_base: I64, channel: I16, n_channels: int
) -> tuple[I64, int, I64]:
    """Returns the first node of each class, an upper bound of the number of edges, and nodes by (class, channel)."""
    n_classes = len(class_step) - 1
    class_ptr = np.zeros(n_classes + 1, np.int64)
    counts = np.zeros((n_classes, n_channels), np.int64)
    n_nodes = 0
    n_pred = 0
    for c in range(n_classes):
        for s in range(class_step[c], class_step[c + 1]):
            b = steps[s]
            n_nodes += block_ptr[b + 1] - block_ptr[b]
            n_pred += pred_base[b + 1] - pred_base[b]
            if n_channels:
                for j in range(block_ptr[b], block_ptr[b + 1]):
                    if channel[j] >= 0:
                        counts[c, channel[j]] += 1
        class_ptr[c + 1] = n_nodes
    return class_ptr, n_pred, counts


class _Nodes(NamedTuple):
    """Columns of a FlatProgram."""

    op: I32
    stream: I8
    phase: I8
    step: I32
    module: I32
    pred_ptr: I64
    pred: I32
    meeting: I32
    sync: I8


@njit
def _expand(class_step: I64, steps: I32, tables: _BlockTables, n_nodes: int, n_pred: int, meeting_base: I64) -> _Nodes:
    """Returns the columns of all nodes. The k-th node on a channel has meeting `meeting_base[channel] + k`."""
    # One block of memory holds all columns. malloc keeps it for the next call, where it would give many smaller ones
    # back to the system, and fresh pages cost as much as the work.
    n_longs, n_ints = n_nodes + 1, 4 * n_nodes + n_pred
    memory = np.empty(8 * n_longs + 4 * n_ints + 3 * n_nodes, np.int8)
    pred_ptr = memory[: 8 * n_longs].view(np.int64)
    pred_ptr[0] = 0
    ints = memory[8 * n_longs : 8 * n_longs + 4 * n_ints].view(np.int32)
    op, step, module = ints[:n_nodes], ints[n_nodes : 2 * n_nodes], ints[2 * n_nodes : 3 * n_nodes]
    meeting, pred = ints[3 * n_nodes : 4 * n_nodes], ints[4 * n_nodes :]
    shorts = memory[8 * n_longs + 4 * n_ints :]
    stream, phase, sync = shorts[:n_nodes], shorts[n_nodes : 2 * n_nodes], shorts[2 * n_nodes :]
    nodes = _Nodes(op, stream, phase, step, module, pred_ptr, pred, meeting, sync)
    recorded = np.full((len(class_step) - 1, tables.n_slots), -1, np.int64)
    met = np.zeros((len(class_step) - 1, len(meeting_base)), np.int64)
    edges = _write(class_step, steps, tables, meeting_base, recorded, met, nodes)
    return _Nodes(op, stream, phase, step, module, pred_ptr, pred[:edges], meeting, sync)


@kernel
def _write(
    class_step: I64, steps: I32, tables: _BlockTables, meeting_base: I64, recorded: I64, met: I64, nodes: _Nodes
) -> int:  # fmt: skip
    """Writes the nodes and edges of every step, and returns the number of edges.

    `recorded` (classes, slots), all -1, notes the node that last recorded each event slot, and `met`
    (classes, channels), all 0, how often a class was on each channel.
    """
    i = 0
    edge = 0
    for c in range(len(class_step) - 1):
        first, its_recorded, its_met = class_step[c], recorded[c], met[c]
        for s in range(first, class_step[c + 1]):
            b = steps[s]
            block_first = i
            base = tables.pred_base[b]
            local_edge = base
            for j in range(tables.ptr[b], tables.ptr[b + 1]):
                nodes.op[i] = tables.op[j]
                nodes.stream[i] = tables.stream[j]
                nodes.phase[i] = tables.phase[j]
                nodes.module[i] = tables.module[j]
                nodes.sync[i] = tables.sync[j]
                nodes.step[i] = s - first
                end = base + tables.pred_end[j]
                for e in range(local_edge, end):
                    p = tables.pred[e]
                    if p >= 0:
                        nodes.pred[edge] = block_first + p
                        edge += 1
                    elif -1 - p < tables.n_slots and its_recorded[-1 - p] >= 0:
                        nodes.pred[edge] = its_recorded[-1 - p]
                        edge += 1
                local_edge = end
                nodes.pred_ptr[i + 1] = edge
                channel = tables.channel[j]
                nodes.meeting[i] = -1
                if channel >= 0:
                    nodes.meeting[i] = meeting_base[channel] + its_met[channel]
                    its_met[channel] += 1
                if tables.record[j] >= 0:
                    its_recorded[tables.record[j]] = i
                i += 1
    return edge
