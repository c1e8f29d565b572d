"""The order in which nodes are issued to their streams, of one rank or of all together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forerun.astrasim.chakra.graph import cycle, depths
from forerun.astrasim.chakra.meetings import Meetings, RankNodes
from forerun.astrasim.chakra.trace import RankTrace
from forerun.common.errors import ForerunError
from forerun.common.jit import njit
from forerun.core.program.types import I8, I32, I64, N_STREAMS


def predecessors(trace: RankTrace) -> tuple[I64, I32]:
    """Data and control dependencies of every row together, as CSR."""
    n = len(trace)
    owner = np.concatenate([np.repeat(np.arange(n), np.diff(p)) for p in (trace.data_ptr, trace.ctrl_ptr)])
    wanted = np.concatenate([trace.data, trace.ctrl])
    order = np.argsort(owner, kind="stable")
    pointer = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=n))]).astype(np.int64)
    return pointer, wanted[order].astype(np.int32)


def launch_order(trace: RankTrace, place: str) -> I64:
    """Rows by rising node number, but none before what it depends on: the order in which a host launches them.

    Raises:
        ForerunError: nodes depend on each other in a circle; `place` and the nodes are named.
    """
    pointer, wanted = predecessors(trace)
    key = np.empty(len(trace), np.int64)
    key[np.argsort(trace.node_id, kind="stable")] = np.arange(len(trace))
    rows = _by_key(pointer, wanted, key)
    if len(rows) < len(trace):
        circle = cycle(pointer, wanted, depths(pointer, wanted))
        named = " -> ".join(str(trace.node_id[row]) for row in [*circle[:8], *(circle[:1] if len(circle) <= 8 else [])])
        raise ForerunError(f"{place}: nodes depend on themselves: {named}{' ...' if len(circle) > 8 else ''}")
    return rows


def meeting_order(
    ranks: Sequence[RankNodes], meetings: Meetings, lane: Sequence[I8], duration: Sequence[I64]
) -> list[I64] | None:
    """Issue orders, as numbers in the given ones, in which in-order streams can't block each other; None if none is.

    All ranks are issued together, as they would start on free lanes: whenever the lanes of a node (of all nodes of a
    meeting) are free, the first that is ready, in the given order. `lane` and `duration` are by row of each trace.
    Every rank's order is its part of that common one.
    """
    first = np.concatenate([[0], np.cumsum([len(one.row) for one in ranks])]).astype(np.int64)
    n_nodes, n_meetings = int(first[-1]), len(meetings)
    unit = np.arange(n_nodes) + n_meetings
    for i in range(len(ranks)):
        met = np.flatnonzero(meetings.of_node[i] >= 0)
        unit[first[i] + met] = meetings.of_node[i][met]
    used, unit = np.unique(unit, return_inverse=True)
    unit = unit.reshape(-1)
    key = np.full(len(used), n_nodes, np.int64)
    np.minimum.at(key, unit, np.concatenate([np.arange(len(one.row)) for one in ranks]))
    time = np.zeros(len(used), np.int64)
    np.maximum.at(time, unit, np.concatenate([of[one.row] for of, one in zip(duration, ranks, strict=True)]))
    parents, children = [], []
    for i, one in enumerate(ranks):
        pointer, wanted = predecessors(one.trace)
        position = np.empty(len(one.row), np.int64)
        position[one.row] = np.arange(len(one.row))
        parents.append(unit[first[i] + position[wanted]])
        children.append(unit[first[i] + position[np.repeat(np.arange(len(one.row)), np.diff(pointer))]])
    lanes = np.concatenate(
        [i * N_STREAMS + of[one.row].astype(np.int64) for i, (of, one) in enumerate(zip(lane, ranks, strict=True))]
    )
    child, parent = np.concatenate(children), np.concatenate(parents)
    order = _by_time(
        *_grouped(parent, child, len(used)),
        np.bincount(child, minlength=len(used)),
        *_grouped(unit, lanes, len(used)),
        key,
        time,
        len(ranks) * N_STREAMS,
    )
    if len(order) < len(used):
        return None
    when = np.empty(len(used), np.int64)
    when[order] = np.arange(len(used))
    return [np.argsort(when[unit[first[i] : first[i + 1]]], kind="stable") for i in range(len(ranks))]


def _grouped(owner: I64, values: I64, n: int) -> tuple[I64, I64]:
    """Values of each of `n` owners, as CSR."""
    pointer = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=n))]).astype(np.int64)
    return pointer, values[np.argsort(owner, kind="stable")].astype(np.int64)


@njit
def _by_time(
    child_ptr: I64, child: I64, waiting: I64, lane_ptr: I64, lane: I64, key: I64, time: I64, n_lanes: int
) -> I64:  # fmt: skip
    """Units in the order in which they start; shorter where stuck. `waiting` counts predecessors and is used up."""
    n = len(key)
    base = np.zeros(n_lanes + 1, np.int64)
    for each in lane:
        base[each + 1] += 1
    for i in range(n_lanes):
        base[i + 1] += base[i]
    waits, n_waits = np.empty(len(lane), np.int64), np.zeros(n_lanes, np.int64)
    is_busy, is_touched = np.zeros(n_lanes, np.bool_), np.zeros(n_lanes, np.bool_)
    touched, n_touched = np.empty(n_lanes, np.int64), 0
    end, running, n_running = np.zeros(n, np.int64), np.empty(n, np.int64), 0
    order, done, now = np.empty(n, np.int64), 0, 0
    fresh, n_fresh = np.empty(n, np.int64), 0
    for u in range(n):
        if waiting[u] == 0:
            fresh[n_fresh] = u
            n_fresh += 1
    while n_fresh or n_running:
        # All that ends now, ends before anything starts.
        while n_running and (end[running[0]] == now or n_fresh == 0):
            u = running[0]
            if end[u] > now and n_touched:
                break
            now = end[u]
            n_running = _pop(running, n_running, end)
            for e in range(lane_ptr[u], lane_ptr[u + 1]):
                is_busy[lane[e]] = False
                if not is_touched[lane[e]]:
                    is_touched[lane[e]] = True
                    touched[n_touched] = lane[e]
                    n_touched += 1
            for e in range(child_ptr[u], child_ptr[u + 1]):
                waiting[child[e]] -= 1
                if waiting[child[e]] == 0:
                    fresh[n_fresh] = child[e]
                    n_fresh += 1
        for f in range(n_fresh):
            at = lane[lane_ptr[fresh[f]]]
            n_waits[at] = _push(waits[base[at] :], n_waits[at], fresh[f], key)
            if not is_touched[at]:
                is_touched[at] = True
                touched[n_touched] = at
                n_touched += 1
        n_fresh = 0
        for t in range(n_touched):
            at = touched[t]
            is_touched[at] = False
            while not is_busy[at] and n_waits[at]:
                u = waits[base[at]]
                n_waits[at] = _pop(waits[base[at] :], n_waits[at], key)
                other = -1
                for e in range(lane_ptr[u], lane_ptr[u + 1]):
                    if is_busy[lane[e]]:
                        other = lane[e]
                        break
                if other >= 0:
                    n_waits[other] = _push(waits[base[other] :], n_waits[other], u, key)
                    continue
                order[done] = u
                done += 1
                for e in range(lane_ptr[u], lane_ptr[u + 1]):
                    is_busy[lane[e]] = True
                end[u] = now + time[u]
                n_running = _push(running, n_running, u, end)
        n_touched = 0
    ordered: I64 = order[:done].copy()
    return ordered


@njit
def _by_key(pointer: I64, wanted: I32, key: I64) -> I64:
    """Nodes in topological order, of those that are ready the one with the lowest key first; shorter where stuck."""
    n = len(key)
    start = np.zeros(n + 1, np.int64)
    for parent in wanted:
        start[parent + 1] += 1
    for i in range(n):
        start[i + 1] += start[i]
    users, filled = np.empty(len(wanted), np.int32), start[:n].copy()
    waiting = np.zeros(n, np.int64)
    for i in range(n):
        for e in range(pointer[i], pointer[i + 1]):
            users[filled[wanted[e]]] = i
            filled[wanted[e]] += 1
            waiting[i] += 1
    heap, size = np.empty(n, np.int64), 0
    for i in range(n):
        if waiting[i] == 0:
            size = _push(heap, size, i, key)
    order, done = np.empty(n, np.int64), 0
    while size:
        i = heap[0]
        size = _pop(heap, size, key)
        order[done] = i
        done += 1
        for e in range(start[i], start[i + 1]):
            user = users[e]
            waiting[user] -= 1
            if waiting[user] == 0:
                size = _push(heap, size, user, key)
    ordered: I64 = order[:done].copy()
    return ordered


@njit
def _before(a: int, b: int, key: I64) -> bool:
    return bool(key[a] < key[b] or (key[a] == key[b] and a < b))


@njit
def _push(heap: I64, size: int, node: int, key: I64) -> int:
    i = size
    while i > 0 and _before(node, heap[(i - 1) >> 1], key):
        heap[i] = heap[(i - 1) >> 1]
        i = (i - 1) >> 1
    heap[i] = node
    return size + 1


@njit
def _pop(heap: I64, size: int, key: I64) -> int:
    """Take the first out; the new size."""
    size -= 1
    node, i = heap[size], 0
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        if child + 1 < size and _before(heap[child + 1], heap[child], key):
            child += 1
        if not _before(heap[child], node, key):
            break
        heap[i] = heap[child]
        i = child
    heap[i] = node
    return size
