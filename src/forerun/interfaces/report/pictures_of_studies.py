"""Pictures of studies, as PNG files: scaling, comparisons, stragglers. Needs matplotlib."""

from __future__ import annotations

from typing import Any

from forerun.answers.experiment.result import CAUSES, Comparison, ScalingStudy, StragglerStudy
from forerun.interfaces.report.drawing import heading, legend_below, logarithmic, panels, png, short
from forerun.interfaces.report.series import LOG_FROM, cumulated, time_unit
from forerun.interfaces.report.style import BLACK, BLUE, CAUSE_LOOKS, GREEN, PURPLE, SKY, VERMILLION
from forerun.interfaces.report.wording import seconds

_BINS = 40
_LINE = 150
"""characters of a line under a picture"""
_MARKS = ((":", PURPLE, "undisturbed"), ("-", BLACK, "mean"), ("--", GREEN, "p50"), ("-.", VERMILLION, "p99"))


def scaling_efficiency(study: ScalingStudy) -> bytes:
    """Efficiency and throughput over GPUs, with what is ideal and where scaling breaks down."""
    figure, (left, right) = panels(12, 5, 2)
    points = [point for point in study.points if not point.error]
    gpus = [point.n_gpus for point in points]
    left.axhline(100, color=BLACK, linestyle="--", linewidth=1.2, label="ideal")
    threshold = 100 * study.request.thresholds.efficiency
    left.axhline(threshold, color=BLACK, linestyle=":", linewidth=1.2, label=f"threshold, {threshold:.0f} %")
    efficiency = [100 * point.efficiency for point in points]
    left.plot(gpus, efficiency, "o-", color=BLUE, label="efficiency")
    for x, y in zip(gpus, efficiency, strict=True):
        left.annotate(f"{y:.0f} %", (x, y), (0, -14), textcoords="offset points", ha="center", fontsize=8)
    rates = [point.samples_per_s for point in points]
    if points:
        right.plot(gpus, [rates[0] * n / gpus[0] for n in gpus], "--", color=BLACK, linewidth=1.2, label="ideal")
        right.plot(gpus, rates, "o-", color=BLUE, label="predicted")
        if max(rates) > LOG_FROM * min(rates):
            logarithmic(right.yaxis)
        else:
            right.set_ylim(0, None)
    small = [point for point in points if not point.fits]
    if small:
        label = "does not fit in memory"
        for axes, values in (
            (left, [100 * point.efficiency for point in small]),
            (right, [point.samples_per_s for point in small]),
        ):
            axes.plot([point.n_gpus for point in small], values, "X", color=VERMILLION, markersize=11, label=label)
    broken = next((point.n_gpus for point in points if point.num_nodes == study.break_down), None)
    for axes in (left, right):
        if broken is not None:
            axes.axvline(broken, color=VERMILLION, linewidth=6, alpha=0.25, label="breaks down")
        axes.set_xscale("log", base=2)
        axes.set_xticks(gpus, [f"{n:,}" for n in gpus])
        axes.xaxis.minorticks_off()
        axes.set_xlabel("GPUs, number (logarithmic)")
    left.set_ylim(0, max(110.0, *efficiency, 0.0) * 1.05)
    left.set_ylabel("scaling efficiency, %")
    scale = " (logarithmic)" if right.get_yscale() == "log" else ""
    right.set_ylabel(f"throughput, {study.request.sample}s/s{scale}")
    kept = "global batch kept" if study.strong else "batch of each GPU kept"
    heading(left, f"{study.request.name}: {'strong' if study.strong else 'weak'} scaling, {kept}")
    legend_below(left, 2)
    legend_below(right, 2)
    if broken is not None:
        figure.supxlabel(short(f"Breaks down at {broken:,} GPUs: {study.cause}", _LINE), fontsize=9)
    return png(figure)


def comparison_bars(comparison: Comparison) -> bytes:
    """Step time by cause of every variant, with its throughput."""
    variants = comparison.variants
    longest = max((sum(each.breakdown_s.values()) for each in variants), default=1.0) or 1.0
    unit, size = time_unit(longest)
    figure, (axes,) = panels(10, 1.9 + 0.5 * len(variants))
    for name in CAUSES:
        look, labelled = CAUSE_LOOKS[name], False
        for y, variant in enumerate(reversed(variants)):
            before = sum(variant.breakdown_s.get(each, 0.0) for each in CAUSES[: CAUSES.index(name)]) / size
            width = variant.breakdown_s.get(name, 0.0) / size
            if width:
                axes.barh(
                    y,
                    width,
                    0.62,
                    before,
                    color=look.colour,
                    hatch=2 * look.hatch,
                    edgecolor="white",
                    label="" if labelled else look.label,
                )
                labelled = True
    for y, variant in enumerate(reversed(variants)):
        end = sum(variant.breakdown_s.values())
        does_not_fit = variant.prediction is not None and not variant.prediction.fits
        words = f"{seconds(end)}, {variant.samples_per_s:,.0f} {comparison.request.sample}s/s"
        words = variant.error or words + (", does not fit" if does_not_fit else "")
        axes.text(end / size, y, f" {short(words)}", va="center", fontsize=8)
    labels = [f"{short(each.label)}\n{each.axis}" for each in reversed(variants)]
    axes.set_yticks(range(len(variants)), labels, fontsize=8)
    axes.set_xlim(0, 1.4 * longest / size)
    axes.set_ylim(-0.6, len(variants) - 0.4)
    axes.set_xlabel(f"time of a step, {unit}")
    heading(axes, f"{comparison.request.name}: variants side by side")
    axes.grid(False, axis="y")
    legend_below(axes, 3)
    return png(figure)


def straggler_distribution(study: StragglerStudy) -> bytes:
    """How step times spread: how many steps take how long, and the share that takes at most so long."""
    unit, size = time_unit(max((*study.steps_s, study.undisturbed_s)))
    figure, (left, right) = panels(12, 5, 2)
    left.hist([time / size for time in study.steps_s], bins=_BINS, color=SKY, edgecolor="white", hatch="..")
    times, share = cumulated(study.steps_s)
    right.step([time / size for time in times], share, where="post", color=BLUE, linewidth=1.8)
    right.set_ylim(0, 103)
    for axes in (left, right):
        _marks(axes, study, size)
        axes.set_xlabel(f"time of a step, {unit}")
    left.set_ylabel("steps, number")
    right.set_ylabel("steps that take at most so long, %")
    heading(left, f"{study.request.name}: {len(study.steps_s):,} steps")
    heading(right, f"{study.lost_share:.1%} of the time goes to waiting for the slowest rank")
    legend_below(left, 2)
    legend_below(right, 2)
    return png(figure)


def _marks(axes: Any, study: StragglerStudy, size: float) -> None:
    values = (study.undisturbed_s, study.mean_s, study.p50_s, study.p99_s)
    for (line, colour, name), value in zip(_MARKS, values, strict=True):
        axes.axvline(value / size, color=colour, linestyle=line, linewidth=1.6, label=f"{name} {seconds(value)}")
