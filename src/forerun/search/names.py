"""Names of plans in a table: which rows execute the same step as another row, which stands for them."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from forerun.model.spec import ModelSpec
from forerun.plan.canonical import NAMINGS
from forerun.plan.plan import Plan
from forerun.search.space_table import SpaceTable
from forerun.search.table import PlanTable, dense_ids

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Renamed:
    """The rows of a space that another row stands for."""

    table: SpaceTable
    """those rows"""
    stands: Rows
    """for each of them the row, among those that are left, that stands for it"""

    def __len__(self) -> int:
        return len(self.stands)

    @staticmethod
    def reason(plan: Plan, other: Plan) -> str:
        """Why `plan` is left out where `other` stands for it."""
        differ = [each.name for each in fields(Plan) if getattr(plan, each.name) != getattr(other, each.name)]
        return f"executes the same step as {', '.join(f'{name} {getattr(other, name)}' for name in differ)}"


def without_other_names(model: ModelSpec, table: SpaceTable) -> tuple[SpaceTable, Renamed]:
    """The rows of `table` that execute different steps, and those that are other names of them.

    Of rows with the same canonical form that which is in this form stands for the others, or the first where none is.
    """
    n, none = len(table), np.zeros(0, np.int64)
    if not n:
        return table, Renamed(table, none)
    plans, renamed = _canonical(model, table.rows(slice(None)))
    if not renamed.any():
        return table, Renamed(table.take(none), none)
    ids, _ = dense_ids(*plans.codes.values())
    ids = np.broadcast_to(ids, n)
    order = np.argsort(renamed, kind="stable")
    _, first = np.unique(ids[order], return_index=True)
    best = order[first]
    """the row that stands for each id"""
    kept = np.sort(best)
    others = np.setdiff1d(np.arange(n), kept, assume_unique=True)
    stands = np.searchsorted(kept, best[ids[others]])
    return table.take(kept), Renamed(table.take(others), stands)


def _canonical(model: ModelSpec, plans: PlanTable) -> tuple[PlanTable, npt.NDArray[np.bool_]]:
    """The canonical forms of `plans` as far as they tell rows apart, and which rows they change, (n,)."""
    changed = np.zeros(len(plans), np.bool_)
    for naming in NAMINGS:
        if not any(name in plans.codes for name in naming.fields):
            continue  # what is the same in all rows tells none apart
        where = np.broadcast_to(np.asarray(naming.where(model, plans), np.bool_), len(plans))
        given = plans
        for name, value in zip(naming.fields, naming.values(given), strict=True):
            value = value.item() if isinstance(value, np.generic) else value
            changed |= where & (getattr(given, name) != value)
            plans = plans.with_values(name, where, value)
    return plans, changed
