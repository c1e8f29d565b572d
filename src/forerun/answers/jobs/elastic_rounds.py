"""Simulates elastic jobs: in each round a policy divides the GPUs among the jobs.

If nodes can fail or jobs share links, the GPUs of a job are placed as near to each other as possible.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import ceil, inf

from forerun.answers.jobs.elastic import Asked, elastic_policy
from forerun.answers.jobs.failures import FailingNodes
from forerun.answers.jobs.job import Job, Placement, Scaling, Scheduled, Traffic
from forerun.answers.jobs.nearest import Nearest
from forerun.answers.jobs.placement import Shape
from forerun.answers.jobs.simulation import USUAL, Terms
from forerun.common.errors import ForerunError

ROUND_S = 60.0
"""seconds between two times at which GPUs are shared out (Pollux, section 4.2; Sia, section 3.5)"""


class _Elastic:
    """A job in rounds. It stands still for a restart when its GPUs change, then goes on at `pace` times its speed."""

    def __init__(self, job: Job, number: int) -> None:
        self.job, self.number = job, number
        self.scaling = job.scaling or Scaling((job.gpus,), (1.0,), (job.traffic,))
        self.left_s, self.gpus, self.speed, self.pace = job.duration_s, 0, 0.0, 1.0
        self.seen_s = self.goes_s = self.since_s = 0.0
        self.end_s = inf
        self.restarts = self.stops = self.failures = 0
        self.ran: list[tuple[float, float, int]] = []
        self.place: Placement = ()
        self.on_rails = False

    @property
    def traffic(self) -> Traffic | None:
        """Returns its step on the GPUs that it has; rings through all of them where nothing else is known."""
        if not self.gpus:
            return None
        return self.scaling.traffic(self.gpus) if self.scaling.steps else self.job.traffic

    def progress(self, now_s: float) -> None:
        """Updates the work that is left at `now_s`."""
        self.left_s -= self.pace * self.speed * max(0.0, now_s - max(self.seen_s, self.goes_s))
        self.seen_s = now_s

    def go_at(self, pace: float) -> None:
        """Sets the pace of the job, and the time of its end if pace and GPUs don't change."""
        self.pace = pace
        self.end_s = max(self.seen_s, self.goes_s) + self.left_s / (pace * self.speed) if self.gpus else inf

    def move(self, gpus: int, now_s: float, restart_s: float) -> None:
        """Goes on with another number of GPUs, or on others."""
        self.progress(now_s)
        if self.gpus:
            self.ran.append((self.since_s, now_s, self.gpus))
        if gpus and (self.ran or self.gpus):
            self.restarts += 1
            self.goes_s = now_s + restart_s
        self.stops += bool(self.gpus) and not gpus
        self.gpus, self.since_s = gpus, now_s
        self.speed = self.scaling.speed(gpus) if gpus else 0.0
        self.go_at(1.0)

    def fail(self, kept_s: float, now_s: float) -> None:
        """Stops because a node failed, with so much of its work left behind it."""
        self.move(0, now_s, 0.0)
        self.left_s = self.job.duration_s - kept_s
        self.stops -= 1
        self.failures += 1


def share_out(jobs: Sequence[Job], shape: Shape, policy_name: str, terms: Terms = USUAL) -> list[Scheduled]:
    """Returns the outcome of every job, in the order of their ends.

    GPUs are shared out at the first round after jobs came or ended, or nodes failed or came back. A job without
    `scaling` runs on its own number.

    Raises:
        UnknownName: there is no such policy.
        ForerunError: the smallest number of GPUs of a job is more than the cluster has.
    """
    return _Rounds(jobs, shape, policy_name, terms).run()


