"""marks: where a program says itself that a training step ends."""

from __future__ import annotations

from collections.abc import Callable

listeners: list[Callable[[], None]] = []
"""called at each mark; empty where nobody traces"""


def mark_step() -> None:
    """A training step ends here. For programs without an optimizer of torch's; does nothing outside `forerun trace`."""
    for listener in listeners:
        listener()
