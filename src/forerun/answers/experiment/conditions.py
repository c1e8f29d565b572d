"""Conditions: the slowdown of each rank, of the network and of the host in one iteration.

Every draw has its own random generator, seeded by (seed, kind of draw, iteration), and ranks use its numbers in their
order. So the disturbance of rank 3 in iteration 50 is the same in a run of 100 iterations and of a million, on 8 GPUs
and on 64, with stragglers and without.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np

from forerun.answers.experiment.request import Disturbance
from forerun.common.errors import ForerunError
from forerun.core.program.types import F64

_NAMED = 4
"""the most stragglers that a note names"""
_MOST = 1e6
"""a larger factor means that the figures of the distribution are wrong"""


class _Draw(IntEnum):
    """The purpose of a random draw. The numbers are part of a generator's seed and must not change."""

    COMPUTE = 0
    NETWORK = 1
    STRAGGLER = 2
    TAIL = 3


@dataclass(frozen=True, eq=False)
class Conditions:
    """The conditions of one iteration. A factor is a time over the undisturbed time."""

    compute: F64
    """(n_gpus,): of each rank's kernels; not to be written to"""
    network: float = 1.0
    """of collectives and transfers"""
    host: float = 1.0
    """of the host's launches, on all ranks"""
    note: str = ""
    """the reasons for which the iteration differs"""

    def slow(self, rank: int, factor: float, note: str = "") -> Conditions:
        """Returns the same conditions with the kernels of `rank` `factor` times as long as before.

        Raises ForerunError if there is no such rank, or `factor` is not above 0.
        """
        if not 0 <= rank < len(self.compute):
            raise ForerunError(
                f"conditions: there is no rank {rank}; choose one of the ranks 0 to {len(self.compute) - 1}"
            )
        _check_factor("conditions: the factor of a rank", factor)
        compute = self.compute.copy()
        compute[rank] *= factor
        compute.setflags(write=False)
        return replace(self, compute=compute, note=joined(self.note, note))

    def same(self, other: Conditions) -> bool:
        """Returns whether iterations under both are equal."""
        if self is other:
            return True
        figures = self.network == other.network and self.host == other.host and self.note == other.note
        return figures and (self.compute is other.compute or np.array_equal(self.compute, other.compute))

    @property
    def slowest_rank(self) -> int:
        """Returns the first of the ranks with the largest factor; -1 if all are alike."""
        worst = int(np.argmax(self.compute))
        return -1 if self.compute.min() == self.compute[worst] else worst

    @property
    def middle(self) -> float:
        """Returns the median factor of the ranks (the smaller of the two middle ones)."""
        n = (len(self.compute) - 1) // 2
        return float(np.partition(self.compute, n)[n])


