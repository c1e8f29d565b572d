"""Worker: answers one question at a time in a thread; a newer question takes the place of those before it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

from forerun.common.errors import ForerunError

Event = dict[str, Any]
SUPERSEDED: Event = {"kind": "superseded"}


class Cancelled(Exception):
    """A newer question has come, or nobody waits for the answer any more."""


class Job:
    """A question on its way: its events, until None ends them."""

    def __init__(self, work: Callable[[Job], Iterator[Event]]) -> None:
        self._work = work
        self._cancelled = threading.Event()
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()

    def cancel(self) -> None:
        """Ends the work at its next check."""
        self._cancelled.set()

    def check(self, *_: object) -> None:
        """Raises Cancelled where the job is to end. Takes any arguments, so that it can be a search's `progress`."""
        if self._cancelled.is_set():
            raise Cancelled

    def tell(self, event: Event) -> None:
        """Adds an event, which the page sees at once."""
        self._events.put(event)

    def next(self) -> Event | None:
        """Waits for the next event and returns it; None after the last one."""
        return self._events.get()

    def run(self) -> None:
        """Does the work; whatever happens ends in an event."""
        try:
            self.check()
            for event in self._work(self):
                self.tell(event)
                self.check()
        except Cancelled:
            self.tell(SUPERSEDED)
        except ForerunError as error:
            self.tell({"kind": "error", "message": " ".join(str(error).split())})
        except Exception as error:
            self.tell({"kind": "error", "message": bug_line(error)})
        finally:
            self._events.put(None)


def bug_line(error: Exception) -> str:
    """Returns the line that asks a user to report an error that Forerun should not have met, without a traceback."""
    return f"a bug of Forerun: {type(error).__name__}; please report what you asked"


class Worker:
    """The one thread that searches."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._newest: Job | None = None
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="search", daemon=True).start()

    def start(self, work: Callable[[Job], Iterator[Event]]) -> Job:
        """Starts `work` as soon as the work before it has ended, which it asks to end."""
        job = Job(work)
        with self._lock:
            if self._newest is not None:
                self._newest.cancel()
            self._newest = job
        self._waiting.put(job)
        return job

    def _run(self) -> None:
        while True:
            self._waiting.get().run()
