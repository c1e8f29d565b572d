"""Plots of searches: the distribution of the plans, the best for each pair of values, and of each point of a range."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any

from forerun.interfaces.report.figures import rate, seconds
from forerun.interfaces.report.heat_cells import LOOKS, Cell, axis_name, heat_cells, heat_title, label_lines
from forerun.interfaces.report.page import Plot, plot_text
from forerun.interfaces.report.plots import axis, far_apart, hatch, layout, rounded
from forerun.interfaces.report.plots_of_studies import line
from forerun.interfaces.report.series import found_too_large, time_and_memory, time_unit
from forerun.interfaces.report.style import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, VERMILLION, Look
from forerun.interfaces.report.wording import plan_words

if TYPE_CHECKING:
    from forerun.answers.search.front import Front
    from forerun.answers.search.heat import HeatMap
    from forerun.answers.search.result import SearchResult
    from forerun.answers.search.sweep import Sweep, SweepPoint
    from forerun.interfaces.report.histogram import Bin


@dataclass(frozen=True, slots=True)
class LineLook:
    """Makes a line different from others, also in grey; names are plotly's."""

    colour: str
    symbol: str
    dash: str


LINE_LOOKS = (
    LineLook(BLUE, "circle", "solid"),
    LineLook(VERMILLION, "square", "dash"),
    LineLook(GREEN, "triangle-up", "dot"),
    LineLook(ORANGE, "diamond", "dashdot"),
    LineLook(PURPLE, "x", "solid"),
    LineLook(BLACK, "star", "dash"),
)


@dataclass(frozen=True, slots=True)
class Line:
    """Points in the order of x."""

    label: str
    x: list[int]
    points: list[SweepPoint]


@dataclass(frozen=True, slots=True)
class Panel:
    """A figure of points; the title names its unit."""

    title: str
    value: Callable[[SweepPoint], float]


def x_name(sweep: Sweep) -> str:
    """Returns the title of the x axis."""
    return "global batch, sequences" if _has_one_size(sweep) else "GPUs, number"


def lines(sweep: Sweep) -> list[Line]:
    """Returns points where something fits: a line over GPUs for each batch, or one over batches for one number of
    GPUs."""
    found = [point for point in sweep.points if point.best is not None]
    if _has_one_size(sweep):
        return [Line(f"{found[0].n_gpus:,} GPUs", [point.global_batch for point in found], found)] if found else []
    by_batch: dict[int, list[SweepPoint]] = {}
    for point in found:
        by_batch.setdefault(point.global_batch, []).append(point)
    return [
        Line(f"batch {batch:,}", [point.n_gpus for point in some], some) for batch, some in sorted(by_batch.items())
    ]


def figures_of(sweep: Sweep) -> list[Panel]:
    """Returns the two figures to draw: tokens/s, and dollars per token if known, else tokens/s of a GPU."""
    best = [point.best for point in sweep.points if point.best is not None]
    if all(each.dollars_per_billion_tokens is not None for each in best):
        each = Panel("price of tokens, dollars per billion", _dollars)
    else:
        each = Panel("throughput of a GPU, tokens/s", lambda point: (point.tokens_per_s or 0.0) / point.n_gpus)
    return [Panel("throughput, tokens/s", lambda point: point.tokens_per_s or 0.0), each]


def hover(point: SweepPoint) -> str:
    """Returns a point in one line."""
    question = f"{point.n_gpus:,} GPUs, batch {point.global_batch:,}"
    if point.best is None:
        return f"{question}: {point.reason}"
    figures = f"{seconds(point.best.step_time_s)}, {rate(point.tokens_per_s)} tokens/s"
    return f"{question}: {figures}, {plan_words(point.best.own_plan())}"


def _has_one_size(sweep: Sweep) -> bool:
    return len({point.n_gpus for point in sweep.points}) == 1


def _dollars(point: SweepPoint) -> float:
    return 0.0 if point.best is None else point.best.dollars_per_billion_tokens or 0.0


