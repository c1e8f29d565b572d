"""Step times predicted without fitting anything on the row's source (`forerun fit --leave-out source --out`).

A user is a new source, so that the errors of such predictions give the widths of the bands.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

from forerun.answers.analysis.uncertainty import Quantiles, time_band
from forerun.common.admission import read_rows, refuse_repeated
from forerun.common.errors import ForerunError
from forerun.describe.stacks.catalog import load_stack
from forerun.evidence.validation import metrics
from forerun.evidence.validation.bands import Held, source_quantiles, time_held
from forerun.evidence.validation.metrics import ErrorStats
from forerun.evidence.validation.run import RowResult, forecasts

_COLUMNS = ("id", "source", "left_out_s")


@dataclass(frozen=True, slots=True)
class LeftOutTime:
    """The step time of a row, predicted by the fit without its source."""

    source: str
    step_time_s: float


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Errors and bands of rows whose source the fit left out."""

    by_source: dict[str, ErrorStats]
    """errors by source; `all` has all rows"""
    over_sources: float
    """mean over sources of their mean absolute errors, as a fraction"""
    held: Held
    """how many times the shipped bands hold"""
    quantiles: dict[str, Quantiles]
    """the bands that follow, by group of stacks and architecture"""


def read_left_out(path: str | Path) -> dict[str, LeftOutTime]:
    """Returns the times by row id, for the rows that have one.

    Raises ForerunError, which names file and line, for an unreadable file, a missing column, or a time that is no
    positive number.
    """
    found: dict[str, LeftOutTime] = {}
    rows = read_rows(path)
    _, header = next(rows, (0, []))
    refuse_repeated(header, f"{path} line 1")
    missing = [name for name in _COLUMNS if name not in header]
    if missing:
        raise ForerunError(f"{path} line 1: the header lacks column(s) {', '.join(missing)}")
    for number, cells in rows:
        row = dict(zip_longest(header, cells[: len(header)], fillvalue=""))
        if row["left_out_s"]:
            found[row["id"]] = LeftOutTime(row["source"], _seconds(f"{path} line {number}", row["left_out_s"]))
    if not found:
        raise ForerunError(f"{path}: no row has left_out_s; write it with forerun fit --leave-out source --out")
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
    """Returns the errors of the rows of `results` that have one of the `times`, and the bands that follow.

    Raises ForerunError if there is no such row, as the file then belongs to another table.
    """
    rows = [_with_time(each, times[each.row.id].step_time_s) for each in results if each.row.id in times]
    if not any(each.prediction for each in rows):
        raise ForerunError(
            "--left-out: none of its rows is in the table of measurements; write it again from this table"
        )
    predicted = forecasts(rows)
    sources = sorted({times[each.row.id].source for each in rows})
    of_source = {
        name: metrics.time_stats((each.row for each in rows if times[each.row.id].source == name), predicted)
        for name in sources
    }
    return LeftOut(
        by_source={"all": metrics.time_stats((each.row for each in rows), predicted), **of_source},
        over_sources=metrics.mean([one.mape for one in of_source.values() if one.compared]),
        held=time_held(rows),
        quantiles=source_quantiles(rows),
    )


def _with_time(result: RowResult, time_s: float) -> RowResult:
    """Returns `result` with another step time and, around it, the band of its stack."""
    p = result.prediction
    if p is None or result.inputs is None:
        return result
    stack = load_stack(result.inputs.plan.stack)
    band = time_band(stack, result.inputs.cluster, p.n_gpus, p.coverage, p.exposed_comm_s / p.step_time_s)
    low_s, high_s = band.of(time_s)
    # Communication keeps its share of the step, on which the band's width depends.
    exposed_s = p.exposed_comm_s * time_s / p.step_time_s
    changed = replace(p, step_time_s=time_s, step_time_low_s=low_s, step_time_high_s=high_s, exposed_comm_s=exposed_s)
    return replace(result, prediction=changed)
