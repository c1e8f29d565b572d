"""Neighbours of a plan, the first look at a space, and plans that are told before they are proved."""

from __future__ import annotations

import pytest

from forerun.answers.analysis.prediction import Prediction
from forerun.answers.search.choices import with_open_stacks
from forerun.answers.search.first_look import first_look
from forerun.answers.search.neighbours import CHOSEN, neighbours
from forerun.answers.search.result import SearchResult
from forerun.answers.search.search import search
from forerun.answers.search.space import Tally, make_spaces
from forerun.answers.search.spaces import Spaces
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model

PLACE = (load_model("gpt2-small"), load_cluster("h100-sxm"), 8, 1024, 64)


@pytest.fixture(scope="module")
def result() -> SearchResult:
    return search(*PLACE, fixed={"stack": "torchtitan"}, workers=1)


@pytest.mark.parametrize("place", [0, 3])
def test_a_neighbour_differs_in_its_field_and_in_the_fields_that_it_names(result: SearchResult, place: int) -> None:
    plan = result.ranked[place].own_plan()
    found = neighbours(result, plan)
    assert {"tp", "pp", "activation_checkpointing", "compile"} <= {each.field for each in found}
    for each in found:
        assert getattr(each.plan, each.field) == each.value != getattr(plan, each.field)
        differing = {name for name in CHOSEN if getattr(plan, name) != getattr(each.plan, name)}
        assert differing == {each.field, *each.also}
        assert (each.plan.world_size, each.plan.global_batch) == (8, 64)
        assert result.outcome.table.plan(each.row) == each.plan
    assert len({each.row for each in found}) == len(found), "a plan comes once"


def test_no_plan_of_the_value_is_closer_than_the_neighbour(result: SearchResult) -> None:
    plan, table = result.ranked[0].own_plan(), result.outcome.table
    every = [table.plan(row) for row in range(len(table))]
    for each in neighbours(result, plan):
        same_value = [other for other in every if getattr(other, each.field) == each.value]
        least = min(sum(getattr(other, name) != getattr(plan, name) for name in CHOSEN) for other in same_value)
        assert 1 + len(each.also) == least


def test_a_first_look_predicts_different_plans_of_the_space(result: SearchResult) -> None:
    spaces = Spaces.of(make_spaces(*PLACE, with_open_stacks({})), Tally())
    found = list(first_look(PLACE[0], PLACE[1], spaces.table, 5))
    every = {spaces.table.plan(row) for row in range(len(spaces.table))}
    assert len(found) == 5
    assert len({each.own_plan() for each in found}) == 5
    assert {each.own_plan() for each in found} <= every
    degrees = [each.own_plan().tp * each.own_plan().cp * each.own_plan().pp for each in found]
    assert degrees == sorted(degrees)
    assert min(each.step_time_s for each in found) >= result.ranked[0].step_time_s * 0.9


def test_plans_are_told_after_each_batch_the_best_first() -> None:
    told: list[list[Prediction]] = []
    found = search(
        *PLACE, fixed={"stack": "torchtitan"}, workers=1, keep=20, found=lambda some: told.append(list(some))
    )
    assert len(told) > 1
    for some in told:
        times = [each.step_time_s for each in some]
        assert times == sorted(times)
        assert len(times) <= 20
    assert [each.plan for each in told[-1]] == [each.plan for each in found.top(20)]
