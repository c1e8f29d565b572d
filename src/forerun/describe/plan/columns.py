"""Columns: the values that one field has in many plans, so that a rule is written once for a Plan and for a table.

A rule combines comparisons with `&`, `|` and `no`, and numbers with arithmetic. Both work on the fields of a Plan and
on the columns of a table. `mapped` is for rules that look a value up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.bool_]
Column = Any
"""a value of one plan, or an array of those of many"""
Plans = Any
"""a Plan, or a table with its fields and properties as columns"""


class ValueColumn:
    """Values that are no numbers, one for each plan: compared and looked up, never calculated with."""

    def __init__(self, codes: npt.NDArray[Any], values: Sequence[Any]) -> None:
        """`codes` (n,) are places in `values`."""
        self.codes, self.values = codes, values

    def each(self) -> Iterator[tuple[Any, Mask]]:
        """Every value with the plans that have it, (n,)."""
        for code, value in enumerate(self.values):
            yield value, self.codes == code

    def array(self) -> npt.NDArray[Any]:
        """The values as an array (n,), where they are numbers or yes and no."""
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


def values_of(column: Column) -> Iterator[tuple[Any, Column]]:
    """Each value of a column with where it stands; of a single plan, its only one, which stands everywhere."""
    if isinstance(column, ValueColumn):
        yield from column.each()
    else:
        yield column, True


def no(flag: Column) -> Column:
    """The opposite of a truth value, or of an array of them."""
    return flag ^ True


def where(flag: Column, yes: Column, otherwise: Column) -> Column:
    """`yes` where a flag holds, `otherwise` where it does not."""
    if isinstance(flag, np.ndarray):
        return np.where(flag, yes, otherwise)
    return yes if flag else otherwise


def mapped(answer: Callable[..., Any], *columns: Column) -> Column:
    """`answer` of the values of `columns`, plan by plan: one value where no column differs between plans.

    Columns are values, ValueColumns and arrays of yes and no. `answer` is asked once for each combination of values.
    """
    codes, values = _joined(columns)
    answers = [answer(*each) for each in values]
    return answers[0] if codes is None else ValueColumn(codes, answers)


def numbers(answer: Callable[..., float], *columns: Column) -> Column:
    """As `mapped`, for an answer that is a number: an array (n,) where a column differs between plans."""
    found = mapped(answer, *columns)
    return found.array() if isinstance(found, ValueColumn) else found


def _joined(columns: Sequence[Column]) -> tuple[npt.NDArray[Any] | None, list[tuple[Any, ...]]]:
    """Codes of the combinations of values that plans have, and the combinations; no codes where all plans have one."""
    codes: npt.NDArray[Any] | None = None
    values: list[tuple[Any, ...]] = [()]
    for column in columns:
        if isinstance(column, np.ndarray):
            column = ValueColumn(column.astype(np.uint8), (False, True))
        if not isinstance(column, ValueColumn):
            values = [(*each, column) for each in values]
            continue
        own = column.codes.astype(np.int32)
        codes = own if codes is None else codes * len(column.values) + own
        values = [(*each, value) for each in values for value in column.values]
    return codes, values
