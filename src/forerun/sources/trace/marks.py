"""marks: where a program says itself that a training step ends, and what its loop does between steps."""

from __future__ import annotations

from collections.abc import Callable

from forerun.describe.plan.training_loop import TrainingLoop

listeners: list[Callable[[], None]] = []
"""called at each mark; empty where nobody traces"""
loop = TrainingLoop()
"""what the training loop does every n steps, as far as the program said"""


def mark_loop(work: TrainingLoop) -> None:
    """The training loop does `work` every n steps, whether or not the traced run does."""
    global loop
    loop = work


def mark_step() -> None:
    """A training step ends here. For programs without an optimizer of torch's; does nothing outside `forerun trace`."""
    for listener in listeners:
        listener()
