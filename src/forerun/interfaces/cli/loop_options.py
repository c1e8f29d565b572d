"""Options for the work of the training loop besides its steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import typer

from forerun.common.errors import ForerunError, at
from forerun.describe.cluster.storage import Storage
from forerun.describe.plan.training_loop import CHECKPOINT_MODES, KINDS, TrainingLoop


@dataclass(frozen=True)
class LoopOptions:
    """Holds the options for periodic work of the training loop, and for the storage of its checkpoints."""

    every: Annotated[
        str | None,
        typer.Option(
            metavar="KIND=N,...",
            help=(
                f"Work that the training loop repeats every N steps (0 for never): {', '.join(KINDS)}. The"
                " prediction then also gives the mean step with this work."
            ),
        ),
    ] = None
    checkpoint_mode: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(CHECKPOINT_MODES), help="How checkpoints are saved (torchtitan's checkpoint.async_mode)."
        ),
    ] = None
    storage: Annotated[
        str | None,
        typer.Option(
            metavar="GB/s[,GB/s]", help="Bandwidth of the checkpoint storage: for one rank, and for all ranks together."
        ),
    ] = None

    def loop(self, base: TrainingLoop) -> TrainingLoop:
        """Returns `base` with the changes of the options. Raises ForerunError for a value that is wrong."""
        loop = base if self.every is None else base.with_every(self.every)
        for option, value in (("--checkpoint-mode", self.checkpoint_mode), ("--storage", self.storage)):
            if value is not None and not loop.checkpoint:
                raise ForerunError(f"{option}: the run writes no checkpoints; add --every checkpoint=500")
        if self.checkpoint_mode is None:
            return loop
        return replace(loop, checkpoint_mode=self.checkpoint_mode)  # type: ignore[arg-type]

    def where(self) -> Storage | None:
        """Returns the storage of checkpoints, None for the default one. Raises ForerunError for a value that is
        wrong."""
        if self.storage is None:
            return None
        with at("--storage"):
            return Storage.of_text(self.storage)
