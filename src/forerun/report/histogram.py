"""How step times spread over the plans of a search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from forerun.search.result import SearchResult

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
    bounded = [] if result.objective == "memory" else [each.at_least for each in result.skipped]
    return histogram(simulated, bounded, bins)


def histogram(simulated: Sequence[float], bounded: Sequence[float] = (), bins: int = BINS) -> list[Bin]:
    """Times in seconds, and lower bounds of others, in at most so many bins of equal ratio; none for no times."""
    times = [*simulated, *bounded]
    if not times:
        return []
    low, high = min(times), max(times)
    bins = 1 if low == high else min(bins, len(times))
    edges = [low * (high / low) ** (i / bins) for i in range(bins)] + [high]
    one, other = _counts(simulated, edges), _counts(bounded, edges)
    return [Bin(edges[i], edges[i + 1], one[i], other[i]) for i in range(bins)]


def _counts(times: Sequence[float], edges: Sequence[float]) -> list[int]:
    counts = [0] * (len(edges) - 1)
    for time in times:
        counts[sum(edge <= time for edge in edges[1:-1])] += 1
    return counts


def bar(simulated: int, bounded: int, most: int, width: int) -> str:
    """'#' for simulated plans, then '.' for bounded ones, `width` characters for `most`; something for anything."""
    return "#" * ceil(width * simulated / most) + "." * ceil(width * bounded / most)
