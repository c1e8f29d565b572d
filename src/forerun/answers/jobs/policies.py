"""Scheduling policies: a policy is one small class, and its entry in POLICIES is its name.

A `Queue` starts waiting jobs and never stops one. A `Ranking` orders all jobs at every event, and the first that fit
run; who runs and isn't among them is preempted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from math import floor, inf
from typing import Protocol

from forerun.answers.jobs.job import Progress
from forerun.common.errors import UnknownName


class View(Protocol):
    """The cluster as a queue sees it at an event."""

    now_s: float
    waiting: list[Progress]
    """in order of arrival"""
    running: list[Progress]
    total: int
    """GPUs of the cluster"""

    @property
    def free(self) -> int:
        """GPUs that no job has."""

    def start(self, job: Progress) -> bool:
        """Starts a job if it finds a place; returns whether it did."""


class Queue(ABC):
    """Starts waiting jobs; what runs goes on to its end."""

    @abstractmethod
    def serve(self, view: View) -> None:
        """Starts the jobs that may start now."""

    def next_look_s(self, now_s: float) -> float:
        """Returns when to look again, even if nothing arrives or ends."""
        return inf


class Ranking(ABC):
    """Orders all jobs; the first that fit run."""

    @abstractmethod
    def arrange(self, jobs: list[Progress], now_s: float) -> None:
        """Puts the jobs that have not ended in order, the first to run first. The list keeps that order."""

    def chosen(self, jobs: list[Progress]) -> None:  # noqa: B027
        """Takes note of who runs now: those whose `since_s` is set."""

    def next_look_s(self, jobs: Sequence[Progress], now_s: float) -> float:
        """Returns when the order may change, even if nothing arrives or ends."""
        return inf


class Fifo(Queue):
    """First in, first out: a job that doesn't fit holds up all behind it."""

    def serve(self, view: View) -> None:
        """Starts jobs in order of arrival up to the first without a place."""
        for job in view.waiting:
            if not view.free or not view.start(job):
                return


class EverySecond(Queue):
    """First in, first out, but the job behind one that starts waits for the next event.

    The simulator of Tiresias (NSDI'19) does this under the name of longest pending first.
    """

    def serve(self, view: View) -> None:
        """Starts every second job up to the first without a place."""
        for job in view.waiting[::2]:
            if not view.start(job):
                return


class Ordered(Queue):
    """Every waiting job that fits starts, in the order of a key."""

    def __init__(self, key: Callable[[Progress], float] | None = None) -> None:
        self.key = key

    def serve(self, view: View) -> None:
        """Starts what fits; without a key in order of arrival."""
        for job in view.waiting if self.key is None else sorted(view.waiting, key=self.key):
            if not view.free:
                return
            view.start(job)


class FairShare(Queue):
    """The group that has used the fewest GPU-seconds goes first.

    In each group jobs start in order of arrival. GPU-seconds count as used when a job starts.
    """

    def __init__(self) -> None:
        self.used: defaultdict[str, float] = defaultdict(float)

    def serve(self, view: View) -> None:
        """Starts jobs one by one, each time the next of the group with the least use that still has one that fits."""
        groups: dict[str, deque[Progress]] = {}
        for job in view.waiting:
            groups.setdefault(job.job.group, deque()).append(job)
        while groups and view.free:
            group = min(groups, key=lambda name: self.used[name])
            job = groups[group].popleft()
            if view.start(job):
                self.used[group] += job.gpus * job.job.duration_s
            if job.since_s is None or not groups[group]:
                del groups[group]


class EasyBackfill(Queue):
    """First in, first out; jobs behind one that waits start if they don't delay it (EASY, Lifka 1995)."""

    def serve(self, view: View) -> None:
        """Starts jobs in order, then those that end before the first waiting one has its GPUs, or don't need them."""
        waiting = iter(view.waiting)
        head = next((job for job in waiting if not view.start(job)), None)
        if head is None:
            return
        reserved_s, spare = _reservation(head, view)
        for job in waiting:
            if not view.free:
                return
            ends_before = view.now_s + job.remaining_s(view.now_s) <= reserved_s
            if (ends_before or job.gpus <= spare) and view.start(job) and not ends_before:
                spare -= job.gpus


def _reservation(head: Progress, view: View) -> tuple[float, int]:
    """Returns when `head` has enough GPUs, and the GPUs that are left beside it then.

    Where enough GPUs are free, but not on the right nodes, it waits for the next job to end.
    """
    free = view.free
    for job in sorted(view.running, key=lambda each: each.end_s):
        free += job.gpus
        if free >= head.gpus:
            return job.end_s, free - head.gpus
    return inf, free


