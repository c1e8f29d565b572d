"""PlanTable: many plans as columns of small integers; a Plan is made only where somebody asks for one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.plan.plan import Plan

Codes = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]
NUMBERS = (
    *("seq_len", "micro_batch", "n_microbatches", "dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "zero_stage"),
    *("prefetch", "virtual_stages", "checkpoint_every"),
)
"""fields that rules and bounds calculate with; all others are compared only"""
_FIELDS = tuple(field.name for field in fields(Plan))


class Column:
    """Values of a field that is no number, one for each plan: compared, never calculated with."""

    def __init__(self, codes: Codes, values: Sequence[Any]) -> None:
        """`codes` (n,) are places in `values`."""
        self.codes, self.values = codes, values

    def each(self) -> Iterator[tuple[Any, Mask]]:
        """Every value with the plans that have it, (n,)."""
        for code, value in enumerate(self.values):
            yield value, self.codes == code

    def _where(self, value: object) -> Mask:
        flags = np.array([each == value for each in self.values], np.bool_)
        out: Mask = flags[self.codes]
        return out

    def __eq__(self, value: object) -> Mask:  # type: ignore[override]
        return self._where(value)

    def __ne__(self, value: object) -> Mask:  # type: ignore[override]
        return ~self._where(value)

    __hash__ = None  # type: ignore[assignment]

    @property
    def flags(self) -> Mask:
        """A yes or no as an array."""
        return self._where(True)


@dataclass(frozen=True)
class PlanTable:
    """Plans as columns: for each field codes, (n,), that are places in its list of values.

    Attributes with the names of Plan's fields and properties are columns: numbers and yes or no as arrays (n,), others
    as `Column`. What is the same in all plans is one value.
    """

    codes: Mapping[str, Codes]
    """of fields that differ"""
    values: Mapping[str, Sequence[Any]]
    """of every field; one value where it has no codes"""
    length: int

    @classmethod
    def of(cls, plans: Sequence[Plan]) -> PlanTable:
        """The table of `plans`."""
        codes, values = {}, {}
        for name in _FIELDS:
            column = [getattr(plan, name) for plan in plans]
            values[name] = tuple(dict.fromkeys(column))
            if len(values[name]) > 1:
                place = {value: code for code, value in enumerate(values[name])}
                codes[name] = np.array([place[value] for value in column], np.int32)
        return cls(codes, values, len(plans))

    def __len__(self) -> int:
        return self.length

    def __getattr__(self, name: str) -> Any:
        if name not in self.__dict__.get("values", ()):
            derived = getattr(Plan, name, None)
            if not isinstance(derived, property) or derived.fget is None:
                raise AttributeError(name)
            return derived.fget(self)
        values = self.values[name]
        if name not in self.codes:
            return values[0]
        codes = self.codes[name]
        if name in NUMBERS:
            return np.array(values, np.int64)[codes]
        column = Column(codes, values)
        return column.flags if isinstance(values[0], bool) else column

    def plan(self, row: int) -> Plan:
        """The plan in `row`."""
        given = {name: values[0] for name, values in self.values.items()}
        given |= {name: self.values[name][int(codes[row])] for name, codes in self.codes.items()}
        return Plan(**given)

    def take(self, rows: npt.NDArray[Any] | slice) -> PlanTable:
        """The plans of `rows`, in that order."""
        codes = {name: column[rows] for name, column in self.codes.items()}
        length = len(range(*rows.indices(self.length))) if isinstance(rows, slice) else len(rows)
        return PlanTable(codes, self.values, length)
