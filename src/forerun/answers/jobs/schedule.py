"""Simulates jobs on a cluster under a policy, from event to event. At equal times jobs end before others start."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from forerun.answers.jobs.job import Job, Progress
from forerun.answers.jobs.placement import Counted, Placer, Shape, placer
from forerun.answers.jobs.policies import Queue, Ranking, policy
from forerun.common.errors import ForerunError


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A job with the times at which it ran."""

    job: Job
    start_s: float
    end_s: float
    preemptions: int
    ran: tuple[tuple[float, float], ...]
    """(begin, end) of each time that it ran"""

    @property
    def jct_s(self) -> float:
        """Job completion time: seconds from submission to end."""
        return self.end_s - self.job.submit_s

    @property
    def waited_s(self) -> float:
        """Seconds in which it had no GPUs."""
        return self.jct_s - sum(end - begin for begin, end in self.ran)


def schedule(
    jobs: Sequence[Job], shape: Shape, policy_name: str = "fifo", placement: str = "count", resume_s: float = 0.0
) -> list[Scheduled]:
    """Returns what becomes of every job, in the order in which they end.

    Args:
        resume_s: seconds that a preempted job loses when it runs again.

    Raises:
        UnknownName: there is no such policy or placement.
        ForerunError: a job is larger than the cluster.
    """
    place, rule = placer(placement, shape), policy(policy_name)
    for job in jobs:
        if not place.could_ever(job.gpus):
            raise ForerunError(f"job {job.name}: {job.gpus:,} GPUs have no place on {shape.total:,} under {placement}")
    return _Simulation(jobs, place, rule, resume_s).run()


class _Simulation:
    def __init__(self, jobs: Sequence[Job], place: Placer, rule: Queue | Ranking, resume_s: float) -> None:
        ordered = sorted(jobs, key=lambda job: job.submit_s)
        self.arriving = [Progress(job, number) for number, job in enumerate(ordered)][::-1]
        self.place, self.rule, self.resume_s = place, rule, resume_s
        self.total, self.now_s = place.shape.total, 0.0
        self.waiting: list[Progress] = []
        self.running: list[Progress] = []
        self.jobs: list[Progress] = []
        self.ends: list[tuple[float, int, int, Progress]] = []
        self.ran: dict[int, list[tuple[float, float]]] = {}
        self.ended: list[Scheduled] = []

    @property
    def free(self) -> int:
        """GPUs that no job has."""
        return self.place.free

    def run(self) -> list[Scheduled]:
        """Walks through all events."""
        look_s = inf
        while self.arriving or self.waiting or self.running:
            arrival_s = self.arriving[-1].job.submit_s if self.arriving else inf
            self.now_s = min(arrival_s, self._next_end_s(), look_s)
            if self.now_s == inf:
                names = ", ".join(job.job.name for job in self.waiting[:3])
                raise ForerunError(f"the policy never starts {names}")
            while self._next_end_s() <= self.now_s:
                self._end(heapq.heappop(self.ends)[-1])
            while self.arriving and self.arriving[-1].job.submit_s <= self.now_s:
                job = self.arriving.pop()
                self.waiting.append(job)
                self.jobs.append(job)
            if isinstance(self.rule, Ranking):
                look_s = self._rank(self.rule)
            else:
                self.rule.serve(self)
                self.waiting = [job for job in self.waiting if job.since_s is None]
                look_s = self.rule.next_look_s(self.now_s)
        return self.ended

    def _next_end_s(self) -> float:
        while self.ends and self.ends[0][2] != self.ends[0][3].version:
            heapq.heappop(self.ends)
        return self.ends[0][0] if self.ends else inf

    def _rank(self, rule: Ranking) -> float:
        """Gives the GPUs to the first jobs in the rule's order that fit, and takes them from the others."""
        rule.arrange(self.jobs, self.now_s)
        if isinstance(self.place, Counted):
            self._count()
        else:
            self._displace()
        self.waiting = [job for job in self.jobs if job.since_s is None]
        rule.chosen(self.jobs)
        return rule.next_look_s(self.jobs, self.now_s)

    def _count(self) -> None:
        """Counts GPUs down the order; who runs and finds none left is preempted."""
        free, chosen = self.total, set[int]()
        for job in self.jobs:
            if not free:
                break
            if job.gpus <= free:
                free -= job.gpus
                chosen.add(job.number)
        for job in [each for each in self.running if each.number not in chosen]:
            self.place.release(job.place, job.gpus)
            self._preempt(job)
        for job in self.jobs:
            if job.number in chosen and job.since_s is None:
                self.start(job)

    def _displace(self) -> None:
        """Starts waiting jobs down the order, each in the place of the last running ones behind it if it needs one.

        Jobs that go on stay on their nodes. A job that finds no place even without all behind it displaces none.
        """
        behind = deque(job for job in self.jobs if job.since_s is not None)
        held, stuck = sum(job.gpus for job in behind), set[int]()
        for job in list(self.jobs):
            if not held and not self.place.free:
                return
            if behind and job is behind[0]:
                held -= behind.popleft().gpus
            elif job.since_s is None and job.gpus <= self.place.free + held and job.gpus not in stuck:
                left = self._make_room(job, behind)
                if left is None:
                    stuck.add(job.gpus)
                else:
                    held -= left

    def _make_room(self, job: Progress, behind: deque[Progress]) -> int | None:
        """Starts a job, displacing the last of `behind` as long as it finds no place; returns the GPUs they held.

        Returns None, and nothing has changed, where it finds none.
        """
        displaced: list[Progress] = []
        while not self.start(job):
            if not behind:
                for each in reversed(displaced):
                    self.place.take(each.place, each.gpus)
                    behind.append(each)
                return None
            last = behind.pop()
            self.place.release(last.place, last.gpus)
            displaced.append(last)
        for each in displaced:
            self._preempt(each)
        return sum(each.gpus for each in displaced)

    def _preempt(self, job: Progress) -> None:
        self._stop(job)
        job.preemptions += 1

    def start(self, job: Progress) -> bool:
        """Starts a waiting job if it finds a place; returns whether it did."""
        place = self.place.place(job.gpus)
        if place is None:
            return False
        self._go(job, place)
        return True

    def _go(self, job: Progress, place: tuple[tuple[int, int], ...]) -> None:
        if job.start_s == inf:
            job.start_s = self.now_s
        elif self.resume_s:
            job.ran_s -= self.resume_s
        job.since_s, job.place = self.now_s, place
        job.end_s = self.now_s + job.remaining_s(self.now_s)
        job.version += 1
        self.running.append(job)
        heapq.heappush(self.ends, (job.end_s, job.number, job.version, job))

    def _stop(self, job: Progress) -> None:
        assert job.since_s is not None
        self.ran.setdefault(job.number, []).append((job.since_s, self.now_s))
        job.ran_s = job.done_s(self.now_s)
        job.since_s, job.end_s = None, inf
        job.version += 1
        self.running.remove(job)

    def _end(self, job: Progress) -> None:
        self.place.release(job.place, job.gpus)
        self._stop(job)
        self.jobs.remove(job)
        ran = tuple(self.ran.pop(job.number))
        self.ended.append(Scheduled(job.job, job.start_s, self.now_s, job.preemptions, ran))
