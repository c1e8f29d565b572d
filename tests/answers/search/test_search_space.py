"""The space holds every combination once, and counts what is impossible."""

from itertools import product

import pytest

from forerun.answers.search.space import Limits, Tally, divisors, make_space, powers_of_two
from forerun.common.errors import ForerunError
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.constraints import check_plan
from forerun.describe.plan.fields import choices
from forerun.describe.stacks.catalog import load_stack, stack_names

DENSE, MOE = load_model("llama-3.1-8b"), load_model("mixtral-8x7b")
CLUSTER = load_cluster("h100-sxm")


def drawn(model=DENSE, n_gpus=16, seq_len=8192, global_batch=64, **fixed):
    tally = Tally()
    plans = list(make_space(model, CLUSTER, n_gpus, seq_len, global_batch, fixed).plans(tally))
    return plans, tally


@pytest.mark.parametrize("model", [DENSE, MOE])
@pytest.mark.parametrize("stack", ["torchtitan", "megatron-core", "deepspeed"])
def test_every_plan_is_possible_different_and_answers_the_question(model, stack):
    plans, tally = drawn(model, stack=stack)
    assert plans
    assert len(set(plans)) == len(plans)
    for plan in plans:
        check_plan(model, plan, CLUSTER)
        assert (plan.world_size, plan.global_batch, plan.seq_len, plan.stack) == (16, 64, 8192, stack)
    assert tally.considered == len(plans) + sum(tally.impossible.values())
    assert set(tally.impossible) == set(tally.examples)


def test_a_small_space_is_the_product_of_its_axes():
    plans, _ = drawn(
        n_gpus=4, global_batch=4, pp=1, cp=1, activation_checkpointing="none", micro_batch=1, compile=False
    )
    meshes = {
        (plan.tp, plan.dp_replicate, plan.dp_shard, plan.zero_stage, plan.reshard_after_forward) for plan in plans
    }
    expected = {(4, 1, 1, 0, "default"), (1, 4, 1, 0, "default"), (2, 2, 1, 0, "default")}
    expected |= {(4 // n, 1, n, 3, reshard) for n, reshard in product((2, 4), ("always", "never"))}
    assert meshes == expected
    assert len(plans) == len(expected)


def test_fixed_values_replace_an_axis():
    plans, _ = drawn(tp=[2, 4], activation_checkpointing="full", compile=[True, False], pp=1, cp=1)
    assert {plan.tp for plan in plans} == {2, 4}
    assert {plan.activation_checkpointing for plan in plans} == {"full"}
    assert {plan.compile for plan in plans} == {True, False}


def test_minus_one_is_the_rest():
    plans, _ = drawn(tp=2, dp_replicate=2, dp_shard=-1, pp=1, cp=1)
    assert {(plan.dp_replicate, plan.dp_shard) for plan in plans} == {(2, 4)}
    plans, _ = drawn(tp=2, dp_shard=4, pp=1, cp=1)
    assert {(plan.dp_replicate, plan.dp_shard) for plan in plans} == {(2, 4)}


def test_limits_end_an_axis():
    tally = Tally()
    space = make_space(DENSE, CLUSTER, 64, 32768, 64, {}, Limits(max_tp=4, max_cp=2, max_pp=2, max_micro_batch=2))
    plans = list(space.plans(tally))
    assert {plan.tp for plan in plans} == {1, 2, 4}
    assert {plan.cp for plan in plans} == {1, 2}
    assert {plan.pp for plan in plans} == {1, 2}
    assert {plan.micro_batch for plan in plans} == {1, 2}


def test_experts_are_split_only_where_there_are_some():
    plans, _ = drawn(MOE)
    assert {plan.ep for plan in plans} == {1, 2, 4, 8}
    plans, _ = drawn(DENSE)
    assert {plan.ep for plan in plans} == {1}


def test_a_batch_that_does_not_split_is_counted():
    plans, tally = drawn(n_gpus=16, global_batch=8, pp=1, cp=1, tp=1)
    assert plans == []
    assert dict(tally.impossible) == {"batch does not split over data parallelism": tally.considered}


def test_the_order_is_the_same_every_time():
    assert drawn(MOE)[0] == drawn(MOE)[0]


@pytest.mark.parametrize("stack", stack_names())
def test_every_stack_has_a_space_of_schedules_that_exist(stack):
    offered = load_stack(stack).search_space().all_schedules
    assert {schedule for schedule, _ in offered} <= set(choices("pp_schedule"))
    assert all(virtual >= 1 for _, virtual in offered)


@pytest.mark.parametrize(
    ("fixed", "message"),
    [
        ({"tpp": 8}, "no field 'tpp'"),
        ({"tp": "8"}, "tp: expected a whole number"),
        ({"tp": 0}, "tp must be a whole number of at least 1"),
        ({"tp": []}, "tp: no value is left"),
        ({"n_microbatches": 4}, "n_microbatches follows from"),
        ({"stack": ["torchtitan", "nemo"]}, "one software stack"),
        ({"stack": "torch"}, "unknown stack"),
        ({"precision": "bf17"}, "precision: expected one of"),
    ],
)
def test_a_wrong_fixed_value_is_named(fixed, message):
    with pytest.raises(ForerunError, match=message):
        make_space(DENSE, CLUSTER, 16, 8192, 64, fixed)


def test_divisors_and_powers():
    assert divisors(36) == (1, 2, 3, 4, 6, 9, 12, 18, 36)
    assert divisors(1) == (1,)
    assert powers_of_two(24, 24) == (1, 2, 4, 8)
    assert powers_of_two(16, 6) == (1, 2, 4)
