"""A measured step beside its prediction, as a console table and as a record for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console

from forerun.interfaces.report.console import make_table, print_heading
from forerun.interfaces.report.records import prediction_record

if TYPE_CHECKING:
    from forerun.answers.analysis.prediction import Prediction
    from forerun.evidence.measure.step import Figure, MeasuredStep


def step_record(prediction: Prediction, measured: MeasuredStep | None, figures: Sequence[Figure]) -> dict[str, Any]:
    """Returns both steps, and the figures with their errors."""
    return {
        "figures": [asdict(figure) | {"error": figure.error} for figure in figures],
        "measured": None if measured is None else asdict(measured),
        "prediction": prediction_record(prediction),
    }


def print_step(out: Console, prediction: Prediction, measured: MeasuredStep | None, figures: Sequence[Figure]) -> None:
    """Prints the figures of a step, and how it was measured."""
    print_heading(out, prediction)
    headings = ("predicted",) if measured is None else ("predicted", "measured", "error")
    rows = [_cells(figure)[: len(headings) + 2] for figure in figures]
    table = make_table("ll" + "r" * len(headings), ("", "", *headings), rows)
    out.print(table)
    if measured is None:
        out.print("This machine has no GPU, so nothing was measured.")
        return
    low, high = measured.fastest_s * 1e3, measured.slowest_s * 1e3
    out.print(f"measured on {measured.device}: median of {measured.steps} steps of {low:.4g} to {high:.4g} ms")


def _cells(figure: Figure) -> tuple[str, ...]:
    error = "-" if figure.error is None else f"{figure.error:+.1%}"
    return figure.name, figure.unit, _number(figure.predicted), _number(figure.measured), error


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}"
