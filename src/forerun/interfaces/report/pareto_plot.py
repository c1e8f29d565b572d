"""Time against peak memory of every point of an exploration, with the Pareto front, as a picture."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from forerun.astrasim.dse.result import Explored, PairResult, Row
from forerun.common.files import whole_file
from forerun.interfaces.report.strategy_words import strategy_words

_PANEL_INCHES = (8.0, 5.0)
_DPI = 150
_COLUMNS = 2
_TICKS = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
"""where a decade has ticks"""
_LOG_FROM = 3
"""largest value over smallest, from which a scale is logarithmic"""
_MOST_LABELLED = 24
"""points of the front that are numbered and named beside the panel"""


def plot_is_possible() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def write_pareto_plot(path: Path, explored: Explored) -> None:
    """A panel for each workload on each system; those without a point that could be simulated are left out.

    Raises ForerunError where the file can't be written.
    """
    import matplotlib.backends.backend_agg
    import matplotlib.figure
    import matplotlib.ticker

    pairs = [pair for pair in explored.pairs if pair.ranked]
    columns = min(_COLUMNS, max(1, len(pairs)))
    rows = -(-max(1, len(pairs)) // columns)
    size = (_PANEL_INCHES[0] * columns, _PANEL_INCHES[1] * rows)
    figure = matplotlib.figure.Figure(figsize=size, dpi=_DPI, layout="constrained")
    matplotlib.backends.backend_agg.FigureCanvasAgg(figure)
    for number, pair in enumerate(pairs, 1):
        _panel(figure.add_subplot(rows, columns, number), pair, matplotlib.ticker)
    with whole_file(path) as file:
        figure.savefig(file, format="png")


def _panel(axes: Any, pair: PairResult, ticks: Any) -> None:
    front = pair.pareto
    for recompute, colour, label in ((False, "tab:blue", "keeps activations"), (True, "tab:orange", "recomputes")):
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
        axes.axvline(pair.memory_limit_gib, color="tab:red", linestyle="--", linewidth=1, label="memory limit")
    axes.set(title=f"{pair.workload} on {pair.system}", xlabel="peak memory of a rank, GiB", ylabel="time, s")
    every = _coordinates(pair.ranked)
    for axis, values, set_scale in ((axes.xaxis, every[0], axes.set_xscale), (axes.yaxis, every[1], axes.set_yscale)):
        if max(values) > _LOG_FROM * min(values) > 0:
            set_scale("log")
            axis.set_major_locator(ticks.LogLocator(subs=_TICKS))
            axis.set_major_formatter(ticks.StrMethodFormatter("{x:g}"))
            axis.set_minor_formatter(ticks.NullFormatter())
    axes.grid(True, which="both", alpha=0.2)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=4, frameon=False)


def _coordinates(rows: list[Row]) -> tuple[list[float], list[float]]:
    """Memory in GiB and time in s."""
    memory = [row.peak_memory_gib or 0.0 for row in rows]
    return memory, [row.figures.time_ns * 1e-9 for row in rows if row.figures]
