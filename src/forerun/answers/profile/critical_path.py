"""The critical path of an annotated part of a profile, as HTA finds it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forerun.answers.profile.cp_graph import (
    DeviceWork,
    Edges,
    EdgeType,
    GpuEvent,
    device_edges,
    longest_path,
    stack_edges,
    stack_order,
    without_doubles,
)
from forerun.answers.profile.kernel_types import is_communication, short_name
from forerun.answers.profile.tables import Cell, Table
from forerun.answers.profile.waiting import launch_mask, queue_lengths
from forerun.answers.profile.window import NONE, Window, by_time, last_with
from forerun.common.errors import ForerunError
from forerun.sources.profile.event_keys import Key
from forerun.sources.profile.profile import I64, STEP, Mask

_IN_GRAPH = frozenset(("cpu_op", "cuda_runtime", "cuda_driver"))
_BLOCKING = frozenset(
    (
        *("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventQuery", "cudaEventSynchronize"),
        *("cudaMemcpy", "cudaMemcpyAsync"),
    )
)
"""calls whose own time is waiting"""
_SYNC = frozenset(("cuda_sync",))
_KINDS = {
    "Stream Wait Event": GpuEvent.STREAM_WAIT,
    "Event Sync": GpuEvent.EVENT_SYNC,
    "Stream Sync": GpuEvent.STREAM_SYNC,
    "Context Sync": GpuEvent.CONTEXT_SYNC,
}
_TYPE_NAMES = {
    EdgeType.OPERATOR: "critical_path_operator",
    EdgeType.DEPENDENCY: "critical_path_dependency",
    EdgeType.LAUNCH_DELAY: "critical_path_kernel_launch_delay",
    EdgeType.KERNEL_DELAY: "critical_path_kernel_kernel_delay",
    EdgeType.SYNC: "critical_path_sync_dependency",
}
_BOUNDS = {
    EdgeType.DEPENDENCY: "",
    EdgeType.SYNC: "",
    EdgeType.LAUNCH_DELAY: "gpu_kernel_launch_overhead",
    EdgeType.KERNEL_DELAY: "gpu_kernel_kernel_overhead",
}


@dataclass(frozen=True)
class CriticalPath:
    """The longest path through one instance of an annotation."""

    window: Window
    annotation: str
    instance: int
    edges: Edges
    """of the path, in order; their events are rows of `window`"""
    n_nodes: int
    n_edges: int
    """of the whole graph"""

    @property
    def length_us(self) -> float:
        return float(self.edges.weight_us.sum())

    def bounds(self) -> dict[str, float]:
        """Returns the time of the path by its bound, under HTA's names."""
        total: dict[str, float] = {}
        for name, time in zip(self._bound_names(), self.edges.weight_us.tolist(), strict=True):
            total[name] = total.get(name, 0.0) + time
        return dict(sorted(total.items()))

    def edge_table(self) -> Table:
        """Returns every edge of the path with the event that it belongs to."""
        rows: list[tuple[Cell, ...]] = []
        texts, window = self.window.profile.texts, self.window
        edges = self.edges
        numbers = (edges.event.tolist(), edges.weight_us.tolist(), edges.type.tolist())
        for event, time, kind, bound in zip(*numbers, self._bound_names(), strict=True):
            place, name, stream = float("nan"), "", float("nan")
            if event >= 0:
                name, place = short_name(texts[window.name[event]]), float(window.index[event])
                stream = float(window.stream[event])
            rows.append((place, time, _TYPE_NAMES[EdgeType(kind)], name, stream, bound))
        annotation = re.sub(r"\W+", "_", self.annotation).strip("_") or "all"
        name = f"critical_path_edges.rank{window.rank}.{annotation}.{self.instance}"
        return Table(name, ("event_idx", "duration", "type", "s_name", "stream", "bound_by"), rows)

    def _bound_names(self) -> list[str]:
        texts, window = self.window.profile.texts, self.window
        known: dict[int, str] = {}

        def named(event: int) -> str:
            if event < 0 or window.stream[event] < 0:
                return "cpu_bound"
            number = int(window.name[event])
            if number not in known:
                known[number] = "gpu_communication_bound" if is_communication(texts[number]) else "gpu_compute_bound"
            return known[number]

        pairs = zip(self.edges.type.tolist(), self.edges.event.tolist(), strict=True)
        return [_BOUNDS[EdgeType(kind)] if kind in _BOUNDS else named(event) for kind, event in pairs]


