"""ASTRA-sim's statistics of one rank: times by kind, roofline averages, peak of local memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.astrasim.astra.lower import LoweredTrace
from forerun.astrasim.astra.system import System
from forerun.astrasim.chakra.trace import NodeKind
from forerun.common.arrays import positions, union
from forerun.common.jit import njit
from forerun.core.program.types import I32, I64

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class RankStatistics:
    """Times in ns and percentages of the compute time, by the names in ASTRA-sim's output."""

    wall_cycles_finished: int
    exposed_communication: int
    wall_time: int
    gpu_time: int
    comm_time: int
    compute_bound_pct: float | None
    avg_compute_util_pct: float | None
    avg_mem_util_pct: float | None
    avg_op_intensity: float | None
    peak_memory_bytes: int | None
    cpu_time: int = 0
    remote_mem_time: int = 0


class Observer:
    """Makes the statistics of ranks that run one trace. It computes common figures once."""

    def __init__(self, lowered: LoweredTrace, system: System) -> None:
        self._lowered, self._system = lowered, system
        kind, is_cpu = lowered.trace.kind[lowered.row], lowered.trace.is_cpu[lowered.row]
        self._comp = comp = kind == NodeKind.COMP
        self._is_gpu, self._is_host = comp & ~is_cpu, comp & is_cpu
        self._is_comm = kind >= NodeKind.SEND
        self._is_storage = (kind == NodeKind.MEM_LOAD) | (kind == NodeKind.MEM_STORE)
        self._is_busy = ~is_cpu if system.replay_only else self._is_gpu
        self._known: tuple[I64, tuple[float, float, float, float]] | None = None
        self._peak: tuple[_Order, PeakMemory] | None = None

    def statistics(self, start_ns: I64, end_ns: I64, done_order: I64, finish_ns: int) -> RankStatistics:
        """Returns the statistics of a rank; the arrays have one entry for each row of the trace."""
        system, duration = self._system, end_ns - start_ns
        busy = int(duration[self._is_busy].sum())
        peak = self.peak_memory(start_ns, end_ns, done_order) if system.track_local_mem else None
        roofline = self._roofline(duration) if system.roofline_enabled else (None, None, None, None)
        by_end = _by_time(end_ns, done_order)
        return RankStatistics(
            wall_cycles_finished=int(finish_ns),
            exposed_communication=int(finish_ns) - busy,
            wall_time=int(end_ns.max(initial=0)),
            gpu_time=_covered_ns(start_ns, end_ns, self._is_gpu, by_end),
            comm_time=_covered_ns(start_ns, end_ns, self._is_comm, by_end),
            compute_bound_pct=roofline[0],
            avg_compute_util_pct=roofline[1],
            avg_mem_util_pct=roofline[2],
            avg_op_intensity=roofline[3],
            peak_memory_bytes=peak.n_bytes if peak else None,
            cpu_time=_covered_ns(start_ns, end_ns, self._is_host, by_end),
            remote_mem_time=_covered_ns(start_ns, end_ns, self._is_storage, by_end),
        )

    def peak_memory(self, start_ns: I64, end_ns: I64, done_order: I64) -> PeakMemory:
        """Returns `peak_memory`, anew where nodes start and end in another order than those of the rank before."""
        if self._peak is None or not self._peak[0].is_that_of(start_ns, end_ns, done_order):
            order = _order_of(start_ns, end_ns, done_order)
            self._peak = order, peak_memory(self._lowered, start_ns, end_ns, done_order)
        return self._peak[1]

    def _roofline(self, duration: I64) -> tuple[float, float, float, float]:
        """Returns `_roofline`, anew where a rank computes for other times than the one before."""
        computed = duration[self._comp]
        if self._known is None or not np.array_equal(self._known[0], computed):
            self._known = computed, _roofline(self._lowered, self._system, duration, self._comp)
        return self._known[1]


def _by_time(time_ns: I64, done_order: I64) -> I64:
    """Returns the nodes by rising time; nodes end almost in order, and sorting such times is quick."""
    ended = positions(done_order)
    return ended[np.argsort(time_ns[ended], kind="stable")]


def _roofline(lowered: LoweredTrace, system: System, duration: I64, comp: Mask) -> tuple[float, float, float, float]:
    """Returns means over compute time: share bound by compute, compute and memory utilization (%), intensity."""
    total = 1 + int(duration[comp].sum())
    timed = lowered.performance > 0
    performance, duration = lowered.performance[timed], duration[timed]
    trace, row = lowered.trace, lowered.row[timed]
    intensity = trace.num_ops[row].astype(np.float64) / trace.tensor_size[row].astype(np.float64)
    bound = int(duration[performance >= system.peak_flops].sum())
    compute = float((performance / system.peak_flops * duration).sum())
    memory = float(((performance / intensity) / system.memory_bytes_per_s * duration).sum())
    operations = float((intensity * duration).sum())
    shares = bound / total * 100, compute / total * 100, memory / total * 100, operations / total
    return round(shares[0], 3), round(shares[1], 3), round(shares[2], 3), round(shares[3], 3)


def union_ns(start_ns: I64, end_ns: I64) -> int:
    """Returns the length of the union of intervals."""
    start, end = union(start_ns, end_ns)
    return int((end - start).sum())


