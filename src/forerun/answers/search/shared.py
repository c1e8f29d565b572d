"""The figures that many plans of a space share: units, pipelines, and the times of both with their micro batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.answers.search.built_units import UnitSizes, UnitTimes
from forerun.answers.search.least import LeastSizes, LeastTimes
from forerun.answers.search.orders import Groups
from forerun.answers.search.pipelines import STAGED, Pipeline
from forerun.answers.search.space_table import SpaceTable
from forerun.answers.search.table import PlanTable, dense_ids
from forerun.answers.search.unit_runs import ALONE, Placed, UnitRuns
from forerun.core.program.types import F64, I64
from forerun.describe.plan import rules
from forerun.describe.plan.columns import Column, Plans
from forerun.describe.plan.plan import Plan
from forerun.describe.stacks.stack import Stack
from forerun.sources.symbolic.states import accumulation_bytes


class _Own:
    """Answers the sizes and times of a plan's own units."""

    def __init__(self, runs: UnitRuns) -> None:
        self._runs = runs

    def prepare(self, placed: Sequence[Placed]) -> None:
        """Runs the units of many plans at once."""
        self._runs.prepare(placed)

    def sizes(self, plan: Plan, groups: Groups) -> UnitSizes:
        """Returns the memory of the units of `plan`."""
        return self._runs.sizes(plan)

    def times(self, plan: Plan, groups: Groups) -> UnitTimes:
        """Returns the seconds of the units of `plan`."""
        return self._runs.times(plan, groups)


class Shared:
    """Groups the rows of a table by kind: a combination of units, pipeline, number of micro batches, and sums.

    Sums says whether micro batches add their gradients into a buffer, which takes time in every backward pass.
    """

    def __init__(
        self,
        table: SpaceTable,
        runs: UnitRuns,
        stack: Stack,
        s_per_byte: float,
        least: LeastSizes | LeastTimes | None = None,
    ) -> None:
        """Stores the values that units share. `least` answers lower bounds in place of the units' own sizes and
        times.
        """
        self._stack, self._s_per_byte = stack, s_per_byte
        self._units = _Own(runs) if least is None else least
        names = [name for name in (*table.meshes.codes, *table.variants.codes) if name not in (*ALONE, *_OWN)]
        built, built_rows = dense_ids(
            _ids(table, names)[0], _answers(table, lambda plans: plans.splits_backward, *_SPLITTING)
        )
        unit, unit_rows = dense_ids(built, _places(table, runs))
        self._pipeline, pipeline_rows = _ids(table, STAGED)
        counts = _ids(table, ["n_microbatches"])[0]
        sums = _answers(table, lambda plans: rules.accumulates(plans, stack), *_SUMMING)
        self.kind, rows = dense_ids(unit, self._pipeline, counts, sums)
        self.plans: PlanTable = table.rows(rows)
        """one plan of each kind"""
        self.of_unit, self._of_pipeline, self._sum = unit[rows], self._pipeline[rows], sums[rows]
        plans, of_unit = [table.plan(row) for row in built_rows.tolist()], built[unit_rows].tolist()
        self._placed = [(plans[n], table.groups_of(row)) for n, row in zip(of_unit, unit_rows.tolist(), strict=True)]
        self._units.prepare(self._placed)
        self.sizes: list[UnitSizes] = [self._units.sizes(plan, groups) for plan, groups in self._placed]
        self.pipelines = [Pipeline(runs.model, table.plan(int(row))) for row in pipeline_rows]

    @cached_property
    def times(self) -> list[UnitTimes]:
        """Returns the seconds of the units. Bounds of memory alone have none."""
        assert not isinstance(self._units, LeastSizes)
        return [self._units.times(plan, groups) for plan, groups in self._placed]

    # -- by kind -----------------------------------------------------------------------------------------------

    def _by_unit(self, column: Sequence[npt.ArrayLike]) -> F64:
        out: F64 = np.array(column, np.float64)[self.of_unit]
        return out

    @cached_property
    def dense(self) -> F64:
        """Returns the elements of parameters outside experts by UnitKind, (kinds, n_unit_kinds)."""
        return self._by_unit([size.dense for size in self.sizes])

    @cached_property
    def experts(self) -> F64:
        return self._by_unit([size.experts for size in self.sizes])

    @cached_property
    def again_s(self) -> F64:
        """Returns the seconds of adding gradients into a buffer by UnitKind, (kinds, n_unit_kinds)."""
        moved = accumulated_bytes(self.plans, self._stack)
        column = np.broadcast_to(moved, len(self.of_unit)) * self._sum * self._s_per_byte
        out: F64 = column[:, None] * (self.dense + self.experts)
        return out

    @cached_property
    def end_s(self) -> F64:
        """Returns a lower bound of the seconds until the first rank's last pass ends, (kinds,); see
        `Pipeline.least_end_s`."""
        forward, backward, weights = (
            self._by_unit([getattr(each, name) for each in self.times]) for name in ("forward", "backward", "weights")
        )
        counts = np.broadcast_to(self.plans.n_microbatches, len(self.of_unit))
        out = np.zeros(len(self.of_unit))
        for number, mine in self._of_each_pipeline():
            times = (forward[mine], backward[mine], weights[mine], self.again_s[mine])
            out[mine] = self.pipelines[number].least_end_s(*times, counts[mine])
        return out

    def _of_each_pipeline(self) -> list[tuple[int, I64]]:
        order = np.argsort(self._of_pipeline, kind="stable")
        bounds = np.searchsorted(self._of_pipeline[order], np.arange(len(self.pipelines) + 1))
        return [(n, order[bounds[n] : bounds[n + 1]]) for n in range(len(self.pipelines))]

    @cached_property
    def elements(self) -> Elements:
        """Returns the elements of the parameters of ranks."""
        n = len(self.of_unit)
        out = Elements(*(np.zeros((2, n)) for _ in range(4)))
        for number, mine in self._of_each_pipeline():
            pipeline = self.pipelines[number]
            tied = self._by_unit([size.tied_elements for size in self.sizes])[mine]
            both = pipeline.elements(self.dense[mine], tied), pipeline.elements(self.experts[mine], 0.0)
            for i, ranks in enumerate(both):
                out.first[i, mine], out.fullest[i, mine] = ranks[:, 0], ranks[:, pipeline.fullest]
                out.most[i, mine], out.least[i, mine] = ranks.max(axis=1), ranks.min(axis=1)
        return out

    @cached_property
    def moments(self) -> list[Moment]:
        """Returns what ranks hold: the first one, and the fullest one where that is another one."""
        first = [Moment(self.elements.first, *figures) for figures in self._held(fullest=False)]
        if not any(pipeline.fullest for pipeline in self.pipelines):
            return first
        return first + [Moment(self.elements.fullest, *figures) for figures in self._held(fullest=True)]

    def _held(self, fullest: bool) -> list[tuple[F64, F64, F64]]:
        """Returns the last three figures of a Moment for the first backward pass of a rank, and for that at which it
        holds the most. The rank is the first one or the `fullest` one."""
        kept = self._by_unit([size.kept for size in self.sizes])
        rise = self._by_unit([size.backward_rise for size in self.sizes])
        total = self.dense + self.experts
        counts = np.broadcast_to(self.plans.n_microbatches, len(self.of_unit))
        out = [(np.zeros(len(counts)), np.zeros(len(counts)), np.zeros(len(counts))) for _ in range(2)]
        for number, mine in self._of_each_pipeline():
            pipeline = self.pipelines[number]
            for count in np.unique(counts[mine]).tolist():
                here = mine[counts[mine] == count]
                both = pipeline.held(count, pipeline.fullest if fullest else 0)
                for (alive, gradients, own), held in zip(out, both, strict=True):
                    alive[here] = kept[here] @ held.passes + rise[here, held.part]
                    gradients[here] = total[here] @ held.gradients
                    own[here] = total[here, held.part]
        return out


