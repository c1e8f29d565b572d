"""Outcome: the result for every plan of a space, as columns; objects are made when they are asked for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Generic, TypeVar, overload

import numpy as np
import numpy.typing as npt

from forerun.answers.analysis.prediction import DoesNotFit, Prediction
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
    """The result of a search for one plan."""

    SKIPPED = 0
    TOO_LARGE = 1
    OK = 2
    REFUSED = 3
    """refused by the simulation"""


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
    """None if the plan was not run because it does not fit"""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A plan that was not simulated, because its lower bound comes after the places that were asked for."""

    plan: Plan
    at_least: float
    """lower bound of the objective: seconds, or GiB for memory"""
    reason: str


class LazySequence(Sequence[Item], Generic[Item]):
    """A sequence of objects for rows of an outcome, made when asked for; equal to any sequence of equal objects."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    @abstractmethod
    def make(self, row: int) -> Item:
        """Makes the object of a row."""

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

    spaces: Mapping[str, Space]
    """the space of each software stack"""
    table: SpaceTable
    renamed: Renamed
    """the possible plans that execute the same step as a plan of `table`"""
    status: npt.NDArray[np.uint8]
    bound: F64
    """lower bound of the objective, in seconds or GiB; 0 if none was computed"""
    need_gib: F64
    """lower bound, in GiB, of the memory that the plan needs"""
    cause: npt.NDArray[np.uint8]
    """index of the largest of CAUSES in that memory"""
    cause_gib: F64
    predictions: Mapping[int, Prediction]
    """row -> prediction, for the rows that were run"""
    unfit: Mapping[int, DoesNotFit]
    """row -> memory, for the rows that were not run because a simulation of their memory shows that they do not fit"""
    is_memory: bool
    """whether the objective is memory"""
    keep: int
    last_place: float
    """value of the objective at the last exact place"""
    limit_gib: float

    def of(self, status: Status) -> Rows:
        """Returns the rows with a status, in their order."""
        return np.flatnonzero(self.status == status)

    def needs(self, rows: Rows) -> F64:
        """Returns a lower bound, in GiB, of the memory that each of `rows` needs."""
        needs, simulated = self.need_gib[rows], self._simulated
        for place in np.flatnonzero(np.isin(rows, list(simulated))).tolist():
            needs[place] = simulated[int(rows[place])].peak_reserved_gib
        return needs

    @property
    def _simulated(self) -> dict[int, Prediction | DoesNotFit]:
        """Returns the rows whose memory was simulated."""
        return {**self.predictions, **self.unfit}

    def least_s(self) -> dict[int, float]:
        """Returns lower bounds, in seconds, of the steps that were not run because they do not fit, by row.

        Rows without a bound of time are left out.
        """
        rows = () if self.is_memory else self.unfit
        return {row: float(self.bound[row]) for row in rows if self.bound[row] > 0}

    def too_large(self) -> LazySequence[TooLarge]:
        """Returns the plans that do not fit, the smallest first."""
        rows = self.of(Status.TOO_LARGE)
        return _TooLargeRows(self, rows[np.argsort(self.needs(rows), kind="stable")])

    def skipped(self) -> LazySequence[Skipped]:
        """Returns the plans that were not simulated, the least bound first."""
        rows = self.of(Status.SKIPPED)
        return _SkippedRows(self, rows[np.argsort(self.bound[rows], kind="stable")])

    def too_large_by_cause(self) -> dict[str, int]:
        """Counts the plans that do not fit by their largest category of memory."""
        rows, simulated = self.of(Status.TOO_LARGE), self._simulated
        bounded = np.ones(len(self.status), np.bool_)
        bounded[list(simulated)] = False
        counts = np.bincount(self.cause[rows[bounded[rows]]], minlength=len(CAUSES)).tolist()
        found = {cause: count for cause, count in zip(CAUSES, counts, strict=True) if count}
        for row in rows[~bounded[rows]].tolist():
            cause = largest(simulated[row])
            found[cause] = found.get(cause, 0) + 1
        return found

    def make_too_large(self, row: int) -> TooLarge:
        """Says why the plan in `row` does not fit."""
        known = self._simulated.get(row)
        plan, reason = self.table.plan(row), self.reasons(np.array([row]))[0]
        if known is not None:
            run = known if isinstance(known, Prediction) else None
            return TooLarge(plan, known.peak_reserved_gib, largest(known), reason, run)
        return TooLarge(plan, float(self.need_gib[row]), CAUSES[self.cause[row]], reason, None)

    def make_skipped(self, row: int) -> Skipped:
        """Says why the plan in `row` was not simulated."""
        return Skipped(self.table.plan(row), float(self.bound[row]), self.reasons(np.array([row]))[0])

    def reasons(self, rows: Rows) -> list[str]:
        """Says for each plan of `rows` why it is not among the plans that fit."""
        pipelined = np.broadcast_to(np.asarray(self.table.rows(rows).pp) > 1, len(rows)).tolist()
        columns = (self.status, self.need_gib, self.cause, self.cause_gib, self.bound)
        lines = zip(rows.tolist(), pipelined, *(column[rows].tolist() for column in columns), strict=True)
        unit, verb = ("GiB", "needs") if self.is_memory else ("s", "takes")
        last = f"place {self.keep} {verb} {self.last_place:.4g} {unit}"
        out, simulated = [], self._simulated
        for row, is_pipelined, status, needs, cause, cause_gib, bound in lines:
            if status == Status.SKIPPED:
                out.append(f"{verb} at least {bound:.4g} {unit}; {last}")
            elif row in simulated:
                out.append(_too_large(simulated[row]))
            else:
                where = "one pipeline rank" if is_pipelined else "every rank"
                beside = "" if needs > self.limit_gib else " beside CUDA and NCCL"
                out.append(
                    f"needs at least {needs:.1f} of {self.limit_gib:.1f} GiB{beside} on {where}; the"
                    f" largest part is {CAUSES[cause]} with {cause_gib:.1f}"
                )
        return out

    def reason_of(self, plan: Plan) -> str:
        """Says why `plan` was left out; empty for a plan that fits or that the search did not consider."""
        if plan.stack not in self.spaces:
            return ""
        left_out = self.spaces[plan.stack].reason_of(plan)
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
        """Returns the plan that represents `plan`; None unless `plan` is another name of a considered step."""
        row = self.renamed.table.find(plan)
        return None if row is None else self.table.plan(int(self.renamed.stands[row]))

    def columns(self, rows: Rows) -> dict[str, npt.NDArray[Any]]:
        """Returns the plan fields that differ between plans, for `rows`."""
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


def largest(prediction: Prediction | DoesNotFit) -> str:
    """Returns the largest category of memory."""
    parts = prediction.memory_by_category_gib
    return max(parts, key=lambda name: parts[name])


def _too_large(prediction: Prediction | DoesNotFit) -> str:
    """Says why a simulated plan does not fit."""
    cause = largest(prediction)
    beside = "" if prediction.peak_reserved_gib > prediction.memory_limit_gib else " beside CUDA and NCCL"
    return (
        f"needs {prediction.peak_reserved_gib:.1f} of {prediction.memory_limit_gib:.1f} GiB{beside} on"
        f" {prediction.peak_rank_class}; the largest part is {cause} with"
        f" {prediction.memory_by_category_gib[cause]:.1f}"
    )


def as_array(values: Sequence[Any]) -> npt.NDArray[Any]:
    """Returns the values of one plan field as an array; tuples and None stay objects."""
    if any(value is None or isinstance(value, tuple) for value in values):
        column = np.empty(len(values), object)
        column[:] = values
        return column
    return np.array(values)
