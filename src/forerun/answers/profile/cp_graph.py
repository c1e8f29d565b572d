"""The graph of a critical path: its edges from call stacks and streams, and its longest path, in compiled loops.

A node is the start (2 x row) or the end (2 x row + 1) of an event. Edges are arrays in the order in which HTA adds
them, because among equally long paths the first one counts.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.common.jit import njit
from forerun.sources.profile.profile import F64, I64, Mask


class EdgeType(IntEnum):
    OPERATOR = 0
    DEPENDENCY = 1
    LAUNCH_DELAY = 2
    KERNEL_DELAY = 3
    SYNC = 4


class GpuEvent(IntEnum):
    """The parts that an event of the device can play in the graph."""

    KERNEL = 0
    STREAM_WAIT = 1
    EVENT_SYNC = 2
    STREAM_SYNC = 3
    CONTEXT_SYNC = 4


class Edges(NamedTuple):
    """Edges in order; `weight_us` is 0 for those that only order, `event` is the row that an edge belongs to, or -1."""

    source: I64
    target: I64
    type: npt.NDArray[np.int8]
    weight_us: F64
    event: I64

    @classmethod
    def empty(cls, n_edges: int) -> Edges:
        """Returns columns for `n_edges` edges that hold nothing yet."""
        wide = np.int64
        numbers = (np.empty(n_edges, wide), np.empty(n_edges, wide), np.empty(n_edges, np.int8))
        return cls(*numbers, np.empty(n_edges, np.float64), np.empty(n_edges, wide))

    def take(self, chosen: I64 | slice) -> Edges:
        """Returns these edges alone."""
        return Edges(
            self.source[chosen], self.target[chosen], self.type[chosen], self.weight_us[chosen], self.event[chosen]
        )


class DeviceWork(NamedTuple):
    """Work and synchronisations of the device in order of time, one entry for each."""

    row: I64
    kind: I64
    stream: I64
    """numbered from 0"""
    launch: I64
    """row of the call that launched it, -1 without one"""
    launch_us: F64
    queue: F64
    """launches that wait on the stream when it starts"""
    launch_queue: F64
    """launches that wait on the stream when it is launched"""
    source: I64
    """of waits for an event the row of the kernel that is waited for, else -1"""
    waiting: I64
    """of a stream's wait the row of the kernel that waits, else -1"""


_OPERATOR, _DEPENDENCY, _LAUNCH, _DELAY, _SYNC = map(int, EdgeType)
_KERNEL, _STREAM_WAIT, _EVENT_SYNC, _STREAM_SYNC, _CONTEXT_SYNC = map(int, GpuEvent)


@njit
def stack_edges(
    row: I64, is_start: Mask, time_us: F64, in_graph: Mask, blocking: Mask, edges: Edges, count: int
) -> int:
    """Appends the edges of one thread. Starts push, ends pop whatever is on top. Returns the number of edges.

    `row`, `is_start` and `time_us` are of the starts and ends in order; `in_graph` and `blocking` are by row.
    """
    source, target, kind, weight, event = edges
    n = len(row)
    stack = np.empty(n, np.int64)
    depth = 0
    last, last_us, last_parent = -1, 0.0, -1
    top_level, level = -1, 0
    for i in range(n):
        if is_start[i]:
            parent = stack[depth - 1] if depth > 0 else -1
            stack[depth] = row[i]
            depth += 1
            one, node = row[i], 2 * row[i]
        else:
            depth -= 1
            one = stack[depth]
            parent = stack[depth - 1] if depth > 0 else -1
            node = 2 * one + 1
        if not in_graph[one]:
            continue
        now_us = time_us[one] if is_start[i] else time_us[len(in_graph) + one]
        if is_start[i]:
            if level == 0 and top_level >= 0:
                source[count], target[count], kind[count] = top_level, node, _DEPENDENCY
                weight[count], event[count] = 0.0, -1
                count += 1
            level += 1
        else:
            level -= 1
        if last >= 0:
            source[count], target[count], kind[count] = last, node, _OPERATOR
            weight[count] = 0.0 if not is_start[i] and blocking[one] else now_us - last_us
            if last % 2 == 0:
                event[count] = last // 2
            elif node % 2 == 1:
                event[count] = one
            else:
                event[count] = last_parent
            count += 1
        if not is_start[i] and level == 0:
            last, top_level = -1, node
        else:
            last, last_us, last_parent = node, now_us, parent
    return count


