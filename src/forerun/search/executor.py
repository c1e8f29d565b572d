"""Predictions of many plans, in this process or in local ones; the order of the answers is that of the plans."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import TypeAlias

from forerun.analysis.prediction import Prediction
from forerun.cluster.types import Cluster
from forerun.errors import ForerunError
from forerun.model.spec import ModelSpec
from forerun.plan.plan import Plan

Predictor: TypeAlias = Callable[[ModelSpec, Plan, Cluster], Prediction]
Answer: TypeAlias = "Prediction | Refused"
CHUNK = 8
"""plans sent to a process at once"""
WORTH_A_POOL = 64
"""fewer plans than this are predicted here: starting processes takes longer"""


@dataclass(frozen=True, slots=True)
class Refused:
    """A plan that the predictor refused."""

    reason: str


@dataclass(frozen=True, slots=True)
class _Task:
    predictor: Predictor
    model: ModelSpec
    cluster: Cluster

    def answer(self, plan: Plan) -> Answer:
        try:
            return self.predictor(self.model, plan, self.cluster)
        except ForerunError as error:
            return Refused(str(error))


def available_cpus() -> int:
    """CPUs that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_workers() -> int:
    """One process for each CPU; one alone where processes can't be forked, so that any script can search."""
    return available_cpus() if sys.platform == "linux" else 1


class Executor:
    """Predicts plans of one model on one cluster with `workers` processes (1: here). A context manager.

    Raises ForerunError for fewer than one worker.
    """

    def __init__(self, predictor: Predictor, model: ModelSpec, cluster: Cluster, workers: int) -> None:
        if workers < 1:
            raise ForerunError(f"workers must be at least 1, got {workers}")
        # a process of a pool may not start others
        self._workers = 1 if multiprocessing.current_process().daemon else workers
        self._task = _Task(predictor, model, cluster)
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Executor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=kind is None, cancel_futures=True)

    def run(self, plans: Sequence[Plan]) -> Iterator[Answer]:
        """An answer for each plan, in order."""
        if self._pool is None and (self._workers == 1 or len(plans) < WORTH_A_POOL):
            yield from map(self._task.answer, plans)
            return
        if self._pool is None:
            yield self._task.answer(plans[0])  # compiles what forked processes then inherit
            plans = plans[1:]
            self._pool = self._start()
        chunks = [plans[i : i + CHUNK] for i in range(0, len(plans), CHUNK)]
        for answers in self._pool.map(_answer_chunk, chunks):
            yield from answers

    def _start(self) -> ProcessPoolExecutor:
        method = "fork" if sys.platform == "linux" else "spawn"
        context = multiprocessing.get_context(method)
        return ProcessPoolExecutor(self._workers, context, initializer=_adopt, initargs=(self._task,))


_adopted: list[_Task] = []
"""what this process predicts, when it is one of a pool"""


def _adopt(task: _Task) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    _adopted.append(task)


def _answer_chunk(plans: Sequence[Plan]) -> list[Answer]:
    return [_adopted[-1].answer(plan) for plan in plans]