_MOST_POINTS = 1500
"""the most plans to draw: of more, the best ones and every n-th of the others"""
_ROW_PX = 34
_ROOM = 0.06
"""margin of an axis beyond the values on each side, as a share of their range"""
_FAINT = 0.4
"""opacity of hatches under words, from 0 to 1"""
_GAP = 0.05
"""the gap between cells, as a share of a cell"""


def runtimes_plot(bins: Sequence[Bin]) -> Plot:
    """Shows the spread of a search's step times."""
    unit, size = time_unit(max(each.high_s for each in bins))
    names = [f"{each.low_s / size:.3g} to {each.high_s / size:.3g}" for each in bins]
    parts = (
        ("simulated", [each.simulated for each in bins], {"color": BLUE}),
        (
            "lower bounds, not simulated",
            [each.bounded for each in bins],
            {"color": GREY, "pattern": hatch("/")},
        ),
    )
    data = [
        {
            "type": "bar",
            "name": name,
            "x": names,
            "y": counts,
            "marker": look,
            "hovertemplate": f"%{{y}} plans, %{{x}} {unit}",
        }
        for name, counts, look in parts
        if any(counts)
    ]
    about = f"Step times from {seconds(bins[0].low_s)} to {seconds(bins[-1].high_s)}"
    x = axis(f"time of a step, {unit} (bins of equal ratio)", type="category", fixedrange=True)
    return Plot(data, layout(x, axis("plans, number"), barmode="stack", showlegend=True), about)


def plans_plot(result: SearchResult) -> Plot:
    """Returns the time and memory of every plan that was simulated; the least time of those that do not fit."""
    fitting = [time_and_memory(each) for each in _some(result.ranked)]
    too_large = _some(found_too_large(result))
    shown = [*fitting, *too_large]
    unit, size = time_unit(max((each.step_s for each in shown), default=1.0))
    looks = (
        ("fits", fitting, {"color": BLUE, "size": 8, "opacity": 0.7}),
        (
            "does not fit, lower bound of time",
            too_large,
            {"color": VERMILLION, "size": 8, "symbol": "x", "opacity": 0.7},
        ),
        (f"best by {result.objective}", fitting[:1], {"color": BLACK, "size": 16, "symbol": "star"}),
    )
    data: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "x": rounded([each.gib for each in rows]),
            "y": rounded([each.step_s / size for each in rows]),
            "text": [plot_text(plan_words(each.plan)) for each in rows],
            "hovertemplate": f"%{{text}}<br>%{{y:.4~g}} {unit}, %{{x:.4~g}} GiB",
            "marker": look,
        }
        for name, rows, look in looks
        if rows
    ]
    data += [] if result.front is None else [_front(result.front, size)]
    drawn = shown + [time_and_memory(each) for each in (result.front.places if result.front else ())]
    times = [each.step_s / size for each in drawn] or [1.0]
    limit = result.memory_limit_gib
    y = _closely(f"time of a step, {unit}", times)
    low, high = (10**end for end in y["range"]) if y.get("type") == "log" else y["range"]
    data.append(line(f"limit of memory, {limit:.1f} GiB", [limit] * 2, rounded([low, high]), BLACK, "dash"))
    x = _closely("peak of reserved memory, GiB", [limit, *(each.gib for each in drawn)], log=False)
    about = f"Time and memory of {len(shown)} plans that were simulated"
    return Plot(data, layout(x, y, hovermode="closest"), about, 460)


def _closely(title: str, values: Sequence[float], *, log: bool = True) -> dict[str, Any]:
    """Returns an axis that fits the values; with `log` it is logarithmic where they are far apart."""
    if log and (wide := far_apart(title, values)).get("type") == "log":
        return wide
    room = _ROOM * (max(values) - min(values)) or _ROOM * max(values) or 1.0
    return axis(title, range=rounded([max(0.0, min(values) - room), max(values) + room]))


