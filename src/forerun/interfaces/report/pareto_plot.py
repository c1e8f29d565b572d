"""Time against peak memory of every point of an exploration, with the Pareto front, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.common.files import whole_file
from forerun.interfaces.report.drawing import logarithmic_ticks, panels, png
from forerun.interfaces.report.exploration import strategy_words
from forerun.interfaces.report.style import BLUE, ORANGE, VERMILLION

if TYPE_CHECKING:
    from forerun.astrasim.dse.result import Explored, PairResult, Row

_PANEL_INCHES = (8.0, 5.0)
_COLUMNS = 2
_TICKS = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
"""places of the ticks in a decade"""
_LOG_FROM = 3
"""largest value over smallest, from which a scale is logarithmic"""
_MOST_LABELLED = 24
"""points of the front that are numbered and named beside the panel"""


def write_pareto_plot(path: Path, explored: Explored) -> None:
    """Draws a panel for each workload on each system where a point could be simulated.

    Raises ForerunError if the file can't be written.
    """
    pairs = [pair for pair in explored.pairs if pair.ranked]
    columns = min(_COLUMNS, max(1, len(pairs)))
    rows = -(-max(1, len(pairs)) // columns)
    figure, every = panels(_PANEL_INCHES[0] * columns, _PANEL_INCHES[1] * rows, columns, rows)
    for axes, pair in zip(every, pairs, strict=False):
        _panel(axes, pair)
    for axes in every[len(pairs) :]:
        axes.set_visible(False)
    with whole_file(path) as file:
        file.write(png(figure))


def _panel(axes: Any, pair: PairResult) -> None:
    front = pair.pareto
    for recompute, colour, label in ((False, BLUE, "keeps activations"), (True, ORANGE, "recomputes")):
        rows = [row for row in pair.ranked if row.point.strategy.activation_recompute is recompute]
        if rows:
            axes.scatter(*_coordinates(rows), s=16, color=colour, alpha=0.6, label=label)
    memory, times = _coordinates(front)
    axes.plot(memory, times, color="black", linewidth=1, drawstyle="steps-pre", label="Pareto front")
    axes.scatter(memory, times, s=36, facecolors="none", edgecolors="black")
    labelled = [*enumerate(front, 1)][:: -(-len(front) // _MOST_LABELLED)]
    for number, row in labelled:
        x, y = _coordinates([row])
        axes.annotate(str(number), (x[0], y[0]), (5, 5), textcoords="offset points", fontsize=8, weight="bold")
    key = "\n".join(f"{number}  {strategy_words(row.point.strategy)}" for number, row in labelled)
    axes.text(1.02, 1.0, key, transform=axes.transAxes, verticalalignment="top", fontsize=8)
    if pair.memory_limit_gib is not None:
        axes.axvline(pair.memory_limit_gib, color=VERMILLION, linestyle="--", linewidth=1, label="memory limit")
    axes.set(title=f"{pair.workload} on {pair.system}", xlabel="peak memory of a rank, GiB", ylabel="time, s")
    every = _coordinates(pair.ranked)
    for axis, values, set_scale in ((axes.xaxis, every[0], axes.set_xscale), (axes.yaxis, every[1], axes.set_yscale)):
        if max(values) > _LOG_FROM * min(values) > 0:
            set_scale("log")
            logarithmic_ticks(axis, _TICKS)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=4, frameon=False)


def _coordinates(rows: list[Row]) -> tuple[list[float], list[float]]:
    """Returns the memory in GiB and time in s."""
    memory = [row.peak_memory_gib or 0.0 for row in rows]
    return memory, [row.figures.time_ns * 1e-9 for row in rows if row.figures]
