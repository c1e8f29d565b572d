"""Scheduling policies: a policy is one small class, and its entry in POLICIES is its name.

A `Queue` starts waiting jobs and never stops one. A `Ranking` orders all jobs at every event, and the first that fit
run; who runs and isn't among them is preempted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right, insort
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from math import inf
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from forerun.answers.jobs.job import Job, Progress
from forerun.common.errors import UnknownName

Numbers: TypeAlias = npt.NDArray[np.int64]
Times: TypeAlias = npt.NDArray[np.float64]
_QUANTILES = 10
"""of the jobs' service, at which Gittins indices are known"""
_PAUSE = 0.01
"""shortest time between two looks at these indices, over the mean duration of jobs"""
_NEAR = 1e-9
"""relative rounding error of attained service"""


class View(Protocol):
    """The cluster as a queue sees it at an event."""

    now_s: float
    waiting: list[Progress]
    """in line: in order of arrival, unless the policy's `place_in_line` says another one"""
    running: list[Progress]
    total: int
    """GPUs of the cluster"""
    quotas: Mapping[str, int]
    """GPUs that a group may have at once; a group that isn't there has no limit"""

    @property
    def free(self) -> int:
        """Returns the GPUs that no job has."""

    def start(self, job: Progress) -> bool:
        """Starts a job if it finds a place; returns whether it did."""


class Queue(ABC):
    """Starts waiting jobs. Running jobs continue to their ends."""

    @abstractmethod
    def serve(self, view: View) -> None:
        """Starts the jobs that may start now."""

    def place_in_line(self, job: Progress) -> float:
        """Returns the value by which waiting jobs are ordered: smaller values come first, and equal ones in the order
        of arrival.
        """
        return 0.0

    def next_look_s(self, now_s: float) -> float:
        """Returns when to look again, even if nothing arrives or ends."""
        return inf


class Now(NamedTuple):
    """Some jobs as they are now, in arrays of one element for each."""

    number: Numbers
    """of each job, in the order of arrival"""
    gpus: Numbers
    duration_s: Times
    priority: Times
    done_s: Times
    """seconds that it has run"""
    runs: npt.NDArray[np.bool_]

    @property
    def left_s(self) -> Times:
        """Returns the seconds that each job still has to run."""
        return self.duration_s - self.done_s


class Ranking(ABC):
    """Orders all jobs; the first that fit run."""

    def prepare(self, jobs: Sequence[Job]) -> None:  # noqa: B027
        """Takes note of all jobs, in the order of arrival, before the first one starts."""

    @abstractmethod
    def keys(self, now: Now) -> Times:
        """Returns the sort key of each job.

        The job with the smallest key goes first; equal keys keep their order. Simulations call this at every event for
        running jobs, and once for a job that arrived or was stopped.
        """

    def next_look_s(self, running: Now, now_s: float) -> float:
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
        """`key`: None for the order of arrival."""
        self.key = key

    def place_in_line(self, job: Progress) -> float:
        """Returns the key."""
        return 0.0 if self.key is None else self.key(job)

    def serve(self, view: View) -> None:
        """Starts the jobs that fit. Where one finds no place, no other of its size does."""
        refused: set[int] = set()
        for job in view.waiting:
            if job.gpus in refused:
                continue
            if not view.free:
                return
            if not view.start(job):
                refused.add(job.gpus)


class FairShare(Queue):
    """The group that has used the fewest GPU-seconds goes first, up to its quota of GPUs.

    In each group jobs start in order of arrival. GPU-seconds count as used when a job starts.
    """

    def __init__(self) -> None:
        self.used: defaultdict[str, float] = defaultdict(float)

    def serve(self, view: View) -> None:
        """Starts jobs one by one, each time the next of the group with the least use that still has one that fits."""
        groups: dict[str, deque[Progress]] = {}
        for job in view.waiting:
            groups.setdefault(job.job.group, deque()).append(job)
        room = dict.fromkeys(groups, inf) | dict(view.quotas)
        for job in view.running if view.quotas else ():
            if job.job.group in view.quotas:
                room[job.job.group] -= job.gpus
        while groups and view.free:
            group = min(groups, key=lambda name: self.used[name])
            job = groups[group].popleft()
            if job.gpus <= room[group] and view.start(job):
                self.used[group] += job.gpus * job.job.duration_s
                room[group] -= job.gpus
            if job.since_s is None or not groups[group]:
                del groups[group]


class EasyBackfill(Queue):
    """First in, first out; jobs behind one that waits start if they don't delay it (EASY, Lifka 1995)."""

    def serve(self, view: View) -> None:
        """Starts jobs in order, then those that end before the first waiting one has its GPUs, or don't need them."""
        waiting = iter(view.waiting)
        head = next((job for job in waiting if not view.start(job)), None)
        if head is None or not view.free:
            return
        reserved_s, spare = _reservation(head, view)
        refused, now_s, free = {head.gpus}, view.now_s, view.free
        for job in waiting:  # thousands may wait, and few fit
            gpus = job.gpus
            if gpus > free or gpus in refused:  # if one job finds no place, no job of the same size finds one
                continue
            ends_before = now_s + job.remaining_s(now_s) <= reserved_s
            if not (ends_before or gpus <= spare):
                continue
            if not view.start(job):
                refused.add(gpus)
                continue
            if not (free := view.free):
                return
            if not ends_before:
                spare -= gpus


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
        """the times of the jobs that wait"""
        self.coming: list[tuple[float, int, Progress]] = []
        """(time, number, job) of reservations, as a heap"""
        self.due: list[Progress] = []
        """jobs whose time has come, in order of arrival"""

    def serve(self, view: View) -> None:
        """Reserves the earliest time for each new job and starts those whose time has come."""
        if not self.free:
            self.free = [view.total]
        self._forget(view.now_s)
        if len(self.reserved) < len(view.waiting):
            for job in view.waiting:
                if job.number not in self.reserved:
                    self.reserved[job.number] = self._reserve(job, view.now_s)
                    heappush(self.coming, (self.reserved[job.number], job.number, job))
        while self.coming and self.coming[0][0] <= view.now_s:
            insort(self.due, heappop(self.coming)[-1], key=lambda job: job.number)
        for job in self.due:
            if view.start(job):
                del self.reserved[job.number]
        self.due = [job for job in self.due if job.number in self.reserved]

    def next_look_s(self, now_s: float) -> float:
        """Returns the next reservation."""
        return self.coming[0][0] if self.coming else inf

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
    """Orders jobs by a function of their present state."""

    def __init__(self, function: Callable[[Now], npt.NDArray[Any]]) -> None:
        self.function = function

    def keys(self, now: Now) -> Times:
        """Returns the function's values."""
        return np.asarray(self.function(now), dtype=np.float64)


