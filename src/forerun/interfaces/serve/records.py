"""Turns plans, searches and documents into plain data for the page, with the figures of the reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from forerun.answers.analysis.prediction import Prediction
from forerun.answers.search.choices import OTHER_NUMERICS, Choice
from forerun.answers.search.outcome import Status
from forerun.answers.search.result import SearchResult
from forerun.interfaces.report.histogram import runtime_histogram
from forerun.interfaces.report.page import Document, Part
from forerun.interfaces.report.records import plan_record
from forerun.interfaces.report.records_of_searches import bin_record
from forerun.interfaces.report.series import TimeAndMemory, time_and_memory
from forerun.interfaces.report.wording import choice_words, plan_words

LISTED = 40
"""plans that the table shows before it is filtered"""
MOST_POINTS = 20_000
"""plans of the scatter plot; of more, the best ones and every n-th of the others"""
_FIGURES = (
    *("step_time_s", "step_time_low_s", "step_time_high_s", "tokens_per_s_per_gpu", "mfu", "hfu"),
    *("peak_allocated_gib", "peak_reserved_gib", "peak_reserved_low_gib", "peak_reserved_high_gib"),
    *("memory_limit_gib", "fits", "fit_in_doubt", "exposed_comm_s", "bubble_s", "bottleneck"),
    "dollars_per_billion_tokens",
)
_STATUS = {Status.OK: "fits", Status.TOO_LARGE: "does not fit", Status.SKIPPED: "not simulated"}


def place_record(prediction: Prediction, row: int | None = None) -> dict[str, Any]:
    """Returns the figures of a plan for a row of the table; `row` is its number among the plans of the search."""
    plan = prediction.own_plan()
    record = {name: getattr(prediction, name) for name in _FIGURES}
    words = {"words": plan_words(plan), "stack": plan.stack, "plan": plan_record(plan)}
    return words | record | {"row": row, "status": "fits" if prediction.fits else "does not fit"}


def answer_record(result: SearchResult) -> dict[str, Any]:
    """Returns the result of a search: the counts, the first places, the points of the scatter plot, choices, front."""
    row_of = {id(prediction): row for row, prediction in result.outcome.predictions.items()}
    front = result.front
    return {
        "objective": result.objective,
        "memory_limit_gib": result.memory_limit_gib,
        "counts": result.counts,
        "proof": result.proof,
        "out_of_memory": result.out_of_memory,
        "impossible": dict(result.impossible),
        "impossible_examples": dict(result.impossible_examples),
        "nearest_miss": result.too_large[0].reason if result.too_large else None,
        "histogram": [bin_record(each) for each in runtime_histogram(result)],
        "top": [place_record(each, row_of.get(id(each))) for each in result.top(LISTED)],
        "points": points_record(result),
        "choices": [choice_record(each) for each in result.choices],
        "front": None
        if front is None
        else {
            "certainty": front.certainty,
            "places": [place_record(each, row_of.get(id(each))) for each in front.places],
        },
    }


def choice_record(choice: Choice) -> dict[str, Any]:
    """Returns the gain of a choice, and the fields to fix in a search with it."""
    other = choice.best.own_plan()
    fields = {"precision": ("precision", "fp8_recipe")}.get(choice.field, (choice.field,))
    texts = {name: str(getattr(other, name)).lower() for name in fields}
    return {
        "words": choice_words(choice),
        "field": choice.field,
        "caution": choice.caution,
        "changes_numerics": choice.caution == OTHER_NUMERICS,
        "gain": choice.instead.step_time_s / choice.best.step_time_s - 1,
        "fixed": texts,
        "best": place_record(choice.best),
    }


def points_record(result: SearchResult) -> dict[str, Any]:
    """Returns every plan's time and memory as columns: simulated ones first, then the least that the others can have.

    A plan that was not run has the lower bounds that the search knows: both, or that of time where its memory was
    simulated and does not fit.
    """
    outcome = result.outcome
    known = {row: time_and_memory(each) for row, each in outcome.predictions.items()}
    for row, least_s in outcome.least_s().items():
        known[row] = TimeAndMemory(outcome.unfit[row].plan, least_s, outcome.unfit[row].peak_reserved_gib)
    simulated = sorted(known)
    bounded = np.setdiff1d(np.arange(len(outcome.table)), simulated)
    if result.objective == "memory":
        bounded = bounded[:0]  # the bounds of such a search say nothing of time
    bounded = bounded[outcome.bound[bounded] > 0]
    if len(bounded) > MOST_POINTS:
        bounded = bounded[np.argsort(outcome.bound[bounded], kind="stable")][:: -(-len(bounded) // MOST_POINTS)]
    return {
        "simulated": {
            "row": simulated,
            "s": [known[row].step_s for row in simulated],
            "gib": [known[row].gib for row in simulated],
            "fits": [row in outcome.predictions and outcome.predictions[row].fits for row in simulated],
            "words": [plan_words(known[row].plan, with_stack=True) for row in simulated],
        },
        "bounded": {
            "row": bounded.tolist(),
            "s": _short(outcome.bound[bounded]),
            "gib": _short(outcome.need_gib[bounded]),
        },
        "shown": len(simulated) + len(bounded),
        "possible": len(outcome.table),
    }


def row_record(result: SearchResult, row: int) -> dict[str, Any]:
    """Returns a row of the table for any plan: its figures if it was simulated, otherwise its bounds."""
    found = result.outcome.predictions.get(row)
    if found is not None:
        return place_record(found, row)
    plan, status = result.outcome.table.plan(row), Status(int(result.outcome.status[row]))
    memory, needed = result.objective == "memory", result.outcome.unfit.get(row)
    known = {
        "least_s": None if memory else float(result.outcome.bound[row]),
        "least_gib": float(result.outcome.need_gib[row]) if needed is None else needed.peak_reserved_gib,
        "reason": result.reason_of(plan),
    }
    words = {"words": plan_words(plan), "stack": plan.stack, "plan": plan_record(plan)}
    return words | known | {"row": row, "status": _STATUS.get(status, "refused")}


def document_record(document: Document) -> dict[str, Any]:
    """Returns a page as typed parts, which the browser draws."""
    return {
        "title": document.title,
        "subtitle": document.subtitle,
        "parts": parts_record(document.parts),
    }


def parts_record(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Returns the parts of a page, each with the name of its type; a table has the rows that the page shows."""
    out = []
    for part in parts:
        record = {"type": type(part).__name__.lower(), **asdict(part)}
        if record["type"] == "table":
            record["numeric"] = sorted(record["numeric"])
            record["n_rows"] = len(record["rows"])
            record["rows"] = record["rows"][: record.pop("most")]
        out.append(record)
    return out


def _short(values: np.ndarray[Any, np.dtype[np.float64]]) -> list[float]:
    """Returns values with four digits, because a plot shows no more."""
    return [float(f"{value:.4g}") for value in values.tolist()]
