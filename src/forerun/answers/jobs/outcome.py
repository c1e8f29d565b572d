"""PolicyOutcome: the result of a policy, with completion times, waiting times, GPU utilization and fairness."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from forerun.answers.jobs.fairness import finish_time_ratios, fragmentation
from forerun.answers.jobs.job import Scheduled


class ClusterRequest(Protocol):
    """A cluster, its jobs, and the policies to compare."""

    @property
    def name(self) -> str:
        """Returns the name that people use for the cluster."""

    @property
    def jobs(self) -> Sequence[object]:
        """Returns all jobs."""

    @property
    def policies(self) -> tuple[str, ...]:
        """Names of policies."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Returns notes on the jobs for a reader."""

    @property
    def gpus(self) -> int:
        """Returns the GPUs of the cluster."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Returns the kinds of GPUs; none if all are equal."""

    @property
    def cluster_words(self) -> str:
        """Returns the cluster in words."""

    @property
    def placement(self) -> str:
        """Returns the name of the rule that places jobs on nodes."""

    def schedule(self, policy: str) -> list[Scheduled]:
        """Returns the schedule of the jobs under a policy."""


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    """Holds the outcome of the jobs of one group under a policy."""

    jobs: int
    mean_jct_s: float
    mean_wait_s: float
    held_gpu_s: float
    """GPU-seconds that the jobs hold"""
    goodput: float
    """GPU-seconds that they need at their fastest over those that they hold"""
    finish_time_ratio: float
    """mean"""


@dataclass(frozen=True)
class PolicyOutcome:
    """One policy's schedule."""

    policy: str
    jobs: tuple[Scheduled, ...]
    gpus: int
    """GPUs of the cluster"""
    kinds: tuple[str, ...] = ()
    """the kinds of GPUs; empty: all are equal"""

    @property
    def mean_jct_s(self) -> float:
        """Returns the mean seconds from submission to end."""
        return float(np.mean([job.jct_s for job in self.jobs]))

    def jct_s(self, quantile: float) -> float:
        """Returns a quantile of the seconds from submission to end."""
        return float(np.quantile([job.jct_s for job in self.jobs], quantile))

    @property
    def mean_wait_s(self) -> float:
        """Returns the mean seconds in which a job has no GPUs."""
        return float(np.mean([job.waited_s for job in self.jobs]))

    @property
    def makespan_s(self) -> float:
        """Returns the seconds from the first submission to the last end."""
        return max(job.end_s for job in self.jobs) - min(job.job.submit_s for job in self.jobs)

    @property
    def utilisation(self) -> float:
        """Returns the GPU-seconds that jobs hold over those that the cluster has within the makespan."""
        return sum(job.held_gpu_s for job in self.jobs) / (self.gpus * self.makespan_s)

    @property
    def goodput(self) -> float:
        """Returns the GPU-seconds that jobs need at their fastest over those that they hold."""
        return sum(job.needed_gpu_s for job in self.jobs) / sum(job.held_gpu_s for job in self.jobs)

    @property
    def failures(self) -> int:
        """Returns the number of node failures that hit a job."""
        return sum(job.failures for job in self.jobs)

    @property
    def fairness(self) -> float:
        """Returns Jain's index of the jobs' slowdowns (completion time over duration): 1 if all are slowed alike."""
        slowdowns = np.array([job.jct_s / job.job.duration_s for job in self.jobs])
        return float(slowdowns.sum() ** 2 / (len(slowdowns) * (slowdowns**2).sum()))

    @property
    def fragmentation(self) -> float:
        """Returns the share of GPU time that is free although a job waits that would fit in it
        (`fairness.fragmentation`).
        """
        return fragmentation(self.jobs, self.gpus)

    @cached_property
    def finish_time_ratios(self) -> tuple[float, ...]:
        """Returns completion times over those on an equal part of the cluster, in the order of the jobs."""
        return tuple(finish_time_ratios(self.jobs, self.gpus).tolist())

    def finish_time_ratio(self, quantile: float) -> float:
        """Returns a quantile of the jobs' finish-time ratios."""
        return float(np.quantile(self.finish_time_ratios, quantile))

    @property
    def preemptions(self) -> int:
        """Returns the number of times that a job lost its GPUs before its end."""
        return sum(job.preemptions for job in self.jobs)

    def by_group(self) -> dict[str, GroupOutcome]:
        """Returns the outcome of each group's jobs."""
        members: defaultdict[str, list[int]] = defaultdict(list)
        for i, job in enumerate(self.jobs):
            members[job.job.group].append(i)
        return {group: self._of_group(numbers) for group, numbers in sorted(members.items())}

    def _of_group(self, numbers: Sequence[int]) -> GroupOutcome:
        jobs = [self.jobs[i] for i in numbers]
        held_gpu_s = sum(job.held_gpu_s for job in jobs)
        return GroupOutcome(
            jobs=len(jobs),
            mean_jct_s=float(np.mean([job.jct_s for job in jobs])),
            mean_wait_s=float(np.mean([job.waited_s for job in jobs])),
            held_gpu_s=held_gpu_s,
            goodput=sum(job.needed_gpu_s for job in jobs) / held_gpu_s if held_gpu_s else 1.0,
            finish_time_ratio=float(np.mean([self.finish_time_ratios[i] for i in numbers])),
        )


def in_use(jobs: Sequence[Scheduled]) -> tuple[list[float], list[float]]:
    """Returns the times in seconds at which the number of GPUs in use changes, and the number from then on."""
    changes: defaultdict[float, float] = defaultdict(float)
    for job in jobs:
        for begin_s, end_s, gpus in job.periods:
            changes[begin_s] += gpus
            changes[end_s] -= gpus
    times = sorted(changes)
    return times, np.cumsum([changes[time] for time in times]).tolist()
