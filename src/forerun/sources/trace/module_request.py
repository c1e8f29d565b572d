"""ModuleRequest: the task that `trace_module` gives to the traced processes, which are forks of the caller."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.common.errors import ForerunError
from forerun.describe.plan.plan import Plan


@dataclass(frozen=True)
class ModuleRequest:
    """A model, its inputs and a plan. Its functions are called in the traced processes only."""

    model_factory: Callable[[], Any]
    example_inputs: Any
    plan: Plan
    folder: Path
    loss: Callable[[Any, Any], Any] | None = None
    target: Any = None
    optimizer: Callable[[Any], Any] | None = None
    tp_plan: Mapping[str, Any] | None = None
    fold: bool = True
    per_stage: int | None = None
    """How many repetitions of the layers to keep in each stage of a pipeline, where the others can be added again."""

    @property
    def depths(self) -> tuple[int, int, int]:
        """Returns the repetitions of the layers in the variants that are traced: enough that units gathered ahead at
        both ends of the model don't overlap. The traced process itself records the largest."""
        first = 2 * max(1, self.plan.prefetch)
        return first, first + 1, first + 2

    def inputs(self) -> Any:
        """Returns the inputs of one micro batch of one rank."""
        return self.example_inputs() if callable(self.example_inputs) else self.example_inputs

    def recording(self, depth: int, rank: int) -> Path:
        """Returns the file for the recording of a variant with fewer layers."""
        return self.folder / f"depth{depth}-rank{rank}.npz"

    def described(self, rank: int) -> Path:
        """Returns the file in which a rank says how often its layers repeat."""
        return self.folder / f"repeats-rank{rank}.json"

    def anything_described(self) -> bool:
        """Returns whether the traced processes left out layers."""
        return any(self.folder.glob("repeats-*.json"))

    def repeats(self) -> int:
        """Returns the number of times that layers repeat in the whole model (in each stage of a pipeline).

        Raises:
            ForerunError: ranks say different numbers.
        """
        told = {json.loads(path.read_text(encoding="utf-8"))["repeats"] for path in self.folder.glob("repeats-*.json")}
        if len(told) != 1:
            raise ForerunError(f"trace: ranks repeat different numbers of layers: {sorted(told)}")
        return int(told.pop())
