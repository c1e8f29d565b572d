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
from forerun.core.program.types import I64

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


def rank_statistics(
    lowered: LoweredTrace, system: System, start_ns: I64, end_ns: I64, done_order: I64, finish_ns: int
) -> RankStatistics:
    """Returns the statistics of a rank that ran `lowered`; the arrays have one entry for each of its rows."""
    kind, is_cpu = lowered.trace.kind[lowered.row], lowered.trace.is_cpu[lowered.row]
    comp = kind == NodeKind.COMP
    gpu = comp & ~is_cpu
    duration = end_ns - start_ns
    busy = int(duration[~is_cpu].sum()) if system.replay_only else int(duration[gpu].sum())
    comm, storage = kind >= NodeKind.SEND, (kind == NodeKind.MEM_LOAD) | (kind == NodeKind.MEM_STORE)
    peak = peak_memory(lowered, start_ns, end_ns, done_order) if system.track_local_mem else None
    roofline = _roofline(lowered, system, duration, comp) if system.roofline_enabled else (None, None, None, None)
    return RankStatistics(
        wall_cycles_finished=int(finish_ns),
        exposed_communication=int(finish_ns) - busy,
        wall_time=int(end_ns.max(initial=0)),
        gpu_time=union_ns(start_ns[gpu], end_ns[gpu]),
        comm_time=union_ns(start_ns[comm], end_ns[comm]),
        compute_bound_pct=roofline[0],
        avg_compute_util_pct=roofline[1],
        avg_mem_util_pct=roofline[2],
        avg_op_intensity=roofline[3],
        peak_memory_bytes=peak.n_bytes if peak else None,
        cpu_time=union_ns(start_ns[comp & is_cpu], end_ns[comp & is_cpu]),
        remote_mem_time=union_ns(start_ns[storage], end_ns[storage]),
    )


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
    n = len(trace.tensor_bytes)
    if not n:
        return PeakMemory(0, 0)
    when_done = np.empty(len(trace), np.int64)
    when_done[lowered.row] = done_order
    ended = positions(done_order)  # nodes in the order of their ends
    written_at = np.repeat(when_done, np.diff(trace.output_ptr))
    read_at = np.repeat(when_done, np.diff(trace.input_ptr))
    never = len(trace)
    first_write, first_read, last_read = np.full(n, never), np.full(n, never), np.full(n, -1)
    np.minimum.at(first_write, trace.output_tensor, written_at)
    np.minimum.at(first_read, trace.input_tensor, read_at)
    np.maximum.at(last_read, trace.input_tensor, read_at)
    written = first_write < first_read
    birth = np.append(start_ns[ended], -1)[first_write]
    birth[~written & (first_read < never)] = 0
    death = np.append(end_ns[ended], -1)[last_read]
    alive = birth >= 0
    dies = alive & (death >= 0)
    tick = np.concatenate([birth[alive], death[dies]])
    change = np.concatenate([trace.tensor_bytes[alive], -trace.tensor_bytes[dies]])
    order = np.argsort(tick, kind="stable")
    total = np.cumsum(change[order])
    at = np.flatnonzero(np.append(np.diff(tick[order]) != 0, True))
    if not len(at):
        return PeakMemory(0, 0)
    peak = at[np.argmax(total[at])]
    is_held = np.concatenate([~written[alive], ~written[dies]])[order][: peak + 1]
    return PeakMemory(int(total[peak]), int(change[order][: peak + 1][is_held].sum()))
