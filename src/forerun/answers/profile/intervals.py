"""Unions of intervals and the time that several sets of them share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from forerun.common import arrays
from forerun.sources.profile.profile import F64


class Intervals(NamedTuple):
    """Intervals by start and end."""

    start: F64
    end: F64

    def total(self) -> float:
        """Returns the sum of all lengths."""
        return float((self.end - self.start).sum())


def union(start: F64, end: F64) -> Intervals:
    """Returns the intervals that together cover the given ones; those that touch are one.

    HTA's rounding lets some short intervals end before they start. They stay negative where no other covers them.
    """
    return Intervals(*arrays.union(start, end))


def shared_times(sets: Sequence[Intervals]) -> dict[int, float]:
    """Returns how long each combination of the sets is there; bit i of a combination stands for set i.

    Between two moments, the sum over the intervals that have begun and not ended identifies the combination.
    """
    time = np.concatenate([np.concatenate(one) for one in sets])
    step = np.concatenate([np.repeat((1 << i, -(1 << i)), len(one.start)) for i, one in enumerate(sets)])
    order = np.argsort(time, kind="stable")
    time, running = time[order], np.cumsum(step[order])
    if len(time) == 0:
        return {}
    length = np.diff(time, append=time[-1])
    return {
        int(combination): float(length[running == combination].sum())
        for combination in np.unique(running)
        if combination > 0
    }
