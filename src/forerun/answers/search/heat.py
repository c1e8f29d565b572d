"""Heat maps of a search: what is known of the best plan for each pair of values of two axes.

A cell is the best value of the objective where that is certain, a lower bound of it where plans that were not simulated
might be better, what the least of its plans needs where none fits, or nothing where no plan is possible.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from itertools import combinations
from math import log
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from forerun.answers.search.result import Objective, SearchResult
from forerun.common.errors import ForerunError
from forerun.describe.plan.fields import FIELD_TYPES, choices

Columns: TypeAlias = Mapping[str, NDArray[Any]]
MOST_VALUES = 16
"""values of an axis that a map shows; of more, those with the best plans"""
_USES = 2
"""maps that an axis is in, of those that are chosen"""
_LONG = 15
"""letters of a value, from which it needs a line of its own"""
_FAR = 2.0
"""so many times the best value, and more, is equally out of reach"""
_ROUNDS = 10
"""of taking off means, which holes in a map make necessary"""
DATA_PARALLEL = "dp"
"""the axis of all data parallelism, replicated or sharded"""
_FOLLOW = ("dp_shard", "dp_replicate", "n_microbatches")
"""axes of maps that somebody asks for only: dp stands for the first two, the third follows from dp and micro_batch"""


class Known(IntEnum):
    """What is known of a cell."""

    NOTHING = 0
    """no possible plan"""
    BEST = 1
    """the best value of its plans"""
    BOUND = 2
    """its plans have at least this value; one that was not simulated might be the best"""
    TOO_LARGE = 3
    """no plan fits; GiB that the smallest needs, at least"""


@dataclass(frozen=True)
class HeatMap:
    """The best plan for each pair of values; arrays are (values of y, values of x)."""

    x: str
    y: str
    x_values: tuple[str, ...]
    y_values: tuple[str, ...]
    x_left_out: int
    """values that had no room"""
    y_left_out: int
    objective: Objective
    known: NDArray[np.int8]
    """Known"""
    value: NDArray[np.float64]
    """seconds, or GiB with objective memory; of Known.TOO_LARGE always GiB; NaN for nothing"""
    simulated: NDArray[np.float64]
    """the best value of the plans that were simulated, NaN where none was or none fits"""
    plans: NDArray[np.int64]
    """how many possible plans the cell has"""


def heat_map(result: SearchResult, x: str, y: str) -> HeatMap:
    """The map of two axes, `x` across unless its values are too long for that (orders of mesh axes).

    Raises ForerunError for an axis that the plans of the search don't differ in.
    """
    columns = result.columns()
    axes = _axes(result, columns)
    for name in (x, y):
        if name not in axes:
            raise ForerunError(f"no heat map of {name!r}: the plans differ in {', '.join(axes) or 'nothing'}")
    if x == y:
        raise ForerunError(f"a heat map needs two axes, got {x!r} twice")
    across, up = (_Axis.of(name, axes[name], columns) for name in (x, y))
    if across.has_long_values and not up.has_long_values:
        across, up = up, across
    return _map(result.objective, columns, across, up)


def telling_maps(result: SearchResult, most: int) -> list[HeatMap]:
    """The maps in which the choice on one axis depends most on the other; each axis is in at most two of them.

    Of two axes, y has the longer or the more values.
    """
    columns = result.columns()
    axes = [_Axis.of(name, column, columns) for name, column in _axes(result, columns).items() if name not in _FOLLOW]
    pairs = (sorted(pair, key=lambda axis: (axis.has_long_values, len(axis.values))) for pair in combinations(axes, 2))
    maps = [_map(result.objective, columns, x, y) for x, y in pairs]
    uses = dict.fromkeys((axis.name for axis in axes), 0)
    chosen: list[HeatMap] = []
    for score, _, each in sorted(((_telling(each), -i, each) for i, each in enumerate(maps)), reverse=True):
        if len(chosen) < most and max(uses[each.x], uses[each.y]) < _USES and score > 0:
            chosen.append(each)
            uses[each.x] += 1
            uses[each.y] += 1
    return chosen


def _axes(result: SearchResult, columns: Columns) -> dict[str, NDArray[Any]]:
    """The values of every plan on each axis on which plans differ."""
    n = len(columns["status"])
    if not n:
        return {}
    plan = (result.skipped or result.too_large)[0].plan if not result.ranked else result.ranked[0].own_plan()
    replicate, shard = (columns.get(name, np.full(n, getattr(plan, name))) for name in ("dp_replicate", "dp_shard"))
    known = {DATA_PARALLEL: replicate * shard}
    known |= {
        name: column.astype(str) if column.dtype == object else column
        for name, column in columns.items()
        if name not in _NOT_AXES
    }
    return {name: column for name, column in known.items() if (column != column[0]).any()}


_NOT_AXES = ("status", "objective", "needs_gib")


@dataclass(frozen=True)
class _Axis:
    name: str
    values: tuple[str, ...]
    left_out: int
    place: NDArray[np.int64]
    """of every plan's value among `values`, -1 for those left out"""

    @property
    def has_long_values(self) -> bool:
        """Whether its values have no room beside each other."""
        return max(map(len, self.values)) > _LONG

    @classmethod
    def of(cls, name: str, column: NDArray[Any], columns: Columns) -> _Axis:
        values, place = np.unique(column, return_inverse=True)
        kept = np.arange(len(values))
        if len(values) > MOST_VALUES:
            best = np.full(len(values), np.inf)
            fit = columns["status"] != "out_of_memory"
            np.minimum.at(best, place[fit], columns["objective"][fit])
            kept = np.sort(np.argsort(best, kind="stable")[:MOST_VALUES])
        options = {option: i for i, option in enumerate(choices(name) if name in FIELD_TYPES else ())}
        order = sorted(kept.tolist(), key=lambda i: (options.get(values[i].item(), 0), i))
        new = np.full(len(values), -1)
        new[order] = np.arange(len(order))
        return cls(name, tuple(_word(values[i]) for i in order), len(values) - len(order), new[place])


