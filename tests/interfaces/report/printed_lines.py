"""What a function prints to a console, in lines and in words."""

from __future__ import annotations

import io
from itertools import pairwise

from rich.console import Console

BOLD = "\033[1m"


def printed(function, *arguments):
    """The lines that a function prints, without spaces at their ends."""
    out = Console(file=io.StringIO(), width=160, color_system=None, markup=False, highlight=False)
    function(out, *arguments)
    return [line.rstrip() for line in out.file.getvalue().splitlines()]


def words(function, *arguments):
    """The same lines with single spaces; empty lines are left out."""
    return [" ".join(line.split()) for line in printed(function, *arguments) if line]


def blocks(function, *arguments):
    """The first line of each block: empty lines part them."""
    lines = ["", *printed(function, *arguments)]
    return [line for above, line in pairwise(lines) if line and not above]


def crowded(function, *arguments):
    """The titles in bold that stand right below other text, where an empty line should part them."""
    out = Console(
        file=io.StringIO(), width=160, color_system="standard", force_terminal=True, markup=False, highlight=False
    )
    function(out, *arguments)
    lines = ["", *out.file.getvalue().splitlines()]
    return [line for above, line in pairwise(lines) if BOLD in line and BOLD not in above and above.strip()]


def joined(rows):
    """Rows of cells as the lines that `words` finds of them."""
    return [" ".join(row) for row in rows]
