"""Finds the rows of a table of plans that execute the same step as another row, which represents them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from forerun.answers.search.space_table import MESH_FIELDS, SpaceTable
from forerun.answers.search.table import PlanTable, dense_ids
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.canonical import MESH_NAMINGS, NAMINGS, Naming
from forerun.describe.plan.plan import Plan

Rows = npt.NDArray[np.int64]
_OF_MESH = (*MESH_FIELDS, "mesh_order")
_CHUNK = 1 << 16
"""plans that are processed together, so that their columns stay in the CPU's cache"""


@dataclass(frozen=True)
class Renamed:
    """The rows of a space that another row represents."""

    table: SpaceTable
    """those rows"""
    stands: Rows
    """for each of them, the row that represents it among the rows that are left"""

    def __len__(self) -> int:
        return len(self.stands)

    @classmethod
    def joined(cls, parts: Sequence[Renamed], lengths: Sequence[int]) -> Renamed:
        """Returns the rows of several spaces, whose other rows have `lengths` and follow each other."""
        starts = np.cumsum([0, *lengths[:-1]])
        stands = [part.stands + start for part, start in zip(parts, starts, strict=True)]
        return cls(SpaceTable.joined([part.table for part in parts]), np.concatenate(stands))

    @staticmethod
    def reason(plan: Plan, other: Plan) -> str:
        """Says why `plan` is left out where `other` represents it."""
        differ = [each.name for each in fields(Plan) if getattr(plan, each.name) != getattr(other, each.name)]
        return f"executes the same step as {', '.join(f'{name} {getattr(other, name)}' for name in differ)}"


def without_other_names(model: ModelSpec, table: SpaceTable) -> tuple[SpaceTable, Renamed]:
    """Returns the rows of `table` that execute different steps, and the rows that are other names of these.

    Rows with the same canonical form are represented by the row in that form, or by the first row if none has it.
    """
    keys, renamed = _keys(model, table)
    others = np.flatnonzero(renamed)
    known, number = np.unique(keys[others], return_inverse=True)
    stands = np.full(len(known), -1, np.int64)
    """for each form of a renamed row, the row that represents it"""
    for first in range(0, len(table) if len(known) else 0, _CHUNK):
        part = slice(first, first + _CHUNK)
        place = np.minimum(np.searchsorted(known, keys[part]), len(known) - 1)
        found = np.flatnonzero((known[place] == keys[part]) & ~renamed[part])
        stands[place[found]] = found + first
    alone = stands[number] < 0  # if no row has this form, the first of its rows stands for it
    form, row = np.unique(number[alone], return_index=True)
    stands[form] = others[alone][row]
    gone = others[stands[number] != others]
    kept = np.setdiff1d(np.arange(len(table)), gone, assume_unique=True)
    standing = stands[number[stands[number] != others]]
    return table.take(kept), Renamed(table.take(gone), np.searchsorted(kept, standing))


def _keys(model: ModelSpec, table: SpaceTable) -> tuple[Rows, npt.NDArray[np.bool_]]:
    """Returns the number of each row's canonical form, (n,), and which rows differ from their form, (n,).

    A table is a product of axes, so the numbers are not much larger than the number of rows. The number of micro
    batches follows from the mesh and the micro batch.
    """
    constant = {name: values for name, values in table.variants.values.items() if len(values) == 1}
    own = PlanTable(table.meshes.codes, {**constant, **table.meshes.values}, len(table.meshes))
    meshes, renamed_mesh = _renamed(MESH_NAMINGS, model, own)
    mesh = np.broadcast_to(dense_ids(*meshes.codes.values())[0], len(meshes))
    forms = replace(
        table, meshes=PlanTable(meshes.codes, {name: meshes.values[name] for name in _OF_MESH}, len(meshes))
    )
    keys, renamed = np.zeros(len(table), np.int64), np.zeros(len(table), np.bool_)
    for first in range(0, len(table), _CHUNK):
        part = slice(first, first + _CHUNK)
        plans, changed = _renamed(NAMINGS[len(MESH_NAMINGS) :], model, forms.rows(part))
        renamed[part] = changed | renamed_mesh[table.mesh[part]]
        keys[part] = mesh[table.mesh[part]]
        for name, codes in plans.codes.items():
            if name not in (*_OF_MESH, "n_microbatches"):
                keys[part] = keys[part] * len(plans.values[name]) + codes
    return keys, renamed


def _renamed(namings: Sequence[Naming], model: ModelSpec, plans: PlanTable) -> tuple[PlanTable, npt.NDArray[np.bool_]]:
    """Renames `plans` by the `namings` that tell rows apart, and returns them with the rows that changed, (n,)."""
    changed = np.zeros(len(plans), np.bool_)
    for naming in namings:
        if not any(name in plans.codes for name in naming.fields):
            continue  # a field with one value in all rows distinguishes none
        where = np.broadcast_to(np.asarray(naming.where(model, plans), np.bool_), len(plans))
        given = plans
        for name, value in zip(naming.fields, naming.values(given), strict=True):
            value = value.item() if isinstance(value, np.generic) else value
            changed |= where & (getattr(given, name) != value)
            plans = plans.with_values(name, where, value)
    return plans, changed
