"""The distribution of step times over the plans of a search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from forerun.answers.search.result import SearchResult

BINS = 10


@dataclass(frozen=True, slots=True)
class Bin:
    """Plans with low_s <= step time < high_s, the last bin with its upper end."""

    low_s: float
    high_s: float
    simulated: int
    """plans that fit"""
    bounded: int
    """plans that were not simulated, by the lower bound of their time"""


def runtime_histogram(result: SearchResult, bins: int = BINS) -> list[Bin]:
    """Returns step times of plans that fit, and lower bounds of those that were not simulated, in bins of equal
    ratio."""
    simulated = [prediction.step_time_s for prediction in result.ranked]
    bounded = () if result.objective == "memory" else result.bounds_of_skipped
    return histogram(simulated, bounded, bins)


def histogram(simulated: npt.ArrayLike, bounded: npt.ArrayLike = (), bins: int = BINS) -> list[Bin]:
    """Sorts times and lower bounds, in seconds, into at most so many bins of equal ratio."""
    times = np.concatenate([np.asarray(simulated, np.float64), np.asarray(bounded, np.float64)])
    if not len(times):
        return []
    low, high = float(times.min()), float(times.max())
    bins = 1 if low == high else min(bins, len(times))
    edges = [low * (high / low) ** (i / bins) for i in range(bins)] + [high]
    one, other = _counts(simulated, edges), _counts(bounded, edges)
    return [Bin(edges[i], edges[i + 1], one[i], other[i]) for i in range(bins)]


def _counts(times: npt.ArrayLike, edges: Sequence[float]) -> list[int]:
    place = np.searchsorted(np.array(edges[1:-1]), np.asarray(times, np.float64), side="right")
    counts: list[int] = np.bincount(place, minlength=len(edges) - 1).tolist()
    return counts


def bar(simulated: int, bounded: int, most: int, width: int) -> str:
    """Returns a bar of '#' for simulated and '.' for bounded plans, `width` characters for `most` plans."""
    return "#" * ceil(width * simulated / most) + "." * ceil(width * bounded / most)
