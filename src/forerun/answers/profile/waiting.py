"""Tables of waiting streams and of launches: idle time by cause, queue length, launches, bandwidth of copies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forerun.answers.profile.kernel_types import KernelType, of_type
from forerun.answers.profile.tables import QUARTILES, Cell, Table, describe
from forerun.answers.profile.window import NONE, Window, by_time, counts_of, last_with
from forerun.sources.profile.event_keys import Key
from forerun.sources.profile.profile import F64, GPU_WORK, I64, Mask

_SHORT_GAP_US = 30.0
"""HTA's default of `consecutive_kernel_delay`; its text says nanoseconds, it compares with microseconds"""
_CAUSES = ("host_wait", "kernel_wait", "other")
LAUNCHES = frozenset(
    (
        *("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync"),
        *("hipLaunchKernel", "hipExtModuleLaunchKernel", "hipMemsetAsync", "hipMemcpyAsync", "hipMemcpyWithStream"),
        "runFunction - job_prep_and_submit_for_execution",
    )
)
"""calls that put work on a stream, as HTA lists them"""
_TIMED_LAUNCHES = frozenset(
    (
        *("cudaLaunchKernel", "cudaLaunchKernelExC", "cudaMemcpyAsync", "cudaMemsetAsync"),
        "runFunction - job_prep_and_submit_for_execution",
    )
)
"""calls whose delays HTA lists"""
_COPY_NAME = 11
"""letters of "Memcpy DtoH\""""


def idle_times(windows: Sequence[Window]) -> tuple[Table, Table]:
    """Returns the gaps of each stream by cause, and statistics of their lengths.

    A gap belongs to the host if the launch began after the end of the kernel before. A short gap belongs to the
    kernels. The cause of any other gap is unknown.
    """
    times: list[tuple[Cell, ...]] = []
    lengths: list[tuple[Cell, ...]] = []
    for one in windows:
        work = np.flatnonzero(one.on_stream & one.in_categories(GPU_WORK))
        launch = one.rows_at(one.linked[work])
        launched_us = np.where(launch == NONE, np.nan, one.ts_us[launch])
        streams, first = np.unique(one.stream[work], return_index=True)
        for stream in streams[np.argsort(first)].tolist():
            on_it = np.flatnonzero(one.stream[work] == stream)
            on_it = on_it[np.argsort(one.ts_us[work[on_it]], kind="stable")]
            before_us = np.concatenate(([np.nan], one.end_us[work[on_it]][:-1]))
            gap_us = one.ts_us[work[on_it]] - before_us
            by_host = launched_us[on_it] > before_us
            cause = np.where(by_host, 0, np.where(gap_us < _SHORT_GAP_US, 1, 2))
            whole = float(np.nansum(gap_us))
            for number in np.unique(cause).tolist():
                gaps = gap_us[cause == number]
                gaps = gaps[~np.isnan(gaps)]
                sum_us = float(gaps.sum())
                share = round(sum_us / whole, 2) if whole else float("nan")
                times.append((one.rank, stream, _CAUSES[number], sum_us, share))
                lengths.append((one.rank, stream, _CAUSES[number], *(round(value, 2) for value in describe(gaps))))
    key = ("rank", "stream", "idle_category")
    return (
        Table("idle_time_breakdown.0", (*key, "idle_time", "idle_time_ratio"), times),
        Table("idle_time_breakdown.1", (*key, *QUARTILES), lengths),
    )


def launch_mask(window: Window) -> Mask:
    """Returns the mask (events,) of calls that put work on a stream which the file shows."""
    return np.asarray(window.named(LAUNCHES) & (window.linked > 0))