@njit
def device_edges(
    work: DeviceWork, start_us: F64, end_us: F64, in_graph: Mask, n_streams: int, edges: Edges, count: int
) -> int:
    """Appends the edges of the device's work. Returns the number of edges."""
    row, what, stream, launch, launch_us, queue, launch_queue, waited, waiting = work
    source, target, kind, weight, event = edges
    last = np.full(n_streams, -1, np.int64)
    order = np.empty(n_streams, np.int64)
    n_seen = 0
    must_wait = np.full(len(in_graph), -1, np.int64)
    for i in range(len(row)):
        one, on = row[i], stream[i]
        if what[i] != _KERNEL:
            if what[i] == _STREAM_WAIT:
                if waited[i] >= 0 and waiting[i] >= 0:
                    must_wait[waiting[i]] = waited[i]
                continue
            call = launch[i]
            if call < 0 or not in_graph[call]:
                continue
            if what[i] == _EVENT_SYNC:
                if waited[i] >= 0 and in_graph[waited[i]]:
                    source[count], target[count] = 2 * waited[i] + 1, 2 * call + 1
                    kind[count], weight[count], event[count] = _SYNC, 0.0, -1
                    count += 1
                continue
            for place in range(n_seen):
                if last[order[place]] >= 0 and (what[i] == _CONTEXT_SYNC or order[place] == on):
                    source[count], target[count] = 2 * last[order[place]] + 1, 2 * call + 1
                    kind[count], weight[count], event[count] = _SYNC, 0.0, -1
                    count += 1
            continue
        source[count], target[count], kind[count] = 2 * one, 2 * one + 1, _OPERATOR
        weight[count], event[count] = end_us[one] - start_us[one], one
        count += 1
        before = must_wait[one]
        must_wait[one] = -1
        if before >= 0 and not in_graph[before]:
            before = -1
        if before >= 0:
            source[count], target[count], kind[count] = 2 * before + 1, 2 * one, _SYNC
            weight[count], event[count] = 0.0, -1
            count += 1
        previous = last[on]
        if (
            launch_queue[i] == 1.0
            and queue[i] == 0.0
            and (previous < 0 or end_us[previous] < launch_us[i])
            and (before < 0 or end_us[before] < launch_us[i])
        ):
            if launch[i] >= 0 and in_graph[launch[i]]:
                source[count], target[count], kind[count] = 2 * launch[i], 2 * one, _LAUNCH
                weight[count], event[count] = start_us[one] - launch_us[i], -1
                count += 1
        elif previous >= 0 and (before < 0 or end_us[before] < end_us[previous]):
            source[count], target[count], kind[count] = 2 * previous + 1, 2 * one, _DELAY
            weight[count], event[count] = start_us[one] - end_us[previous], previous
            count += 1
        if previous < 0:
            order[n_seen] = on
            n_seen += 1
        last[on] = one
    return count


def without_doubles(edges: Edges) -> Edges:
    """Returns the edges with one for each pair of nodes: at the place of the first, with the values of the last."""
    if len(edges.source) == 0:
        return edges
    pair = edges.source * (int(edges.target.max()) + 1) + edges.target
    _, first = np.unique(pair, return_index=True)
    _, from_end = np.unique(pair[::-1], return_index=True)
    order = np.argsort(first, kind="stable")
    chosen = (len(pair) - 1 - from_end)[order]
    return edges.take(chosen)


def longest_path(edges: Edges) -> tuple[I64, int] | None:
    """Returns the numbers of the edges on the longest path, in order, and the count of nodes; None in a circle.

    Nodes are taken as networkx takes them: generation by generation, in the order in which edges name them. A
    negative weight counts as 0.
    """
    nodes = np.stack((edges.source, edges.target), axis=1).ravel()
    _, first, dense = np.unique(nodes, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))
    numbered = rank[dense.ravel()].reshape(-1, 2)
    weight = np.maximum(edges.weight_us, 0.0)
    path = _longest(len(first), numbered[:, 0].copy(), numbered[:, 1].copy(), weight)
    return None if path[0] == -2 else (path[path >= 0], len(first))


@njit
def _longest(n_nodes: int, source: I64, target: I64, weight: F64) -> I64:
    """Returns the edges of the longest path, [-1] if it has none and [-2] in a circle."""
    n_edges = len(source)
    first_out = np.zeros(n_nodes + 1, np.int64)
    missing = np.zeros(n_nodes, np.int64)
    for i in range(n_edges):
        first_out[source[i] + 1] += 1
        missing[target[i]] += 1
    for i in range(n_nodes):
        first_out[i + 1] += first_out[i]
    out = np.empty(n_edges, np.int64)
    filled = first_out[:-1].copy()
    for i in range(n_edges):
        out[filled[source[i]]] = i
        filled[source[i]] += 1
    order = np.empty(n_nodes, np.int64)
    n_ready = 0
    for i in range(n_nodes):
        if missing[i] == 0:
            order[n_ready] = i
            n_ready += 1
    length = np.zeros(n_nodes, np.float64)
    through = np.full(n_nodes, -1, np.int64)
    done = 0
    while done < n_ready:
        node = order[done]
        done += 1
        for place in range(first_out[node], first_out[node + 1]):
            edge = out[place]
            child = target[edge]
            reached = length[node] + weight[edge]
            best = through[child]
            if best < 0 or reached > length[child] or (reached == length[child] and edge < best):
                length[child] = reached
                through[child] = edge
            missing[child] -= 1
            if missing[child] == 0:
                order[n_ready] = child
                n_ready += 1
    if done < n_nodes:
        return np.full(1, -2, np.int64)
    end = order[0]
    for i in range(n_nodes):
        if length[order[i]] > length[end]:
            end = order[i]
    n_path = 0
    node = end
    while through[node] >= 0:
        n_path += 1
        node = source[through[node]]
    if n_path == 0:
        return np.full(1, -1, np.int64)
    path = np.empty(n_path, np.int64)
    node = end
    while through[node] >= 0:
        n_path -= 1
        path[n_path] = through[node]
        node = source[through[node]]
    return path


def stack_order(start_us: F64, end_us: F64, index: I64) -> tuple[I64, Mask]:
    """Returns events and whether they start, as HTA orders the starts and ends of one thread.

    At one time ends come before starts, a longer event starts before and ends after a shorter one, and of equal ones
    the first in the file is outside.
    """
    event = np.tile(np.arange(len(start_us)), 2)
    is_start = np.repeat((True, False), len(start_us))
    time = np.concatenate((start_us, end_us))
    lasting = (end_us - start_us)[event]
    outside = np.where(is_start, -lasting, lasting)
    order = np.lexsort((np.where(is_start, index[event], -index[event]), outside, is_start, time))
    return event[order], is_start[order]
