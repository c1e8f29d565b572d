"""Documents: what the page of a run, of one prediction, and of a search says."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.analysis.bottlenecks import Bottlenecks, bottlenecks
from forerun.analysis.critical_path import critical_path
from forerun.analysis.prediction import Prediction
from forerun.analysis.reading import Simulation
from forerun.analysis.what_if import WhatIf
from forerun.experiment.advice import Advice
from forerun.experiment.answers import Answers
from forerun.experiment.result import Iteration, RunResult
from forerun.report.histogram import runtime_histogram
from forerun.report.page import Document, Figures, Heading, Part, Table, Text
from forerun.report.page_plots import iterations_plot
from forerun.report.page_plots_of_studies import plans_plot, runtimes_plot
from forerun.report.page_sections import (
    bill_section,
    bottleneck_sections,
    dollars,
    explain_section,
    figures,
    memory_sections,
    reproduce_section,
    sensitivity_sections,
    time_sections,
    warnings,
)
from forerun.report.records import plan_record
from forerun.report.wording import percent, plan_words, rate, seconds
from forerun.search.result import SearchResult

_SLOWEST = 8
"""iterations that the page of a run lists"""
_REASONS = 8


def run_document(result: RunResult, answers: Answers | None, command: str = "") -> Document:
    """The page of a run; without `answers`, what it takes further simulations to tell is left out.

    `command` is what repeats the run.
    """
    request, prediction, simulation = result.request, result.prediction, result.simulation
    further = [] if answers is None else sensitivity_sections(answers.sensitivities)
    subtitle = f"{prediction.model} on {prediction.n_gpus:,} x {prediction.cluster}, {_plan_of(prediction)}"
    return Document(
        f"{request.name}: a run of {request.num_iterations:,} iterations",
        subtitle,
        (
            _run_figures(result),
            *warnings(prediction),
            *(Text(note, "note") for note in result.notes),
            *bottleneck_sections(bottlenecks_of(result, answers)),
            *([] if answers is None else _advice(answers.advice, request.sample)),
            *_iterations(result),
            *time_sections(simulation, critical_path(simulation) if answers is None else answers.path),
            *further,
            *memory_sections(simulation),
            *bill_section(result.bill, f"{request.sample}s"),
            *reproduce_section(command, request.config, "The experiment, with every key", request.echo),
            *explain_section(prediction),
        ),
    )


def bottlenecks_of(result: RunResult, answers: Answers | None) -> Bottlenecks:
    """The bottlenecks of a run, also where nothing else was asked."""
    limits = result.request.thresholds
    if answers is not None:
        return answers.bottlenecks
    return bottlenecks(result.simulation, limits.compute, limits.memory, limits.network)


def prediction_document(simulation: Simulation, sensitivities: Sequence[WhatIf], command: str) -> Document:
    """The page of one prediction, of an unfolded `simulation`."""
    prediction = simulation.prediction
    return Document(
        f"{prediction.model} on {prediction.n_gpus:,} x {prediction.cluster}",
        _plan_of(prediction),
        (
            figures(prediction),
            *warnings(prediction),
            *bottleneck_sections(bottlenecks(simulation)),
            *time_sections(simulation, critical_path(simulation)),
            *sensitivity_sections(sensitivities),
            *memory_sections(simulation),
            *_plan(prediction, command),
            *explain_section(prediction),
        ),
    )


def search_document(
    result: SearchResult, top: int, found: tuple[Simulation, Sequence[WhatIf]] | None, command: str, again: str
) -> Document:
    """The page of a search. `found` is the best plan simulated whole and its sensitivities, None where nothing fits.

    `command` repeats the search, `again` predicts its best plan.
    """
    best, sensitivities = found or (None, ())
    question = (
        f"sequences of {result.seq_len:,} tokens, global batch {result.global_batch:,}, best by {result.objective}"
    )
    parts: list[Part] = []
    if best is not None:
        parts += [figures(best.prediction), *warnings(best.prediction)]
    else:
        parts.append(Text("Nothing fits in memory.", "warning"))
    parts += [*_ranking(result, top), *_spread(result), *_left_out(result)]
    if best is not None:
        parts += [
            *bottleneck_sections(bottlenecks(best)),
            *time_sections(best, critical_path(best)),
            *sensitivity_sections(sensitivities),
            *memory_sections(best),
            *_plan(best.prediction, command, again),
            *explain_section(best.prediction),
        ]
    else:
        parts += reproduce_section(command, {}, "")
    title = f"{result.model} on {result.n_gpus:,} x {result.cluster}: the best of {result.considered:,} plans"
    return Document(title, question, tuple(parts))


def _plan_of(prediction: Prediction) -> str:
    plan = prediction.plan
    if plan is None:
        return "a saved program"
    tokens = "" if prediction.tokens_per_s_per_gpu is None else f"sequences of {plan.seq_len:,} tokens, "
    return f"{plan_words(plan)}, {tokens}global batch {plan.global_batch:,}, stack {plan.stack}"


def _plan(prediction: Prediction, command: str, again: str = "") -> list[Part]:
    """What reproduces a prediction."""
    record = {} if prediction.plan is None else plan_record(prediction.plan)
    commands = command + (f"\n\n# the best plan alone\n{again}" if again else "")
    return reproduce_section(commands, record, "The plan, as a plan file (--plan-file)")


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
    fits = "fits" if prediction.fits else "does not fit"
    entries += [
        (
            "peak memory, reserved",
            f"{prediction.peak_reserved_gib:.1f} GiB",
            f"of {prediction.memory_limit_gib:.1f}: {fits}",
        ),
        ("whole run", seconds(result.total_s), f"{request.num_iterations:,} iterations"),
        ("GPU hours", f"{bill.gpu_hours:,.2f}", f"{bill.energy_kwh:,.2f} kWh"),
    ]
    if bill.dollars is not None:
        entries.append(("cost of the run", dollars(bill.dollars), f"{dollars(bill.dollars_per_hour)} per hour"))
    return Figures(tuple(entries))


def _advice(rows: Sequence[Advice], sample: str) -> list[Part]:
    """What would help, each change simulated."""
    parts: list[Part] = [Heading("What would help")]
    if not rows:
        return [*parts, Text("No change that was simulated makes this run better by a hundredth or more.")]
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
    how = "Each change was simulated before it was put here; the gain is in throughput over the run as it is."
    return [*parts, Text(how, "note"), Table(columns, table, numeric=frozenset({2, 3, 4}))]


def _iterations(result: RunResult) -> list[Part]:
    """How the iterations differ."""
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


def _ranking(result: SearchResult, top: int) -> list[Part]:
    if not result.ranked:
        return []
    rows = tuple(
        (
            str(place),
            plan_words(each.own_plan()) + ("!" if each.warnings else ""),
            seconds(each.step_time_s),
            rate(each.tokens_per_s_per_gpu),
            percent(each.mfu),
            f"{each.peak_reserved_gib:.1f}",
            percent(each.exposed_comm_s / each.step_time_s),
            percent(each.bubble_s / each.step_time_s),
        )
        for place, each in enumerate(result.top(top), 1)
    )
    columns = ("", "plan", "step time", "tokens/s/GPU", "MFU", "peak, GiB", "exposed comm.", "bubble")
    warned = next((each.warnings[0] for each in result.top(top) if each.warnings), None)
    note = [Text(f"! {warned}", "note")] if warned else []
    caption = f"The best {len(rows)} of {len(result.ranked):,} plans that fit and were simulated"
    return [Heading("The best plans"), Table(columns, rows, caption, numeric=frozenset({0, 2, 3, 4, 5, 6, 7})), *note]


def _spread(result: SearchResult) -> list[Part]:
    """How times and memory of the plans spread."""
    bins = runtime_histogram(result)
    parts: list[Part] = [Heading("Time and memory of the plans")] if bins or result.too_large else []
    if bins:
        parts.append(runtimes_plot(bins))
    if result.ranked:
        parts += [Text("Every point is a plan; the pointer shows which.", "hint"), plans_plot(result)]
    return parts


def _left_out(result: SearchResult) -> list[Part]:
    """Why the other plans are not among the best."""
    counts, limit = result.counts, result.memory_limit_gib
    worse = "larger" if result.objective == "memory" else "slower"
    rows = [("fit, and were simulated", f"{counts['ok']:,}", "")]
    rows += [(f"run out of {limit:.1f} GiB", f"{counts['out_of_memory']:,}", _most(result.out_of_memory))]
    rows += [(f"not simulated: a bound shows they are {worse}", f"{counts['skipped']:,}", "")]
    rows += [("impossible", f"{counts['impossible']:,}", "")]
    reasons = tuple(
        (rule, f"{number:,}", result.impossible_examples.get(rule, ""))
        for rule, number in list(result.impossible.items())[:_REASONS]
    )
    near = [(plan_words(each.plan), each.reason) for each in result.too_large[:_REASONS]]
    parts: list[Part] = [
        Heading("Why the others were left out"),
        Table(("what became of them", "plans", ""), tuple(rows), numeric=frozenset({1})),
    ]
    if near:
        parts.append(Table(("plan", "why it does not fit"), tuple(near), f"The {len(near)} nearest misses"))
    if reasons:
        caption = f"The {len(reasons)} most frequent of {len(result.impossible)} rules that plans break"
        parts.append(Table(("rule", "plans", "for example"), reasons, caption, numeric=frozenset({1})))
    return parts


def _most(causes: dict[str, int]) -> str:
    return ", ".join(f"{name} is the largest part of {number:,}" for name, number in causes.items())
