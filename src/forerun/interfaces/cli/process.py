"""The process of the console command: its signals, its memory, and streams that are closed or lack characters."""

from __future__ import annotations

import codecs
import gc
import os
import signal
import sys
from io import TextIOWrapper
from types import FrameType
from typing import Any, NoReturn

from forerun.interfaces.cli.exit_codes import LIMIT_REACHED

_ENDING = ("SIGTERM", "SIGHUP")
_ESCAPED = "forerun.escaped"
_COLLECT_AFTER = (100_000, 20, 50)
"""thresholds of Python's garbage collector: a command makes many objects that live long, and hardly a cycle"""


class Stopped(BaseException):
    """Stops a command from outside. Files and processes that it made are cleaned up on the way out.

    It is no KeyboardInterrupt, which Typer takes for Ctrl-C.
    """

    def __init__(self, said: str, code: int) -> None:
        super().__init__(said)
        self.code = code
        """of the process"""


class Ended(Stopped):
    """A signal asks the process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}", 128 + number)


class LimitReached(Stopped):
    """A limit of the command line ends the command."""

    def __init__(self, said: str) -> None:
        super().__init__(said, LIMIT_REACHED)


def prepare_process() -> None:
    """Makes signals end the process as Ctrl-C does, streams take every character, and the garbage collector run seldom.

    A signal that the caller has the process ignore, as nohup does, stays ignored.
    """
    gc.set_threshold(*_COLLECT_AFTER)
    for name in _ENDING:
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _end)
    codecs.register_error(_ESCAPED, _escaped)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # the caller closed it; a file must not get its number
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
        elif isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=_ESCAPED)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise Ended(number)


def _escaped(error: UnicodeError) -> tuple[str, int]:
    """Returns characters that an encoding lacks as JSON escapes, so that printed JSON stays JSON."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    units: Any = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4)), error.end
