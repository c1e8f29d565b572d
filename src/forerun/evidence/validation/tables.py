"""Prints the accuracy of a validation run (report.py) as console tables."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from forerun.evidence.validation.report import Report

_TABLES = {
    "class": "class",
    "device": "device",
    "gpus": "number of GPUs",
    "parameters": "number of parameters",
    "stack": "stack",
    "source": "source",
}


def percent(value: float | None, signed: bool = False) -> str:
    """Returns a fraction as a percentage with two digits; a dash for None."""
    if value is None:
        return "-"
    return f"{100 * value:+.2f}%" if signed else f"{100 * value:.2f}%"


def print_report(report: Report, console: Console, worst: int = 0, verbose: bool = False) -> None:
    """Prints the tables of `build_report`: errors by group, uncovered rows, and a summary as the last line.

    The console must not interpret markup, as names may hold brackets.
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
    _print_errors(console, "Peak memory by kind (nvidia-smi with context and NCCL)", memory)
    _print_errors(console, "Peak memory by kind and source, all tiers", sources)
    for kind, count in report["memory_not_compared"].items():
        console.print(f"not compared: {count} rows of memory kind {kind}")
    _print_out_of_memory(console, report["out_of_memory"])
    _print_regret(console, report["regret"])
    _print_bands(console, report["band"])
    _print_left_out(console, report["left_out"])
    _print_worst(console, report["results"], worst)
    _print_uncovered(console, report, verbose)
    console.print(summary_line(report))


def summary_line(report: Report) -> str:
    """Returns the main figures in one line: errors of tier A, and regret over tiers A and B."""
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


def _print_left_out(console: Console, left_out: dict[str, Any] | None) -> None:
    if left_out is None:
        return
    _print_errors(console, "Step time, nothing fitted on the row's source", left_out["step_time"])
    held = left_out["band"]
    console.print(
        f"Mean over sources {percent(left_out['over_sources'])}. The bands hold {percent(held['inside'])} of these "
        f"rows ({percent(held['below'])} faster, {percent(held['above'])} slower; mean width {percent(held['width'])})"
    )
    console.print("Bands that these rows would give, ln(measured / predicted) over the widening, each source once:")
    for name, found in left_out["quantiles"].items():
        ends = f"{found['low']:+.3f} to {found['high']:+.3f}"
        console.print(f"  {name}: {ends} ({found['rows']} rows of {found['sources']} sources)")
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
