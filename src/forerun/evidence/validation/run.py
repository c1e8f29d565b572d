"""Predicts every measured row, and writes the predictions."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path

from forerun.answers.analysis.prediction import Prediction
from forerun.common.errors import ForerunError
from forerun.common.files import whole_file
from forerun.describe.cluster.types import Cluster
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.plan import Plan
from forerun.evidence.validation.hardware import Hardware
from forerun.evidence.validation.mapping import Inputs, map_row
from forerun.evidence.validation.metrics import Forecast
from forerun.evidence.validation.rows import Measurement

Predictor = Callable[[ModelSpec, Plan, Cluster], Prediction]
COLUMNS = (
    *("id", "step_time_s", "peak_allocated_gib", "peak_reserved_gib", "fits_memory"),
    *("step_time_low_s", "step_time_high_s", "peak_reserved_low_gib", "peak_reserved_high_gib"),
)


@dataclass(frozen=True, slots=True)
class RowResult:
    """The result of one row: a prediction, or the reason why there is none."""

    row: Measurement
    inputs: Inputs | None = None
    prediction: Prediction | None = None
    reason: str = ""
    defect: bool = False
    """whether the reason is a fault of Forerun, not one of its known limits"""

    @property
    def notes(self) -> tuple[str, ...]:
        """Returns the assumptions where the row states nothing."""
        return self.inputs.notes if self.inputs else ()

    @property
    def forecast(self) -> Forecast:
        if self.prediction is None:
            return Forecast()
        p = self.prediction
        return Forecast(p.step_time_s, p.peak_allocated_gib, p.peak_reserved_gib, p.device_gib, p.fits)


def run(
    rows: Iterable[Measurement],
    models: Mapping[str, ModelSpec],
    hardware: Hardware,
    predictor: Predictor,
    progress: Callable[[RowResult], object] = lambda result: None,
) -> list[RowResult]:
    """Returns one result for each row, in order. Rows that cannot be expressed or predicted have the reason."""
    results = []
    for row in rows:
        result = _predict_row(row, models, hardware, predictor)
        progress(result)
        results.append(result)
    return results


def _predict_row(
    row: Measurement, models: Mapping[str, ModelSpec], hardware: Hardware, predictor: Predictor
) -> RowResult:
    inputs = None
    try:
        inputs = map_row(row, models, hardware)
        prediction = predictor(inputs.model, inputs.plan, inputs.cluster)
    except ForerunError as error:
        return RowResult(row, inputs, reason=str(error))
    except Exception as error:
        # A fault in one row must not end the table of all others.
        return RowResult(row, inputs, reason=f"fault: {type(error).__name__}: {error}", defect=True)
    figures = (prediction.step_time_s, prediction.peak_allocated_gib, prediction.peak_reserved_gib)
    if not all(math.isfinite(figure) and figure > 0 for figure in figures):
        return RowResult(row, inputs, reason=f"fault: predicted figures are not positive: {figures}", defect=True)
    return RowResult(row, inputs, prediction)


def forecasts(results: Iterable[RowResult]) -> dict[str, Forecast]:
    """Returns the predicted figures by row id, for the rows that have any."""
    return {result.row.id: result.forecast for result in results if result.prediction is not None}


def write_predictions(path: str | Path, results: Sequence[RowResult]) -> None:
    """Writes one line for each row; a row without a prediction has its id and empty cells.

    One column has the memory of a process: for rows measured by nvidia-smi, `peak_reserved_gib` and its band include
    the CUDA context and NCCL.

    The file appears complete or not at all. Raises ForerunError if it cannot be written.
    """
    with whole_file(path) as binary, TextIOWrapper(binary, encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(_line(result) for result in results)


def _line(result: RowResult) -> tuple[str, ...]:
    if result.prediction is None:
        return (result.row.id, *[""] * (len(COLUMNS) - 1))
    p = result.prediction
    beside = p.device_gib - p.peak_reserved_gib if result.row.peak_mem_kind == "nvidia-smi" else 0.0
    figures = (f"{figure:.9g}" for figure in (p.step_time_s, p.peak_allocated_gib, p.peak_reserved_gib + beside))
    held = (p.peak_reserved_low_gib + beside, p.peak_reserved_high_gib + beside)
    ends = (p.step_time_low_s, p.step_time_high_s, *held)
    return (result.row.id, *figures, "yes" if p.fits else "no", *(f"{end:.9g}" for end in ends))
