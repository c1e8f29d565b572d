"""Plots: the common parts of every plotly figure, and the plots of a simulated step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, floor, log10
from typing import TYPE_CHECKING, Any

from forerun.answers.analysis.timeline_lanes import Lane, lanes
from forerun.answers.experiment.result import CAUSES, Iteration
from forerun.common.units import PS_PER_S
from forerun.interfaces.report.figures import percent, seconds
from forerun.interfaces.report.page import Plot, plot_text
from forerun.interfaces.report.series import FEW, LOG_FROM, Bar, MemoryCurve, iteration_bars, memory_curve, time_unit
from forerun.interfaces.report.style import BLACK, BLUE, CAUSE_LOOKS, VERMILLION, WORK_LOOKS, Look

if TYPE_CHECKING:
    from forerun.answers.analysis.bottlenecks import Usage
    from forerun.answers.analysis.prediction import Prediction
    from forerun.answers.analysis.reading import Simulation

_FONT = {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, Arial, sans-serif", "size": 13, "color": "#1a1a1a"}
_GRID = "#e4e4e4"
_TICKS = {"ticks": "outside", "ticklen": 6, "tickcolor": "#ffffff"}
_DIGITS = 6
"""significant digits of numbers in a page"""
_HATCHED = 0.004
"""slices shorter than this share of the step are too narrow for a hatch"""
_SHORT = 0.001
"""shares of the step below this are summed up as 'other'"""
_WRITTEN = 0.06
"""parts of a bar from this share on have their share written in them"""
_FAR = 2.5
"""a limit that is this many times higher than the rest is not drawn"""


def rounded(values: Sequence[float]) -> list[float]:
    """Rounds values to a few significant digits, which keeps a page small."""
    return [float(f"{value:.{_DIGITS}g}") for value in values]


def axis(title: str, **more: Any) -> dict[str, Any]:
    """Returns an axis with a title, which names the unit."""
    return {"title": {"text": title}, "gridcolor": _GRID, "zeroline": False, "automargin": True, **_TICKS} | more


def layout(x: dict[str, Any], y: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Returns the layout that plots share: the legend above the plot, the buttons above the legend."""
    return {
        "font": _FONT,
        "margin": {"l": 60, "r": 24, "t": 30 if more.get("showlegend") is False else 66, "b": 50},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "paper_bgcolor": "#ffffff",
        "plot_bgcolor": "#ffffff",
        "hoverlabel": {"align": "left", "bgcolor": "#ffffff", "bordercolor": BLACK, "font": _FONT},
        "xaxis": x,
        "yaxis": y,
    } | more


def hatch(shape: str | list[str]) -> dict[str, Any]:
    """Returns white lines over the colour of a bar."""
    return {"shape": shape, "fillmode": "overlay", "fgcolor": "#ffffff", "size": 7, "solidity": 0.25}


def far_apart(title: str, values: Sequence[float]) -> dict[str, Any]:
    """Returns an axis for `values`: logarithmic if they are far apart, with ticks at 1, 2 and 5 of each decade."""
    if not values or max(values) < LOG_FROM * min(values):
        return axis(title, rangemode="tozero")
    low, high = log10(min(values)), log10(max(values))
    ticks = [digit * 10.0**exponent for exponent in range(floor(low) - 1, ceil(high) + 1) for digit in (1, 2, 5)]
    room = 0.08 * (high - low) + 0.05
    return axis(
        f"{title} (logarithmic)",
        type="log",
        range=rounded([low - room, high + room]),
        tickvals=rounded(ticks),
        ticktext=[f"{tick:,.10g}" for tick in ticks],
    )


def marker(look: Look) -> dict[str, Any]:
    """Returns the marker of a bar, which has its own colour and hatch."""
    return {"color": look.colour, "pattern": hatch(look.hatch), "line": {"width": 0.5, "color": "#ffffff"}}


