"""Runs and studies as plain data for JSON: every figure, keys with their units."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from itertools import zip_longest
from typing import Any

from forerun.answers.experiment.request import Request
from forerun.answers.experiment.result import Comparison, RunResult, ScalingStudy, StragglerStudy
from forerun.common.version import __version__


def run_record(result: RunResult) -> dict[str, Any]:
    """Returns a run: its request, figures, iterations, and the prediction of the undisturbed iteration."""
    return {
        **_heading(result.request),
        "summary": plain(result.summary()),
        "breakdown_s": result.breakdown_s,
        "bill": plain(result.bill),
        "iterations": plain(result.iterations),
        "prediction": plain(result.prediction),
        "notes": list(result.notes),
    }


def scaling_record(study: ScalingStudy) -> dict[str, Any]:
    """Returns a scaling study as plain data: its request, its findings and its points."""
    return {**_heading(study.request), "summary": study.summary(), "points": plain(study.points)}


def comparison_record(comparison: Comparison) -> dict[str, Any]:
    """Returns a comparison as plain data: its request, its findings, and its variants with their predictions."""
    return {**_heading(comparison.request), "summary": comparison.summary(), "variants": plain(comparison.variants)}


def straggler_record(study: StragglerStudy) -> dict[str, Any]:
    """Returns a straggler study: its request, figures, the time of every iteration, and whom the others waited for."""
    blame = [
        {"rank": rank, "iterations": count, "waited_s": waited_s}
        for (rank, count), waited_s in zip_longest(study.blame, study.blame_s)
    ]
    return {
        **_heading(study.request),
        "summary": study.summary(),
        "blame": blame,
        "sweep": plain(study.sweep),
        "steps_s": list(study.steps_s),
        "notes": list(study.notes),
    }


def study_record(result: RunResult | ScalingStudy | Comparison | StragglerStudy) -> dict[str, Any]:
    """Returns the record of a study of any kind."""
    if isinstance(result, RunResult):
        return run_record(result)
    if isinstance(result, ScalingStudy):
        return scaling_record(result)
    return comparison_record(result) if isinstance(result, Comparison) else straggler_record(result)


def plain(value: Any) -> Any:
    """Returns dataclasses and mappings as dicts, sequences as lists, numbers that are none as None; all else as it
    is."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _heading(request: Request) -> dict[str, Any]:
    return {
        "name": request.name,
        "forerun": __version__,
        "disturbance": plain(request.disturbance),
        "echo": list(request.echo),
    }
