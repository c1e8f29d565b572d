"""SearchResult: what a search found, in order, and why everything else was left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from forerun.analysis.prediction import Prediction
from forerun.errors import ForerunError
from forerun.plan.plan import Plan

if TYPE_CHECKING:
    import pandas

Objective = Literal["time", "memory", "cost"]


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


def _row(rank: int | None, status: str, reason: str, plan: Plan, prediction: Prediction | None) -> dict[str, Any]:
    row: dict[str, Any] = {"rank": rank, "status": status, "reason": reason}
    row |= {name: None if prediction is None else getattr(prediction, name) for name in _FIGURES}
    return row | {name: getattr(plan, name) for name in _PLAN_FIELDS}
