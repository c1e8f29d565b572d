"""The console that every command prints to."""

from __future__ import annotations

from rich.console import Console


def console(stderr: bool = False) -> Console:
    """Returns a console that prints text as it stands; colours only where the terminal wants them."""
    return Console(stderr=stderr, markup=False, highlight=False, soft_wrap=False)
