"""Times kernels, on a GPU by CUDA events. All code that times kernels uses the protocol here."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

Run = Callable[[], object]

_WARM_UPS = 3
_LEAST_RUNS, _MOST_RUNS = 7, 101
_WANTED_S = 0.1
"""a kernel runs again until its runs took this long together, within the limits above"""
_FLUSH_BYTES = 256 * 2**20
"""bytes written before each run: more than any L2, and enough for the host to issue the run meanwhile"""
_BATCHES, _IN_BATCH = 5, 20
_ISSUED = 200
"""kernels issued at once: fewer than a stream's queue holds, so that the host never waits for the device"""


class Timer(Protocol):
    """Times functions that issue work to `device`."""

    @property
    def device(self) -> str:
        """Returns the device's name in torch: cuda, cpu."""

    def kernel_s(self, run: Run) -> float:
        """Returns the median seconds that the device takes for the work of `run`, with cold caches."""

    def together_s(self, run: Run) -> float:
        """Returns the median seconds of one of several runs back to back, as many on every rank of a collective."""

    def issue_s(self, run: Run) -> float:
        """Returns the median seconds that the host takes to issue `run`."""


class CudaTimer:
    """Times functions on the current GPU with events on its stream."""

    device = "cuda"

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self._flush = torch.empty(max(_FLUSH_BYTES, 2 * l2_bytes), dtype=torch.int8, device=self.device)

    def kernel_s(self, run: Run) -> float:
        """Measures as `Timer` says."""
        for _ in range(_WARM_UPS):
            run()
        first = self._seconds(run, 1)[0]
        return statistics.median(self._seconds(run, run_count(first)))

    def together_s(self, run: Run) -> float:
        """Measures as `Timer` says. The number of runs is fixed: ranks that chose different numbers would wait for
        ever."""
        for _ in range(_WARM_UPS):
            run()
        times = []
        for _ in range(_BATCHES):
            start, end = self._event(), self._event()
            self._torch.cuda.synchronize()
            start.record()
            for _ in range(_IN_BATCH):
                run()
            end.record()
            self._torch.cuda.synchronize()
            times.append(float(start.elapsed_time(end)) * 1e-3 / _IN_BATCH)
        return statistics.median(times)

    def issue_s(self, run: Run) -> float:
        """Measures as `Timer` says."""
        times = []
        for _ in range(_BATCHES):
            self._torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(_ISSUED):
                run()
            times.append((time.perf_counter() - start) / _ISSUED)
        self._torch.cuda.synchronize()
        return statistics.median(times)

    def _seconds(self, run: Run, count: int) -> list[float]:
        events = [(self._event(), self._event()) for _ in range(count)]
        for start, end in events:
            self._flush.zero_()
            start.record()
            run()
            end.record()
        self._torch.cuda.synchronize()
        return [float(start.elapsed_time(end)) * 1e-3 for start, end in events]

    def _event(self) -> Any:
        return self._torch.cuda.Event(enable_timing=True)


def run_count(first_s: float) -> int:
    """Returns the number of runs for a function whose first run took `first_s` seconds."""
    return round(min(max(_WANTED_S / max(first_s, 1e-9), _LEAST_RUNS), _MOST_RUNS))
