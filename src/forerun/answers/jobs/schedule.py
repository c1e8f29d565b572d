"""Simulates jobs on a cluster under a policy, from event to event. At equal times jobs end before others start."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from forerun.answers.jobs.job import Job, Progress
from forerun.answers.jobs.placement import Placer, Shape, placer
from forerun.answers.jobs.policies import Queue, Ranking, policy
from forerun.common.errors import ForerunError


@dataclass(frozen=True, slots=True)
class Scheduled:
    """What became of a job."""

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
        resume_s: seconds that a preempted job, or one that moves to other nodes, loses when it runs again.

    Raises:
        UnknownName: there is no such policy or placement.
        ForerunError: a job is larger than the cluster.
    """
    place = placer(placement, shape)
    for job in jobs:
        if not place.could_ever(job.gpus):
            raise ForerunError(f"job {job.name}: {job.gpus:,} GPUs have no place on {shape.total:,} under {placement}")
    rule = policy(policy_name)
    return _Simulation(jobs, place, rule, resume_s).run()


class _Simulation:
    def __init__(self, jobs: Sequence[Job], place: Placer, rule: Queue | Ranking, resume_s: float) -> None:
        ordered = sorted(jobs, key=lambda job: job.submit_s)
        self.arriving = [Progress(job, number) for number, job in enumerate(ordered)][::-1]
        self.place, self.rule, self.resume_s = place, rule, resume_s
        self.total, self.now_s, self.round = place.shape.total, 0.0, 0
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
        self.round += 1
        rule.arrange(self.jobs, self.now_s)
        self.place.clear()
        new: list[tuple[Progress, tuple[tuple[int, int], ...]]] = []
        for job in self.jobs:
            if not self.place.free:
                break
            place = self.place.place(job.gpus)
            if place is None:
                continue
            job.round = self.round
            if job.since_s is None or place != job.place:
                new.append((job, place))
        for job in [each for each in self.running if each.round != self.round]:
            self._stop(job)
            job.preemptions += 1
            self.waiting.append(job)
        for job, place in new:
            if job.since_s is not None:
                self._stop(job)
            self._go(job, place)
        if new:
            self.waiting = [job for job in self.waiting if job.since_s is None]
        rule.chosen(self.jobs)
        return rule.next_look_s(self.jobs, self.now_s)

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
