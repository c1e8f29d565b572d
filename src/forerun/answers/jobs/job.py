"""Job: a gang of GPUs for a known time; Progress: how far it is in a simulation. Times are seconds."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

Placement = tuple[tuple[int, int], ...]
"""(node, GPUs on it) of a running job; empty where GPUs are only counted"""


@dataclass(frozen=True, slots=True)
class Job:
    """A job that takes `duration_s` on all its GPUs at once."""

    name: str
    gpus: int
    submit_s: float
    duration_s: float
    group: str = ""
    """virtual cluster or team, for fair shares"""
    priority: int = 0
    """the larger goes first under policies that ask for it"""


class Progress:
    """A job in a simulation. `since_s` is when it last started, and None while it waits."""

    __slots__ = (
        *("end_s", "gpus", "job", "number", "place", "preemptions", "queue"),
        *("ran_s", "since_s", "start_s", "version"),
    )

    def __init__(self, job: Job, number: int) -> None:
        self.job, self.number, self.gpus = job, number, job.gpus
        self.since_s: float | None = None
        self.ran_s = 0.0
        self.start_s, self.end_s = inf, inf
        self.preemptions = 0
        self.place: Placement = ()
        self.queue, self.version = 0, 0

    def done_s(self, now_s: float) -> float:
        """Returns the seconds that it has run by now."""
        return self.ran_s if self.since_s is None else self.ran_s + max(0.0, now_s - self.since_s)

    def remaining_s(self, now_s: float) -> float:
        """Returns the seconds that it still has to run."""
        return self.job.duration_s - self.done_s(now_s)
