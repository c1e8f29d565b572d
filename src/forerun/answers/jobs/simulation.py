"""Simulates jobs on a cluster from event to event: the part common to all policies, and policies without preemption."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from forerun.answers.jobs.contention import SharedNetwork
from forerun.answers.jobs.failures import FailingNodes, NodeFailures
from forerun.answers.jobs.job import Job, Placement, Progress, Scheduled
from forerun.answers.jobs.placement import Placer
from forerun.answers.jobs.policies import Queue
from forerun.common.errors import ForerunError


@dataclass(frozen=True)
class Terms:
    """Conditions that hold for all jobs, whatever the policy."""

    resume_s: float = 0.0
    """seconds that a job loses when it runs again after it was stopped"""
    failures: NodeFailures | None = None
    quotas: Mapping[str, int] = field(default_factory=dict)
    """GPUs that a group may have at once, under policies that ask for it"""
    network: SharedNetwork | None = None
    """None: jobs don't slow each other"""


USUAL = Terms()
"""Jobs that lose nothing when they are stopped, on nodes that never fail"""


class Simulation(ABC):
    """Jobs, the GPUs that they have, and the events to come. At equal times jobs end before others start."""

    def __init__(self, jobs: Sequence[Job], place: Placer, terms: Terms) -> None:
        ordered = sorted(jobs, key=lambda job: job.submit_s)
        self.arriving = [Progress(job, number) for number, job in enumerate(ordered)][::-1]
        self.place, self.resume_s, self.failures, self.network = place, terms.resume_s, terms.failures, terms.network
        self.total, self.now_s = place.shape.total, 0.0
        self.running: list[Progress] = []
        self.ends: list[tuple[float, int, int, Progress]] = []
        self.ran: dict[int, list[tuple[float, float]]] = {}
        self.ended: list[Scheduled] = []
        nodes = place.shape.switches * place.shape.nodes
        self.nodes = FailingNodes(self.failures, nodes)

    @property
    def free(self) -> int:
        """Returns the GPUs that no job has."""
        return self.place.free

    @abstractmethod
    def came(self, job: Progress) -> None:
        """Takes note of a job that waits: a new one, or one whose node failed."""

    @abstractmethod
    def left(self, job: Progress) -> None:
        """Takes note of a job that has ended."""

    @abstractmethod
    def waits(self) -> Sequence[Progress]:
        """Returns the jobs that wait."""

    @abstractmethod
    def serve(self) -> float:
        """Starts and stops jobs; returns when to look again, even if nothing happens."""

    def run(self) -> list[Scheduled]:
        """Walks through all events; returns the jobs in the order in which they end."""
        look_s = inf
        while self.arriving or self.running or self.waits():
            arrival_s = self.arriving[-1].job.submit_s if self.arriving else inf
            known_s = min(arrival_s, self._next_end_s(), look_s, self.nodes.next_repair_s)
            if known_s == inf:
                names = ", ".join(job.job.name for job in self.waits()[:3])
                raise ForerunError(f"the policy never starts {names}")
            self.now_s = min(known_s, self.nodes.next_failure_s)
            while self._next_end_s() <= self.now_s:
                self._end(heapq.heappop(self.ends)[-1])
            self._repair_and_fail()
            while self.arriving and self.arriving[-1].job.submit_s <= self.now_s:
                self.came(self.arriving.pop())
            look_s = self.serve()
            if self.network is not None:
                self._set_paces(self.network)
        return self.ended

    def _next_end_s(self) -> float:
        while self.ends and self.ends[0][2] != self.ends[0][3].version:
            heapq.heappop(self.ends)
        return self.ends[0][0] if self.ends else inf

    def _repair_and_fail(self) -> None:
        per_node = self.place.shape.gpus
        for node in self.nodes.repaired(self.now_s):
            self.place.release(((node, per_node),), per_node)
        while self.failures is not None and (failed := self.nodes.fail(self.now_s)) is not None:
            node = failed[1]
            for job in [each for each in self.running if any(node == on for on, _ in each.place)]:
                self.place.release(job.place, job.gpus)
                self.stop(job)
                job.ran_s = self.failures.kept_s(job.ran_s)
                job.failures += 1
                self.came(job)
            self.place.take(((node, per_node),), per_node)

    def _set_paces(self, network: SharedNetwork) -> None:
        """Lets each job go on as fast as the others on its links leave it."""
        paces = network.paces(self.running, self.place.shape)
        for job in self.running:
            pace = paces.get(job.number, 1.0)
            if pace != job.pace:
                job.ran_s, job.seen_s, job.pace = job.done_s(self.now_s), self.now_s, pace
                self._expect(job)

    def start(self, job: Progress) -> bool:
        """Starts a waiting job if it finds a place; returns whether it did."""
        place = self.place.place(job.gpus)
        if place is None:
            return False
        self._go(job, place)
        return True

    def _go(self, job: Progress, place: Placement) -> None:
        if job.start_s == inf:
            job.start_s = self.now_s
        elif self.resume_s:
            job.ran_s -= self.resume_s
        job.since_s, job.seen_s, job.pace, job.place = self.now_s, self.now_s, 1.0, place
        job.on_rails = self.place.on_rails(place)
        self.running.append(job)
        self._expect(job)

    def _expect(self, job: Progress) -> None:
        """Takes note of when a job will end at its pace."""
        job.end_s = self.now_s + job.remaining_s(self.now_s) / job.pace
        job.version += 1
        heapq.heappush(self.ends, (job.end_s, job.number, job.version, job))

    def stop(self, job: Progress) -> None:
        """Stops a job whose GPUs are already released."""
        assert job.since_s is not None
        self.ran.setdefault(job.number, []).append((job.since_s, self.now_s))
        job.ran_s = job.done_s(self.now_s)
        job.since_s, job.end_s = None, inf
        job.version += 1
        self.running.remove(job)

    def _end(self, job: Progress) -> None:
        self.place.release(job.place, job.gpus)
        self.stop(job)
        self.left(job)
        ran = tuple(self.ran.pop(job.number))
        self.ended.append(Scheduled(job.job, job.start_s, self.now_s, job.preemptions, ran, job.failures))


class QueueSimulation(Simulation):
    """Jobs under a policy that starts waiting jobs and stops none."""

    def __init__(self, jobs: Sequence[Job], place: Placer, rule: Queue, terms: Terms) -> None:
        super().__init__(jobs, place, terms)
        self.rule, self.quotas = rule, terms.quotas
        self.waiting: list[Progress] = []

    def came(self, job: Progress) -> None:
        """Puts a job into the queue, at its place in line."""
        insort(self.waiting, job, key=lambda each: (self.rule.place_in_line(each), each.number))

    def left(self, job: Progress) -> None:
        """Has nothing to do: a job that runs is in no queue."""

    def waits(self) -> Sequence[Progress]:
        """Returns the queue."""
        return self.waiting

    def serve(self) -> float:
        """Lets the policy start jobs."""
        before = len(self.running)
        self.rule.serve(self)
        if len(self.running) > before:
            self.waiting = [job for job in self.waiting if job.since_s is None]
        return self.rule.next_look_s(self.now_s)