def _map(objective: Objective, columns: Columns, x: _Axis, y: _Axis) -> HeatMap:
    shape = (len(y.values), len(x.values))
    inside = (x.place >= 0) & (y.place >= 0)
    cell = (y.place * len(x.values) + x.place)[inside]
    status, value, needs = (columns[name][inside] for name in ("status", "objective", "needs_gib"))

    def least(which: NDArray[np.bool_], of: NDArray[np.float64]) -> NDArray[np.float64]:
        found = np.full(shape[0] * shape[1], np.inf)
        np.minimum.at(found, cell[which], of[which])
        return found.reshape(shape)

    best, bound = least(status == "ok", value), least(status == "skipped", value)
    need = least(status == "out_of_memory", needs)
    known = np.full(shape, Known.NOTHING, np.int8)
    known[np.isfinite(need)] = Known.TOO_LARGE
    known[np.isfinite(bound)] = Known.BOUND
    known[np.isfinite(best) & (best <= bound)] = Known.BEST
    shown = np.choose(known, [np.full(shape, np.nan), best, bound, need])
    plans = np.bincount(cell, minlength=shape[0] * shape[1]).reshape(shape)
    simulated = np.where(np.isfinite(best), best, np.nan)
    names, values, left_out = (x.name, y.name), (x.values, y.values), (x.left_out, y.left_out)
    return HeatMap(*names, *values, *left_out, objective, known, shown, simulated, plans)


def _telling(each: HeatMap) -> float:
    """How much the choice on one axis depends on that on the other, near the best.

    It is what is left of the logarithm of the cells' values when the means of rows and columns are taken off, as a
    standard deviation; what is out of reach, in time or in memory, counts alike.
    """
    reachable = (each.known == Known.BEST) | (each.known == Known.BOUND)
    values = each.value[reachable]
    if not len(values) or values.min() <= 0:
        return 0.0
    rest = np.full(each.known.shape, log(_FAR))
    rest[reachable] = np.minimum(log(_FAR), np.log(values / values.min()))
    there = each.known != Known.NOTHING
    for _ in range(_ROUNDS):
        for axis in (0, 1):
            rest -= rest.sum(axis, keepdims=True, where=there) / np.maximum(1, there.sum(axis, keepdims=True))
    return float(np.std(rest[there]))


def _word(value: np.generic) -> str:
    plain = value.item()
    return ("on" if plain else "off") if isinstance(plain, bool) else str(plain)
