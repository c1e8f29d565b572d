"""Runs many tasks in this process or in local worker processes, and returns answers in the order of the tasks."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from forerun.common.errors import ForerunError

if TYPE_CHECKING:
    from typing_extensions import Self

Task = TypeVar("Task")
Answer = TypeVar("Answer")
CHUNK = 8
"""most tasks that a worker gets at once"""
_SHARES = 4
"""chunks that each worker gets at least, as long as there are as many tasks"""
_LOOK_EVERY_S = 1.0
"""how often a worker checks that its parent process still runs"""


def available_cpus() -> int:
    """Returns the number of CPUs that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_workers() -> int:
    """Returns one worker for each CPU. One in all where processes can't fork, as spawning runs a user's script
    again."""
    return available_cpus() if sys.platform == "linux" else 1


class Processes(Generic[Task, Answer]):
    """Answers tasks with `workers` processes. Each process gets up to `chunk` tasks at a time. A context manager.

    With one worker, or fewer than `worth_a_pool` tasks, this process answers them itself, since starting processes
    would take longer. Raises ForerunError for fewer than one worker.
    """

    def __init__(self, answer: Callable[[Task], Answer], workers: int, worth_a_pool: int, chunk: int = CHUNK) -> None:
        if workers < 1:
            raise ForerunError(f"workers must be at least 1, got {workers}")
        # A daemonic process may not start others.
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
        """Returns an iterator of an answer for each task, in order. Worker processes start with the tasks at once."""
        if self._pool is None and (self._workers == 1 or len(tasks) < self._worth_a_pool):
            return map(self._answer, tasks)
        known: list[Answer] = []
        if self._pool is None:
            known.append(self._answer(tasks[0]))  # compiles the functions that forked processes inherit
            tasks = tasks[1:]
            self._pool = self._start()
        size = max(1, min(self._chunk, len(tasks) // (_SHARES * self._workers)))  # few tasks: all workers get some
        chunks = [tasks[i : i + size] for i in range(0, len(tasks), size)]
        return chain(known, chain.from_iterable(self._pool.map(_answer_chunk, chunks)))

    def begin(self, tasks: Sequence[Task]) -> Iterator[Answer]:
        """Returns an iterator of an answer for each task, in order. Worker processes answer all tasks meanwhile.

        With one worker this process answers a task when its answer is read.
        """
        if self._workers == 1 or not tasks:
            return map(self._answer, tasks)
        if self._pool is None:
            self._pool = self._start()
        return chain.from_iterable(self._pool.map(_answer_chunk, [[task] for task in tasks]))

    def _start(self) -> ProcessPoolExecutor:
        method = "fork" if sys.platform == "linux" else "spawn"
        context = multiprocessing.get_context(method)
        return ProcessPoolExecutor(self._workers, context, initializer=_adopt, initargs=(self._answer,))


_adopted: list[Callable[[Any], Any]] = []
"""the function that answers tasks in a worker process"""


def _adopt(answer: Callable[[Any], Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent process
    gc.freeze()  # what the parent made lives as long as this process: collections needn't look at it
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    _adopted.append(answer)


def _end_with(parent: int) -> None:
    """Ends this process soon after its parent, which can't tell its workers when it is killed."""
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY_S)
    os._exit(1)


def _answer_chunk(tasks: Sequence[Any]) -> list[Any]:
    return [_adopted[-1](task) for task in tasks]
