"""Options that say what the training loop does beside its steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from forerun.common.errors import ForerunError
from forerun.describe.cluster.storage import Storage
from forerun.describe.plan.training_loop import CHECKPOINT_MODES, KINDS, TrainingLoop

Every = Annotated[
    str | None,
    typer.Option(
        metavar="KIND=N,...",
        help=f"Periodic work of the training loop, each kind every N steps, 0 for never: {', '.join(KINDS)}. Adds the"
        " mean step with its stalls.",
    ),
]
CheckpointModeOption = Annotated[
    str | None,
    typer.Option(
        "--checkpoint-mode",
        metavar="|".join(CHECKPOINT_MODES),
        help="How checkpoints are saved (torchtitan's checkpoint.async_mode).",
    ),
]
StorageOption = Annotated[
    str | None,
    typer.Option(
        "--storage", metavar="GB/s[,GB/s]", help="Storage of checkpoints: bandwidth of a rank, and of all ranks."
    ),
]


def loop_of(base: TrainingLoop, every: str | None, mode: str | None) -> TrainingLoop:
    """`base` with what the options say over it. Raises ForerunError for a value that is wrong."""
    loop = base if every is None else base.with_every(every)
    if mode is None:
        return loop
    if not loop.checkpoint:
        raise ForerunError("--checkpoint-mode: there are no checkpoints; ask for them, as in --every checkpoint=500")
    return replace(loop, checkpoint_mode=mode)  # type: ignore[arg-type]


def storage_of(text: str | None, loop: TrainingLoop) -> Storage | None:
    """The storage that an option names. Raises ForerunError for a value that is wrong, or of no use."""
    if text is not None and not loop.checkpoint:
        raise ForerunError("--storage: there are no checkpoints; ask for them, as in --every checkpoint=500")
    return None if text is None else Storage.of_text(text)
