"""unfold: a Program with its repeat blocks expanded, ready for the engine."""

from __future__ import annotations

import numpy as np

from forerun.errors import ForerunError
from forerun.jit import njit
from forerun.program.types import I8, I16, I32, I64, FlatProgram, Program


def unfold(program: Program) -> FlatProgram:
    """Expand the block sequence of every rank class.

    A wait on an event slot becomes a predecessor: the node of the same rank class that last recorded the slot before
    it in issue order (no predecessor where none has). The k-th node on a channel in each of its member classes
    meet. Indices are taken as they are: `program.validate.check` finds those out of range.

    Raises:
        ForerunError: the members of a channel have different numbers of nodes on it, or a class that is no member
            has some.
    """
    blocks, classes = program.blocks, program.rank_classes
    if not blocks or not classes:
        raise ForerunError(f"program: {len(blocks)} blocks and {len(classes)} rank classes; needs one of each at least")
    block_ptr = np.zeros(len(blocks) + 1, np.int64)
    np.cumsum([len(b.op) for b in blocks], out=block_ptr[1:])
    pred_base = np.zeros(len(blocks) + 1, np.int64)
    np.cumsum([len(b.pred) for b in blocks], out=pred_base[1:])
    class_step = np.zeros(len(classes) + 1, np.int64)
    np.cumsum([len(c.block) for c in classes], out=class_step[1:])
    steps = np.concatenate([c.block for c in classes])
    channel = np.concatenate([b.channel for b in blocks])
    n_channels = len(program.channels)

    class_ptr, n_pred, counts = _count(class_step, steps, block_ptr, pred_base, channel, n_channels)
    _check_channels(program, counts)
    # Members agree, so the largest count of a column is the number of meetings of that channel.
    meetings = counts.max(axis=0)
    meeting_base = np.zeros(n_channels + 1, np.int64)
    np.cumsum(meetings, out=meeting_base[1:])
    sizes = np.array([len(c.members) for c in program.channels], np.int32)

    op, stream, phase, step, module, pred_ptr, pred, meeting, sync = _expand(
        class_step,
        steps,
        class_ptr,
        n_pred,
        block_ptr,
        pred_base,
        np.concatenate([b.op for b in blocks]),
        np.concatenate([b.stream for b in blocks]),
        np.concatenate([b.phase for b in blocks]),
        np.concatenate([b.module for b in blocks]),
        np.concatenate([b.pred_ptr[1:] for b in blocks]),
        np.concatenate([b.pred for b in blocks]),
        np.concatenate([b.record for b in blocks]),
        channel,
        np.concatenate([b.sync for b in blocks]),
        meeting_base,
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
        meeting_channel=np.repeat(np.arange(n_channels, dtype=np.int32), meetings),
        class_names=tuple(c.name for c in classes),
        channel_names=tuple(c.name for c in program.channels),
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


@njit
def _expand(
    class_step: I64,
    steps: I32,
    class_ptr: I64,
    n_pred: int,
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
    meeting_base: I64,
) -> tuple[I32, I8, I8, I32, I32, I64, I32, I32, I8]:
    """The node columns of FlatProgram. `meeting_base` is the first meeting of each channel."""
    n_nodes = class_ptr[-1]
    op = np.empty(n_nodes, np.int32)
    stream = np.empty(n_nodes, np.int8)
    phase = np.empty(n_nodes, np.int8)
    step = np.empty(n_nodes, np.int32)
    module = np.empty(n_nodes, np.int32)
    pred_ptr = np.zeros(n_nodes + 1, np.int64)
    pred = np.empty(n_pred, np.int32)
    meeting = np.full(n_nodes, -1, np.int32)
    sync = np.empty(n_nodes, np.int8)
    n_slots = 0
    for j in range(len(block_record)):
        n_slots = max(n_slots, block_record[j] + 1)
    i = 0
    edge = 0
    for c in range(len(class_step) - 1):
        recorded = np.full(n_slots, -1, np.int64)
        met = np.zeros(len(meeting_base), np.int64)
        for s in range(class_step[c], class_step[c + 1]):
            b = steps[s]
            first = i
            local_edge = pred_base[b]
            for j in range(block_ptr[b], block_ptr[b + 1]):
                op[i] = block_op[j]
                stream[i] = block_stream[j]
                phase[i] = block_phase[j]
                module[i] = block_module[j]
                sync[i] = block_sync[j]
                step[i] = s - class_step[c]
                for e in range(local_edge, pred_base[b] + block_pred_end[j]):
                    p = block_pred[e]
                    if p >= 0:
                        pred[edge] = first + p
                        edge += 1
                    elif -1 - p < n_slots and recorded[-1 - p] >= 0:
                        pred[edge] = recorded[-1 - p]
                        edge += 1
                local_edge = pred_base[b] + block_pred_end[j]
                pred_ptr[i + 1] = edge
                channel = block_channel[j]
                if channel >= 0:
                    meeting[i] = meeting_base[channel] + met[channel]
                    met[channel] += 1
                if block_record[j] >= 0:
                    recorded[block_record[j]] = i
                i += 1
    return op, stream, phase, step, module, pred_ptr, pred[:edge].copy(), meeting, sync