def stacked_areas(x: Sequence[float], parts: Sequence[tuple[Look, Sequence[float]]], unit: str) -> list[dict[str, Any]]:
    """Returns stacked parts; every level holds from its x to the next one."""
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "stackgroup": "all",
            "name": look.label,
            "x": rounded(x),
            "y": rounded(part),
            "line": {"shape": "hv", "width": 0.5, "color": look.colour},
            "fillcolor": look.colour,
            "fillpattern": {"shape": look.hatch, "fgcolor": "#ffffff", "bgcolor": look.colour, "size": 7},
            "hovertemplate": f"%{{y:.4~g}} {unit}",
        }
        for look, part in parts
    ]


def labelled_bars(rows: Sequence[tuple[str, str, float]], title: str, about: str, hover: Sequence[str] = ()) -> Plot:
    """Returns horizontal bars of (name, value in words, percent), with the value in the label; `hover` adds a text to
    each."""
    data = {
        "type": "bar",
        "orientation": "h",
        "y": [f"{plot_text(name)}<br>{plot_text(words)}" for name, words, _ in rows],
        "x": rounded([value for _, _, value in rows]),
        "customdata": [plot_text(text) for text in hover or [""] * len(rows)],
        "hovertemplate": "%{y}<br>%{customdata}<extra></extra>" if hover else "%{y}<extra></extra>",
        "marker": {"color": [BLUE if value < 0 or not hover else VERMILLION for _, _, value in rows]},
    }
    x = axis(title, fixedrange=True, zeroline=True, zerolinecolor=BLACK, zerolinewidth=1.5)
    y = axis("", autorange="reversed", fixedrange=True)
    return Plot([data], layout(x, y, showlegend=False, bargap=0.3), about, 80 + 44 * max(1, len(rows)))


def shares_plot(rows: Sequence[tuple[str, str, float]], about: str) -> Plot:
    """Returns the bars of shares of the step, of 1: (name, value in words, share)."""
    said = [(name, f"{percent(share)}, {words}", 100 * share) for name, words, share in rows]
    return labelled_bars(said, "share of the step, %", about)


def step_plot(prediction: Prediction) -> Plot:
    """Shows where the time of the step goes on the slowest rank."""
    step = prediction.step_time_s
    causes = sorted(prediction.breakdown.items(), key=lambda item: -item[1])
    rows = [(WORK_LOOKS[name].label, seconds(time), time / step) for name, time in causes if time / step >= _SHORT]
    other = step - sum(time for _, time in causes if time / step >= _SHORT)
    rows += [("other", seconds(other), other / step)] if other / step >= _SHORT else []
    return shares_plot(rows, f"The step of {seconds(step)} by cause: {_said(rows)}")


def use_plot(uses: Sequence[Usage]) -> Plot:
    """Shows the use of each resource, and the thresholds."""
    over = [use.is_bottleneck for use in uses]
    names = [f"{use.name}, {percent(use.value)}" + ("<br>a bottleneck" if use.is_bottleneck else "") for use in uses]
    bars = {
        "type": "bar",
        "orientation": "h",
        "name": "used",
        "y": names,
        "x": rounded([100 * use.value for use in uses]),
        "hoverinfo": "y",
        "marker": {
            "color": [VERMILLION if each else BLUE for each in over],
            "pattern": hatch(["/" if each else "" for each in over]),
        },
        "showlegend": False,
    }
    marks = {
        "type": "scatter",
        "mode": "markers",
        "name": "threshold of a bottleneck",
        "x": rounded([100 * use.threshold for use in uses]),
        "y": names,
        "marker": {"symbol": "line-ns-open", "size": 30, "color": BLACK, "line": {"width": 3}},
        "hovertemplate": "%{y}: a bottleneck from %{x:.3~g} % on<extra></extra>",
    }
    said = "; ".join(f"{use.name} {percent(use.value)}" for use in uses)
    x = axis("share that is used, %", range=[0, max(105.0, *(105 * use.value for use in uses))], fixedrange=True)
    y = axis("", autorange="reversed", fixedrange=True)
    return Plot([bars, marks], layout(x, y), f"Use of resources: {said}", 150 + 46 * len(uses))


