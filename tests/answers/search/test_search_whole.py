"""The whole space: every order of mesh axes once, everything counted, every plan's reason known."""

import random
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

from forerun.answers.analysis.predict import predict
from forerun.answers.search.orders import Orders, all_orders
from forerun.answers.search.search import search
from forerun.answers.search.space import BATCH_RULE, NETWORK_RULE, Tally, make_space
from forerun.common.errors import ForerunError
from forerun.core.network.on_topology import load_network
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.constraints import refuse
from forerun.describe.plan.plan import DEFAULT_ORDER, MESH_AXES, Plan
from forerun.sources.symbolic.mesh import groups_of

CLUSTER = load_cluster("h100-sxm")
TINY = replace(load_model("gpt2-small"), n_layers=4, vocab=1024, name="tiny")
MIXTURE = replace(load_model("mixtral-8x7b"), n_layers=2, name="small mixture")
QUESTION = {"n_gpus": 16, "seq_len": 1024, "global_batch": 32}
FEW = {"pp": [1, 2], "tp": [2, 4], "micro_batch": [1, 2], "activation_checkpointing": "none", "offload": "none"}
ONE_SCHEDULE = {"pp_schedule": "1F1B", "reshard_after_forward": "always"}


def whole(model=TINY, fixed=None, **options):
    return search(model, CLUSTER, **QUESTION, fixed=fixed or FEW, space="whole", workers=1, **options)


def places(plan):
    groups = groups_of(plan, CLUSTER.node_size)
    return tuple((group.nodes, group.ranks_per_node) for group in groups.values())


def drawn(model, n_gpus=16, on_network=False, **fixed):
    tally = Tally()
    space = make_space(model, CLUSTER, n_gpus, 1024, 32, fixed, None, "whole", on_network)
    return list(space.plans(tally)), tally


