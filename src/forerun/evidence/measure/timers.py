"""How long things run: on a GPU by CUDA events. Everything that times kernels goes through the protocol here."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

Run = Callable[[], object]

_WARM_UPS = 3
_LEAST_RUNS, _MOST_RUNS = 7, 101
_WANTED_S = 0.1
"""kernels are run again until they took this long together, within the limits above"""
_FLUSH_BYTES = 256 * 2**20
"""written before each run: more than any L2, and long enough that the host has issued the run before it ends"""
_BATCHES, _IN_BATCH = 5, 20
_ISSUED = 200
"""kernels issued at once: fewer than the queue of a stream holds, beyond which the host waits for the device"""


class Timer(Protocol):
    """Times callables that issue work to `device`."""

    @property
    def device(self) -> str:
        """What torch calls it: cuda, cpu."""

    def kernel_s(self, run: Run) -> float:
        """Median seconds that the device takes for what `run` issues, with cold caches."""

    def together_s(self, run: Run) -> float:
        """Median seconds of one of several runs back to back, as many on every rank of a collective."""

    def issue_s(self, run: Run) -> float:
        """Median seconds that the host takes to issue `run`."""


class CudaTimer:
    """Times on the current GPU with events on its stream."""

    device = "cuda"

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self._flush = torch.empty(max(_FLUSH_BYTES, 2 * l2_bytes), dtype=torch.int8, device=self.device)

    def kernel_s(self, run: Run) -> float:
        """See `Timer`."""
        for _ in range(_WARM_UPS):
            run()
        first = self._seconds(run, 1)[0]
        return statistics.median(self._seconds(run, run_count(first)))

    def together_s(self, run: Run) -> float:
        """See `Timer`. The number of runs is fixed: ranks that chose it by their own clocks would wait for ever."""
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
        """See `Timer`."""
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
    """How often something is run that took `first_s` once."""
    return round(min(max(_WANTED_S / max(first_s, 1e-9), _LEAST_RUNS), _MOST_RUNS))
