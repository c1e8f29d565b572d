"""Streams, events and graphs of `torch.cuda`: the base classes that a build without CUDA lacks."""

from __future__ import annotations

from typing import Any

import torch

from forerun.sources.trace.inside.device.machine import CUDA, VirtualCuda
from forerun.sources.trace.inside.recorder import Event as Recorded
from forerun.sources.trace.inside.recorder import Recorder

_ELAPSED_MS = 1.0
"""The answer to how much time passed between any two events."""


def stream_classes(machine: VirtualCuda, recorder: Recorder) -> tuple[type, type]:
    """Returns the base classes of `torch.cuda.Stream` and `torch.cuda.Event`, which are generic torch streams and
    events too."""

    class StreamBase(torch.Stream):
        priority: int

        def __new__(
            cls,
            priority: int = 0,
            stream_id: int = 0,
            device_index: int = 0,
            device_type: int = 0,
            stream_ptr: int = 0,
        ) -> Any:
            if not device_type:
                stream_id, device_index = stream_ptr or machine.fresh_stream(), machine.index()
            made = super().__new__(cls, stream_id=stream_id, device_index=device_index, device_type=CUDA)
            made.priority = priority
            return made

        @property
        def cuda_stream(self) -> int:
            return int(self.stream_id)

        @staticmethod
        def priority_range() -> tuple[int, int]:
            return 0, -5

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            recorder.host_waits(recorder.record_event(self.stream_id))

    class EventBase(torch.Event):
        def __new__(
            cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
        ) -> Any:
            made = super().__new__(cls, device="cuda", enable_timing=enable_timing, blocking=blocking)
            made.recorded = None
            return made

        recorded: Recorded | None

        @property
        def cuda_event(self) -> int:
            return int(self.event_id)

        def record(self, stream: Any = None) -> None:
            super().record(stream)
            self.recorded = recorder.record_event(stream.stream_id)

        def wait(self, stream: Any = None) -> None:
            recorder.wait_event(self.recorded, stream.stream_id)

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            if self.recorded is not None:
                recorder.host_waits(self.recorded)

        def elapsed_time(self, _end: Any) -> float:
            return _ELAPSED_MS

    return StreamBase, EventBase


_CAPTURES = 0
_POOLS = 0


def capturing() -> bool:
    """Returns whether a graph is being captured."""
    return _CAPTURES > 0


def pool_handle() -> tuple[int, int]:
    """Returns the name of a new memory pool."""
    global _POOLS
    _POOLS += 1
    return 0, _POOLS


def graph_class(recorder: Recorder) -> type:
    """Returns the base class of `torch.cuda.CUDAGraph`."""

    class GraphBase:
        """The kernels of a capture. They are no part of the step when captured, and run one after another on each
        replay."""

        def __new__(cls, *_: Any, **__: Any) -> Any:
            made = super().__new__(cls)
            made.kernels, made.handle = [], pool_handle()
            return made

        kernels: list[tuple[int, int, bool]]
        handle: tuple[int, int]

        def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
            global _CAPTURES
            _CAPTURES += 1
            self.kernels.clear()
            self.before = recorder.recording
            recorder.recording = True
            tapped: Any = recorder

            def tap(op: int, stream: int | None = None, peer: int = -1, sync: bool = False) -> int:
                self.kernels.append((op, peer, sync))
                return -1

            tapped.node = tap

        def capture_end(self) -> None:
            global _CAPTURES
            _CAPTURES -= 1
            recorder.recording = self.before
            del recorder.node

        def replay(self) -> None:
            for op, peer, sync in self.kernels:
                recorder.node(op, peer=peer, sync=sync)

        def pool(self) -> tuple[int, int]:
            return self.handle

        def reset(self) -> None:
            self.kernels.clear()

        def instantiate(self, *_: Any) -> None:
            """Does nothing."""

        enable_debug_mode = debug_dump = instantiate

    return GraphBase
