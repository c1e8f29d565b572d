"""The certainty of a prediction, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forerun.answers.analysis.uncertainty import residuals
from forerun.interfaces.report.figures import percent, rate, seconds

if TYPE_CHECKING:
    from forerun.answers.analysis.prediction import Prediction


def step_time(prediction: Prediction) -> str:
    """Returns the step time with its band."""
    low, high = seconds(prediction.step_time_low_s), seconds(prediction.step_time_high_s)
    return f"{seconds(prediction.step_time_s)} {in_band(low, high)}"


def in_band(low: str, high: str) -> str:
    """Returns both ends of a band, in brackets."""
    return f"({residuals().share * 100:.0f} %: {low} to {high})"


def rate_in_band(prediction: Prediction, per_s: float | None) -> str:
    """Returns the tokens or samples per second of this step, with their band."""
    if per_s is None:
        return rate(per_s)
    low, high = prediction.rate_band(per_s)
    return f"{rate(per_s)} {in_band(rate(low), rate(high))}"


def mfu(prediction: Prediction) -> str:
    """Returns MFU with its band."""
    if prediction.mfu is None:
        return percent(prediction.mfu)
    low, high = prediction.rate_band(prediction.mfu)
    return f"{percent(prediction.mfu)} {in_band(percent(low), percent(high))}"


def reserved(prediction: Prediction) -> str:
    """Returns reserved memory with its band."""
    low, high = prediction.peak_reserved_low_gib, prediction.peak_reserved_high_gib
    return f"{prediction.peak_reserved_gib:.1f} reserved {in_band(f'{low:.1f}', f'{high:.1f}')}"


def fits(prediction: Prediction) -> str:
    """Returns whether the run fits in memory, and whether that is certain."""
    if not prediction.memory_recorded:
        return "not recorded, so whether it fits is not known"
    answer = "fits" if prediction.fits else "does not fit"
    return f"{answer}, but within the error of the estimate" if prediction.fit_in_doubt else answer
