"""SearchResult: what a search found, in order, and why everything else was left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from forerun.analysis.prediction import Prediction
from forerun.errors import ForerunError
from forerun.plan.plan import Plan

if TYPE_CHECKING:
    import pandas

Objective = Literal["time", "tokens", "cost", "memory"]
REFUSED_RULE = "refused by the simulation"
"""counts among the impossible what only a predictor can refuse"""


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


@dataclass(frozen=True)
class SearchResult:
    """The outcome of one search. Every plan considered is in exactly one of the lists or counts."""

    model: str
    cluster: str
    n_gpus: int
    seq_len: int
    global_batch: int
    objective: Objective
    memory_limit_gib: float
    ranked: tuple[Prediction, ...]
    """what fits, best first; equal ones in the order of the space"""
    too_large: tuple[TooLarge, ...]
    """the nearest miss first"""
    skipped: tuple[Skipped, ...]
    considered: int
    impossible: Mapping[str, int]
    """by rule, the most frequent first"""
    impossible_examples: Mapping[str, str]
    """rule -> one reason in full"""
    keep: int = 1
    """how many places are exact"""

    @property
    def simulated(self) -> int:
        """How many plans were simulated, also those that then did not fit or were refused."""
        refused = self.impossible.get(REFUSED_RULE, 0)
        return len(self.ranked) + sum(each.prediction is not None for each in self.too_large) + refused

    @property
    def proof(self) -> str:
        """What makes the places exact: `proved optimal after 214 of 1,553,920 simulated`."""
        possible = sum(self.counts[name] for name in ("out_of_memory", "skipped", "ok"))
        possible += self.impossible.get(REFUSED_RULE, 0)
        places = "proved optimal" if self.keep == 1 else f"first {self.keep} places proved"
        if self.best is None:
            places = "proved that nothing fits"
        return f"{places} after {self.simulated:,} of {possible:,} simulated"

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """Columns with one entry for each possible plan, (n,), in the order of `to_rows`.

        `status` is ok, out_of_memory or skipped; `objective` the predicted value (seconds, or GiB for memory), or its
        lower bound where a plan was not simulated, nan where none is known; `needs_gib` the GiB that a plan needs (at
        least, where it does not fit), nan where unknown. The rest are the plan fields that differ between plans.
        """
        plans = [p.own_plan() for p in self.ranked]
        plans += [each.plan for each in self.too_large] + [each.plan for each in self.skipped]
        n_ok, n_large, n_skipped = len(self.ranked), len(self.too_large), len(self.skipped)
        status = np.repeat(["ok", "out_of_memory", "skipped"], [n_ok, n_large, n_skipped])
        memory = self.objective == "memory"
        needs = [p.peak_reserved_gib for p in self.ranked] + [each.needs_gib for each in self.too_large]
        needs += [each.at_least if memory else np.nan for each in self.skipped]
        found = [p.step_time_s for p in self.ranked]
        found += [np.nan if each.prediction is None else each.prediction.step_time_s for each in self.too_large]
        found += [each.at_least for each in self.skipped]
        columns: dict[str, npt.NDArray[Any]] = {"status": status}
        columns["objective"] = np.array(needs if memory else found, np.float64)
        columns["needs_gib"] = np.array(needs, np.float64)
        for name in _PLAN_FIELDS:
            values = [getattr(plan, name) for plan in plans]
            if len(set(values)) > 1:
                columns[name] = _column(values)
        return columns

    @property
    def best(self) -> Prediction | None:
        """The best plan that fits, None where none does."""
        return self.ranked[0] if self.ranked else None

    def top(self, k: int) -> tuple[Prediction, ...]:
        """The `k` best plans that fit."""
        return self.ranked[:k]

    @property
    def out_of_memory(self) -> dict[str, int]:
        """How many plans do not fit, by their largest category of memory, the most frequent first."""
        return dict(Counter(each.cause for each in self.too_large).most_common())

    @property
    def counts(self) -> dict[str, int]:
        """considered = impossible + out_of_memory + skipped + ok."""
        return {
            "considered": self.considered,
            "impossible": sum(self.impossible.values()),
            "out_of_memory": len(self.too_large),
            "skipped": len(self.skipped),
            "ok": len(self.ranked),
        }

    def to_rows(self) -> list[dict[str, Any]]:
        """A flat dict for each possible plan: rank, status (ok, out_of_memory, skipped), reason, figures, plan fields.

        What fits comes first, best first. Figures that were not predicted are None.
        """
        rows = [_row(rank, "ok", "", p.own_plan(), p) for rank, p in enumerate(self.ranked, 1)]
        rows += [_row(None, "out_of_memory", each.reason, each.plan, each.prediction) for each in self.too_large]
        rows += [_row(None, "skipped", each.reason, each.plan, None) for each in self.skipped]
        return rows

    def to_dataframe(self) -> pandas.DataFrame:
        """`to_rows` as a pandas DataFrame. Raises ForerunError where pandas is not installed."""
        try:
            import pandas
        except ImportError:
            raise ForerunError("to_dataframe needs pandas: pip install 'forerun[data]', or use to_rows()") from None
        return pandas.DataFrame(self.to_rows())


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


def _column(values: list[Any]) -> npt.NDArray[Any]:
    """Values of one plan field; tuples and None stay objects."""
    if any(value is None or isinstance(value, tuple) for value in values):
        column = np.empty(len(values), object)
        column[:] = values
        return column
    return np.array(values)


def _row(rank: int | None, status: str, reason: str, plan: Plan, prediction: Prediction | None) -> dict[str, Any]:
    row: dict[str, Any] = {"rank": rank, "status": status, "reason": reason}
    row |= {name: None if prediction is None else getattr(prediction, name) for name in _FIGURES}
    return row | {name: getattr(plan, name) for name in _PLAN_FIELDS}
