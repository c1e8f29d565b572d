"""Pictures of searches, as PNG files: time and memory of plans, heat maps, ranges of GPUs. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from forerun.answers.search.heat import HeatMap
from forerun.answers.search.result import SearchResult
from forerun.answers.search.sweep import Sweep
from forerun.common.errors import ForerunError
from forerun.common.files import whole_file
from forerun.interfaces.report.drawing import heading, legend_below, logarithmic, panels, png
from forerun.interfaces.report.heat_cells import LOOKS, Cell, axis_name, heat_cells, heat_title, heat_words, label_lines
from forerun.interfaces.report.series import LOG_FROM, found_too_large, time_unit
from forerun.interfaces.report.style import BLACK, BLUE, GREEN, VERMILLION
from forerun.interfaces.report.sweep_series import LINE_LOOKS, figures_of, lines, x_name

_COLUMN_INCHES, _ROW_INCHES = 0.85, 0.42
_AROUND_INCHES = (1.6, 1.8)
"""beside and above the cells: names, values, title and legend"""
_LEAST_INCHES = 6.4
_SIDE = 0.94
"""of a cell, 1 being the way to the next"""
_FAINT = (0.0, 0.0, 0.0, 0.35)
"""hatches on light cells: red, green, blue, opacity"""


def write_search_pictures(folder: Path, result: SearchResult, maps: Sequence[HeatMap]) -> None:
    """Write `plans.png`, and `heat-X-Y.png` for each map, into a folder, which is made where it is not there.

    Raises ForerunError where a file can't be written.
    """
    pictures = {} if result.best is None else {"plans": plans_picture(result)}
    _write(folder, pictures | {f"heat-{shown.x}-{shown.y}": heat_picture(shown) for shown in maps})


def write_sweep_pictures(folder: Path, sweep: Sweep) -> None:
    """Write `range.png` into a folder, as `write_search_pictures` does."""
    _write(folder, {} if sweep.best is None else {"range": sweep_picture(sweep)})


def _write(folder: Path, pictures: Mapping[str, bytes]) -> None:
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise ForerunError(f"{folder}: can't be made a folder: {error.strerror}") from None
    for name, picture in pictures.items():
        with whole_file(folder / f"{name}.png") as file:
            file.write(picture)


def plans_picture(result: SearchResult) -> bytes:
    """Time and memory of every plan that was simulated."""
    figure, (axes,) = panels(9, 5.5)
    large = found_too_large(result)
    unit, size = time_unit(max(each.step_time_s for each in (*result.ranked, *large)))
    looks = (
        ("fits", result.ranked, {"color": BLUE, "marker": "o", "s": 22, "alpha": 0.7}),
        ("does not fit", large, {"color": VERMILLION, "marker": "x", "s": 26, "alpha": 0.7}),
        (f"best by {result.objective}", result.ranked[:1], {"color": BLACK, "marker": "*", "s": 160, "zorder": 3}),
    )
    for label, plans, look in looks:
        if len(plans):
            x, y = [each.peak_reserved_gib for each in plans], [each.step_time_s / size for each in plans]
            axes.scatter(x, y, label=label, **look)
    if result.front is not None:
        places = result.front.places
        x, y = [each.peak_reserved_gib for each in places], [each.step_time_s / size for each in places]
        axes.plot(x, y, "o-", color=GREEN, fillstyle="none", drawstyle="steps-pre", label="Pareto front")
    axes.axvline(result.memory_limit_gib, color=BLACK, linestyle="--", linewidth=1.2, label="limit of memory")
    times = [each.step_time_s for each in (*result.ranked, *large)]
    if max(times) > LOG_FROM * min(times):
        logarithmic(axes.yaxis)
    else:
        axes.set_ylim(0, None)
    axes.set_xlim(0, None)
    axes.set_xlabel("peak of reserved memory, GiB")
    axes.set_ylabel(f"time of a step, {unit}" + (" (logarithmic)" if axes.get_yscale() == "log" else ""))
    heading(axes, f"{result.model} on {result.n_gpus:,} x {result.cluster}, global batch {result.global_batch:,}")
    legend_below(axes, 5)
    return png(figure)


def sweep_picture(sweep: Sweep) -> bytes:
    """Tokens/s and their price over GPUs or batches."""
    shown = figures_of(sweep)
    figure, every = panels(12, 5, len(shown))
    for axes, panel in zip(every, shown, strict=True):
        for each, look in zip(lines(sweep), cycle(LINE_LOOKS), strict=False):
            y = [panel.value(point) for point in each.points]
            axes.plot(each.x, y, color=look.colour, marker=look.marker, linestyle=look.style, label=each.label)
        values = [panel.value(point) for each in lines(sweep) for point in each.points]
        if max(values) > LOG_FROM * min(values) > 0:
            logarithmic(axes.yaxis)
        else:
            axes.set_ylim(0, 1.1 * max(values))
        ticks = sorted({x for each in lines(sweep) for x in each.x})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{n:,}" for n in ticks])
        axes.xaxis.minorticks_off()
        axes.set_xlabel(f"{x_name(sweep)} (logarithmic)")
        axes.set_ylabel(panel.title + (" (logarithmic)" if axes.get_yscale() == "log" else ""))
        legend_below(axes, 3)
    heading(every[0], f"{sweep.model} on {sweep.cluster}, best by {sweep.objective}")
    return png(figure)


def heat_picture(shown: HeatMap) -> bytes:
    """The best plan for each pair of values."""
    columns, rows = len(shown.x_values), len(shown.y_values)
    width = max(_LEAST_INCHES, _AROUND_INCHES[0] + _COLUMN_INCHES * columns)
    figure, (axes,) = panels(width, _AROUND_INCHES[1] + _ROW_INCHES * rows)
    cells = heat_cells(shown)
    for known, look in LOOKS.items():
        label = look.label
        for cell in (each for each in cells if each.known == known):
            _draw(axes, cell, look.hatch, label)
            label = ""
    axes.set_xticks(range(columns), ["\n".join(label_lines(value)) for value in shown.x_values])
    axes.set_yticks(range(rows), ["\n".join(label_lines(value)) for value in shown.y_values])
    axes.set_xlim(-0.5, columns - 0.5)
    axes.set_ylim(-0.5, rows - 0.5)
    axes.set_xlabel("\n".join(filter(None, (axis_name(shown.x), heat_words(shown)))))
    axes.set_ylabel(axis_name(shown.y))
    axes.grid(False)
    heading(axes, heat_title(shown))
    figure.legend(loc="outside lower left", ncols=len(LOOKS), frameon=False, fontsize=8)
    return png(figure)


def _draw(axes: Any, cell: Cell, hatch: str, label: str) -> None:
    box = (cell.column, _SIDE, _SIDE, cell.row - _SIDE / 2)
    lines = "white" if cell.dark else _FAINT
    axes.bar(*box, color=cell.colour, hatch=2 * hatch, edgecolor=lines, linewidth=0.5, label=label)
    if cell.winner:
        axes.bar(*box, fill=False, edgecolor=VERMILLION, linewidth=3, zorder=3)
    plain = {"facecolor": cell.colour, "edgecolor": "none", "pad": 1.5}
    colour = "white" if cell.dark else BLACK
    axes.text(
        cell.column, cell.row, cell.words, ha="center", va="center", fontsize=9, color=colour, bbox=plain, zorder=4
    )
