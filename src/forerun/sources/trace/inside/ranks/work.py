"""Work and Future: the handles that a recorded collective returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from forerun.sources.trace.inside.ranks.transport import Transport
from forerun.sources.trace.inside.recorder import Event

_dist: Any = dist
_Work: Any = _dist._Work
_Future: Any = torch.futures.Future
_cuda: Any = torch.cuda
_engine: Any = torch.autograd.Variable._execution_engine


class Work(_Work):
    """The handle of a recorded collective."""

    def __init__(
        self, event: Event | None, result: Sequence[torch.Tensor], finish: Callable[[], None] | None = None
    ) -> None:
        super().__init__()
        self.event, self._result, self._finish = event, list(result), finish
        self.source = -1

    def wait(self, timeout: Any = None) -> bool:
        """Makes the current stream wait and fetches data from a peer."""
        Transport.recorder.wait_event(self.event)
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        return self._result

    def source_rank(self) -> int:
        return self.source

    _source_rank = source_rank

    def get_future(self) -> Future:
        return Future(self.event, self._result)

    get_future_result = get_future


class Future(_Future):
    """A future that is done at once; waiting for it makes the current stream wait. Callbacks run on a stream of their
    own, as CUDA futures run them.

    DDP's Reducer waits in C++ at the end of the backward pass, which Python doesn't see, so the wait is queued there.
    """

    def __init__(self, event: Event | None, value: Any) -> None:
        super().__init__()
        self._event = event
        self.set_result(value)
        if torch._C._current_graph_task_id() != -1:
            _engine.queue_callback(self._join)

    def _join(self) -> None:
        Transport.recorder.wait_event(self._event)

    def wait(self) -> Any:
        self._join()
        return super().wait()

    def value(self) -> Any:
        self._join()
        return super().value()

    def then(self, callback: Callable[[Any], Any]) -> Future:
        if self._event is None:
            return Future(None, callback(self))
        side = _cuda.Stream()
        with torch.cuda.stream(side):
            self._join()
            value = callback(self)
        return Future(Transport.recorder.record_event(side.stream_id), value)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.then(callback)
