"""Plots of studies: scaling, stragglers and sensitivities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from forerun.interfaces.report.figures import seconds
from forerun.interfaces.report.page import Plot
from forerun.interfaces.report.plots import axis, far_apart, labelled_bars, layout, rounded
from forerun.interfaces.report.series import cumulated, time_unit
from forerun.interfaces.report.style import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILLION

if TYPE_CHECKING:
    from forerun.answers.analysis.what_if import WhatIf
    from forerun.answers.experiment.result import ScalePoint, ScalingStudy, StragglerStudy

_BINS = 40
_MOST_POINTS = 1500
"""the most steps to draw: of more, every n-th"""
_MARKS = (("undisturbed", "dot", PURPLE), ("mean", "solid", BLACK), ("p50", "dash", GREEN), ("p99", "dashdot", ORANGE))


def sensitivities_plot(rows: Sequence[WhatIf]) -> Plot:
    """Shows the gain of a better machine."""
    bars = [(row.label, f"{row.change:+.1%}, {seconds(row.step_time_s)}", 100 * row.change) for row in rows]
    said = "; ".join(f"{name}: {words}" for name, words, _ in bars)
    return labelled_bars(bars, "change of the step's time, %", f"Sensitivities: {said}", [row.how for row in rows])


def efficiency_plot(study: ScalingStudy) -> Plot:
    """Returns the efficiency over GPUs."""
    points = _ran(study)
    gpus = [point.n_gpus for point in points]
    threshold = 100 * study.request.thresholds.efficiency
    efficiency = rounded([100 * point.efficiency for point in points])
    ends = [gpus[0], gpus[-1]] if gpus else []
    data = [
        line("ideal", ends, [100.0] * len(ends), BLACK, "dash"),
        line(f"threshold, {threshold:.0f} %", ends, [threshold] * len(ends), BLACK, "dot"),
        _curve("efficiency", gpus, efficiency, [f"{value:.0f} %" for value in efficiency]),
        *_notes(study, points, efficiency),
    ]
    y = axis("scaling efficiency, %", range=[0, 1.12 * max([100.0, *efficiency])])
    about = f"{_kind(study)} scaling: efficiency " + _said(gpus, [f"{value:.0f} %" for value in efficiency])
    return Plot(data, layout(_gpu_axis(gpus), y), about)


def throughput_plot(study: ScalingStudy) -> Plot:
    """Returns the throughput over GPUs."""
    points = _ran(study)
    gpus = [point.n_gpus for point in points]
    rates = rounded([point.samples_per_s for point in points])
    ideal = rounded([rates[0] * n / gpus[0] for n in gpus]) if points else []
    sample = study.request.sample
    data = [
        line("ideal", gpus, ideal, BLACK, "dash"),
        _curve("predicted", gpus, rates, [f"{rate:,.0f}" for rate in rates]),
        *_notes(study, points, rates),
    ]
    y = far_apart(f"throughput, {sample}s/s", [*rates, *ideal])
    about = f"{_kind(study)} scaling: {sample}s/s " + _said(gpus, [f"{rate:,.0f}" for rate in rates])
    return Plot(data, layout(_gpu_axis(gpus), y), about)


def _kind(study: ScalingStudy) -> str:
    return "Strong" if study.strong else "Weak"


def _ran(study: ScalingStudy) -> list[ScalePoint]:
    return [point for point in study.points if not point.error]


def _said(gpus: Sequence[int], words: Sequence[str]) -> str:
    return "; ".join(f"{text} at {n} GPUs" for n, text in zip(gpus, words, strict=True))


def _gpu_axis(gpus: Sequence[int]) -> dict[str, Any]:
    return axis("GPUs, number (logarithmic)", type="log", tickvals=list(gpus), ticktext=[f"{n:,}" for n in gpus])


def line(name: str, x: Sequence[float], y: Sequence[float], colour: str, dash: str) -> dict[str, Any]:
    """Returns a reference line without hover text."""
    look = {"color": colour, "dash": dash, "width": 1.5}
    return {"type": "scatter", "mode": "lines", "name": name, "x": list(x), "y": list(y), "line": look} | {
        "hoverinfo": "skip"
    }


def _curve(name: str, x: Sequence[float], y: Sequence[float], texts: Sequence[str]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines+markers+text",
        "name": name,
        "x": list(x),
        "y": list(y),
        "text": [f"<br>{text}" for text in texts],
        "textposition": "bottom center",
        "cliponaxis": False,
        "marker": {"size": 9, "color": BLUE},
        "line": {"color": BLUE, "width": 2},
        "customdata": list(texts),
        "hovertemplate": "%{x} GPUs: %{customdata}<extra></extra>",
    }


def _notes(study: ScalingStudy, points: Sequence[ScalePoint], values: Sequence[float]) -> list[dict[str, Any]]:
    """Marks on points: the point at which scaling breaks down, and points that do not fit."""
    broken = [i for i, point in enumerate(points) if point.num_nodes == study.break_down]
    small = [i for i, point in enumerate(points) if not point.fits]
    marks = (
        ("breaks down", broken, {"symbol": "circle-open", "size": 22, "line": {"width": 3}}),
        ("does not fit in memory", small, {"symbol": "x", "size": 13}),
    )
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "x": [points[i].n_gpus for i in which],
            "y": [values[i] for i in which],
            "marker": {"color": VERMILLION, **shape},
            "hoverinfo": "name",
        }
        for name, which, shape in marks
        if which
    ]


def spread_plot(study: StragglerStudy) -> Plot:
    """Shows the number of steps by their time."""
    unit, size = time_unit(max((*study.steps_s, study.undisturbed_s)))
    times = [time / size for time in study.steps_s]
    low, high = min(times), max(times)
    width = (high - low) / _BINS or 0.01 * high
    counts = [0] * _BINS
    for time in times:
        counts[min(_BINS - 1, int((time - low) / width))] += 1
    bars = {
        "type": "bar",
        "name": "steps",
        "x": rounded([low + (i + 0.5) * width for i in range(_BINS)]),
        "y": counts,
        "width": rounded([width])[0],
        "marker": {"color": SKY, "line": {"width": 0.5, "color": "#ffffff"}},
        "hovertemplate": f"%{{y}} steps of about %{{x:.4~g}} {unit}<extra></extra>",
    }
    data = [bars, *_times(study, size, max(counts))]
    x, y = axis(f"time of a step, {unit}"), axis("steps, number", range=[0, 1.05 * max(counts)])
    return Plot(data, layout(x, y), f"Step times: {_figures(study)}")


def cumulated_plot(study: StragglerStudy) -> Plot:
    """Returns the share of steps that takes at most so long."""
    unit, size = time_unit(max((*study.steps_s, study.undisturbed_s)))
    times, shares = cumulated(study.steps_s)
    every = -(-len(times) // _MOST_POINTS)
    kept = sorted({*range(0, len(times), every), len(times) - 1})
    curve = {
        "type": "scatter",
        "mode": "lines",
        "name": "steps",
        "x": rounded([times[i] / size for i in kept]),
        "y": rounded([shares[i] for i in kept]),
        "line": {"shape": "hv", "color": BLUE, "width": 2.5},
        "hovertemplate": f"%{{y:.3~g}} % take at most %{{x:.4~g}} {unit}<extra></extra>",
    }
    x, y = axis(f"time of a step, {unit}"), axis("share of steps up to this time, %", range=[0, 103])
    about = f"Share of the steps over their time: {_figures(study)}"
    return Plot([curve, *_times(study, size, 100)], layout(x, y, hovermode="x", hoverdistance=-1), about)


def _values(study: StragglerStudy) -> tuple[float, ...]:
    return study.undisturbed_s, study.mean_s, study.p50_s, study.p99_s


def _figures(study: StragglerStudy) -> str:
    return "; ".join(f"{name} {seconds(value)}" for (name, _, _), value in zip(_MARKS, _values(study), strict=True))


def _times(study: StragglerStudy, size: float, height: float) -> list[dict[str, Any]]:
    return [
        line(f"{name} {seconds(value)}", rounded([value / size] * 2), [0, height], colour, dash)
        for (name, dash, colour), value in zip(_MARKS, _values(study), strict=True)
    ]
