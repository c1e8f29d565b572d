"""The page of a range of searches: the best plan of each, the gain and cost of more GPUs, and the best of all in
detail."""

from __future__ import annotations

from forerun.answers.search.sweep import Sweep, SweepPoint, tokens_per_s
from forerun.interfaces.report.documents import InDetail, best_sections
from forerun.interfaces.report.figures import percent, rate, seconds
from forerun.interfaces.report.page import Document, Heading, Part, Table, Text
from forerun.interfaces.report.page_sections import dollars, figures, warnings
from forerun.interfaces.report.plots_of_searches import figures_of, sweep_plot
from forerun.interfaces.report.wording import plan_words


def sweep_document(sweep: Sweep, found: InDetail | None, command: str, again: str) -> Document:
    """Returns the page of a sweep. `found` is the best plan in detail, None if nothing fits.

    `command` repeats the sweep, `again` predicts its best plan.
    """
    parts: list[Part] = []
    if found is None:
        parts.append(Text("Nothing fits in memory anywhere.", "warning"))
    else:
        parts += [figures(found.simulation.prediction), *warnings(found.simulation.prediction)]
    parts += [Heading("The best plan of each search"), _points(sweep)]
    if found is not None:
        parts += [
            Heading("Gain of more GPUs or larger batches"),
            *(sweep_plot(sweep, each) for each in figures_of(sweep)),
        ]
    parts += _front(sweep)
    parts += best_sections(found, command, again)
    question = f"sequences of {sweep.seq_len:,} tokens, {len(sweep.points)} searches, best by {sweep.objective}"
    return Document(f"{sweep.model} on {sweep.cluster}: {_range(sweep)}", question, tuple(parts))


def _range(sweep: Sweep) -> str:
    gpus = [point.n_gpus for point in sweep.points]
    batches = [point.global_batch for point in sweep.points]
    return f"{_span(min(gpus), max(gpus))} GPUs, global batch {_span(min(batches), max(batches))}"


def _span(least: int, most: int) -> str:
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def _points(sweep: Sweep) -> Table:
    columns = ("GPUs", "batch", "step time", "tokens/s", "tokens/s/GPU", "MFU", "efficiency", "$ per 10^9 tokens")
    rows = tuple(
        (
            f"{point.n_gpus:,}",
            f"{point.global_batch:,}",
            *_figures(sweep, point),
            point.reason if point.best is None else plan_words(point.best.own_plan()) + _mark(sweep, point),
        )
        for point in sweep.points
    )
    caption = "Efficiency: tokens/s of a GPU over those with the fewest GPUs that run the same batch"
    return Table((*columns, "peak, GiB", "plan"), rows, caption, numeric=frozenset(range(9)))


def _mark(sweep: Sweep, point: SweepPoint) -> str:
    return f" (best by {sweep.objective})" if point is sweep.best else ""


def _figures(sweep: Sweep, point: SweepPoint) -> tuple[str, ...]:
    best = point.best
    if best is None:
        return ("",) * 7
    return (
        seconds(best.step_time_s),
        rate(point.tokens_per_s),
        rate(best.tokens_per_s_per_gpu),
        percent(best.mfu),
        percent(sweep.efficiency(point)),
        dollars(best.dollars_per_billion_tokens),
        f"{best.peak_reserved_gib:.1f}",
    )


def _front(sweep: Sweep) -> list[Part]:
    """Returns the plans that no other beats in everything."""
    if not sweep.front:
        return []
    rows = tuple(
        (
            f"{point.n_gpus:,}",
            f"{point.global_batch:,}",
            rate(tokens_per_s(plan)),
            dollars(plan.dollars_per_billion_tokens),
            f"{plan.peak_reserved_gib:.1f}",
            plan_words(plan.own_plan()),
        )
        for point, plan in sweep.front
    )
    columns = ("GPUs", "batch", "tokens/s", "$ per 10^9 tokens", "peak, GiB", "plan")
    unsure = [
        f"{point.n_gpus:,} GPUs, batch {point.global_batch:,}: {point.uncertain}"
        for point in sweep.points
        if point.uncertain
    ]
    return [
        Heading("The Pareto front"),
        Table(columns, rows, f"No other plan has {sweep.wishes}, or equals all of them", numeric=frozenset(range(5))),
        *(Text(f"The front of step time and memory is {line}.", "note") for line in unsure),
    ]
