"""TrainingLoop: work that a training loop repeats every n steps, such as checkpoints, under torchtitan's names."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Literal, get_args

from forerun.common.errors import ForerunError

CheckpointMode = Literal["disabled", "async", "async_with_pinned_mem"]
"""torchtitan's `checkpoint.async_mode`.

`disabled`: the loop waits until the checkpoint is written. `async`: it waits for a copy to new host memory, which is
written during the next steps. `async_with_pinned_mem`: the copy also runs during the next step, into pinned memory that
stays allocated."""
CHECKPOINT_MODES: tuple[CheckpointMode, ...] = get_args(CheckpointMode)
KINDS = ("checkpoint", "profile", "memory_snapshot", "gc", "metrics")


@dataclass(frozen=True, slots=True)
class TrainingLoop:
    """Periodic work of a training loop. A field with value n means every n steps; 0 means never."""

    checkpoint: int = 0
    """save the training state (torchtitan's checkpoint.interval)"""
    profile: int = 0
    """run torch.profiler and export its trace (profiling.profile_freq)"""
    memory_snapshot: int = 0
    """write the allocator's history, which the loop records in every step (profiling.profile_freq)"""
    gc: int = 0
    """collect Python's two youngest generations of garbage, with automatic collection off (training.gc_freq)"""
    metrics: int = 0
    """read the loss on the host, reduce it over all data-parallel ranks and log it (metrics.log_freq)"""
    checkpoint_mode: CheckpointMode = "disabled"
    profiler_active: int = 1
    """steps that one trace covers (profiling.profiler_active)"""

    def __post_init__(self) -> None:
        for kind in KINDS:
            _check_count(kind, getattr(self, kind), 0)
        _check_count("profiler_active", self.profiler_active, 1)
        if self.checkpoint_mode not in CHECKPOINT_MODES:
            known = ", ".join(CHECKPOINT_MODES)
            raise ForerunError(f"training loop: checkpoint_mode must be one of {known}, got {self.checkpoint_mode!r}")
        if self.profile and self.profiler_active > self.profile:
            raise ForerunError(
                f"training loop: profiler_active {self.profiler_active} is more than the {self.profile} steps from one"
                " trace to the next; raise profile or lower profiler_active"
            )

    def __bool__(self) -> bool:
        """Says whether the loop does any periodic work."""
        return any(getattr(self, kind) for kind in KINDS)

    def with_every(self, text: str) -> TrainingLoop:
        """Returns the loop with the intervals in a text such as `checkpoint=500,gc=50`.

        Raises ForerunError if an entry is not of the form kind=steps, or names a kind that does not exist.
        """
        given: dict[str, int] = {}
        for part in text.split(","):
            name, equals, steps = (piece.strip() for piece in part.partition("="))
            kind = name.replace("-", "_")
            if kind not in KINDS:
                near = difflib.get_close_matches(kind, KINDS, 1)
                hint = f", did you mean {near[0]}?" if near else ";"
                raise ForerunError(
                    f"--every {text}: no periodic work is called {name!r}{hint} known: {', '.join(KINDS)}"
                )
            if not equals or not steps.isdigit():
                raise ForerunError(f"--every {text}: expected a number of steps for {name}, as in {name}=100")
            given[kind] = int(steps)
        return replace(self, **given)  # type: ignore[arg-type]

    def settings(self) -> dict[str, int | str]:
        """Returns every field that is not at its default, in the form of a Program's `meta`."""
        plain = TrainingLoop()
        return {name: value for name, value in asdict(self).items() if value != getattr(plain, name)}

    @staticmethod
    def of_settings(settings: Mapping[str, object]) -> TrainingLoop:
        """Returns the loop whose `settings` these are. Raises ForerunError for an unknown field."""
        try:
            return TrainingLoop(**settings)  # type: ignore[arg-type]
        except TypeError:
            unknown = ", ".join(str(name) for name in settings if name not in asdict(TrainingLoop()))
            raise ForerunError(f"training loop: unknown settings: {unknown}") from None


def _check_count(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ForerunError(f"training loop: {name} must be a whole number of at least {least}, got {value!r}")