class ConservativeBackfill(Queue):
    """Every job has a reservation from when it arrives, which no later job delays. Durations are known exactly."""

    def __init__(self) -> None:
        self.times_s, self.free = [0.0], list[int]()
        self.reserved: dict[int, float] = {}

    def serve(self, view: View) -> None:
        """Reserves the earliest time for each new job and starts those whose time has come."""
        if not self.free:
            self.free = [view.total]
        self._forget(view.now_s)
        for job in view.waiting:
            if job.number not in self.reserved:
                self.reserved[job.number] = self._reserve(job, view.now_s)
            if self.reserved[job.number] <= view.now_s and view.start(job):
                del self.reserved[job.number]

    def next_look_s(self, now_s: float) -> float:
        """Returns the next reservation."""
        return min((at_s for at_s in self.reserved.values() if at_s > now_s), default=inf)

    def _forget(self, now_s: float) -> None:
        past = bisect_right(self.times_s, now_s) - 1
        del self.times_s[:past], self.free[:past]

    def _reserve(self, job: Progress, now_s: float) -> float:
        """Takes the GPUs of the earliest period that is long enough, and returns when it begins."""
        at_s = -inf
        for i, free in enumerate(self.free):
            if free < job.gpus:
                at_s = -inf
                continue
            if at_s == -inf:
                at_s = max(now_s, self.times_s[i])
            if i + 1 == len(self.free) or self.times_s[i + 1] >= at_s + job.job.duration_s:
                break
        for i in range(self._cut(at_s), self._cut(at_s + job.job.duration_s)):
            self.free[i] -= job.gpus
        return at_s

    def _cut(self, at_s: float) -> int:
        """Makes a period begin at a time, and returns its place."""
        i = bisect_right(self.times_s, at_s) - 1
        if self.times_s[i] == at_s:
            return i
        self.times_s.insert(i + 1, at_s)
        self.free.insert(i + 1, self.free[i])
        return i + 1


class Sorted(Ranking):
    """Jobs in the order of a key of (job, now). Equal ones stay in the order that they have."""

    def __init__(self, key: Callable[[Progress, float], float]) -> None:
        self.key = key

    def arrange(self, jobs: list[Progress], now_s: float) -> None:
        """Sorts by the key."""
        jobs.sort(key=lambda job: self.key(job, now_s))


class LeastAttained(Ranking):
    """Discretised least attained service: jobs sink to lower queues as they use up GPU-seconds (Tiresias, NSDI'19).

    In each queue running jobs stand before waiting ones. New jobs begin in the first queue.
    """

    def __init__(self, limits_gpu_s: Sequence[float] = (3250.0, 7200.0)) -> None:
        self.limits = limits_gpu_s

    def arrange(self, jobs: list[Progress], now_s: float) -> None:
        """Moves jobs whose service passes the limit of their queue to the end of the next one."""
        sunk = []
        for job in jobs:
            running = job.since_s is not None
            if running and job.queue < len(self.limits) and job.done_s(now_s) * job.gpus >= self.limits[job.queue]:
                job.queue += 1
                sunk.append(job.number)
        jobs.sort(key=lambda job: (job.queue, job.number in sunk))

    def chosen(self, jobs: list[Progress]) -> None:
        """Puts the waiting jobs of each queue behind its running ones."""
        jobs.sort(key=lambda job: (job.queue, job.since_s is None))

    def next_look_s(self, jobs: Sequence[Progress], now_s: float) -> float:
        """Returns when the simulator of Tiresias looks again: it divides the seconds left to a limit by the GPUs."""
        looks = (
            floor((self.limits[job.queue] - job.done_s(now_s)) / job.gpus)
            for job in jobs
            if job.since_s is not None and job.queue < len(self.limits)
        )
        return now_s + max(1.0, min(looks, default=inf))


POLICIES: dict[str, Callable[[], Queue | Ranking]] = {
    "fifo": Fifo,
    "first-fit": Ordered,
    "sjf": lambda: Ordered(lambda job: job.job.duration_s),
    "fewest-gpus-first": lambda: Ordered(lambda job: job.gpus),
    "every-second": EverySecond,
    "easy": EasyBackfill,
    "conservative": ConservativeBackfill,
    "fair-share": FairShare,
    "smallest": lambda: Sorted(lambda job, _: job.gpus),
    "srtf": lambda: Sorted(lambda job, now_s: job.remaining_s(now_s)),
    "srsf": lambda: Sorted(lambda job, now_s: job.remaining_s(now_s) * job.gpus),
    "las": LeastAttained,
    "priority": lambda: Sorted(lambda job, _: -job.job.priority),
}
"""name -> policy; sjf is the shortest job first, smallest the fewest GPUs first with preemption, srtf and srsf the
least time and the least GPU time that is left"""


def policy(name: str) -> Queue | Ranking:
    """Returns a new policy called `name`. Raises UnknownName if there is none."""
    if name not in POLICIES:
        raise UnknownName("scheduling policy", name, list(POLICIES))
    return POLICIES[name]()
