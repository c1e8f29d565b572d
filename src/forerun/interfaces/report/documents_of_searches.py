"""Pages of searches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from forerun.answers.search.heat import HeatMap, telling_maps
from forerun.interfaces.report.documents import InDetail, best_sections
from forerun.interfaces.report.figures import percent, rate, seconds
from forerun.interfaces.report.heat_cells import heat_title, heat_words
from forerun.interfaces.report.histogram import runtime_histogram
from forerun.interfaces.report.page import Document, Heading, Part, Table, Text
from forerun.interfaces.report.page_sections import (
    figures,
    warnings,
)
from forerun.interfaces.report.plots_of_searches import heat_plot, plans_plot, runtimes_plot
from forerun.interfaces.report.wording import RENAMED, SAME, mark, notes_on, plan_words

if TYPE_CHECKING:
    from forerun.answers.search.front import Front
    from forerun.answers.search.result import SearchResult

MAPS = 4
"""heat maps on the page of a search by default"""
_REASONS = 8
"""rules and near misses that the page of a search lists"""


def search_document(
    result: SearchResult,
    top: int,
    found: InDetail | None,
    command: str,
    again: str,
    maps: Sequence[HeatMap] | None = None,
) -> Document:
    """Returns the page of a search. `found` is the best plan in detail, None if nothing fits.

    `command` repeats the search, `again` predicts its best plan. `maps` are the heat maps to show; those that say most
    unless given.
    """
    best = found.simulation if found else None
    question = (
        f"sequences of {result.seq_len:,} tokens, global batch {result.global_batch:,}, best by {result.objective}"
    )
    parts: list[Part] = []
    if best is not None:
        parts += [figures(best.prediction), *warnings(best.prediction)]
    else:
        parts.append(Text("Nothing fits in memory.", "warning"))
    parts += [*ranking_parts(result, top), *_spread(result)]
    parts += [*_maps(telling_maps(result, MAPS) if maps is None else maps), *_left_out(result)]
    parts += best_sections(found, command, again)
    title = f"{result.model} on {result.n_gpus:,} x {result.cluster}: the best of {result.considered:,} plans"
    return Document(title, question, tuple(parts))


def ranking_parts(result: SearchResult, top: int) -> list[Part]:
    """Returns the best plans as a table, and what to know of them; nothing if no plan fits."""
    if not result.ranked:
        return []
    rows = tuple(
        (
            str(place),
            plan_words(each.own_plan()) + mark(each),
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
    notes = [Text(note, "note") for note in notes_on(result.top(top))]
    caption = f"The best {len(rows)} of {len(result.ranked):,} plans that fit and were simulated"
    return [Heading("The best plans"), Table(columns, rows, caption, numeric=frozenset({0, 2, 3, 4, 5, 6, 7})), *notes]


def _spread(result: SearchResult) -> list[Part]:
    """Returns the distribution of the times and memory of the plans."""
    bins = runtime_histogram(result)
    parts: list[Part] = [Heading("Time and memory of the plans")] if bins or result.too_large else []
    if bins:
        parts.append(runtimes_plot(bins))
    if result.ranked:
        parts += [Text("Every point is a plan. Point at it to see its fields.", "hint"), plans_plot(result)]
    if result.front is not None:
        parts += [_front(result.front)]
    return parts


def _front(front: Front) -> Table:
    """Returns the Pareto front of step time and memory."""
    rows = tuple(
        (
            seconds(each.step_time_s),
            rate(each.tokens_per_s_per_gpu),
            f"{each.peak_reserved_gib:.1f}",
            plan_words(each.own_plan()),
        )
        for each in front.places
    )
    caption = f"The Pareto front: no other plan is as fast with as little memory. It is {front.certainty}."
    return Table(("step time", "tokens/s/GPU", "peak, GiB", "plan"), rows, caption, numeric=frozenset({0, 1, 2}))


def _maps(maps: Sequence[HeatMap]) -> list[Part]:
    """Returns heat maps, and how to read them."""
    if not maps:
        return []
    legend = (
        "Each cell shows the best plan with these two values. A plain number belongs to a simulated plan"
        " that no other plan of the cell can beat. A number with ≥ is the lower bound of plans that were"
        " not simulated. If nothing fits, the cell shows the GiB that the smallest plan needs. Darker"
        " cells are better, and a frame marks the best plan of all. A cell is empty if no plan is"
        " possible, or if another order of the mesh axes gives the same placement."
    )
    parts: list[Part] = [Heading("The best plan for each pair of values"), Text(legend, "note")]
    for shown in maps:
        parts += [Text(heat_title(shown)), heat_plot(shown)]
        parts += [Text(heat_words(shown), "note")] if heat_words(shown) else []
    return parts


def _left_out(result: SearchResult) -> list[Part]:
    """Returns the reasons why the other plans are not among the best."""
    counts, limit = result.counts, result.memory_limit_gib
    worse = "larger" if result.objective == "memory" else "slower"
    rows = [("fit, and were simulated", f"{counts['ok']:,}", "")]
    rows += [(f"run out of {limit:.1f} GiB", f"{counts['out_of_memory']:,}", _most(result.out_of_memory))]
    rows += [(f"not simulated: a lower bound proves that they are {worse}", f"{counts['skipped']:,}", "")]
    if counts.get("same"):
        rows += [(SAME, f"{counts['same']:,}", "")]
    if counts.get("renamed"):
        rows += [(RENAMED, f"{counts['renamed']:,}", "")]
    rows += [("impossible", f"{counts['impossible']:,}", "")]
    reasons = tuple(
        (rule, f"{number:,}", result.impossible_examples.get(rule, ""))
        for rule, number in list(result.impossible.items())[:_REASONS]
    )
    near = [(plan_words(each.plan), each.reason) for each in result.too_large[:_REASONS]]
    parts: list[Part] = [
        Heading("Why the others were left out"),
        Table(("what became of them", "plans", ""), tuple(rows), numeric=frozenset({1})),
        Text(f"{result.proof[0].upper()}{result.proof[1:]}."),
    ]
    if near:
        parts.append(Table(("plan", "why it does not fit"), tuple(near), f"The {len(near)} nearest misses"))
    if reasons:
        caption = f"The {len(reasons)} most frequent of {len(result.impossible)} rules that plans break"
        parts.append(Table(("rule", "plans", "for example"), reasons, caption, numeric=frozenset({1})))
    return parts


def _most(causes: dict[str, int]) -> str:
    return ", ".join(f"{name} is the largest part of {number:,}" for name, number in causes.items())
