"""Lets a program say where a training step ends, and what its loop does between steps."""

from __future__ import annotations

from collections.abc import Callable

from forerun.describe.plan.training_loop import TrainingLoop

listeners: list[Callable[[], None]] = []
"""Functions to call at each mark; empty outside `forerun trace`."""
stage_listeners: list[Callable[[str], None]] = []
"""Functions to call with the name of each stage before the first step."""
loop = TrainingLoop()
"""What the training loop does every n steps, as far as the program said."""


def mark_loop(work: TrainingLoop) -> None:
    """Declares that the training loop does `work` every n steps, whether or not the traced run does it."""
    global loop
    loop = work


def mark_stage(name: str) -> None:
    """Notes the memory of the device under a name, before the first step: after the model is made, for example. Has no
    effect outside `forerun trace` and `forerun measure step`."""
    for listener in stage_listeners:
        listener(name)


def mark_step() -> None:
    """Marks the end of a training step, for programs without one of torch's optimizers. Has no effect outside `forerun
    trace`."""
    for listener in listeners:
        listener()