def timeline_plot(simulation: Simulation) -> Plot:
    """Shows the work of each stream of the pace-setting rank over the step."""
    shown = lanes(simulation, simulation.slowest)
    step_ps = simulation.timeline.end_of_step_ps
    about = f"What each of {len(shown)} streams does over the step of {seconds(step_ps / PS_PER_S)}"
    return lanes_plot(shown, step_ps, about)


def lanes_plot(shown: Sequence[Lane], step_ps: int, about: str) -> Plot:
    """Shows lanes over the time from 0 to `step_ps`."""
    unit, size = time_unit(step_ps / PS_PER_S)
    found = {each.work for lane in shown for each in lane.slices}
    data = [_slices(shown, work, PS_PER_S * size, step_ps) for work in WORK_LOOKS if work in found]
    names = [lane.label for lane in shown]
    x = axis(f"time in the step, {unit}", range=rounded([0, step_ps / PS_PER_S / size]))
    y = axis("", categoryorder="array", categoryarray=names[::-1], fixedrange=True)
    more = {"barmode": "overlay", "bargap": 0.15, "dragmode": "zoom", "hovermode": "closest"}
    return Plot(data, layout(x, y, **more), about, 210 + 40 * len(shown))


def _slices(shown: Sequence[Lane], work: str, scale: float, step_ps: int) -> dict[str, Any]:
    """Returns the slices of one kind of work on all lanes; `scale` is picoseconds of a unit of the axis."""
    look = WORK_LOOKS[work]
    every = [(lane.label, each) for lane in shown for each in lane.slices if each.work == work]
    hatches = [look.hatch if each.end_ps - each.start_ps >= _HATCHED * step_ps else "" for _, each in every]
    return {
        "type": "bar",
        "orientation": "h",
        "name": look.label,
        "y": [name for name, _ in every],
        "base": rounded([each.start_ps / scale for _, each in every]),
        "x": rounded([(each.end_ps - each.start_ps) / scale for _, each in every]),
        "customdata": [
            [plot_text(each.text), seconds(each.start_ps / PS_PER_S), seconds(each.busy_ps / PS_PER_S)]
            for _, each in every
        ],
        "hovertemplate": "%{customdata[0]}<br>starts at %{customdata[1]}, runs for %{customdata[2]}",
        "marker": {"color": look.colour, "pattern": hatch(hatches), "line": {"width": 0}},
    }


def memory_plot(simulation: Simulation) -> Plot:
    """Returns allocated memory of the fullest rank by category over the step, with the device's limit."""
    curve, prediction = memory_curve(simulation), simulation.prediction
    unit, size = time_unit(curve.end_s)
    times = [time / size for time in (*curve.time_s, curve.end_s)]
    data = stacked_areas(times, [(look, [*part, part[-1]]) for look, part in curve.parts_gib], "GiB")
    peak, limit = curve.total_gib[curve.peak], prediction.memory_limit_gib
    highest = 1.12 * peak
    if limit <= _FAR * peak:
        highest = 1.08 * max(limit, peak)
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": f"limit of the device, {limit:.1f} GiB",
                "x": rounded([0, times[-1]]),
                "y": rounded([limit, limit]),
                "line": {"dash": "dash", "color": BLACK, "width": 2},
                "hoverinfo": "skip",
            }
        )
    x = axis(f"time in the step, {unit}", range=rounded([0, times[-1]]))
    y = axis("allocated memory, GiB", range=rounded([0, highest]))
    more = {"hovermode": "x unified", "hoverdistance": -1, "annotations": [_peak_note(curve, peak, size)]}
    about = f"Allocated memory of {curve.rank_class} over the step; the peak is {peak:.2f} GiB"
    return Plot(data, layout(x, y, **more), about, 430)


