"""Outcome: what became of every plan of a space, as columns; objects are made of what is asked for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Generic, TypeVar, overload

import numpy as np
import numpy.typing as npt

from forerun.answers.analysis.prediction import Prediction
from forerun.answers.search.names import Renamed
from forerun.answers.search.screening import CAUSES
from forerun.answers.search.space import Space
from forerun.answers.search.space_table import SpaceTable
from forerun.core.program.types import F64
from forerun.describe.plan.fields import FIELD_TYPES
from forerun.describe.plan.plan import Plan

Item = TypeVar("Item")
Rows = npt.NDArray[np.int64]


class Status(IntEnum):
    """What became of a plan."""

    SKIPPED = 0
    TOO_LARGE = 1
    OK = 2
    REFUSED = 3
    """by the simulation"""


@dataclass(frozen=True, slots=True)
class TooLarge:
    """A plan that does not fit."""

    plan: Plan
    needs_gib: float
    cause: str
    """the largest category of memory"""
    reason: str
    """`needs 93.2 GiB at stage 0, 79.1 available: activation 61.0`"""
    prediction: Prediction | None
    """None where a lower bound was enough to tell"""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A plan that was not simulated: at the very best it comes after the ones that were asked for."""

    plan: Plan
    at_least: float
    """lower bound of the objective: seconds, or GiB for memory"""
    reason: str


