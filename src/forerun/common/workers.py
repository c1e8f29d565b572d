"""Workers: where many tasks run, in this process, in processes of this machine, or on a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from forerun.common.errors import ForerunError
from forerun.common.processes import CHUNK, Answer, Processes, Task, default_workers
from forerun.common.ray_cluster import RayCluster

Asked = TypeVar("Asked", contravariant=True)
Found = TypeVar("Found", covariant=True)


class AnswersTasks(Protocol[Asked, Found]):
    """Answers tasks in their order."""

    def run(self, tasks: Sequence[Asked], /) -> Iterator[Found]:
        """Yields an answer for each task, in order."""


@dataclass(frozen=True, slots=True)
class Workers:
    """Names the workers that answer tasks. Answers come in the tasks' order, and don't depend on who gives them.

    Raises ForerunError for an executor other than `local` and `ray`, or a Ray address with local processes.
    """

    number: int | None = None
    """processes (1: this one), or chunks that a Ray cluster works on at once; None: one for each CPU"""
    executor: str = "local"
    ray_address: str | None = None
    """None: RAY_ADDRESS, or a new cluster on this machine"""

    def __post_init__(self) -> None:
        if self.executor not in ("local", "ray"):
            raise ForerunError(f"executor must be local or ray, got {self.executor!r}")
        if self.executor == "local" and self.ray_address is not None:
            raise ForerunError(f"Ray address {self.ray_address} needs executor ray, but the executor is local")

    def answering(
        self, answer: Callable[[Task], Answer], basis: Callable[[], str], worth_a_pool: int, chunk: int = CHUNK
    ) -> AbstractContextManager[AnswersTasks[Task, Answer]]:
        """Returns a context manager whose `run` answers tasks, up to `chunk` of them at once by one worker.

        Args:
            basis: returns a digest of everything that answers depend on beside the task, which all machines share.
            worth_a_pool: fewer tasks than this are answered in this process, unless Ray answers them.

        Raises ForerunError for fewer than one worker, and as `RayCluster` does.
        """
        if self.executor == "ray":
            return RayCluster(answer, basis, self.ray_address, self.number, chunk)
        return Processes(answer, default_workers() if self.number is None else self.number, worth_a_pool, chunk)


HERE = Workers()
"""one process for each CPU of this machine"""
