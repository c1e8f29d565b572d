"""Finds the most probable log-normal constants by Gauss-Newton with priors. Outliers lose weight. Deterministic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from forerun.common.errors import ForerunError
from forerun.core.program.types import F64

_ROUNDS = 12
_CLOSE = 2e-4
"""the fit ends when no logarithm changes by more than this"""
_WEIGHT_ROUNDS = 200


@dataclass(frozen=True, slots=True)
class Priors:
    """One linear prior for each unknown x: `lines @ x` is `values` within `sigma`. Shapes (n, n), (n,), (n,)."""

    lines: F64
    values: F64
    sigma: F64

    @property
    def mean(self) -> F64:
        """Returns the x that satisfies the priors exactly, (n,)."""
        return np.asarray(np.linalg.solve(self.lines, self.values), np.float64)


@dataclass(frozen=True, slots=True)
class Solution:
    """The solution `x`, (n,), its covariance, (n, n), and the errors of the rows at `x`, (n_rows,)."""

    x: F64
    covariance: F64
    errors: F64

    @property
    def sigma(self) -> F64:
        """Returns the standard deviations of `x`, (n,)."""
        return np.asarray(np.sqrt(np.diag(self.covariance)), np.float64)


def solve(
    errors: Callable[[F64], F64], slopes: F64, priors: Priors, weights: F64, scale: float, start: F64, first: F64
) -> Solution:
    """Returns the x that minimises sum(weights 2 (sqrt(1 + (errors / scale)^2) - 1)) plus the squares of the priors.

    One Jacobian serves all rounds, because the second-order terms of `errors` are small.

    Args:
        errors: Function from x to log(predicted / measured) of the rows, (n_rows,).
        slopes: Its Jacobian near `start`, (n_rows, n).
        weights: Weights of the rows, (n_rows,); 0 leaves a row out.
        first: The value of `errors(start)`.

    Raises ForerunError if the fit does not converge.
    """
    x, now = start, first
    for _ in range(_ROUNDS):
        new, covariance = _linear(now - slopes @ x, slopes, priors, weights, scale)
        step = float(np.abs(new - x).max(initial=0.0))
        if step < _CLOSE:
            return Solution(x, covariance, now)
        x = new
        now = errors(x)
    raise ForerunError(
        f"the fit does not converge: after {_ROUNDS} rounds constants still move by {step:.1g} of their values; "
        "look for rows with wrong inputs (forerun validate --worst 10)"
    )


def _linear(offset: F64, slopes: F64, priors: Priors, weights: F64, scale: float) -> tuple[F64, F64]:
    """Returns the minimum and its covariance where errors are `offset + slopes @ x`."""
    own = priors.lines / priors.sigma[:, None]
    wanted = priors.values / priors.sigma
    x = priors.mean
    for _ in range(_WEIGHT_ROUNDS):
        errors = offset + slopes @ x
        each = weights / np.sqrt(1 + (errors / scale) ** 2) / scale**2
        hessian = own.T @ own + (slopes * each[:, None]).T @ slopes
        new = np.linalg.solve(hessian, own.T @ wanted - slopes.T @ (each * offset))
        settled = float(np.abs(new - x).max(initial=0.0)) < _CLOSE / 100
        x = new
        if settled:
            break
    return x, np.asarray(np.linalg.inv(hessian), np.float64)
