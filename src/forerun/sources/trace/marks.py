"""Marks in a training script: the end of a step, stages before the first step, and the periodic work of the loop."""

from __future__ import annotations

from collections.abc import Callable

from forerun.describe.plan.training_loop import TrainingLoop

listeners: list[Callable[[], None]] = []
"""Functions to call at each mark; empty outside `forerun trace`."""
stage_listeners: list[Callable[[str], None]] = []
"""Functions to call with the name of each stage before the first step."""
loop = TrainingLoop()
"""The periodic work of the training loop that the program declared."""


def mark_loop(work: TrainingLoop) -> None:
    """Declares the periodic work of the training loop, whether or not the traced run does it."""
    global loop
    loop = work


def mark_stage(name: str) -> None:
    """Records the memory of the device under a name before the first step, for example after the model is created. It
    has no effect outside `forerun trace` and `forerun measure step`."""
    for listener in stage_listeners:
        listener(name)


def mark_step() -> None:
    """Marks the end of a training step, for programs without one of torch's optimizers. It has no effect outside
    `forerun trace`."""
    for listener in listeners:
        listener()
