"""How well a stack is predicted that no constant was fitted to, without and with one measured step of it as anchor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
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
    own_run: tuple[F64, ...]
    """the same after each of those that are of its model too"""


def left_out_errors(fit: StepFit, times: StepTimes) -> LeftOutErrors:
    """Leave each family out that has steps. Anchors correct to first order. Raises ForerunError as the fit does."""
    errors = np.zeros(len(times.steps))
    for family in dict.fromkeys(step.family for step in times.steps):
        found: LeftOut = fit.leave_out(family)
        errors[list(found.numbers)] = np.log(found.seconds) - times.log_measured[list(found.numbers)]
    rates = _slopes_of_rates(times, fit.slopes)
    change = [_change(times, number, rates[number], errors[number]) for number in range(len(times.steps))]
    alike = [(step.source, step.setup.cluster.device.name) for step in times.steps]
    models = [(*group, step.setup.model.name) for group, step in zip(alike, times.steps, strict=True)]
    anchored, own_run = (_anchored(groups, rates, change, errors) for groups in (alike, models))
    return LeftOutErrors(errors, anchored, own_run)


def _anchored(groups: Sequence[Hashable], rates: F64, change: Sequence[F64], errors: F64) -> tuple[F64, ...]:
    """Of every step, its errors after what each other step of its group changes."""
    members: dict[Hashable, list[int]] = defaultdict(list)
    for number, group in enumerate(groups):
        members[group].append(number)
    return tuple(
        np.array([errors[own] + rates[own] @ change[other] for other in members[group] if other != own])
        for own, group in enumerate(groups)
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


def _change(times: StepTimes, number: int, slopes: F64, error: float) -> F64:
    """Logarithms of the rates that step `number` with this error makes most probable."""
    sigma = np.array(list(times.registry.uncertainty(times.steps[number].setup).values()))
    start, first, row = np.zeros(len(sigma)), np.array([error]), slopes[None, :]
    known = Priors(np.eye(len(sigma)), start, sigma)
    return solve(lambda x: first + row @ x, row, known, np.ones(1), times.registry.anchor.noise, start, first).x


def mean_errors(logarithms: Sequence[F64]) -> F64:
    """Mean absolute error of each, as a fraction of the measured time; without those that are empty."""
    return np.array([np.abs(np.exp(each) - 1).mean() for each in logarithms if len(each)])
