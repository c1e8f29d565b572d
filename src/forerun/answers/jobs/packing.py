"""Policies that let two jobs run on the same GPUs at the same time (Gavel, OSDI'20; Gandiva, OSDI'18)."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np

from forerun.answers.jobs.interior_point import Vector
from forerun.answers.jobs.shares import (
    NO_PAIRS,
    Demand,
    FinishTimeFairness,
    InOrder,
    LeastMakespan,
    MaxMinFairness,
    MostThroughput,
    Pairs,
    Shares,
)
from forerun.answers.jobs.water_filling import WaterFilling, WaterFillingByGroup

_WORTH_PACKING = 1.5
"""sum of both jobs' rates, each over that alone, above which first in, first out packs a job with another (Gavel)"""


class Packed(Shares):
    """A policy that also gives shares to pairs of jobs."""

    packs = True

    def __init__(self, policy: Shares) -> None:
        self.policy = policy

    def pairs(self, demand: Demand) -> Pairs:
        """Returns all pairs that do more beside each other than in turn; others can't make any shares better."""
        return gaining_pairs(demand)

    def of(self, demand: Demand) -> Vector:
        """Returns the policy's shares."""
        return self.policy.of(demand)


def gaining_pairs(demand: Demand) -> Pairs:
    """Returns the pairs of jobs that do more beside each other than in turn on a kind of GPU."""
    types = np.array(demand.types, dtype=np.int64)
    jobs, rates = [NO_PAIRS.jobs], [np.zeros((0, 2, len(demand.workers)))]
    for (one, other), beside in demand.beside.items():
        first, second = (np.flatnonzero(types == each) for each in (one, other))
        if not len(first) or not len(second):
            continue
        alone = demand.rates[[first[0], second[0]]]
        if gains(beside, alone).max() <= 1.0:
            continue
        both = np.stack([np.repeat(first, len(second)), np.tile(second, len(first))], axis=1)
        both = both[both[:, 0] < both[:, 1]]
        jobs.append(both)
        rates.append(np.broadcast_to(beside, (len(both), *beside.shape)))
    found = np.concatenate(jobs)
    order = np.lexsort((found[:, 1], found[:, 0]))
    return Pairs(found[order], np.concatenate(rates)[order])


def gains(beside: Vector, alone: Vector) -> Vector:
    """Returns for each kind the sum of the rates of two jobs beside each other, each over its rate alone.

    Args:
        beside: steps a second of [member, kind] on the same GPUs; alone: of [member, kind] on GPUs of their own.
    """
    ratio = np.divide(beside, alone, out=np.zeros_like(beside), where=alone > 0.0)
    return np.asarray(ratio.sum(axis=0))


class InOrderPacked(InOrder):
    """First in, first out; who finds no GPUs joins the job with which it does most, where that is worth it."""

    packs = True

    def pairs(self, demand: Demand) -> Pairs:
        """Returns the pairs that run."""
        return self._chosen(demand)[1]

    def of(self, demand: Demand) -> Vector:
        """Returns 1 for the kind that a job or a pair runs on."""
        alone, pairs, kinds = self._chosen(demand)
        shares = np.zeros((len(pairs.jobs), len(demand.workers)))
        shares[np.arange(len(kinds)), kinds] = 1.0
        return np.concatenate([alone, shares])

    def _chosen(self, demand: Demand) -> tuple[Vector, Pairs, list[int]]:
        """Returns the shares of jobs alone, the pairs that run, and on which kind each of them does."""
        shares = super().of(demand)
        running = np.flatnonzero(shares.any(axis=1)).tolist()
        waiting = range(len(running), len(shares))
        if (demand.gpus @ shares < demand.workers).any():
            waiting = waiting[1:]  # as in Gavel, a job that is too large for the free GPUs waits, and others may join
        found: list[tuple[tuple[int, int], Vector]] = []
        kinds: list[int] = []
        for job in waiting:
            partner = self._partner(demand, job, running, shares)
            if partner is None:
                break
            running.remove(partner)
            found.append(((min(job, partner), max(job, partner)), demand.together(*sorted((job, partner)))))
            kinds.append(int(shares[partner].argmax()))
            shares[partner] = 0.0
        both = [np.array([jobs for jobs, _ in found]), np.array([rates for _, rates in found])]
        return shares, Pairs(both[0], both[1]) if found else NO_PAIRS, kinds

    @staticmethod
    def _partner(demand: Demand, job: int, running: list[int], shares: Vector) -> int | None:
        """Returns the job with which another one does most; None if that isn't worth it."""
        best, most = None, _WORTH_PACKING
        for other in running:
            kind = int(shares[other].argmax())
            both = sorted((job, other))
            if demand.gpus[job] == demand.gpus[other]:
                gain = float(gains(demand.together(*both), demand.rates[both])[kind])
                if gain > most:
                    best, most = other, gain
        return best


