"""Documents: the contents of the page of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from forerun.answers.analysis.bottlenecks import Bottlenecks, bottlenecks
from forerun.answers.analysis.critical_path import critical_path
from forerun.interfaces.report.documents import plan_line
from forerun.interfaces.report.figures import percent, rate, seconds
from forerun.interfaces.report.page import Document, Figures, Heading, Part, Table, Text
from forerun.interfaces.report.page_sections import (
    bill_section,
    bottleneck_sections,
    communication_section,
    dollars,
    explain_section,
    memory_sections,
    network_section,
    reproduce_section,
    sensitivity_sections,
    time_sections,
    warnings,
)
from forerun.interfaces.report.plots import iterations_plot

if TYPE_CHECKING:
    from forerun.answers.experiment.advice.advise import Advice
    from forerun.answers.experiment.answers import Answers
    from forerun.answers.experiment.result import Iteration, RunResult

_SLOWEST = 8
"""iterations that the page lists"""


def run_document(result: RunResult, answers: Answers | None, command: str = "") -> Document:
    """Returns the page of a run. If `answers` is None, it has no sections that need further simulations.

    `command` repeats the run.
    """
    request, prediction, simulation = result.request, result.prediction, result.simulation
    further: list[Part] = []
    if answers is not None:
        further = [*communication_section(answers.collectives), *sensitivity_sections(answers.sensitivities)]
    subtitle = f"{prediction.model} on {prediction.n_gpus:,} x {prediction.cluster}, {plan_line(prediction)}"
    return Document(
        f"{request.name}: a run of {request.num_iterations:,} iterations",
        subtitle,
        (
            _run_figures(result),
            *warnings(result.fullest or prediction),
            *(Text(note, "note") for note in (*result.notes, *_undisturbed(result))),
            *bottleneck_sections(bottlenecks_of(result, answers)),
            *([] if answers is None else _advice(answers.advice, request.sample)),
            *_iterations(result),
            *time_sections(simulation, critical_path(simulation) if answers is None else answers.path),
            *further,
            *network_section(simulation.prediction),
            *memory_sections(simulation),
            *bill_section(result.bill, f"{request.sample}s"),
            *reproduce_section(command, request.config, "The experiment, with every key", request.echo),
            *explain_section(prediction),
        ),
    )


def bottlenecks_of(result: RunResult, answers: Answers | None) -> Bottlenecks:
    """Returns the bottlenecks of a run; without `answers` they are computed."""
    limits = result.request.thresholds
    if answers is not None:
        return answers.bottlenecks
    return bottlenecks(result.simulation, limits.compute, limits.memory, limits.network)


def _undisturbed(result: RunResult) -> list[str]:
    """Says which iteration the sections on one step show, if iterations differ."""
    if len(result.iterations) == 1:
        return []
    of = "Bottlenecks, recommendations, timeline and memory describe the first iteration without disturbances."
    if result.fullest is None or result.fullest == result.prediction:
        return [of]
    return [of, f"The iteration with the highest peak needs {result.fullest.peak_reserved_gib:.1f} GiB."]


def _run_figures(result: RunResult) -> Figures:
    request, prediction, bill = result.request, result.prediction, result.bill
    samples = f"{request.sample}s"
    entries = [
        ("mean iteration", seconds(result.mean_s), f"p50 {seconds(result.p50_s)}, p99 {seconds(result.p99_s)}"),
        (f"{samples}/s", rate(result.samples_per_s), f"on {prediction.n_gpus:,} GPUs"),
    ]
    if result.tokens_per_s is not None:
        entries.append(("tokens/s", rate(result.tokens_per_s), f"{rate(prediction.tokens_per_s_per_gpu)} of a GPU"))
    if prediction.mfu is not None:
        entries.append(("MFU", percent(prediction.mfu), f"HFU {percent(prediction.hfu)}, undisturbed"))
    fits = "fits" if result.fits else "does not fit"
    entries += [
        (
            "peak memory, reserved",
            f"{result.peak_reserved_gib:.1f} GiB",
            f"of {prediction.memory_limit_gib:.1f}: {fits}",
        ),
        ("whole run", seconds(result.total_s), f"{request.num_iterations:,} iterations"),
        ("GPU hours", f"{bill.gpu_hours:,.2f}", f"{bill.energy_kwh:,.2f} kWh"),
    ]
    if bill.dollars is not None:
        entries.append(("cost of the run", dollars(bill.dollars), f"{dollars(bill.dollars_per_hour)} per hour"))
    return Figures(tuple(entries))


def _advice(rows: Sequence[Advice], sample: str) -> list[Part]:
    """Returns the recommended changes, each simulated."""
    parts: list[Part] = [Heading("What would help")]
    if not rows:
        return [*parts, Text("None of the simulated changes improves this run by 1 % or more.")]
    table = tuple(
        (
            each.title,
            each.aim,
            f"{each.gain:+.1%}",
            f"{rate(each.before.samples_per_s)} to {rate(each.after.samples_per_s)}",
            f"{each.before.peak_reserved_gib:.1f} to {each.after.peak_reserved_gib:.1f}",
            each.caveat,
        )
        for each in rows
    )
    columns = ("change", "for", "gain", f"{sample}s/s", "memory, GiB", "what else it changes")
    how = "Forerun simulated each change. The gain is the increase of throughput over the run as it is."
    return [*parts, Text(how, "note"), Table(columns, table, numeric=frozenset({2, 3, 4}))]


def _iterations(result: RunResult) -> list[Part]:
    """Describes the differences between iterations."""
    every = result.iterations
    equal = "They are all alike." if len(every) == 1 else f"{len(every):,} of them, or runs of equal ones, differ."
    slowest = sorted(every, key=lambda each: (-each.step_time_s, each.first))[:_SLOWEST]
    parts: list[Part] = [
        Heading("Iterations"),
        Text(f"{result.request.num_iterations:,} iterations by cause. {equal}"),
        iterations_plot(every),
    ]
    if len(every) > 1:
        parts.append(
            Table(
                ("iteration", "time", "samples", "slowest rank", "what sets it apart"),
                tuple(_iteration(each) for each in slowest),
                f"The {len(slowest)} slowest",
                numeric=frozenset({0, 1, 2, 3}),
            )
        )
    return parts


def _iteration(each: Iteration) -> tuple[str, ...]:
    last = each.first + each.repeats - 1
    number = f"{each.first:,}" if each.repeats == 1 else f"{each.first:,} to {last:,}"
    slowest = "" if each.slowest_rank < 0 else f"{each.slowest_rank:,}"
    return number, seconds(each.step_time_s), f"{each.samples:,}", slowest, each.note
