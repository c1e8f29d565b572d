"""What an exploration found: a row for each point, the best ones, the Pareto front, the trend of each axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import median
from typing import Any

from forerun.astrasim.dse.definition import Exploration
from forerun.astrasim.dse.evaluate import Failed, Figures, Outcome
from forerun.astrasim.dse.limits import MemoryLimit
from forerun.astrasim.dse.space import AXES, Point
from forerun.common.units import GIB

_COLUMNS = tuple(field.name for field in fields(Figures) if field.name not in ("terms", "rank_0"))
"""figures that a table has"""


@dataclass(frozen=True, slots=True)
class Row:
    """A point and its outcome; figures are None where there is an error."""

    point: Point
    figures: Figures | None
    error: str
    peak_memory_gib: float | None
    """of the rank that needs most, at the exploration's bytes per element"""
    fits: bool | None
    """None where there is no limit, or no figure"""

    def flat(self) -> dict[str, Any]:
        """As a table has it: names, axes, figures."""
        row = {"workload": self.point.workload, "system": self.point.system, "npus": self.point.strategy.n_ranks}
        row |= asdict(self.point.strategy)
        row |= {"status": "error" if self.error else "ok", "error": self.error}
        row |= {name: getattr(self.figures, name) if self.figures else None for name in _COLUMNS}
        return row | {"peak_memory_gib": self.peak_memory_gib, "fits": self.fits}


@dataclass(frozen=True, slots=True)
class TrendRow:
    """All points that have one value on an axis."""

    axis: str
    value: int | bool
    points: int
    best_ns: int
    median_ns: float
    least_memory_gib: float


@dataclass(frozen=True)
class PairResult:
    """What was found for one workload on one system."""

    workload: str
    system: str
    npus: int
    memory_limit: MemoryLimit | None
    rows: tuple[Row, ...]
    bytes_per_element: float = 1

    @property
    def memory_unit(self) -> str:
        """The unit in which people read memory: that of the limit."""
        return self.memory_limit.unit if self.memory_limit else MemoryLimit(0).unit

    @property
    def memory_limit_gib(self) -> float | None:
        return self.memory_limit.gib if self.memory_limit else None

    @property
    def ranked(self) -> list[Row]:
        """The points that could be simulated, the fastest first; equal ones by memory, then as they were listed."""
        return sorted((row for row in self.rows if row.figures), key=_time_and_memory)

    @property
    def ranked_within_limit(self) -> list[Row]:
        """Those of them that fit."""
        return [row for row in self.ranked if row.fits is not False]

    @property
    def pareto(self) -> list[Row]:
        """The points that no other one beats in time and memory, the fastest first; of equal ones the first."""
        front: list[Row] = []
        for row in self.ranked:
            if not front or _memory(row) < _memory(front[-1]):
                front.append(row)
        return front

    @property
    def trends(self) -> list[TrendRow]:
        """Time and memory by value, of every axis that has several."""
        trends = []
        for axis in AXES:
            by_value: dict[int | bool, list[Row]] = {}
            for row in self.ranked:
                by_value.setdefault(getattr(row.point.strategy, axis), []).append(row)
            if len(by_value) > 1:
                trends += [_trend(axis, value, by_value[value]) for value in sorted(by_value)]
        return trends

    @property
    def failed(self) -> list[Row]:
        return [row for row in self.rows if row.error]


@dataclass(frozen=True)
class Explored:
    """The outcome of an exploration."""

    pairs: tuple[PairResult, ...]
    computed: int
    """points that were simulated now"""
    known: int
    """points that were known from before"""
    seconds: float
    """what simulating took"""

    @property
    def rows(self) -> list[Row]:
        return [row for pair in self.pairs for row in pair.rows]

    @property
    def points_per_s(self) -> float | None:
        """None where nothing was simulated."""
        return self.computed / self.seconds if self.computed else None


def results_by_pair(exploration: Exploration, outcomes: Sequence[Outcome]) -> tuple[PairResult, ...]:
    """Rows of the outcomes, which are in the order of the points, by pair."""
    rows: dict[tuple[str, str], list[Row]] = {pair: [] for pair in exploration.pairs}
    for point, outcome in zip(exploration.points, outcomes, strict=True):
        rows[point.workload, point.system].append(_row(exploration, point, outcome))
    return tuple(
        PairResult(
            workload,
            system,
            exploration.machines[system].network.n_npus,
            exploration.memory_limits.get(system),
            tuple(rows[workload, system]),
            exploration.bytes_per_element,
        )
        for workload, system in exploration.pairs
    )


def _row(exploration: Exploration, point: Point, outcome: Outcome) -> Row:
    if isinstance(outcome, Failed):
        return Row(point, None, outcome.reason, None, None)
    gib = outcome.peak_memory_bytes * exploration.bytes_per_element / GIB
    limit = exploration.memory_limits.get(point.system)
    return Row(point, outcome, "", gib, None if limit is None else gib <= limit.gib)


def _time(row: Row) -> int:
    assert row.figures
    return row.figures.time_ns


def _memory(row: Row) -> float:
    assert row.peak_memory_gib is not None
    return row.peak_memory_gib


def _time_and_memory(row: Row) -> tuple[int, float]:
    return _time(row), _memory(row)


def _trend(axis: str, value: int | bool, rows: Iterable[Row]) -> TrendRow:
    times, memory = zip(*map(_time_and_memory, rows), strict=True)
    return TrendRow(axis, value, len(times), min(times), float(median(times)), min(memory))
