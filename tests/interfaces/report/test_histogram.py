"""The distribution of step times: bins of equal ratio that hold every plan once."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.interfaces.report.histogram import histogram

TIMES = st.lists(st.floats(1e-3, 1e3), max_size=30)


@given(TIMES, TIMES, st.integers(1, 12))
def test_every_plan_is_in_one_bin(simulated, bounded, most):
    found = histogram(simulated, bounded, most)
    assert sum(each.simulated for each in found) == len(simulated)
    assert sum(each.bounded for each in found) == len(bounded)
    assert len(found) <= most
    if found:
        assert found[0].low_s == min([*simulated, *bounded])
        assert found[-1].high_s == max([*simulated, *bounded])
    for one, other in pairwise(found):
        assert one.low_s <= one.high_s == other.low_s


def test_bins_have_equal_ratios_and_hold_their_lower_ends():
    found = histogram([1.0, 2.0, 3.0, 8.0], [4.0], bins=3)
    assert [(each.low_s, each.high_s) for each in found] == [
        (pytest.approx(low), pytest.approx(2 * low)) for low in (1.0, 2.0, 4.0)
    ]
    assert [(each.simulated, each.bounded) for each in found] == [(1, 0), (2, 0), (1, 1)]
