"""How well a stack is predicted that no constant was fitted to, without and with one measured step of it as anchor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forerun.fitting.fit import LeftOut, StepFit
from forerun.fitting.solve import Priors, solve
from forerun.fitting.steps import StepTimes
from forerun.program.types import F64


@dataclass(frozen=True, slots=True)
class LeftOutErrors:
    """Of every step, (n_steps,): log(predicted / measured) with its family left out of the fit."""

    errors: F64
    anchored: tuple[F64, ...]
    """the same after each other step of its source and device as anchor, in turn; empty where it is the only one"""


def left_out_errors(fit: StepFit, times: StepTimes) -> LeftOutErrors:
    """Leave each family out that has steps. Anchors correct to first order. Raises ForerunError as the fit does."""
    errors = np.zeros(len(times.steps))
    for family in dict.fromkeys(step.family for step in times.steps):
        found: LeftOut = fit.leave_out(family)
        errors[list(found.numbers)] = np.log(found.seconds) - times.log_measured[list(found.numbers)]
    return LeftOutErrors(errors, _anchored(times, fit.slopes, errors))


def _anchored(times: StepTimes, slopes: F64, errors: F64) -> tuple[F64, ...]:
    rates = _slopes_of_rates(times, slopes)
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for number, step in enumerate(times.steps):
        groups[step.group].append(number)
    change = [_change(times, rates[number], errors[number]) for number in range(len(times.steps))]
    return tuple(
        np.array([errors[own] + rates[own] @ change[other] for other in groups[step.group] if other != own])
        for own, step in enumerate(times.steps)
    )


def _slopes_of_rates(times: StepTimes, slopes: F64) -> F64:
    """d log(time) / d log(rate) for the rates that an anchor may change, (n_steps, n_rates)."""
    whats = list(times.registry.anchor.sigma)
    out = np.zeros((len(slopes), len(whats)))
    for number, constants in enumerate(times.constants):
        for column, what in enumerate(whats):
            if what in constants:
                out[number, column] = slopes[number, constants[what][0]]
    return out


def _change(times: StepTimes, slopes: F64, error: float) -> F64:
    """Logarithms of the rates that a step with this error makes most probable."""
    anchor = times.registry.anchor
    sigma = np.array(list(anchor.sigma.values()))
    start, first, row = np.zeros(len(sigma)), np.array([error]), slopes[None, :]
    known = Priors(np.eye(len(sigma)), start, sigma)
    return solve(lambda x: first + row @ x, row, known, np.ones(1), anchor.noise, start, first).x


def mean_errors(logarithms: Sequence[F64]) -> F64:
    """Mean absolute error of each, as a fraction of the measured time; without those that are empty."""
    return np.array([np.abs(np.exp(each) - 1).mean() for each in logarithms if len(each)])
