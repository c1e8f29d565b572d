"""Notes the memory of the device before the first step: when the optimizer is made, and when the first forward begins.

The same code serves a traced process and a process on a real GPU (`evidence/measure/step_on_gpu.py`): it asks
`torch.cuda` alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from forerun.sources.trace import marks

OPTIMIZER_MADE = "optimizer made"
FIRST_FORWARD = "first forward"


class Stages:
    """The stages so far, each with the bytes allocated then and the most allocated until then."""

    def __init__(self) -> None:
        self.found: list[tuple[str, int, int]] = []
        self._most = 0
        self._reset: Callable[..., Any] = torch.cuda.reset_peak_memory_stats
        marks.stage_listeners.append(self.note)
        self._watch_resets()
        self._watch_optimizers()

    def note(self, name: str) -> None:
        """Notes a stage; the first time counts."""
        if not self.knows(name):
            self.found.append((name, int(torch.cuda.memory_allocated()), self.most_bytes()))

    def knows(self, name: str) -> bool:
        """Returns whether a stage was noted."""
        return any(one == name for one, _, _ in self.found)

    def most_bytes(self) -> int:
        """Returns the most bytes that were allocated so far, whatever the program resets."""
        self._most = max(self._most, int(torch.cuda.max_memory_allocated()))
        return self._most

    def restart(self) -> None:
        """Begins to look for the most bytes anew."""
        self._reset()
        self._most = 0

    def _watch_resets(self) -> None:
        reset = self._reset

        def noting(*args: Any, **kwargs: Any) -> Any:
            self.most_bytes()
            return reset(*args, **kwargs)

        torch.cuda.reset_peak_memory_stats = torch.cuda.memory.reset_peak_memory_stats = noting

    def _watch_optimizers(self) -> None:
        cls: Any = torch.optim.Optimizer
        make = cls.__init__

        def made(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            make(optimizer, *args, **kwargs)
            self.note(OPTIMIZER_MADE)

        cls.__init__ = made
