"""Elastic jobs: their goodput on each number of GPUs, and the policies that choose the numbers.

Goodput is examples per second times statistical efficiency (Pollux, OSDI'21; Sia, SOSP'23): a larger batch keeps more
GPUs busy, but the model learns less from each of its examples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from forerun.answers.jobs.choosing import NONE, Offers, best_options
from forerun.answers.jobs.interior_point import Vector
from forerun.answers.jobs.job import Scaling
from forerun.common.errors import UnknownName
from forerun.core.program.types import I64

_LEAST_FACTOR = 1e-3


def efficiency(batch: float, first_batch: float, noise_scale: float) -> float:
    """Returns the statistical efficiency of an example relative to the first batch size: (phi + M0) / (phi + M)
    (Pollux, OSDI'21).

    `noise_scale` is the gradient noise scale phi in examples (McCandlish et al., arXiv 1812.06162).
    """
    return (noise_scale + first_batch) / (noise_scale + batch)


def step_s(batch: float, gpus: int, example_s: float, sync_s: float, overlap: float) -> float:
    """Returns the seconds of a step (Pollux, OSDI'21): overlap 1 adds computation and exchange, more hides the less."""
    compute_s = batch / gpus * example_s
    return float((compute_s**overlap + sync_s**overlap) ** (1.0 / overlap))


class Options:
    """Holds the options of scalings in columns; those of scaling i stand from first[i] to first[i] + count[i]."""

    def __init__(self, scalings: Sequence[Scaling]) -> None:
        self.count: I64 = np.array([len(each.sizes) for each in scalings], np.int64)
        self.first: I64 = np.concatenate([[0], np.cumsum(self.count)[:-1]]).astype(np.int64)
        self.gpus: I64 = np.array([size for each in scalings for size in each.sizes], np.int64)
        self.kind: I64 = np.array([kind for each in scalings for kind in each.kind_of_sizes], np.int64)
        self.speed: Vector = np.array([speed for each in scalings for speed in each.speeds])

    @cached_property
    def least_speed(self) -> Vector:
        """The speed of each scaling on its fewest GPUs, of the kind on which that is the slowest."""
        fewest = np.where(np.diff(self.kind, prepend=-1) != 0, self.speed, np.inf)
        fewest[self.first] = self.speed[self.first]
        return np.minimum.reduceat(fewest, self.first)


@dataclass(frozen=True)
class Asked:
    """Jobs that have not ended, when GPUs are shared out anew, in columns: one element for each job."""

    table: Options
    scaling: I64
    """the place of each job's scaling in the table"""
    now: I64
    """the option that each has, of those of its scaling, or NONE"""
    age_s: Vector
    restarts: I64
    restart_s: float
    """seconds of a restart on other GPUs"""
    weight: Vector
    """how much the worth of each job counts"""

    @property
    def kept(self) -> Vector:
        """Returns the share of its time that is left to each job for training if it moves now, and as often as so far.

        A job that never ran loses nothing by its first start.
        """
        moves = ((self.now != NONE) | (self.restarts > 0)) & ((self.count > 1) | (self.now == NONE))
        if not self.restart_s or not moves.any():
            return np.ones(len(self.now))
        kept_s = self.age_s - self.restarts * self.restart_s
        kept = np.clip(kept_s / (self.age_s + self.restart_s), _LEAST_FACTOR, 1.0)
        return np.asarray(np.where(moves, kept, 1.0))

    @cached_property
    def count(self) -> I64:
        """The number of options of each job."""
        return self.table.count[self.scaling]

    @cached_property
    def begin(self) -> I64:
        """The place at which each job's options begin among those of all jobs; the last element is their number."""
        return np.concatenate([[0], np.cumsum(self.count)]).astype(np.int64)

    @cached_property
    def rows(self) -> I64:
        """The places of all jobs' options in the table."""
        return np.repeat(self.table.first[self.scaling] - self.begin[:-1], self.count) + np.arange(self.begin[-1])

    @cached_property
    def speed(self) -> Vector:
        """The speed of all jobs' options, with what a move there costs."""
        kept = np.repeat(self.kept, self.count)
        stays = self.now != NONE
        kept[self.begin[:-1][stays] + self.now[stays]] = 1.0
        return self.table.speed[self.rows] * kept


class Elastic(ABC):
    """Shares GPUs out among jobs, to each one of the numbers that it can run on, or none."""

    without: ClassVar[float]
    """what no GPUs are worth"""
    any_kind: ClassVar[bool] = False
    """whether it shares out GPUs of several kinds"""

    @abstractmethod
    def worth(self, asked: Asked, total: int) -> Vector:
        """Returns how good the options of all jobs are on a cluster of `total` GPUs; the sum over jobs is maximised."""

    def share(self, asked: Asked, free: Sequence[int]) -> I64:
        """Returns the option of each job, of those of its scaling, or NONE; where not all can run, the first do.

        `free` are the GPUs of each kind.
        """
        if not len(asked.now):
            return asked.now
        table, rows = asked.table, asked.rows
        worth, without = self.worth(asked, sum(free)), self.without
        if (asked.weight != 1.0).any():
            worth, without = (worth - without) * np.repeat(asked.weight, asked.count), 0.0
        offers = Offers(asked.begin, table.kind[rows], table.gpus[rows], worth)
        chosen = best_options(offers, without, np.array(free, np.int64))
        return np.where(chosen == NONE, NONE, chosen - asked.begin[:-1])


class Pollux(Elastic):
    """Makes the harmonic mean of all jobs' speedups over an equal part of the cluster the largest (Pollux, OSDI'21).

    All jobs get some GPUs as long as there are any.
    """

    without = -1e9

    def worth(self, asked: Asked, total: int) -> Vector:
        """Returns minus the reciprocal of the speedup over the most GPUs of an equal part."""
        fair = max(1, total // len(asked.now))
        fewer = np.add.reduceat(asked.table.gpus[asked.rows] <= fair, asked.begin[:-1], dtype=np.int64)
        usual = asked.table.speed[asked.table.first[asked.scaling] + np.maximum(fewer - 1, 0)]
        return -np.repeat(usual, asked.count) / asked.speed


class Sia(Elastic):
    """Makes the sum of goodputs the best, each over that on the job's fewest GPUs and to the power -0.5.

    Sia (SOSP'23) does so with its fairness of -0.5 and 1.1 for no GPUs. On unlike GPUs a job's slowest kind counts.
    The gain of a job over no GPUs counts times its weight.
    """

    without = -1.1
    any_kind = True

    def worth(self, asked: Asked, total: int) -> Vector:
        """Returns minus that power of each goodput."""
        least = asked.table.least_speed[asked.scaling]
        return -1.0 / np.sqrt(asked.speed / np.repeat(least, asked.count))


ELASTIC: Mapping[str, Callable[[], Elastic]] = {"pollux": Pollux, "sia": Sia}
"""name -> policy that chooses how many GPUs each job has"""
ELASTIC_OF_KINDS = [name for name, policy in ELASTIC.items() if policy().any_kind]
"""those that also choose the kind"""


def elastic_policy(name: str) -> Elastic:
    """Returns a new policy called `name`. Raises UnknownName if there is none."""
    if name not in ELASTIC:
        raise UnknownName("policy for elastic jobs", name, list(ELASTIC))
    return ELASTIC[name]()
