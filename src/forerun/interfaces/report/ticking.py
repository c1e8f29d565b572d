"""Periodic calls while a command runs, from one timer of the process.

A timer makes the calls instead of a thread, because commands fork. There is no call while compiled code runs.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

_TICK_S = 0.1
_ALARM = getattr(signal, "SIGALRM", None)


@dataclass
class _Call:
    call: Callable[[], None]
    every_s: float
    due: float


_calls: list[_Call] = []


def can_tick() -> bool:
    """Returns whether `ticking` makes calls here.

    It makes none outside of the main thread, where a program uses SIGALRM itself, or on systems that lack it.
    """
    if _ALARM is None or threading.current_thread() is not threading.main_thread():
        return False
    return bool(_calls) or signal.getsignal(_ALARM) == signal.SIG_DFL


@contextmanager
def ticking(call: Callable[[], None], every_s: float, first_after_s: float) -> Iterator[None]:
    """Calls `call` every `every_s` seconds while the block runs. Its exceptions are raised in the block."""
    if not can_tick():
        yield
        return
    assert _ALARM is not None
    entry = _Call(call, every_s, time.monotonic() + first_after_s)
    if not _calls:
        signal.signal(_ALARM, _tick)
        signal.setitimer(signal.ITIMER_REAL, _TICK_S, _TICK_S)
    _calls.append(entry)
    try:
        yield
    finally:
        _calls.remove(entry)
        if not _calls:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(_ALARM, signal.SIG_DFL)


def _tick(number: int, frame: FrameType | None) -> None:
    now = time.monotonic()
    for each in tuple(_calls):
        if now >= each.due:
            each.due = now + each.every_s
            each.call()
