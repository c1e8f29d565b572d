"""Pace: the time of an iteration under its conditions, and the part of it that is spent waiting for the slowest
rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from forerun.answers.analysis.setup import Setup
from forerun.answers.analysis.stepper import Step, Stepper
from forerun.answers.experiment.conditions import Conditions
from forerun.common.units import PS_PER_S

WAITING = "waiting"
"""the one of CAUSES that follows from two simulations"""


@dataclass(frozen=True, slots=True)
class PacedStep:
    """One iteration."""

    time_ps: int
    breakdown_s: dict[str, float]
    """CAUSES -> seconds; the sum is time_ps"""
    slowest_rank: int
    """who the others wait for; -1: nobody"""


class Pace:
    """Iterations of one Setup.

    `waiting` is the additional time of an iteration over an even iteration, in which every rank is as fast as the
    median rank and all GPUs are those of the cluster. The rest of the breakdown is that of the even iteration. If slow
    ranks delay nobody, because communication or another pipeline stage takes longer, `waiting` is 0 and the breakdown
    is that of the rank class that sets the pace.

    Slow ranks in different replicas of a pipeline are taken to be in one (analysis/stepper.py). That is an upper bound.
    The time of each replica alone is a lower bound: it is 0.4 to 1.3 % lower in five pipelines of Llama-2-7B (2 to 8
    stages, 16 and 64 replicas) with a jitter of 5 %.
    """

    def __init__(self, setup: Setup) -> None:
        """Builds the Programs. Raises as `simulate_setup`."""
        self.setup = setup
        self.stepper = Stepper(setup)
        self._even = Stepper(replace(setup, kinds=())) if setup.kinds else self.stepper
        self._ranks = np.argsort(self.stepper.class_of_rank, kind="stable")
        """ranks by class"""
        classes = self.stepper.class_of_rank[self._ranks]
        self._starts = np.searchsorted(classes, np.arange(self.stepper.n_classes + 1))
        self._last: tuple[Conditions, PacedStep] | None = None

    def step(self, conditions: Conditions) -> PacedStep:
        """Returns one iteration. The slowest rank of a rank class sets the pace of the class."""
        if self._last is None or self._last[0] is not conditions:
            self._last = conditions, self._simulated(conditions)
        return self._last[1]

    def _simulated(self, conditions: Conditions) -> PacedStep:
        factors = self.class_factors(conditions)
        step = self._step(self.stepper, factors, conditions)
        time_ps = _ps(step)
        if self._even is self.stepper and conditions.slowest_rank < 0:
            return PacedStep(time_ps, step.breakdown_s, -1)
        even = self._step(self._even, [conditions.middle] * self._even.n_classes, conditions)
        lost_ps = time_ps - _ps(even)
        if lost_ps <= 0:
            return PacedStep(time_ps, step.breakdown_s, -1)
        breakdown = dict(even.breakdown_s)
        breakdown[WAITING] += lost_ps / PS_PER_S
        ranks = self._ranks[self._starts[step.slowest] : self._starts[step.slowest + 1]]
        return PacedStep(time_ps, breakdown, int(ranks[np.argmax(conditions.compute[ranks])]))

    def class_factors(self, conditions: Conditions) -> list[float]:
        """Returns the factor of the slowest rank of each rank class."""
        factors: list[float] = np.maximum.reduceat(conditions.compute[self._ranks], self._starts[:-1]).tolist()
        return factors

    def _step(self, stepper: Stepper, factors: Sequence[float], conditions: Conditions) -> Step:
        return stepper.step(factors, conditions.network, conditions.host)


def _ps(step: Step) -> int:
    return round(step.time_s * PS_PER_S)
