"""SpaceTable: a space as a list of meshes and a list of variants, so that a plan is two small numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain, product
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.answers.search.orders import Groups
from forerun.answers.search.table import PlanTable
from forerun.core.program.types import I32
from forerun.describe.plan.plan import Plan
from forerun.sources.symbolic.mesh import groups_of

Rows = npt.NDArray[Any]
MESH_FIELDS = ("tp", "cp", "pp", "ep", "etp", "dp_replicate", "dp_shard", "zero_stage")
"""plan fields of a mesh, beside its order of axes"""


@dataclass(frozen=True)
class Block:
    """Consecutive rows of `Variants`."""

    first: int
    length: int
    refused: int
    """number of combinations whose micro batch does not divide the batch of a data-parallel rank"""
    refused_micro_batch: int


@dataclass
class Variants:
    """The values of all fields that are not of the mesh; meshes with the same choice of values share a block."""

    blocks: dict[tuple[Any, ...], Block] = field(default_factory=dict)
    columns: dict[str, list[Any]] = field(default_factory=dict)
    length: int = 0

    def add(self, key: tuple[Any, ...], axes: Mapping[str, Sequence[Any]], local: int) -> None:
        """Adds every combination of `axes` for ranks of `local` sequences. The values of an axis whose name joins
        several fields by + are tuples with a value for each."""
        micro = [n for n in axes["micro_batch"] if local % n == 0]
        wrong = [n for n in axes["micro_batch"] if local % n]
        others = 1
        for name, values in axes.items():
            others *= 1 if name == "micro_batch" else len(values)
        combinations = list(product(*({**axes, "micro_batch": micro}).values()))
        columns = dict(zip(axes, zip(*combinations, strict=True), strict=True)) if combinations else {}
        for name, column in columns.items():
            fields_of = name.split("+")
            each_own: Iterable[Sequence[Any]] = zip(*column, strict=True) if len(fields_of) > 1 else (column,)
            for each, own in zip(fields_of, each_own, strict=True):
                self._extend(each, own)
        if combinations:
            self._extend("n_microbatches", [local // n for n in columns["micro_batch"]])
        refused = (len(wrong) * others, wrong[0]) if wrong else (0, 1)
        self.blocks[key] = Block(self.length, len(combinations), *refused)
        self.length += len(combinations)

    def _extend(self, name: str, column: Sequence[Any]) -> None:
        own = self.columns.setdefault(name, [None] * self.length)
        own.extend([None] * (self.length - len(own)))  # None for earlier blocks that do not vary this field
        own.extend(column)


@dataclass(frozen=True)
class SpaceTable:
    """The plans of a space in its order; row i is mesh `mesh[i]` with variant `variant[i]`."""

    meshes: PlanTable
    variants: PlanTable
    groups: tuple[Groups | None, ...]
    """communication groups of each mesh; None if they can't be placed"""
    unplaced: npt.NDArray[np.bool_]
    """which meshes a network can't place, (n_meshes,)"""
    mesh: I32
    variant: I32

    @classmethod
    def of_plans(cls, plans: Sequence[Plan], node_size: int) -> SpaceTable:
        """Makes the table of `plans`, all of them possible, on nodes of `node_size` GPUs."""
        columns = {each.name: [getattr(plan, each.name) for plan in plans] for each in fields(Plan)}
        meshes = {name: columns.pop(name) for name in (*MESH_FIELDS, "mesh_order")}
        rows, n = np.arange(len(plans), dtype=np.int32), len(plans)
        groups = tuple(groups_of(plan, node_size) for plan in plans)
        placed = np.zeros(n, np.bool_)
        return cls(PlanTable.of_columns(meshes, n), PlanTable.of_columns(columns, n), groups, placed, rows, rows)

    def __len__(self) -> int:
        return len(self.mesh)

    def rows(self, rows: Rows | slice) -> PlanTable:
        """Returns the plans of `rows` as a PlanTable."""
        mesh, variant = self.mesh[rows], self.variant[rows]
        codes = {name: column[mesh] for name, column in self.meshes.codes.items()}
        codes |= {name: column[variant] for name, column in self.variants.codes.items()}
        return PlanTable(codes, {**self.variants.values, **self.meshes.values}, len(mesh))

    def plan(self, row: int) -> Plan:
        """Returns the plan in `row`."""
        return self.rows(slice(row, row + 1)).plan(0)

    def codes_of(self, name: str) -> npt.NDArray[np.int64]:
        """Returns the code of each row's value of the field `name`, (n,); zeros where all plans have one value."""
        for columns, rows in ((self.meshes, self.mesh), (self.variants, self.variant)):
            if name in columns.codes:
                return columns.codes[name][rows].astype(np.int64)
        return np.zeros(len(self), np.int64)

    def groups_of(self, row: int) -> Groups:
        """Returns the communication groups of the plan in `row`, which must be a possible one."""
        groups = self.groups[int(self.mesh[row])]
        assert groups is not None  # a plan without groups is impossible
        return groups

    def take(self, rows: Rows) -> SpaceTable:
        """Returns the table of the plans of `rows`, in that order."""
        return replace(self, mesh=self.mesh[rows], variant=self.variant[rows])

    @classmethod
    def joined(cls, tables: Sequence[SpaceTable]) -> SpaceTable:
        """Returns the rows of several tables, one table after the other."""
        if len(tables) == 1:
            return tables[0]
        meshes = np.cumsum([0, *(len(table.meshes) for table in tables)], dtype=np.int32)
        variants = np.cumsum([0, *(len(table.variants) for table in tables)], dtype=np.int32)
        return cls(
            PlanTable.joined([table.meshes for table in tables]),
            PlanTable.joined([table.variants for table in tables]),
            tuple(chain.from_iterable(table.groups for table in tables)),
            np.concatenate([table.unplaced for table in tables]),
            np.concatenate([table.mesh + first for table, first in zip(tables, meshes, strict=False)]),
            np.concatenate([table.variant + first for table, first in zip(tables, variants, strict=False)]),
        )

    def find(self, plan: Plan) -> int | None:
        """Returns the row of `plan`; None if the table lacks it."""
        mesh, variant = self.meshes.find(plan), self.variants.find(plan)
        at = np.flatnonzero(np.isin(self.mesh, mesh) & np.isin(self.variant, variant))
        return int(at[0]) if len(at) else None


