"""Worker: runs searches in a separate process, which can be ended at any time.

Jobs wait in a queue, so that two pages don't disturb each other. A newer job of the same page and kind replaces the
older one. To stop a job, the worker first asks its process; if there is no answer soon, it kills the process and starts
another one. Otherwise the process stays from job to job and keeps what it has built.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeAlias

from forerun.common.errors import ForerunError

Event = dict[str, Any]
Tell: TypeAlias = Callable[[object], None]
"""hands something to the server: an event for the page, or an object for the server itself"""
Check: TypeAlias = Callable[..., None]
"""raises Cancelled where the work is to end; takes any arguments, so that it can be a search's `progress`"""
Work: TypeAlias = Callable[[Any, Tell, Check], None]
"""does a task in the process; a function of a module"""
SUPERSEDED: Event = {"kind": "superseded"}
WAITING: Event = {"kind": "waiting"}
PATIENCE_S = 0.3
"""seconds that the process has to end a job, before it is ended itself"""
_LOOK_EVERY_S = 0.02


class Cancelled(Exception):
    """A newer question has come, or nobody waits for the answer any more."""


@dataclass(eq=False)
class Job:
    """A task on its way: its events, until None ends them."""

    task: object
    key: tuple[str, str]
    """the page that asks, and the kind of its question"""
    heard: Callable[[object], None]
    """takes objects of the process that are not events"""
    _cancelled: threading.Event = field(default_factory=threading.Event)
    _events: queue.SimpleQueue[Event | None] = field(default_factory=queue.SimpleQueue)

    def cancel(self) -> None:
        """Asks the job to end."""
        self._cancelled.set()

    @property
    def is_cancelled(self) -> bool:
        """Returns whether the job is to end."""
        return self._cancelled.is_set()

    def tell(self, event: Event | None) -> None:
        """Adds an event, which the page sees at once; None is the last one."""
        self._events.put(event)

    def next(self) -> Event | None:
        """Waits for the next event and returns it; None after the last one."""
        return self._events.get()

    def take(self, message: object) -> None:
        """Passes on an event or an answer of the process."""
        if isinstance(message, dict):
            self.tell(message)
        else:
            self.heard(message)


class Worker:
    """The process that does `work`, and the jobs that wait for it."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._open: list[Job] = []
        self._lock = threading.Lock()
        self._process: _Process | None = None
        threading.Thread(target=self._run, name="jobs", daemon=True).start()

    def start(self, task: object, key: tuple[str, str], heard: Callable[[object], None]) -> Job:
        """Starts a job as soon as those before it have ended; those with the same `key` are asked to end."""
        job = Job(task, key, heard)
        with self._lock:
            for other in self._open:
                if other.key == key:
                    other.cancel()
            if any(not other.is_cancelled for other in self._open):
                job.tell(WAITING)
            self._open.append(job)
        self._waiting.put(job)
        return job

    def _run(self) -> None:
        self._process = _Process(self._work)  # before the first question, which then finds it ready
        while True:
            job = self._waiting.get()
            try:
                self._do(job)
            except Exception as error:  # whatever happens, the page gets an answer
                job.tell({"kind": "error", "message": bug_line(error)})
            with self._lock:
                self._open.remove(job)
            job.tell(None)

    def _do(self, job: Job) -> None:
        if job.is_cancelled:
            job.tell(SUPERSEDED)
            return
        process = self._process
        if process is None or not process.is_alive:
            process = self._process = _Process(self._work)
        if not process.do(job):
            self._process = None


class _Process:
    """A process that does one task after the other."""

    def __init__(self, work: Work) -> None:
        context = _context()
        self._ours, theirs = context.Pipe()
        process: BaseProcess = context.Process(target=_serve, args=(theirs, work), name="search", daemon=True)
        process.start()
        theirs.close()
        self._process, self._number = process, 0

    @property
    def is_alive(self) -> bool:
        """Returns whether the process runs."""
        return self._process.is_alive()

    def do(self, job: Job) -> bool:
        """Does a job until it ends; returns whether the process can do another one."""
        self._number += 1
        stop_by_s: float | None = None
        try:
            self._ours.send((self._number, job.task))
            while True:
                if job.is_cancelled and stop_by_s is None:
                    self._ours.send((self._number, None))
                    stop_by_s = time.monotonic() + PATIENCE_S
                if stop_by_s is not None and time.monotonic() > stop_by_s:
                    self._process.kill()
                    job.tell(SUPERSEDED)
                    return False
                if self._ours.poll(_LOOK_EVERY_S):
                    message = self._ours.recv()
                    if message is None:
                        return True
                    job.take(message)
        except (EOFError, OSError):
            message = (
                "the search ended without an answer; it may have run out of memory: fix more fields or use fewer GPUs"
            )
            job.tell({"kind": "error", "message": message})
            return False


def _context() -> Any:
    """Returns the method that starts the process. A fork of a server with threads could copy a held lock that nobody
    releases.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["forerun.interfaces.serve.searching"])
    return context


def _serve(pipe: Connection, work: Work) -> None:
    """Does the tasks that come through `pipe`, until the server has gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server
    with contextlib.suppress(EOFError, OSError):
        while True:
            number, task = pipe.recv()
            if task is None:
                continue  # asks a job to end that has ended

            def check(*_: object, own: int = number) -> None:
                while pipe.poll():
                    if pipe.recv() == (own, None):
                        raise Cancelled

            fault = _fault(work, task, pipe.send, check)
            if fault is not None:
                pipe.send(fault)
            pipe.send(None)


def _fault(work: Work, task: Any, tell: Tell, check: Check) -> Event | None:
    """Does a task; returns an event for whatever ended it early."""
    try:
        check()
        work(task, tell, check)
    except Cancelled:
        return SUPERSEDED
    except ForerunError as error:
        return {"kind": "error", "message": " ".join(str(error).split())}
    except OSError:
        raise
    except Exception as error:
        return {"kind": "error", "message": bug_line(error)}
    return None


def bug_line(error: Exception) -> str:
    """Returns the line that asks a user to report an error that Forerun should not have met, without a traceback."""
    return f"a bug of Forerun: {type(error).__name__}; please report what you asked"