def annotated(window: Window, annotation: str = STEP) -> I64:
    """Returns the rows of the events whose names contain `annotation`."""
    return np.flatnonzero(window.profile.text_mask(lambda text: annotation in text)[window.name])


def critical_path(window: Window, annotation: str = STEP, instance: int = 0) -> CriticalPath:
    """Returns the critical path of the `instance`-th event whose name contains `annotation`; "" takes all events.

    Raises ForerunError if there is no such event, or if the graph has a circle.
    """
    place = f"{window.profile.path}: critical path of {annotation or 'all events'}"
    if annotation:
        found = annotated(window, annotation)
        if not 0 <= instance < len(found):
            raise ForerunError(f"{place}: instance {instance} is not among the {len(found)} in the file")
        start, end = float(window.ts_us[found[instance]]), float(window.end_us[found[instance]])
    else:
        start, end = float(window.ts_us.min()), float(window.end_us.max())
    clipped = _clipped(window, start, end)
    edges = without_doubles(_edges(window, clipped))
    if len(edges.source) == 0:
        raise ForerunError(f"{place}: it has no operators, calls or kernels that follow each other")
    found_path = longest_path(edges)
    if found_path is None:
        raise ForerunError(f"{place}: its events depend on each other in a cycle")
    chosen, n_nodes = found_path
    return CriticalPath(window, annotation, instance, edges.take(chosen), n_nodes, len(edges.source))