class Moment(NamedTuple):
    """Holds what ranks have in memory when they start a backward pass."""

    elements: F64
    """elements of the rank's parameters before data-parallel sharding, outside experts and of experts, (2, kinds)"""
    alive: F64
    """bytes of activations, (kinds,)"""
    gradients: F64
    """elements with gradients of earlier micro batches, (kinds,)"""
    unit: F64
    """elements of the unit that starts, (kinds,)"""


@dataclass(frozen=True)
class Elements:
    """Elements of parameters before data-parallel sharding, (2, kinds) each: outside experts, and of experts."""

    first: F64
    """elements of the first rank"""
    fullest: F64
    """elements of the fullest rank (`Pipeline.fullest`)"""
    most: F64
    """elements of the rank with the most"""
    least: F64
    """elements of the rank with the fewest"""


_OWN = ("dp_shard", "pp", "prefetch", "ddp_bucket_mib", "overlap_grad_reduce", "optimizer", "optimizer_impl")
"""more plan fields that units don't depend on"""
_SPLITTING = ("pp", "pp_schedule")
"""plan fields that decide whether weight gradients are separate passes"""
_SUMMING = ("n_microbatches", "pp", "zero_stage", "dp_shard", "cp", "offload", "master_dtype", "precision")
"""plan fields that decide whether kernels add up the gradients of micro batches"""


def accumulated_bytes(plans: Plans, stack: Stack) -> Column:
    """Returns the bytes that adding a gradient to a buffer moves for each element, (n,)."""
    buffer = rules.element_bytes(rules.accumulate_dtype(plans, stack))
    return sum(accumulation_bytes(rules.gradient_bytes(plans), buffer))


def _ids(table: SpaceTable, names: Sequence[str]) -> tuple[I64, I64]:
    """Numbers the combinations of values of the fields `names`; returns each row's number, (n,), and a row of each."""
    of_mesh = _level(len(table.meshes), [table.meshes.codes[name] for name in names if name in table.meshes.codes])
    variant = [table.variants.codes[name] for name in names if name in table.variants.codes]
    return dense_ids(of_mesh[table.mesh], _level(len(table.variants), variant)[table.variant])


def _answers(table: SpaceTable, rule: Callable[[PlanTable], Column], *names: str) -> I64:
    """Returns 1 for rows of `table` for which `rule`, which depends on the fields `names`, holds, else 0, (n,)."""
    number, rows = _ids(table, names)
    answers = np.broadcast_to(rule(table.rows(rows)), len(rows))
    out: I64 = answers[number].astype(np.int64)
    return out


def _places(table: SpaceTable, runs: UnitRuns) -> I64:
    """Returns the number of the place of the units' groups for each row, (n,)."""
    places = [None if groups is None else runs.place(groups) for groups in table.groups]
    number = {where: i for i, where in enumerate(dict.fromkeys(places))}
    out: I64 = np.array([number[where] for where in places], np.int64)[table.mesh]
    return out


def _level(length: int, columns: list[npt.NDArray[np.generic]]) -> I64:
    return dense_ids(*columns)[0] if columns else np.zeros(length, np.int64)
