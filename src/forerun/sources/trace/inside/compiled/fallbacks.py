"""Handles failures of torch.compile, after which code runs uncompiled: the trace ends, or continues with a note.

Graph breaks are no failures: torch.compile splits the graph there, on a GPU too.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from types import FrameType

from forerun.sources.trace.inside.recorder import Recorder
from forerun.sources.trace.inside.refusal import Refusal
from forerun.sources.trace.remains import is_users

_LONGEST = 300
"""The most characters of an exception that are shown."""


class Fallbacks:
    """The compilations that failed. Unless `allowed`, the first one ends the trace."""

    def __init__(self, recorder: Recorder, allowed: bool) -> None:
        self._recorder, self._allowed = recorder, allowed

    def failed(self, what: str, error: Exception, place: str = "") -> None:
        """Records that the compilation of `what` failed with `error`. The code at `place` runs uncompiled.

        Raises:
            Refusal: this is not allowed.
        """
        line = _place_of(error) or place or _caller()
        cause = f"{type(_first(error)).__name__}: {_words(_first(error))}"
        if not self._allowed:
            raise Refusal(
                f"torch.compile fails on {what} ({cause}), and a trace of uncompiled code would be too slow; mend the"
                " script, or trace it uncompiled there with --allow-fallback",
                line,
            ) from error
        self._recorder.fallbacks.setdefault(f"{what} ran uncompiled{f' at {line}' if line else ''} ({cause})")


def _first(error: BaseException) -> BaseException:
    """Returns the exception that began a chain of Dynamo's own."""
    inner = getattr(error, "inner_exception", None) or error.__cause__
    return _first(inner) if inner is not None and inner is not error else error


def _words(error: BaseException) -> str:
    """Returns the part of Dynamo's message that describes the error, on one line."""
    text = " ".join(str(error).partition("\nfrom user code")[0].partition("Developer debug context")[0].split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} [...]"


def _place_of(error: BaseException | None) -> str:
    """Returns file and line of the program's code that Dynamo was capturing, or ""."""
    while error is not None:
        for frame in reversed(getattr(error, "real_stack", None) or ()):
            if is_users(frame.filename):
                return f"{frame.filename}:{frame.lineno}"
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            if is_users(frame.filename):
                return f"{frame.filename}:{frame.lineno}"
        error = getattr(error, "inner_exception", None) or error.__cause__
    return ""


def _caller() -> str:
    """Returns file and line of the program's innermost frame that runs now, or ""."""
    for frame in _frames(sys._getframe(1)):
        if is_users(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return ""


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
