"""Pictures of one run, as PNG files: iterations, use of resources, memory over time, timeline. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forerun.answers.analysis.bottlenecks import Usage
from forerun.answers.analysis.reading import Simulation
from forerun.answers.analysis.timeline_lanes import lanes
from forerun.answers.experiment.result import CAUSES, RunResult
from forerun.common.units import PS_PER_S
from forerun.interfaces.report.drawing import band, heading, legend_below, panels, png, short
from forerun.interfaces.report.series import FEW, Bar, iteration_bars, memory_curve, time_unit
from forerun.interfaces.report.style import BLACK, BLUE, CAUSE_LOOKS, VERMILLION, WORK_LOOKS

_SHOWN_SHARE = 0.06
"""parts of a bar from this share on have their share written in them"""
_FAR = 2.5
"""a limit that is so many times higher than the rest is named, not drawn"""
_SLICES = 6000
_SEEN = 2500
"""slices are drawn at least as wide as the step over so many"""
_NOTE = 16
"""characters of what sets an iteration apart, under its bar"""


def iteration_breakdown(result: RunResult) -> bytes:
    """The time of iterations by cause: a named bar each where there are few, else over the number of the iteration."""
    bars = iteration_bars(result.iterations)
    unit, size = time_unit(max(sum(bar.breakdown_s.values()) for bar in bars))
    figure, (axes,) = panels(9, 5)
    draw = _named_bars if len(bars) <= FEW else _band_of_bars
    draw(axes, bars, size)
    axes.set_ylabel(f"time of an iteration, {unit}")
    heading(axes, f"{result.request.name}: where the time of each iteration goes")
    legend_below(axes, 3)
    return png(figure)


def _named_bars(axes: Any, bars: Sequence[Bar], size: float) -> None:
    bottom = [0.0] * len(bars)
    for name in CAUSES:
        heights = [bar.breakdown_s.get(name, 0.0) / size for bar in bars]
        look = CAUSE_LOOKS[name]
        if not any(heights):
            continue
        axes.bar(
            range(len(bars)),
            heights,
            0.6,
            bottom,
            label=look.label,
            color=look.colour,
            hatch=2 * look.hatch,
            edgecolor="white",
        )
        for x, (height, low, bar) in enumerate(zip(heights, bottom, bars, strict=True)):
            share = height * size / (sum(bar.breakdown_s.values()) or 1.0)
            if share >= _SHOWN_SHARE:
                box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5, "alpha": 0.9}
                axes.text(x, low + height / 2, f"{share:.0%}", ha="center", va="center", fontsize=8, bbox=box)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_xticks(
        range(len(bars)), [f"{bar.label}\n{short(bar.note, _NOTE)}" if bar.note else bar.label for bar in bars]
    )
    axes.set_xlim(-0.8, len(bars) - 0.2)
    axes.set_xlabel("iteration, number")
    axes.grid(False, axis="x")


def _band_of_bars(axes: Any, bars: Sequence[Bar], size: float) -> None:
    edges = [float(bar.first) for bar in bars] + [float(bars[-1].first + bars[-1].count)]
    low = [0.0] * len(edges)
    for name in CAUSES:
        heights = [bar.breakdown_s.get(name, 0.0) / size for bar in bars]
        if not any(heights):
            continue
        look = CAUSE_LOOKS[name]
        low = band(axes, edges, low, heights, look)
    axes.step(edges, low, where="post", color=BLACK, linewidth=0.8)
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, None)
    axes.set_xlabel("iteration, number")


def resource_utilization(name: str, uses: Sequence[Usage]) -> bytes:
    """How much of each resource is used, with the threshold from which it is called a bottleneck."""
    figure, (axes,) = panels(9, 1.2 + 0.6 * len(uses))
    for y, use in enumerate(reversed(uses)):
        axes.barh(
            y,
            100 * use.value,
            0.6,
            color=VERMILLION if use.is_bottleneck else BLUE,
            hatch="//" if use.is_bottleneck else "",
            edgecolor="white",
        )
        axes.text(100 * use.value + 1, y, "bottleneck" if use.is_bottleneck else "", va="center", fontsize=9)
        axes.plot([100 * use.threshold] * 2, [y - 0.38, y + 0.38], color=BLACK, linewidth=1.6)
        axes.text(100 * use.threshold, y + 0.37, f"{use.threshold:.0%}", ha="center", va="bottom", fontsize=7)
    axes.set_yticks(range(len(uses)), [f"{use.name}, {use.value:.1%}" for use in reversed(uses)])
    axes.set_xlim(0, 118)
    axes.set_xticks(range(0, 101, 20))
    axes.set_ylim(-0.6, len(uses) - 0.2)
    axes.set_xlabel("share that is used, %; a black mark is the threshold of a bottleneck")
    heading(axes, f"{name}: use of resources")
    axes.grid(False, axis="y")
    return png(figure)


def memory_over_time(simulation: Simulation) -> bytes:
    """Allocated memory of the fullest rank by category over the step, with the device's limit."""
    curve, prediction = memory_curve(simulation), simulation.prediction
    unit, size = time_unit(curve.end_s)
    times = [time / size for time in (*curve.time_s, curve.end_s)]
    figure, (axes,) = panels(10, 5.4)
    low = [0.0] * len(times)
    for look, part in curve.parts_gib:
        low = band(axes, times, low, part, look)
    peak, limit = curve.total_gib[curve.peak], prediction.memory_limit_gib
    axes.plot([curve.time_s[curve.peak] / size], [peak], "v", color=BLACK, markersize=7, clip_on=False)
    on_the_right = curve.time_s[curve.peak] > 0.6 * curve.end_s
    axes.annotate(
        f"peak {peak:.2f} GiB",
        (curve.time_s[curve.peak] / size, peak),
        (-8 if on_the_right else 8, 6),
        textcoords="offset points",
        ha="right" if on_the_right else "left",
        fontsize=9,
        weight="bold",
    )
    if limit <= _FAR * peak:
        axes.axhline(limit, color=BLACK, linestyle="--", linewidth=1.4, label=f"limit of the device, {limit:.1f} GiB")
        axes.set_ylim(0, 1.08 * max(limit, peak))
    else:
        note = f"limit of the device: {limit:.1f} GiB, above the picture"
        axes.text(0.99, 0.99, note, transform=axes.transAxes, ha="right", va="top", fontsize=8)
        axes.set_ylim(0, 1.25 * peak)
    axes.set_xlim(0, times[-1])
    axes.set_xlabel(f"time in the step, {unit}")
    axes.set_ylabel("allocated memory, GiB")
    alike = len(simulation.memory) == 1
    heading(axes, f"{prediction.model}: memory of {curve.rank_class}{'' if alike else ', the fullest rank'}")
    legend_below(axes, 4)
    return png(figure)


