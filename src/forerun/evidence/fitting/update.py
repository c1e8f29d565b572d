"""What one measured step tells about the rates of a run, to first order, and which step tells most about others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from forerun.core.program.types import F64
from forerun.evidence.fitting.solve import Priors, solve


def most_probable(errors: Callable[[F64], F64], first: F64, slopes: F64, covariance: F64, noise: float) -> F64:
    """Logarithms of the rates that measured steps make most probable, (n_rates,).

    Args:
        errors: logarithms of rates -> log(predicted / measured) of the steps.
        first: `errors` of rates that nobody changed, (n_steps,).
        slopes: their derivatives there, (n_steps, n_rates).
        covariance: of the logarithms of the rates before these steps, (n_rates, n_rates), positive definite.
        noise: of a step around what is predicted with the right rates; steps that are off by more lose weight.

    Raises:
        ForerunError: `errors` is so far from straight that it does not converge.
    """
    lines = np.asarray(np.linalg.inv(np.linalg.cholesky(covariance)), np.float64)
    start = np.zeros(len(covariance))
    priors = Priors(lines, start, np.ones(len(covariance)))
    return solve(errors, slopes, priors, np.ones(len(first)), noise, start, first).x


def most_telling(slopes: F64, covariances: Sequence[F64], noise: float) -> int:
    """Which of some steps, measured, leaves least unsure of all others: the sum of the variances of their times.

    That is A-optimal design (Chaloner and Verdinelli, "Bayesian experimental design: a review", 1995) for one step.

    Args:
        slopes: d log(time) / d log(rate), (n_steps, n_rates).
        covariances: of the logarithms of the rates of each step, (n_rates, n_rates).
    """
    before = [float(own @ known @ own) for own, known in zip(slopes, covariances, strict=True)]
    left = []
    for number, known in enumerate(covariances):
        together = slopes @ known @ slopes[number]
        after = np.array(before) - together**2 / (before[number] + noise**2)
        left.append(float(np.delete(after, number).sum()))
    return int(np.argmin(left))
