"""Groups lie on the nodes as the order of the mesh axes says."""

import random
from collections import Counter
from itertools import permutations, product
from math import prod

import pytest

from forerun.answers.analysis.predict import predict
from forerun.common.errors import ForerunError, ImpossiblePlan
from forerun.core.network.on_topology import load_network
from forerun.core.program.groups import CommGroup
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.constraints import refuse
from forerun.describe.plan.plan import DEFAULT_ORDER, MESH_AXES, Plan
from forerun.sources.symbolic.mesh import groups_of

ORDERS = ["-".join(order) for order in permutations(MESH_AXES)]
PARTS = {
    "tp": ("tp",),
    "cp": ("cp",),
    "dp_shard": ("cp", "dp_shard"),
    "dp_replicate": ("dp_replicate",),
    "dp_all": ("cp", "dp_shard", "dp_replicate"),
    "pp": ("pp",),
}


def plan_of(random_: random.Random, sizes, order=DEFAULT_ORDER) -> Plan:
    degrees = {axis: random_.choice(sizes) for axis in MESH_AXES}
    around, etp = degrees["dp_shard"] * degrees["cp"] * degrees["tp"], random_.choice([1, degrees["tp"]])
    ep = random_.choice([n for n in range(1, around // etp + 1) if around % (n * etp) == 0])
    return Plan(seq_len=1, **degrees, ep=ep, etp=etp, mesh_order=order)


def members(plan: Plan, axes) -> list[int]:
    """Ranks of the group of rank 0 that joins `axes`."""
    spacing, inner = {}, 1
    for axis in plan.mesh_axes:
        spacing[axis] = inner
        inner *= getattr(plan, axis)
    ways = product(*(range(getattr(plan, axis)) for axis in axes))
    return sorted(sum(i * spacing[axis] for i, axis in zip(way, axes, strict=True)) for way in ways)


@pytest.mark.parametrize("seed", range(200))
def test_the_default_order_is_tp_cp_dp_shard_dp_replicate_pp(seed):
    plan = plan_of(random.Random(seed), (1, 2, 3, 4, 6, 8))
    tp, cp, fsdp, ep, etp, replicas = plan.tp, plan.cp, plan.fsdp, plan.ep, plan.etp, plan.dp_replicate
    around, inside = (tp * fsdp, 1) if ep * etp > 1 else (fsdp, tp)
    for node_size in (1, 8, 72):
        groups = groups_of(plan, node_size)
        spaced = {
            "tp": (tp, 1),
            "cp": (cp, tp),
            "dp_shard": (fsdp, tp),
            "dp_replicate": (replicas, tp * fsdp),
            "etp": (etp, inside),
            "ep": (ep, inside * etp),
            "dp_expert": (around // ep // etp, inside * ep * etp),
            "dp_all": (fsdp * replicas, tp),
            "dp_expert_all": (around * replicas // ep // etp, inside * ep * etp),
            "pp": (plan.pp, tp * fsdp * replicas),
        }
        for axis, (size, inner) in spaced.items():
            assert groups[axis] == CommGroup.on_mesh(axis, size, inner, node_size), axis


@pytest.mark.parametrize("seed", range(200))
def test_groups_are_where_their_ranks_are(seed):
    random_ = random.Random(seed)
    plan = plan_of(random_, (1, 2, 4, 8), random_.choice(ORDERS))
    try:
        groups = groups_of(plan, 8)
    except ImpossiblePlan:
        assert plan.ep * plan.etp > 1
        return
    for axis, parts in PARTS.items():
        group, ranks = groups[axis], members(plan, parts)
        assert Counter(Counter(rank // 8 for rank in ranks).values()) == {group.ranks_per_node: group.nodes}, axis
        combined = [sum(offsets) for offsets in product(*(range(0, n * d, d) for n, d in _runs(group)))]
        assert sorted(combined) == ranks
    for beside, everyone in (("dp_expert", "dp_shard"), ("dp_expert_all", "dp_all")):
        apart = [run for axis in ("etp", "ep", beside) for run in _runs(groups[axis])]
        combined = [sum(offsets) for offsets in product(*(range(0, n * d, d) for n, d in apart))]
        assert sorted(combined) == members(plan, ("tp",) * plan.experts_apart + PARTS[everyone])


def _runs(group: CommGroup):
    return group.runs or ((group.size, group.inner),)


def test_a_model_with_experts_refuses_what_can_not_be_cut():
    model, cluster = load_model("mixtral-8x7b"), load_cluster("h100-sxm")
    order = "cp-pp-tp-dp_shard-dp_replicate"
    apart = Plan(seq_len=4096, cp=6, tp=2, dp_shard=4, pp=2, ep=4, mesh_order=order)
    assert refuse(model, apart, cluster).reason == (
        "seq_len 4096 is not divisible by cp 6"
    )  # what comes first is the reason
    apart = Plan(seq_len=4096 * 3, cp=6, tp=2, dp_shard=4, pp=2, ep=4, mesh_order=order)
    cut = "ep 4 can't be cut out of tp 2 x cp 6 x dp_shard 4 in mesh_order cp-pp-tp"
    assert cut in refuse(model, apart, cluster).reason
    with pytest.raises(ImpossiblePlan, match="etp 1 x ep 4 can't be cut out"):
        groups_of(apart, 8)


def test_tensor_parallelism_across_nodes_is_slower():
    model, cluster = load_model("llama-3.1-8b"), load_cluster("h100-sxm")
    plans = {
        order: Plan(seq_len=4096, tp=8, dp_shard=8, mesh_order=order)
        for order in (DEFAULT_ORDER, "cp-dp_shard-tp-dp_replicate-pp")
    }
    times = {order: predict(model, plan, cluster).step_time_s for order, plan in plans.items()}
    assert times[DEFAULT_ORDER] < times["cp-dp_shard-tp-dp_replicate-pp"]


@pytest.mark.parametrize("order", ["tp-cp", "tp-tp-cp-dp_shard-pp", "tp,cp,dp_shard,dp_replicate,pp", ""])
def test_an_order_that_is_no_permutation_is_refused(order):
    with pytest.raises(ForerunError, match="mesh_order must name tp, cp, dp_shard, dp_replicate, pp once each"):
        Plan(seq_len=1, mesh_order=order)


def test_a_network_refuses_groups_that_are_not_evenly_spaced():
    model, cluster = load_model("llama-3.1-8b"), load_cluster("h100-sxm")
    fabric = load_network("switch:8@450/300,fat-tree:8@50/700")
    fields = {"seq_len": 4096, "cp": 2, "tp": 2, "dp_shard": 4, "pp": 2}
    even = predict(model, Plan(**fields, mesh_order="cp-tp-dp_shard-dp_replicate-pp", zero_stage=0), cluster)
    assert even.step_time_s > 0
    for order in ("cp-tp-dp_shard-dp_replicate-pp", "tp-cp-pp-dp_shard-dp_replicate"):
        with pytest.raises(ForerunError, match="--network places groups of evenly spaced ranks"):
            predict(model, Plan(**fields, mesh_order=order), cluster, fabric)
    assert prod((2, 2, 4, 2)) == Plan(**fields).world_size
