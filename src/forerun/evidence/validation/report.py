"""Builds the accuracy of a validation run as one dict (`--json`)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from forerun.answers.analysis.uncertainty import Quantiles, residuals
from forerun.describe.model.parameters import parameter_count
from forerun.evidence.validation import bands, metrics
from forerun.evidence.validation.bands import Held
from forerun.evidence.validation.left_out import LeftOut
from forerun.evidence.validation.metrics import ErrorStats, RegretSummary
from forerun.evidence.validation.rows import Measurement
from forerun.evidence.validation.run import RowResult, forecasts

Report = dict[str, Any]
_UNKNOWN = "not expressed"
_QUANTILES: dict[str, Callable[[list[RowResult]], dict[str, Quantiles]]] = {
    "time": bands.time_quantiles,
    "allocated": lambda results: bands.memory_quantiles(results, "allocated"),
    "reserved": lambda results: bands.memory_quantiles(results, "reserved"),
}


def build_report(results: Sequence[RowResult], left_out: LeftOut | None = None) -> Report:
    """Returns all figures of a validation run. Errors and shares are fractions; None if no rows can be compared.

    `left_out` has the errors of stacks whose family the fit left out.
    """
    rows = [result.row for result in results]
    predicted = forecasts(results)
    tier_a = [row for row in rows if row.tier == "A"]
    tier_ab = [row for row in rows if row.tier in ("A", "B")]
    stacks = {result.row.id: result.inputs.plan.stack for result in results if result.inputs}
    sizes = {result.row.id: _size(result) for result in results}

    def by(
        selection: list[Measurement], label: Callable[[Measurement], str], order: Sequence[str] = ()
    ) -> dict[str, dict[str, Any]]:
        names: Sequence[str] = order or sorted({label(row) for row in selection})
        table = {
            name: metrics.time_stats((row for row in selection if label(row) == name), predicted) for name in names
        }
        return {name: _plain(stats) for name, stats in table.items() if stats.total}

    tiers = {"tier A": tier_a, "tiers A+B": tier_ab, "all tiers": rows}
    return {
        "rows": _counts(results),
        "step_time": {name: _plain(metrics.time_stats(selection, predicted)) for name, selection in tiers.items()},
        "step_time_by_class": {name: by(tiers[name], metrics.parallelism_class) for name in ("tier A", "tiers A+B")},
        "step_time_by_device": {name: by(tiers[name], lambda row: row.gpu) for name in ("tier A", "tiers A+B")},
        "step_time_by_gpus": {
            name: by(tiers[name], metrics.gpu_range, metrics.GPU_RANGES) for name in ("tier A", "tiers A+B")
        },
        "step_time_by_parameters": {
            name: by(tiers[name], lambda row: sizes[row.id], (*metrics.PARAMETER_RANGES, _UNKNOWN))
            for name in ("tier A", "tiers A+B")
        },
        "step_time_by_stack": {"tier A": by(tier_a, lambda row: stacks.get(row.id, _UNKNOWN))},
        "step_time_by_source": {
            "tier A": by(tier_a, lambda row: row.source_id),
            "all tiers": by(rows, lambda row: row.source_id),
        },
        "memory": {
            kind: {name: _plain(metrics.memory_stats(selection, predicted, kind)) for name, selection in tiers.items()}
            for kind in metrics.COMPARED_MEMORY
        },
        "memory_by_source": {kind: _memory_by_source(rows, predicted, kind) for kind in metrics.COMPARED_MEMORY},
        "memory_not_compared": _other_memory(rows),
        "out_of_memory": asdict(metrics.out_of_memory(rows, predicted)),
        "regret": {
            "source, model, device, count": _regret(metrics.rank_regret(rows, predicted)),
            "same workload": _regret(metrics.rank_regret(rows, predicted, metrics.workload_key)),
        },
        "band": _bands(results),
        "left_out": None if left_out is None else _left_out(left_out),
        "not_expressed": [
            {"id": r.row.id, "tier": r.row.tier, "reason": r.reason, "fault": r.defect} for r in results if r.reason
        ],
        "assumptions": dict(Counter(note for result in results for note in result.notes).most_common()),
        "results": [_result(result) for result in results],
    }


def _size(result: RowResult) -> str:
    return _UNKNOWN if result.inputs is None else metrics.parameter_range(parameter_count(result.inputs.model))


def _bands(results: Sequence[RowResult]) -> dict[str, Any]:
    """Returns how many rows the bands hold, and the bands that these rows would give."""
    tiers = {"tier A": ("A",), "tiers A+B": ("A", "B"), "all tiers": ("A", "B", "C")}
    parts = {name: [result for result in results if result.row.tier in of] for name, of in tiers.items()}
    groups = {
        **parts,
        **{
            f"{group} stacks, {name}": [result for result in parts[name] if bands.stack_group(result) == group]
            for group in ("fitted", "unfitted")
            for name in ("tier A", "tiers A+B")
        },
        **{
            f"{name}, tier A": [each for each in parts["tier A"] if metrics.parallelism_class(each.row) == name]
            for name in metrics.CLASSES
        },
    }
    return {
        "share": residuals().share,
        "step_time": {name: _plain_held(bands.time_held(part)) for name, part in groups.items()},
        "reserved": {name: _plain_held(bands.reserved_held(part)) for name, part in parts.items()},
        "quantiles": {
            f"{figure}, {tier}": {name: asdict(one) for name, one in found(parts[tier]).items()}
            for figure, found in _QUANTILES.items()
            for tier in ("tier A", "tiers A+B")
        },
    }


def _left_out(found: LeftOut) -> dict[str, Any]:
    return {
        "step_time": {name: _plain(stats) for name, stats in found.by_source.items()},
        "over_sources": _number(found.over_sources),
        "band": _plain_held(found.held),
        "quantiles": {name: asdict(one) for name, one in found.quantiles.items()},
    }


def _plain_held(held: Held) -> dict[str, Any]:
    return {name: _number(value) for name, value in asdict(held).items()}


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def _plain(stats: ErrorStats) -> dict[str, Any]:
    return {name: _number(value) for name, value in asdict(stats).items()}


def _counts(results: Sequence[RowResult]) -> dict[str, Any]:
    def expressed(tier: str) -> dict[str, int]:
        chosen = [result for result in results if result.row.tier == tier]
        return {"rows": len(chosen), "predicted": sum(result.prediction is not None for result in chosen)}

    return {
        "total": len(results),
        "ok": sum(result.row.outcome == "ok" for result in results),
        "oom": sum(result.row.outcome == "oom" for result in results),
        "with_measured_time": sum(metrics.measured_time_s(result.row) is not None for result in results),
        "predicted": sum(result.prediction is not None for result in results),
        "faults": sum(result.defect for result in results),
        "by_tier": {tier: expressed(tier) for tier in ("A", "B", "C")},
    }


def _memory_by_source(
    rows: Sequence[Measurement], predicted: dict[str, metrics.Forecast], kind: str
) -> dict[str, dict[str, Any]]:
    sources = sorted({row.source_id for row in rows if row.peak_mem_kind == kind})
    table = {
        source: metrics.memory_stats((row for row in rows if row.source_id == source), predicted, kind)
        for source in sources
    }
    return {source: _plain(stats) for source, stats in table.items() if stats.total}


def _other_memory(rows: Iterable[Measurement]) -> dict[str, int]:
    """Returns the number of rows by kinds of memory for which there is no predicted figure."""
    return dict(
        Counter(
            row.peak_mem_kind or "kind not stated"
            for row in rows
            if metrics.measured_memory_gib(row) is not None and row.peak_mem_kind not in metrics.COMPARED_MEMORY
        )
    )


def _regret(summary: RegretSummary) -> dict[str, Any]:
    return {
        "groups_ranked": len(summary.groups),
        "groups_total": summary.groups_total,
        "mean": _number(summary.mean),
        "worst": _number(summary.worst),
        "mean_covered": _number(summary.mean_covered),
        "median_spearman": _number(summary.median_spearman),
        "groups": [
            {**asdict(group), "key": list(group.key), "spearman": _number(group.spearman)} for group in summary.groups
        ],
    }


def _result(result: RowResult) -> dict[str, Any]:
    measured, forecast = metrics.measured_time_s(result.row), result.forecast
    error = None
    if measured is not None and forecast.step_time_s is not None:
        error = forecast.step_time_s / measured - 1
    return {
        "id": result.row.id,
        "tier": result.row.tier,
        "source": result.row.source_id,
        "plan": result.inputs.plan.describe() if result.inputs else None,
        "stack": result.inputs.plan.stack if result.inputs else None,
        "device": result.inputs.cluster.device.name if result.inputs else None,
        "measured_time_s": measured,
        **asdict(forecast),
        "error": error,
        "measured_memory_gib": metrics.measured_memory_gib(result.row),
        "memory_kind": result.row.peak_mem_kind or None,
        "outcome": result.row.outcome,
        "reason": result.reason or None,
        "notes": list(result.notes),
    }
