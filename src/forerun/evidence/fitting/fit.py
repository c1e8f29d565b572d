"""Fits the constants of a registry to measured steps, with all steps and with whole families of stacks left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from forerun.core.program.types import F64
from forerun.evidence.fitting.constants import Constant, Kind, Registry
from forerun.evidence.fitting.posterior import Posterior
from forerun.evidence.fitting.solve import Priors, Solution, solve
from forerun.evidence.fitting.steps import Step, StepTimes

INFORMS = 0.02
"""a row informs a constant if |d log(time) / d log(constant)| is at least this"""
Grouping = Literal["family", "source"]
"""steps that are left out of a fit together: those of one family of stacks, or of one source"""
DIGITS = 3
"""significant digits of fitted values"""


@dataclass(frozen=True, slots=True)
class FittedConstant:
    """One constant after the fit; `sigma` is the standard deviation of its logarithm."""

    constant: Constant
    prior: float
    """value where no step informs it or its kind"""
    value: float
    sigma: float
    rows_of: dict[str, int]
    """place of the constant -> number of steps that inform it there"""

    @property
    def rows(self) -> int:
        """Returns the number of steps that inform it."""
        return sum(self.rows_of.values())


@dataclass(frozen=True, slots=True)
class FittedKind:
    """The fitted value around which the constants of a kind lie."""

    name: str
    kind: Kind
    prior: float
    value: float
    sigma: float


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted constants, and the seconds of the steps with shipped and with fitted constants, (n_steps,) each."""

    steps: tuple[Step, ...]
    kinds: tuple[FittedKind, ...]
    constants: tuple[FittedConstant, ...]
    posterior: Posterior
    shipped_s: F64
    fitted_s: F64


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Some steps, predicted with constants that were fitted without them."""

    numbers: tuple[int, ...]
    """numbers of the steps"""
    values: F64
    """logarithms of all constants, (n_constants,)"""
    posterior: Posterior
    seconds: F64
    """predicted times of the steps, (n,)"""


class StepFit:
    """The fit of one set of steps. It computes its Jacobian once, at the fitted constants."""

    def __init__(self, times: StepTimes) -> None:
        """Fits to all steps. Raises ForerunError if the fit does not converge."""
        self._times = times
        registry = times.registry
        self._priors = priors_of(registry)
        self._n_kinds = len(registry.kinds)
        shipped_s = times.seconds(times.shipped)
        self._slopes = self._padded(times.slopes(times.shipped, shipped_s))
        self._informing = everyone = np.array([step.informs for step in times.steps])
        first = self._solve(everyone, times.shipped, np.log(shipped_s) - times.log_measured)
        seconds = np.exp(first.errors + times.log_measured)
        self._slopes = self._padded(times.slopes(first.x[self._n_kinds :], seconds))
        self._all = self._solve(everyone, first.x[self._n_kinds :], first.errors)
        self.values = np.log([rounded(value) for value in np.exp(self._all.x[self._n_kinds :])])
        """logarithms of the fitted constants, rounded as files hold them, (n_constants,)"""
        self.fit = self._read(shipped_s, times.seconds(self.values))

    @property
    def slopes(self) -> F64:
        """Returns d log(predicted) / d log(constant) at the fitted constants, (n_steps, n_constants)."""
        return self._slopes[:, self._n_kinds :]

    def leave_out(self, group: str, by: Grouping = "family") -> LeftOut:
        """Predicts the steps of a family of stacks, or of a source, by a fit to all others.

        That fit moves little from the one to all steps, so that it takes errors to first order; the steps that are left
        out are predicted exactly.
        """
        times, fitted = self._times, self._all
        own = np.array([getattr(step, by) == group for step in times.steps])
        numbers = np.flatnonzero(own).tolist()
        informing = self._informing & ~own
        weights = np.where(informing, row_weights(times.steps, informing), 0.0)
        found = solve(
            lambda x: fitted.errors + self._slopes @ (x - fitted.x),
            self._slopes,
            self._priors,
            weights,
            times.registry.scale,
            fitted.x,
            fitted.errors,
        )
        values = found.x[self._n_kinds :]
        return LeftOut(tuple(numbers), values, self._posterior(found), times.seconds(values, numbers))

    def _posterior(self, found: Solution) -> Posterior:
        names = [constant.name for constant in self._times.registry.constants]
        return Posterior(tuple(names), found.covariance[self._n_kinds :, self._n_kinds :])

    def _solve(self, used: np.typing.NDArray[np.bool_], start: F64, errors: F64) -> Solution:
        times, priors = self._times, self._priors
        x = np.concatenate([priors.mean[: self._n_kinds], start])
        weights = np.where(used, row_weights(times.steps, used), 0.0)
        return solve(
            lambda x: times.errors(x[self._n_kinds :]), self._slopes, priors, weights, times.registry.scale, x, errors
        )

    def _padded(self, slopes: F64) -> F64:
        """Returns `slopes` with zeros for the kinds in front: steps depend on kinds only through their constants."""
        return np.hstack([np.zeros((len(slopes), self._n_kinds)), slopes])

    def _read(self, shipped_s: F64, fitted_s: F64) -> Fit:
        registry, found, n = self._times.registry, self._all, self._n_kinds
        prior, value = np.exp(self._priors.mean), np.exp(found.x)
        kinds = tuple(
            FittedKind(name, kind, float(prior[i]), float(value[i]), float(found.sigma[i]))
            for i, (name, kind) in enumerate(registry.kinds.items())
        )
        constants = tuple(
            FittedConstant(
                constant, float(prior[i]), float(np.exp(fitted)), float(found.sigma[i]), self._rows_of(i - n)
            )
            for i, (constant, fitted) in enumerate(zip(registry.constants, self.values, strict=True), n)
        )
        return Fit(self._times.steps, kinds, constants, self._posterior(found), shipped_s, fitted_s)

    def _rows_of(self, number: int) -> dict[str, int]:
        rows = dict.fromkeys(self._times.registry.constants[number].of, 0)
        for step, constants in enumerate(self._times.constants):
            if self._informing[step] and abs(self.slopes[step, number]) > INFORMS:
                rows[next(place for constant, place in constants.values() if constant == number)] += 1
        return rows


def priors_of(registry: Registry) -> Priors:
    """Returns the priors of the logarithms of all kinds, followed by all constants."""
    kinds = list(registry.kinds)
    entries: Sequence[Kind | Constant] = (*registry.kinds.values(), *registry.constants)
    lines, values, sigma = np.eye(len(entries)), np.zeros(len(entries)), np.zeros(len(entries))
    for i, entry in enumerate(entries):
        values[i] = np.log(entry.factor if entry.prior is None else entry.prior)
        if entry.kind is not None:
            lines[i, kinds.index(entry.kind)] = -1.0
        own = entry.sigma
        sigma[i] = registry.kinds[entry.kind].spread if own is None and entry.kind is not None else own
    return Priors(lines, values, sigma)


def row_weights(steps: Sequence[Step], used: np.typing.NDArray[np.bool_]) -> F64:
    """Returns weights, (n_steps,), by which a source of n used rows counts n^(3/4): its rows share causes of error."""
    counts = Counter(step.source for step, own in zip(steps, used, strict=True) if own)
    return np.array([max(counts[step.source], 1) ** -0.25 for step in steps])


def rounded(value: float) -> float:
    """Returns `value` with DIGITS significant digits."""
    return float(f"{value:.{DIGITS}g}")
