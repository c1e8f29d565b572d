"""Jobs under a policy that orders all of them at every event, and stops those that no longer are among the first."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np

from forerun.answers.jobs.job import Job, Progress
from forerun.answers.jobs.placement import Counted, Placer
from forerun.answers.jobs.policies import Now, Numbers, Ranking
from forerun.answers.jobs.simulation import Simulation, Terms


class RankedSimulation(Simulation):
    """Holds what a policy sees of jobs in arrays by number, so that thousands may wait."""

    def __init__(self, jobs: Sequence[Job], place: Placer, rule: Ranking, terms: Terms) -> None:
        super().__init__(jobs, place, terms)
        self.rule, self.by_number = rule, self.arriving[::-1]
        own = [each.job for each in self.by_number]
        rule.prepare(own)
        self.gpus = np.array([job.gpus for job in own], dtype=np.int64)
        self.duration_s = np.array([job.duration_s for job in own], dtype=np.float64)
        self.priority = np.array([job.priority for job in own], dtype=np.float64)
        self.ran_s, self.seen_s, self.keys = np.zeros((3, len(own)))
        self.pace = np.ones(len(own))
        self.runs = np.zeros(len(own), dtype=bool)
        self.order = np.zeros(0, dtype=np.int64)
        self.moved: list[int] = []
        """jobs that came or were stopped since the last event"""

    def came(self, job: Progress) -> None:
        """Puts a new job at the end of the order; one whose node failed keeps its place."""
        if not job.failures:
            self.order = np.append(self.order, job.number)
        self._waits_again(job)

    def left(self, job: Progress) -> None:
        """Takes a job out of the order."""
        self.runs[job.number] = False
        self.order = self.order[self.order != job.number]

    def waits(self) -> Sequence[Progress]:
        """Returns the jobs that don't run."""
        return [self.by_number[number] for number in self.order if not self.runs[number]]

    def serve(self) -> float:
        """Gives the GPUs to the first jobs in the policy's order that fit, and takes them from the others."""
        asked = np.concatenate([np.flatnonzero(self.runs), np.array(self.moved, dtype=np.int64)])
        self.keys[asked] = self.rule.keys(self._now(asked))
        self.moved.clear()
        self.order = self.order[np.argsort(self.keys[self.order], kind="stable")]
        if isinstance(self.place, Counted):
            self._count()
        else:
            self._displace()
        return self.rule.next_look_s(self._now(np.flatnonzero(self.runs)), self.now_s)

    def _now(self, number: Numbers) -> Now:
        runs = self.runs[number]
        done_s = self.ran_s[number] + np.where(runs, self.pace[number] * (self.now_s - self.seen_s[number]), 0.0)
        return Now(number, self.gpus[number], self.duration_s[number], self.priority[number], done_s, runs)

    def _count(self) -> None:
        """Counts GPUs down the order; who runs and finds none left is preempted."""
        gpus = self.gpus[self.order]
        first = int(np.searchsorted(np.cumsum(gpus), self.total, side="right"))
        chosen = [self.order[:first]]
        free = self.total - int(gpus[:first].sum())
        while free and len(fits := np.flatnonzero(gpus[first:] <= free)):
            at = first + int(fits[0])
            chosen.append(self.order[at : at + 1])
            free -= int(gpus[at])
            first = at + 1
        numbers = np.concatenate(chosen)
        stops = self.runs.copy()
        stops[numbers] = False
        for number in np.flatnonzero(stops).tolist():
            job = self.by_number[number]
            self.place.release(job.place, job.gpus)
            self._preempt(job)
        for number in numbers[~self.runs[numbers]].tolist():
            self.start(self.by_number[number])

    def _displace(self) -> None:
        """Starts waiting jobs down the order, each in the place of the last running ones behind it if it needs one.

        Jobs that go on stay on their nodes. A job that finds no place even without all behind it displaces none.
        """
        runs, gpus = self.runs[self.order], self.gpus[self.order]
        held = np.cumsum(np.where(runs, gpus, 0)[::-1])[::-1]
        running = np.flatnonzero(runs).tolist()
        may_fit = ~runs & (gpus <= held + self.place.free)
        to_try = np.flatnonzero(may_fit).tolist()
        lost, stuck = 0, set[int]()
        while to_try:
            at = heappop(to_try)
            left = max(0, int(held[at]) - lost)
            if not left and not self.place.free:
                return
            job = self.by_number[self.order[at]]
            if job.gpus <= self.place.free + left and job.gpus not in stuck:
                displaced = self._make_room(job, at, running)
                if displaced is None:
                    stuck.add(job.gpus)
                    continue
                lost += int(gpus[displaced].sum())
                may_fit_now = ~runs & ~may_fit & (gpus <= self.place.free)
                may_fit |= may_fit_now
                for each in (*displaced, *np.flatnonzero(may_fit_now).tolist()):
                    heappush(to_try, each)

    def _make_room(self, job: Progress, at: int, running: list[int]) -> list[int] | None:
        """Starts a job, displacing the last of those that run as long as it finds no place; returns their places.

        Those before place `at` in the order stay. Returns None, and nothing has changed, where it finds none even so.
        """
        displaced: list[int] = []
        while not self.start(job):
            if not running or running[-1] < at:
                for each in reversed(displaced):
                    last = self.by_number[self.order[each]]
                    self.place.take(last.place, last.gpus)
                    running.append(each)
                return None
            displaced.append(running.pop())
            last = self.by_number[self.order[displaced[-1]]]
            self.place.release(last.place, last.gpus)
        for each in displaced:
            self._preempt(self.by_number[self.order[each]])
        return displaced

    def start(self, job: Progress) -> bool:
        """Starts a waiting job if it finds a place; returns whether it did."""
        started = super().start(job)
        if started:
            self.runs[job.number] = True
        return started

    def _expect(self, job: Progress) -> None:
        super()._expect(job)
        self.ran_s[job.number], self.seen_s[job.number], self.pace[job.number] = job.ran_s, job.seen_s, job.pace

    def _preempt(self, job: Progress) -> None:
        self.stop(job)
        self._waits_again(job)
        job.preemptions += 1

    def _waits_again(self, job: Progress) -> None:
        self.runs[job.number] = False
        self.ran_s[job.number] = job.ran_s
        self.moved.append(job.number)
