"""Heat maps of a search: the best plan for each pair of values of two axes, as far as it is known.

A cell shows the best value of the objective if it is certain. It shows a lower bound if a plan that was not simulated
might be better, and the least memory needed if no plan fits. It is empty if no plan is possible.
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
"""most values of an axis that a map shows: those with the best plans"""
_USES = 2
"""most chosen maps that one axis may be in"""
_LONG = 15
"""number of letters from which on a value needs its own line"""
_FAR = 2.0
"""values of this many times the best and more count as equally bad"""
_ROUNDS = 10
"""rounds of subtracting means; a map with holes needs several"""
DATA_PARALLEL = "dp"
"""the axis of all data parallelism, replicated or sharded"""
_FOLLOW = ("dp_shard", "dp_replicate", "n_microbatches")
"""axes that no chosen map has: dp stands for the first two, and the third follows from dp and micro_batch"""


class Known(IntEnum):
    """The degree of knowledge about a cell."""

    NOTHING = 0
    """the cell has no possible plan"""
    BEST = 1
    """the value is the best of its plans"""
    BOUND = 2
    """the value is a lower bound of its plans; one that was not simulated might reach it"""
    TOO_LARGE = 3
    """no plan fits; the value is a lower bound, in GiB, of the memory that the smallest plan needs"""


@dataclass(frozen=True)
class HeatMap:
    """The best plan for each pair of values; arrays are (values of y, values of x)."""

    x: str
    y: str
    x_values: tuple[str, ...]
    y_values: tuple[str, ...]
    x_left_out: int
    """number of values of x that the map leaves out"""
    y_left_out: int
    objective: Objective
    known: NDArray[np.int8]
    """Known of each cell"""
    value: NDArray[np.float64]
    """seconds, or GiB with objective memory and for Known.TOO_LARGE; NaN for Known.NOTHING"""
    simulated: NDArray[np.float64]
    """the best value of the plans that were simulated, NaN if none was or none fits"""
    plans: NDArray[np.int64]
    """number of possible plans of each cell"""


def heat_map(result: SearchResult, x: str, y: str) -> HeatMap:
    """Returns the map of two axes, with `x` across unless its values are too long (orders of mesh axes).

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
    """Chooses the maps in which the best value of one axis depends most on the other. An axis is in at most two maps.

    The axis with longer or more values is y.
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
    """Returns the value of every plan, (n,), for each axis in which plans differ."""
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
    """index into `values` of every plan's value, -1 for values that are left out, (n,)"""

    @property
    def has_long_values(self) -> bool:
        """Returns whether the values are too long to stand side by side."""
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
    """Measures how much the best value of one axis depends on the other, near the best plan.

    It is the standard deviation of the logarithms of the cells' values after the means of rows and columns are
    subtracted. All cells that are far too slow or too large count alike.
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
