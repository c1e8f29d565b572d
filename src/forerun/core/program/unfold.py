"""unfold: a Program with its repeat blocks expanded, ready for the engine."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from forerun.common.errors import ForerunError
from forerun.common.jit import inlined, njit
from forerun.core.program.types import I8, I16, I32, I64, FlatProgram, Program


class BlockTables(NamedTuple):
    """The nodes of all blocks, one block after the other."""

    ptr: I64
    """(blocks + 1,) first node of each"""
    pred_base: I64
    """(blocks + 1,) first edge of each"""
    op: I32
    stream: I8
    phase: I8
    module: I32
    pred_end: I32
    """(nodes,) end of a node's edges, counted from those of its block"""
    pred: I32
    record: I16
    channel: I16
    sync: I8
    n_slots: int
    """event slots"""


def block_tables(program: Program) -> BlockTables:
    """The blocks of `program` in columns. Raises ForerunError where it has no block or no rank class."""
    blocks, classes = program.blocks, program.rank_classes
    if not blocks or not classes:
        raise ForerunError(f"program: {len(blocks)} blocks and {len(classes)} rank classes; needs one of each at least")
    ptr = np.zeros(len(blocks) + 1, np.int64)
    np.cumsum([len(b.op) for b in blocks], out=ptr[1:])
    pred_base = np.zeros(len(blocks) + 1, np.int64)
    np.cumsum([len(b.pred) for b in blocks], out=pred_base[1:])
    record = np.concatenate([b.record for b in blocks])
    return BlockTables(
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


def step_sequence(program: Program) -> tuple[I64, I32]:
    """First step of each rank class, (classes + 1,), and the block of every step."""
    classes = program.rank_classes
    class_step = np.zeros(len(classes) + 1, np.int64)
    np.cumsum([len(c.block) for c in classes], out=class_step[1:])
    return class_step, np.concatenate([c.block for c in classes])


def unfold(program: Program) -> FlatProgram:
    """Expand the block sequence of every rank class.

    A wait on an event slot becomes a predecessor: the node of the same rank class that last recorded the slot before
    it in issue order (no predecessor where none has). The k-th node on a channel in each of its member classes
    meet. Indices are taken as they are: `program.validate.check` finds those out of range.

    Raises:
        ForerunError: the members of a channel have different numbers of nodes on it, or a class that is no member
            has some.
    """
    tables = block_tables(program)
    class_step, steps = step_sequence(program)
    class_ptr, n_pred, counts = _count(
        class_step, steps, tables.ptr, tables.pred_base, tables.channel, len(program.channels)
    )
    _check_channels(program, counts)
    # Members agree, so the largest count of a column is the number of meetings of that channel.
    meetings = counts.max(axis=0)
    meeting_base = np.zeros(len(meetings) + 1, np.int64)
    np.cumsum(meetings, out=meeting_base[1:])
    sizes = np.array([len(c.members) for c in program.channels], np.int32)

    op, stream, phase, step, module, pred_ptr, pred, meeting, sync = _expand(
        class_step, steps, class_ptr, n_pred, meeting_base, *tables
    )
    return FlatProgram(
        n_ops=len(program.ops),
        class_ptr=class_ptr,
        op=op,
        stream=stream,
        phase=phase,
        step=step,
        module=module,
        pred_ptr=pred_ptr,
        pred=pred,
        meeting=meeting,
        meeting_size=np.repeat(sizes, meetings),
        sync=sync,
        meeting_channel=np.repeat(np.arange(len(meetings), dtype=np.int32), meetings),
        class_names=tuple(c.name for c in program.rank_classes),
        channel_names=tuple(c.name for c in program.channels),
    )


def check_channels(program: Program, tables: BlockTables) -> None:
    """Raise ForerunError as `unfold` does."""
    class_step, steps = step_sequence(program)
    _check_channels(
        program, _count(class_step, steps, tables.ptr, tables.pred_base, tables.channel, len(program.channels))[2]
    )


def _check_channels(program: Program, counts: I64) -> None:
    """Refuse channels whose members would wait for ever. `counts` is nodes by (class, channel)."""
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
    """First node of each class, an upper bound of the edges, and nodes by (class, channel)."""
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


@inlined
def expand_steps(
    first: int,
    last: int,
    class_first: int,
    steps: I32,
    tables: BlockTables,
    recorded: I64,
    met: I64,
    meeting_base: I64,
    i: int,
    edge: int,
    op: I32,
    stream: I8,
    phase: I8,
    step: I32,
    module: I32,
    pred_ptr: I64,
    pred: I32,
    meeting: I32,
    sync: I8,
) -> tuple[int, int]:
    """Write the nodes of steps `first` to `last` (exclusive) of the rank class whose first step is `class_first`.

    They go to the columns from node `i` and edge `edge` on; where they end is the answer. `recorded` (slots,) is the
    node that last recorded each event slot, `met` (channels,) how often the class was on each channel: both go on from
    what they say. The k-th node on a channel has meeting `meeting_base[channel] + k`.
    """
    for s in range(first, last):
        b = steps[s]
        block_first = i
        local_edge = tables.pred_base[b]
        for j in range(tables.ptr[b], tables.ptr[b + 1]):
            op[i] = tables.op[j]
            stream[i] = tables.stream[j]
            phase[i] = tables.phase[j]
            module[i] = tables.module[j]
            sync[i] = tables.sync[j]
            step[i] = s - class_first
            for e in range(local_edge, tables.pred_base[b] + tables.pred_end[j]):
                p = tables.pred[e]
                if p >= 0:
                    pred[edge] = block_first + p
                    edge += 1
                elif -1 - p < len(recorded) and recorded[-1 - p] >= 0:
                    pred[edge] = recorded[-1 - p]
                    edge += 1
            local_edge = tables.pred_base[b] + tables.pred_end[j]
            pred_ptr[i + 1] = edge
            channel = tables.channel[j]
            meeting[i] = -1
            if channel >= 0:
                meeting[i] = meeting_base[channel] + met[channel]
                met[channel] += 1
            if tables.record[j] >= 0:
                recorded[tables.record[j]] = i
            i += 1
    return i, edge


@njit
def _expand(
    class_step: I64,
    steps: I32,
    class_ptr: I64,
    n_pred: int,
    meeting_base: I64,
    block_ptr: I64,
    pred_base: I64,
    block_op: I32,
    block_stream: I8,
    block_phase: I8,
    block_module: I32,
    block_pred_end: I32,
    block_pred: I32,
    block_record: I16,
    block_channel: I16,
    block_sync: I8,
    n_slots: int,
) -> tuple[I32, I8, I8, I32, I32, I64, I32, I32, I8]:
    """The node columns of FlatProgram. `meeting_base` is the first meeting of each channel, the rest BlockTables, which
    would take longer to hand over as one."""
    tables = BlockTables(
        block_ptr, pred_base, block_op, block_stream, block_phase, block_module, block_pred_end, block_pred,
        block_record, block_channel, block_sync, n_slots,
    )  # fmt: skip
    n_nodes = class_ptr[-1]
    op = np.empty(n_nodes, np.int32)
    stream = np.empty(n_nodes, np.int8)
    phase = np.empty(n_nodes, np.int8)
    step = np.empty(n_nodes, np.int32)
    module = np.empty(n_nodes, np.int32)
    pred_ptr = np.zeros(n_nodes + 1, np.int64)
    pred = np.empty(n_pred, np.int32)
    meeting = np.empty(n_nodes, np.int32)
    sync = np.empty(n_nodes, np.int8)
    i = 0
    edge = 0
    for c in range(len(class_step) - 1):
        recorded = np.full(tables.n_slots, -1, np.int64)
        met = np.zeros(len(meeting_base), np.int64)
        i, edge = expand_steps(
            class_step[c], class_step[c + 1], class_step[c], steps, tables, recorded, met, meeting_base, i, edge,
            op, stream, phase, step, module, pred_ptr, pred, meeting, sync,
        )  # fmt: skip
    return op, stream, phase, step, module, pred_ptr, pred[:edge].copy(), meeting, sync