def path_summary(paths: Sequence[CriticalPath]) -> Table:
    """Returns the size, the length and the bounds of each path."""
    rows: list[tuple[Cell, ...]] = []
    for one in paths:
        nodes = np.concatenate((one.edges.source, one.edges.target))
        figures = (one.n_nodes, one.n_edges, len(np.unique(nodes)), one.length_us, len(np.unique(nodes // 2)))
        rows.append((one.window.rank, one.annotation, one.instance, *figures, json.dumps(one.bounds())))
    columns = (
        "rank",
        "annotation",
        "instance",
        "nodes",
        "edges",
        "cp_nodes",
        "cp_weight_us",
        "n_cp_events",
        "bound_by",
    )
    return Table("critical_path_summary", columns, rows)


def _clipped(window: Window, start: float, end: float) -> I64:
    """Returns the rows of the part, in the file's order: the host's events, and the work that they launch."""
    on_host = window.stream == NONE
    inside = (window.ts_us >= start) & (window.ts_us <= end) & (window.dur_us > 0)
    host = np.flatnonzero(on_host & inside)
    launched = np.isin(window.index, window.linked[host][window.linked[host] > 0])
    waits = window.named(frozenset(("Stream Wait Event",)))
    rows = np.concatenate((host, np.flatnonzero(~on_host & (launched | waits))))
    return rows[np.argsort(window.index[rows], kind="stable")]


def _edges(window: Window, clipped: I64) -> Edges:
    in_graph = np.zeros(len(window), np.bool_)
    in_graph[clipped] = (window.in_categories(_IN_GRAPH) | (window.on_stream & (window.linked >= 0)))[clipped]
    work, n_streams = _device_work(window, clipped)
    most = 3 * (len(clipped) + len(work.row)) + (n_streams + 1) * int((work.kind != GpuEvent.KERNEL).sum()) + 1
    room = Edges.empty(most)
    blocking = window.named(_BLOCKING)
    time_us = np.concatenate((window.ts_us, window.end_us))
    count = 0
    for thread in _host_threads(window, clipped):
        event, is_start = stack_order(window.ts_us[thread], window.end_us[thread], window.index[thread])
        count = stack_edges(thread[event], is_start, time_us, in_graph, blocking, room, count)
    count = device_edges(work, window.ts_us, window.end_us, in_graph, n_streams, room, count)
    return room.take(slice(count))


def _host_threads(window: Window, clipped: I64) -> list[I64]:
    """Returns the rows of every thread of the host; a thread with an event on a stream is a stream."""
    pid, tid = window.profile.rows.pid[window.row[clipped]], window.profile.rows.tid[window.row[clipped]]
    order = np.lexsort((np.arange(len(clipped)), tid, pid))
    changes = np.flatnonzero((np.diff(pid[order]) != 0) | (np.diff(tid[order]) != 0)) + 1
    threads = [clipped[part] for part in np.split(order, changes)]
    return [thread for thread in threads if len(thread) and bool(np.all(window.stream[thread] < 0))]


def _device_work(window: Window, clipped: I64) -> tuple[DeviceWork, int]:
    named = window.named(frozenset(("Event Sync", "Context Sync")))
    chosen = (window.on_stream | named) & (window.linked >= 0)
    rows = clipped[chosen[clipped]]
    syncs = window.in_categories(_SYNC)[rows]
    rows_in_order = by_time(np.where(syncs, window.end_us[rows], window.ts_us[rows]))
    rows, syncs = rows[rows_in_order], syncs[rows_in_order]
    texts = window.profile.texts
    other = len(GpuEvent)
    kinds = np.array([int(_KINDS.get(text, other)) for text in texts])[window.name[rows]]
    kind = np.where(syncs, kinds, GpuEvent.KERNEL)
    streams, stream = np.unique(window.stream[rows], return_inverse=True)
    launch = np.where(window.linked[rows] > 0, window.rows_at(window.linked[rows]), NONE)
    launch_us = np.where(launch == NONE, np.nan, window.ts_us[launch])
    queued, _, length = queue_lengths(window)
    queue = np.full(len(window) + 1, np.nan)
    queue[queued] = length
    source, waiting = _waits(window, rows, kind, launch)
    columns = (rows, kind.astype(np.int64), stream.astype(np.int64), launch, launch_us)
    return DeviceWork(*columns, queue[rows], queue[launch], source, waiting), len(streams)


def _waits(window: Window, rows: I64, kind: I64, launch: I64) -> tuple[I64, I64]:
    """Returns for every wait for an event the kernel that is waited for, and for a stream's the kernel that waits."""
    source = np.full(len(rows), NONE, np.int64)
    waiting = np.full(len(rows), NONE, np.int64)
    waits = np.flatnonzero((kind == GpuEvent.STREAM_WAIT) | (kind == GpuEvent.EVENT_SYNC))
    if len(waits) == 0:
        return source, waiting
    calls = np.flatnonzero(launch_mask(window))
    calls = calls[np.argsort(window.ts_us[calls], kind="stable")]
    kernel = window.rows_at(window.linked[calls])
    calls, kernel = calls[kernel != NONE], kernel[kernel != NONE]
    pid, tid = window.profile.rows.pid[window.row], window.profile.rows.tid[window.row]
    recorded_on = window.values(Key.WAIT_STREAM, NONE).astype(np.int64)
    record = window.values(Key.WAIT_RECORD, NONE).astype(np.int64)
    records = np.flatnonzero(window.named(frozenset(("cudaEventRecord",))))
    place = last_with(window.correlation[records], record[rows])
    for i in waits.tolist():
        if place[i] == NONE or recorded_on[rows[i]] == NONE:
            continue
        on_it = (window.stream[kernel] == recorded_on[rows[i]]) & (pid[kernel] == pid[rows[i]])
        before = np.flatnonzero(on_it & (window.ts_us[calls] <= window.ts_us[records[place[i]]]))
        if len(before):
            source[i] = kernel[before[-1]]
        if kind[i] == GpuEvent.STREAM_WAIT and launch[i] != NONE:
            waiting[i] = _next_kernel(window, calls, kernel, launch[i], int(window.stream[rows[i]]), (pid, tid))
    return source, waiting


def _next_kernel(window: Window, calls: I64, kernel: I64, wait: int, stream: int, thread: tuple[I64, I64]) -> int:
    pid, tid = thread
    same: Mask = (window.stream[kernel] == stream) & (pid[calls] == pid[wait]) & (tid[calls] == tid[wait])
    after = np.flatnonzero(same & (window.ts_us[calls] >= window.ts_us[wait]))
    return int(kernel[after[0]]) if len(after) else NONE
