"""A window of a Program: the nodes of each rank class that run now, and how it moves on.

Of each rank class a window holds *live* nodes, from the first that has not ended to the last that was expanded, and
before them *ghosts*: ended nodes that live ones, or nodes to come, still wait for. Everything else is forgotten.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.common.jit import njit
from forerun.core.engine.actors import Records
from forerun.core.program.types import I8, I32, I64
from forerun.core.program.unfold import BlockTables, expand_steps

Mask = npt.NDArray[np.bool_]
_GONE = -1
_NEEDED = -2


class Window(NamedTuple):
    """Columns of nodes, rank classes one after the other in issue order, and what is known of the rest."""

    class_ptr: I64
    """(classes + 1,) first node of each class, ghosts included"""
    n_ghosts: I64
    n_dropped: I64
    """(classes,) nodes of each class before its first live one"""
    next_step: I64
    """(classes,) first step that is not expanded"""
    op: I32
    stream: I8
    phase: I8
    step: I32
    module: I32
    pred_ptr: I64
    pred: I32
    meeting: I32
    sync: I8
    start: I64
    end: I64
    issued: I64
    meeting_size: I32
    meeting_channel: I32
    meeting_base: I64
    """(channels,) the k-th meeting of a channel has this number + k"""
    recorded: I64
    """(classes, slots) node that last recorded each event slot, -1 for none"""
    met: I64
    """(classes, channels) expanded nodes on each channel"""
    gone: I64
    """(classes, channels) those of them that were dropped"""


def empty_window(class_step: I64, n_slots: int, n_channels: int) -> Window:
    """A window before the first node of every class."""
    n_classes = len(class_step) - 1
    none, none32, none8 = np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0, np.int8)
    zero = np.zeros(n_classes, np.int64)
    counts = np.zeros((n_classes, n_channels), np.int64)
    return Window(
        class_ptr=np.zeros(n_classes + 1, np.int64),
        n_ghosts=zero,
        n_dropped=zero,
        next_step=class_step[:-1].copy(),
        op=none32,
        stream=none8,
        phase=none8,
        step=none32,
        module=none32,
        pred_ptr=np.zeros(1, np.int64),
        pred=none32,
        meeting=none32,
        sync=none8,
        start=none,
        end=none,
        issued=none,
        meeting_size=none32,
        meeting_channel=none32,
        meeting_base=np.zeros(n_channels, np.int64),
        recorded=np.full((n_classes, n_slots), -1, np.int64),
        met=counts,
        gone=counts.copy(),
    )


@njit
def first_left(window: Window) -> I64:
    """The first node of each class that has not ended, ghosts aside; its end where all have."""
    left = np.empty(len(window.n_ghosts), np.int64)
    for c in range(len(left)):
        i = window.class_ptr[c] + window.n_ghosts[c]
        while i < window.class_ptr[c + 1] and window.end[i] >= 0:
            i += 1
        left[c] = i
    return left


@njit
def _kept(window: Window, left: I64) -> I32:
    """For each node: _GONE or _NEEDED before the first one left of its class, else 0."""
    place = np.zeros(len(window.op), np.int32)
    for c in range(len(left)):
        place[window.class_ptr[c] : left[c]] = _GONE
        for i in range(left[c], window.class_ptr[c + 1]):
            if window.end[i] < 0:
                for e in range(window.pred_ptr[i], window.pred_ptr[i + 1]):
                    if window.pred[e] < left[c]:
                        place[window.pred[e]] = _NEEDED
        for k in range(window.recorded.shape[1]):
            node = window.recorded[c, k]
            if 0 <= node < left[c]:
                place[node] = _NEEDED
    return place


@njit
def _steps_to_come(
    window: Window, class_step: I64, steps: I32, tables: BlockTables, want: I64
) -> tuple[I64, I64, int]:  # fmt: skip
    """End of the steps that give each class `want` more nodes at least, how many nodes that are, and edges at most."""
    last = window.next_step.copy()
    added = np.zeros(len(want), np.int64)
    edges = 0
    for c in range(len(want)):
        while last[c] < class_step[c + 1] and added[c] < want[c]:
            b = steps[last[c]]
            added[c] += tables.ptr[b + 1] - tables.ptr[b]
            edges += tables.pred_base[b + 1] - tables.pred_base[b]
            last[c] += 1
    return last, added, edges


@njit
def _meetings(
    old: Window, left: I64, last: I64, steps: I32, tables: BlockTables, member: Mask, gone: I64
) -> tuple[I32, I32, I64]:  # fmt: skip
    """Size and channel of the meetings of the next window, and the base of each channel; counts what is dropped."""
    n_channels = gone.shape[1]
    expanded = old.met.copy()
    for c in range(len(left)):
        for i in range(old.class_ptr[c] + old.n_ghosts[c], left[c]):
            if old.meeting[i] >= 0:
                gone[c, old.meeting_channel[old.meeting[i]]] += 1
        if n_channels:
            for s in range(old.next_step[c], last[c]):
                for j in range(tables.ptr[steps[s]], tables.ptr[steps[s] + 1]):
                    if tables.channel[j] >= 0:
                        expanded[c, tables.channel[j]] += 1
    base = np.zeros(n_channels, np.int64)
    count = np.zeros(n_channels, np.int64)
    total = 0
    for channel in range(n_channels):
        low, high = np.iinfo(np.int64).max, 0
        for c in range(len(left)):
            if member[c, channel]:
                low = min(low, gone[c, channel])
                high = max(high, expanded[c, channel])
        count[channel] = max(0, high - low)
        base[channel] = total - low
        total += count[channel]
    size = np.empty(total, np.int32)
    channel_of = np.empty(total, np.int32)
    m = 0
    for channel in range(n_channels):
        members = member[:, channel].sum()
        for _ in range(count[channel]):
            size[m] = members
            channel_of[m] = channel
            m += 1
    return size, channel_of, base


@njit
def refill(
    old: Window, left: I64, class_step: I64, steps: I32, tables: BlockTables, member: Mask, want: I64, host: Records
) -> Window:  # fmt: skip
    """The window that goes on from `left`, with `want` more nodes of each class where there are so many.

    `member` (classes, channels) says who takes part where. What `host` says of nodes moves with them.
    """
    n_classes = len(left)
    place = _kept(old, left)
    last, added, new_edges = _steps_to_come(old, class_step, steps, tables, want)
    gone = old.gone.copy()
    meeting_size, meeting_channel, meeting_base = _meetings(old, left, last, steps, tables, member, gone)
    n_nodes = added.sum()
    for c in range(n_classes):
        n_nodes += old.class_ptr[c + 1] - left[c]
    for i in range(len(place)):
        n_nodes += place[i] == _NEEDED
    n_edges = len(old.pred) + new_edges
    op, step, module = np.empty(n_nodes, np.int32), np.empty(n_nodes, np.int32), np.empty(n_nodes, np.int32)
    stream, phase, sync = np.empty(n_nodes, np.int8), np.empty(n_nodes, np.int8), np.zeros(n_nodes, np.int8)
    pred_ptr, pred = np.zeros(n_nodes + 1, np.int64), np.empty(n_edges, np.int32)
    meeting = np.full(n_nodes, -1, np.int32)
    start, end, issued = np.zeros(n_nodes, np.int64), np.full(n_nodes, -1, np.int64), np.zeros(n_nodes, np.int64)
    class_ptr = np.zeros(n_classes + 1, np.int64)
    n_ghosts = np.zeros(n_classes, np.int64)
    n_dropped = old.n_dropped.copy()
    recorded = old.recorded.copy()
    met = old.met.copy()
    i = 0
    edge = 0
    for c in range(n_classes):
        n_dropped[c] += left[c] - old.class_ptr[c] - old.n_ghosts[c]
        for j in range(old.class_ptr[c], old.class_ptr[c + 1]):
            if place[j] == _GONE:
                continue
            op[i], stream[i], phase[i], step[i] = old.op[j], old.stream[j], old.phase[j], old.step[j]
            module[i], start[i], end[i], issued[i] = old.module[j], old.start[j], old.end[j], old.issued[j]
            if place[j] == _NEEDED:
                n_ghosts[c] += 1
            else:
                sync[i] = old.sync[j]
                if old.meeting[j] >= 0:
                    channel = old.meeting_channel[old.meeting[j]]
                    meeting[i] = old.meeting[j] - old.meeting_base[channel] + meeting_base[channel]
                if end[i] < 0:
                    for e in range(old.pred_ptr[j], old.pred_ptr[j + 1]):
                        pred[edge] = place[old.pred[e]]
                        edge += 1
            pred_ptr[i + 1] = edge
            place[j] = i
            i += 1
        for k in range(recorded.shape[1]):
            if recorded[c, k] >= 0:
                recorded[c, k] = place[recorded[c, k]]
        first_live = class_ptr[c] + n_ghosts[c]
        host[c].next += first_live - left[c]
        if host[c].awaits >= 0:
            host[c].awaits += first_live - left[c]
        i, edge = expand_steps(
            old.next_step[c], last[c], class_step[c], steps, tables, recorded[c], met[c], meeting_base, i, edge,
            op, stream, phase, step, module, pred_ptr, pred, meeting, sync,
        )  # fmt: skip
        class_ptr[c + 1] = i
    return Window(
        class_ptr, n_ghosts, n_dropped, last, op, stream, phase, step, module, pred_ptr, pred[:edge], meeting, sync,
        start, end, issued, meeting_size, meeting_channel, meeting_base, recorded, met, gone,
    )  # fmt: skip


class Ahead(NamedTuple):
    """Where the steps to come first touch streams, event slots and channels.

    The first three are the first node of a block, -1 for none; the others a step of a class: none before it, of those
    to come, has such a node.
    """

    first_on: I32
    """(blocks, streams)"""
    first_record: I32
    """(blocks, slots)"""
    first_meeting: I32
    """(blocks, channels)"""
    next_on: I64
    """(classes, streams)"""
    next_record: I64
    """(classes, slots)"""
    next_meeting: I64
    """(classes, channels)"""


@njit
def look_ahead(tables: BlockTables, n_classes: int, n_streams: int, n_channels: int) -> Ahead:
    """Nothing of the steps is known yet."""
    n_blocks = len(tables.ptr) - 1
    first_on = np.full((n_blocks, n_streams), -1, np.int32)
    first_record = np.full((n_blocks, tables.n_slots), -1, np.int32)
    first_meeting = np.full((n_blocks, n_channels), -1, np.int32)
    for b in range(n_blocks):
        for j in range(tables.ptr[b + 1] - 1, tables.ptr[b] - 1, -1):
            first_on[b, tables.stream[j]] = j - tables.ptr[b]
            if tables.record[j] >= 0:
                first_record[b, tables.record[j]] = j - tables.ptr[b]
            if tables.channel[j] >= 0:
                first_meeting[b, tables.channel[j]] = j - tables.ptr[b]
    on = np.zeros((n_classes, n_streams), np.int64)
    record = np.zeros((n_classes, tables.n_slots), np.int64)
    return Ahead(first_on, first_record, first_meeting, on, record, np.zeros((n_classes, n_channels), np.int64))


@njit
def _next_step(first: int, last: int, steps: I32, first_node: I32, following: I64, what: int) -> int:
    """The first step from `first` to `last` (exclusive) whose block has a node of kind `what`, `last` for none."""
    t = max(first, following[what])
    while t < last and first_node[steps[t], what] < 0:
        t += 1
    following[what] = t
    return int(min(t, last))


@njit
def _waits_for_steps_to_come(
    c: int, t: int, j: int, window: Window, ahead: Ahead, steps: I32, tables: BlockTables
) -> bool:  # fmt: skip
    """Whether node `j` of step `t` of class `c`, which is to come, waits for another node that is to come."""
    b = steps[t]
    begin = tables.pred_base[b]
    if j > 0:
        begin += tables.pred_end[tables.ptr[b] + j - 1]
    for e in range(begin, tables.pred_base[b] + tables.pred_end[tables.ptr[b] + j]):
        slot = -1 - tables.pred[e]
        if slot < 0:
            return True
        if slot < tables.n_slots:
            recorded = _next_step(window.next_step[c], t, steps, ahead.first_record, ahead.next_record[c], slot)
            if recorded < t or 0 <= ahead.first_record[b, slot] < j:
                return True
    return False


@njit
def streams_with_more(
    window: Window, ahead: Ahead, class_step: I64, steps: I32, tables: BlockTables, member: Mask
) -> Mask:  # fmt: skip
    """For each actor: whether its stream has a node to come that nothing to come holds back, (classes * streams,).

    A node is held back if it waits for a node to come, or meets one that does: the next nodes of both classes on their
    channel, of which both have had equally many.
    """
    n_classes, n_streams = ahead.next_on.shape
    more = np.zeros(n_classes * n_streams, np.bool_)
    for c in range(n_classes):
        first, last = window.next_step[c], class_step[c + 1]
        for s in range(n_streams):
            t = _next_step(first, last, steps, ahead.first_on, ahead.next_on[c], s)
            if t == last:
                continue
            j = ahead.first_on[steps[t], s]
            held = _waits_for_steps_to_come(c, t, j, window, ahead, steps, tables)
            channel = tables.channel[tables.ptr[steps[t]] + j]
            if not held and channel >= 0:
                at = _next_step(first, last, steps, ahead.first_meeting, ahead.next_meeting[c], channel)
                if at == t and ahead.first_meeting[steps[t], channel] == j:
                    for d in range(n_classes):
                        if d != c and member[d, channel] and window.met[d, channel] == window.met[c, channel]:
                            at = _next_step(
                                window.next_step[d], class_step[d + 1], steps, ahead.first_meeting,
                                ahead.next_meeting[d], channel,
                            )  # fmt: skip
                            other = ahead.first_meeting[steps[at], channel]
                            held |= _waits_for_steps_to_come(d, at, other, window, ahead, steps, tables)
            more[c * n_streams + s] = not held
    return more
