"""Draws the common parts of all pictures: matplotlib figures with axes, legends and ticks, and reproducible PNG
files.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

_DPI = 150
_GRID = "#DDDDDD"


def drawing_is_possible() -> bool:
    """Returns whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def panels(width_inches: float, height_inches: float, columns: int = 1, rows: int = 1) -> tuple[Any, list[Any]]:
    """Returns a figure and its axes, row by row. Needs matplotlib."""
    import matplotlib
    import matplotlib.backends.backend_agg
    import matplotlib.figure

    with matplotlib.rc_context({"hatch.linewidth": 0.6, "hatch.color": "#FFFFFF"}):
        figure = matplotlib.figure.Figure(figsize=(width_inches, height_inches), dpi=_DPI, layout="constrained")
        matplotlib.backends.backend_agg.FigureCanvasAgg(figure)
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for each in axes:
        each.set_axisbelow(True)
        each.grid(True, color=_GRID, linewidth=0.6)
        for side in ("top", "right"):
            each.spines[side].set_visible(False)
    return figure, axes


def png(figure: Any) -> bytes:
    """Returns the figure as a PNG file, without date or version in it."""
    import matplotlib
    import matplotlib.text

    for text in figure.findobj(matplotlib.text.Text):
        text.set_parse_math(False)  # names may hold dollar signs
    out = io.BytesIO()
    with matplotlib.rc_context({"hatch.linewidth": 0.6}), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of letters that the font lacks
        figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


def short(text: str, most: int = 42) -> str:
    """Returns `text`, cut to at most `most` characters."""
    return text if len(text) <= most else text[: most - 3] + "..."


def logarithmic_ticks(axis: Any, places: Sequence[float]) -> None:
    """Puts ticks at these places of each decade of a logarithmic scale, with plain numbers."""
    import matplotlib.ticker

    axis.set_major_locator(matplotlib.ticker.LogLocator(subs=places))
    axis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:,.10g}"))
    axis.set_minor_formatter(matplotlib.ticker.NullFormatter())


def legend_below(figure: Any, columns: int) -> None:
    """Draws one legend under all axes with every label once, or none if nothing has a label."""
    found = [axes.get_legend_handles_labels() for axes in figure.axes]
    handles = {label: handle for pair in found for handle, label in zip(*pair, strict=True)}
    look = {"frameon": False, "fontsize": 8, "handlelength": 2.2, "markerscale": 0.6}
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns, **look)