def combined(
    usual: Mapping[str, list[Any]],
    meshes: Sequence[Mapping[str, Any]],
    groups: Sequence[Groups | None],
    blocks: Sequence[tuple[int, int]],
    below: Variants,
    unplaced: Sequence[bool],
) -> SpaceTable:
    """Makes the table of `meshes`, each with its block (first, count) of variants; `usual` has all other fields."""
    mesh_names = list(meshes[0]) if meshes else []
    mesh_columns = {name: [mesh[name] for mesh in meshes] for name in mesh_names}
    columns: dict[str, Sequence[Any]] = {}
    for name, (value,) in usual.items():
        if name in below.columns:
            column = below.columns[name]
            column = [*column, *[None] * (below.length - len(column))]
            columns[name] = [value if each is None and name not in _NONE_IS_A_VALUE else each for each in column]
        elif name not in mesh_columns:
            columns[name] = [value] * max(1, below.length)
    first = np.array([start for start, _ in blocks], np.int64)
    counts = np.array([count for _, count in blocks], np.int64)
    mesh = np.repeat(np.arange(len(blocks), dtype=np.int32), counts)
    begin = np.cumsum(counts) - counts
    variant = (np.arange(len(mesh)) + np.repeat(first - begin, counts)).astype(np.int32)
    return SpaceTable(
        PlanTable.of_columns(mesh_columns, len(meshes)),
        PlanTable.of_columns(columns, below.length),
        tuple(groups),
        np.array(unplaced, np.bool_),
        mesh,
        variant,
    )


_NONE_IS_A_VALUE = ("layers_per_stage",)