class Gandiva(Shares):
    """Pairs jobs at random where not all find GPUs, and keeps the pairs that do more beside each other than in turn.

    Jobs and pairs get equal parts of the cluster, as in Gavel's simulator.
    """

    packs, solved = True, False

    def __init__(self) -> None:
        self.random = Random(0)
        self.partner: dict[int, int] = {}
        """the other job of each that is in a pair, by name"""

    def pairs(self, demand: Demand) -> Pairs:
        """Returns the pairs of the jobs that are left, after drawing partners for jobs that have none."""
        place = {name: i for i, name in enumerate(demand.names)}
        for name, other in list(self.partner.items()):
            if name < other and (name not in place or other not in place or self._loses(demand, place, name, other)):
                del self.partner[name], self.partner[other]
        if demand.gpus.sum() <= demand.workers.sum():
            return NO_PAIRS
        self._draw(demand, [name for name in demand.names if name not in self.partner])
        both = [(place[name], place[other]) for name, other in sorted(self.partner.items()) if name < other]
        return Pairs(np.array(both), np.array([demand.together(*each) for each in both])) if both else NO_PAIRS

    @staticmethod
    def _loses(demand: Demand, place: dict[int, int], name: int, other: int) -> bool:
        """Returns whether a pair does less beside each other than in turn, all kinds taken together, or one stands."""
        both = [place[name], place[other]]
        beside = demand.together(*both)
        return not (beside > 0.0).all() or float(gains(beside, demand.rates[both]).sum()) < 1.0

    def _draw(self, demand: Demand, free: list[int]) -> None:
        """Draws pairs of jobs that need as many GPUs; a draw of two that don't is lost."""
        gpus = dict(zip(demand.names, demand.gpus.tolist(), strict=True))
        for _ in range(len(free)):
            if len(free) < 2:
                return
            one, other = self.random.sample(free, 2)
            if gpus[one] == gpus[other]:
                free.remove(one)
                free.remove(other)
                self.partner[one], self.partner[other] = other, one

    def of(self, demand: Demand) -> Vector:
        """Returns equal parts for the pairs and the jobs that are in none."""
        units = np.ones(len(demand.unit_gpus), dtype=bool)
        units[demand.pairs.jobs.ravel()] = False
        part = demand.workers[None, :] / units.sum() / demand.unit_gpus[:, None]
        return np.asarray(np.where(units[:, None], part / np.maximum(part.sum(axis=1), 1.0)[:, None], 0.0))


PACKING: dict[str, Callable[[], Shares]] = {
    "gandiva": Gandiva,
    "fifo-packed": InOrderPacked,
    "max-min-fairness-packed": lambda: Packed(MaxMinFairness()),
    "max-min-fairness-water-filling-packed": lambda: Packed(WaterFilling()),
    "max-min-fairness-water-filling-by-group-packed": lambda: Packed(WaterFillingByGroup()),
    "finish-time-fairness-packed": lambda: Packed(FinishTimeFairness(by_weight=True)),
    "min-total-duration-packed": lambda: Packed(LeastMakespan()),
    "max-sum-throughput-packed": lambda: Packed(MostThroughput()),
}
"""name -> policy; the names are those of Gavel"""
