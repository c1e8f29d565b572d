"""Constants from rows: what informs them decides, priors hold elsewhere, stray rows lose weight."""

from itertools import cycle

import numpy as np
import pytest

from forerun.common.errors import ForerunError
from forerun.evidence.fitting.solve import Priors, solve

TRUE = np.log([0.8, 1.2, 0.9])
SLOPES = -np.array([[0.7, 0.3, 0.0], [0.2, 0.8, 0.0], [0.5, 0.5, 0.0], [0.9, 0.0, 0.0]])


def free(n: int, sigma: float = 1.0) -> Priors:
    return Priors(np.eye(n), np.zeros(n), np.full(n, sigma))


def solved(measured, priors=None, weights=None, slopes=SLOPES, scale=0.03):
    def errors(x):
        return slopes @ x - measured

    start = np.zeros(slopes.shape[1])
    some = np.ones(len(measured)) if weights is None else weights
    return solve(errors, slopes, priors or free(slopes.shape[1]), some, scale, start, errors(start))


def test_rows_without_noise_give_their_constants_back():
    found = solved(SLOPES @ TRUE)
    assert found.x[:2] == pytest.approx(TRUE[:2], abs=2e-3)
    assert found.errors == pytest.approx(np.zeros(4), abs=2e-3)


def test_a_constant_that_no_row_informs_keeps_its_prior():
    priors = Priors(np.eye(3), np.array([0.0, 0.0, -0.2]), np.array([1.0, 1.0, 0.1]))
    found = solved(SLOPES @ TRUE, priors)
    assert found.x[2] == pytest.approx(-0.2)
    assert found.sigma[2] == pytest.approx(0.1)
    assert found.sigma[0] < 0.1


def test_what_is_of_a_kind_takes_the_value_of_the_kind():
    lines = np.eye(3)
    lines[1, 0] = lines[2, 0] = -1.0
    priors = Priors(lines, np.array([0.0, 0.0, np.log(0.5)]), np.array([0.3, 0.05, 0.05]))
    found = solved(np.array([0.2]), priors, slopes=np.array([[0.0, -1.0, 0.0]]))
    kind, informed, other = found.x
    assert informed == pytest.approx(-0.2, abs=0.02)
    assert -0.2 < kind < -0.15
    assert other == pytest.approx(kind + np.log(0.5))


def test_a_stray_row_moves_constants_little_and_a_left_out_one_not_at_all():
    measured = SLOPES @ TRUE
    measured[2] += 1.0
    assert solved(measured).x[:2] == pytest.approx(TRUE[:2], abs=0.05)
    assert solved(measured, weights=np.array([1.0, 1.0, 0.0, 1.0])).x[:2] == pytest.approx(TRUE[:2], abs=2e-3)


def test_a_fit_that_runs_away_is_an_error():
    sides = cycle((np.array([0.1]), np.array([-0.1])))
    with pytest.raises(ForerunError, match="does not converge"):
        solve(lambda x: next(sides), np.array([[-1.0]]), free(1), np.ones(1), 0.03, np.zeros(1), next(sides))
