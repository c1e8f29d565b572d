"""The lines that ASTRA-sim prints, so that scripts that read them go on working."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

from forerun.astra.statistics import RankStatistics


def output_lines(statistics: Sequence[RankStatistics], now: datetime) -> Iterator[str]:
    """The lines of every rank, in the order in which ranks finish; `now` is the time stamp of all of them.

    The words, the colons and the dollar sign are the reference's. Peak memory is printed in bytes.
    """
    stamp = now.astimezone().isoformat(timespec="seconds")
    order = sorted(range(len(statistics)), key=lambda rank: (statistics[rank].wall_cycles_finished, rank))
    for rank in order:
        of_rank = statistics[rank]
        yield (
            f"[{stamp}] [I] <workload>: sys[{rank}] finished, {of_rank.wall_cycles_finished} cycles, "
            f"exposed communication {of_rank.exposed_communication} cycles."
        )
        for text in _statistics(of_rank):
            yield f"[{stamp}] [I] <statistics>: sys[{rank}], {text}"
        if of_rank.peak_memory_bytes is not None:
            yield f"[{stamp}] [I] <workload>: sys[{rank}] peak memory usage: {of_rank.peak_memory_bytes}"


def _statistics(of_rank: RankStatistics) -> Iterator[str]:
    yield f"Wall time: {of_rank.wall_time}"
    if of_rank.cpu_time:
        yield f"CPU time: {of_rank.cpu_time}"
    yield f"GPU time: {of_rank.gpu_time}"
    yield f"Comm time: {of_rank.comm_time}"
    if of_rank.remote_mem_time:
        yield f"Remote mem time: {of_rank.remote_mem_time}"
    if of_rank.compute_bound_pct is not None:
        yield f"Compute bound percentage: {of_rank.compute_bound_pct:.3f}%"
        yield f"Average compute utilization: {of_rank.avg_compute_util_pct:.3f}$"
        yield f"Average memory utilization: {of_rank.avg_mem_util_pct:.3f}%"
        yield f"Average operation intensity: {of_rank.avg_op_intensity:.3f}"