def _some(rows: Sequence[Any]) -> Sequence[Any]:
    """Returns the first, and every n-th of the rest where there are many."""
    if len(rows) <= _MOST_POINTS:
        return rows
    first = _MOST_POINTS // 3
    return (*rows[:first], *rows[first :: -(-(len(rows) - first) // (_MOST_POINTS - first))])


def _front(front: Front, size: float) -> dict[str, Any]:
    """Returns the Pareto front as steps; `size` is seconds of a unit of the axis."""
    x = rounded([each.peak_reserved_gib for each in front.places])
    y = rounded([each.step_time_s / size for each in front.places])
    steps = line("Pareto front", x, y, GREEN, "solid")
    return (
        steps
        | {"mode": "lines+markers", "line": {"color": GREEN, "width": 2.5, "shape": "vh"}}
        | {"marker": {"symbol": "circle-open", "size": 13, "color": GREEN, "line": {"width": 2.5}}}
    )


def sweep_plot(sweep: Sweep, panel: Panel) -> Plot:
    """Returns one figure of the best plan of every point of a sweep."""
    shown = lines(sweep)
    data = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": each.label,
            "x": each.x,
            "y": rounded([panel.value(point) for point in each.points]),
            "marker": {"size": 10, "color": look.colour, "symbol": look.symbol},
            "line": {"color": look.colour, "width": 2, "dash": look.dash},
            "customdata": [plot_text(hover(point)) for point in each.points],
            "hovertemplate": "%{customdata}<extra></extra>",
        }
        for each, look in zip(shown, cycle(LINE_LOOKS), strict=False)
    ]
    values = [panel.value(point) for each in shown for point in each.points]
    ticks = sorted({x for each in shown for x in each.x})
    x = axis(f"{x_name(sweep)} (logarithmic)", type="log", tickvals=ticks, ticktext=[f"{n:,}" for n in ticks])
    about = f"{panel.title} over {x_name(sweep)}: {len(shown)} lines of {len(values)} points"
    return Plot(data, layout(x, far_apart(panel.title, values), showlegend=True, hovermode="closest"), about)


def heat_plot(shown: HeatMap) -> Plot:
    """Returns the best plan for each pair of values. Cells are bars, which can have hatches."""
    cells = sorted(heat_cells(shown), key=lambda cell: cell.winner)  # the legend shows the first one
    by_kind = {known: [cell for cell in cells if cell.known == known] for known in LOOKS}
    data = [_cells(LOOKS[known], some) for known, some in by_kind.items() if some]
    columns, rows = len(shown.x_values), len(shown.y_values)
    more = {"fixedrange": True, "showgrid": False, "type": "linear"}
    x = axis(axis_name(shown.x), tickvals=list(range(columns)), ticktext=_texts(shown.x_values), **more)
    y = axis(axis_name(shown.y), tickvals=[i + 0.5 for i in range(rows)], ticktext=_texts(shown.y_values), **more)
    ranges = {"xaxis": x | {"range": [-0.5, columns - 0.5]}, "yaxis": y | {"range": [0, rows]}}
    title = heat_title(shown)
    found = [cell.hover for cell in cells if cell.winner][:1]
    about = f"{title}: {len(cells)} cells" + "".join(f"; the best is {words}" for words in found)
    plot_layout = layout(x, y, barmode="overlay", bargap=_GAP, showlegend=True, hovermode="closest") | ranges
    return Plot(data, plot_layout, about, 150 + _ROW_PX * rows)


def _cells(look: Look, cells: Sequence[Cell]) -> dict[str, Any]:
    return {
        "type": "bar",
        "name": look.label,
        "x": [cell.column for cell in cells],
        "base": [cell.row + _GAP / 2 for cell in cells],
        "y": [1 - _GAP] * len(cells),
        "text": [plot_text(cell.words) for cell in cells],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "insidetextfont": {"color": ["#ffffff" if cell.dark else BLACK for cell in cells]},
        "customdata": [plot_text(cell.hover) for cell in cells],
        "hovertemplate": "%{customdata}<extra></extra>",
        "marker": {
            "color": [cell.colour for cell in cells],
            "pattern": hatch(look.hatch) | {"fgopacity": _FAINT},
            "line": {
                "color": [VERMILLION if cell.winner else GREY for cell in cells],
                "width": [3 if cell.winner else 0.5 for cell in cells],
            },
        },
    }


def _texts(values: Sequence[str]) -> list[str]:
    return ["<br>".join(map(plot_text, label_lines(value))) for value in values]
