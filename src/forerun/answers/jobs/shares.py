"""Policies for unlike GPUs: which share of the time each job should run on each kind (Gavel, OSDI'20).

A policy is one small class and an entry of `share_policies.SHARES`. Those that know how fast each job is on each kind
end in `-perf`; those that also let two jobs share their GPUs end in `-packed` (`packing.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from random import Random
from typing import ClassVar

import numpy as np

from forerun.answers.jobs.interior_point import Rows, Vector, maximised
from forerun.core.program.types import I64

_DIGITS = 6
"""of shares under which jobs that get none tie, and run in the order of arrival"""
_LEAST_GAIN = 1e-6
"""relative accuracy of the least finish-time ratio"""


@dataclass(frozen=True)
class Pairs:
    """Pairs of jobs that may run on the same GPUs at the same time."""

    jobs: I64
    """of [pair, member]: the numbers of the two jobs among all, the smaller one first"""
    rates: Vector
    """steps a second of [pair, member, kind] beside each other"""


NO_PAIRS = Pairs(np.zeros((0, 2), np.int64), np.zeros((0, 2, 0)))


@dataclass(frozen=True, slots=True)
class Group:
    """States the due part of a group of jobs under policies that share by group."""

    weight: float = 1.0
    in_order: bool = False
    """whether its jobs get their parts one after the other, in order of arrival"""


@dataclass(frozen=True)
class Demand:
    """Jobs that have not ended, in the order of arrival. Units are the jobs, each alone, and after them the pairs."""

    names: Sequence[int]
    rates: Vector
    """steps a second of [job, kind], alone"""
    gpus: Vector
    """that each job needs at once"""
    weights: Vector
    steps_left: Vector
    waited_s: Vector
    """since each job's submission"""
    workers: Vector
    """GPUs of each kind"""
    types: Sequence[int] = ()
    """of each job; jobs of a type need as many GPUs and are equally fast"""
    beside: Mapping[tuple[int, int], Vector] = field(default_factory=dict)
    """(type, type) -> steps a second of [member, kind] on the same GPUs; the job that came first is the first member"""
    pairs: Pairs = NO_PAIRS
    """that the policy chooses from"""
    groups: Sequence[Group] = (Group(),)
    group_of: Sequence[int] = ()
    """of each job; empty: all are of the first group"""

    @cached_property
    def members(self) -> tuple[I64, I64, Vector]:
        """Returns for each job in each of its units: the job, the unit, and its steps a second of [member, kind]."""
        jobs, kinds = self.rates.shape
        alone = np.arange(jobs)
        units = np.concatenate([alone, jobs + np.repeat(np.arange(len(self.pairs.jobs)), 2)])
        rates = np.concatenate([self.rates, self.pairs.rates.reshape(-1, kinds)])
        return np.concatenate([alone, self.pairs.jobs.ravel()]), units, rates

    @property
    def unit_gpus(self) -> Vector:
        """Returns the GPUs that each unit needs; the jobs of a pair need as many."""
        return np.concatenate([self.gpus, self.gpus[self.pairs.jobs[:, 0]]])

    def together(self, one: int, other: int) -> Vector:
        """Returns the steps a second of [member, kind] of two jobs on the same GPUs; 0 if they can't share."""
        unknown = np.zeros((2, len(self.workers)))
        return self.beside.get((self.types[one], self.types[other]), unknown) if self.types else unknown


class Shares(ABC):
    """Computes the share of time for which each unit should run on each kind of GPU, as an array of [unit, kind]."""

    knows_rates: ClassVar[bool] = True
    in_order: ClassVar[bool] = False
    """whether a job without a share waits even if GPUs are idle"""
    packs: ClassVar[bool] = False
    """whether two jobs may run on the same GPUs"""
    solved: ClassVar[bool] = True
    """whether shares are the solution of a linear program, which is right to some digits only"""

    def pairs(self, demand: Demand) -> Pairs:
        """Returns the pairs of jobs that may share GPUs: none under most policies."""
        return NO_PAIRS

    @abstractmethod
    def of(self, demand: Demand) -> Vector:
        """Returns the shares."""


