"""Units are built and run in batches and in parts, which changes nothing about them."""

import random
from dataclasses import fields, replace

import numpy as np
import pytest

from forerun.answers.search.built_units import BuiltUnits, Key, Machine
from forerun.answers.search.space import Limits, Tally, make_space
from forerun.answers.search.unit_runs import INSIDE, UnitRuns
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan

CLUSTER = load_cluster("h100-sxm")
N_GPUS = 64


def placed_plans(model, stack, count=24, extent="default", **fixed):
    """Return random plans of a search's space, with their groups at their places."""
    space = make_space(model, CLUSTER, N_GPUS, 4096, 256, {"stack": stack, **fixed}, Limits(), extent)
    table = space.table(Tally())
    rows = random.Random(5).sample(range(len(table)), min(4 * count, len(table)))
    some = [(table.plan(row), table.groups_of(row)) for row in rows if table.groups[int(table.mesh[row])] is not None]
    return some[:count]


def same(ours, theirs):
    """Return whether the fields of two results are equal, numbers of columns to the last bit."""
    pairs = [(getattr(ours, field.name), getattr(theirs, field.name)) for field in fields(ours)]
    return all(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b for a, b in pairs)


@pytest.mark.parametrize(
    ("name", "stack", "further_tokens"),
    [
        ("deepseek-v3", "megatron-core", 0),
        ("deepseek-v2-lite", "megatron-core", 1),
        ("mixtral-8x7b", "torchtitan", 0),
        ("llama-4-scout", "torchtitan", 0),
        ("llama-3.1-8b", "megatron-core", 0),
    ],
)
def test_units_in_batches_and_parts_equal_units_alone(name, stack, further_tokens):
    model = replace(load_model(name), mtp_modules=further_tokens)
    wanted = placed_plans(model, stack)
    assert len(wanted) > 10
    assert any(plan.ep > 1 for plan, _ in wanted) == any(kind.moe for kind in model.kinds)
    runs, machine = UnitRuns(model, CLUSTER, n_gpus=N_GPUS), Machine(CLUSTER, n_gpus=N_GPUS)
    runs.prepare(wanted)
    for plan, groups in wanted:
        alone = BuiltUnits(model, CLUSTER, [runs.key(plan)])
        (times,) = alone.times(machine, [{axis: groups[axis] for axis in INSIDE}])
        assert same(runs.sizes(plan), alone.sizes[0]), plan
        assert same(runs.times(plan, groups), times), plan


def test_all_places_of_a_key_in_one_batch():
    model = load_model("llama-3.1-8b")
    fixed = {
        "micro_batch": 1,
        "compile": False,
        "pp": 1,
        "tp": [2, 4],
        "cp": [1, 2],
        "activation_checkpointing": "none",
    }
    wanted = placed_plans(model, "torchtitan", 60, "whole", **fixed)
    together, apart = (UnitRuns(model, CLUSTER, n_gpus=N_GPUS) for _ in range(2))
    together.prepare(wanted)
    places = {(apart.key(plan), apart.place(groups)) for plan, groups in wanted}
    assert len(places) > len({key for key, _ in places})
    for plan, groups in wanted:
        assert same(together.times(plan, groups), apart.times(plan, groups)), plan


def test_plans_that_differ_in_experts_share_units_without_experts():
    model = load_model("deepseek-v3")
    runs = UnitRuns(model, CLUSTER, n_gpus=N_GPUS)
    built = []
    find = runs._processes._answer
    runs._processes._answer = lambda batch: built.extend(task.key for task in batch) or find(batch)
    for ep in (8, 16, 32):
        runs.sizes(Plan(4096, dp_shard=64, ep=ep, stack="megatron-core"))
    assert sorted(key.part for key in built) == ["experts", "experts", "experts", "others"]
    assert all(isinstance(key, Key) for key in built)
