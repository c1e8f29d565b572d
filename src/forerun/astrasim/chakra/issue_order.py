"""The order in which nodes are issued to their streams, for one rank or for all ranks together."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from forerun.astrasim.chakra.graph import cycle, depths
from forerun.astrasim.chakra.meetings import Meetings, RankNodes
from forerun.astrasim.chakra.trace import RankTrace
from forerun.common.arrays import grouped, pointers, positions
from forerun.common.errors import ForerunError
from forerun.common.jit import njit
from forerun.core.program.types import I8, I32, I64, N_STREAMS

_NAMED = 8
"""nodes of a cycle that a message names"""


def predecessors(trace: RankTrace) -> tuple[I64, I32]:
    """Returns the data and control dependencies of every row together, as CSR."""
    n = len(trace)
    owner = np.concatenate([np.repeat(np.arange(n), np.diff(p)) for p in (trace.data_ptr, trace.ctrl_ptr)])
    pointer, wanted = grouped(owner, np.concatenate([trace.data, trace.ctrl]), n)
    return pointer, wanted.astype(np.int32)


def launch_order(trace: RankTrace, place: str) -> I64:
    """Returns the rows in the order in which a host launches them: by node id, but no node before its dependencies.

    Raises ForerunError if nodes depend on each other in a cycle; `place` and the nodes are named.
    """
    pointer, wanted = predecessors(trace)
    n, waiting = len(trace), np.diff(pointer)
    by_id = positions(np.argsort(trace.node_id, kind="stable"))
    rows = _by_key(*grouped(wanted, np.repeat(np.arange(n), waiting), n), waiting, by_id)
    if len(rows) < n:
        circle = cycle(pointer, wanted, depths(pointer, wanted))
        shown = circle[:_NAMED] + (circle[:1] if len(circle) <= _NAMED else [])
        named = " -> ".join(str(trace.node_id[row]) for row in shown)
        raise ForerunError(f"{place}: nodes depend on themselves: {named}{' ...' if len(circle) > _NAMED else ''}")
    return rows


def meeting_order(
    ranks: Sequence[RankNodes], meetings: Meetings, stream: Sequence[I8], duration: Sequence[I64]
) -> list[I64] | None:
    """Finds issue orders, as numbers in the given ones, in which in-order streams never block each other for ever.

    It issues the nodes of all ranks together: whenever the stream of a node is free (for a meeting, the streams of all
    its nodes), the first ready node starts, in the given order. Each rank's order is its part of this common order.
    `stream` and `duration` are by row of each trace. Returns None if nodes are left that can never start.
    """
    first = pointers([len(one.row) for one in ranks])
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
        parents.append(unit[first[i] + one.position[wanted]])
        children.append(unit[first[i] + one.position[np.repeat(np.arange(len(one.row)), np.diff(pointer))]])
    streams = np.concatenate(
        [i * N_STREAMS + of[one.row].astype(np.int64) for i, (of, one) in enumerate(zip(stream, ranks, strict=True))]
    )
    child, parent = np.concatenate(children), np.concatenate(parents)
    order = _by_time(
        *grouped(parent, child, len(used)),
        np.bincount(child, minlength=len(used)),
        *grouped(unit, streams, len(used)),
        key,
        time,
        len(ranks) * N_STREAMS,
    )
    if len(order) < len(used):
        return None
    when = positions(order)
    return [np.argsort(when[unit[first[i] : first[i + 1]]], kind="stable") for i in range(len(ranks))]


@njit
def _by_time(
    child_ptr: I64, child: I64, waiting: I64, stream_ptr: I64, stream: I64, key: I64, time: I64, n_streams: int
) -> I64:  # fmt: skip
    """Returns units (nodes or meetings) in the order in which they start, without those that never start.

    A unit occupies all its streams for its `time`. `waiting` counts its predecessors and is used up.
    """
    # numba takes the type of an empty list from an entry that is never made
    queues = [[(key[0], np.int64(0)) for _ in range(0)] for _ in range(n_streams)]
    running = [(np.int64(0), np.int64(0)) for _ in range(0)]
    touched = [np.int64(0) for _ in range(0)]
    is_busy, is_touched = np.zeros(n_streams, np.bool_), np.zeros(n_streams, np.bool_)
    order, done, now = np.empty(len(key), np.int64), 0, np.int64(0)
    fresh = [np.int64(u) for u in range(len(key)) if waiting[u] == 0]
    while len(fresh) or len(running):
        # Everything that ends now ends before anything starts.
        while len(running) and (running[0][0] == now or not len(fresh)):
            if running[0][0] > now and len(touched):
                break
            now, u = heapq.heappop(running)
            for e in range(stream_ptr[u], stream_ptr[u + 1]):
                is_busy[stream[e]] = False
                if not is_touched[stream[e]]:
                    is_touched[stream[e]] = True
                    touched.append(stream[e])
            for e in range(child_ptr[u], child_ptr[u + 1]):
                waiting[child[e]] -= 1
                if waiting[child[e]] == 0:
                    fresh.append(child[e])
        for u in fresh:
            at = stream[stream_ptr[u]]
            heapq.heappush(queues[at], (key[u], u))
            if not is_touched[at]:
                is_touched[at] = True
                touched.append(at)
        fresh.clear()
        for at in touched:
            is_touched[at] = False
            while not is_busy[at] and len(queues[at]):
                _, u = heapq.heappop(queues[at])
                other = -1
                for e in range(stream_ptr[u], stream_ptr[u + 1]):
                    if is_busy[stream[e]]:
                        other = stream[e]
                        break
                if other >= 0:
                    heapq.heappush(queues[other], (key[u], u))
                    continue
                order[done] = u
                done += 1
                for e in range(stream_ptr[u], stream_ptr[u + 1]):
                    is_busy[stream[e]] = True
                heapq.heappush(running, (now + time[u], u))
        touched.clear()
    started: I64 = order[:done].copy()
    return started


@njit
def _by_key(child_ptr: I64, child: I64, waiting: I64, key: I64) -> I64:
    """Returns nodes in topological order, of the ready ones that with the lowest key first, without those on cycles."""
    ready = [(key[node], np.int64(node)) for node in range(len(key)) if waiting[node] == 0]
    heapq.heapify(ready)
    order, done = np.empty(len(key), np.int64), 0
    while len(ready):
        _, node = heapq.heappop(ready)
        order[done] = node
        done += 1
        for e in range(child_ptr[node], child_ptr[node + 1]):
            waiting[child[e]] -= 1
            if waiting[child[e]] == 0:
                heapq.heappush(ready, (key[child[e]], child[e]))
    ordered: I64 = order[:done].copy()
    return ordered
