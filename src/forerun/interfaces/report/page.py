"""A page: one HTML file with everything that it shows. It opens offline and sends no requests.

Pages are lists of typed parts. All text is escaped here. Plots are figures as plain data in the schema of plotly.js,
drawn by chart.js, which is inside the page. A Content-Security-Policy in the page forbids every request, and every
script except its own two, which it allows by their hashes. The same parts give the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from forerun.common.files import whole_file
from forerun.common.shipped import shipped_text
from forerun.interfaces.report.html_table import escaped as _text
from forerun.interfaces.report.html_table import left_out_words, table_html

MOST_ROWS = 60
"""rows that a table shows by default"""


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading, which opens a section and appears in the list of contents."""

    text: str


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph; `kind` is note (smaller), hint (for the screen only), warning or good (they stand out)."""

    text: str
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Listing:
    """Short lines, one under the other."""

    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures that matter most: (name, value with its unit, remark)."""

    entries: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under column names; numbers stand on the right. Of more than `most` rows the first are shown."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    numeric: frozenset[int] = frozenset()
    """columns of numbers"""
    most: int = MOST_ROWS


_DRAWN = ("bar", "scatter")
"""kinds of traces that chart.js draws"""


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure in the schema of plotly.js. chart.js draws the parts of the schema that Forerun uses.

    `about` describes the figure in words, for people who can't see it.
    """

    data: list[dict[str, Any]]
    layout: dict[str, Any]
    about: str
    height_px: int = 380

    def __post_init__(self) -> None:
        """Refuses what chart.js would draw as a line."""
        assert all(trace["type"] in _DRAWN for trace in self.data), "chart.js draws bars and lines"


@dataclass(frozen=True, slots=True)
class Code:
    """Text in a fixed-width font: a configuration, a command."""

    text: str
    caption: str = ""


Part: TypeAlias = Heading | Text | Listing | Figures | Table | Plot | Code


@dataclass(frozen=True, slots=True)
class Document:
    """The contents of a page."""

    title: str
    subtitle: str
    parts: tuple[Part, ...]


def write_page(path: str | Path, document: Document) -> None:
    """Writes a page. The file appears whole or not at all.

    Raises ForerunError if the file can't be written.
    """
    content = page(document)
    with whole_file(path) as file:
        file.write(content)


def page(document: Document) -> bytes:
    """Returns the page as UTF-8."""
    title, parts = document.title, document.parts
    scripts = (_shipped("chart.js"), _shipped("page.js"))
    figures = [
        {"data": part.data, "layout": part.layout, "height": part.height_px} for part in parts if isinstance(part, Plot)
    ]
    out = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(scripts)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="referrer" content="no-referrer">',
        f"<title>{_text(title)}</title>",
        '<link rel="icon" href="data:,">',
        f"<style>\n{_shipped('page.css')}</style>",
        "</head>",
        "<body>",
        "<header>",
        f"<h1>{_text(title)}</h1>",
        f"<p>{_text(document.subtitle)}</p>",
        *_contents(parts),
        "</header>",
        "<main>",
        "<noscript><p class='warning'>The plots need JavaScript; tables and text don't.</p></noscript>",
        *_sections(parts),
        "</main>",
        f'<script type="application/json" id="figures">{_data(figures)}</script>',
        *(f"<script>{script}</script>" for script in scripts),
        "</body>",
        "</html>",
        "",
    ]
    return "\n".join(out).encode()


def plot_text(text: str) -> str:
    """Escapes text of a user for a plot, because a plot interprets some HTML in names."""
    return html.escape(text, quote=False)


def _policy(scripts: Sequence[str]) -> str:
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(each.encode()).digest()).decode()}'" for each in scripts
    )
    own = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"
    return f"{own}; base-uri 'none'; form-action 'none'"


@lru_cache(maxsize=4)
def _shipped(name: str) -> str:
    return shipped_text("forerun.interfaces.report", name)


def _data(figures: list[dict[str, Any]]) -> str:
    text = json.dumps(figures, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _contents(parts: Sequence[Part]) -> list[str]:
    headings = [part for part in parts if isinstance(part, Heading)]
    links = [f'<li><a href="#section-{i}">{_text(each.text)}</a></li>' for i, each in enumerate(headings, 1)]
    return ['<nav aria-label="contents"><ul>', *links, "</ul></nav>"] if len(links) > 2 else []


def _sections(parts: Sequence[Part]) -> list[str]:
    """Returns every part as HTML; a Heading closes the section before it and opens its own."""
    out: list[str] = []
    n_sections = n_plots = 0
    for part in parts:
        if isinstance(part, Heading):
            n_sections += 1
            out += ["</section>"] if n_sections > 1 else []
            out += [f'<section id="section-{n_sections}">', f"<h2>{_text(part.text)}</h2>"]
        elif isinstance(part, Plot):
            out.append(_plot(part, n_plots))
            n_plots += 1
        else:
            out += _plain(part)
    return [*out, "</section>"] if n_sections else out


def _plot(part: Plot, number: int) -> str:
    style = f"min-height:{part.height_px}px"
    return f'<div class="plot" id="plot-{number}" role="figure" aria-label="{_text(part.about)}" style="{style}"></div>'


def _plain(part: Text | Listing | Figures | Table | Code) -> list[str]:
    if isinstance(part, Text):
        kind = f' class="{_text(part.kind)}"' if part.kind else ""
        return [f"<p{kind}>{_text(part.text)}</p>"]
    if isinstance(part, Listing):
        return ["<ul class='lines'>", *(f"<li>{_text(line)}</li>" for line in part.lines), "</ul>"]
    if isinstance(part, Figures):
        return [
            '<dl class="figures">',
            *(
                f"<div><dt>{_text(name)}</dt><dd>{_text(value)}<small>{_text(remark)}</small></dd></div>"
                for name, value, remark in part.entries
            ),
            "</dl>",
        ]
    if isinstance(part, Code):
        caption = [f'<p class="note">{_text(part.caption)}</p>'] if part.caption else []
        return [*caption, f'<pre tabindex="0">{_text(part.text)}</pre>']
    return _table(part)


def _table(part: Table) -> list[str]:
    words = left_out_words(part)
    note = [f'<p class="note">{_text(words)}</p>'] if words else []
    label = f' role="region" aria-label="{_text(part.caption)}"' if part.caption else ""
    return [f'<div class="table" tabindex="0"{label}>', f"{table_html(part)}</div>", *note]
