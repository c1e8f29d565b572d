"""Linear programs by a primal-dual interior-point method (Mehrotra, SIAM J. Optim. 2(4), 1992).

Where a program has many optimal points it ends near the analytic centre of all of them, as conic solvers do, and not
at a corner. Variables that the program treats alike get the same values, whatever their order.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from forerun.common.errors import ForerunError

Vector: TypeAlias = npt.NDArray[np.float64]
_MOST_STEPS = 100
_ACCURACY = 1e-9
_LEAST_ACCURACY = 1e-7
"""with which an answer is still taken where rounding allows no better one"""
_SHORT_OF_THE_BORDER = 0.99
_LEAST_PIVOT = 1e-14
_LEAST = 1e-300


def maximised(gain: Vector, rows: Vector, limits: Vector) -> Vector:
    """Returns the x with the largest `gain @ x` of all with `rows @ x <= limits`.

    Raises ForerunError where there is none, or none that is bounded.
    """
    size = np.maximum(np.abs(rows).max(axis=1), _LEAST)
    program = _Program(rows / size[:, None], limits / size, -gain / max(float(np.abs(gain).max()), _LEAST))
    x, error = program.x, program.error
    with np.errstate(all="ignore"):  # numbers grow without bounds where there is no solution
        for _ in range(_MOST_STEPS):
            if error < _ACCURACY or not program.step():
                break
            if program.error < error:
                x, error = program.x, program.error
    if error > _LEAST_ACCURACY:
        raise ForerunError("a linear program has no solution")
    return x


class _Program:
    """Least `cost @ x` with `rows @ x + slack = limits`; `price` is what a unit of each limit is worth."""

    def __init__(self, rows: Vector, limits: Vector, cost: Vector) -> None:
        self.rows, self.limits, self.cost = rows, limits, cost
        self.x = np.zeros(len(cost))
        self.slack, self.price = np.maximum(limits, 1.0), np.ones(len(limits))
        self._look()

    def _look(self) -> None:
        self.dual = self.rows.T @ self.price + self.cost
        self.primal = self.rows @ self.x + self.slack - self.limits
        self.gap = float(self.slack @ self.price) / len(self.slack)
        self.error = max(float(np.abs(self.dual).max()), float(np.abs(self.primal).max()), self.gap * len(self.slack))

    def step(self) -> bool:
        """Goes a step towards the optimum: predicts how far one can go, then aims as far at the centre as needed.

        Returns False, and goes none, where numbers of finite length leave no way on.
        """
        weights = self.price / self.slack
        matrix = (self.rows * weights[:, None]).T @ self.rows
        matrix[np.diag_indices_from(matrix)] *= 1.0 + _LEAST_PIVOT
        try:
            factor = np.linalg.cholesky(matrix)
        except np.linalg.LinAlgError:
            return False
        product = self.slack * self.price
        _, to_slack, to_price = self._direction(factor, weights, product)
        far = self._reach(to_slack, to_price)
        ahead = float((self.slack + far * to_slack) @ (self.price + far * to_price)) / len(product)
        product += to_slack * to_price - (ahead / self.gap) ** 3 * self.gap
        to_x, to_slack, to_price = self._direction(factor, weights, product)
        far = self._reach(to_slack, to_price)
        far = far if far == 1.0 else _SHORT_OF_THE_BORDER * far
        self.x = self.x + far * to_x
        self.slack, self.price = self.slack + far * to_slack, self.price + far * to_price
        self._look()
        return bool(np.isfinite(self.error)) and float(min(self.slack.min(), self.price.min())) > 0.0

    def _direction(self, factor: Vector, weights: Vector, product: Vector) -> tuple[Vector, Vector, Vector]:
        """Returns changes of x, slack and price after which nothing is wrong and `product` is gone, to first order."""
        right = -self.dual - self.rows.T @ (weights * self.primal - product / self.slack)
        to_x = np.linalg.solve(factor.T, np.linalg.solve(factor, right))
        to_slack = -self.primal - self.rows @ to_x
        return to_x, to_slack, -product / self.slack - weights * to_slack

    def _reach(self, to_slack: Vector, to_price: Vector) -> float:
        """Returns which part of the changes keeps slacks and prices positive."""
        values, changes = np.concatenate([self.slack, self.price]), np.concatenate([to_slack, to_price])
        falling = changes < 0
        return float(np.min(-values[falling] / changes[falling], initial=1.0))
