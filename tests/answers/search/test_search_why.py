"""Why a plan is not the best one."""

from functools import lru_cache
from typing import Any

import pytest
from kept_search import CLUSTER, FIXED, QUESTION, TINY, small_search

from forerun.answers.search.result import SearchResult
from forerun.answers.search.space import make_space
from forerun.answers.search.why import Verdict, why
from forerun.describe.plan.fields import FOLLOWING


@lru_cache(maxsize=1)
def found() -> SearchResult:
    return small_search(None)


def asked(**wanted: Any) -> Verdict:
    question = (QUESTION["n_gpus"], QUESTION["seq_len"], QUESTION["global_batch"])
    return why(found(), wanted, make_space(TINY, CLUSTER, *question, fixed={**FIXED, **wanted}))


def fields_of(plan) -> dict[str, Any]:
    names = (name for name in plan.__dataclass_fields__ if name not in FOLLOWING)
    return {name: getattr(plan, name) for name in names}


@pytest.mark.parametrize("rank", [1, 2, 7])
def test_a_plan_that_fits_has_its_rank(rank):
    place, best = found().ranked[rank - 1], found().ranked[0]
    verdict = asked(**fields_of(place.plan))
    assert verdict.plan == place.plan
    more = "" if rank == 1 else f", {place.step_time_s / best.step_time_s - 1:.1%} more than the best"
    assert verdict.text == f"rank {rank} of {len(found().ranked)}: {place.step_time_s:.4g} s{more}"


def test_a_plan_that_was_not_simulated_has_its_bound():
    skipped = found().skipped[-1]
    verdict = asked(**fields_of(skipped.plan))
    assert verdict == Verdict(f"not simulated, {skipped.reason}", skipped.plan)


def test_a_plan_that_does_not_fit_has_its_need():
    large = found().too_large[5]
    verdict = asked(**fields_of(large.plan))
    assert verdict == Verdict(f"does not fit, {large.reason}", large.plan)


def test_of_several_plans_the_most_promising_is_told():
    verdict = asked(tp=2, pp=1)
    same = [each for each in found().ranked if each.plan.tp == 2 and each.plan.pp == 1]
    rank = found().ranked.index(same[0]) + 1
    assert f"{len(same)} fit" in verdict.text
    assert f"the best has rank {rank} of " in verdict.text
    assert verdict.plan == same[0].plan


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ({"tp": 8}, "impossible, attention heads do not split over tp (12 of 12): 12 attention heads"),
        ({"tp": 16}, "the degrees do not divide 8 GPUs"),
        ({"pp": 3}, "the degrees do not divide 8 GPUs"),
        ({"prefetch": 2}, "possible, but outside of the space that was searched"),
        ({"activation_checkpointing": "selective"}, "possible, but outside of the space that was searched"),
    ],
)
def test_plans_that_were_not_considered_are_impossible_or_outside(wanted, text):
    assert text in asked(**wanted).text
