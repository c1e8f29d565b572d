"""Data for the plot of a heat map: every cell with its words and its shade."""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan

import numpy as np

from forerun.answers.search.heat import HeatMap, Known
from forerun.interfaces.report.figures import three_digits
from forerun.interfaces.report.series import time_unit
from forerun.interfaces.report.style import Look

_DARK, _LIGHT = (8, 64, 107), (222, 235, 244)
"""red, green and blue of the best value and of distant ones; darker means better, also in grey print"""
_FAR = 3.0
"""a value this many times the best one, or more, has the lightest shade"""
_NO_ROOM = "#F1F1F1"
LOOKS = {
    Known.BEST: Look("best plan, simulated", "#08406B"),
    Known.BOUND: Look("not simulated: at least", "#6F9BBB", "/"),
    Known.TOO_LARGE: Look("does not fit: GiB needed", _NO_ROOM, "x"),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One pair of values; `column` and `row` count those of x and y."""

    column: int
    row: int
    known: Known
    words: str
    """the words in the cell: 5.18, ≥ 5.6, 93 GiB"""
    hover: str
    """all figures of the cell, in a sentence"""
    colour: str
    dark: bool
    """whether words on it are white"""
    winner: bool
    """whether it holds the best plan of all"""


def heat_cells(shown: HeatMap) -> list[Cell]:
    """Returns every cell in which plans are possible."""
    fits = (shown.known == Known.BEST) | (shown.known == Known.BOUND)
    exact = shown.value[shown.known == Known.BEST]
    best = float(exact.min()) if len(exact) else np.inf
    least = float(shown.value[fits].min()) if fits.any() else 1.0
    unit, size = unit_of(shown)
    cells = []
    for row, column in np.argwhere(shown.known != Known.NOTHING).tolist():
        known, value = Known(int(shown.known[row, column])), float(shown.value[row, column])
        share = min(1.0, float(np.log(value / least) / np.log(_FAR))) if least > 0 else 0.0
        colour = _NO_ROOM if known == Known.TOO_LARGE else shade(share)
        what = f"{shown.x} {shown.x_values[column]}, {shown.y} {shown.y_values[row]}"
        simulated = float(shown.simulated[row, column])
        winner = known == Known.BEST and value == best
        digits = three_digits(value if known == Known.TOO_LARGE else value / size)
        words = {
            Known.BEST: f"★ {digits}" if winner else digits,
            Known.BOUND: f"≥ {digits}",
            Known.TOO_LARGE: f"{value:,.0f} GiB",
        }[known]
        of_others = "" if isnan(simulated) else f", the best simulated {three_digits(simulated / size)} {unit}"
        said = {
            Known.BEST: f"best plan {digits} {unit}",
            Known.BOUND: f"at least {digits} {unit}{of_others}",
            Known.TOO_LARGE: f"does not fit, needs at least {digits} GiB",
        }[known]
        plans = int(shown.plans[row, column])
        hover = f"{what}: {said} ({plans:,} plan{'' if plans == 1 else 's'})"
        cells.append(
            Cell(column, row, known, words, hover, colour, known != Known.TOO_LARGE and share < _WHITE, winner)
        )
    return cells


_LABEL = 18
"""the most letters of a value on one line"""
_WHITE = 0.42
"""words are white on shades below this share"""


def unit_of(shown: HeatMap) -> tuple[str, float]:
    """Returns the unit of the cells in which plans fit, and its size in seconds or GiB."""
    if shown.objective == "memory":
        return "GiB", 1.0
    times = shown.value[(shown.known == Known.BEST) | (shown.known == Known.BOUND)]
    return time_unit(float(times.min())) if len(times) else ("s", 1.0)


def heat_title(shown: HeatMap) -> str:
    """Returns the title of a heat map."""
    return f"{_word(shown.objective)} by {axis_name(shown.x)} and {axis_name(shown.y)}, {unit_of(shown)[0]}"


def heat_words(shown: HeatMap) -> str:
    """Returns a note on the values that a map leaves out; empty for none."""
    left = ((shown.x, shown.x_left_out), (shown.y, shown.y_left_out))
    said = [f"{n:,} more values of {axis_name(axis)}, worse than these, are left out" for axis, n in left if n]
    return "; ".join(said)


def label_lines(value: str) -> list[str]:
    """Returns the label of a value at its axis; a long one (an order of mesh axes) takes two lines."""
    joints = [i + 1 for i, letter in enumerate(value) if letter == "-"]
    if len(value) <= _LABEL or not joints:
        return [value]
    middle = min(joints, key=lambda i: abs(2 * i - len(value)))
    return [value[:middle], value[middle:]]


def axis_name(axis: str) -> str:
    """Returns the name of an axis with spaces."""
    return axis.replace("_", " ")


def _word(objective: str) -> str:
    return "Least memory" if objective == "memory" else "Least step time"


def shade(share: float) -> str:
    """Returns the hexadecimal colour of a share between the darkest (0) and the lightest (1)."""
    mixed = (round(dark + share * (light - dark)) for dark, light in zip(_DARK, _LIGHT, strict=True))
    return "#" + "".join(f"{part:02X}" for part in mixed)
