"""LoopTime: the time that the periodic work of a training loop adds to its steps."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.describe.plan.training_loop import CheckpointMode


@dataclass(frozen=True, slots=True)
class Stall:
    """Work that the training loop does every n steps."""

    name: str
    every_steps: int
    stall_s: float
    """seconds that it adds to the step at which it happens"""
    beside_s: float = 0.0
    """seconds for which it goes on beside the following steps"""

    @property
    def mean_s(self) -> float:
        """Returns the mean time that the work adds to a step."""
        return self.stall_s / self.every_steps


@dataclass(frozen=True, slots=True)
class CheckpointTimes:
    """The size and times of one checkpoint of the run."""

    mode: CheckpointMode
    rank_gib: float
    """GiB that the rank with the most state saves"""
    total_gib: float
    save_s: float
    """seconds until the checkpoint is complete"""
    load_s: float
    storage: str
    """the storage that it is saved to, in words"""


@dataclass(frozen=True, slots=True)
class LoopTime:
    """The mean step of a training loop, with its periodic work."""

    stalls: tuple[Stall, ...]
    step_time_s: float
    """seconds of a step without periodic work"""
    tokens_per_s_per_gpu: float | None
    """at the mean step time; None if tokens are not known"""
    checkpoint: CheckpointTimes | None

    @property
    def mean_step_time_s(self) -> float:
        """Returns the time of a step with its share of all periodic work."""
        return self.step_time_s + sum(stall.mean_s for stall in self.stalls)
