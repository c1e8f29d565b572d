"""Cholesky's factor and its solutions, against numpy's."""

import numpy as np
import pytest

from forerun.answers.jobs.cholesky import factor, solve


@pytest.mark.parametrize("size", [1, 2, 7, 60])
def test_factor_and_solution_are_those_of_numpy(size):
    random = np.random.default_rng(size)
    half = random.standard_normal((size, size + 3)) * (random.random((size, size + 3)) < 0.5)
    matrix, right = half @ half.T + 1e-3 * np.eye(size), random.standard_normal(size)
    upper, found = matrix.copy(), right.copy()
    assert factor(upper)
    assert np.triu(upper) == pytest.approx(np.linalg.cholesky(matrix).T, rel=1e-9, abs=1e-12)
    solve(upper, found)
    assert matrix @ found == pytest.approx(right, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("matrix", [[[1.0, 2.0], [2.0, 1.0]], [[0.0]], [[np.nan]], [[1.0, 1.0], [1.0, 1.0]]])
def test_what_is_not_positive_definite_has_none(matrix):
    assert not factor(np.array(matrix))
