"""Tables that say where the time of the devices goes: busy, idle, overlap, types of kernels, kernels, annotations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from forerun.answers.profile.intervals import Intervals, shared_times, union
from forerun.answers.profile.kernel_types import KernelType, kernel_type, of_type
from forerun.answers.profile.tables import Cell, Table
from forerun.answers.profile.window import Window
from forerun.sources.profile.communication import communicates
from forerun.sources.profile.profile import F64, GPU_WORK, Mask

_TYPES = (KernelType.COMPUTATION, KernelType.COMMUNICATION, KernelType.MEMORY)
NAMED_KERNELS = 50
_NAMED_ANNOTATIONS = 1000
_NAMED_SHARE = 0.8
_OTHERS = "others"
_NOTHING = float("nan")
_SUMS_NOTE = (
    "HTA sums up the rarest names as others where there are more than it lists, and then gives the sum of each name as "
    "its max, min and mean"
)


def temporal_breakdown(windows: Sequence[Window]) -> Table:
    """Returns each rank's idle, computing and other busy time between its first and its last kernel."""
    rows: list[tuple[Cell, ...]] = []
    for one in windows:
        busy = _union(one, one.on_stream)
        if len(busy.start) == 0:
            continue
        whole = float(busy.end[-1] - busy.start[0])
        idle = whole - busy.total()
        compute = _union(one, of_type(one, KernelType.COMPUTATION)).total()
        parts = (idle, compute, whole - compute - idle)
        rows.append((one.rank, *parts, whole, *(_percent(part, whole, 2) for part in parts)))
    names = ("idle_time", "compute_time", "non_compute_time")
    shares = tuple(f"{name}_pctg" for name in names)
    return Table("temporal_breakdown", ("rank", *(f"{name}(us)" for name in (*names, "kernel_time")), *shares), rows)


def overlap(windows: Sequence[Window]) -> Table:
    """Returns the share of each rank's communication that runs beside computation."""
    rows: list[tuple[Cell, ...]] = []
    for one in windows:
        sets = [_union(one, of_type(one, kind)) for kind in (KernelType.COMMUNICATION, KernelType.COMPUTATION)]
        rows.append((one.rank, _percent(shared_times(sets).get(3, 0.0), sets[0].total(), 2)))
    return Table("comm_comp_overlap", ("rank", "comp_comm_overlap_pctg"), rows)


def communication(windows: Sequence[Window]) -> Table:
    """Returns how much of each rank's communication is hidden beside computation, whatever the library.

    No table of HTA's: DeepEP, NVSHMEM and custom all-reduces count as communication, and times are exact.
    """
    rows: list[tuple[Cell, ...]] = []
    for one in windows:
        texts = one.profile.text_mask(communicates)[one.name]
        work = one.in_categories(GPU_WORK)
        copies = one.profile.text_mask(lambda text: kernel_type(text) is KernelType.MEMORY)[one.name]
        start = one.profile.rows.ts_ns[one.row] / 1e3
        end = start + one.profile.rows.dur_ns[one.row] / 1e3
        sets = [union(start[chosen], end[chosen]) for chosen in (work & texts, work & ~texts & ~copies)]
        whole, hidden = sets[0].total(), shared_times(sets).get(3, 0.0)
        if whole:
            rows.append((one.rank, whole, hidden, whole - hidden, _percent(hidden, whole, 2)))
    columns = ("rank", "communication (us)", "hidden (us)", "exposed (us)", "hidden_pctg")
    return Table("communication", columns, rows)


def by_type(windows: Sequence[Window]) -> Table:
    """Returns the time of each combination of types that run at once, over all ranks."""
    total: dict[int, float] = {}
    for one in windows:
        for combination, time in shared_times([_union(one, of_type(one, kind)) for kind in _TYPES]).items():
            total[combination] = total.get(combination, 0.0) + time
    whole = sum(total.values())
    named = [
        (" overlapping ".join(kind.value for i, kind in enumerate(_TYPES) if combination >> i & 1), time)
        for combination, time in total.items()
    ]
    rows: list[tuple[Cell, ...]] = [
        (name, time, _percent(time, whole, 1)) for name, time in sorted(named, key=lambda row: -row[1])
    ]
    return Table("gpu_kernel_breakdown.0", ("kernel_type", "sum", "percentage"), rows)


