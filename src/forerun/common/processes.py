"""Answers to many tasks, from this process or from local ones; their order is that of the tasks."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from forerun.common.errors import ForerunError

if TYPE_CHECKING:
    from typing_extensions import Self

Task = TypeVar("Task")
Answer = TypeVar("Answer")
CHUNK = 8
"""tasks sent to a process at once"""
_LOOK_EVERY_S = 1.0
"""how often a process looks whether the one that started it is still there"""


def available_cpus() -> int:
    """CPUs that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_workers() -> int:
    """One process for each CPU; one alone where processes can't be forked, so that any script can start them."""
    return available_cpus() if sys.platform == "linux" else 1


class Processes(Generic[Task, Answer]):
    """Answers tasks with `workers` processes (1: here), `chunk` of them at a time; fewer than `worth_a_pool` of them
    always here, as starting processes takes longer. A context manager.

    Raises ForerunError for fewer than one worker.
    """

    def __init__(self, answer: Callable[[Task], Answer], workers: int, worth_a_pool: int, chunk: int = CHUNK) -> None:
        if workers < 1:
            raise ForerunError(f"workers must be at least 1, got {workers}")
        # a process of a pool may not start others
        self._workers = 1 if multiprocessing.current_process().daemon else workers
        self._answer = answer
        self._worth_a_pool = worth_a_pool
        self._chunk = chunk
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=kind is None, cancel_futures=True)

    def run(self, tasks: Sequence[Task]) -> Iterator[Answer]:
        """An answer for each task, in order."""
        if self._pool is None and (self._workers == 1 or len(tasks) < self._worth_a_pool):
            yield from map(self._answer, tasks)
            return
        if self._pool is None:
            yield self._answer(tasks[0])  # compiles what forked processes then inherit
            tasks = tasks[1:]
            self._pool = self._start()
        chunks = [tasks[i : i + self._chunk] for i in range(0, len(tasks), self._chunk)]
        for answers in self._pool.map(_answer_chunk, chunks):
            yield from answers

    def _start(self) -> ProcessPoolExecutor:
        method = "fork" if sys.platform == "linux" else "spawn"
        context = multiprocessing.get_context(method)
        return ProcessPoolExecutor(self._workers, context, initializer=_adopt, initargs=(self._answer,))


_adopted: list[Callable[[Any], Any]] = []
"""how this process answers, when it is one of a pool"""


def _adopt(answer: Callable[[Any], Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    _adopted.append(answer)


def _end_with(parent: int) -> None:
    """End this process soon after the one that started it, which can't say so when it is killed."""
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY_S)
    os._exit(1)


def _answer_chunk(tasks: Sequence[Any]) -> list[Any]:
    return [_adopted[-1](task) for task in tasks]
