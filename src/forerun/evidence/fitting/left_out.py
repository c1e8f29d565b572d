"""Errors of steps after one measured step has corrected them, for fitted stacks and for stacks left out of the fit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from forerun.core.program.types import F64
from forerun.evidence.fitting.fit import Grouping, StepFit
from forerun.evidence.fitting.posterior import Posterior
from forerun.evidence.fitting.steps import Step, StepTimes
from forerun.evidence.fitting.update import most_probable, most_telling


@dataclass(frozen=True, slots=True)
class AnchoredErrors:
    """log(predicted / measured) of every step, without an anchor and with anchors; a step may have none."""

    errors: F64
    """without an anchor, (n_steps,)"""
    same_cluster: tuple[F64, ...]
    """for each step, one error for each other step of its source and device as the anchor"""
    same_run: tuple[F64, ...]
    """the same, only with anchors of its model"""
    best: tuple[F64, ...]
    """with the most telling anchor of its run, chosen without knowing any time; none for the anchor itself"""


def fitted_errors(fit: StepFit, times: StepTimes) -> AnchoredErrors:
    """Returns the errors with constants fitted to all steps."""
    errors = np.log(fit.fit.fitted_s) - times.log_measured
    return _anchored_errors(times, fit.slopes, errors, [fit.fit.posterior] * len(errors))


def left_out_errors(fit: StepFit, times: StepTimes, by: Grouping = "family") -> AnchoredErrors:
    """Returns the errors with each step's family, or source, left out of the fit. Raises ForerunError as `solve`."""
    errors = np.zeros(len(times.steps))
    known: list[Posterior] = [fit.fit.posterior] * len(errors)
    for group in dict.fromkeys(getattr(step, by) for step in times.steps):
        found = fit.leave_out(group, by)
        for number, time_s in zip(found.numbers, found.seconds, strict=True):
            errors[number] = np.log(time_s) - times.log_measured[number]
            known[number] = found.posterior
    return _anchored_errors(times, fit.slopes, errors, known)


def _anchored_errors(times: StepTimes, slopes: F64, errors: F64, known: Sequence[Posterior]) -> AnchoredErrors:
    """Returns the errors, which anchors correct to first order."""
    registry, noise = times.registry, times.registry.anchor.noise
    rates = _slopes_of_rates(times, slopes)
    unsure = [one.of_rates(registry, step.setup) for one, step in zip(known, times.steps, strict=True)]
    changes = [
        _change(error, own, covariance, noise) for error, own, covariance in zip(errors, rates, unsure, strict=True)
    ]

    def after(anchors: Iterable[Sequence[int]]) -> tuple[F64, ...]:
        return tuple(
            np.array([errors[own] + rates[own] @ changes[anchor] for anchor in some])
            for own, some in enumerate(anchors)
        )

    def best(group: Sequence[int]) -> int:
        return group[most_telling(rates[list(group)], [unsure[number] for number in group], noise)]

    own_run = _groups(times.steps, lambda step: (*_cluster(step), step.setup.model.name))
    chosen = [best(group) for group in own_run]
    return AnchoredErrors(
        errors,
        after(_others(_groups(times.steps, _cluster))),
        after(_others(own_run)),
        after([one] if one != own else [] for own, one in enumerate(chosen)),
    )


def _cluster(step: Step) -> tuple[str, str]:
    return step.source, step.setup.cluster.device.name


def _groups(steps: Sequence[Step], key: Callable[[Step], Hashable]) -> list[list[int]]:
    """Returns for every step the numbers of all steps that share its key."""
    members: dict[Hashable, list[int]] = defaultdict(list)
    for number, step in enumerate(steps):
        members[key(step)].append(number)
    return [members[key(step)] for step in steps]


def _others(groups: Sequence[Sequence[int]]) -> Iterable[list[int]]:
    return ([other for other in group if other != own] for own, group in enumerate(groups))


def _slopes_of_rates(times: StepTimes, slopes: F64) -> F64:
    """Returns d log(time) / d log(rate) for the rates that an anchor may change, (n_steps, n_rates)."""
    whats = list(times.registry.anchor.sigma)
    out = np.zeros((len(slopes), len(whats)))
    for number, constants in enumerate(times.constants):
        for column, what in enumerate(whats):
            if what in constants:
                out[number, column] = slopes[number, constants[what][0]]
    return out


def _change(error: float, slopes: F64, covariance: F64, noise: float) -> F64:
    """Returns the logarithms of the rates that a step with this error makes most probable."""
    first, row = np.array([error]), slopes[None, :]
    return most_probable(lambda x: first + row @ x, first, row, covariance, noise)


def mean_errors(logarithms: Sequence[F64]) -> F64:
    """Returns the mean absolute error of each array, as a fraction of the measured time, without empty arrays."""
    return np.array([np.abs(np.exp(each) - 1).mean() for each in logarithms if len(each)])
