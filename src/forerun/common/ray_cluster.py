"""Runs many tasks on a Ray cluster and returns answers in the order of the tasks, even when workers are lost."""

from __future__ import annotations

import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic
from urllib.parse import urlsplit

from forerun.common.errors import ForerunError
from forerun.common.processes import CHUNK, Answer, Task, available_cpus

if TYPE_CHECKING:
    from typing_extensions import Self

_RETRIES = 5
"""how often Ray gives the same tasks to another worker when one is lost"""
_OBJECT_STORE_BYTES = 256 * 2**20
"""of a cluster that Forerun starts; tasks and answers are a few KiB"""
_CONNECT_S = 5.0
"""how long an address may take to answer; Ray itself waits for minutes"""
_SAME_EVERYWHERE = "install the same Forerun, and the same files that it runs, on all machines"
_ANY_MACHINE = ("auto", "local")
"""addresses that name no machine: the cluster that runs on this one, or a new one"""


class RayCluster(Generic[Task, Answer]):
    """Answers tasks on the Ray cluster at `address`, in chunks of at most `chunk` tasks. A context manager.

    Without an address it uses RAY_ADDRESS, or starts a cluster of `workers` CPUs on this machine that ends with this
    object. If Ray is already initialized, it uses that session. The cluster works on at most `workers` chunks at once
    (by default one for each CPU).

    `basis` returns a digest of everything that answers depend on. A worker refuses tasks if its own digest differs.
    When a worker is lost, another one gets its chunk.

    Raises ForerunError if Ray is not installed, nothing answers at the address, there is less than one worker, a worker
    has another basis, or worker after worker is lost with the same chunk.
    """

    def __init__(
        self,
        answer: Callable[[Task], Answer],
        basis: Callable[[], str],
        address: str | None,
        workers: int | None,
        chunk: int = CHUNK,
    ) -> None:
        if workers is not None and workers < 1:
            raise ForerunError(f"workers must be at least 1, got {workers}")
        self._ray = _import_ray()
        self._answer = answer
        self._basis = basis
        self._address = address or os.environ.get("RAY_ADDRESS") or "local"
        self._workers = workers
        self._chunk = chunk
        self._own_session = False

    def __enter__(self) -> Self:
        expected = self._basis()
        if not self._ray.is_initialized():
            self._connect()
            self._own_session = True
        self._how = self._ray.put((self._answer, self._basis, expected))
        self._answers = self._ray.remote(num_cpus=1, max_retries=_RETRIES)(_answers)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._own_session:
            self._ray.shutdown()

    def run(self, tasks: Sequence[Task], /) -> Iterator[Answer]:
        """Yields an answer for each task, in order."""
        chunks = deque(self._chunks(tasks))
        pending: deque[Any] = deque()
        while chunks or pending:
            while chunks and (self._workers is None or len(pending) < self._workers):
                pending.append(self._answers.remote(self._how, chunks.popleft()))
            yield from self._get(pending.popleft())

    def _chunks(self, tasks: Sequence[Task]) -> list[Sequence[Task]]:
        """Cuts the tasks into chunks, smaller ones where there are CPUs for more of them."""
        cpus = self._workers or int(self._ray.cluster_resources().get("CPU", 1))
        size = max(1, min(self._chunk, len(tasks) // (2 * cpus)))
        return [tasks[i : i + size] for i in range(0, len(tasks), size)]

    def _connect(self) -> None:
        options: dict[str, Any] = {"address": self._address, "log_to_driver": False, "logging_level": logging.ERROR}
        if self._address == "local":
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            options["num_cpus"] = self._workers or available_cpus()
            options |= {"include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
        elif self._address not in _ANY_MACHINE:
            _reach(self._address)
        try:
            self._ray.init(**options)
        except (OSError, RuntimeError, ValueError) as error:
            raise ForerunError(f"Ray at {self._address}: can't be used: {error}") from None

    def _get(self, reference: Any) -> list[Answer]:
        errors = self._ray.exceptions
        try:
            answers: list[Answer] = self._ray.get(reference)
        except errors.RayTaskError as error:
            if isinstance(error.cause, ForerunError):
                raise error.cause from None
            if isinstance(error.cause, errors.RaySystemError):  # the worker can't unpickle the task
                why = str(error.cause).strip().splitlines()[-1]
                raise ForerunError(f"Ray: a worker can't run this ({why}); {_SAME_EVERYWHERE}") from None
            raise
        except errors.RayError as error:
            cause = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
            raise ForerunError(
                f"Ray: workers were lost with the same tasks {_RETRIES + 1} times ({cause}); see Ray's logs"
            ) from None
        return answers


def _import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise ForerunError(
            "executor ray: Ray is not installed; pip install 'forerun[ray]', or leave executor out"
        ) from None
    return ray


def _reach(address: str) -> None:
    """Raises ForerunError unless something listens at `address`, HOST:PORT or ray://HOST:PORT."""
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or port is None:
        raise ForerunError(f"Ray address {address!r}: expected HOST:PORT, ray://HOST:PORT, auto or local")
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except OSError as error:
        raise ForerunError(f"Ray at {address}: nothing answers ({error.strerror or error}); is it running?") from None


_fit: set[str] = set()
"""the bases that this worker process has found equal to its own"""


def _answers(how: tuple[Callable[[Any], Any], Callable[[], str], str], tasks: Sequence[Any]) -> list[Any]:
    answer, basis, expected = how
    if expected not in _fit:
        if basis() != expected:
            raise ForerunError(
                f"Ray worker on {socket.gethostname()}: its Forerun, or its files, differ from those of this machine;"
                f" {_SAME_EVERYWHERE}"
            )
        _fit.add(expected)
    return [answer(task) for task in tasks]
