"""Finds corrections for the next prediction: measured times for the ops of a prediction, and factors on its rates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import exp, log
from typing import NamedTuple

import numpy as np

from forerun.answers.comparison.compare import Comparison
from forerun.answers.comparison.ran_step import HOST
from forerun.common.units import PS_PER_S
from forerun.core.cost.measured_files import KERNEL_COLUMNS, NETWORK_COLUMNS
from forerun.core.cost.step_costs import gap_ps
from forerun.core.program.kinds import Attention, Gemm, GemmRole
from forerun.core.program.origin import Origin
from forerun.core.program.types import Collective
from forerun.describe.cluster.types import KernelRates

Cells = tuple[object, ...]
_RATES = {
    "gemm": ("product",),
    "attention": ("attention",),
    "attention_backward": ("attention_backward",),
    "memory": ("memory", "optimizer"),
}
"""rates, and the parts of the step that they are of"""
_MOST_FACTOR = 10.0
_MOST_HOST = 50.0
_CLOSE = 0.003
"""share of the step that a fitted host may miss"""
_APART = 0.01
"""share of the step from which on an error is the host's, though the compared step does not show it as such"""
_LEAST_KERNEL_PS = 1_000_000
"""a microsecond, the least that a corrected kernel takes"""


@dataclass(frozen=True)
class Corrections:
    """Rows of the two files of measured times, and factors on the rates of the cluster."""

    kernels: tuple[Cells, ...]
    collectives: tuple[Cells, ...]
    rates: KernelRates

    @property
    def kernel_columns(self) -> tuple[str, ...]:
        """Names of the columns of `kernels`."""
        return KERNEL_COLUMNS

    @property
    def network_columns(self) -> tuple[str, ...]:
        """Names of the columns of `collectives`."""
        return NETWORK_COLUMNS


class _Ratio(NamedTuple):
    """Measured over predicted time of an op, weighted by the time of its runs."""

    weighted: float
    weight: float


def corrections(found: Comparison) -> Corrections:
    """Returns the rates that a comparison implies. The host's rate is 1 until `with_host` fits it.

    Each predicted op takes the time that the work paired with it took on the slowest profiled rank of each stage.
    Unpaired work keeps its time. Then the function scales all ops of a part so that the part takes its measured time.
    """
    ratios = _ratios(found)
    simulation = found.simulation
    ops, subject = simulation.program.ops, simulation.subject
    recorded = Origin.of(simulation.program).recorded
    gaps = np.zeros(len(ops), np.int64) if recorded else gap_ps(ops, subject.stack, subject.launching)
    target = {row: ratio * float(simulation.costs.duration_ps[row]) for row, ratio in ratios.items()}
    times = {
        row: max(_LEAST_KERNEL_PS, time - (int(gaps[row]) if ops.is_compute[row] else 0)) / PS_PER_S
        for row, time in target.items()
    }
    return Corrections(tuple(_kernel_rows(found, times)), tuple(_collective_rows(found, times)), _rates(found))


def with_host(
    step_s: Callable[[KernelRates], float], rates: KernelRates, found: Comparison, least_share: float = 0.003
) -> KernelRates:
    """Returns `rates` with the host's speed at which the corrected prediction takes the measured time.

    The host keeps its speed if no speed reaches the measured time. It also does so for an error below `_APART` that the
    compared step does not show as the host's: if measured and predicted host time differ by less than `least_share` of
    the step, or the other way. A larger error of a prediction whose kernels and collectives are right is the host's,
    because kernels of other times show more or less of its work. `step_s` predicts the time of the step under given
    rates.
    """
    lost = sum(part.lost_s for part in found.parts if part.part == HOST)
    low, high = -log(_MOST_HOST), log(_MOST_HOST)

    def error(x: float) -> float:
        return step_s(_host(rates, exp(x))) / found.measured_s - 1.0

    at_zero = error(0.0)
    shown = abs(lost) >= least_share * found.measured_s and (at_zero < 0) == (lost > 0)
    if abs(at_zero) < (_CLOSE if shown else _APART):
        return rates
    low, high = (low, 0.0) if at_zero < 0 else (0.0, high)
    for _ in range(12):
        middle = (low + high) / 2
        off = error(middle)
        if abs(off) < _CLOSE:
            return _host(rates, exp(middle))
        low, high = (low, middle) if off < 0 else (middle, high)
    return rates


def _host(rates: KernelRates, host: float) -> KernelRates:
    return KernelRates(rates.gemm, rates.attention, rates.attention_backward, rates.memory, rates.network, host)


