"""An HTML table with the scope of each heading. Pages and notebooks share it."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun.interfaces.report.page import Table


def escaped(text: str) -> str:
    """Returns text for an element or for an attribute between quotes."""
    return html.escape(text, quote=True)


def table_html(part: Table, number: str = 'class="number"') -> str:
    """Returns the table; `number` is the attribute of cells with numbers."""
    caption = f"<caption>{escaped(part.caption)}</caption>" if part.caption else ""
    rows = "\n".join(f"<tr>{_cells(part, row, 'td', number)}</tr>" for row in part.rows[: part.most])
    head = f"<thead><tr>{_cells(part, part.columns, 'th', number)}</tr></thead>"
    return f"<table>\n{caption}{head}\n<tbody>\n{rows}\n</tbody></table>"


def left_out_words(part: Table) -> str:
    """Returns how many rows are left out, in words; empty for none."""
    return f"The first {part.most:,} of {len(part.rows):,} rows." if len(part.rows) > part.most else ""


def _cells(part: Table, row: Sequence[str], tag: str, number: str) -> str:
    scope = ' scope="col"' if tag == "th" else ""
    kinds = (f" {number}" if i in part.numeric else "" for i in range(len(row)))
    return "".join(f"<{tag}{scope}{kind}>{escaped(cell)}</{tag}>" for kind, cell in zip(kinds, row, strict=True))