def queue_lengths(window: Window) -> tuple[I64, I64, F64]:
    """Returns the rows of launches and kernels by stream and time, their streams, and the queue's length from each
    on."""
    launches = np.flatnonzero(launch_mask(window))
    kernels = np.flatnonzero(window.on_stream)
    kernels = kernels[counts_of(window.correlation[launches], window.correlation[kernels]) > 0]
    target = last_with(window.correlation[kernels], window.correlation[launches])
    launches, target = launches[target != NONE], target[target != NONE]
    rows = np.concatenate((launches, kernels))
    stream = np.concatenate((window.stream[kernels[target]], window.stream[kernels]))
    step = np.repeat((1.0, -1.0), (len(launches), len(kernels)))
    order = by_time(window.ts_us[rows])
    order = order[np.argsort(stream[order], kind="stable")]
    rows, stream, step = rows[order], stream[order], step[order]
    total = np.cumsum(step)
    first = np.searchsorted(stream, stream, side="left")
    return rows, stream, total - np.where(first > 0, total[first - 1], 0.0)


def queue_summary(windows: Sequence[Window]) -> Table:
    """Returns statistics of how many launches wait on each stream, at each launch and each start of a kernel."""
    rows: list[tuple[Cell, ...]] = []
    for one in windows:
        _, stream, length = queue_lengths(one)
        rows += [(one.rank, number, *describe(length[stream == number])) for number in np.unique(stream).tolist()]
    return Table("queue_length_summary", ("rank", "stream", *QUARTILES), rows)


def launch_stats(window: Window) -> Table:
    """Returns the time of each launch, the time of the work that it launches, and the delay between both."""
    calls = np.flatnonzero(~window.on_stream & (window.correlation != NONE))
    timed = np.unique(window.correlation[window.named(_TIMED_LAUNCHES)])
    calls = calls[np.isin(window.correlation[calls], timed)]
    work = np.flatnonzero(window.on_stream & (window.correlation != NONE))
    order = np.argsort(window.correlation[work], kind="stable")
    work = work[order]
    keys = window.correlation[work]
    first = np.searchsorted(keys, window.correlation[calls], side="left")
    count = np.searchsorted(keys, window.correlation[calls], side="right") - first
    call = np.repeat(calls, count)
    run = work[np.repeat(first - np.cumsum(count) + count, count) + np.arange(len(call))]
    delay = np.maximum(window.ts_us[run] - window.ts_us[call] - window.dur_us[call], 0.0)
    columns = (window.correlation[call], window.dur_us[call], window.dur_us[run], delay)
    rows: list[tuple[Cell, ...]] = list(zip(*(column.tolist() for column in columns), strict=True))
    names = ("correlation", "cpu_duration", "gpu_duration", "launch_delay")
    return Table(f"cuda_kernel_launch_stats.rank{window.rank}", names, rows)


def bandwidth_summary(windows: Sequence[Window]) -> Table:
    """Returns statistics of the bandwidth of copies and fills, by kind, at each change while there is any."""
    rows: list[tuple[Cell, ...]] = []
    for one in windows:
        copies = np.flatnonzero(of_type(one, KernelType.MEMORY))
        kinds = [_copy_kind(one.profile.texts[number]) for number in one.name[copies].tolist()]
        rate = one.values(Key.BANDWIDTH, 0.0)[copies]
        lasting = np.where(one.dur_us[copies] == 0, 1.0, one.dur_us[copies])
        time = np.concatenate((one.ts_us[copies], one.ts_us[copies] + lasting))
        order = by_time(time)
        change = np.concatenate((rate, -rate))[order]
        kind_of = np.array(kinds + kinds, dtype=object)[order]
        for kind in sorted(set(kinds)):
            running = np.cumsum(change[kind_of == kind])
            if np.any(running > 0):
                rows.append((one.rank, kind, *describe(running[running > 0])))
    return Table("memory_bw_summary", ("rank", "name", *QUARTILES), rows)


def _copy_kind(name: str) -> str:
    if name.startswith("Memset"):
        return "Memset"
    return name[:_COPY_NAME] if name.startswith("Memcpy") else "Memcpy Unknown"
