"""One line on a terminal with the running time of a command that shows no progress of its own."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from forerun.interfaces.report.ticking import ticking

FIRST_AFTER_S = 2.0
"""seconds until the line appears"""
_AGAIN_AFTER_S = 1.0
_ERASE = "\r\033[K"

_silenced: list[str] = []
"""the work that shows its own progress now"""


@contextmanager
def working(command: str = "") -> Iterator[None]:
    """Shows on stderr, if it is a terminal, how many seconds `command` has been at work, from the third second on.

    While compiled code runs for long the seconds stand still.
    """
    if not sys.stderr.isatty():
        yield
        return
    began, shown = time.monotonic(), False

    def show() -> None:
        nonlocal shown
        if not _silenced:
            shown = True
            seconds = int(time.monotonic() - began)
            # The cursor goes back to the start of the line, where the command's own output replaces it.
            print(f"{_ERASE}forerun {command} has worked for {seconds} s\r", end="", file=sys.stderr, flush=True)

    try:
        with ticking(show, _AGAIN_AFTER_S, FIRST_AFTER_S):
            yield
    finally:
        if shown:
            print(_ERASE, end="", file=sys.stderr, flush=True)


@contextmanager
def own_progress(what: str) -> Iterator[None]:
    """Silences the line while `what` shows its own progress."""
    _silenced.append(what)
    try:
        yield
    finally:
        _silenced.remove(what)