def _ratios(found: Comparison) -> dict[int, float]:
    """Returns measured over predicted time of every op of the prediction that takes time."""
    sums: dict[int, _Ratio] = {}
    part_of: dict[int, str] = {}
    for pair in found.pairs_of_stages:
        measured, predicted = pair.alone_s
        ratio = measured / predicted if measured > 0 and predicted > 0 else 1.0
        for line in pair.predicted:
            for row in line.ops:
                before, weight = sums.get(row, _Ratio(0.0, 0.0)), line.time_s - line.held_s
                sums[row] = _Ratio(before.weighted + ratio * weight, before.weight + weight)
                part_of[row] = line.part
    ratios = {row: one.weighted / one.weight for row, one in sums.items() if one.weight > 0}
    corrected: dict[str, float] = {}
    for row, ratio in ratios.items():
        corrected[part_of[row]] = corrected.get(part_of[row], 0.0) + ratio * sums[row].weight
    busy = {part: measured for part, (_, measured) in _busy_s(found).items()}
    scale = {part: busy[part] / time_s if busy.get(part) and time_s else 1.0 for part, time_s in corrected.items()}
    return {row: ratio * scale[part_of[row]] for row, ratio in ratios.items()}


def _busy_s(found: Comparison) -> dict[str, tuple[float, float]]:
    """Returns the predicted and the measured seconds that the work of each part takes, over all stages."""
    busy: dict[str, tuple[float, float]] = {}
    for part in (part for rank in found.stages for part in rank.parts):
        predicted, measured = busy.get(part.part, (0.0, 0.0))
        busy[part.part] = (predicted + part.predicted_busy_s, measured + part.measured_busy_s)
    return busy


def _rates(found: Comparison) -> KernelRates:
    """Returns predicted over measured time by kind of work, 1 for work that either side lacks."""
    busy = _busy_s(found)

    def factor(parts: tuple[str, ...]) -> float:
        predicted, measured = (sum(busy[part][side] for part in parts if part in busy) for side in (0, 1))
        if predicted <= 0 or measured <= 0:
            return 1.0
        return min(_MOST_FACTOR, max(1 / _MOST_FACTOR, predicted / measured))

    factors = {name: factor(parts) for name, parts in _RATES.items()}
    factors["attention_backward"] /= factors["attention"] if factors["attention_backward"] != 1.0 else 1.0
    collectives = tuple(part for part in busy if part.partition(" over ")[0].startswith(("all-", "reduce-", "broad")))
    return KernelRates(**factors, network=factor(collectives))


def _kernel_rows(found: Comparison, times: dict[int, float]) -> Iterator[Cells]:
    """Yields a row for each distinct kernel of the prediction; the format takes no grouped and no accumulating ones."""
    ops = found.simulation.program.ops
    memory_bound, host_copy = ops.is_memory_bound, ops.is_host_copy
    points: dict[Cells, list[float]] = {}
    for row, time_s in sorted(times.items()):
        details = ops.details_of(row)
        cells: dict[str, object] = {}
        each = 1
        if isinstance(details, Gemm) and details.kernels == 1 and not details.accumulate_bytes:
            cells = {"kind": "gemm", "dtype": ops.dtype[row], "m": details.m, "n": details.n, "k": details.k}
            cells |= {"batch": details.batch, "layout": GemmRole(details.role).name.lower()}
        elif isinstance(details, Attention):
            cells = {"kind": "attention", "batch": details.batch, "heads": details.heads, "kv_heads": details.kv_heads}
            cells |= {"seq_q": details.seq_q, "seq_kv": details.seq_kv, "head_dim": details.head_dim}
            cells |= {"v_head_dim": details.v_head_dim, "kernel": ops.kernel[row]}
            cells |= {"causal": details.causal, "backward": details.backward}
        elif memory_bound[row]:
            each = max(1, int(ops.launches[row]))
            size = float(ops.bytes_read[row] + ops.bytes_written[row]) / each
            cells = {"kind": "memory", "op": ops.name[row], "bytes": size} if size else {}
        elif host_copy[row] and ops.bytes_comm[row]:
            cells = {"kind": "host_copy", "bytes": float(ops.bytes_comm[row])}
        if cells:
            key = tuple(cells.get(column, "") for column in KERNEL_COLUMNS)
            points.setdefault(key, []).append(time_s / each)
    at = KERNEL_COLUMNS.index("time_us")
    for key, found_s in points.items():
        yield (*key[:at], f"{float(np.mean(found_s)) * 1e6:.6g}", *key[at + 1 :])


def _collective_rows(found: Comparison, times: dict[int, float]) -> Iterator[Cells]:
    """Yields a row for each distinct collective of the prediction over NCCL."""
    program = found.simulation.program
    ops = program.ops
    points: dict[Cells, list[float]] = {}
    for row, time_s in sorted(times.items()):
        size = float(ops.bytes_comm[row])
        if not ops.is_collective[row] or ops.kernel[row] or not size:
            continue
        group = program.groups[ops.group[row]]
        if group.size > 1:
            key: Cells = (Collective(int(ops.collective[row])).name.lower(), group.size, group.inner, size)
            points.setdefault(key, []).append(time_s)
    for key, found_s in points.items():
        yield (*key, f"{float(np.mean(found_s)) * 1e6:.6g}", "")
