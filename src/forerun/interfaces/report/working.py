"""One line on a terminal that says how long a command has been at work, where it shows no progress of its own."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

FIRST_AFTER_S = 2.0
"""seconds until the line appears"""
_AGAIN_AFTER_S = 1.0
_ERASE = "\r\033[K"

_silenced: list[str] = []
"""what shows its own progress now"""


@contextmanager
def working(command: str = "") -> Iterator[None]:
    """Shows on stderr, if it is a terminal, how many seconds `command` has been at work, from the third second on.

    A timer of the process wakes the line, not a thread, because commands fork. While compiled code runs for long the
    seconds stand still.
    """
    alarm = getattr(signal, "SIGALRM", None)
    in_main_thread = threading.current_thread() is threading.main_thread()
    if alarm is None or not in_main_thread or not sys.stderr.isatty() or signal.getsignal(alarm) != signal.SIG_DFL:
        yield
        return
    began, shown = time.monotonic(), False

    def show(number: int, frame: FrameType | None) -> None:
        nonlocal shown
        if not _silenced:
            shown = True
            seconds = int(time.monotonic() - began)
            # The cursor goes back to the start of the line, where the command's own output replaces it.
            print(f"{_ERASE}forerun {command} has worked for {seconds} s\r", end="", file=sys.stderr, flush=True)

    signal.signal(alarm, show)
    signal.setitimer(signal.ITIMER_REAL, FIRST_AFTER_S, _AGAIN_AFTER_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(alarm, signal.SIG_DFL)
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