@njit
def _covered_ns(start_ns: I64, end_ns: I64, counts: Mask, by_end: I64) -> int:
    """Returns the length of the union of the intervals that count; `by_end` holds all in the order of their ends.

    From the last to the first, each interval adds its part before the earliest start so far.
    """
    total, first = 0, np.iinfo(np.int64).max
    for k in range(len(by_end) - 1, -1, -1):
        node = by_end[k]
        if counts[node] and start_ns[node] < first:
            total += min(end_ns[node], first) - start_ns[node]
            first = start_ns[node]
    return total


class PeakMemory(NamedTuple):
    """The memory at the tick at which the live tensors are largest."""

    n_bytes: int
    held_bytes: int
    """the part in tensors that exist before the first node: weights and inputs"""


def peak_memory(lowered: LoweredTrace, start_ns: I64, end_ns: I64, done_order: I64) -> PeakMemory:
    """Returns the largest sum of live tensors at a tick (`LocalMemUsageTracker`).

    ASTRA-sim records reads and writes when nodes end. A tensor lives from the start of the node that writes it, or from
    0 if a read is recorded first, to the end of its last recorded read, or for ever. All births and deaths of a tick
    count together.
    """
    trace = lowered.trace
    if not len(trace.tensor_bytes):
        return PeakMemory(0, 0)
    tensors = _Tensors(trace.output_ptr, trace.output_tensor, trace.input_ptr, trace.input_tensor, trace.tensor_bytes)
    by_done = positions(done_order)
    orders = by_done, _by_time(start_ns, done_order), _by_time(end_ns, done_order)
    return PeakMemory(*_peak_memory(tensors, lowered.row[by_done], *orders, start_ns, end_ns))


class _Order(NamedTuple):
    """The order in which the nodes of a rank start and end, which determines its peak of memory."""

    done_order: I64
    event: I64
    """(2 nodes,) starts, and ends counted from the number of nodes, by rising time"""
    is_later: Mask
    """(2 nodes,) whether each event is later than the one before, the first one later than 0"""

    def is_that_of(self, start_ns: I64, end_ns: I64, done_order: I64) -> bool:
        if not np.array_equal(done_order, self.done_order):
            return False
        return bool(_is_in_order(self.event, self.is_later, start_ns, end_ns))


def _order_of(start_ns: I64, end_ns: I64, done_order: I64) -> _Order:
    time_ns = np.concatenate([start_ns, end_ns])
    event = np.argsort(time_ns, kind="stable")
    return _Order(done_order, event, np.diff(time_ns[event], prepend=0) > 0)


@njit
def _is_in_order(event: I64, is_later: Mask, start_ns: I64, end_ns: I64) -> bool:
    n, before = len(start_ns), 0
    for k in range(len(event)):
        at = event[k]
        time = start_ns[at] if at < n else end_ns[at - n]
        if time < before or (time > before) != is_later[k]:
            return False
        before = time
    return True


class _Tensors(NamedTuple):
    """The columns of a trace with the tensors that nodes write and read."""

    output_ptr: I64
    output: I32
    input_ptr: I64
    input: I32
    n_bytes: I64


@njit
def _peak_memory(
    tensors: _Tensors, rows_done: I64, by_done: I64, by_start: I64, by_end: I64, start_ns: I64, end_ns: I64
) -> tuple[int, int]:
    """Returns the largest memory at a tick, and the part of it in tensors that exist from the start."""
    n, n_tensors = len(by_done), len(tensors.n_bytes)
    never = n
    first_write, first_read = np.full(n_tensors, never), np.full(n_tensors, never)
    last_read = np.full(n_tensors, -1)
    for k in range(n):
        at = rows_done[k]
        for entry in range(tensors.output_ptr[at], tensors.output_ptr[at + 1]):
            tensor = tensors.output[entry]
            first_write[tensor] = min(first_write[tensor], k)
        for entry in range(tensors.input_ptr[at], tensors.input_ptr[at + 1]):
            tensor = tensors.input[entry]
            first_read[tensor] = min(first_read[tensor], k)
            last_read[tensor] = k
    held = 0
    born, died, held_died = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n, np.int64)
    for tensor in range(n_tensors):
        is_held = first_read[tensor] <= first_write[tensor] and first_read[tensor] < never
        if is_held:
            held += tensors.n_bytes[tensor]
        elif first_write[tensor] < never:
            born[by_done[first_write[tensor]]] += tensors.n_bytes[tensor]
        if last_read[tensor] >= 0:
            died[by_done[last_read[tensor]]] += tensors.n_bytes[tensor]
            held_died[by_done[last_read[tensor]]] += tensors.n_bytes[tensor] if is_held else 0
    total, most, most_held = held, -1, 0
    begun, ended, tick = 0, 0, 0
    while True:
        while begun < n and start_ns[by_start[begun]] <= tick:
            total += born[by_start[begun]]
            begun += 1
        while ended < n and end_ns[by_end[ended]] <= tick:
            total -= died[by_end[ended]]
            held -= held_died[by_end[ended]]
            ended += 1
        if total > most:
            most, most_held = total, held
        if ended == n:
            return most, most_held
        tick = end_ns[by_end[ended]]
        if begun < n:
            tick = min(tick, start_ns[by_start[begun]])
