"""What a function prints to a console, in lines and in words."""

from __future__ import annotations

import io

from rich.console import Console


def printed(function, *arguments):
    """The lines that a function prints, without spaces at their ends."""
    out = Console(file=io.StringIO(), width=160, color_system=None, markup=False, highlight=False)
    function(out, *arguments)
    return [line.rstrip() for line in out.file.getvalue().splitlines()]


def words(function, *arguments):
    """The same lines with single spaces; empty lines are left out."""
    return [" ".join(line.split()) for line in printed(function, *arguments) if line]


def joined(rows):
    """Rows of cells as the lines that `words` finds of them."""
    return [" ".join(row) for row in rows]
