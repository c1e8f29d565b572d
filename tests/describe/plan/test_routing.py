"""How tokens spread over experts: known answers and properties of the ranks' loads."""

import math

import numpy as np
import pytest

from forerun.common.errors import ForerunError
from forerun.describe.plan.plan import Plan
from forerun.describe.plan.routing import Routing, spread

EXPERTS, TOP_K, RANKS, TOKENS, LAYERS = 64, 4, 8, 65_536, 24


def of(text: str, ranks: int = RANKS, tokens: int = TOKENS, capacity: float | None = None):
    return spread(text, EXPERTS, TOP_K, ranks, tokens, LAYERS, capacity)


def test_balanced_tokens_and_a_single_rank_have_no_busiest_one():
    assert of("balanced") == (1.0, 1.0, 0.0)
    assert of("zipf:1.5", ranks=1)[:2] == pytest.approx((1.0, 1.0))


def test_by_chance_the_busiest_rank_exceeds_the_mean_by_some_standard_deviations():
    """A rank's tokens are binomial; the largest of 8 standard normal numbers is 1.42 on average."""
    share = 1 / RANKS
    by_hand = 1.42 * math.sqrt((1 - share) * (1 - TOP_K / EXPERTS) / (TOKENS * TOP_K * share))
    assert of("uniform").busiest - 1 == pytest.approx(by_hand, rel=0.1)
    assert of("uniform", tokens=TOKENS // 64).busiest - 1 == pytest.approx(8 * by_hand, rel=0.1)


def test_zipfs_law_makes_ranks_busier_and_layers_even_that_out_in_memory():
    spreads = [of(f"zipf:{exponent}") for exponent in (0.2, 0.5, 1.0)]
    assert sorted(spreads) == spreads
    assert spreads[-1].busiest > 1.5
    assert all(1 < each.fullest < each.busiest for each in spreads)
    assert of("zipf:0") == of("uniform")


def test_measured_loads_are_those_of_the_ranks_that_hold_the_experts():
    """8 experts on each rank: the first 8 of 64 have three times the load of the others."""
    busy = "loads:" + ":".join(["3"] * 8 + ["1"] * 56)
    assert of(busy).busiest == pytest.approx(3 * 64 / (3 * 8 + 56), rel=0.01)
    assert of(busy).fullest == pytest.approx(of(busy).busiest, rel=0.01)


def test_no_token_chooses_an_expert_twice():
    chances = Routing(2.0).chances(EXPERTS, TOP_K)
    assert chances.max() <= 1
    assert chances.sum() == pytest.approx(TOP_K)
    assert (np.diff(chances) <= 0).all()


def test_a_limited_capacity_drops_what_is_beyond_it():
    dropped = [of("zipf:0.5", capacity=capacity).dropped for capacity in (1.0, 1.25, 2.0, 100.0)]
    assert sorted(dropped, reverse=True) == dropped
    assert dropped[0] > 0.1
    assert dropped[-1] == 0


@pytest.mark.parametrize(
    "text", ["skewed", "zipf:", "zipf:-1", "zipf:x", "zipf:nan", "loads:", "loads:0:0", "loads:1:-1"]
)
def test_other_words_are_refused_in_one_line(text):
    with pytest.raises(ForerunError, match=r"expert_routing must be balanced, uniform, zipf:S.*got '"):
        Plan(8, expert_routing=text)
