"""Several software stacks in one search, and what a framework offers for compilation and for experts."""

from dataclasses import replace

import pytest

import forerun.answers.search.search as searching
from forerun.answers.search.choices import open_stacks, unmeasured_stacks, with_open_stacks
from forerun.answers.search.result import SearchResult
from forerun.answers.search.search import search
from forerun.answers.search.space import Tally, make_space
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model

SMALL = replace(load_model("llama-3.1-8b"), n_layers=4, name="small")
CLUSTER = load_cluster("h100-sxm")
STACKS = ["torchtitan", "megatron-core"]


def found(stack: object, **more: object) -> SearchResult:
    fixed = {"stack": stack, "pp": 1, "cp": 1, **more}
    return search(SMALL, CLUSTER, 16, 4096, 32, fixed=fixed, keep=5, workers=1)


def test_a_search_of_two_stacks_is_both_searches_in_one_table():
    together, apart = found(STACKS), [found(stack) for stack in STACKS]
    every = sorted((plan for one in apart for plan in one.top(5)), key=lambda each: each.step_time_s)
    assert [plan.own_plan() for plan in together.top(5)] == [plan.own_plan() for plan in every[:5]]
    assert together.considered == sum(one.considered for one in apart)
    assert sum(together.counts.values()) == 2 * together.considered
    row = next(row for row in together.to_rows() if row["status"] == "skipped" and row["stack"] == "megatron-core")
    assert "at least" in row["reason"]


def test_coarse_bounds_leave_the_same_places_as_all_simulations():
    """A narrow memory puts plans that recompute beside plans that do not."""
    fixed = {"pp": [1, 2], "cp": 1, "stack": STACKS, "tp": [1, 2], "micro_batch": [1, 4]}
    question = (SMALL, CLUSTER, 16, 4096, 64)
    exact = search(*question, fixed=fixed, keep=6, workers=1, memory_limit_gib=14, exhaustive=True)
    quick = search(*question, fixed=fixed, keep=6, workers=1, memory_limit_gib=14)
    assert [plan.own_plan() for plan in quick.top(6)] == [plan.own_plan() for plan in exact.top(6)]
    assert quick.simulated < exact.simulated
    assert {plan.own_plan().activation_checkpointing for plan in exact.ranked} > {"none"}


@pytest.mark.parametrize(("stack", "values"), [("torchtitan", {True, False}), ("megatron-core", {False})])
def test_compilation_is_tried_where_the_framework_has_it(stack, values):
    plans = make_space(SMALL, CLUSTER, 8, 4096, 8, {"stack": stack}).plans(Tally())
    assert {plan.compile for plan in plans} == values


def test_the_dispatchers_overlap_and_recomputation_of_experts_are_tried_where_they_can_be():
    model = replace(load_model("mixtral-8x7b"), n_layers=8)
    plans = list(make_space(model, CLUSTER, 16, 4096, 64, {"stack": "megatron-core"}).plans(Tally()))
    assert {plan.dispatcher for plan in plans if plan.ep > 1} == {"auto", "deepep"}
    assert {plan.dispatcher for plan in plans if plan.ep == 1} == {"auto"}
    beside = [plan for plan in plans if plan.expert_overlap]
    assert {plan.pp_schedule for plan in beside if plan.pp > 1} == {"Interleaved1F1B"}
    assert {plan.activation_checkpointing for plan in beside} == {"none", "selective"}
    assert min(plan.ep for plan in beside) > 1
    parts = {plan.recompute_modules for plan in plans if plan.activation_checkpointing == "selective"}
    assert parts == {(), ("moe_act",), ("layernorm", "moe_act")}  # no latent attention to project up
    dense = make_space(SMALL, CLUSTER, 8, 4096, 8, {"stack": "megatron-core"}).plans(Tally())
    assert {(plan.dispatcher, plan.expert_overlap, plan.recompute_modules) for plan in dense} == {("auto", False, ())}


def test_choices_are_the_best_plans_of_other_searches():
    fixed = {"stack": STACKS, "pp": 1, "cp": 1}
    result = search(SMALL, CLUSTER, 16, 4096, 32, fixed=fixed, keep=2, workers=1, choices=("megatron-bridge",))
    assert result.best is not None
    worth = {(each.field, each.value): each for each in result.choices}
    assert result.best == found("torchtitan").best
    assert worth["stack", "megatron-core"].best == found("megatron-core").best
    assert worth["stack", "megatron-bridge"].best == found("megatron-bridge").best
    assert worth["compile", "off"].best == found("torchtitan", compile=False).best
    assert all(each.instead == result.best for each in result.choices)
    assert {key for key, each in worth.items() if each.caution} >= {("stack", "megatron-bridge")}
    precise = worth["precision", "fp8 (rowwise)"]
    assert precise.best.own_plan() == replace(result.best.own_plan(), precision="fp8", fp8_recipe="rowwise")
    assert precise.best.step_time_s < result.best.step_time_s


def test_a_search_of_another_stack_beside_the_first_one_changes_nothing():
    question = (SMALL, CLUSTER, 16, 4096, 32)
    fixed = {"stack": ["torchtitan"], "pp": 1, "cp": 1, "compile": True}
    alone, beside = (
        search(*question, fixed=fixed, keep=2, workers=workers, choices=("megatron-bridge",)) for workers in (1, 2)
    )
    assert [each.value for each in alone.choices if each.field == "stack"] == ["megatron-bridge"]
    assert alone.choices == beside.choices
    assert alone.ranked == beside.ranked


def test_a_search_of_which_nothing_fits_asks_no_other_stack(monkeypatch):
    monkeypatch.setattr(searching, "_best_on", lambda *asked: pytest.fail("another stack was searched"))
    result = search(SMALL, CLUSTER, 16, 4096, 32, memory_limit_gib=2, workers=1, choices=("megatron-bridge",))
    assert (result.ranked, result.choices) == ((), ())


def test_open_choices_are_stacks_of_today_that_measured_steps_inform():
    assert open_stacks()[0] == "torchtitan"
    assert {"torchtitan", "megatron-core"} <= set(open_stacks())
    assert not set(open_stacks()) & set(unmeasured_stacks())
    assert open_stacks("megatron-lm") == ("megatron-core",)
    assert open_stacks("deepspeed") == ("torchtitan",)  # none of today's is started by it
    assert with_open_stacks({"stack": "nemo", "tp": 2}) == {"stack": "nemo", "tp": 2}
