"""Simulates many runs in parallel processes, and keeps their outcomes in a file, so that a study can continue."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from forerun.answers.goodput.outcome import Outcome
from forerun.answers.goodput.request import RunRequest
from forerun.answers.goodput.walk import walk
from forerun.common.content import digest_of, forerun_digest
from forerun.common.records import Records
from forerun.common.workers import Workers

if TYPE_CHECKING:
    from typing_extensions import Self

Task = tuple[RunRequest, int, int]
"""a run, the seed, and the number of the run under this seed"""
_WORTH_A_POOL = 64
_TABLE = "run"
_OUTCOME = TypeAdapter(Outcome)


class Walks:
    """A context manager, on processes of this machine or on a Ray cluster. Without a store nothing is kept.

    The key of an outcome has all that it depends on, Forerun's own files too, so any studies may share a file. Raises
    ForerunError if the file can't be read or written, or holds something else, and as `RayCluster` does.
    """

    def __init__(
        self,
        workers: int | None,
        store: str | Path | None = None,
        executor: str = "local",
        ray_address: str | None = None,
    ) -> None:
        self._how = Workers(workers, executor, ray_address).answering(_walk, forerun_digest, _WORTH_A_POOL)
        self._store = None if store is None else Records(Path(store), _TABLE)
        self._open = ExitStack()

    def __enter__(self) -> Self:
        self._processes = self._open.enter_context(self._how)
        if self._store is not None:
            self._open.enter_context(self._store)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)

    def run(self, tasks: Sequence[Task]) -> Iterator[Outcome]:
        """Yields the outcome of each task, in order; one that is simulated is stored at once."""
        if self._store is None:
            yield from self._processes.run(tasks)
            return
        keys = [_key(task) for task in tasks]
        known = self._store.of(keys)
        simulated = self._processes.run([task for key, task in zip(keys, tasks, strict=True) if key not in known])
        for key in keys:
            if key in known:
                try:
                    yield _OUTCOME.validate_python(known[key])
                except ValidationError as error:
                    raise self._store.unusable(f"a damaged record: {type(error).__name__}") from None
            else:
                outcome = next(simulated)
                self._store.add([(key, _OUTCOME.dump_python(outcome, mode="json"))])
                yield outcome


def _walk(task: Task) -> Outcome:
    return walk(*task)


def _key(task: Task) -> str:
    request, seed, run = task
    return hashlib.sha256(f"{_digest(request)} {seed} {run}".encode()).hexdigest()


@lru_cache(maxsize=64)
def _digest(request: RunRequest) -> str:
    return digest_of(request)
