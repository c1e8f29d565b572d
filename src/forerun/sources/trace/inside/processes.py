"""Traces a program that trains in processes of `multiprocessing.Process`.

Such a process is a fork of the traced one, so it goes on tracing. A program starts one process for each rank and tells
it its rank in an argument, which `init_process_group` then shows: the process of the traced rank goes on, and those of
other ranks wait until the trace ends. The first process that records its step ends the trace. Processes that do
something else (loggers, simulators) run as they are.
"""

# mypy: disable-error-code="attr-defined"
# This module replaces a method of Python's, which its types don't allow.
from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.process
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from forerun.sources.trace.inside.recorder import Recorder

_DONE = signal.SIGUSR2
"""What a process of the program sends the traced process when its trace has an end."""
_TIMES, _PAUSE_S = 100, 0.1


class TraceEnded(BaseException):
    """Ends the program because one of its processes recorded the step of this rank, or failed. It is no exception that
    a program would catch."""


class Processes:
    """The processes that a program starts. `trace(run)` runs what one of them does, and returns whether the step was
    recorded."""

    def __init__(self, recorder: Recorder, trace: Callable[[Callable[[], None]], bool]) -> None:
        self._recorder, self._trace = recorder, trace
        self._first = os.getpid()
        self._is_traced_rank = False
        recorder.joined = self._joined

    def install(self) -> None:
        """Lets processes that the program starts from now on trace what they do."""
        signal.signal(_DONE, _end)
        process: Any = multiprocessing.process.BaseProcess
        start = process.start

        def traced(one: Any) -> None:
            self._recorder.starts_processes = True
            run = one.run
            one.run = lambda: self._run(run)
            try:
                start(one)
            finally:
                del one.run

        process.start = traced

    def _run(self, run: Callable[[], None]) -> None:
        """Runs in a process of the program."""
        signal.signal(_DONE, signal.SIG_DFL)
        recorded = False
        try:
            recorded = self._trace(run)
        finally:
            if recorded or self._is_traced_rank:
                self._tell()

    def _tell(self) -> None:
        """Ends the program. Python loses an exception that is raised by a signal in a function of `atexit` or of a
        fork, so the signal comes again until the trace is over."""
        with contextlib.suppress(ProcessLookupError):
            for _ in range(_TIMES):
                os.kill(self._first, _DONE)
                time.sleep(_PAUSE_S)

    def join(self) -> None:
        """Waits for the processes that the program leaves running, as Python does at a program's end."""
        for one in multiprocessing.active_children():
            if not one.daemon:
                one.join()

    def end(self) -> None:
        """Hears no more of the processes."""
        if os.getpid() == self._first:
            signal.signal(_DONE, signal.SIG_IGN)

    def _joined(self, rank: int, size: int) -> None:
        """Lets a process wait that turns out to be another rank than the traced one."""
        if os.getpid() == self._first:
            return
        if rank != min(self._recorder.rank, size - 1):
            while True:
                signal.pause()
        self._is_traced_rank = True
        self._recorder.note(f"the program starts its ranks with multiprocessing.Process; rank {rank} is traced")


def _end(_signal: int, _frame: Any) -> None:
    raise TraceEnded
