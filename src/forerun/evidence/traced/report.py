"""The accuracy of traced programs, beside that of the same rows modelled: errors by row and in sum, and bands."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from forerun.answers.analysis.predict_program import STACK
from forerun.answers.analysis.prediction import Prediction
from forerun.answers.analysis.uncertainty import TRACED, Quantiles, memory_band, residuals, widening
from forerun.core.cost.clock import is_known
from forerun.describe.stacks.catalog import load_stack
from forerun.evidence.traced.run import TracedResult
from forerun.evidence.validation.bands import conformal
from forerun.evidence.validation.metrics import COMPARED_MEMORY, mean, measured_memory_gib, measured_time_s

ALL = "all"


@dataclass(frozen=True, slots=True)
class Judged:
    """One row: what was measured, and both predictions as errors (predicted / measured - 1), None if unknown."""

    id: str
    repository: str
    label: str
    gpus: int
    device: str
    measured_s: float | None
    time_error: float | None
    symbolic_time_error: float | None
    time_held: bool | None
    """whether the band of the step time holds the measured one"""
    measured_gib: float | None
    memory_kind: str
    memory_error: float | None
    symbolic_memory_error: float | None
    memory_held: bool | None
    outcome: str
    fits: bool | None
    reason: str


@dataclass(frozen=True, slots=True)
class Sum:
    """The errors of several rows: means and largest of their sizes, nan for none."""

    rows: int
    mean: float
    worst: float
    symbolic_mean: float
    """mean over the same rows, modelled"""
    held: float
    """share of the rows in their band"""


def judge(result: TracedResult) -> Judged:
    """Returns one row's errors."""
    row, traced = result.row, result.traced
    time_s, memory_gib = measured_time_s(row), measured_memory_gib(row)
    figure = COMPARED_MEMORY.get(row.peak_mem_kind)
    if figure is None:
        memory_gib = None
    symbolic = result.symbolic.prediction
    return Judged(
        id=row.id,
        repository=result.run.repository,
        label=row.source_label or row.id,
        gpus=row.n_gpus or 1,
        device=row.gpu,
        measured_s=time_s,
        time_error=_error(traced, "step_time_s", time_s),
        symbolic_time_error=_error(symbolic, "step_time_s", time_s),
        time_held=_time_held(traced, time_s),
        measured_gib=memory_gib,
        memory_kind=row.peak_mem_kind,
        memory_error=_error(traced, figure, memory_gib),
        symbolic_memory_error=_error(symbolic, figure, memory_gib),
        memory_held=_memory_held(traced, memory_gib, row.peak_mem_kind),
        outcome=row.outcome,
        fits=None if traced is None else traced.fits,
        reason=result.reason,
    )


def _error(prediction: Prediction | None, figure: str | None, measured: float | None) -> float | None:
    if prediction is None or figure is None or measured is None:
        return None
    predicted: float = getattr(prediction, figure)
    return predicted / measured - 1


def _time_held(prediction: Prediction | None, measured_s: float | None) -> bool | None:
    if prediction is None or measured_s is None:
        return None
    return prediction.step_time_low_s <= measured_s <= prediction.step_time_high_s


def _memory_held(prediction: Prediction | None, measured_gib: float | None, kind: str) -> bool | None:
    """Returns whether the band holds measured memory; a Prediction has a band of reserved memory alone."""
    if prediction is None or measured_gib is None or kind not in ("allocated", "reserved"):
        return None
    low, high = prediction.peak_reserved_low_gib, prediction.peak_reserved_high_gib
    if kind == "allocated":
        low, high = memory_band(load_stack(STACK), kind, TRACED).of(prediction.peak_allocated_gib)
    return low <= measured_gib <= high


def sums(rows: Sequence[Judged], figure: str) -> dict[str, Sum]:
    """Returns the sums of a figure, `time` or `memory`, by repository, and of all rows."""
    names = sorted({row.repository for row in rows})
    parts = {name: [row for row in rows if row.repository == name] for name in names} | {ALL: list(rows)}
    return {name: _sum(part, figure) for name, part in parts.items()}


def _sum(rows: Iterable[Judged], figure: str) -> Sum:
    compared = [row for row in rows if getattr(row, f"{figure}_error") is not None]
    errors = [abs(getattr(row, f"{figure}_error")) for row in compared]
    modelled = [getattr(row, f"symbolic_{figure}_error") for row in compared]
    held = [float(inside) for row in compared if (inside := getattr(row, f"{figure}_held")) is not None]
    return Sum(
        rows=len(errors),
        mean=mean(errors),
        worst=max(errors, default=math.nan),
        symbolic_mean=mean([abs(error) for error in modelled if error is not None]),
        held=mean(held),
    )


def quantiles(results: Sequence[TracedResult]) -> dict[str, Quantiles]:
    """Returns the band of traced programs that these rows would give: for time, allocated and reserved memory."""
    scores = {"time": list(_time_scores(results))}
    scores |= {kind: list(_memory_scores(results, kind)) for kind in ("allocated", "reserved")}
    return {name: conformal(found, residuals().share) for name, found in scores.items() if found}


def _time_scores(results: Sequence[TracedResult]) -> Iterable[float]:
    """Yields ln(measured / predicted) over the widening, of rows on devices whose clock under load is known."""
    for result in results:
        time_s, p = measured_time_s(result.row), result.traced
        if p is None or time_s is None or result.cluster is None or not is_known(result.cluster.device):
            continue
        yield math.log(time_s / p.step_time_s) / widening(p.coverage, p.exposed_comm_s / p.step_time_s)


def _memory_scores(results: Sequence[TracedResult], kind: str) -> Iterable[float]:
    for result in results:
        memory, p = measured_memory_gib(result.row), result.traced
        if p is not None and memory is not None and result.row.peak_mem_kind == kind:
            yield math.log(memory / getattr(p, COMPARED_MEMORY[kind]))


def build_traced_report(results: Sequence[TracedResult]) -> dict[str, Any]:
    """Returns all figures as plain data (`--json`). Errors and shares are fractions."""
    rows = [judge(result) for result in results]
    return {
        "rows": [asdict(row) for row in rows],
        "step_time": _plain(sums(rows, "time")),
        "memory": _plain(sums(rows, "memory")),
        "quantiles": {name: asdict(found) for name, found in quantiles(results).items()},
    }


def _plain(table: Mapping[str, Sum]) -> dict[str, Any]:
    return {name: {key: _number(value) for key, value in asdict(one).items()} for name, one in table.items()}


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
