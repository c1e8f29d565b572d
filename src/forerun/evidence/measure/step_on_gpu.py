"""Runs a training script on the GPU of this process, unmodified, and measures its steps.

A step ends with a step of the script's first optimizer. Where no optimizer steps outside of compiled code, it ends
where a backward pass begins; `forerun.mark_step()` in the script goes before both. torch.compile sees nothing of this.
Functions that it could capture do nothing while it captures, and it skips the frame around the backward pass.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from importlib import import_module
from types import MethodType
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from forerun.common.errors import ForerunError
from forerun.evidence.measure.run_script import local_rank, run_script
from forerun.evidence.measure.step import MeasuredStep
from forerun.sources.trace import marks
from forerun.sources.trace.inside.stages import FIRST_FORWARD, OPTIMIZER_MADE, Stages


class _Measured(BaseException):
    """Ends the script once its steps are measured; it is a BaseException, which scripts rarely catch."""


class _Steps:
    """Counts steps, and times those after the warm-up."""

    def __init__(self, warm_up: int, timed: int, stages: Stages) -> None:
        self.warm_up, self.timed, self.stages = warm_up, timed, stages
        self.done = 0
        self.times_s: list[float] = []
        self.peaks: list[int] = []
        self._began = 0.0
        self._first: Any = None
        self._marked = False
        self._backward_passes = 0

    def stepped(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """Notes that an optimizer has stepped."""
        if torch.compiler.is_compiling() or self._marked:
            return
        if self._first is None:
            self._first = optimizer
        if optimizer is self._first:
            self.end_step()

    def backward_begins(self) -> None:
        """Notes that a backward pass begins."""
        self._backward_passes += 1
        if self._first is None and not self._marked and self._backward_passes > 1:
            self.end_step()

    def marked(self) -> None:
        """Notes that the script says that a step ends."""
        if not self._marked:
            self._marked, self.done, self.times_s, self.peaks = True, 0, [], []
        self.end_step()

    def end_step(self) -> None:
        """Ends a step. Raises _Measured after the last one."""
        torch.cuda.synchronize()
        now = time.perf_counter()
        self.done += 1
        if self.done > self.warm_up:
            self.times_s.append(now - self._began)
            self.peaks.append(self.stages.most_bytes())
        if len(self.times_s) == self.timed:
            raise _Measured
        self.stages.restart()
        self._began = time.perf_counter()


def measure_step(script: str, arguments: Sequence[str], warm_up: int, timed: int) -> MeasuredStep:
    """Returns the medians of `timed` steps of a script after `warm_up` others, on this process's GPU.

    Raises:
        ForerunError: the script ended before these steps.
    """
    torch.cuda.set_device(local_rank())
    stages = Stages()
    steps = _Steps(warm_up, timed, stages)
    hooks = [register_optimizer_step_post_hook(steps.stepped), _note_first_forward(stages)]
    _watch_backward(MethodType(_Steps.backward_begins, steps))
    marks.listeners.append(steps.marked)
    try:
        run_script(script, arguments)
    except _Measured:
        return _medians(steps)
    finally:
        for hook in hooks:
            hook.remove()
        marks.listeners.remove(steps.marked)
    raise ForerunError(
        f"{script}: ended after {steps.done} steps; {warm_up} warm up and {timed} are measured (--warm-up, --steps)"
    )


def _note_first_forward(stages: Stages) -> Any:
    """Notes the memory when the first module is called with gradients, or compilation begins after the optimizer is
    made."""

    def called(_module: Any, _inputs: Any) -> None:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            stages.note(FIRST_FORWARD)

    def compiles(_about: Any) -> None:
        if stages.knows(OPTIMIZER_MADE):
            stages.note(FIRST_FORWARD)

    import_module("torch._dynamo.callback").callback_handler.register_start_callback(compiles)
    return register_module_forward_pre_hook(called)


def _watch_backward(begins: MethodType) -> None:
    """Calls `begins` before each backward pass, from a frame that Dynamo skips. Dynamo does not skip the functions that
    this frame calls.
    """

    class Engine(torch._C._ImperativeEngine):
        """Autograd's engine, called from Python."""

        def run_backward(self, *args: Any, **kwargs: Any) -> Any:
            begins()
            return super().run_backward(*args, **kwargs)

    frames: Any = import_module("torch._C._dynamo.eval_frame")
    actions: Any = import_module("torch._dynamo.types").FrameAction
    frames.set_code_exec_strategy(
        Engine.run_backward.__code__, frames._FrameExecStrategy(actions.SKIP, actions.DEFAULT)
    )
    frames.set_code_exec_strategy(begins.__code__, frames._FrameExecStrategy(actions.SKIP, actions.SKIP))
    variable: Any = import_module("torch.autograd.variable").Variable
    variable._execution_engine = Engine()


def _medians(steps: _Steps) -> MeasuredStep:
    return MeasuredStep(
        step_s=statistics.median(steps.times_s),
        peak_bytes=round(statistics.median(steps.peaks)),
        steps=len(steps.times_s),
        fastest_s=min(steps.times_s),
        slowest_s=max(steps.times_s),
        device=torch.cuda.get_device_name(),
        stages=tuple((name, most) for name, _, most in steps.stages.found),
    )
