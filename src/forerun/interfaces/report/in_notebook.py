"""Answers in a notebook: the figures and tables of their pages as HTML, and their plots as one picture."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.common.errors import ForerunError
from forerun.common.shown import Picture
from forerun.interfaces.report.drawing import drawing_is_possible
from forerun.interfaces.report.html_table import escaped, left_out_words, table_html
from forerun.interfaces.report.page import Document, Figures, Part, Plot, Table, Text
from forerun.interfaces.report.pictures import picture

_NUMBER = 'style="text-align: right"'
_TABLES = 1
"""tables of a page that a notebook shows; the page has the rest"""


def document_html(document: Document) -> str:
    """Returns the figures and the first table of a page."""
    figures = [part for part in document.parts if isinstance(part, Figures)][:1]
    tables = [part for part in document.parts if isinstance(part, Table)][:_TABLES]
    return parts_html(document.title, document.subtitle, [*figures, *tables])


def parts_html(title: str, subtitle: str, parts: Sequence[Part]) -> str:
    """Returns figures, tables and paragraphs under a title, without styles or scripts of their own."""
    lines = [f'<div role="group" aria-label="{escaped(title)}">', f"<p><strong>{escaped(title)}</strong>"]
    lines.append(f"<br>{escaped(subtitle)}</p>" if subtitle else "</p>")
    for part in parts:
        if isinstance(part, Figures):
            rows = tuple((name, value, remark) for name, value, remark in part.entries)
            lines.append(table_html(Table(("figure", "value", "remark"), rows, numeric=frozenset({1})), _NUMBER))
        elif isinstance(part, Table):
            lines.append(table_html(part, _NUMBER))
            lines += [f"<p>{escaped(words)}</p>" for words in [left_out_words(part)] if words]
        elif isinstance(part, Text):
            lines.append(f"<p>{escaped(part.text)}</p>")
    return "\n".join([*lines, "</div>"])


def shown_picture(title: str, *plots: Plot, note: str = "") -> Picture:
    """Returns the plots side by side. Raises ForerunError if matplotlib is not installed."""
    needs_matplotlib()
    return Picture(picture(title, *plots, note=note), ". ".join([title, *(plot.about for plot in plots)]))


def needs_matplotlib() -> None:
    """Raises ForerunError if matplotlib is not installed."""
    if not drawing_is_possible():
        raise ForerunError("pictures need matplotlib: pip install 'forerun[plot]'")
