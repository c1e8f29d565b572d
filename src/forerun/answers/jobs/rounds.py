"""Runs jobs on unlike GPUs in rounds, so that each gets the shares of time that a policy gives it (Gavel, OSDI'20).

The policy computes new shares after jobs arrive or end, but only if `RESET_S` have passed since the last time. A round
lasts until the last of its jobs has run for `ROUND_S` or ended. Within each kind of GPU the units (jobs, or pairs of
jobs on the same GPUs) run first that are farthest behind their share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from math import inf
from random import Random

import numpy as np

from forerun.answers.jobs.failures import NodeFailures
from forerun.answers.jobs.interior_point import Vector
from forerun.answers.jobs.job import Placement, Scheduled, Traffic
from forerun.answers.jobs.placement import Placer
from forerun.answers.jobs.share_policies import shares
from forerun.answers.jobs.shares import Demand, Group
from forerun.answers.jobs.units import ROUND_S, Unit, Units, rounded
from forerun.answers.jobs.unlike_gpus import Beside, SteppedJob
from forerun.answers.jobs.unlike_nodes import COUNTED, Nodes, NodesOfKinds
from forerun.common.errors import ForerunError

RESET_S = 1920.0
NO_GROUPS: Mapping[str, Group] = {}
_SEED = 5
"""of the order in which kinds of GPUs are filled under policies that don't know how fast they are"""


@dataclass(slots=True)
class _Turn:
    """A job in a round, or two jobs on the same GPUs, whose turns end together."""

    number: int
    """of its first job"""
    jobs: tuple[_Running, ...]
    kind: int
    rates: tuple[float, ...]
    """steps a second of each job"""
    place: Placement
    on_rails: bool
    """whether it has the same GPUs of each of its nodes"""
    resumes_s: float = 0.0
    """seconds at its beginning in which it makes no steps"""
    steps: tuple[int, ...] = ()
    end_s: float = 0.0
    failed: bool = False

    @property
    def traffic(self) -> Traffic | None:
        """Returns the step of a job that is alone. The traffic of two jobs beside each other is unknown."""
        known = self.jobs[0].job.traffic
        return known[self.kind] if known and len(self.jobs) == 1 else None

    def go_at(self, pace: float, now_s: float) -> None:
        """Notes how many steps each job makes at a pace, over that alone, and when the slowest has made them."""
        self.rates = tuple(rate * pace for rate in self.rates)
        own = list(zip(self.jobs, self.rates, strict=True))
        self.steps = tuple(min(max(1, int(rate * (ROUND_S - self.resumes_s))), job.left) for job, rate in own)
        self.end_s = max(
            now_s + self.resumes_s + steps / rate for steps, rate in zip(self.steps, self.rates, strict=True)
        )


class _Running:
    """A job in rounds."""

    def __init__(self, job: SteppedJob, number: int) -> None:
        self.job, self.number = job, number
        self.left, self.kind = job.steps, -1
        self.ran: list[tuple[float, float, float, int]] = []
        """(begin, end, GPUs, kind) of each time that it ran; a job of a pair has half of the GPUs"""
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
    jobs: Sequence[SteppedJob],
    workers: Sequence[int],
    policy_name: str,
    how: NodesOfKinds = COUNTED,
    beside: Beside | None = None,
    resume_s: float = 0.0,
    groups: Mapping[str, Group] = NO_GROUPS,
) -> list[Scheduled]:
    """Returns the outcome of every job, in the order of their ends.

    Args:
        workers: GPUs of each kind, in the order of the jobs' rates.
        how: the nodes that they are in. Jobs are placed anew in each round.
        beside: speeds of jobs that share GPUs, for policies that pack jobs; other policies share no GPUs.

    Raises:
        UnknownName: there is no such policy.
        ForerunError: a job fits on no kind of GPU.
    """
    nodes = Nodes(workers, how)
    for job in jobs:
        if not any(rate > 0 and nodes.could_ever(kind, job.gpus) for kind, rate in enumerate(job.rates)):
            raise ForerunError(f"job {job.name}: no kind of GPU that it runs on has {job.gpus:,}")
    return _Rounds(jobs, workers, policy_name, nodes, beside or {}, resume_s, groups).run()


