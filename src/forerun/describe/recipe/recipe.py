"""Recipe: the plan and the model in a training tool's file, in Forerun's terms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from forerun.common.errors import ForerunError
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.complete import REST


@dataclass(frozen=True)
class Recipe:
    """Holds the settings of a recipe. Settings that the recipe leaves to the tool have the tool's own values."""

    place: str
    """the file, as the user named it"""
    tool: str
    values: Mapping[str, Any]
    """fields of a plan"""
    model: ModelSpec | None
    no_model: str = ""
    """why there is no model, in a clause; empty if there is one"""
    global_batch: int | None = None
    gpus: int | None = None
    unused: tuple[str, ...] = ()
    """settings that Forerun does not use"""
    notes: tuple[str, ...] = ()
    """settings that Forerun takes otherwise than the tool does, in sentences"""

    def named_model(self) -> ModelSpec:
        """Returns the model, with notes on the settings that Forerun does not use. Raises ForerunError if there is no
        model.
        """
        if self.model is None:
            raise ForerunError(f"{self.place}: {self.no_model}; name the model before --recipe")
        return self.noted(self.model)

    def noted(self, model: ModelSpec) -> ModelSpec:
        """Returns `model` with notes on the settings of the recipe that Forerun does not use."""
        return replace(model, notes=(*model.notes, *self.notes, *self._unused_note()))

    def under(
        self, options: Mapping[str, Any], global_batch: int | None, gpus: int | None
    ) -> tuple[dict[str, Any], int | None, int | None]:
        """Returns the fields of the plan, the global batch and the GPUs. The user's values override the recipe."""
        values = {**self.values, **options}
        if global_batch is not None and "n_microbatches" not in options:
            values.pop("n_microbatches", None)
        if "n_microbatches" not in options and "n_microbatches" not in values:
            global_batch = global_batch or self.global_batch
        gpus = gpus or self.gpus
        if REST in (values.get("dp_shard"), values.get("dp_replicate")) and gpus is None:
            raise ForerunError(f"{self.place}: data parallelism takes the GPUs that are left; say how many with --gpus")
        return values, global_batch, gpus

    def _unused_note(self) -> tuple[str, ...]:
        return (f"{self.place}: Forerun does not use {', '.join(self.unused)}.",) if self.unused else ()
