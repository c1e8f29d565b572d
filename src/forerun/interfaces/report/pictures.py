"""Pictures: the plots of pages as PNG files, for documents and for machines without a browser. Needs matplotlib.

A Plot is a figure in the schema of plotly.js. This module draws the parts of that schema that Forerun's plots use: bars
(upright and lying, stacked, with hatches and words), lines with markers, stacked areas, axes and annotations.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.common.files import make_folder, whole_files
from forerun.interfaces.report.drawing import legend_below, logarithmic_ticks, panels, png, short
from forerun.interfaces.report.style import BLACK

if TYPE_CHECKING:
    from forerun.interfaces.report.page import Plot

_PX_PER_INCH = 76
_WIDTH_INCHES = 10.0
_PANEL_INCHES = 6.5
"""the width of a plot that stands beside another one"""
_LETTERS_PER_INCH = 10.5
_LABEL_LETTERS = 46
_TEXT_SIZE = 8
_MARKERS = {
    "circle": "o",
    "circle-open": "o",
    "diamond": "D",
    "line-ns-open": "|",
    "square": "s",
    "star": "*",
    "triangle-up": "^",
    "x": "X",
}
_DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
_STEPS = {"linear": "default", "hv": "steps-post", "vh": "steps-pre"}
_COLUMN = {"bottom": "top", "top": "bottom", "middle": "center"}
_PALE = 0.6
"""luminance of a colour from which words on it are black"""


def picture(title: str, *plots: Plot, note: str = "") -> bytes:
    """Returns the plots side by side as a PNG file, with a title above, and under it a note."""
    width = _WIDTH_INCHES if len(plots) == 1 else _PANEL_INCHES * len(plots)
    figure, every = panels(width, max(plot.height_px for plot in plots) / _PX_PER_INCH, len(plots))
    for axes, plot in zip(every, plots, strict=True):
        _draw(axes, plot)
    said = [short(line, int(_LETTERS_PER_INCH * width)) for line in (title, note) if line]
    figure.suptitle("\n".join(said), x=0.01, ha="left")
    legend_below(figure, 3 * len(plots))
    return png(figure)


def write_pictures(folder: Path, pictures: Mapping[str, bytes]) -> list[Path]:
    """Writes PNG files by name into `folder`, and makes it where it is missing; every file appears whole.

    Raises ForerunError if a file can't be written.
    """
    make_folder(folder)
    with whole_files() as files:
        for name, content in pictures.items():
            with files.open(folder / f"{name}.png") as file:
                file.write(content)
    return [folder / f"{name}.png" for name in pictures]


def _draw(axes: Any, plot: Plot) -> None:
    """Draws the traces of a plot, then its axes."""
    layout = plot.layout
    places = {side: _places(plot, side) for side in "xy"}
    below: dict[Any, float] = {}
    for trace in plot.data:
        if trace["type"] == "bar":
            _bars(axes, trace, layout, places, below)
        elif "stackgroup" in trace:
            _area(axes, trace, below)
        else:
            _line(axes, trace, places)
    for each in layout.get("annotations", ()):
        axes.annotate(
            _plain(each["text"]),
            (each["x"], each["y"]),
            (each["ax"] * 72 / _PX_PER_INCH, -each["ay"] * 72 / _PX_PER_INCH),
            textcoords="offset points",
            ha="right" if each["ax"] < 0 else "left",
            weight="bold",
            arrowprops={"arrowstyle": "->"},
        )
    for side, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
        _axis(axis, layout[f"{side}axis"], places[side])


def _places(plot: Plot, side: str) -> dict[str, int]:
    """Returns the place of each category on an axis; empty for an axis of numbers."""
    names = [*plot.layout[f"{side}axis"].get("categoryarray", ())]
    names += [each for trace in plot.data for each in trace[side] if isinstance(each, str)]
    return {name: i for i, name in enumerate(dict.fromkeys(names))}


def _at(values: Sequence[Any], places: Mapping[str, int]) -> list[float]:
    return [places[each] if places else each for each in values]


def _bars(axes: Any, trace: Mapping[str, Any], layout: Mapping[str, Any], places: Any, below: dict[Any, float]) -> None:
    """Draws the bars of a trace as rectangles, those of one look together."""
    import matplotlib.collections

    lying = trace.get("orientation") == "h"
    at = _at(trace["y" if lying else "x"], places["y" if lying else "x"])
    lengths, n = trace["x" if lying else "y"], len(at)
    stacked = layout.get("barmode") == "stack"
    starts = trace.get("base") or [below.get(each, 0.0) if stacked else 0.0 for each in at]
    half = trace.get("width", 1 - layout.get("bargap", 0.2)) / 2
    boxes = []
    for place, start, length in zip(at, starts, lengths, strict=True):
        below[place] = start + length
        sides, ends = (place - half, place + half), (start, start + length)
        corners = [(ends[0], sides[0]), (ends[0], sides[1]), (ends[1], sides[1]), (ends[1], sides[0])]
        boxes.append(corners if lying else [(y, x) for x, y in corners])
    marker = trace["marker"]
    border = marker.get("line", {})
    colours, hatches = _each(marker.get("color"), n), _each(marker.get("pattern", {}).get("shape", ""), n)
    edges, widths = _each(border.get("color", "#ffffff"), n), _each(border.get("width", 0.5), n)
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, look in enumerate(zip(colours, hatches, edges, widths, strict=True)):
        groups.setdefault(look, []).append(i)
    label = _plain(trace["name"]) if trace.get("showlegend", True) and "name" in trace else ""
    for (colour, hatch, edge, width), some in sorted(groups.items(), key=lambda item: not item[0][1]):
        axes.add_collection(
            matplotlib.collections.PolyCollection(
                [boxes[i] for i in some],
                facecolor=colour,
                edgecolor=edge if width else "white" if hatch else colour,
                linewidth=0.8 * width if width else 0.0 if hatch else 0.3,
                hatch=2 * hatch,
                label=label,
            )
        )
        label = ""
    fonts = _each(trace.get("insidetextfont", {}).get("color"), n)
    for box, text, colour, font in zip(boxes, trace.get("text", ()), colours, fonts, strict=False):
        x, y = (sum(corner[i] for corner in box) / len(box) for i in (0, 1))
        plain = {"facecolor": colour, "edgecolor": "none", "pad": 1.5}
        words = {"ha": "center", "va": "center", "fontsize": _TEXT_SIZE, "bbox": plain if text else None}
        axes.text(x, y, _plain(text), color=font or _on(colour), **words)
    axes.autoscale_view()


def _area(axes: Any, trace: Mapping[str, Any], below: dict[Any, float]) -> None:
    """Draws a part of a stack, on the parts before it. All parts have the same x, in which values may repeat."""
    low = [below.get(place, 0.0) for place in range(len(trace["x"]))]
    high = [under + part for under, part in zip(low, trace["y"], strict=True)]
    below.update(enumerate(high))
    look = {"facecolor": trace["fillcolor"], "hatch": 2 * trace["fillpattern"]["shape"], "edgecolor": "white"}
    axes.fill_between(trace["x"], low, high, step="post", label=_plain(trace["name"]), linewidth=0, **look)


def _line(axes: Any, trace: Mapping[str, Any], places: Any) -> None:
    """Draws a line, its markers, or both, with words below or above them."""
    x, y = _at(trace["x"], places["x"]), _at(trace["y"], places["y"])
    line, marker, mode = trace.get("line", {}), trace.get("marker", {}), trace["mode"]
    symbol = marker.get("symbol", "circle")
    is_open = symbol.endswith("-open")
    colour = marker.get("color", line.get("color", BLACK))
    axes.plot(
        x,
        y,
        color=line.get("color", colour),
        linestyle=_DASHES[line.get("dash", "solid")] if "lines" in mode else "",
        linewidth=0.8 * line.get("width", 2),
        drawstyle=_STEPS[line.get("shape", "linear")],
        marker=_MARKERS[symbol] if "markers" in mode else "",
        markersize=0.8 * marker.get("size", 6),
        markerfacecolor="none" if is_open else colour,
        markeredgecolor=colour if is_open else "white",
        markeredgewidth=marker.get("line", {}).get("width", 2) if is_open else 0.4,
        alpha=marker.get("opacity"),
        label=_plain(trace["name"]),
        clip_on=trace.get("cliponaxis", True),
    )
    if "text" in mode:
        side = trace["textposition"].split()[0]
        for place, text in zip(zip(x, y, strict=True), trace["text"], strict=True):
            shift = {"xytext": (0, -9 if side == "bottom" else 9), "textcoords": "offset points"}
            axes.annotate(_plain(text).strip(), place, ha="center", va=_COLUMN[side], fontsize=_TEXT_SIZE, **shift)


def _axis(axis: Any, said: Mapping[str, Any], places: Mapping[str, int]) -> None:
    """Draws the title, scale, limits and ticks of an axis."""
    axes, side = axis.axes, axis.axis_name
    set_limits = getattr(axes, f"set_{side}lim")
    axis.set_label_text(_plain(said["title"]["text"]))
    if said.get("type") == "log":
        getattr(axes, f"set_{side}scale")("log")
        logarithmic_ticks(axis, (1.0, 2.0, 5.0))
    if "range" in said:
        low, high = said["range"]
        set_limits(*((10**low, 10**high) if said.get("type") == "log" else (low, high)))
    elif places:
        set_limits(-0.6, len(places) - 0.4)
    elif said.get("rangemode") == "tozero":
        set_limits(0, None)
    if "tickvals" in said:
        inside = sorted(set_limits())
        shown = [(at, _plain(text)) for at, text in zip(said["tickvals"], said["ticktext"], strict=True)]
        shown = [(at, text) for at, text in shown if inside[0] <= at <= inside[1]]
        axis.set_ticks([at for at, _ in shown], labels=[text for _, text in shown])
        axis.set_tick_params(which="minor", bottom=False, left=False)
    elif places:
        labels = ["\n".join(short(line, _LABEL_LETTERS) for line in _plain(name).split("\n")) for name in places]
        axis.set_ticks(list(places.values()), labels=labels, fontsize=_TEXT_SIZE)
    axis.grid(said.get("showgrid", not places))
    if said.get("autorange") == "reversed":
        axis.set_inverted(True)


def _each(value: Any, n: int) -> list[Any]:
    """Returns one value for each of `n` bars."""
    return list(value) if isinstance(value, (list, tuple)) else [value] * n


def _on(colour: str) -> str:
    """Returns the colour of words on a colour."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return BLACK if 0.299 * red + 0.587 * green + 0.114 * blue > _PALE else "white"


def _plain(text: str) -> str:
    """Returns text without the little HTML that plotly reads."""
    return html.unescape(text.replace("<br>", "\n"))
