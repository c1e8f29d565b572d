"""Explains why a point is slower, or needs more memory, than another, by the differences of its terms.

The differences of the terms of time add up to that of the times, and those of memory to that of the peaks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from forerun.astrasim.dse.evaluate import Figures
from forerun.astrasim.dse.result import PairResult, Row
from forerun.astrasim.dse.space import AXES
from forerun.astrasim.dse.terms import Communication

COMPUTE, IDLE = "compute", "idle"
HELD, MADE = "held", "made"


@dataclass(frozen=True, slots=True)
class Change:
    """One term before and after: ns of time, or bytes of memory."""

    term: str
    """compute, idle or `<kind> over <axis>`; of memory, held or made"""
    before: int
    after: int
    calls: tuple[int, int] = (0, 0)
    """of communication: number of calls before and after"""
    size_bytes: tuple[int, int] = (0, 0)

    @property
    def by(self) -> int:
        return self.after - self.before

    @property
    def is_communication(self) -> bool:
        return self.term not in (COMPUTE, IDLE, HELD, MADE)


@dataclass(frozen=True, slots=True)
class Reason:
    """Two points that differ in `axis`; without an axis, the fastest points with and without the memory limit."""

    what: Literal["time", "memory"]
    axis: str | None
    before: Row
    after: Row
    changes: tuple[Change, ...]
    """the changes that are not 0, the largest first"""

    @property
    def total(self) -> tuple[int, int]:
        """Returns the time in ns, or peak memory in the trace's bytes, before and after."""
        figures = _figures(self.before), _figures(self.after)
        if self.what == "time":
            return figures[0].time_ns, figures[1].time_ns
        return figures[0].peak_memory_bytes, figures[1].peak_memory_bytes


def reasons(pair: PairResult) -> list[Reason]:
    """Compares points for each axis with several values, and then the fastest point with the fastest that fits.

    For an axis, these are the fastest points of its lowest, best and highest value, and the points of the lowest and
    the highest value that need the least memory.
    """
    found: list[Reason] = []
    for axis in AXES:
        by_value = pair.by_value(axis)
        values = list(by_value)
        if len(values) < 2:
            continue
        best = getattr(pair.ranked[0].point.strategy, axis)
        steps = [values[0], best, values[-1]]
        found += [
            _time_reason(axis, by_value[low][0], by_value[high][0]) for low, high in pairwise(steps) if low != high
        ]
        found.append(_memory_reason(axis, _least(by_value[values[0]]), _least(by_value[values[-1]])))
    within = pair.ranked_within_limit
    if within and within[0] is not pair.ranked[0]:
        found += [make(None, pair.ranked[0], within[0]) for make in (_time_reason, _memory_reason)]
    return found


def _least(rows: Sequence[Row]) -> Row:
    return min(rows, key=lambda row: _figures(row).peak_memory_bytes)


def _time_reason(axis: str | None, before: Row, after: Row) -> Reason:
    return Reason("time", axis, before, after, _ordered(_time_changes(_figures(before), _figures(after))))


def _memory_reason(axis: str | None, before: Row, after: Row) -> Reason:
    old, new = _figures(before).terms, _figures(after).terms
    changes = [Change(HELD, old.held_bytes, new.held_bytes), Change(MADE, old.made_bytes, new.made_bytes)]
    return Reason("memory", axis, before, after, _ordered(changes))


def _time_changes(before: Figures, after: Figures) -> Iterable[Change]:
    yield Change(COMPUTE, before.terms.compute_ns, after.terms.compute_ns)
    yield Change(IDLE, before.terms.idle_ns, after.terms.idle_ns)
    old, new = ({(one.kind, one.axis): one for one in each.terms.communication} for each in (before, after))
    for kind, axis in dict.fromkeys([*old, *new]):
        nothing = Communication(axis, kind, 0, 0, 0)
        a, b = old.get((kind, axis), nothing), new.get((kind, axis), nothing)
        yield Change(
            f"{kind} over {axis}", a.exposed_ns, b.exposed_ns, (a.calls, b.calls), (a.size_bytes, b.size_bytes)
        )


def _ordered(changes: Iterable[Change]) -> tuple[Change, ...]:
    return tuple(sorted((change for change in changes if change.by), key=lambda change: -abs(change.by)))


def _figures(row: Row) -> Figures:
    assert row.figures
    return row.figures
