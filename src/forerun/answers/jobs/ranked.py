"""Simulates jobs under a policy that orders all jobs at every event and preempts those that are no longer among the
first."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

import numpy as np

from forerun.answers.jobs.displacing import displacing
from forerun.answers.jobs.job import Job, Progress
from forerun.answers.jobs.lines import NO_PLACE, Lines
from forerun.answers.jobs.placement import Counted, Placer
from forerun.answers.jobs.policies import Now, Numbers, Ranking
from forerun.answers.jobs.simulation import Simulation, Terms


class RankedSimulation(Simulation):
    """Keeps the state of jobs that a policy sees in arrays by job number, so that thousands of jobs may wait."""

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
        self.lines = Lines(self.gpus)
        self.displaced = displacing(place, self.gpus)
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

        Jobs that go on stay on their nodes. A job that finds no place even so displaces none. Nor does another one of
        its size, until others stop and leave enough GPUs; so each size has a line of its own.
        """
        self.lines.look(self.order, self.runs)
        if len(self.lines.running) == len(self.order):
            return
        self.displaced.look(self.order, self.lines.running)
        first = self.lines.first
        may_start = first < self.displaced.limits(self.lines.sizes)
        lines = {size: self.lines.line(size) for size in np.flatnonzero(may_start).tolist()}
        stuck = set(np.flatnonzero(~may_start).tolist())
        to_try = [(line.first, size) for size, line in lines.items()]
        heapify(to_try)
        while to_try:
            at, size = heappop(to_try)
            line = lines[size]
            if size in stuck or line.first != at:
                continue
            stopped = self._make_room(self.by_number[self.order[at]], at)
            if stopped is None:
                stuck.add(size)
                continue
            line.go_on()
            sizes = self.lines.of_job[self.order[stopped]].tolist()
            again = {size, *sizes}
            if stopped:  # what they leave may be enough for jobs behind them
                again |= {each for each in stuck if self.lines.sizes[each] <= self.place.free}
            for each in again:
                if each not in lines:
                    lines[each] = self.lines.line(each)
            for place, each in zip(stopped, sizes, strict=True):
                lines[each].insert(place)
            stuck -= again
            for each in again:
                if lines[each].first < NO_PLACE:
                    heappush(to_try, (lines[each].first, each))

    def _make_room(self, job: Progress, at: int) -> list[int] | None:
        """Starts a job, in the place of others behind place `at` if it needs one; returns their places.

        Returns None, and nothing has changed, where it finds none even so.
        """
        if self.start(job):
            return []
        stopped = self.displaced.who(job.gpus, at)
        if stopped is None:
            return None
        for each in stopped:
            last = self.by_number[self.order[each]]
            self.place.release(last.place, last.gpus)
            self._preempt(last)
        if not self.start(job):
            raise AssertionError(f"job {job.job.name} has room and finds no place")
        return stopped

    def start(self, job: Progress) -> bool:
        """Starts a waiting job if it finds a place; returns whether it did."""
        started = super().start(job)
        if started:
            self.runs[job.number] = True
            self.displaced.took(job.place, job.number)
        return started

    def stop(self, job: Progress) -> None:
        """Stops a job whose GPUs are already released."""
        super().stop(job)
        self.displaced.left(job.place, job.number)

    def _repair_and_fail(self) -> None:
        super()._repair_and_fail()
        if self.failures is not None:
            self.displaced.away(self.nodes.away)

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
