"""Searches as plain records, for JSON and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.answers.search.sweep import Sweep, tokens_per_s
from forerun.common.files import whole_file
from forerun.interfaces.report.histogram import Bin, runtime_histogram
from forerun.interfaces.report.records import plan_record, prediction_record
from forerun.interfaces.report.written import cell

if TYPE_CHECKING:
    from forerun.answers.search.choices import Choice
    from forerun.answers.search.front import Front
    from forerun.answers.search.result import SearchResult
    from forerun.answers.search.standing import Standing
    from forerun.answers.search.why import Verdict


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
    """Returns the gain of a single choice: the best plan with it, and the plan that it is compared with."""
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
    """Returns the outcome of the plans that the user asked about. `plan` is null if there is none."""
    return {"text": verdict.text, "plan": None if verdict.plan is None else plan_record(verdict.plan)}


def standing_record(stands: Standing) -> dict[str, Any]:
    """Returns the place of a recipe's own plan; `rank` is one more than the listed plans if all of them are faster."""
    prediction = stands.prediction
    return {
        "plan": plan_record(prediction.own_plan()),
        "step_time_s": stands.step_time_s,
        "fits": prediction.fits,
        "rank": stands.rank,
        "behind": stands.behind,
    }


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


def write_csv(path: str | Path, result: SearchResult) -> None:
    """Writes every possible plan of a search as one row, best first. The file appears whole or not at all.

    Raises ForerunError if the file can't be written.
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
    written = {value: cell(value) for value in set(column)}
    return [written[value] for value in column]