class LazySequence(Sequence[Item], Generic[Item]):
    """Objects of rows of an outcome, made when they are asked for; equal to any sequence of equal objects."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    @abstractmethod
    def make(self, row: int) -> Item:
        """The object of a row."""

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"<{len(self):,} plans>"

    @overload
    def __getitem__(self, place: int) -> Item: ...
    @overload
    def __getitem__(self, place: slice) -> list[Item]: ...
    def __getitem__(self, place: int | slice) -> Item | list[Item]:
        if isinstance(place, slice):
            return [self.make(int(row)) for row in self.rows[place]]
        return self.make(int(self.rows[place]))

    def __iter__(self) -> Iterator[Item]:
        return (self.make(int(row)) for row in self.rows)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or len(self) != len(other):
            return NotImplemented if not isinstance(other, Sequence) else False
        return all(one == another for one, another in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Outcome:
    """Columns with one entry for each possible plan, (n,), in the order of the space."""

    space: Space
    table: SpaceTable
    renamed: Renamed
    """the possible plans that execute the same step as one of `table`"""
    status: npt.NDArray[np.uint8]
    bound: F64
    """lower bound of the objective; 0 where none was looked for"""
    need_gib: F64
    """memory that has to be there for it to fit, at least"""
    cause: npt.NDArray[np.uint8]
    """the largest of CAUSES in it"""
    cause_gib: F64
    predictions: Mapping[int, Prediction]
    """of the rows that were simulated"""
    is_memory: bool
    """the objective is memory"""
    keep: int
    last_place: float
    """objective of the last place that is exact"""
    limit_gib: float

    def of(self, status: Status) -> Rows:
        """The rows with a status, in their order."""
        return np.flatnonzero(self.status == status)

    def needs(self, rows: Rows) -> F64:
        """GiB that plans need, at least."""
        needs = self.need_gib[rows]
        simulated = np.array([int(row) in self.predictions for row in rows], np.bool_) if self.predictions else ()
        for place in np.flatnonzero(simulated).tolist():
            needs[place] = self.predictions[int(rows[place])].peak_reserved_gib
        return needs

    def too_large(self) -> LazySequence[TooLarge]:
        """What does not fit, the nearest miss first."""
        rows = self.of(Status.TOO_LARGE)
        return _TooLargeRows(self, rows[np.argsort(self.needs(rows), kind="stable")])

    def skipped(self) -> LazySequence[Skipped]:
        """What was not simulated, the least bound first."""
        rows = self.of(Status.SKIPPED)
        return _SkippedRows(self, rows[np.argsort(self.bound[rows], kind="stable")])

    def too_large_by_cause(self) -> dict[str, int]:
        """How many plans do not fit, by their largest category of memory."""
        rows = self.of(Status.TOO_LARGE)
        bounded = np.ones(len(self.status), np.bool_)
        bounded[list(self.predictions)] = False
        counts = np.bincount(self.cause[rows[bounded[rows]]], minlength=len(CAUSES)).tolist()
        found = {cause: count for cause, count in zip(CAUSES, counts, strict=True) if count}
        for row in rows[~bounded[rows]].tolist():
            cause = largest(self.predictions[row])
            found[cause] = found.get(cause, 0) + 1
        return found

    def make_too_large(self, row: int) -> TooLarge:
        """Why the plan in `row` does not fit."""
        known = self.predictions.get(row)
        plan, reason = self.table.plan(row), self.reasons(np.array([row]))[0]
        if known is not None:
            return TooLarge(plan, known.peak_reserved_gib, largest(known), reason, known)
        return TooLarge(plan, float(self.need_gib[row]), CAUSES[self.cause[row]], reason, None)

    def make_skipped(self, row: int) -> Skipped:
        """Why the plan in `row` was not simulated."""
        return Skipped(self.table.plan(row), float(self.bound[row]), self.reasons(np.array([row]))[0])

    def reasons(self, rows: Rows) -> list[str]:
        """Why each plan of `rows` is not among those that fit."""
        pipelined = np.broadcast_to(np.asarray(self.table.rows(rows).pp) > 1, len(rows)).tolist()
        columns = (self.status, self.need_gib, self.cause, self.cause_gib, self.bound)
        lines = zip(rows.tolist(), pipelined, *(column[rows].tolist() for column in columns), strict=True)
        unit = "GiB" if self.is_memory else "s"
        last = f"place {self.keep} has {self.last_place:.4g} {unit}"
        out = []
        for row, is_pipelined, status, needs, cause, cause_gib, bound in lines:
            if status == Status.SKIPPED:
                out.append(f"at least {bound:.4g} {unit}, {last}")
            elif row in self.predictions:
                out.append(_too_large(self.predictions[row]))
            else:
                where = "the first rank" if is_pipelined else "every rank"
                beside = "" if needs > self.limit_gib else " beside CUDA and NCCL"
                out.append(
                    f"needs at least {needs:.1f} GiB{beside} at {where}, {self.limit_gib:.1f} available:"
                    f" {CAUSES[cause]} {cause_gib:.1f}"
                )
        return out

    def reason_of(self, plan: Plan) -> str:
        """Why `plan` was left out; empty for one that fits, or that was not among those considered."""
        left_out = self.space.reason_of(plan)
        if left_out is not None:
            return f"{left_out[0]}: {left_out[1]}"
        standing = self.standing_for(plan)
        if standing is not None:
            return Renamed.reason(plan, standing)
        row = self.table.find(plan)
        if row is None or self.status[row] in (Status.OK, Status.REFUSED):
            return ""
        return self.reasons(np.array([row]))[0]

    def standing_for(self, plan: Plan) -> Plan | None:
        """The plan that stands for `plan`, where it is another name of a step that was considered."""
        row = self.renamed.table.find(plan)
        return None if row is None else self.table.plan(int(self.renamed.stands[row]))

    def columns(self, rows: Rows) -> dict[str, npt.NDArray[Any]]:
        """The plan fields that differ, of `rows`."""
        plans = self.table.rows(rows)
        differ = {name: codes for name, codes in plans.codes.items() if len(codes) and (codes != codes[0]).any()}
        return {name: as_array(plans.values[name])[differ[name]] for name in FIELD_TYPES if name in differ}


class _TooLargeRows(LazySequence[TooLarge]):
    def __init__(self, outcome: Outcome, rows: Rows) -> None:
        super().__init__(rows)
        self._outcome = outcome

    def make(self, row: int) -> TooLarge:
        return self._outcome.make_too_large(row)


class _SkippedRows(LazySequence[Skipped]):
    def __init__(self, outcome: Outcome, rows: Rows) -> None:
        super().__init__(rows)
        self._outcome = outcome

    def make(self, row: int) -> Skipped:
        return self._outcome.make_skipped(row)


def largest(prediction: Prediction) -> str:
    """The largest category of memory."""
    parts = prediction.memory_by_category_gib
    return max(parts, key=lambda name: parts[name])


def _too_large(prediction: Prediction) -> str:
    """Why a plan that was simulated does not fit."""
    cause = largest(prediction)
    beside = "" if prediction.peak_reserved_gib > prediction.memory_limit_gib else " beside CUDA and NCCL"
    return (
        f"needs {prediction.peak_reserved_gib:.1f} GiB{beside} at {prediction.peak_rank_class},"
        f" {prediction.memory_limit_gib:.1f} available: {cause} {prediction.memory_by_category_gib[cause]:.1f}"
    )


def as_array(values: Sequence[Any]) -> npt.NDArray[Any]:
    """Values of one plan field; tuples and None stay objects."""
    if any(value is None or isinstance(value, tuple) for value in values):
        column = np.empty(len(values), object)
        column[:] = values
        return column
    return np.array(values)
