"""Simulates elastic jobs: in each round a policy divides the GPUs among the jobs.

If nodes can fail or jobs share links, the GPUs of a job are placed as near to each other as possible.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import ceil, inf

import numpy as np

from forerun.answers.jobs.choosing import NONE
from forerun.answers.jobs.elastic import Asked, Options, elastic_policy
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
        self.left_s, self.speed, self.pace = job.duration_s, 0.0, 1.0
        self.option, self.gpus, self.kind = NONE, 0, 0
        self.seen_s = self.goes_s = self.since_s = 0.0
        self.end_s = inf
        self.restarts = self.stops = self.failures = 0
        self.ran: list[tuple[float, float, int, int]] = []
        self.place: Placement = ()
        self.on_rails = False

    @property
    def traffic(self) -> Traffic | None:
        """Returns its step on the GPUs that it has; rings through all of them where nothing else is known."""
        if not self.gpus:
            return None
        return self.scaling.steps[self.option] if self.scaling.steps else self.job.traffic

    def progress(self, now_s: float) -> None:
        """Updates the work that is left at `now_s`."""
        self.left_s -= self.pace * self.speed * max(0.0, now_s - max(self.seen_s, self.goes_s))
        self.seen_s = now_s

    def go_at(self, pace: float) -> None:
        """Sets the pace of the job, and the time of its end if pace and GPUs don't change."""
        self.pace = pace
        self.end_s = max(self.seen_s, self.goes_s) + self.left_s / (pace * self.speed) if self.gpus else inf

    def move(self, option: int, now_s: float, restart_s: float) -> None:
        """Goes on with another option of its scaling, or stops with NONE."""
        self.progress(now_s)
        if self.gpus:
            self.ran.append((self.since_s, now_s, self.gpus, self.kind))
        if option != NONE and (self.ran or self.gpus):
            self.restarts += 1
            self.goes_s = now_s + restart_s
        self.stops += bool(self.gpus) and option == NONE
        self.option, self.since_s = option, now_s
        self.gpus, self.speed, self.kind = 0, 0.0, 0
        if option != NONE:
            own = self.scaling
            self.gpus, self.speed, self.kind = own.sizes[option], own.speeds[option], own.kind_of_sizes[option]
        self.go_at(1.0)

    def fail(self, kept_s: float, now_s: float) -> None:
        """Stops because a node failed, with so much of its work left behind it."""
        self.move(NONE, now_s, 0.0)
        self.left_s = self.job.duration_s - kept_s
        self.stops -= 1
        self.failures += 1


def share_out(jobs: Sequence[Job], shape: Shape, policy_name: str, terms: Terms = USUAL) -> list[Scheduled]:
    """Returns what becomes of every job on equal GPUs, as `share_out_kinds` does."""
    return share_out_kinds(jobs, (shape,), policy_name, terms)


def share_out_kinds(
    jobs: Sequence[Job], shapes: Sequence[Shape], policy_name: str, terms: Terms = USUAL
) -> list[Scheduled]:
    """Returns what becomes of every job, in the order in which they end.

    GPUs are shared out at the first round after jobs came or ended, or nodes failed or came back. A job without
    `scaling` runs on its own number of the first kind.

    Args:
        shapes: the nodes of each kind of GPU.

    Raises:
        UnknownName: there is no such policy.
        ForerunError: the smallest number of GPUs of a job is more than the cluster has.
    """
    return _Rounds(jobs, shapes, policy_name, terms).run()