class Weather:
    """The Conditions of every iteration of a run under `disturbance` on `n_gpus` GPUs.

    Raises ForerunError if a figure of `disturbance` makes no sense, or a slow rank does not exist.
    """

    def __init__(self, disturbance: Disturbance, n_gpus: int) -> None:
        check_disturbance(disturbance, n_gpus)
        self._of = disturbance
        self._n_gpus = n_gpus
        self._stragglers = disturbance.straggler_probability > 0 and disturbance.straggler_slowdown > 1
        compute = np.ones(n_gpus)
        for rank, factor in disturbance.slow_ranks.items():
            compute[rank] = factor
        compute.setflags(write=False)
        self._steady = Conditions(compute)

    @property
    def is_random(self) -> bool:
        """Returns whether random draws make iterations differ."""
        return self._of.compute_jitter > 0 or self._of.network_jitter > 0 or self._stragglers

    @property
    def differs_by_rank(self) -> bool:
        """Returns whether several ranks may be slow in one iteration, each by its own factor."""
        return self._of.compute_jitter > 0 or self._stragglers or len(self._of.slow_ranks) > 1

    @property
    def warmup_iterations(self) -> int:
        """Returns the number of iterations at the beginning that warm-up slows."""
        return self._of.warmup_iterations if self._of.warmup_slowdown != 1 else 0

    def at(self, iteration: int) -> Conditions:
        """Returns the conditions of one iteration."""
        warming = iteration < self.warmup_iterations
        if not warming and not self.is_random:
            return self._steady
        of = self._of
        compute, network, host, note = self._steady.compute.copy(), 1.0, 1.0, ""
        if warming:
            host = 1.0 + (of.warmup_slowdown - 1.0) * (1.0 - iteration / of.warmup_iterations)
            compute *= host
            note = "warm-up"
        if of.compute_jitter > 0:
            draws = self._draw(_Draw.COMPUTE, iteration).standard_normal(self._n_gpus)
            compute *= _exp(of.compute_jitter * draws)
        if of.network_jitter > 0:
            network = float(_exp(of.network_jitter * self._draw(_Draw.NETWORK, iteration).standard_normal(1))[0])
        if self._stragglers:
            slow = self._draw(_Draw.STRAGGLER, iteration).random(self._n_gpus) < of.straggler_probability
            if slow.any():
                compute[slow] *= self._slowdowns(iteration)[slow]
                note = joined(note, _stragglers(np.flatnonzero(slow).tolist()))
        worst = max(float(compute.max()), network, host)
        if worst > _MOST:
            raise ForerunError(
                f"disturbance: iteration {iteration} would take {worst:.3g} times as long; "
                "lower the jitter or the slowdowns, or raise straggler_tail"
            )
        compute.setflags(write=False)
        return Conditions(compute, network, host, note)

    def _slowdowns(self, iteration: int) -> F64:
        """Returns the factor of each rank if it were a straggler, (n_gpus,)."""
        excess = np.full(self._n_gpus, self._of.straggler_slowdown - 1.0)
        if self._of.straggler_tail > 0:
            excess *= 1.0 + self._draw(_Draw.TAIL, iteration).pareto(self._of.straggler_tail, self._n_gpus)
        slowdowns: F64 = 1.0 + excess
        return slowdowns

    def _draw(self, what: _Draw, iteration: int) -> np.random.Generator:
        seed = np.random.SeedSequence(self._of.seed, spawn_key=(int(what), iteration))
        return np.random.Generator(np.random.PCG64(seed))


def check_disturbance(disturbance: Disturbance, n_gpus: int) -> None:
    """Raises ForerunError for a figure that makes no sense, or for a slow rank that `n_gpus` GPUs don't have."""
    if disturbance.seed < 0:
        raise ForerunError(f"disturbance: seed must be at least 0, got {disturbance.seed}")
    for name in ("compute_jitter", "network_jitter", "straggler_tail", "warmup_iterations"):
        value = getattr(disturbance, name)
        if not 0 <= value < math.inf:
            raise ForerunError(f"disturbance: {name} must be at least 0, got {value}")
    if not 0 <= disturbance.straggler_probability <= 1:
        raise ForerunError(
            f"disturbance: straggler_probability must be between 0 and 1, got {disturbance.straggler_probability}"
        )
    if not 1 <= disturbance.straggler_slowdown < math.inf:
        raise ForerunError(f"disturbance: straggler_slowdown must be at least 1, got {disturbance.straggler_slowdown}")
    _check_factor("disturbance: warmup_slowdown", disturbance.warmup_slowdown)
    for rank, factor in disturbance.slow_ranks.items():
        if not 0 <= rank < n_gpus:
            raise ForerunError(
                f"disturbance: slow_ranks: there is no rank {rank}; choose one of the ranks 0 to {n_gpus - 1}"
            )
        _check_factor(f"disturbance: slow_ranks: the factor of rank {rank}", factor)


def _exp(exponents: F64) -> F64:
    """Returns the factors of jitter; one that overflows a float is infinite."""
    with np.errstate(over="ignore"):
        factors: F64 = np.exp(exponents)
    return factors


def _check_factor(what: str, factor: float) -> None:
    if not 0 < factor < math.inf:
        raise ForerunError(f"{what} must be above 0, got {factor}")


def _stragglers(ranks: list[int]) -> str:
    named = ", ".join(map(str, ranks[:_NAMED]))
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"straggler{'s' if len(ranks) > 1 else ''} {named}{more}"


def joined(*notes: str) -> str:
    """Joins notes, without empty ones."""
    return "; ".join(note for note in notes if note)
