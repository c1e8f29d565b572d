"""Which part of a program is the step that is recorded: from the end of one optimizer step to the end of another."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from forerun.program.types import Category
from forerun.trace.inside.modules import Modules
from forerun.trace.inside.recorder import Recorder
from forerun.trace.purpose import data_parallel, distinct_ranks
from forerun.trace.recording import Recording


class StepRecorded(BaseException):
    """Ends the program once its step is recorded; no exception that a program would catch."""


class Steps:
    """Counts the steps of the optimizer that steps first, and records number `wanted` (from 1)."""

    def __init__(self, recorder: Recorder, modules: Modules, wanted: int, meta: dict[str, Any]) -> None:
        self.recorder, self.modules, self.wanted, self.meta = recorder, modules, wanted, meta
        self.done = 0
        self.recording: Recording | None = None
        self._first: Any = None
        self._optimizers: dict[int, Any] = {}
        register_optimizer_step_pre_hook(self._before)
        register_optimizer_step_post_hook(self._after)
        if wanted == 1:
            recorder.start()

    def _before(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self.recorder.in_optimizer += 1
        self._optimizers.setdefault(id(optimizer), optimizer)
        self._mark(optimizer)

    def _after(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self.recorder.in_optimizer -= 1
        self._mark(optimizer)
        if self._first is None:
            self._first = optimizer
        if optimizer is self._first:
            self.mark_step()

    def mark_step(self) -> None:
        """One step has ended."""
        self.done += 1
        if self.done == self.wanted:
            self.finish()
            raise StepRecorded
        if self.done == self.wanted - 1:
            self.modules.forget_sequence()
            self.recorder.start()

    def finish(self) -> None:
        """Make the Recording of what was recorded so far."""
        for root in self.modules.roots:
            for buffer in root.buffers():
                self._category(buffer, Category.PARAMETER)
        meta = self.meta | {"tokens": self.recorder.tokens or None}
        recording = self.recorder.finish(self.modules.paths, meta)
        names, sharded = data_parallel(recording)
        size = distinct_ranks(recording, names)
        recording.meta.update(data_parallel=names, sharded=sharded, data_parallel_size=size)
        self.recording = recording

    def _mark(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._category(parameter, Category.PARAMETER)
                if parameter.grad is not None:
                    self._category(parameter.grad, Category.GRADIENT)
        for state in optimizer.state.values():
            for value in state.values() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    self._category(value, Category.OPTIMIZER)

    def _category(self, tensor: torch.Tensor, category: Category) -> None:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.device.type == "cuda":
            self.recorder.mark(local.untyped_storage(), category)