class _Rounds:
    def __init__(
        self,
        jobs: Sequence[SteppedJob],
        workers: Sequence[int],
        policy_name: str,
        nodes: Nodes,
        beside: Beside,
        resume_s: float,
        groups: Mapping[str, Group],
    ) -> None:
        ordered = sorted(jobs, key=lambda job: job.submit_s)
        self.arriving = [_Running(job, number) for number, job in enumerate(ordered)][::-1]
        self.workers, self.policy, self.nodes, self.resume_s = workers, shares(policy_name), nodes, resume_s
        names = list(dict.fromkeys(job.group for job in ordered))
        self.groups = [groups.get(name, Group()) for name in names]
        self.group_of = [names.index(job.group) for job in ordered]
        self.random = Random(_SEED)
        self.jobs: dict[int, _Running] = {}
        self.units = Units(len(workers))
        self.types, self.beside = _types(ordered, beside)
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
                raise ForerunError(f"the policy never starts job {next(iter(self.jobs.values())).job.name}")
            else:
                self.reset_s = 0.0
                idle = True
            while self.arriving and self.arriving[-1].job.submit_s <= self.now_s:
                job = self.arriving.pop()
                self.jobs[job.number] = job
                self.units.add(job.number)
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
        for turn in sorted(turns, key=lambda turn: (-turn.end_s, turn.jobs[0].number)):
            self.units.ran(tuple(job.number for job in turn.jobs), turn.kind, turn.end_s - began_s)
            for job, rate, steps in zip(turn.jobs, turn.rates, turn.steps, strict=True):
                if turn.failed and failures is not None:
                    job.fail(turn.end_s - self.now_s, rate, failures)
                else:
                    if failures is not None:
                        job.trained(turn.end_s - self.now_s, rate, failures)
                    job.left -= steps
                job.kind = turn.kind
                if turn.end_s > self.now_s:
                    job.ran.append((self.now_s, turn.end_s, job.job.gpus / len(turn.jobs), turn.kind))
                if job.left <= 0:
                    self._end(job, turn.end_s)
        self.now_s = self.began_s

    def _end(self, job: _Running, end_s: float) -> None:
        del self.jobs[job.number]
        self.units.remove(job.number)
        self.changed = True
        own = job.job
        periods = _joined(job.ran)
        ran, held = tuple((begin_s, end) for begin_s, end, *_ in periods), tuple(gpus for *_, gpus, _ in periods)
        kinds = tuple(kind for *_, kind in periods)
        stops = sum(end != begin for (_, end), (begin, _) in pairwise(ran)) - job.failures
        held = () if all(gpus == own.gpus for gpus in held) else held
        self.ended.append(
            Scheduled(own.at_its_fastest, ran[0][0], end_s, max(0, stops), ran, job.failures, held, kinds)
        )

    def _start(self) -> list[_Turn]:
        """Returns the jobs of the next round."""
        if self.changed and (self.now_s - self.reset_s >= RESET_S or self.reset_s == 0.0):
            self._share()
        kinds = [kind for kind, number in enumerate(self.workers) if number]
        if not self.policy.knows_rates:
            self.random.shuffle(kinds)
        while self.nodes.next_failure(self.now_s) is not None:
            pass  # these failures hit nodes without jobs
        taken: set[int] = set()
        chosen: list[_Turn] = []
        for kind in kinds:
            room = self.nodes.room(kind, self.now_s)
            self._fill(kind, room, self.units.in_order(kind), taken, chosen)
            if room.free and not self.policy.in_order:
                self._fill(kind, room, self.units.idle(kind, self._idle(taken, room.free)), taken, chosen)
        self._slow(chosen)
        return chosen

    def _fill(self, kind: int, room: Placer, units: Sequence[Unit], taken: set[int], chosen: list[_Turn]) -> None:
        """Gives units their turns on a kind of GPU, in their order, as long as they find a place."""
        for unit in units:
            if not room.free:
                return
            if not taken.isdisjoint(unit):
                continue
            jobs = tuple(self.jobs[number] for number in unit)
            rates = self._rates(jobs, kind)
            if min(rates) <= 0 or (place := room.place(jobs[0].job.gpus)) is None:
                continue
            taken.update(unit)
            if self.units.has_share(unit):  # as in Gavel, a new job has its place, and runs once it has a share
                stopped = [job for job in jobs if job.ran and (job.ran[-1][1], job.kind) != (self.now_s, kind)]
                resumes_s = self.resume_s if stopped else 0.0
                turn = _Turn(unit[0], jobs, kind, rates, place, room.on_rails(place), resumes_s)
                turn.go_at(1.0, self.now_s)
                chosen.append(turn)

    def _slow(self, turns: Sequence[_Turn]) -> None:
        """Lets jobs on the same links slow each other, for the whole round as they do at its beginning."""
        network = self.nodes.how.network
        if network is None:
            return
        for kind, shape in enumerate(self.nodes.shapes):
            own = [turn for turn in turns if turn.kind == kind]
            paces = network.paces(own, shape)
            for turn in own:
                if turn.number in paces:
                    turn.go_at(paces[turn.number], self.now_s)

    def _idle(self, taken: set[int], free: int) -> list[Unit]:
        """Returns the jobs that have no turn and need no more than the free GPUs, and pairs of them.

        A new job stands before its pairs with others, so that these never run.
        """
        jobs = [job for number, job in self.jobs.items() if number not in taken and job.job.gpus <= free]
        known = [job for job in jobs if self.units.has_share((job.number,))] if self.policy.packs else ()
        pairs = combinations(known, 2)
        types = self.types
        return [
            *((job.number,) for job in jobs),
            *(
                (one.number, other.number)
                for one, other in pairs
                if (types[one.number], types[other.number]) in self.beside
            ),
        ]

    def _rates(self, jobs: tuple[_Running, ...], kind: int) -> tuple[float, ...]:
        """Returns the steps a second of the jobs of a unit on a kind of GPU."""
        if len(jobs) == 1:
            return (jobs[0].job.rates[kind],)
        types = self.types[jobs[0].number], self.types[jobs[1].number]
        return tuple(self.beside[types][:, kind].tolist()) if types in self.beside else (0.0, 0.0)

    def _share(self) -> None:
        """Asks for new shares, after noting how far each unit is behind its old one."""
        self.units.settle(self.now_s - self.reset_s)
        self.reset_s, self.changed = self.now_s, False
        own = [job.job for job in self.jobs.values()]
        if not own:
            return
        demand = Demand(
            names=list(self.jobs),
            rates=np.array([job.rates for job in own]),
            gpus=np.array([float(job.gpus) for job in own]),
            weights=np.array([job.weight for job in own]),
            steps_left=np.array([float(job.left) for job in self.jobs.values()]),
            waited_s=self.now_s - np.array([job.submit_s for job in own]),
            workers=np.array(self.workers, dtype=np.float64),
            types=[self.types[number] for number in self.jobs],
            beside=self.beside,
            groups=self.groups,
            group_of=[self.group_of[number] for number in self.jobs],
        )
        pairs = self.policy.pairs(demand)
        found = self.policy.of(replace(demand, pairs=pairs))
        self.units.share(rounded(found) if self.policy.solved else found, pairs.jobs)


def _types(jobs: Sequence[SteppedJob], beside: Beside) -> tuple[list[int], dict[tuple[int, int], Vector]]:
    """Returns the number of each job's type, and how fast jobs of two types are on the same GPUs."""
    numbers: dict[tuple[str, int], int] = {}
    types = [numbers.setdefault((job.type, job.gpus), len(numbers)) for job in jobs]
    known = {
        (numbers[one, gpus], numbers[other, gpus]): rates
        for (one, other, gpus), rates in beside.items()
        if (one, gpus) in numbers and (other, gpus) in numbers
    }
    return types, known


def _joined(periods: Sequence[tuple[float, float, float, int]]) -> list[tuple[float, float, float, int]]:
    """Returns periods with those as one that follow each other at once with as many GPUs of the same kind."""
    joined: list[tuple[float, float, float, int]] = []
    for begin_s, end_s, gpus, kind in periods:
        if joined and joined[-1][1:] == (begin_s, gpus, kind):
            joined[-1] = (joined[-1][0], end_s, gpus, kind)
        else:
            joined.append((begin_s, end_s, gpus, kind))
    return joined
