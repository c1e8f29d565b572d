"""What a measured step tells: the conditional mean of rates, and the step that leaves least unsure."""

import numpy as np
import pytest

from forerun.evidence.fitting.update import most_probable, most_telling

COVARIANCE = np.array([[0.01, -0.004], [-0.004, 0.02]])
SLOPES = np.array([[-0.9, -0.1], [-0.5, -0.5], [-0.2, -0.8]])


def told(error: float, covariance=COVARIANCE, noise: float = 0.5, row: int = 0):
    first, slopes = np.array([error]), SLOPES[row : row + 1]
    return most_probable(lambda x: first + slopes @ x, first, slopes, covariance, noise)


def test_rates_are_those_of_a_gaussian_given_a_step():
    """Errors that are small beside the noise: the conditional mean has a closed form."""
    own = SLOPES[0]
    expected = -COVARIANCE @ own * 0.05 / (own @ COVARIANCE @ own + 0.5**2)
    assert told(0.05) == pytest.approx(expected, rel=0.02)


def test_rates_that_go_against_one_another_move_so():
    apart = told(0.2, np.array([[0.02, -0.012], [-0.012, 0.01]]), noise=0.02)
    assert apart[0] > 0 > apart[1]


def test_a_step_that_is_far_off_counts_less():
    assert 0 < np.abs(told(1.0, noise=0.04)).max() / np.abs(told(0.04, noise=0.04)).max() < 15


def test_the_step_between_the_others_tells_most():
    """It shares both rates with both of them; of equal ones the first."""
    plain = np.diag([0.01, 0.01])
    assert most_telling(SLOPES, [plain] * 3, 0.04) == 1
    assert most_telling(SLOPES[[0, 0]], [plain] * 2, 0.04) == 0


def test_a_step_that_is_noise_alone_tells_nothing():
    slopes = np.array([[-0.001, 0.0], [-1.0, 0.0], [-1.0, 0.0]])
    assert most_telling(slopes, [np.diag([0.01, 0.01])] * 3, 0.04) == 1
