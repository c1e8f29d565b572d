"""Runs jobs on unlike GPUs in rounds, so that each gets the shares of time that a policy gives it (Gavel, OSDI'20).

Shares are asked for anew where jobs came or ended, but not before `RESET_S` have passed since the last time. A round
lasts until the last of its jobs has run for `ROUND_S` or ended. Within each kind of GPU the jobs run first that are
farthest behind their share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from random import Random

import numpy as np

from forerun.answers.jobs.failures import NodeFailures
from forerun.answers.jobs.interior_point import Vector
from forerun.answers.jobs.job import Job, Placement, Scheduled
from forerun.answers.jobs.shares import Demand, shares
from forerun.answers.jobs.unlike_gpus import SteppedJob
from forerun.answers.jobs.unlike_nodes import COUNTED, Nodes, NodesOfKinds
from forerun.common.errors import ForerunError

ROUND_S = 360.0
RESET_S = 1920.0
_DIGITS = 6
"""of a share behind the point, to which solutions of the policies' linear programs are right: equal jobs tie"""
_LEAST = 1e-30
_SEED = 5
"""of the order in which kinds of GPUs are filled under policies that don't know how fast they are"""
_FIRST = 1e9
"""priority by share of a job on a kind of GPU that no job has used"""


@dataclass(slots=True)
class _Turn:
    """A job in a round."""

    job: _Running
    kind: int
    rate: float
    """steps a second"""
    steps: int
    end_s: float
    place: Placement
    failed: bool = False


class _Running:
    """A job in rounds; arrays are by kind of GPU."""

    def __init__(self, job: SteppedJob, number: int) -> None:
        self.job, self.number = job, number
        self.left = job.steps
        self.received_s = np.full(len(job.rates), ROUND_S / 2.0)
        self.behind_s = np.zeros(len(job.rates))
        self.share: Vector | None = None
        self.ran: list[tuple[float, float]] = []
        self.failures, self.trained_s, self.saved = 0, 0.0, job.steps
        """trained_s: seconds that it ran, without those that failures took; saved: the steps left at its checkpoint"""

    def trained(self, turn_s: float, rate: float, failures: NodeFailures) -> None:
        """Counts a turn in which it made its steps at `rate`, and notes its checkpoints."""
        total_s = self.trained_s + turn_s
        saved_s = failures.kept_s(total_s)
        if saved_s >= self.trained_s:
            self.saved = max(0, self.left - int(rate * (saved_s - self.trained_s)))
        self.trained_s = total_s

    def fail(self, turn_s: float, rate: float, failures: NodeFailures) -> None:
        """Goes back to its last checkpoint after part of a turn."""
        self.trained(turn_s, rate, failures)
        self.trained_s = failures.kept_s(self.trained_s)
        self.left = max(1, self.saved)
        self.failures += 1


def in_rounds(
    jobs: Sequence[SteppedJob], workers: Sequence[int], policy_name: str, how: NodesOfKinds = COUNTED
) -> list[Scheduled]:
    """Returns what becomes of every job, in the order in which they end.

    Args:
        workers: GPUs of each kind, in the order of the jobs' rates.
        how: the nodes that they are in. Jobs are placed anew in each round.

    Raises:
        UnknownName: there is no such policy.
        ForerunError: a job fits on no kind of GPU.
    """
    nodes = Nodes(workers, how)
    for job in jobs:
        if not any(rate > 0 and nodes.could_ever(kind, job.gpus) for kind, rate in enumerate(job.rates)):
            raise ForerunError(f"job {job.name}: no kind of GPU that it runs on has {job.gpus:,}")
    return _Rounds(jobs, workers, policy_name, nodes).run()