def timeline(simulation: Simulation) -> bytes:
    """What the streams of the pace-setting rank do over the step."""
    cls = simulation.program.rank_classes[simulation.slowest]
    shown = lanes(simulation, simulation.slowest, _SLICES)
    unit, size = time_unit(simulation.timeline.end_of_step_ps / PS_PER_S)
    scale = PS_PER_S * size
    least = simulation.timeline.end_of_step_ps / scale / _SEEN
    figure, (axes,) = panels(12, 2.0 + 0.5 * len(shown))
    for work, look in WORK_LOOKS.items():
        labelled = False
        for y, lane in enumerate(reversed(shown)):
            spans = [
                (each.start_ps / scale, max(least, (each.end_ps - each.start_ps) / scale))
                for each in lane.slices
                if each.work == work
            ]
            if spans:
                axes.broken_barh(
                    spans,
                    (y - 0.38, 0.76),
                    facecolors=look.colour,
                    hatch=2 * look.hatch,
                    edgecolor="white",
                    linewidth=0,
                    label="" if labelled else look.label,
                )
                labelled = True
    axes.set_yticks(range(len(shown)), [lane.name.replace("_", " ") for lane in reversed(shown)])
    axes.set_ylim(-0.6, len(shown) - 0.4)
    axes.set_xlim(0, simulation.timeline.end_of_step_ps / scale)
    axes.set_xlabel(f"time in the step, {unit}")
    axes.set_ylabel("stream")
    ranks = f" ({cls.n_ranks:,} of {simulation.prediction.n_gpus:,} ranks)"
    alike = len(simulation.program.rank_classes) == 1
    heading(axes, f"{simulation.prediction.model}: what {cls.name} does{'' if alike else ranks}")
    axes.grid(False, axis="y")
    legend_below(axes, 4)
    return png(figure)
