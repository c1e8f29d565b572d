"""PlanTable: many plans as columns of small integers; a Plan is made only when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.describe.plan.columns import Mask, ValueColumn
from forerun.describe.plan.plan import Plan

Codes = npt.NDArray[Any]
NUMBERS = (
    *(
        "seq_len",
        "micro_batch",
        "n_microbatches",
        "dp_replicate",
        "dp_shard",
        "cp",
        "tp",
        "pp",
        "ep",
        "etp",
        "zero_stage",
    ),
    *("prefetch", "virtual_stages", "checkpoint_every", "lora_rank", "loss_chunks"),
)
"""plan fields that rules and bounds calculate with; all others are only compared"""
_SAFE = 1 << 15
"""numbers below this may be multiplied as 32-bit integers, which is twice as fast"""
_FIELDS = tuple(field.name for field in fields(Plan))


@dataclass(frozen=True)
class PlanTable:
    """Plans as columns: for each field, codes (n,) that index the list of its values.

    Attributes with the names of Plan's fields and properties are columns: numbers and booleans as arrays (n,), others
    as `ValueColumn`. A field with the same value in all plans is that one value.
    """

    codes: Mapping[str, Codes]
    """field -> codes, for the fields that differ between plans"""
    values: Mapping[str, Sequence[Any]]
    """field -> its values; a single value where the field has no codes"""
    length: int

    @classmethod
    def of(cls, plans: Sequence[Plan]) -> PlanTable:
        """Makes the table of `plans`."""
        return cls.of_columns({name: [getattr(plan, name) for plan in plans] for name in _FIELDS}, len(plans))

    @classmethod
    def of_columns(cls, columns: Mapping[str, Sequence[Any]], length: int) -> PlanTable:
        """Makes the table from columns by field name, each with `length` values."""
        codes, values = {}, {}
        for name, column in columns.items():
            values[name] = tuple(dict.fromkeys(column))
            if len(values[name]) > 1:
                place = {value: code for code, value in enumerate(values[name])}
                dtype = np.uint8 if len(place) < 256 else np.int32
                codes[name] = np.fromiter((place[value] for value in column), dtype, len(column))
        return cls(codes, values, length)

    @classmethod
    def joined(cls, tables: Sequence[PlanTable]) -> PlanTable:
        """Makes the table of the plans of `tables`, which have the same fields, one table after the other."""
        codes, values = {}, {}
        for name in tables[0].values:
            values[name] = tuple(dict.fromkeys(value for table in tables for value in table.values[name]))
            if len(values[name]) > 1:
                place = {value: code for code, value in enumerate(values[name])}
                dtype = np.uint8 if len(place) < 256 else np.int32
                own = (np.array([place[value] for value in table.values[name]], dtype) for table in tables)
                parts = zip(own, tables, strict=True)
                codes[name] = np.concatenate(
                    [new[table.codes.get(name, np.zeros(len(table), int))] for new, table in parts]
                )
        return cls(codes, values, sum(map(len, tables)))

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
            return np.array(values, np.int32 if max(values) < _SAFE else np.int64)[codes]
        column = ValueColumn(codes, values)
        return column.array() if isinstance(values[0], bool) else column

    def plan(self, row: int) -> Plan:
        """Returns the plan in `row`."""
        given = {name: values[0] for name, values in self.values.items()}
        given |= {name: self.values[name][int(codes[row])] for name, codes in self.codes.items()}
        return Plan(**given)

    def find(self, plan: Plan) -> npt.NDArray[np.int64]:
        """Returns the rows that have the values of `plan` in all columns of this table."""
        here = np.ones(self.length, np.bool_)
        for name, values in self.values.items():
            equal = np.array([value == getattr(plan, name) for value in values], np.bool_)
            here &= equal[self.codes[name]] if name in self.codes else equal[0]
        return np.flatnonzero(here)

    def with_values(self, name: str, where: Mask, value: Any) -> PlanTable:
        """Returns the table with `value` in field `name` where the mask is true; an array (n,) has one per plan."""
        if isinstance(value, np.ndarray):
            return self._with_numbers(name, np.where(where, value, getattr(self, name)))
        values = tuple(dict.fromkeys((*self.values[name], value)))
        codes = self.codes[name] if name in self.codes else np.zeros(self.length, np.uint8)
        dtype = np.uint8 if len(values) < 256 else np.int32
        return self._with_codes(name, np.where(where, values.index(value), codes).astype(dtype), values)

    def _with_numbers(self, name: str, numbers: Codes) -> PlanTable:
        values, codes = np.unique(numbers, return_inverse=True)
        return self._with_codes(name, codes, tuple(values.tolist()))

    def _with_codes(self, name: str, codes: Codes, values: Sequence[Any]) -> PlanTable:
        return PlanTable({**self.codes, name: codes}, {**self.values, name: values}, self.length)

    def take(self, rows: npt.NDArray[Any] | slice) -> PlanTable:
        """Returns the table of the plans of `rows`, in that order."""
        codes = {name: column[rows] for name, column in self.codes.items()}
        length = len(range(*rows.indices(self.length))) if isinstance(rows, slice) else len(rows)
        return PlanTable(codes, self.values, length)


def dense_ids(*columns: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Numbers the combinations of values of `columns` from 0; returns each row's number, (n,), and a row for each.

    Each column is an array (n,) of small integers from 0, or one value for all rows.
    """
    keys: Any = np.zeros(1, np.int64)
    domain = 1
    for column in columns:
        if not isinstance(column, np.ndarray):
            continue
        size = int(column.max(initial=0)) + 1
        if domain * size > _MOST_KEYS:
            _, keys = np.unique(keys, return_inverse=True)
            domain = int(keys.max(initial=0)) + 1
        keys, domain = keys * size + column, domain * size
    return _compressed(keys, domain)


_MOST_KEYS = 1 << 24
"""most possible combinations that are numbered with a table; more are sorted"""


def _compressed(keys: Any, domain: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    if domain > _MOST_KEYS:
        _, rows, ids = np.unique(keys, return_index=True, return_inverse=True)
        return ids, rows
    last = np.full(domain, -1, np.int64)
    last[keys] = np.arange(len(keys))
    found = np.flatnonzero(last >= 0)
    number = np.zeros(domain, np.int64)
    number[found] = np.arange(len(found))
    return number[keys], last[found]
