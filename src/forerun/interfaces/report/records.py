"""Predictions and searches as plain data: JSON objects and CSV rows, keys with their units."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from forerun.answers.analysis.loop_time import LoopTime
from forerun.answers.analysis.prediction import Prediction
from forerun.answers.search.choices import Choice
from forerun.answers.search.front import Front
from forerun.answers.search.result import SearchResult
from forerun.answers.search.sweep import Sweep, tokens_per_s
from forerun.answers.search.why import Verdict
from forerun.common.files import whole_file
from forerun.common.units import GIB
from forerun.describe.plan.plan import Plan
from forerun.interfaces.report.histogram import Bin, runtime_histogram
from forerun.sources.symbolic.training_state import InitStage


def plan_record(plan: Plan) -> dict[str, Any]:
    """Every field of a plan; what a plan file takes."""
    values = {field.name: getattr(plan, field.name) for field in fields(plan)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def prediction_record(prediction: Prediction) -> dict[str, Any]:
    """Every figure of a prediction, its plan as an object, or null for a Program.

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
    """Steps of a training loop in the mean, and what its periodic work adds."""
    return {
        "mean_step_time_s": loop.mean_step_time_s,
        "tokens_per_s_per_gpu": loop.tokens_per_s_per_gpu,
        "stalls": [
            asdict(stall) | {"mean_s": stall.mean_s, "share_of_step": stall.mean_s / loop.step_time_s}
            for stall in loop.stalls
        ],
        "checkpoint": None if loop.checkpoint is None else asdict(loop.checkpoint),
    }


def search_record(result: SearchResult, top: int) -> dict[str, Any]:
    """Returns a search: the question, the counts, the reasons, and the `top` best plans that fit (`best` is null for
    none)."""
    best = [prediction_record(prediction) for prediction in result.top(top)]
    front = {} if result.front is None else {"front": front_record(result.front)}
    return front | {
        "model": result.model,
        "cluster": result.cluster,
        "n_gpus": result.n_gpus,
        "seq_len": result.seq_len,
        "global_batch": result.global_batch,
        "objective": result.objective,
        "memory_limit_gib": result.memory_limit_gib,
        "counts": result.counts,
        "impossible": dict(result.impossible),
        "impossible_examples": dict(result.impossible_examples),
        "out_of_memory": result.out_of_memory,
        "nearest_miss": result.too_large[0].reason if result.too_large else None,
        "choices": [choice_record(each) for each in result.choices],
        "simulated": result.simulated,
        "proof": result.proof,
        "runtime_histogram": [bin_record(each) for each in runtime_histogram(result)],
        "best": best[0] if best else None,
        "top": best,
    }


def choice_record(choice: Choice) -> dict[str, Any]:
    """Returns what a single choice is worth: the best plan with it, and the one that it is compared with."""
    plans = {"best": prediction_record(choice.best), "instead": prediction_record(choice.instead)}
    return {"field": choice.field, "value": choice.value, "caution": choice.caution} | plans


def front_record(front: Front) -> dict[str, Any]:
    """Returns a Pareto front; `exact_below_s` is null where it is exact throughout."""
    return {
        "exact_below_s": None if front.is_exact else front.exact_below_s,
        "simulated": front.simulated,
        "places": [prediction_record(place) for place in front.places],
    }


def verdict_record(verdict: Verdict) -> dict[str, Any]:
    """What became of the plans that the user asked about; `plan` is null if there is none."""
    return {"text": verdict.text, "plan": None if verdict.plan is None else plan_record(verdict.plan)}


def sweep_record(sweep: Sweep) -> dict[str, Any]:
    """Returns a range of searches: the question, every point with its best plan or the reason why there is none, the
    front."""
    return {
        "model": sweep.model,
        "cluster": sweep.cluster,
        "seq_len": sweep.seq_len,
        "objective": sweep.objective,
        "points": [
            {
                "n_gpus": point.n_gpus,
                "global_batch": point.global_batch,
                "tokens_per_s": point.tokens_per_s,
                "efficiency": sweep.efficiency(point),
                "counts": dict(point.counts),
                "reason": point.reason or None,
                "best": None if point.best is None else prediction_record(point.best),
            }
            for point in sweep.points
        ],
        "best": None if sweep.best is None else {"n_gpus": sweep.best.n_gpus, "global_batch": sweep.best.global_batch},
        "front": [
            {"n_gpus": point.n_gpus, "global_batch": point.global_batch, "tokens_per_s": tokens_per_s(plan)}
            | {"prediction": prediction_record(plan)}
            for point, plan in sweep.front
        ],
    }


def bin_record(each: Bin) -> dict[str, Any]:
    """Returns a bin of a histogram."""
    return {"from_s": each.low_s, "to_s": each.high_s, "simulated": each.simulated, "bounded": each.bounded}


def to_json(record: dict[str, Any]) -> str:
    """One JSON object, indented; figures that are not numbers would be a fault, so they raise ValueError."""
    return json.dumps(record, indent=2, allow_nan=False)


def write_csv(path: str | Path, result: SearchResult) -> None:
    """Every possible plan of a search as one row, best first. The file appears whole or not at all.

    Raises ForerunError where the file can't be written.
    """
    with whole_file(path) as binary, io.TextIOWrapper(binary, encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        for number, chunk in enumerate(result.row_chunks()):
            if number == 0:
                writer.writerow(chunk)
            writer.writerows(zip(*map(_cells, chunk.values()), strict=True))


def _cells(column: Sequence[Any]) -> Sequence[Any]:
    """Returns a column in the form of a file. Values of plan fields that are neither text nor number are few."""
    if not {*map(type, column)} & {bool, tuple}:
        return column
    cell = {value: _cell(value) for value in set(column)}
    return [cell[value] for value in column]


def write_rows(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows with the same keys as CSV. The file appears whole or not at all; ForerunError where it can't be written."""
    with whole_file(path) as binary, io.TextIOWrapper(binary, encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else ["rank"], lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)


def write_table(path: str | Path, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Rows of cells as CSV; a figure that does not exist is empty. The file appears whole or not at all.

    Raises ForerunError where the file can't be written.
    """
    with whole_file(path) as binary, io.TextIOWrapper(binary, encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([["" if cell != cell else cell for cell in row] for row in rows])


def _cell(value: object) -> object:
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return {None: "", True: "yes", False: "no"}.get(value, value) if isinstance(value, (bool, type(None))) else value
