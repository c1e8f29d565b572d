"""Predictions and searches as plain data: JSON objects and CSV rows, keys with their units."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from forerun.common.units import GIB

if TYPE_CHECKING:
    from forerun.answers.analysis.loop_time import LoopTime
    from forerun.answers.analysis.prediction import Prediction
    from forerun.describe.plan.plan import Plan
    from forerun.sources.symbolic.training_state import InitStage


def plan_record(plan: Plan) -> dict[str, Any]:
    """Returns every field of a plan in the form of a plan file."""
    values = {field.name: getattr(plan, field.name) for field in fields(plan)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def anchor_record(plan: Plan | None, step_time_s: float) -> dict[str, Any]:
    """Returns an --anchor file: the fields of the plan that have a value, and the measured step in seconds."""
    fields_set = {} if plan is None else {key: value for key, value in plan_record(plan).items() if value is not None}
    return fields_set | {"step_time_s": step_time_s}


def prediction_record(prediction: Prediction) -> dict[str, Any]:
    """Returns every figure of a prediction, its plan as an object, or null for a Program.

    `network`, `loop`, and `missing` of the user's measurements, only where they were given; `init` only where it is
    known; `sample` and its rate only of a model given layer by layer.
    """
    values = {field.name: getattr(prediction, field.name) for field in fields(prediction)}
    values["explain"] = list(prediction.explain)
    network = values.pop("network")
    if network is not None:
        values["network"] = asdict(network)
    init, loop = values.pop("init"), values.pop("loop")
    if init:
        values["init"] = [_stage_record(stage) for stage in init]
    if loop is not None:
        values["loop"] = loop_record(loop)
    missing = values.pop("missing")
    if missing is not None:
        values["missing"] = list(missing)
    if prediction.sample is None:
        del values["sample"], values["samples_per_s_per_gpu"]
    return values | {"plan": None if prediction.plan is None else plan_record(prediction.plan)}


def _stage_record(stage: InitStage) -> dict[str, Any]:
    sizes = {"allocated_gib": stage.allocated_bytes / GIB, "peak_gib": stage.peak_bytes / GIB}
    return {"way": stage.way, "stage": stage.name} | sizes


def loop_record(loop: LoopTime) -> dict[str, Any]:
    """Returns the mean step of a training loop, and the time that its periodic work adds."""
    return {
        "mean_step_time_s": loop.mean_step_time_s,
        "tokens_per_s_per_gpu": loop.tokens_per_s_per_gpu,
        "stalls": [
            asdict(stall) | {"mean_s": stall.mean_s, "share_of_step": stall.mean_s / loop.step_time_s}
            for stall in loop.stalls
        ],
        "checkpoint": None if loop.checkpoint is None else asdict(loop.checkpoint),
    }
