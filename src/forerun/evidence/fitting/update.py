"""Updates rates by measured steps, and finds the most informative step to measure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from forerun.core.program.types import F64
from forerun.evidence.fitting.solve import Priors, solve


def most_probable(errors: Callable[[F64], F64], first: F64, slopes: F64, covariance: F64, noise: float) -> F64:
    """Returns the logarithms of the rates that measured steps make most probable, (n_rates,).

    Args:
        errors: Function from logarithms of rates to log(predicted / measured) of the steps, (n_steps,).
        first: The errors at unchanged rates, (n_steps,).
        slopes: Their derivatives there, (n_steps, n_rates).
        covariance: Prior covariance of the logarithms of the rates, (n_rates, n_rates), positive definite.
        noise: Standard deviation of a step's logarithm around its prediction with the right rates; steps that are off
            by more lose weight.

    Raises ForerunError if the update does not converge, as `errors` is too far from linear.
    """
    lines = np.asarray(np.linalg.inv(np.linalg.cholesky(covariance)), np.float64)
    start = np.zeros(len(covariance))
    priors = Priors(lines, start, np.ones(len(covariance)))
    return solve(errors, slopes, priors, np.ones(len(first)), noise, start, first).x


def most_telling(slopes: F64, covariances: Sequence[F64], noise: float) -> int:
    """Returns the number of the step whose measurement leaves the least sum of variances of all other steps' times.

    This is A-optimal design (Chaloner and Verdinelli, "Bayesian experimental design: a review", 1995) for one step.

    Args:
        slopes: d log(time) / d log(rate), (n_steps, n_rates).
        covariances: For each step, the covariance of the logarithms of its rates, (n_rates, n_rates).
    """
    before = [float(own @ known @ own) for own, known in zip(slopes, covariances, strict=True)]
    left = []
    for number, known in enumerate(covariances):
        together = slopes @ known @ slopes[number]
        after = np.array(before) - together**2 / (before[number] + noise**2)
        left.append(float(np.delete(after, number).sum()))
    return int(np.argmin(left))
