"""ModuleRequest: what `trace_module` asks of the traced processes, which are forks of the caller."""

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
    """A model, its inputs and a plan. Callables are run in the traced processes only."""

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
    """repetitions of the layers to leave in each stage of a pipeline, where the rest can be put in again"""

    @property
    def depths(self) -> tuple[int, int, int]:
        """Repetitions of the repeated layers in the variants that are traced: enough that the ends of what is gathered
        ahead don't meet. The deepest is recorded by the traced process itself."""
        first = 2 * max(1, self.plan.prefetch)
        return first, first + 1, first + 2

    def inputs(self) -> Any:
        """The inputs of one micro batch of one rank."""
        return self.example_inputs() if callable(self.example_inputs) else self.example_inputs

    def recording(self, depth: int, rank: int) -> Path:
        """Where the recording of a shallow variant is left."""
        return self.folder / f"depth{depth}-rank{rank}.npz"

    def described(self, rank: int) -> Path:
        """Where it is said what repeats."""
        return self.folder / f"repeats-rank{rank}.json"

    def anything_described(self) -> bool:
        """Whether something was left out of what was traced."""
        return any(self.folder.glob("repeats-*.json"))

    def repeats(self) -> int:
        """How often layers repeat in the whole model (in each stage of a pipeline).

        Raises:
            ForerunError: ranks say different things.
        """
        told = {json.loads(path.read_text(encoding="utf-8"))["repeats"] for path in self.folder.glob("repeats-*.json")}
        if len(told) != 1:
            raise ForerunError(f"trace: ranks repeat different numbers of layers: {sorted(told)}")
        return int(told.pop())