@pytest.mark.parametrize("model", [TINY, MIXTURE])
def test_orders_that_place_all_groups_alike_are_one_plan(model):
    plans, tally = drawn(model, **FEW)
    assert tally.considered == len(plans) + len(tally.renamed) + tally.same + sum(tally.impossible.values())
    assert tally.same > 0
    seen = {}
    renamed = [tally.renamed.table.plan(row) for row in range(len(tally.renamed))]
    for plan in [*plans, *renamed]:
        key = (replace(plan, mesh_order=DEFAULT_ORDER), places(plan))
        assert key not in seen, (plan, seen.get(key))
        seen[key] = plan
    for plan in plans[:: max(1, len(plans) // 20)]:  # every order of a mesh has one that stands for it
        for order in permutations(MESH_AXES):
            other = replace(plan, mesh_order="-".join(order))
            if refuse(model, other, CLUSTER) is None:
                assert (replace(other, mesh_order=DEFAULT_ORDER), places(other)) in seen
    assert {plan.mesh_order for plan in plans} > {DEFAULT_ORDER}


def test_the_usual_order_stands_for_those_that_are_the_same():
    plans, _ = drawn(TINY, **FEW)
    meshes = {replace(plan, mesh_order=DEFAULT_ORDER) for plan in plans}
    assert {plan for plan in plans if plan.mesh_order == DEFAULT_ORDER} == meshes


@pytest.mark.parametrize("seed", range(60))
def test_no_order_is_lost_by_looking_inside_nodes_only(seed):
    draw = random.Random(seed)
    degrees = {axis: draw.choice((1, 2, 3, 4, 8) if seed % 2 else (1, 2, 4, 8, 16)) for axis in MESH_AXES}
    fsdp = degrees["cp"] * degrees["dp_shard"]
    mesh = Plan(seq_len=1, **degrees, ep=draw.choice([n for n in (1, 2, 3, 4) if fsdp % n == 0]))
    orders = Orders(all_orders(), 8, on_network=False)
    found, same = orders.of(mesh)
    every = {orders.placed(replace(mesh, mesh_order=order)).places(False) for order in all_orders()}
    assert {each.places(False) for each in found} == every
    assert len(found) == len(every)
    assert len(found) + same == len(all_orders())


@pytest.mark.parametrize(
    ("model", "stack"),
    [
        (TINY, "torchtitan"),
        (TINY, "megatron-core"),
        pytest.param(MIXTURE, "torchtitan", marks=pytest.mark.long, id="experts"),
    ],
)
def test_bounds_change_no_place_of_the_whole_space(model, stack):
    fixed = {**FEW, "stack": stack, "cp": 1, "ep": [1, 2], "tp": 2, "sequence_parallel": True, **ONE_SCHEDULE}
    fixed["cuda_graphs"] = (
        stack == "megatron-core"
    )  # Its host would set the pace of small models, and bounds leave it out.
    quick, full = (whole(model, fixed, keep=3, exhaustive=exhaustive) for exhaustive in (False, True))
    assert [each.plan for each in quick.top(3)] == [each.plan for each in full.top(3)]
    assert quick.simulated < full.simulated
    assert quick.counts["considered"] == full.counts["considered"] == sum(list(full.counts.values())[1:])
    times = [predict(model, plan, CLUSTER).step_time_s for plan in drawn_of(model, fixed)]
    assert quick.ranked[0].step_time_s == min(times)


def drawn_of(model, fixed):
    plans = list(make_space(model, CLUSTER, **QUESTION, fixed=fixed, extent="whole").plans(Tally()))
    return [plan for plan in plans if predict(model, plan, CLUSTER).fits]


def test_every_plan_of_the_space_has_a_reason():
    result = whole(keep=1, memory_limit_gib=1.35)
    assert result.reason_of(result.ranked[0].plan) == ""
    for left_out in (result.skipped, result.too_large):
        assert len(left_out) > 2
        for place in (0, len(left_out) // 2, -1):
            assert result.reason_of(left_out[place].plan) == left_out[place].reason
    assert [each.at_least for each in result.skipped] == sorted(each.at_least for each in result.skipped)
    plan = result.skipped[0].plan
    same = replace(result.ranked[0].plan, mesh_order="dp_replicate-tp-cp-dp_shard-pp")
    reason = result.reason_of(same)
    alike = places(same) == places(result.ranked[0].plan)
    assert alike or reason.startswith(("at least", "same placement as another order"))
    assert "layers are fewer" in result.reason_of(replace(plan, pp=8, tp=2, dp_replicate=1, dp_shard=1))
    assert result.reason_of(replace(plan, micro_batch=5)).startswith(BATCH_RULE)
    usual = Plan(seq_len=1024, dp_shard=8, tp=2, n_microbatches=4, stack=plan.stack)
    elsewhere = replace(usual, mesh_order="tp-dp_shard-cp-pp-dp_replicate")
    assert result.reason_of(elsewhere) == (
        f"same placement as another order: places all groups on the same nodes as mesh_order {DEFAULT_ORDER}"
    )


def test_columns_say_what_rows_say():
    result = whole(keep=2, memory_limit_gib=1.35)
    columns, rows = result.columns(), result.to_rows()
    rows = [row for row in rows if row["status"] != "renamed"]
    assert [row["status"] for row in rows] == columns["status"].tolist()
    for name in ("tp", "mesh_order", "dp_shard", "sequence_parallel", "pp_schedule"):
        assert columns[name].tolist() == [row[name] for row in rows]
    skipped = columns["status"] == "skipped"
    assert columns["objective"][skipped].tolist() == [each.at_least for each in result.skipped]
    assert np.isfinite(columns["objective"][columns["status"] == "ok"]).all()
    large = columns["status"] == "out_of_memory"
    assert columns["needs_gib"][large].tolist() == [each.needs_gib for each in result.too_large]


def test_what_a_network_can_not_place_is_counted():
    fixed = {"tp": 2, "pp": 1, "cp": [1, 2], "micro_batch": 1, "activation_checkpointing": "none", "offload": "none"}
    plans, tally = drawn(TINY, on_network=True, **fixed)
    assert tally.impossible[NETWORK_RULE] > 0
    assert tally.considered == len(plans) + tally.same + sum(tally.impossible.values())
    network = load_network("switch:8@450/300,fat-tree:2@50/700")
    for plan in plans[:: len(plans) // 12]:
        assert predict(TINY, plan, CLUSTER, network).step_time_s > 0


def test_a_fixed_order_is_the_only_one():
    order = "pp-tp-cp-dp_shard-dp_replicate"
    plans, _ = drawn(TINY, mesh_order=order, **FEW)
    assert {plan.mesh_order for plan in plans} == {order}
    plans, _ = drawn(TINY, mesh_order=[order, DEFAULT_ORDER], **FEW)
    assert {plan.mesh_order for plan in plans} == {order, DEFAULT_ORDER}


def test_a_space_that_does_not_exist_is_named():
    with pytest.raises(ForerunError, match="space must be one of default, whole, got 'all'"):
        search(TINY, CLUSTER, **QUESTION, space="all")


def test_memory_and_workers_change_nothing_of_the_whole_space():
    fixed = {**FEW, **ONE_SCHEDULE, "tp": 2}
    one = whole(fixed=fixed, keep=2, objective="memory")
    full = whole(fixed=fixed, keep=2, objective="memory", exhaustive=True)
    assert [each.plan for each in one.top(2)] == [each.plan for each in full.top(2)]
    two = search(TINY, CLUSTER, **QUESTION, fixed=fixed, space="whole", workers=2, keep=2, objective="memory")
    assert two == one