class _Rounds:
    def __init__(self, jobs: Sequence[Job], shapes: Sequence[Shape], policy_name: str, terms: Terms) -> None:
        self.rule = elastic_policy(policy_name)
        ordered = sorted(jobs, key=lambda job: job.submit_s)
        self.arriving = [_Elastic(job, number) for number, job in enumerate(ordered)][::-1]
        alike: dict[Scaling, int] = {}
        self.scaling = np.array([alike.setdefault(each.scaling, len(alike)) for each in self.arriving[::-1]], np.int64)
        self.table = Options(list(alike))
        for each in self.arriving:
            sizes = zip(each.scaling.kind_of_sizes, each.scaling.sizes, strict=True)
            if all(gpus > shapes[kind].total for kind, gpus in sizes):
                raise ForerunError(
                    f"job {each.job.name}: {min(each.scaling.sizes):,} GPUs are more than"
                    f" {max(shape.total for shape in shapes):,}"
                )
        self.submit_s = np.array([job.submit_s for job in ordered])
        self.weight = np.array([job.weight for job in ordered])
        self.now, self.restarts = np.full(len(ordered), NONE), np.zeros(len(ordered), np.int64)
        """of each job: the option that it has, and its restarts"""
        self.shapes, self.terms = shapes, terms
        on_nodes = terms.failures is not None or terms.network is not None
        self.placers = [Nearest(shape) for shape in shapes] if on_nodes else []
        self.own: dict[int, _Elastic] = {}
        self.ends: list[tuple[float, int]] = []
        """(time, number) of jobs, as a heap; those with another `end_s` by now are out of date"""
        self.ended: list[Scheduled] = []
        self.now_s, self.round_s = 0.0, inf
        self.of_node = [(i, node) for i, shape in enumerate(shapes) for node in range(shape.switches * shape.nodes)]
        """the kind of each node, and its number among those of the kind"""
        self.nodes = FailingNodes(terms.failures, len(self.of_node))

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
            self.ended.append(_scheduled(job, self.now_s, len(self.shapes)))
        return bool(done)

    def _repair_and_fail(self) -> bool:
        """Brings repaired nodes back and takes failed ones away; returns whether there were any."""
        failures = self.terms.failures
        if failures is None:
            return False
        repaired = self.nodes.repaired(self.now_s)
        for kind, node in (self.of_node[number] for number in repaired):
            per_node = self.shapes[kind].gpus
            self.placers[kind].release(((node, per_node),), per_node)
        changed = bool(repaired)
        while (failed := self.nodes.fail(self.now_s)) is not None:
            kind, node = self.of_node[failed[1]]
            for job in [each for each in self.own.values() if each.kind == kind and _is_on(each, node)]:
                job.progress(self.now_s)
                self._release(job)
                job.fail(failures.kept_s(job.job.duration_s - job.left_s), self.now_s)
                self.now[job.number] = NONE
            per_node = self.shapes[kind].gpus
            self.placers[kind].take(((node, per_node),), per_node)
            changed = True
        return changed

    def _there(self) -> list[int]:
        """Returns the GPUs of each kind that are not under repair."""
        away = [self.of_node[number][0] for number in self.nodes.away]
        return [shape.total - away.count(kind) * shape.gpus for kind, shape in enumerate(self.shapes)]

    def _share(self) -> None:
        """Shares the GPUs out that are there."""
        restart_s, own = self.terms.resume_s, np.array(list(self.own), np.int64)
        age_s = self.now_s - self.submit_s[own]
        asked = Asked(
            self.table, self.scaling[own], self.now[own], age_s, self.restarts[own], restart_s, self.weight[own]
        )
        given = self.rule.share(asked, self._there())
        moves = np.flatnonzero(given != self.now[own]).tolist()
        moved = [(self.own[int(own[i])], int(given[i])) for i in moves]
        for job, _ in moved:
            self._release(job)
        for job, option in moved:
            job.move(option, self.now_s, restart_s)
            self.now[job.number], self.restarts[job.number] = option, job.restarts
            self._expect(job)
        for job, _ in sorted(moved, key=lambda each: -each[0].gpus) if self.placers else ():
            if job.gpus:
                job.place = self.placers[job.kind].place(job.gpus) or ()
                job.on_rails = self.placers[job.kind].on_rails(job.place)

    def _release(self, job: _Elastic) -> None:
        if job.place:
            self.placers[job.kind].release(job.place, job.gpus)
        job.place = ()

    def _set_paces(self) -> None:
        """Lets each job go on as fast as the others on its links leave it."""
        if self.terms.network is None:
            return
        for kind, shape in enumerate(self.shapes):
            jobs = [job for job in self.own.values() if job.kind == kind]
            paces = self.terms.network.paces(jobs, shape)
            for job in jobs:
                pace = paces.get(job.number, 1.0)
                if pace != job.pace:
                    job.progress(self.now_s)
                    job.go_at(pace)
                    self._expect(job)


def _is_on(job: _Elastic, node: int) -> bool:
    return any(node == own for own, _ in job.place)


def _scheduled(job: _Elastic, now_s: float, kinds: int) -> Scheduled:
    """Returns what became of a job, on a cluster of so many kinds of GPUs."""
    periods = [*job.ran, (job.since_s, now_s, job.gpus, job.kind)]
    ran = tuple((begin_s, end_s) for begin_s, end_s, *_ in periods)
    held = tuple(gpus for *_, gpus, _ in periods)
    had = tuple(kind for *_, kind in periods) if kinds > 1 else ()
    return Scheduled(job.job, ran[0][0], now_s, job.stops, ran, job.failures, held, had)
