"""Columns: the values of one field in many plans. With them, one rule works for a Plan and for a table of plans.

A rule combines comparisons with `&`, `|` and `no`, and numbers with arithmetic. Both work on the fields of a Plan and
on the columns of a table. Rules that look a value up use `mapped`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.bool_]
Column = Any
"""the value of one plan, or a column (n,) of the values of n plans"""
Plans = Any
"""a Plan, or a table of n plans whose columns have the names of Plan's fields and properties"""


class ValueColumn:
    """Values of n plans that are not numbers: rules compare them and look them up."""

    def __init__(self, codes: npt.NDArray[Any], values: Sequence[Any]) -> None:
        """Makes a column. `codes` (n,) holds the index in `values` of each plan's value."""
        self.codes, self.values = codes, values

    def each(self) -> Iterator[tuple[Any, Mask]]:
        """Yields each value with a mask (n,) of the plans that have it."""
        for code, value in enumerate(self.values):
            yield value, self.codes == code

    def array(self) -> npt.NDArray[Any]:
        """Returns the values, which must be numbers or truth values, as an array (n,)."""
        out: npt.NDArray[Any] = np.array(self.values)[self.codes]
        return out

    def _where(self, value: object) -> Mask:
        flags = np.array([each == value for each in self.values], np.bool_)
        out: Mask = flags[self.codes]
        return out

    def __eq__(self, value: object) -> Mask:  # type: ignore[override]
        return self._where(value)

    def __ne__(self, value: object) -> Mask:  # type: ignore[override]
        return ~self._where(value)

    __hash__ = None  # type: ignore[assignment]


_OF_PLANS = (ValueColumn, np.ndarray)
"""types of columns that hold the values of several plans"""


def values_of(column: Column) -> Iterator[tuple[Any, Column]]:
    """Yields each value of a column with the mask (n,) of its plans; for a single plan, its value with True."""
    if isinstance(column, ValueColumn):
        yield from column.each()
    else:
        yield column, True


def having(column: Column, holds: Callable[[Any], Column]) -> Column:
    """Says in which plans the value of `column` has the property `holds`."""
    found: Column = False
    for value, here in values_of(column):
        found |= here & holds(value)
    return found


def no(flag: Column) -> Column:
    """Negates a truth value, or each of an array (n,)."""
    return flag ^ True


def ranks_between(plan: Plans, order: str, one: str, other: str) -> Column:
    """Returns the product of the degrees of the axes that lie between two axes in a mesh `order`."""
    axes = order.split("-")
    near, far = sorted((axes.index(one), axes.index(other)))
    return prod(getattr(plan, axis) for axis in axes[near + 1 : far])


def where(flag: Column, yes: Column, otherwise: Column) -> Column:
    """Returns `yes` where `flag` holds and `otherwise` where it does not."""
    if isinstance(flag, np.ndarray):
        return np.where(flag, yes, otherwise)
    return yes if flag else otherwise


def mapped(answer: Callable[..., Any], *columns: Column) -> Column:
    """Applies `answer` to the values of `columns` plan by plan; returns one value where no column differs.

    Columns are values, ValueColumns and arrays of truth values. `answer` runs once for each combination of values.
    """
    if not _differ(columns):
        return answer(*columns)
    codes, values = _joined(columns)
    return ValueColumn(codes, [answer(*each) for each in values])


def numbers(answer: Callable[..., float], *columns: Column) -> Column:
    """Does as `mapped` for an answer that is a number; returns an array (n,) where a column differs between plans."""
    return mapped(answer, *columns).array() if _differ(columns) else answer(*columns)


def _differ(columns: Sequence[Column]) -> bool:
    """Says whether some column holds the values of several plans. A prediction asks hundreds of times."""
    for column in columns:  # noqa: SIM110 - a generator would take twice the time
        if isinstance(column, _OF_PLANS):
            return True
    return False


def _joined(columns: Sequence[Column]) -> tuple[Any, list[tuple[Any, ...]]]:
    """Returns the code (n,) of each plan's combination of values, and the combinations; some column must differ."""
    codes: Any = 0
    values: list[tuple[Any, ...]] = [()]
    for column in columns:
        if isinstance(column, np.ndarray):
            column = ValueColumn(column.astype(np.uint8), (False, True))
        if not isinstance(column, ValueColumn):
            values = [(*each, column) for each in values]
            continue
        own = column.codes.astype(np.int32)
        codes = codes * len(column.values) + own
        values = [(*each, value) for each in values for value in column.values]
    return codes, values