class _Rounds:
    def __init__(self, jobs: Sequence[Job], shape: Shape, policy_name: str, terms: Terms) -> None:
        self.rule = elastic_policy(policy_name)
        ordered = sorted(jobs, key=lambda job: job.submit_s)
        self.arriving = [_Elastic(job, number) for number, job in enumerate(ordered)][::-1]
        alike: dict[Scaling, Scaling] = {}
        for each in self.arriving:
            each.scaling = alike.setdefault(each.scaling, each.scaling)
        for each in self.arriving:
            if each.scaling.sizes[0] > shape.total:
                raise ForerunError(f"job {each.job.name}: {each.scaling.sizes[0]:,} GPUs are more than {shape.total:,}")
        self.shape, self.terms = shape, terms
        self.placer = Nearest(shape) if terms.failures is not None or terms.network is not None else None
        self.own: dict[int, _Elastic] = {}
        self.ends: list[tuple[float, int]] = []
        """(time, number) of jobs, as a heap; those with another `end_s` by now are out of date"""
        self.ended: list[Scheduled] = []
        self.now_s, self.round_s = 0.0, inf
        nodes = shape.switches * shape.nodes
        self.nodes = FailingNodes(terms.failures, nodes)

    def run(self) -> list[Scheduled]:
        """Walks through all events."""
        while self.arriving or self.own:
            arrival_s = self.arriving[-1].job.submit_s if self.arriving else inf
            known_s = min(arrival_s, self.round_s, self._next_end_s(), self.nodes.next_repair_s)
            if known_s == inf:
                raise ForerunError(f"the policy never starts {next(iter(self.own.values())).job.name}")
            self.now_s = min(known_s, self.nodes.next_failure_s)
            changed = self._end_jobs()
            changed = self._repair_and_fail() or changed
            while self.arriving and self.arriving[-1].job.submit_s <= self.now_s:
                job = self.arriving.pop()
                self.own[job.number] = job
                changed = True
            if changed:
                self.round_s = min(self.round_s, ROUND_S * ceil(self.now_s / ROUND_S))
            if self.now_s >= self.round_s:
                self.round_s = inf
                self._share()
            self._set_paces()
        return self.ended

    def _next_end_s(self) -> float:
        while self.ends and not self._is_known(*self.ends[0]):
            heapq.heappop(self.ends)
        return self.ends[0][0] if self.ends else inf

    def _is_known(self, end_s: float, number: int) -> bool:
        return number in self.own and self.own[number].end_s == end_s

    def _expect(self, job: _Elastic) -> None:
        """Takes note of when a job ends."""
        if job.gpus:
            heapq.heappush(self.ends, (job.end_s, job.number))

    def _end_jobs(self) -> bool:
        done = set()
        while self._next_end_s() <= self.now_s:
            done.add(heapq.heappop(self.ends)[1])
        for number in sorted(done):
            job = self.own.pop(number)
            self._release(job)
            self.ended.append(_scheduled(job, self.now_s))
        return bool(done)

    def _repair_and_fail(self) -> bool:
        """Brings repaired nodes back and takes failed ones away; returns whether there were any."""
        failures, placer, per_node = self.terms.failures, self.placer, self.shape.gpus
        if failures is None or placer is None:
            return False
        repaired = self.nodes.repaired(self.now_s)
        for node in repaired:
            placer.release(((node, per_node),), per_node)
        changed = bool(repaired)
        while (failed := self.nodes.fail(self.now_s)) is not None:
            node = failed[1]
            for job in [each for each in self.own.values() if any(node == on for on, _ in each.place)]:
                job.progress(self.now_s)
                self._release(job)
                job.fail(failures.kept_s(job.job.duration_s - job.left_s), self.now_s)
            placer.take(((node, per_node),), per_node)
            changed = True
        return changed

    def _share(self) -> None:
        """Shares the GPUs out that are there."""
        restart_s, there = self.terms.resume_s, self.shape.total - len(self.nodes.away) * self.shape.gpus
        asked = [
            Asked(job.scaling, job.gpus, self.now_s - job.job.submit_s, job.restarts, restart_s)
            for job in self.own.values()
        ]
        given = self.rule.share(asked, there)
        moved = [(job, gpus) for job, gpus in zip(self.own.values(), given, strict=True) if gpus != job.gpus]
        for job, _ in moved:
            self._release(job)
        for job, gpus in sorted(moved, key=lambda each: -each[1]):
            job.move(gpus, self.now_s, restart_s)
            if self.placer is not None and gpus:
                job.place = self.placer.place(gpus) or ()
                job.on_rails = self.placer.on_rails(job.place)
            self._expect(job)

    def _release(self, job: _Elastic) -> None:
        if self.placer is not None and job.place:
            self.placer.release(job.place, job.gpus)
        job.place = ()

    def _set_paces(self) -> None:
        """Lets each job go on as fast as the others on its links leave it."""
        if self.terms.network is None:
            return
        jobs = list(self.own.values())
        paces = self.terms.network.paces(jobs, self.shape)
        for job in jobs:
            pace = paces.get(job.number, 1.0)
            if pace != job.pace:
                job.progress(self.now_s)
                job.go_at(pace)
                self._expect(job)


def _scheduled(job: _Elastic, now_s: float) -> Scheduled:
    periods = [*job.ran, (job.since_s, now_s, job.gpus)]
    ran = tuple((begin_s, end_s) for begin_s, end_s, _ in periods)
    held = tuple(gpus for *_, gpus in periods)
    return Scheduled(job.job, ran[0][0], now_s, job.stops, ran, job.failures, held)
