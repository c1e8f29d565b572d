"""Ranks the plans that experts published among all plans for the same question.

For each published run the search has the same model, cluster, stack, GPUs and batch, and whatever else of the plan a
search does not vary. The published plan is predicted as it is, and its rank is one more than the number of plans that
are faster and fit. A rank above the number of places that were proved is a lower bound.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from forerun.answers.search.search import search
from forerun.answers.search.standing import Standing, standing, unchosen_fields
from forerun.common.errors import ForerunError
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.plan import Plan
from forerun.evidence.validation.hardware import Hardware
from forerun.evidence.validation.metrics import measured_time_s
from forerun.evidence.validation.rows import Measurement
from forerun.evidence.validation.run import Predictor, run

JUDGED = ("A", "B")
"""tiers of the rows that are ranked unless others are asked for; rows of tier C need several assumptions"""
PLACES = 5
"""places that are proved; an expert's plan should be among them"""
NEAR = 0.03
"""share by which an expert's plan may be slower than the best and still count as near"""


@dataclass(frozen=True, slots=True)
class Rank:
    """The place of one published plan."""

    row: Measurement
    plan: Plan
    standing: Standing
    best: Plan

    @property
    def is_near(self) -> bool:
        """Returns whether the plan is among the proved places or nearly as fast as the best."""
        return self.standing.rank <= PLACES or self.standing.behind <= NEAR


def published_ranks(
    rows: Iterable[Measurement],
    models: Mapping[str, ModelSpec],
    hardware: Hardware,
    predictor: Predictor,
    progress: Callable[[], object] = lambda: None,
    tiers: Collection[str] = JUDGED,
) -> list[Rank]:
    """Returns the rank of the fastest measured plan of each model, device, framework, GPUs and batch, in their order.

    Rows of one GPU, of other `tiers`, and rows that can't be predicted are left out.
    """
    asked: dict[tuple[object, ...], Measurement] = {}
    for row in rows:
        if row.tier in tiers and row.outcome == "ok" and (row.n_gpus or 0) > 1 and measured_time_s(row):
            key = (row.model, row.gpu, row.n_gpus, row.framework, row.seq_len, row.global_batch_seqs, row.precision)
            known = asked.get(key)
            if known is None or (measured_time_s(row) or 0.0) < (measured_time_s(known) or 0.0):
                asked[key] = row
    found = []
    for row in asked.values():
        rank = _rank(row, models, hardware, predictor)
        progress()
        if rank is not None:
            found.append(rank)
    return found


def _rank(row: Measurement, models: Mapping[str, ModelSpec], hardware: Hardware, predictor: Predictor) -> Rank | None:
    (result,) = run([row], models, hardware, predictor)
    if result.prediction is None or result.inputs is None:
        return None
    model, plan, cluster = result.inputs.model, result.inputs.plan, result.inputs.cluster
    try:
        place = (model, cluster, plan.world_size, plan.seq_len, plan.global_batch)
        listed = search(*place, fixed=unchosen_fields(plan), keep=PLACES, workers=1).top(PLACES)
    except ForerunError:  # the stack has no search, or none of its plans can run
        return None
    if not listed:
        return None
    return Rank(row, plan, standing(result.prediction, listed), listed[0].own_plan())
