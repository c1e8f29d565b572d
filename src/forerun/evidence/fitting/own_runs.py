"""Predicts published rows as if one of their steps had been measured: that step is the anchor of the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Literal, get_args

from forerun.answers.analysis.prediction import Prediction
from forerun.answers.analysis.setup import Setup
from forerun.common.errors import ForerunError
from forerun.describe.cluster.types import Cluster, KernelRates
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.plan import Plan
from forerun.evidence.fitting.anchor import Anchor, anchored, anchored_rates, best_anchor
from forerun.evidence.validation.hardware import Hardware
from forerun.evidence.validation.mapping import Inputs, map_row
from forerun.evidence.validation.metrics import measured_time_s
from forerun.evidence.validation.plan_mapping import Inexpressible
from forerun.evidence.validation.rows import Measurement
from forerun.evidence.validation.run import Predictor, RowResult, run

Choice = Literal["first", "best"]
CHOICES: tuple[Choice, ...] = get_args(Choice)


def run_with_anchors(
    rows: Sequence[Measurement],
    models: Mapping[str, ModelSpec],
    hardware: Hardware,
    predictor: Predictor,
    choice: Choice,
    progress: Callable[[RowResult], object] = lambda result: None,
) -> list[RowResult]:
    """Returns one result, in order, for each row that shares its run with an anchor, predicted after that anchor.

    Rows of one source, device and model form a run. Its anchor is one of the rows of the run's best tier that have a
    time and can be expressed: the first, or the one that is most informative about the others.
    """
    known = {row.id: inputs for row in rows if (inputs := _inputs(row, models, hardware)) is not None}
    runs: dict[Hashable, list[Measurement]] = defaultdict(list)
    for row in rows:
        if row.id in known:
            runs[row.source_id, known[row.id].cluster.device.name, row.model].append(row)
    found: dict[str, RowResult] = {}
    for members in runs.values():
        for result in _after_anchor(members, known, models, hardware, predictor, choice):
            progress(result)
            found[result.row.id] = result
    return [found[row.id] for row in rows if row.id in found]


def _after_anchor(
    members: Sequence[Measurement],
    known: Mapping[str, Inputs],
    models: Mapping[str, ModelSpec],
    hardware: Hardware,
    predictor: Predictor,
    choice: Choice,
) -> Iterable[RowResult]:
    """Returns the results of one run's rows other than its anchor; none where the run has no anchor or no other row."""
    timed = [(row, time_s) for row in members if (time_s := measured_time_s(row)) is not None]
    tier = min((row.tier for row, _ in timed), default="")
    able = [(row, _setup(known[row.id]), time_s) for row, time_s in timed if row.tier == tier]
    if not able or len(members) < 2:
        return []
    try:
        number = best_anchor([setup for _, setup, _ in able]) if choice == "best" else 0
        anchor, setup, time_s = able[number]
        rates = anchored_rates([Anchor(setup, time_s)])
    except ForerunError as error:
        return [RowResult(row, known[row.id], reason=f"its run has no anchor: {error}") for row in members]
    others = [row for row in members if row is not anchor]
    return run(others, models, hardware, _under(rates, predictor))


def _under(rates: KernelRates, predictor: Predictor) -> Predictor:
    def predict(model: ModelSpec, plan: Plan, cluster: Cluster) -> Prediction:
        return predictor(model, plan, anchored(cluster, rates))

    return predict


def _inputs(row: Measurement, models: Mapping[str, ModelSpec], hardware: Hardware) -> Inputs | None:
    try:
        return map_row(row, models, hardware)
    except Inexpressible:
        return None


def _setup(inputs: Inputs) -> Setup:
    return Setup(inputs.model, inputs.plan, inputs.cluster)
