"""The paper that pictures are drawn on: matplotlib figures, and PNG files that are the same for the same figure."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from forerun.interfaces.report.style import Look

_DPI = 150
_TICKS = (1.0, 2.0, 5.0)
"""where a decade has ticks"""
_LETTERS_AN_INCH = 10.5
"""of a title"""
_GRID = "#DDDDDD"


def drawing_is_possible() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def panels(width_inches: float, height_inches: float, columns: int = 1) -> tuple[Any, list[Any]]:
    """A figure and its axes, side by side. Needs matplotlib."""
    import matplotlib
    import matplotlib.backends.backend_agg
    import matplotlib.figure

    with matplotlib.rc_context({"hatch.linewidth": 0.6, "hatch.color": "#FFFFFF"}):
        figure = matplotlib.figure.Figure(figsize=(width_inches, height_inches), dpi=_DPI, layout="constrained")
        matplotlib.backends.backend_agg.FigureCanvasAgg(figure)
        axes = list(figure.subplots(1, columns, squeeze=False)[0])
    for each in axes:
        each.set_axisbelow(True)
        each.grid(True, color=_GRID, linewidth=0.6)
        for side in ("top", "right"):
            each.spines[side].set_visible(False)
    return figure, axes


def png(figure: Any) -> bytes:
    """The figure as a PNG file, without date or version in it."""
    import matplotlib
    import matplotlib.text

    for text in figure.findobj(matplotlib.text.Text):
        text.set_parse_math(False)  # names may hold dollar signs
    out = io.BytesIO()
    with matplotlib.rc_context({"hatch.linewidth": 0.6}), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of letters that the font lacks
        figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()


def heading(axes: Any, text: str) -> None:
    """A title on the left, as long as fits."""
    axes.set_title(short(text, int(_LETTERS_AN_INCH * axes.figure.get_figwidth() / len(axes.figure.axes))), loc="left")


def short(text: str, most: int = 42) -> str:
    """At most so many characters."""
    return text if len(text) <= most else text[: most - 3] + "..."


def logarithmic(axis: Any) -> None:
    """Ticks at 1, 2 and 5 of each decade, written out."""
    axis.axes.set_yscale("log")
    logarithmic_ticks(axis, _TICKS)


def logarithmic_ticks(axis: Any, places: Sequence[float]) -> None:
    """Ticks at these places of each decade of a logarithmic scale, written out."""
    import matplotlib.ticker

    axis.set_major_locator(matplotlib.ticker.LogLocator(subs=places))
    axis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:,.10g}"))
    axis.set_minor_formatter(matplotlib.ticker.NullFormatter())


def band(axes: Any, edges: Sequence[float], low: Sequence[float], heights: Sequence[float], look: Look) -> list[float]:
    """A band of `heights` (one for each step between `edges`) upon `low`, in its look; returns its upper edge."""
    high = [a + b for a, b in zip(low, [*heights, heights[-1]], strict=True)]
    axes.fill_between(
        edges,
        low,
        high,
        step="post",
        label=look.label,
        facecolor=look.colour,
        hatch=2 * look.hatch,
        edgecolor="white",
        linewidth=0,
    )
    return high


def legend_below(axes: Any, columns: int) -> None:
    """A legend under the axes, where it covers nothing; none for nothing labelled."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(
            loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=columns, frameon=False, fontsize=8, handlelength=2.2
        )
