"""Outcome: the time of one run by class of badput, in the terms of goodput reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class Spent(Enum):
    """Each member is a place where time goes that isn't useful steps. Its value is the name in JSON and CSV."""

    START = "start"
    SAVE = "save"
    DETECT = "detect"
    REPLACE = "replace"
    RESTART = "restart"
    RESTORE = "restore"
    WASTED = "wasted_progress"
    SLOW = "slow_steps"
    RESIZE = "resize"
    FEWER = "fewer_replicas"
    MAINTENANCE = "maintenance"


MEASURED_AS = {
    Spent.START: "PROGRAM_STARTUP",
    Spent.SAVE: "UNPRODUCTIVE_CHECKPOINT_SAVE_TIME",
    Spent.DETECT: "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    Spent.REPLACE: "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    Spent.RESTART: "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION",
    Spent.RESTORE: "UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME",
    Spent.WASTED: "WASTED_PROGRESS_FROM_DISRUPTION",
    Spent.SLOW: "OTHER",
    Spent.RESIZE: "ELASTIC_REINITIALIZATION",
    Spent.FEWER: "ELASTIC_SLICE_DOWN",
    Spent.MAINTENANCE: "CUSTOM_BADPUT_EVENTS",
}
"""the class of ml-goodput-measurement (AI-Hypercomputer) that each is counted in"""


class Event(NamedTuple):
    """Something that happened in a run."""

    start_s: float
    end_s: float
    what: str
    """failure, maintenance, slow or resize"""
    detail: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run. All times are seconds, and `productive_s` and the values of `spent_s` sum to `wall_s`."""

    wall_s: float
    productive_s: float
    """undisturbed time of the steps that the run keeps"""
    spent_s: dict[Spent, float]
    steps: int
    tokens: float
    finished: bool
    failures: dict[str, int]
    """number of failures by kind"""
    lost_tokens: float
    """tokens that the run trained on again"""
    longest_stop_s: float
    """longest time without a step"""
    events: tuple[Event, ...] = field(default=(), compare=False)

    @property
    def goodput(self) -> float:
        """Returns the share of wall time that kept steps need without any disturbance."""
        return self.productive_s / self.wall_s if self.wall_s else 1.0

    @property
    def ettr(self) -> float:
        """Returns the effective training time ratio: the share of wall time in which steps run that the run keeps, slow
        or not."""
        running_s = self.productive_s + self.spent_s.get(Spent.SLOW, 0.0) + self.spent_s.get(Spent.FEWER, 0.0)
        return running_s / self.wall_s if self.wall_s else 1.0

    @property
    def interruptions(self) -> int:
        """Returns the number of failures of all kinds."""
        return sum(self.failures.values())
