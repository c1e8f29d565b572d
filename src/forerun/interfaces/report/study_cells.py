"""Cells of one run among others, which the tables of studies on the console and on pages share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from forerun.interfaces.report.figures import percent, rate, seconds

if TYPE_CHECKING:
    from forerun.answers.experiment.result import Bill, ScalePoint, Variant


class StudyCells(NamedTuple):
    """The figures of the mean iteration of a run, in words."""

    step_time: str
    samples_per_s: str
    exposed: str
    """share of the step in which communication runs and no kernel does"""
    memory_gib: str
    dollars_per_million: str
    """dollars per million samples without a sign; empty if no price is known"""


def scale_cells(point: ScalePoint) -> StudyCells | None:
    """Returns the cells of a scale, None for one that can't run."""
    if point.error:
        return None
    return _cells(point.step_time_s, point.samples_per_s, point.breakdown_s, point.peak_reserved_gib, point.bill)


def variant_cells(variant: Variant) -> StudyCells | None:
    """Returns the cells of a variant, None for one that can't run."""
    if variant.prediction is None or variant.error:
        return None
    step_s = sum(variant.breakdown_s.values()) or variant.prediction.step_time_s
    memory_gib = variant.prediction.peak_reserved_gib
    return _cells(step_s, variant.samples_per_s, variant.breakdown_s, memory_gib, variant.bill)


def _cells(
    step_s: float, samples_per_s: float, breakdown_s: Mapping[str, float], memory_gib: float, bill: Bill | None
) -> StudyCells:
    price = None if bill is None else bill.dollars_per_million_samples
    return StudyCells(
        seconds(step_s),
        rate(samples_per_s),
        percent(breakdown_s.get("communication", 0.0) / step_s),
        f"{memory_gib:.1f}",
        "" if price is None else f"{price:,.2f}",
    )