def _peak_note(curve: MemoryCurve, peak: float, size: float) -> dict[str, Any]:
    at_s = curve.time_s[curve.peak]
    x, y = rounded([at_s / size, peak])
    late = at_s > 0.6 * curve.end_s
    return {
        "x": x,
        "y": y,
        "text": f"peak {peak:.2f} GiB",
        "showarrow": True,
        "arrowhead": 2,
        "ax": -50 if late else 50,
        "ay": -18,
        "bgcolor": "#ffffff",
    }


def iterations_plot(iterations: Sequence[Iteration]) -> Plot:
    """Returns the time of iterations by cause: a named bar each where there are few, else over the number of the
    iteration."""
    bars = iteration_bars(iterations)
    unit, size = time_unit(max(sum(bar.breakdown_s.values()) for bar in bars))
    parts = [
        (CAUSE_LOOKS[name], heights)
        for name in CAUSES
        if any(heights := [bar.breakdown_s.get(name, 0.0) / size for bar in bars])
    ]
    y = axis(f"time of an iteration, {unit}", rangemode="tozero")
    about = f"The time of {len(bars)} bars of iterations by cause"
    if len(bars) <= FEW:
        data, x = _named_bars(bars, parts, unit), axis("iteration, number", type="category", fixedrange=True)
        return Plot(data, layout(x, y, barmode="stack", bargap=0.45), about)
    edges = [float(bar.first) for bar in bars] + [float(bars[-1].first + bars[-1].count)]
    data = stacked_areas(edges, [(look, [*heights, heights[-1]]) for look, heights in parts], unit)
    x = axis("iteration, number", range=[edges[0], edges[-1]])
    return Plot(data, layout(x, y, hovermode="x unified", hoverdistance=-1), about)


def _named_bars(bars: Sequence[Bar], parts: Sequence[tuple[Look, Sequence[float]]], unit: str) -> list[dict[str, Any]]:
    labels = [plot_text(bar.label) + (f"<br>{plot_text(bar.note)}" if bar.note else "") for bar in bars]
    totals = [sum(column) or 1.0 for column in zip(*(heights for _, heights in parts), strict=True)]
    shares = [[height / total for height, total in zip(heights, totals, strict=True)] for _, heights in parts]
    return [
        {
            "type": "bar",
            "name": look.label,
            "x": labels,
            "y": rounded(heights),
            "text": [f"{share:.0%}" if share >= _WRITTEN else "" for share in of_bars],
            "textposition": "inside",
            "insidetextanchor": "middle",
            "textangle": 0,
            "marker": marker(look),
            "hovertemplate": f"%{{y:.4~g}} {unit}",
        }
        for (look, heights), of_bars in zip(parts, shares, strict=True)
    ]


def causes_plot(rows: Sequence[tuple[str, Mapping[str, float], str]], about: str) -> Plot:
    """Returns step times by CAUSES side by side: (name, cause -> seconds, what else to say under the name)."""
    longest = max((sum(parts.values()) for _, parts, _ in rows), default=1.0) or 1.0
    unit, size = time_unit(longest)
    names = [f"{plot_text(name)}<br>{plot_text(words)}" for name, _, words in rows]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": CAUSE_LOOKS[cause].label,
            "y": names,
            "x": rounded(widths),
            "marker": marker(CAUSE_LOOKS[cause]),
            "hovertemplate": f"%{{x:.4~g}} {unit}",
        }
        for cause in CAUSES
        if any(widths := [parts.get(cause, 0.0) / size for _, parts, _ in rows])
    ]
    x = axis(f"time of a step, {unit}", range=rounded([0, 1.05 * longest / size]))
    y = axis("", autorange="reversed", fixedrange=True)
    more = {"barmode": "stack", "bargap": 0.35, "showlegend": True}
    return Plot(data, layout(x, y, **more), about, 150 + 46 * len(rows))


def _said(rows: Sequence[tuple[str, str, float]]) -> str:
    return "; ".join(f"{name} {percent(share)}" for name, _, share in rows)
