"""How step times spread over the plans of a search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
import numpy.typing as npt

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
    """plans that were skipped, at the lower bound of their time"""


def runtime_histogram(result: SearchResult, bins: int = BINS) -> list[Bin]:
    """Step times of what fits, and lower bounds of what was skipped for its time, in bins of equal ratio."""
    simulated = [prediction.step_time_s for prediction in result.ranked]
    bounded = () if result.objective == "memory" else result.bounds_of_skipped
    return histogram(simulated, bounded, bins)


def histogram(simulated: npt.ArrayLike, bounded: npt.ArrayLike = (), bins: int = BINS) -> list[Bin]:
    """Times in seconds, and lower bounds of others, in at most so many bins of equal ratio; none for no times."""
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
    """'#' for simulated plans, then '.' for bounded ones, `width` characters for `most`; something for anything."""
    return "#" * ceil(width * simulated / most) + "." * ceil(width * bounded / most)
