"""Compares a script's step, as measured on a GPU, with its prediction: memory before the step, peak, time, MFU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from forerun.answers.analysis.prediction import Prediction
from forerun.common.units import GIB, MIB, MS

_PERCENT = 1e-2


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """Holds the measurements of one rank. Times and peaks are medians over the steps."""

    step_s: float
    peak_bytes: int
    steps: int
    fastest_s: float
    slowest_s: float
    device: str
    stages: tuple[tuple[str, int], ...]
    """stage before the first step -> most bytes allocated until then"""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of the harness; None if it is not known."""

    name: str
    unit: str
    predicted: float | None
    measured: float | None

    @property
    def error(self) -> float | None:
        """Returns predicted over measured, less 1."""
        if self.predicted is None or not self.measured:
            return None
        return self.predicted / self.measured - 1


def figures(prediction: Prediction, measured: MeasuredStep | None) -> tuple[Figure, ...]:
    """Returns the figures in the order of a step: stages before it, peak, time, MFU."""
    stages: dict[str, tuple[float | None, float | None]] = {
        one.name: (one.peak_bytes / MIB, None) for one in prediction.init
    }
    for name, most_bytes in () if measured is None else measured.stages:
        stages[name] = (stages.get(name, (None, None))[0], most_bytes / MIB)
    peak_mib = prediction.peak_allocated_gib * GIB / MIB
    return (
        *(Figure(f"{name}, most so far", "MiB", *pair) for name, pair in _in_order(stages).items()),
        Figure("peak of a step", "MiB", peak_mib, None if measured is None else measured.peak_bytes / MIB),
        Figure("step", "ms", prediction.step_time_s / MS, None if measured is None else measured.step_s / MS),
        Figure("MFU", "%", *_mfu(prediction, measured)),
    )


def _in_order(
    stages: Mapping[str, tuple[float | None, float | None]],
) -> dict[str, tuple[float | None, float | None]]:
    """Returns the stages by the memory they have seen, which only grows."""
    return dict(sorted(stages.items(), key=lambda item: max(size or 0.0 for size in item[1])))


def _mfu(prediction: Prediction, measured: MeasuredStep | None) -> tuple[float | None, float | None]:
    if prediction.mfu is None:
        return None, None
    found = None if measured is None else prediction.mfu * prediction.step_time_s / measured.step_s / _PERCENT
    return prediction.mfu / _PERCENT, found