class LeastAttained(Ranking):
    """Discretised least attained service: jobs sink to lower queues as they use up GPU-seconds (Tiresias, NSDI'19).

    In each queue running jobs stand before waiting ones, and those that have just sunk behind both, in the order of
    arrival. New jobs begin in the first queue.
    """

    def __init__(self, limits_gpu_s: Sequence[float] = (3250.0, 7200.0)) -> None:
        self.limits = np.array([*limits_gpu_s, inf])

    def prepare(self, jobs: Sequence[Job]) -> None:
        """Puts all jobs into the first queue."""
        self.queue = np.zeros(len(jobs), dtype=np.int64)

    def keys(self, now: Now) -> Times:
        """Returns the queue and the part of it in which each job stands."""
        sinks = now.runs & (now.done_s * now.gpus >= self.limits[self.queue[now.number]])
        self.queue[now.number] += sinks
        behind_both = 2.0 + now.number / len(self.queue)
        return np.asarray(3.0 * self.queue[now.number] + np.where(sinks, behind_both, np.where(now.runs, 0.0, 1.0)))

    def next_look_s(self, running: Now, now_s: float) -> float:
        """Returns when the simulator of Tiresias looks again: it divides the seconds left to a limit by the GPUs."""
        looks = np.floor((self.limits[self.queue[running.number]] - running.done_s) / running.gpus)
        return now_s + max(1.0, float(looks.min(initial=inf)))


class Gittins(Ranking):
    """Runs the job with the largest Gittins index first (Gittins, 1979): the job with the best chance to end soon per
    GPU-second.

    The index of a job that has had `a` GPU-seconds is a maximum over all b above a. It divides the share of jobs that
    end between a and b by the mean GPU-seconds that jobs beyond a take between a and b. The policy knows the
    distribution of GPU-seconds over jobs, but not those of a single one.
    """

    def prepare(self, jobs: Sequence[Job]) -> None:
        """Computes the index at quantiles of the GPU-seconds of all jobs."""
        self.pause_s = _PAUSE * float(np.mean([job.duration_s for job in jobs]))
        service = np.sort([job.gpus * job.duration_s for job in jobs])
        levels = np.unique(np.quantile(service, np.linspace(0.0, 1.0, _QUANTILES + 1)))
        ended = np.searchsorted(service, levels, side="right") / len(service)
        before = np.concatenate([[0.0], ended[:-1]])
        self.attained = np.concatenate([[0.0], levels[:-1], [inf]])
        self.index = np.empty(len(levels))
        for i in range(len(levels)):
            spent = np.cumsum((1.0 - before[i:]) * np.diff(levels[i:], prepend=self.attained[i]))
            self.index[i] = ((ended[i:] - before[i]) / spent).max()

    def _level(self, now: Now) -> Numbers:
        attained = now.done_s * now.gpus * (1.0 + _NEAR)
        return np.clip(np.searchsorted(self.attained, attained, side="right") - 1, 0, len(self.index) - 1)

    def keys(self, now: Now) -> Times:
        """Returns the negative indices."""
        return -self.index[self._level(now)]

    def next_look_s(self, running: Now, now_s: float) -> float:
        """Returns when the next running job comes to another quantile, but not at once after the last look."""
        left_s = self.attained[self._level(running) + 1] / running.gpus - running.done_s
        return now_s + max(self.pause_s, float(left_s.min(initial=inf)))


POLICIES: dict[str, Callable[[], Queue | Ranking]] = {
    "fifo": Fifo,
    "first-fit": Ordered,
    "sjf": lambda: Ordered(lambda job: job.job.duration_s),
    "fewest-gpus-first": lambda: Ordered(lambda job: job.gpus),
    "every-second": EverySecond,
    "easy": EasyBackfill,
    "conservative": ConservativeBackfill,
    "fair-share": FairShare,
    "smallest": lambda: Sorted(lambda now: now.gpus),
    "srtf": lambda: Sorted(lambda now: now.left_s),
    "srsf": lambda: Sorted(lambda now: now.left_s * now.gpus),
    "las": LeastAttained,
    "gittins": Gittins,
    "priority": lambda: Sorted(lambda now: -now.priority),
}
"""name -> policy; sjf is the shortest job first, smallest the fewest GPUs first with preemption, srtf and srsf the
least time and the least GPU time that is left"""


def policy(name: str) -> Queue | Ranking:
    """Returns a new policy called `name`. Raises UnknownName if there is none."""
    if name not in POLICIES:
        raise UnknownName("scheduling policy", name, list(POLICIES))
    return POLICIES[name]()
