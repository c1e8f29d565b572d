"""Pictures of a search, as PNG files: the best plan for each pair of values. Needs matplotlib."""

from __future__ import annotations

from typing import Any

from forerun.report.drawing import heading, panels, png
from forerun.report.heat_cells import LOOKS, Cell, axis_name, heat_cells, heat_title, heat_words
from forerun.report.style import BLACK, VERMILLION
from forerun.search.heat import HeatMap

_COLUMN_INCHES, _ROW_INCHES = 0.85, 0.42
_AROUND_INCHES = (1.6, 1.8)
"""beside and above the cells: names, values, title and legend"""
_LEAST_INCHES = 6.4
_SIDE = 0.94
"""of a cell, 1 being the way to the next"""
_FAINT = (0.0, 0.0, 0.0, 0.35)
"""hatches on light cells: red, green, blue, opacity"""


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
    axes.set_xticks(range(columns), shown.x_values)
    axes.set_yticks(range(rows), shown.y_values)
    axes.set_xlim(-0.5, columns - 0.5)
    axes.set_ylim(-0.5, rows - 0.5)
    axes.set_xlabel(axis_name(shown.x))
    axes.set_ylabel(axis_name(shown.y))
    axes.grid(False)
    heading(axes, heat_title(shown))
    figure.legend(loc="outside lower left", ncols=len(LOOKS), frameon=False, fontsize=8)
    if heat_words(shown):
        figure.supxlabel(heat_words(shown), fontsize=8)
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