def limits_of(demand: Demand) -> tuple[Rows, Vector]:
    """Returns rows and limits of shares that can be had: those of a job sum to at most 1, and the GPUs suffice."""
    jobs, units, _ = demand.members
    kinds, gpus = len(demand.workers), demand.unit_gpus
    number = len(gpus) * kinds
    each = np.arange(kinds)
    places = (units[:, None] * kinds + each).ravel()
    of_jobs = Rows(np.repeat(jobs, kinds), places, np.ones(len(places)), (len(demand.gpus), number))
    of_kinds = Rows(np.tile(each, len(gpus)), np.arange(number), np.repeat(gpus, kinds), (kinds, number))
    return Rows.stacked([of_jobs, of_kinds], number), np.concatenate([np.ones(len(demand.gpus)), demand.workers])


def progress_of(demand: Demand, per_step: Vector) -> Rows:
    """Returns for each job its steps a second by its units' shares, each step as much worth as `per_step` says."""
    jobs, units, rates = demand.members
    kinds = len(demand.workers)
    places = (units[:, None] * kinds + np.arange(kinds)).ravel()
    value = (rates * per_step[jobs][:, None]).ravel()
    return Rows(np.repeat(jobs, kinds), places, value, (len(per_step), len(demand.unit_gpus) * kinds))


def evenly(demand: Demand, per_step: Vector) -> tuple[Vector, float]:
    """Returns the shares that make the least progress of all jobs the largest, and that progress."""
    rows, limits = limits_of(demand)
    number, jobs = rows.shape[1], len(per_step)
    gains = progress_of(demand, per_step)
    unit = float(gains.value.max())
    least = Rows(np.arange(jobs), np.full(jobs, number), np.ones(jobs), (jobs, number + 1))
    behind = Rows(
        np.concatenate([gains.row, least.row]),
        np.concatenate([gains.column, least.column]),
        np.concatenate([gains.value / -unit, least.value]),
        least.shape,
    )
    goal = np.zeros(number + 1)
    goal[-1] = 1.0
    found = maximised(goal, Rows.stacked([rows, behind], number + 1), np.concatenate([limits, np.zeros(jobs)]))
    return np.clip(found[:-1].reshape(-1, len(demand.workers)), 0.0, 1.0), unit * float(found[-1])


class MaxMinFairness(Shares):
    """Gives jobs equal parts of the cluster. A job's part is its speed over its mean speed on all GPUs of the
    cluster.
    """

    def of(self, demand: Demand) -> Vector:
        """Returns the shares that make the smallest part as large as it can be."""
        in_turn = demand.rates @ demand.workers / demand.workers.sum()
        return evenly(demand, demand.gpus / (demand.weights * in_turn))[0]


class FinishTimeFairness(Shares):
    """The job that ends latest, against when it would with a cluster part of its own, ends as early as it can.

    With `by_weight`, a job of weight 2 counts as half as fast as it is, so that it gets more, as in Gavel's policy for
    jobs that share GPUs.
    """

    def __init__(self, by_weight: bool = False) -> None:
        self.by_weight = by_weight
        self.alone_s: dict[int, float] = {}
        self.before: dict[int, tuple[float, float]] = {}
        """steps left and rate alone of each job when shares were last asked for"""

    def of(self, demand: Demand) -> Vector:
        """Returns the shares with the smallest of all largest ratios of finish times."""
        rates_alone = (demand.rates * own_part(demand)).sum(axis=1)
        self._note(demand, rates_alone)
        expected_s = np.array([self.alone_s[name] for name in demand.names]) + demand.steps_left / rates_alone
        weights = demand.weights if self.by_weight else np.ones(len(demand.gpus))

        def served(ratio: float) -> tuple[Vector, float]:
            """Returns shares under which no ratio is above `ratio` if the second value is at least 1."""
            return evenly(demand, (ratio * expected_s - demand.waited_s) / (demand.steps_left * weights))

        low = float((demand.waited_s / expected_s).max())
        high = max(2.0 * low, 1.0)
        while served(high)[1] < 1.0:
            low, high = high, 2.0 * high
        while high - low > _LEAST_GAIN * high:
            middle = (low + high) / 2.0
            low, high = (low, middle) if served(middle)[1] >= 1.0 else (middle, high)
        return served(high)[0]

    def _note(self, demand: Demand, rates_alone: Vector) -> None:
        for name, left, rate in zip(demand.names, demand.steps_left.tolist(), rates_alone.tolist(), strict=True):
            self.alone_s.setdefault(name, 0.0)
            if name in self.before:
                then_left, then_rate = self.before[name]
                self.alone_s[name] += (then_left - left) / then_rate
            self.before[name] = (left, rate)


