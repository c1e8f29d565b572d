"""How step times spread over plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from forerun.analysis.prediction import Prediction

BINS = 10


@dataclass(frozen=True, slots=True)
class Bin:
    """Plans with low_s <= step time < high_s, the last bin with its upper end."""

    low_s: float
    high_s: float
    count: int


def runtime_histogram(predictions: Sequence[Prediction], bins: int = BINS) -> list[Bin]:
    """Step times in at most `bins` bins of equal ratio; fewer where there are fewer plans, none without plans."""
    times = sorted(prediction.step_time_s for prediction in predictions)
    if not times:
        return []
    low, high = times[0], times[-1]
    if low == high:
        return [Bin(low, high, len(times))]
    bins = min(bins, len(times))
    edges = [low * (high / low) ** (i / bins) for i in range(bins)] + [high]
    counts = [0] * bins
    at = 0
    for time in times:
        while at < bins - 1 and time >= edges[at + 1]:
            at += 1
        counts[at] += 1
    return [Bin(edges[i], edges[i + 1], counts[i]) for i in range(bins)]


def bar(count: int, most: int, width: int) -> str:
    """A bar of '#' as long as `count` is of `most`, at least one character for anything."""
    return "#" * ceil(width * count / most) if count else ""
