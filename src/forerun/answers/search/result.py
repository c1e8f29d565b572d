"""SearchResult: the plans that a search found, best first, and the reasons why it left out all others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from forerun.answers.analysis.prediction import Prediction
from forerun.answers.search.choices import Choice
from forerun.answers.search.front import Front
from forerun.answers.search.names import Renamed
from forerun.answers.search.outcome import Outcome, Rows, Skipped, TooLarge
from forerun.answers.search.table import PlanTable
from forerun.common.shown import Shown
from forerun.describe.plan.plan import Plan

Objective = Literal["time", "tokens", "cost", "memory"]
_CHUNK = 1 << 14
"""rows that are written together"""
REFUSED_RULE = "refused by the simulation"
"""name of the rule under which impossible plans are counted that only a predictor refuses"""


@dataclass(frozen=True)
class SearchResult(Shown):
    """The outcome of one search. Every plan considered is in exactly one of the lists or counts."""

    model: str
    cluster: str
    n_gpus: int
    seq_len: int
    global_batch: int
    objective: Objective
    memory_limit_gib: float
    ranked: tuple[Prediction, ...]
    """plans that fit, best first; equal ones in the order of the space"""
    too_large: Sequence[TooLarge]
    """plans that do not fit, the smallest first; created on first access"""
    skipped: Sequence[Skipped]
    """plans that were not simulated, the smallest lower bound first; created on first access"""
    considered: int
    impossible: Mapping[str, int]
    """rule -> number of plans that break it, the most frequent first"""
    impossible_examples: Mapping[str, str]
    """rule -> one reason in words"""
    same: int
    """number of plans that place their groups like another plan"""
    keep: int
    """number of exact places"""
    outcome: Outcome = field(repr=False, compare=False)
    """the result for every possible plan"""
    front: Front | None = None
    """the Pareto front of step time and memory; None unless the search computed it"""
    choices: tuple[Choice, ...] = ()
    """the best plan with each other choice; empty unless the search computed them"""

    @property
    def stacks(self) -> tuple[str, ...]:
        """Returns the software stacks with possible plans."""
        return tuple(self.outcome.spaces)

    @property
    def renamed(self) -> int:
        """Returns the number of plans that execute the same step as a listed plan."""
        return len(self.outcome.renamed)

    @property
    def simulated(self) -> int:
        """Returns the number of simulated plans, including those that then did not fit or were refused."""
        return len(self.outcome.predictions) + len(self.outcome.unfit) + self.impossible.get(REFUSED_RULE, 0)

    @property
    def proof(self) -> str:
        """Says why the places are exact: `proved optimal after 214 of 1,553,920 simulated`."""
        possible = len(self.outcome.table)
        values = [p.peak_reserved_gib if self.objective == "memory" else p.step_time_s for p in self.ranked]
        equal = values.count(values[0]) if values else 0
        tied = f", with {equal - 1:,} others as good," if equal > 1 else ""
        places = f"proved optimal{tied}" if self.keep == 1 else f"first {self.keep} places proved"
        if self.best is None:
            places = "proved that nothing fits"
        return f"{places} after {self.simulated:,} of {possible:,} simulated"

    @property
    def bounds_of_skipped(self) -> npt.NDArray[np.float64]:
        """Returns the lower bounds of the objective of the skipped plans in seconds or GiB, shape (n,), smallest
        first."""
        return np.sort(self.outcome.bound[self.outcome.skipped().rows])

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """Returns columns of shape (n,), with an entry for each possible plan except renamed ones, in the order of
        `to_rows`.

        `status` is ok, out_of_memory or skipped. `objective` is the predicted value (seconds, or GiB for memory), the
        lower bound of a plan that was not simulated, or nan if none is known. `needs_gib` is the memory that a plan
        needs (a lower bound if it does not fit), or nan if unknown. The other columns are the fields that vary between
        plans.
        """
        outcome, rows = self.outcome, self._rows
        every = np.concatenate(rows)
        status = np.repeat(["ok", "out_of_memory", "skipped"], list(map(len, rows)))
        memory = self.objective == "memory"
        needs = outcome.needs(every)
        needs[status == "skipped"] = outcome.bound[rows[2]] if memory else np.nan
        found = np.concatenate([np.full(len(rows[0]) + len(rows[1]), np.nan), outcome.bound[rows[2]]])
        for place, row in enumerate(every[: len(rows[0]) + len(rows[1])].tolist()):
            if row in outcome.predictions:
                found[place] = outcome.predictions[row].step_time_s
        columns: dict[str, npt.NDArray[Any]] = {"status": status}
        columns["objective"] = needs if memory else found
        columns["needs_gib"] = needs
        return columns | outcome.columns(every)

    @property
    def _rows(self) -> tuple[Rows, Rows, Rows]:
        """Returns the rows of plans that fit, that do not fit and that were skipped, each in its order."""
        row_of = {prediction.own_plan(): row for row, prediction in self.outcome.predictions.items()}
        ok = np.array([row_of[prediction.own_plan()] for prediction in self.ranked], np.int64)
        return ok, self.outcome.too_large().rows, self.outcome.skipped().rows

    def reason_of(self, plan: Plan) -> str:
        """Returns the reason for which `plan` is not ranked: the rule that it breaks, the order of mesh axes that
        represents it, its memory, or its least time. The text is empty for a plan that fits or that this search did not
        consider.
        """
        return self.outcome.reason_of(plan)

    @property
    def best(self) -> Prediction | None:
        """Returns the best plan that fits; None if none fits."""
        return self.ranked[0] if self.ranked else None

    def top(self, k: int) -> tuple[Prediction, ...]:
        """Returns the `k` best plans that fit."""
        return self.ranked[:k]

    @property
    def out_of_memory(self) -> dict[str, int]:
        """Returns the number of plans that do not fit by their largest category of memory, the most frequent first."""
        return dict(Counter(self.outcome.too_large_by_cause()).most_common())

    @property
    def counts(self) -> dict[str, int]:
        """Returns the number of plans by result: considered = impossible + same + renamed + out_of_memory + skipped +
        ok; same and renamed are left out if they are 0."""
        same = {"same": self.same} if self.same else {}
        same |= {"renamed": self.renamed} if self.renamed else {}
        return {
            "considered": self.considered,
            "impossible": sum(self.impossible.values()),
            **same,
            "out_of_memory": len(self.too_large),
            "skipped": len(self.skipped),
            "ok": len(self.ranked),
        }

    def to_rows(self) -> list[dict[str, Any]]:
        """Returns a flat dict for each possible plan: rank, status (ok, out_of_memory, skipped, renamed), reason,
        figures, plan fields.

        Plans that fit come first, best first. Figures that were not predicted are None; renamed plans have no figures.
        """
        chunks = self.row_chunks()
        return [dict(zip(chunk, row, strict=True)) for chunk in chunks for row in zip(*chunk.values(), strict=True)]

    def row_chunks(self, most: int = _CHUNK) -> Iterator[dict[str, Sequence[Any]]]:
        """Yields `to_rows` as columns of at most `most` rows, for spaces of millions of plans."""
        for status, rows in zip(("ok", "out_of_memory", "skipped"), self._rows, strict=True):
            for first in range(0, len(rows), most):
                yield self._columns_of(status, rows[first : first + most], first)
        for first in range(0, self.renamed, most):
            yield self._columns_of_renamed(np.arange(first, min(first + most, self.renamed)))

    def _columns_of(self, status: str, rows: Rows, first: int) -> dict[str, Sequence[Any]]:
        """Returns the columns of `rows`, all of one status, from place `first` on."""
        outcome, n = self.outcome, len(rows)
        known = [outcome.predictions.get(row) or outcome.unfit.get(row) for row in rows.tolist()]
        columns: dict[str, Sequence[Any]] = {"rank": range(first + 1, first + n + 1) if status == "ok" else [None] * n}
        columns["status"] = [status] * n
        columns["reason"] = [""] * n if status == "ok" else outcome.reasons(rows)
        for name in _FIGURES:
            columns[name] = [getattr(each, name, None) for each in known]
        return columns | _plan_columns(outcome.table.rows(rows))

    def _columns_of_renamed(self, rows: Rows) -> dict[str, Sequence[Any]]:
        """Returns the columns of `rows` among the renamed plans."""
        outcome, n = self.outcome, len(rows)
        table, stands = outcome.renamed.table, outcome.renamed.stands
        pairs = ((table.plan(row), outcome.table.plan(int(stands[row]))) for row in rows.tolist())
        columns: dict[str, Sequence[Any]] = {"rank": [None] * n, "status": ["renamed"] * n}
        columns["reason"] = [Renamed.reason(plan, other) for plan, other in pairs]
        columns |= {name: [None] * n for name in _FIGURES}
        return columns | _plan_columns(table.rows(rows))


def _plan_columns(plans: PlanTable) -> dict[str, Sequence[Any]]:
    """Returns every field of the plans by name."""
    columns: dict[str, Sequence[Any]] = {}
    for name in _PLAN_FIELDS:
        values, codes = plans.values[name], plans.codes.get(name)
        columns[name] = [values[0]] * len(plans) if codes is None else [values[code] for code in codes.tolist()]
    return columns


_FIGURES = (
    "step_time_s",
    "tokens_per_s_per_gpu",
    "mfu",
    "hfu",
    "peak_allocated_gib",
    "peak_reserved_gib",
    "exposed_comm_s",
    "bubble_s",
    "bottleneck",
    "dollars_per_billion_tokens",
)
_PLAN_FIELDS = tuple(field.name for field in fields(Plan))
