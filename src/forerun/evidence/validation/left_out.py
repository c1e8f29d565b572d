"""Step times that were predicted with nothing fitted on the row's family of stacks (`forerun fit --leave-out --out`).

They are what a user of a new stack gets, and tell how wide the band of such a stack has to be.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from forerun.answers.analysis.uncertainty import Quantiles, residuals, time_band
from forerun.common.errors import ForerunError
from forerun.describe.stacks.catalog import load_stack
from forerun.evidence.validation import metrics
from forerun.evidence.validation.bands import Held, conformal, time_held, time_quantiles, time_scores
from forerun.evidence.validation.metrics import ErrorStats
from forerun.evidence.validation.run import RowResult, forecasts

_COLUMNS = ("id", "family", "left_out_s")


@dataclass(frozen=True, slots=True)
class LeftOutTime:
    """The step time of a row as the fit without its family has it."""

    family: str
    step_time_s: float


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Errors and bands of rows whose family was left out."""

    by_family: dict[str, ErrorStats]
    """`all` is all of them"""
    held: Held
    """by the shipped band of stacks on which nothing was fitted"""
    quantiles: Quantiles
    """what that band would be, half-way between the bands of these rows and of those of stacks on which nothing was
    fitted, of tiers A and B"""


def read_left_out(path: str | Path) -> dict[str, LeftOutTime]:
    """Row id -> time, of the rows that have one.

    Raises ForerunError naming the file and the line for a file that can't be read, a missing column, or a time that is
    no positive number.
    """
    found: dict[str, LeftOutTime] = {}
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise ForerunError(f"{path} line 1: the header lacks column(s) {', '.join(missing)}")
            for line in reader:
                if line["left_out_s"]:
                    place = f"{path} line {reader.line_num}"
                    found[line["id"]] = LeftOutTime(line["family"], _seconds(place, line["left_out_s"]))
    except OSError as error:
        raise ForerunError(f"{path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ForerunError(f"{path}: not a CSV file ({error})") from None
    if not found:
        raise ForerunError(f"{path}: no row has left_out_s; write it with forerun fit --leave-out --out")
    return found


def _seconds(place: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ForerunError(f"{place}: left_out_s is {text!r}, expected a positive number")
    return value


def left_out(results: Sequence[RowResult], times: Mapping[str, LeftOutTime]) -> LeftOut:
    """Errors of the rows of `results` that `times` knows, and the bands that follow from them.

    Raises ForerunError where there is no such row: the file is of another table.
    """
    rows = [_with_time(each, times[each.row.id].step_time_s) for each in results if each.row.id in times]
    if not any(each.prediction for each in rows):
        raise ForerunError("--left-out: none of its rows is in the table of measurements")
    predicted = forecasts(rows)
    families = sorted({times[each.row.id].family for each in rows})
    of_family = {
        name: metrics.time_stats((each.row for each in rows if times[each.row.id].family == name), predicted)
        for name in families
    }
    new = [each for each in results if each.row.tier in ("A", "B") and each.row.id not in times]
    scores = [score for of_group in time_scores(rows).values() for score in of_group]
    return LeftOut(
        by_family={"all": metrics.time_stats((each.row for each in rows), predicted), **of_family},
        held=time_held(rows),
        quantiles=_between(conformal(scores, residuals().share), time_quantiles(new).get("unfitted")),
    )


def _between(first: Quantiles, second: Quantiles | None) -> Quantiles:
    """Half-way between two bands, so that neither kind of evidence counts by its number of rows."""
    if second is None:
        return first
    ends = ((first.low + second.low) / 2, (first.high + second.high) / 2)
    return Quantiles(*ends, first.rows + second.rows)


def _with_time(result: RowResult, time_s: float) -> RowResult:
    """`result` with another step time, and the band of a stack on which nothing was fitted around it."""
    p = result.prediction
    if p is None or result.inputs is None:
        return result
    stack = replace(load_stack(result.inputs.plan.stack), fitted={})
    band = time_band(stack, result.inputs.cluster, p.n_gpus, p.coverage, p.exposed_comm_s / p.step_time_s)
    low_s, high_s = band.of(time_s)
    # communication keeps its share, on which the width depends
    exposed_s = p.exposed_comm_s * time_s / p.step_time_s
    changed = replace(p, step_time_s=time_s, step_time_low_s=low_s, step_time_high_s=high_s, exposed_comm_s=exposed_s)
    return replace(result, prediction=changed)