def by_kernel(windows: Sequence[Window], most: int = NAMED_KERNELS) -> Table:
    """Returns the time of each kernel by type and rank, as HTA sums it up with `num_kernels=most`."""
    rows: list[tuple[Cell, ...]] = []
    for one in windows:
        for kind in _TYPES:
            found = _by_name(one, of_type(one, kind), most)
            rows += [(*row, kind.value, one.rank) for row in found]
    rows.sort(key=lambda row: (str(row[6]), str(row[0]), int(row[7])))
    return Table("gpu_kernel_breakdown.1", (*_SUMMED, "kernel_type", "rank"), rows, _SUMS_NOTE)


def annotation_times(windows: Sequence[Window]) -> Table:
    """Returns the time of each of the user's annotations on the device."""
    rows: list[tuple[Cell, ...]] = []
    for one in windows:
        found = _by_name(one, one.in_categories(frozenset(("gpu_user_annotation",))), _NAMED_ANNOTATIONS)
        rows += [(*row, one.rank) for row in sorted(found, key=lambda row: str(row[0]))]
    return Table("gpu_user_annotation", (*_SUMMED, "rank"), rows)


_SUMMED = ("name", "sum (us)", "max (us)", "min (us)", "stddev", "mean (us)")


def kernels(windows: Sequence[Window]) -> Table:
    """Returns every kernel with its calls and times, the most time first; no table of HTA's."""
    rows: list[tuple[Cell, ...]] = []
    for one in windows:
        for kind in _TYPES:
            chosen = of_type(one, kind)
            names, count, total, most, least, spread = _groups(one.name[chosen], one.dur_us[chosen])
            columns = zip(names, count, total, most, least, spread, strict=True)
            for number, calls, time, high, low, deviation in columns:
                figures = (int(calls), float(time), float(time / calls), float(low), float(high), float(deviation))
                rows.append((one.rank, kind.value, one.profile.texts[number], *figures))
    rows.sort(key=lambda row: (row[0], -float(row[4])))
    columns_ = ("rank", "kernel_type", "name", "calls", "sum (us)", "mean (us)", "min (us)", "max (us)", "stddev")
    return Table("kernels", columns_, rows)


def _union(window: Window, chosen: Mask) -> Intervals:
    return union(window.ts_us[chosen], window.end_us[chosen])


def _percent(part: float, whole: float, digits: int) -> float:
    return round(100 * part / whole, digits) if whole else _NOTHING


def _groups(name: npt.NDArray[np.int32], time: F64) -> tuple[list[int], F64, F64, F64, F64, F64]:
    """Returns distinct names, their counts, sums, largest and smallest times and sample deviations (0 for one)."""
    order = np.argsort(name, kind="stable")
    name, time = name[order], time[order]
    if len(name) == 0:
        empty = np.empty(0)
        return [], empty, empty, empty, empty, empty
    first = np.flatnonzero(np.concatenate(([True], name[1:] != name[:-1])))
    count = np.diff(first, append=len(name))
    total = np.add.reduceat(time, first)
    squares = np.add.reduceat((time - np.repeat(total / count, count)) ** 2, first)
    spread = np.sqrt(squares / np.maximum(count - 1, 1))
    largest, smallest = np.maximum.reduceat(time, first), np.minimum.reduceat(time, first)
    return name[first].tolist(), count.astype(np.float64), total, largest, smallest, spread


def _by_name(window: Window, chosen: Mask, most_names: int) -> list[tuple[Cell, ...]]:
    """Returns name, sum, max, min, deviation and mean, as HTA sums names up beyond `most_names`."""
    names, count, total, largest, smallest, spread = _groups(window.name[chosen], window.dur_us[chosen])
    texts = window.profile.texts
    named = sorted(range(len(names)), key=lambda i: texts[names[i]])
    order = _descending(named, total)
    if len(order) <= most_names:
        return [
            (
                texts[names[i]],
                *map(float, (total[i], largest[i], smallest[i], spread[i], total[i] / count[i])),
            )
            for i in order
        ]
    running = np.cumsum(total[order])
    limit = float(np.quantile(running, _NAMED_SHARE))
    sums: dict[str, list[float]] = {}
    for place, i in enumerate(order):
        rest = running[place] > limit or place >= most_names
        sums.setdefault(_OTHERS if rest else texts[names[i]], []).append(float(total[i]))
    return [
        (name, sum(one), max(one), min(one), float(np.std(one, ddof=1)) if len(one) > 1 else 0.0, sum(one) / len(one))
        for name, one in sums.items()
    ]


def _descending(named: list[int], total: F64) -> list[int]:
    """Returns `named` by falling sums; equal ones in the order of pandas' default sort, as in HTA."""
    backwards = named[::-1]
    return [backwards[i] for i in np.argsort(total[backwards], kind="quicksort")[::-1]]