class LeastMakespan(Shares):
    """All jobs end as early as the last of them can."""

    def of(self, demand: Demand) -> Vector:
        """Returns the shares with the least time until the last job ends."""
        return evenly(demand, 1.0 / demand.steps_left)[0]


class MostThroughput(Shares):
    """The most steps a second over all jobs."""

    def of(self, demand: Demand) -> Vector:
        """Returns the shares with the largest sum of rates."""
        rows, limits = limits_of(demand)
        gains = progress_of(demand, np.ones(len(demand.gpus)))
        found = maximised(gains.columns_times(np.ones(len(demand.gpus))), rows, limits)
        return np.asarray(np.clip(found.reshape(-1, len(demand.workers)), 0.0, 1.0).round(_DIGITS))


class Isolated(Shares):
    """Each job has an equal part of the GPUs of each kind to itself."""

    knows_rates, solved = False, False

    def of(self, demand: Demand) -> Vector:
        """Returns the parts."""
        return own_part(demand)


def own_part(demand: Demand) -> Vector:
    """Returns the share of each job of [job, kind] if each has an equal part of the GPUs of each kind to itself."""
    part = (demand.workers / len(demand.gpus))[None, :] / demand.gpus[:, None]
    return np.asarray(part / np.maximum(part.sum(axis=1), 1.0)[:, None])


class InOrder(Shares):
    """First in, first out: a job that doesn't fit holds up all behind it; each runs on the fastest kind with room."""

    in_order, solved = True, False

    def of(self, demand: Demand) -> Vector:
        """Returns 1 for the kind that a job runs on."""
        shares, free = np.zeros_like(demand.rates), demand.workers.copy()
        for i, gpus in enumerate(demand.gpus):
            room = np.flatnonzero((free >= gpus) & (demand.rates[i] > 0))
            if not len(room):
                break
            kind = self.chosen(demand, i, room.tolist())
            shares[i, kind] = 1.0
            free[kind] -= gpus
        return shares

    def chosen(self, demand: Demand, job: int, room: list[int]) -> int:
        """Returns the kind for a job, of those that have room."""
        return max(room, key=lambda kind: float(demand.rates[job, kind]))


class InOrderAnywhere(InOrder):
    """First in, first out, on a kind drawn at random, on which a job stays."""

    knows_rates = False

    def __init__(self) -> None:
        self.random = Random(0)
        self.kind_of: dict[int, int] = {}

    def chosen(self, demand: Demand, job: int, room: list[int]) -> int:
        """Returns the kind on which the job already runs, else a drawn one."""
        name = demand.names[job]
        if self.kind_of.get(name) not in room:
            self.kind_of[name] = room[self.random.randrange(len(room))]
        return self.kind_of[name]


class Blind(Shares):
    """A policy that takes all kinds of GPUs for alike."""

    knows_rates = False

    def __init__(self, policy: Shares, rate: float | None = None) -> None:
        self.policy, self.rate = policy, rate

    def of(self, demand: Demand) -> Vector:
        """Returns the policy's shares where each job is as fast on all kinds as on the first, or has this rate."""
        rates = np.repeat(demand.rates[:, :1], demand.rates.shape[1], axis=1)
        return self.policy.of(replace(demand, rates=rates if self.rate is None else np.full_like(rates, self.rate)))
