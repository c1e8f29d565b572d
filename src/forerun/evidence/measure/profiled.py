"""Profiles one optimizer step of a training script with torch.profiler, on the GPU of this process."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile

from forerun.common.admission import read_json
from forerun.common.errors import ForerunError
from forerun.evidence.measure.kernels import Kernel, kernels_of
from forerun.evidence.measure.run_script import local_rank, run_script


class _StepDone(BaseException):
    """Ends the script after the profiled step; it is a BaseException, which scripts rarely catch."""


class _Profiler:
    """Counts the steps of the first optimizer to step, as a trace does, and profiles step number `wanted`."""

    def __init__(self, wanted: int, path: Path) -> None:
        self.wanted, self.path = wanted, path
        self.done, self.peak_bytes = 0, -1
        self._first: Any = None
        self._profile: Any = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
        if wanted == 1:
            self._start()

    def _start(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self._profile.start()

    def stepped(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """Counts a step of `optimizer`; starts or ends the profile around the wanted one."""
        self._first = self._first or optimizer
        if optimizer is not self._first:
            return
        self.done += 1
        if self.done == self.wanted:
            torch.cuda.synchronize()
            self._profile.stop()
            self.peak_bytes = torch.cuda.max_memory_allocated()
            self._profile.export_chrome_trace(str(self.path))
            raise _StepDone
        if self.done == self.wanted - 1:
            self._start()


def profiled_step(script: str, arguments: Sequence[str], step: int) -> tuple[list[Kernel], int]:
    """Returns the kernels of optimizer step number `step` (from 1) of a script, and the step's peak of allocated bytes.

    Raises:
        ForerunError: The script ended before that step.
    """
    torch.cuda.set_device(local_rank())
    with tempfile.TemporaryDirectory(prefix="forerun-profile-") as folder:
        profiler = _Profiler(step, Path(folder) / "trace.json")
        hook = register_optimizer_step_post_hook(profiler.stepped)
        try:
            run_script(script, arguments)
        except _StepDone:
            return kernels_of(read_json(profiler.path)), profiler.peak_bytes
        finally:
            hook.remove()
    raise ForerunError(
        f"{script}: ended after {profiler.done} optimizer steps; step {step} was to be profiled (--steps)"
    )
