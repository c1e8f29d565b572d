"""LoopTime: what the periodic work of a training loop adds to its steps."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.describe.plan.training_loop import CheckpointMode


@dataclass(frozen=True, slots=True)
class Stall:
    """Work that the training loop does every n steps."""

    name: str
    every_steps: int
    stall_s: float
    """by which it makes a step longer each time"""
    beside_s: float = 0.0
    """for which it goes on beside the steps after that"""

    @property
    def mean_s(self) -> float:
        """This is the mean time that the work adds to a step."""
        return self.stall_s / self.every_steps


@dataclass(frozen=True, slots=True)
class CheckpointTimes:
    """One checkpoint of the run."""

    mode: CheckpointMode
    rank_gib: float
    """that the rank with most saves"""
    total_gib: float
    save_s: float
    """until the checkpoint is complete"""
    load_s: float
    storage: str
    """what it is saved to, in words"""


@dataclass(frozen=True, slots=True)
class LoopTime:
    """Steps of a training loop in the mean."""

    stalls: tuple[Stall, ...]
    step_time_s: float
    """of a step without periodic work"""
    tokens_per_s_per_gpu: float | None
    """of steps in the mean; None where tokens are not known"""
    checkpoint: CheckpointTimes | None

    @property
    def mean_step_time_s(self) -> float:
        """A step with its share of all periodic work."""
        return self.step_time_s + sum(stall.mean_s for stall in self.stalls)
