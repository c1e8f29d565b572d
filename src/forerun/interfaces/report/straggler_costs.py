"""Shows the cost of stragglers in a job as tables, plain data and a page. Console and page have the same rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.text import Text

from forerun.interfaces.report.console import make_table, print_title
from forerun.interfaces.report.figures import percent, seconds
from forerun.interfaces.report.heat_cells import shade
from forerun.interfaces.report.page import Document, Figures, Heading, Listing, Part, Plot, Table
from forerun.interfaces.report.page_sections import reproduce_section
from forerun.interfaces.report.plots import axis, labelled_bars, layout, rounded
from forerun.interfaces.report.style import BLUE, GREEN, VERMILLION

if TYPE_CHECKING:
    from forerun.answers.stragglers.study import StragglerCosts

TIME_COLUMNS = ("mean step", "time", "")
_FEW = 10
"""stages, replicas and ranks that the tables list"""
_MOST_TICKS = 16
"""stages or replicas that an axis names"""
_CELL_PX, _LEAST_PX = 28, 160
"""height of the row of a stage, and the least of all rows"""


def heading(costs: StragglerCosts) -> str:
    """Returns the line that says which job this is."""
    recorded = costs.recorded
    return (
        f"{recorded.name}: {len(recorded.steps):,} steps of {recorded.stages:,} stages x {recorded.replicas:,} replicas"
    )


def subtitle(costs: StragglerCosts) -> str:
    """Returns a line on the loss of the job."""
    return (
        f"Stragglers slow it by {costs.slowdown - 1.0:.1%}: without them, with all operations of a kind alike, it would"
        f" need {percent(costs.wasted_share)} less GPU time"
    )


def time_rows(costs: StragglerCosts) -> list[tuple[str, str, str]]:
    """Returns the mean times of a step as rows of TIME_COLUMNS."""
    return [
        ("recorded", seconds(float(costs.recorded.step_s.mean())), ""),
        ("replayed", seconds(float(costs.replayed_s.mean())), "each operation starts as soon as it can"),
        ("all alike", seconds(costs.alike_s), "mean of computations, median of communications"),
    ]


def slowdown_tables(costs: StragglerCosts) -> list[tuple[tuple[str, str], list[tuple[str, str]]]]:
    """Returns tables of the job's slowdown if only one part of it keeps its recorded times, the slowest first."""
    return [
        (("operations", "slowdown"), _rows(costs.by_operation, len(costs.by_operation))),
        (("stage", "slowdown"), _rows(costs.by_stage)),
        (("replica", "slowdown"), _rows(costs.by_replica)),
        (("rank", "slowdown"), _rows(costs.by_rank)),
    ]


def _rows(slowdowns: Mapping[Any, float], most: int = _FEW) -> list[tuple[str, str]]:
    return [(str(key), f"{value:.3f}") for key, value in list(slowdowns.items())[:most]]


def explained(costs: StragglerCosts) -> list[str]:
    """Returns how much of the loss the last stage and the slowest ranks explain."""
    if isnan(costs.last_stage_share):
        return ["Stragglers cost nothing."]
    ranks = ", ".join(map(str, costs.slowest_ranks[:_FEW]))
    plural = "s" if len(costs.slowest_ranks) > 1 else ""
    return [
        f"A last stage like the others would win back {_whole_percent(costs.last_stage_share)} of the loss.",
        f"The slowest 3 % of the ranks (rank{plural} {ranks}), if like the others, would win back"
        f" {_whole_percent(costs.slowest_ranks_share)}.",
    ]


def _whole_percent(share: float) -> str:
    return f"{round(100.0 * share):,} %"


def print_costs(out: Console, costs: StragglerCosts) -> None:
    """Prints the cost of stragglers in a job."""
    out.print(Text(heading(costs), style="bold"))
    out.print(subtitle(costs), soft_wrap=True)
    out.print()
    out.print(make_table("lrl", TIME_COLUMNS, time_rows(costs), gap=2))
    out.print()
    print_title(out, "Slowdown if only these keep their recorded times")
    for columns, body in slowdown_tables(costs):
        out.print(make_table("lr", columns, body, gap=2))
        out.print()
    for line in (*explained(costs), *costs.recorded.notes):
        out.print(line, soft_wrap=True)


def costs_record(costs: StragglerCosts) -> dict[str, Any]:
    """Returns the cost of stragglers in a job as plain data. Keys contain the units."""
    return {
        "name": costs.recorded.name,
        "steps": len(costs.recorded.steps),
        "stages": costs.recorded.stages,
        "replicas": costs.recorded.replicas,
        "recorded_step_s": float(costs.recorded.step_s.mean()),
        "replayed_step_s": float(costs.replayed_s.mean()),
        "alike_step_s": costs.alike_s,
        "slowdown": costs.slowdown,
        "slowdown_by_delays": costs.delayed,
        "wasted_share": costs.wasted_share,
        "slowdown_by_operation": costs.by_operation,
        "slowdown_by_stage": costs.by_stage,
        "slowdown_by_replica": costs.by_replica,
        "slowdown_by_rank": costs.by_rank,
        "last_stage_share": None if isnan(costs.last_stage_share) else costs.last_stage_share,
        "slowest_ranks": list(costs.slowest_ranks),
        "slowest_ranks_share": None if isnan(costs.slowest_ranks_share) else costs.slowest_ranks_share,
        "notes": list(costs.recorded.notes),
    }


