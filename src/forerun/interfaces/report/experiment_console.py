"""Experiments as text: a run, a scaling study, a comparison, stragglers. Readable at 80 columns and without colour."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from forerun.interfaces.report import bands
from forerun.interfaces.report.console import bars, make_table, print_title
from forerun.interfaces.report.figures import percent, rate, seconds
from forerun.interfaces.report.histogram import bar, histogram
from forerun.interfaces.report.study_cells import scale_cells, variant_cells
from forerun.interfaces.report.wording import plan_words

if TYPE_CHECKING:
    from forerun.answers.experiment.answers import Answers
    from forerun.answers.experiment.result import (
        Bill,
        Comparison,
        RunResult,
        ScalePoint,
        ScalingStudy,
        StragglerStudy,
        Variant,
    )

_LISTED = 6
"""the most lines of sensitivities, recommendations and slowest ranks"""


def print_run(out: Console, result: RunResult, answers: Answers | None) -> None:
    """Prints a run: figures, bottlenecks, what-if, advice (the last three with `answers`)."""
    _heading(out, result.request.name, result)
    out.print(_facts(_run_facts(result)))
    for line in result.prediction.warnings:
        out.print(f"warning: {line}", soft_wrap=True)
    out.print()
    print_title(out, "Where the time goes (slowest rank)")
    bars(out, _shares(result.breakdown_s))
    if answers is None:
        return
    out.print()
    print_title(out, "Bottlenecks")
    usages = (
        ("!" if each.is_bottleneck else " ", each.name, percent(each.value), f"of {each.threshold:.0%}", each.text)
        for each in answers.bottlenecks.usages
    )
    out.print(_plain("llrrl", usages))
    out.print()
    print_title(out, "Simulated again with")
    out.print(_plain("rl", ((f"  {row.change:+.1%}", row.label) for row in answers.sensitivities[:_LISTED])))
    out.print()
    print_title(out, "Recommended (each simulated)")
    out.print(_plain("rl", ((f"  {advice.gain:+.1%}", advice.text) for advice in answers.advice[:_LISTED])))
    if not answers.advice:
        out.print("  none of the simulated changes is better")


def print_scaling(out: Console, study: ScalingStudy) -> None:
    """Prints a scaling study, a line for each scale."""
    kind = "strong scaling (constant global batch)" if study.strong else "weak scaling (constant batch of each GPU)"
    print_title(out, f"{study.request.name}: {kind}")
    sample = study.request.sample
    headings = ("nodes", "GPUs", "step", f"{sample}s/s", "efficiency", "GiB", "comm", f"$/M {sample}s", "")
    rows = ((str(point.num_nodes), f"{point.n_gpus:,}", *_scale_row(point)) for point in study.points)
    out.print(make_table("rrrrrrrrl", headings, rows))
    out.print()
    for line in scaling_words(study):
        out.print(line)


def scaling_words(study: ScalingStudy) -> list[str]:
    """Prints the findings of a scaling study in a few lines."""
    limit = study.request.thresholds.efficiency
    if study.break_down is None:
        lines = [f"efficiency stays above {percent(limit)}"]
    else:
        lines = [f"efficiency falls below {percent(limit)} at {study.break_down} nodes: {study.cause}"]
    best = (
        ("fastest", study.best_by_time),
        ("most efficient", study.best_by_efficiency),
        ("cheapest", study.best_by_cost),
    )
    found = [f"{words}: {nodes} node{'s' * (nodes != 1)}" for words, nodes in best if nodes is not None]
    return [*lines, "; ".join(found) if found else "nothing fits in memory"]


def print_comparison(out: Console, comparison: Comparison) -> None:
    """Prints variants side by side; changes are against the first."""
    print_title(out, f"{comparison.request.name}: side by side")
    sample = comparison.request.sample
    headings = ("", "step", f"{sample}s/s", "", "MFU", "GiB", "comm", f"$/M {sample}s")
    base = comparison.variants[0].samples_per_s
    rows = ((variant.label, *_variant_row(variant, base)) for variant in comparison.variants)
    out.print(make_table("lrrrrrrr", headings, rows))


def print_stragglers(out: Console, study: StragglerStudy) -> None:
    """Prints the distribution of the step times, and the cost of waiting for the slowest rank."""
    print_title(out, f"{study.request.name}: {len(study.steps_s):,} iterations under disturbances")
    lost = "" if study.lost_dollars is None else f", {study.lost_dollars:,.2f} dollars of the run"
    facts = {
        "undisturbed": seconds(study.undisturbed_s),
        "mean, p50, p99": f"{seconds(study.mean_s)}, {seconds(study.p50_s)}, {seconds(study.p99_s)}",
        "slowest rank costs": f"{percent(study.lost_share)} of the time{lost}",
    }
    if study.blame:
        worst = ", ".join(f"rank {rank} ({count:,}x)" for rank, count in study.blame[:_LISTED])
        facts["most often slowest"] = worst
    out.print(_facts(facts))
    out.print()
    bins = histogram(study.steps_s)
    most = max(each.simulated for each in bins)
    rows = (
        (f"{seconds(each.low_s)} to {seconds(each.high_s)}", f"{each.simulated:,}", bar(each.simulated, 0, most, 40))
        for each in bins
    )
    out.print(make_table("lrl", ("step time", "iterations", ""), rows))


def _heading(out: Console, name: str, result: RunResult) -> None:
    setup, request = result.request.setup, result.request
    prediction = result.prediction
    print_title(out, f"{name}: {prediction.model} on {prediction.n_gpus:,} x {prediction.cluster}")
    plan = setup.plan
    words = [plan_words(plan), f"{setup.samples_per_step:,} {request.sample}s a step", f"stack {plan.stack}"]
    if setup.pattern is not None:
        words.append(setup.pattern.name)
    out.print(", ".join(words))
    for line in request.echo:
        out.print(f"  {line}", soft_wrap=True)
    out.print()


def _run_facts(result: RunResult) -> dict[str, str]:
    prediction, request = result.prediction, result.request
    facts = {
        "iterations": f"{request.num_iterations:,} in {seconds(result.total_s)}",
        "step time": f"{seconds(result.mean_s)} (p50 {seconds(result.p50_s)}, p99 {seconds(result.p99_s)})",
        f"{request.sample}s/s": rate(result.samples_per_s),
    }
    if result.tokens_per_s is not None:
        facts["tokens/s"] = rate(result.tokens_per_s)
    facts["undisturbed step"] = bands.step_time(prediction)
    facts["MFU, HFU"] = f"{bands.mfu(prediction)}, {percent(prediction.hfu)}"
    facts["peak memory"] = (
        f"{prediction.peak_allocated_gib:.1f} GiB allocated, {bands.reserved(prediction)} of"
        f" {prediction.memory_limit_gib:.1f}: {bands.fits(prediction)}"
    )
    facts |= bill_facts(result.bill, request.sample)
    return facts


def bill_facts(bill: Bill, sample: str) -> dict[str, str]:
    """Returns the cost of a run, in words."""
    facts = {"GPU hours": f"{bill.gpu_hours:,.2f}, {bill.energy_kwh:,.1f} kWh"}
    if bill.dollars is not None and bill.dollars_per_hour is not None:
        parts = [f"{bill.dollars:,.2f} dollars ({bill.dollars_per_hour:,.2f} an hour)"]
        if bill.dollars_per_billion_tokens is not None:
            parts.append(f"{bill.dollars_per_billion_tokens:,.2f} a billion tokens")
        if bill.dollars_per_million_samples is not None:
            parts.append(f"{bill.dollars_per_million_samples:,.2f} a million {sample}s")
        facts["cost"] = ", ".join(parts)
    return facts


def _shares(breakdown_s: Mapping[str, float]) -> dict[str, tuple[str, float]]:
    total = sum(breakdown_s.values())
    return {cause: (seconds(time), time / total) for cause, time in breakdown_s.items() if time > 0}


def _scale_row(point: ScalePoint) -> Sequence[str]:
    cells = scale_cells(point)
    if cells is None:
        return ["", "", "", "", "", "", point.error]
    return [
        cells.step_time,
        cells.samples_per_s,
        percent(point.efficiency),
        cells.memory_gib + ("" if point.fits else "!"),
        cells.exposed,
        cells.dollars_per_million,
        "" if point.fits else "does not fit",
    ]


def _variant_row(variant: Variant, base: float) -> Sequence[str]:
    cells, prediction = variant_cells(variant), variant.prediction
    if cells is None or prediction is None:
        return [variant.error]
    return [
        cells.step_time,
        cells.samples_per_s,
        f"{variant.samples_per_s / base - 1:+.1%}" if base else "",
        percent(prediction.mfu),
        cells.memory_gib + ("" if prediction.fits else "!"),
        cells.exposed,
        cells.dollars_per_million,
    ]


def _facts(facts: Mapping[str, str]) -> Table:
    return _plain("ll", facts.items())


def _plain(sides: str, rows: Iterable[Sequence[str]]) -> Table:
    """Returns a table without a heading; only its last column breaks into lines."""
    table = make_table(sides, (), rows)
    for column in table.columns[:-1]:
        column.no_wrap = True
    return table
