"""The results of an exploration: a row for each point, the best points, the Pareto front, the trend of each axis."""

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
"""the figures in a table"""


@dataclass(frozen=True, slots=True)
class Row:
    """A point and its outcome; its figures are None if there is an error."""

    point: Point
    figures: Figures | None
    error: str
    peak_memory_gib: float | None
    """of the rank that needs most, with the exploration's bytes per element"""
    fits: bool | None
    """whether it fits in memory; None without a limit or figures"""

    def flat(self) -> dict[str, Any]:
        """Returns the row of a table: names, axes, figures."""
        row = {"workload": self.point.workload, "system": self.point.system, "npus": self.point.strategy.n_ranks}
        row |= asdict(self.point.strategy)
        row |= {"status": "error" if self.error else "ok", "error": self.error}
        row |= {name: getattr(self.figures, name) if self.figures else None for name in _COLUMNS}
        return row | {"peak_memory_gib": self.peak_memory_gib, "fits": self.fits}


@dataclass(frozen=True, slots=True)
class TrendRow:
    """A summary of all points with one value of an axis."""

    axis: str
    value: int | bool
    points: int
    best_ns: int
    median_ns: float
    least_memory_gib: float


@dataclass(frozen=True)
class PairResult:
    """The results for one workload on one system."""

    workload: str
    system: str
    npus: int
    memory_limit: MemoryLimit | None
    rows: tuple[Row, ...]
    bytes_per_element: float = 1

    @property
    def memory_unit(self) -> str:
        """Returns the unit of reported memory, which is that of the limit."""
        return self.memory_limit.unit if self.memory_limit else MemoryLimit(0).unit

    @property
    def memory_limit_gib(self) -> float | None:
        return self.memory_limit.gib if self.memory_limit else None

    @property
    def ranked(self) -> list[Row]:
        """Returns the points that could be simulated by time, then by memory, then as they were listed."""
        return sorted((row for row in self.rows if row.figures), key=_time_and_memory)

    @property
    def ranked_within_limit(self) -> list[Row]:
        """Returns the ranked points that fit in memory."""
        return [row for row in self.ranked if row.fits is not False]

    @property
    def pareto(self) -> list[Row]:
        """Returns the points that no other point beats in time and memory, the fastest first; of equal points the
        first."""
        front: list[Row] = []
        for row in self.ranked:
            if not front or _memory(row) < _memory(front[-1]):
                front.append(row)
        return front

    @property
    def trends(self) -> list[TrendRow]:
        """Returns the time and memory by value, for every axis with several values."""
        groups = {axis: self.by_value(axis) for axis in AXES}
        return [_trend(axis, *group) for axis, values in groups.items() if len(values) > 1 for group in values.items()]

    def by_value(self, axis: str) -> dict[int | bool, list[Row]]:
        """Groups the ranked points by their value of an axis, in ascending order."""
        groups: dict[int | bool, list[Row]] = {}
        for row in self.ranked:
            groups.setdefault(getattr(row.point.strategy, axis), []).append(row)
        return dict(sorted(groups.items()))

    @property
    def failed(self) -> list[Row]:
        return [row for row in self.rows if row.error]


@dataclass(frozen=True)
class Explored:
    """The results of an exploration."""

    pairs: tuple[PairResult, ...]
    computed: int
    """points that this run simulated"""
    known: int
    """points that an earlier run simulated"""
    seconds: float
    """time of the simulation"""

    @property
    def rows(self) -> list[Row]:
        return [row for pair in self.pairs for row in pair.rows]

    @property
    def points_per_s(self) -> float | None:
        """Returns points simulated in a second; None if none was."""
        return self.computed / self.seconds if self.computed else None


def results_by_pair(exploration: Exploration, outcomes: Sequence[Outcome]) -> tuple[PairResult, ...]:
    """Groups outcomes, which are in the order of the points, by pair."""
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
