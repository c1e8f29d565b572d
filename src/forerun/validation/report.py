"""The accuracy of a run as one dict (`--json`) and as console tables of that dict."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from forerun.analysis.uncertainty import Quantiles, residuals
from forerun.model.parameters import parameter_count
from forerun.validation import bands, metrics
from forerun.validation.bands import Held
from forerun.validation.metrics import ErrorStats, RegretSummary
from forerun.validation.rows import Measurement
from forerun.validation.run import RowResult, forecasts

Report = dict[str, Any]
_UNKNOWN = "not expressed"
_TABLES = {
    "class": "class",
    "device": "device",
    "gpus": "number of GPUs",
    "parameters": "number of parameters",
    "stack": "stack",
    "source": "source",
}
_WITH_BANDS = ("allocated", "reserved")


def build_report(results: Sequence[RowResult]) -> Report:
    """Every figure of a validation run. Errors and shares are fractions; None where nothing could be compared."""
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
        "step_time_by_source": {"tier A": by(tier_a, _source), "all tiers": by(rows, _source)},
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
        "not_expressed": [
            {"id": r.row.id, "tier": r.row.tier, "reason": r.reason, "fault": r.defect} for r in results if r.reason
        ],
        "assumptions": dict(Counter(note for result in results for note in result.notes).most_common()),
        "results": [_result(result) for result in results],
    }


def _size(result: RowResult) -> str:
    return _UNKNOWN if result.inputs is None else metrics.parameter_range(parameter_count(result.inputs.model))


def _bands(results: Sequence[RowResult]) -> dict[str, Any]:
    """How many rows the bands hold, and what bands these rows would give."""
    tiers = {"tier A": ("A",), "tiers A+B": ("A", "B"), "all tiers": ("A", "B", "C")}
    parts = {name: [result for result in results if result.row.tier in of] for name, of in tiers.items()}
    tier_a, tier_ab = parts["tier A"], parts["tiers A+B"]
    groups = {
        **parts,
        **{
            f"{group} stacks, {name}": [result for result in parts[name] if bands.stack_group(result) == group]
            for group in ("fitted", "unfitted")
            for name in ("tier A", "tiers A+B")
        },
        **{
            f"{name}, tier A": [each for each in tier_a if metrics.parallelism_class(each.row) == name]
            for name in metrics.CLASSES
        },
    }
    return {
        "share": residuals().share,
        "step_time": {name: _plain_held(bands.time_held(part)) for name, part in groups.items()},
        "reserved": {name: _plain_held(bands.reserved_held(part)) for name, part in parts.items()},
        "quantiles": {
            "time, tier A": _quantiles(bands.time_quantiles(tier_a)),
            "time, tiers A+B": _quantiles(bands.time_quantiles(tier_ab)),
            **{f"{kind}, tiers A+B": _quantiles(bands.memory_quantiles(tier_ab, kind)) for kind in _WITH_BANDS},
        },
    }


def _plain_held(held: Held) -> dict[str, Any]:
    return {name: _number(value) for name, value in asdict(held).items()}


def _quantiles(groups: dict[str, Quantiles]) -> dict[str, dict[str, Any]]:
    return {name: asdict(quantiles) for name, quantiles in groups.items()}


def _source(row: Measurement) -> str:
    return row.source_id


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
    """Rows whose memory has a kind or unit that nothing predicted can be compared with."""
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


def percent(value: float | None, signed: bool = False) -> str:
    """A fraction as a percentage with two digits; a dash where there is none."""
    if value is None:
        return "-"
    return f"{100 * value:+.2f}%" if signed else f"{100 * value:.2f}%"


def print_report(report: Report, console: Console, worst: int = 0, verbose: bool = False) -> None:
    """Print the tables of `build_report`: where the error sits, what is not covered, and a summary as the last line.

    The console should not interpret markup: names may hold brackets.
    """
    rows = report["rows"]
    console.print(
        f"{rows['total']} rows ({rows['ok']} ok, {rows['oom']} out of memory), {rows['with_measured_time']} with a "
        f"measured time; predicted {rows['predicted']}"
        + "".join(f", tier {tier} {n['predicted']} of {n['rows']}" for tier, n in rows["by_tier"].items())
    )
    _print_errors(console, "Step time", report["step_time"])
    for key, what in _TABLES.items():
        for tier, table in report[f"step_time_by_{key}"].items():
            _print_errors(console, f"Step time by {what}, {tier}", table)
    memory = {f"{kind}, {tier}": stats for kind, table in report["memory"].items() for tier, stats in table.items()}
    sources = {
        f"{kind}, {name}": stats for kind, table in report["memory_by_source"].items() for name, stats in table.items()
    }
    _print_errors(console, "Peak memory by kind (nvidia-smi against reserved)", memory)
    _print_errors(console, "Peak memory by kind and source, all tiers", sources)
    for kind, count in report["memory_not_compared"].items():
        console.print(f"not compared: {count} rows of memory kind {kind}")
    _print_out_of_memory(console, report["out_of_memory"])
    _print_regret(console, report["regret"])
    _print_bands(console, report["band"])
    _print_worst(console, report["results"], worst)
    _print_uncovered(console, report, verbose)
    console.print(summary_line(report))


def summary_line(report: Report) -> str:
    """The headline figures in one line: tier A, and regret over tiers A and B."""
    time, memory = report["step_time"]["tier A"], report["memory"]["allocated"]["tier A"]
    regret = report["regret"]["source, model, device, count"]["mean"]
    band = report["band"]
    held = f"{100 * band['share']:.0f} % band holds {percent(band['step_time']['tier A']['inside'])} of rows"
    return (
        f"summary: tier A step time MAPE {percent(time['mape'])}, mean signed {percent(time['signed'], signed=True)}, "
        f"covered {time['compared']}/{time['total']}; allocated memory MAPE {percent(memory['mape'])}; "
        f"regret {percent(regret)}; {held}"
    )


def _print_errors(console: Console, title: str, lines: dict[str, dict[str, Any]]) -> None:
    shown = {name: stats for name, stats in lines.items() if stats["total"]}
    if not shown:
        return
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for heading in ("compared", "MAPE", "median", "p90", "signed", "<= 10 %"):
        table.add_column(heading, justify="right")
    for name, stats in shown.items():
        figures = (
            percent(stats[key], signed=key == "signed") for key in ("mape", "median", "p90", "signed", "within_10")
        )
        table.add_row(name, f"{stats['compared']}/{stats['total']}", *figures)
    console.print(table)
    console.print()


def _print_out_of_memory(console: Console, oom: dict[str, Any]) -> None:
    console.print("Out of memory")
    console.print(f"  foreseen: {oom['oom_found']} of {oom['oom_judged']} judged ({oom['oom_rows']} such rows in all)")
    console.print(
        f"  wrongly refused: {oom['ok_refused']} of {oom['ok_judged']} judged ({oom['ok_rows']} ok rows in all)"
    )
    for source, count in oom["refused_by_source"].items():
        console.print(f"    {source}: {count}")
    console.print()


def _print_regret(console: Console, regret: dict[str, Any]) -> None:
    console.print("Rank regret: measured throughput lost by taking the first choice, tiers A+B")
    for name, groups in regret.items():
        rho = groups["median_spearman"]
        console.print(
            f"  {name}: {groups['groups_ranked']} of {groups['groups_total']} groups, mean {percent(groups['mean'])}, "
            f"worst {percent(groups['worst'])}, among covered rows {percent(groups['mean_covered'])}, "
            f"median Spearman {'-' if rho is None else f'{rho:.2f}'}"
        )
        for group in groups["groups"][:5]:
            if group["regret"] > 0:
                console.print(f"    {percent(group['regret'])}  {' / '.join(group['key'])}")
    console.print()


def _print_bands(console: Console, band: dict[str, Any]) -> None:
    share = f"{100 * band['share']:.0f} % band"
    for figure, below, above in (("step_time", "faster", "slower"), ("reserved", "less", "more")):
        shown = {name: held for name, held in band[figure].items() if held["rows"]}
        if not shown:
            continue
        title = f"{share} of {figure.replace('_', ' ')}: measured figures in it, below it, above it; its mean width"
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        table.add_column("")
        for heading in ("rows", "holds", below, above, "width"):
            table.add_column(heading, justify="right")
        for name, held in shown.items():
            table.add_row(
                name, str(held["rows"]), *(percent(held[key]) for key in ("inside", "below", "above", "width"))
            )
        console.print(table)
        console.print()
    console.print(f"{share} that these rows would give, ln(measured / predicted) over the widening:")
    for figure, groups in band["quantiles"].items():
        for group, found in groups.items():
            ends = f"{found['low']:+.3f} to {found['high']:+.3f}"
            console.print(f"  {figure}, {group} stacks: {ends} ({found['rows']} rows)")
    console.print()


def _print_worst(console: Console, results: list[dict[str, Any]], count: int) -> None:
    judged = [result for result in results if result["error"] is not None and result["tier"] == "A"]
    if not count or not judged:
        return
    table = Table(title="Largest step time errors, tier A", title_justify="left", box=None, pad_edge=False)
    for heading in ("error", "measured s", "predicted s"):
        table.add_column(heading, justify="right")
    table.add_column("id", no_wrap=True, overflow="fold")
    table.add_column("plan")
    for result in sorted(judged, key=lambda result: -abs(result["error"]))[:count]:
        table.add_row(
            percent(result["error"], signed=True), f"{result['measured_time_s']:.4g}", f"{result['step_time_s']:.4g}",
            result["id"], result["plan"],
        )  # fmt: skip
    console.print(table)
    console.print()


def _print_uncovered(console: Console, report: Report, verbose: bool) -> None:
    uncovered = report["not_expressed"]
    console.print(f"Not predicted: {len(uncovered)} rows")
    for entry in uncovered:
        console.print(f"  {entry['id']} (tier {entry['tier']}): {entry['reason']}")
    faults = report["rows"]["faults"]
    if faults:
        console.print(f"  {faults} of these are faults of this program: please report them")
    assumptions = report["assumptions"]
    console.print(f"Assumptions: {len(assumptions)} kinds" + ("" if verbose else " (--verbose lists them)"))
    if verbose:
        for note, count in assumptions.items():
            console.print(f"  {count:>4}  {note}")
    console.print()
