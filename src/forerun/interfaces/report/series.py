"""Data for plots: bars of iterations, times with units, memory curves, cumulated shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from forerun.answers.experiment.result import CAUSES, Iteration
from forerun.common.units import GIB, PS_PER_S
from forerun.core.memory.over_time import memory_over_time
from forerun.core.program.types import Category
from forerun.interfaces.report.style import MEMORY_LOOKS, Look

if TYPE_CHECKING:
    from forerun.answers.analysis.prediction import Prediction
    from forerun.answers.analysis.reading import Simulation
    from forerun.answers.search.result import SearchResult
    from forerun.describe.plan.plan import Plan

LOG_FROM = 4.0
"""largest value over smallest, from which a scale is logarithmic"""
FEW = 12
"""up to this many bars each have a name"""
_MOST_BARS = 240
"""the most bars; more iterations are averaged"""


@dataclass(frozen=True, slots=True)
class Bar:
    """Iterations that are drawn as one bar, with their mean times."""

    first: int
    count: int
    breakdown_s: dict[str, float]
    note: str

    @property
    def label(self) -> str:
        """Returns `4`, or `4 to 99`."""
        return str(self.first) if self.count == 1 else f"{self.first} to {self.first + self.count - 1}"


def iteration_bars(iterations: Sequence[Iteration], most: int = _MOST_BARS) -> list[Bar]:
    """Returns one bar for each entry; with more than `most` of them, bars of about equally many iterations."""
    if len(iterations) <= most:
        return [Bar(each.first, each.repeats, dict(each.breakdown_s), each.note) for each in iterations]
    total = iterations[-1].first + iterations[-1].repeats
    bars: list[Bar] = []
    group: list[Iteration] = []
    for each in iterations:
        if group and each.first * most // total != group[0].first * most // total:
            bars.append(_averaged(group))
            group = []
        group.append(each)
    return [*bars, _averaged(group)]


def _averaged(group: Sequence[Iteration]) -> Bar:
    count = sum(each.repeats for each in group)
    notes = sorted({each.note for each in group if each.note})
    mean = {name: sum(each.breakdown_s.get(name, 0.0) * each.repeats for each in group) / count for name in CAUSES}
    return Bar(group[0].first, count, mean, "; ".join(notes[:2]) + (" ..." if len(notes) > 2 else ""))


def time_unit(longest_s: float) -> tuple[str, float]:
    """Returns the unit for an axis up to `longest_s`, and seconds of one."""
    return next(((name, size) for name, size in (("s", 1.0), ("ms", 1e-3)) if longest_s >= size), ("us", 1e-6))


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """Allocated memory of the fullest rank class over its step."""

    rank_class: str
    time_s: list[float]
    """when each level begins; it holds until the next"""
    parts_gib: list[tuple[Look, list[float]]]
    """from the bottom of the stack, without empty parts"""
    total_gib: list[float]
    peak: int
    end_s: float


def memory_curve(simulation: Simulation, points: int = 800) -> MemoryCurve:
    """Returns the memory of the rank class with the highest peak."""
    fullest = max(range(len(simulation.memory)), key=lambda i: simulation.memory[i].peak_bytes)
    curve = memory_over_time(simulation.program, simulation.flat, simulation.timeline, fullest, points)
    columns = {category.name.lower(): curve.by_category[:, category] for category in Category}
    parts = [(look, (columns[name] / GIB).tolist()) for name, look in MEMORY_LOOKS.items() if columns[name].any()]
    return MemoryCurve(
        curve.rank_class,
        (curve.time_ps / PS_PER_S).tolist(),
        parts,
        (curve.total / GIB).tolist(),
        curve.peak,
        simulation.timeline.end_of_step_ps / PS_PER_S,
    )


class TimeAndMemory(NamedTuple):
    """The place of a plan in a plot of time and memory."""

    plan: Plan
    step_s: float
    gib: float


def time_and_memory(prediction: Prediction) -> TimeAndMemory:
    """Returns the place of a prediction."""
    return TimeAndMemory(prediction.own_plan(), prediction.step_time_s, prediction.peak_reserved_gib)


def found_too_large(result: SearchResult) -> list[TimeAndMemory]:
    """Returns the plans whose simulated memory does not fit, in the order of their simulation.

    The time of those that were not run is its lower bound.
    """
    outcome = result.outcome
    run = [time_and_memory(each) for each in outcome.predictions.values() if not each.fits]
    bounded = ((outcome.unfit[row], least_s) for row, least_s in outcome.least_s().items())
    return run + [TimeAndMemory(each.plan, least_s, each.peak_reserved_gib) for each, least_s in bounded]


def cumulated(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Returns sorted values and the share of them that is at most as large, in %; equal ones once."""
    ordered, counts = np.unique(np.array(values, np.float64), return_counts=True)
    return ordered.tolist(), (100 * np.cumsum(counts) / max(1, len(values))).tolist()