def step_rows(costs: StragglerCosts) -> list[Mapping[str, Any]]:
    """Returns a row for each step, for CSV; units are in the column names."""
    times = zip(costs.recorded.steps, costs.recorded.step_s.tolist(), costs.replayed_s.tolist(), strict=True)
    return [
        {
            "step": step,
            "recorded_s": recorded_s,
            "replayed_s": replayed_s,
            "alike_s": costs.alike_s,
            "slowdown": replayed_s / costs.alike_s,
        }
        for step, recorded_s, replayed_s in times
    ]


def costs_document(costs: StragglerCosts, command: str = "") -> Document:
    """Returns the page: the loss, its causes, ranks as a map, and the steps one by one."""
    parts: list[Part] = [
        Figures(
            (
                ("slowdown", f"{costs.slowdown:.3f}", "step time over that without stragglers"),
                ("GPU time lost", percent(costs.wasted_share), "to stragglers"),
                *((name, time, remark) for name, time, remark in time_rows(costs)),
            )
        ),
        Listing(tuple(explained(costs))),
        Heading("Operations"),
        _operations(costs),
        Heading("Stages and replicas"),
        _ranks(costs),
    ]
    parts += [
        Table(columns, tuple(body), numeric=frozenset({1}), caption=f"The slowest, by {columns[0]}")
        for columns, body in slowdown_tables(costs)[1:]
    ]
    parts += [Heading("Steps"), _steps(costs)]
    if costs.recorded.notes:
        parts.append(Listing(costs.recorded.notes))
    parts += reproduce_section(command, {}, "", ())
    return Document(heading(costs), subtitle(costs), tuple(parts))


def _operations(costs: StragglerCosts) -> Plot:
    bars = [(name, f"{value - 1.0:+.1%}", 100.0 * (value - 1.0)) for name, value in costs.by_operation.items()]
    said = "; ".join(f"{name}: {words}" for name, words, _ in bars)
    return labelled_bars(bars, "step time if only these are unequal, %", f"Slowdown by kind of operation: {said}")


def _ranks(costs: StragglerCosts) -> Plot:
    """Returns a cell for each stage and replica; the darker, the slower. Cells are bars, as those of a search."""
    ranks = costs.recorded.ranks
    values = np.vectorize(costs.by_rank.__getitem__)(ranks)
    stages, replicas = ranks.shape
    low, high = float(values.min()), float(values.max())
    cells = [(stage, replica, float(values[stage, replica])) for stage, replica in np.ndindex(ranks.shape)]
    said = [
        f"rank {ranks[stage, replica]}, stage {stage}, replica {replica}: {value:.3f}"
        for stage, replica, value in cells
    ]
    data = [
        {
            "type": "bar",
            "x": [replica for _, replica, _ in cells],
            "base": [stages - 1 - stage for stage, *_ in cells],
            "y": [1] * len(cells),
            "text": [f"{value:.2f}" for *_, value in cells],
            "customdata": said,
            "hovertemplate": "%{customdata}<extra></extra>",
            "marker": {"color": [shade((high - value) / (high - low) if high > low else 1.0) for *_, value in cells]},
        }
    ]
    more = {"fixedrange": True, "showgrid": False, "type": "linear"}
    x = axis("replica", tickvals=_ticks(replicas), ticktext=[str(i) for i in _ticks(replicas)], **more)
    places = [stages - i - 0.5 for i in _ticks(stages)]
    y = axis("stage", tickvals=places, ticktext=[str(i) for i in _ticks(stages)], **more)
    ranges = {"xaxis": x | {"range": [-0.5, replicas - 0.5]}, "yaxis": y | {"range": [0, stages]}}
    worst, slowdown = next(iter(costs.by_rank.items()))
    about = f"Slowdown by stage and replica; the largest is {slowdown:.3f} of rank {worst}"
    look = layout(x, y, barmode="overlay", bargap=0.0, showlegend=False, hovermode="closest") | ranges
    return Plot(data, look, about, 110 + max(_CELL_PX, _LEAST_PX // stages) * min(stages, _MOST_TICKS))


def _ticks(number: int) -> list[int]:
    """Returns the stages or replicas that an axis names."""
    return list(range(0, number, -(-number // _MOST_TICKS)))


def _steps(costs: StragglerCosts) -> Plot:
    steps = [str(step) for step in costs.recorded.steps]
    lines: Sequence[tuple[str, Sequence[float], str]] = (
        ("recorded", costs.recorded.step_s.tolist(), VERMILLION),
        ("replayed", costs.replayed_s.tolist(), BLUE),
        ("all alike", [costs.alike_s] * len(steps), GREEN),
    )
    data = [
        {"type": "scatter", "mode": "lines", "name": name, "x": steps, "y": rounded(times), "line": {"color": colour}}
        for name, times, colour in lines
    ]
    about = f"Times of {len(steps):,} steps: " + "; ".join(
        f"{name}, {seconds(max(times))} at most" for name, times, _ in lines
    )
    return Plot(data, layout(axis("step", type="category"), axis("seconds", rangemode="tozero")), about)
