"""The console that every command prints to, and the same as text."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable

from rich.console import Console


def console(stderr: bool = False, piped_width: int | None = None) -> Console:
    """Returns a console that prints text as it stands; colours only where the terminal wants them.

    `piped_width` is its width in columns where nobody looks at a terminal, so that names are not cut.
    """
    width = None if sys.stdout.isatty() else piped_width
    return Console(stderr=stderr, width=width, markup=False, highlight=False)


def printed_text(show: Callable[[Console], None], width: int) -> str:
    """Returns the text that `show` prints to a console of `width` columns, without colours even if FORCE_COLOR is
    set.
    """
    text = io.StringIO()
    show(Console(file=text, width=width, markup=False, highlight=False, color_system=None))
    return text.getvalue()
