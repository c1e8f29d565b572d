"""Ranks one plan among the plans that a search finds for the same question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forerun.answers.analysis.prediction import Prediction
from forerun.describe.plan.fields import FIELD_TYPES
from forerun.describe.plan.plan import Plan

CHOSEN = {
    *("micro_batch", "n_microbatches", "dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp", "zero_stage"),
    *("reshard_after_forward", "pp_schedule", "virtual_stages", "activation_checkpointing", "selective_policy"),
    *("recompute_modules", "expert_overlap", "dispatcher", "checkpoint_every", "layers_per_stage", "balance_ends"),
    *("sequence_parallel", "seq_len", "mesh_order", "optimizer_impl", "activation_offload"),
}
"""plan fields that a search chooses, or that follow from its question"""


def unchosen_fields(plan: Plan) -> dict[str, Any]:
    """Returns the fields of `plan` that a search for the same run keeps as they are."""
    return {name: getattr(plan, name) for name in FIELD_TYPES if name not in CHOSEN}


@dataclass(frozen=True, slots=True)
class Standing:
    """The place of a plan in the list of a search."""

    prediction: Prediction
    rank: int
    """1 for the best; one more than the listed plans where all of them are faster"""
    best_s: float

    @property
    def step_time_s(self) -> float:
        return self.prediction.step_time_s

    @property
    def behind(self) -> float:
        """Returns the share by which the plan is slower than the best; negative where it is faster than all that
        fit."""
        return self.step_time_s / self.best_s - 1


def standing(prediction: Prediction, listed: Sequence[Prediction]) -> Standing:
    """Returns the place of a predicted plan among the `listed` ones, which are sorted and not empty."""
    faster = sum(other.step_time_s < prediction.step_time_s * (1 - 1e-9) for other in listed)
    return Standing(prediction, faster + 1, listed[0].step_time_s)
