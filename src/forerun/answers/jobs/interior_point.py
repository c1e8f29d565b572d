"""Linear programs by a primal-dual interior-point method (Mehrotra, SIAM J. Optim. 2(4), 1992).

Where a program has many optimal points it ends near the analytic centre of all of them, as conic solvers do, and not
at a corner. Variables that the program treats alike get the same values, whatever their order. A variable that is 0 in
every optimal point ends the nearer to 0 the more the program would lose by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from forerun.answers.jobs.cholesky import factor, solve
from forerun.common.errors import ForerunError
from forerun.core.program.types import I64

Vector: TypeAlias = npt.NDArray[np.float64]
_MOST_STEPS = 100
_ACCURACY = 1e-9
_LEAST_ACCURACY = 1e-7
"""with which an answer is still taken where rounding allows no better one"""
_SHORT_OF_THE_BORDER = 0.99
_LEAST_PIVOT = 1e-14
_LEAST = 1e-300


@dataclass(frozen=True)
class Rows:
    """A matrix of few columns with many entries: those of its entries that are not 0. No place has two entries."""

    row: I64
    column: I64
    value: Vector
    shape: tuple[int, int]

    @staticmethod
    def stacked(parts: Sequence[Rows], columns: int) -> Rows:
        """Returns matrices below each other; those with fewer columns have zeros at the right."""
        firsts = np.cumsum([0, *(part.shape[0] for part in parts)])
        return Rows(
            np.concatenate([part.row + first for part, first in zip(parts, firsts, strict=False)]),
            np.concatenate([part.column for part in parts]),
            np.concatenate([part.value for part in parts]),
            (int(firsts[-1]), columns),
        )

    def scaled(self, factors: Vector) -> Rows:
        """Returns the matrix with each row times a factor."""
        return Rows(self.row, self.column, self.value * factors[self.row], self.shape)

    @property
    def largest(self) -> Vector:
        """Returns the largest magnitude of each row."""
        found = np.zeros(self.shape[0])
        np.maximum.at(found, self.row, np.abs(self.value))
        return found

    def times(self, x: Vector) -> Vector:
        """Returns the product with a vector of columns."""
        return np.asarray(np.bincount(self.row, self.value * x[self.column], self.shape[0]), np.float64)

    def columns_times(self, y: Vector) -> Vector:
        """Returns the product of the transposed matrix with a vector of rows."""
        return np.asarray(np.bincount(self.column, self.value * y[self.row], self.shape[1]), np.float64)

    def gram(self, weights: Vector) -> Vector:
        """Returns the matrix times a diagonal of weights times the transposed matrix."""
        place, column, product = self._pairs
        side = self.shape[0]
        found = np.bincount(place, product * weights[column], side * side)
        return np.asarray(found, np.float64).reshape(side, side)

    @cached_property
    def _pairs(self) -> tuple[I64, I64, Vector]:
        """Lists every pair of entries of a column: its place in the product of rows, the column, and the product of
        both entries.
        """
        order = np.argsort(self.column, kind="stable")
        row, column, value = self.row[order], self.column[order], self.value[order]
        count = np.bincount(column, minlength=self.shape[1])
        first = np.cumsum(count) - count
        places, columns, products = [], [], []
        for size in np.unique(count[count > 0]).tolist():
            of_size = np.flatnonzero(count == size)
            entries = first[of_size][:, None] + np.arange(size)
            places.append((row[entries][:, :, None] * self.shape[0] + row[entries][:, None, :]).ravel())
            columns.append(np.repeat(of_size, size * size))
            products.append((value[entries][:, :, None] * value[entries][:, None, :]).ravel())
        return np.concatenate(places), np.concatenate(columns), np.concatenate(products)


@dataclass(frozen=True)
class Optimum:
    """An optimal point, with the slack and the price of each limit in units of its row."""

    x: Vector
    slack: Vector
    price: Vector


def maximised(gain: Vector, rows: Rows, limits: Vector) -> Vector:
    """Returns the x of at least 0 with the largest `gain @ x` of all with `rows @ x <= limits`.

    Raises ForerunError if there is none, or none that is bounded.
    """
    return optimum(gain, rows, limits).x


def optimum(gain: Vector, rows: Rows, limits: Vector) -> Optimum:
    """Returns the point of `maximised` with slacks and prices. For each limit one of them is positive and the other is
    nearly 0.

    Raises ForerunError as `maximised` does.
    """
    size = np.maximum(rows.largest, _LEAST)
    program = _Program(rows.scaled(1.0 / size), limits / size, gain / max(float(np.abs(gain).max()), _LEAST))
    found, error = program.point, program.error
    with np.errstate(all="ignore"):  # numbers grow without bounds where there is no solution
        for _ in range(_MOST_STEPS):
            if error < _ACCURACY:
                break
            goes_on = program.step()
            if program.error < error:
                found, error = program.point, program.error
            if not goes_on:
                break
    if error > _LEAST_ACCURACY:
        raise ForerunError("a linear program has no solution")
    return found


class _Program:
    """Maximises `gain @ x` with `rows @ x + slack = limits`.

    `price` is the value of a unit of each limit. `loss` is the cost of a unit of each variable minus its gain.
    """

    def __init__(self, rows: Rows, limits: Vector, gain: Vector) -> None:
        self.rows, self.limits, self.gain = rows, limits, gain
        self.x, self.loss = np.ones(len(gain)), np.ones(len(gain))
        self.slack, self.price = np.maximum(limits, 1.0), np.ones(len(limits))
        self._look()

    @property
    def point(self) -> Optimum:
        """Returns the current point of the program."""
        return Optimum(self.x, self.slack, self.price)

    def _look(self) -> None:
        self.dual = self.gain - self.rows.columns_times(self.price) + self.loss
        self.primal = self.limits - self.rows.times(self.x) - self.slack
        total = float(self.slack @ self.price) + float(self.x @ self.loss)
        self.gap = total / (len(self.slack) + len(self.x))
        self.error = max(float(np.abs(self.dual).max()), float(np.abs(self.primal).max()), total)

    def step(self) -> bool:
        """Goes a step towards the optimum: predicts how far one can go, then aims as far at the centre as needed.

        Returns False where numbers of finite length leave no way on.
        """
        weights: Vector = self.x / self.loss
        matrix = self.rows.gram(weights)
        matrix[np.diag_indices_from(matrix)] += self.slack / self.price
        matrix[np.diag_indices_from(matrix)] *= 1.0 + _LEAST_PIVOT
        if not factor(matrix):
            return False
        of_x: Vector = -self.x * self.loss
        of_slack: Vector = -self.slack * self.price
        to_x, to_loss, to_slack, to_price = self._direction(matrix, weights, of_x, of_slack)
        far, far_back = self._reach(to_x, to_slack), self._reach_back(to_loss, to_price)
        ahead = float((self.x + far * to_x) @ (self.loss + far_back * to_loss))
        ahead += float((self.slack + far * to_slack) @ (self.price + far_back * to_price))
        ahead /= len(self.x) + len(self.slack)
        centre = (ahead / self.gap) ** 3 * self.gap
        of_x, of_slack = of_x - to_x * to_loss + centre, of_slack - to_slack * to_price + centre
        to_x, to_loss, to_slack, to_price = self._direction(matrix, weights, of_x, of_slack)
        far, far_back = self._reach(to_x, to_slack), self._reach_back(to_loss, to_price)
        far = min(far, far_back)
        far = far if far == 1.0 else _SHORT_OF_THE_BORDER * far
        self.x, self.slack = self.x + far * to_x, self.slack + far * to_slack
        self.loss, self.price = self.loss + far * to_loss, self.price + far * to_price
        self._look()
        least = min(float(each.min()) for each in (self.x, self.slack, self.loss, self.price))
        return bool(np.isfinite(self.error)) and least > 0.0

    def _direction(
        self, upper: Vector, weights: Vector, of_x: Vector, of_slack: Vector
    ) -> tuple[Vector, Vector, Vector, Vector]:
        """Returns changes of x, loss, slack and price after which nothing is wrong, to first order.

        Args:
            upper: the factor of the matrix of prices.
            of_x: by how much the products of x and loss are to change; of_slack: those of slack and price.
        """
        wanted = self.dual + of_x / self.x
        to_price = self.rows.times(weights * wanted) + of_slack / self.price - self.primal
        solve(upper, to_price)
        to_x = weights * (wanted - self.rows.columns_times(to_price))
        to_loss = (of_x - self.loss * to_x) / self.x
        to_slack = (of_slack - self.slack * to_price) / self.price
        return to_x, to_loss, to_slack, to_price

    def _reach(self, to_x: Vector, to_slack: Vector) -> float:
        """Returns the share of the changes that keeps x and slacks positive."""
        return _part(np.concatenate([self.x, self.slack]), np.concatenate([to_x, to_slack]))

    def _reach_back(self, to_loss: Vector, to_price: Vector) -> float:
        """Returns the share of the changes that keeps losses and prices positive."""
        return _part(np.concatenate([self.loss, self.price]), np.concatenate([to_loss, to_price]))


def _part(values: Vector, changes: Vector) -> float:
    falling = changes < 0
    return float(np.min(-values[falling] / changes[falling], initial=1.0))