class _Rounds:
    def __init__(self, jobs: Sequence[SteppedJob], workers: Sequence[int], policy_name: str, nodes: Nodes) -> None:
        ordered = sorted(jobs, key=lambda job: job.submit_s)
        self.arriving = [_Running(job, number) for number, job in enumerate(ordered)][::-1]
        self.workers, self.policy, self.nodes = workers, shares(policy_name), nodes
        self.random = Random(_SEED)
        self.jobs: list[_Running] = []
        self.given_s = np.zeros(len(workers))
        self.now_s = self.began_s = self.reset_s = 0.0
        self.changed = False
        self.ended: list[Scheduled] = []

    def run(self) -> list[Scheduled]:
        """Walks from round to round."""
        round_jobs: list[_Turn] = []
        idle = False
        while self.arriving or self.jobs:
            if round_jobs:
                self._finish(round_jobs)
            elif self.arriving or self.nodes.next_repair_s() < inf:
                arrival_s = self.arriving[-1].job.submit_s if self.arriving else inf
                self.now_s = min(arrival_s, max(self.now_s, self.nodes.next_repair_s()))
            elif idle:
                raise ForerunError(f"the policy never starts job {self.jobs[0].job.name}")
            else:
                self.reset_s = 0.0
                idle = True
            while self.arriving and self.arriving[-1].job.submit_s <= self.now_s:
                self.jobs.append(self.arriving.pop())
                self.changed = True
            round_jobs = self._start()
            idle = idle and not round_jobs
        return self.ended

    def _fail(self, turns: Sequence[_Turn]) -> None:
        """Lets nodes fail before the round ends; a job on one of them has no more of the round."""
        while turns and (failure := self.nodes.next_failure(max(turn.end_s for turn in turns))) is not None:
            for turn in turns:
                on_it = turn.kind == failure.kind and any(node == failure.node for node, _ in turn.place)
                if on_it and self.now_s <= failure.time_s < turn.end_s:
                    turn.end_s, turn.failed = failure.time_s, True

    def _finish(self, turns: Sequence[_Turn]) -> None:
        """Ends a round: counts steps and time, and lets jobs end."""
        self._fail(turns)
        failures = self.nodes.how.failures
        began_s, self.began_s = self.began_s, max(turn.end_s for turn in turns)
        for turn in sorted(turns, key=lambda turn: (-turn.end_s, turn.job.number)):
            job, kind, end_s = turn.job, turn.kind, turn.end_s
            if turn.failed and failures is not None:
                job.fail(end_s - self.now_s, turn.rate, failures)
            else:
                if failures is not None:
                    job.trained(end_s - self.now_s, turn.rate, failures)
                job.left -= turn.steps
            job.received_s[kind] += end_s - began_s
            self.given_s[kind] += end_s - began_s
            if end_s > self.now_s:
                job.ran.append((self.now_s, end_s))
            if job.left <= 0:
                self._end(job, end_s)
        self.now_s = self.began_s

    def _end(self, job: _Running, end_s: float) -> None:
        self.jobs.remove(job)
        self.changed = True
        own = job.job
        best_s = own.steps / max(own.rates)
        plain = Job(own.name, own.gpus, own.submit_s, best_s, own.group)
        periods = _joined(job.ran)
        stops = max(0, len(periods) - 1 - job.failures)
        self.ended.append(Scheduled(plain, periods[0][0], end_s, stops, periods, job.failures))

    def _start(self) -> list[_Turn]:
        """Returns the jobs of the next round."""
        if self.changed and (self.now_s - self.reset_s >= RESET_S or self.reset_s == 0.0):
            self._share()
        kinds = [kind for kind, number in enumerate(self.workers) if number]
        if not self.policy.knows_rates:
            self.random.shuffle(kinds)
        taken: set[int] = set()
        chosen = []
        while self.nodes.next_failure(self.now_s) is not None:
            pass  # of nodes that no job was on
        for kind in kinds:
            room = self.nodes.room(kind, self.now_s)
            for job in self._in_order(kind):
                rate = job.job.rates[kind]
                if job.number in taken or rate <= 0 or (place := room.place(job.job.gpus)) is None:
                    continue
                taken.add(job.number)
                if job.share is None:
                    continue  # as in Gavel, a new job has its place in the round, and runs once it has a share
                steps = min(max(1, int(rate * ROUND_S)), job.left)
                chosen.append(_Turn(job, kind, rate, steps, self.now_s + steps / rate, place))
        return chosen

    def _in_order(self, kind: int) -> list[_Running]:
        """Returns the jobs in the order in which they may run on a kind."""
        ranked = []
        for job in self.jobs:
            share = 0.0 if job.share is None else float(job.share[kind])
            part = job.received_s[kind] / self.given_s[kind] if self.given_s[kind] else 0.0
            priority = 0.0 if job.share is None else share / part if part else share * _FIRST
            if priority > 0 or not self.policy.in_order:
                ranked.append(((priority, float(job.behind_s[kind]), share), job))
        return [job for _, job in sorted(ranked, key=lambda each: each[0], reverse=True)]

    def _share(self) -> None:
        """Asks for new shares, after noting how far each job is behind its old one."""
        passed_s = self.now_s - self.reset_s
        for job in self.jobs:
            due_s = 0.0 if job.share is None else job.share * passed_s
            job.behind_s += due_s - (job.received_s - ROUND_S / 2.0)
            job.received_s[:] = ROUND_S / 2.0
        self.given_s[:] = len(self.jobs) * ROUND_S / 2.0
        self.reset_s, self.changed = self.now_s, False
        if not self.jobs:
            return
        own = [job.job for job in self.jobs]
        demand = Demand(
            names=[job.number for job in self.jobs],
            rates=np.array([job.rates for job in own]),
            gpus=np.array([float(job.gpus) for job in own]),
            weights=np.array([job.weight for job in own]),
            steps_left=np.array([float(job.left) for job in self.jobs]),
            waited_s=self.now_s - np.array([job.submit_s for job in own]),
            workers=np.array(self.workers, dtype=np.float64),
        )
        found = self.policy.of(demand)
        for job, share in zip(self.jobs, _rounded(found) if self.policy.solved else found, strict=True):
            job.share = share


def _joined(periods: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Returns periods with those that follow each other at once as one."""
    joined: list[tuple[float, float]] = []
    for begin_s, end_s in periods:
        if joined and joined[-1][1] == begin_s:
            joined[-1] = (joined[-1][0], end_s)
        else:
            joined.append((begin_s, end_s))
    return tuple(joined)


def _rounded(shares: Vector) -> Vector:
    """Returns shares to so many digits that equal jobs tie.

    A share that is 0 ends the nearer to 0 the more the policy would lose by it. Such shares keep two digits, so that
    GPUs that are left over go to the jobs for which the policy would give them next.
    """
    unit = 10.0 ** np.floor(np.log10(np.maximum(shares, _LEAST)) - 1.0)
    least = 0.5 * 10.0**-_DIGITS
    return np.asarray(np.where(shares >= least, shares.round(_DIGITS), np.round(shares / unit) * unit), np.float64)
