"""The way through host memory of GPUs without peer access: what is known of it, and what it does to steps."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.answers.analysis.predict import predict
from forerun.common.units import GIGA, PS_PER_S
from forerun.core.cost.step_costs import Launching, step_costs
from forerun.core.network.formulas import passes
from forerun.core.network.host_path import host_path_bytes_per_s, host_path_s_per_byte, host_path_warnings
from forerun.core.network.network_file import parse_topology
from forerun.core.network.patterns_collectives import RingAllReduce
from forerun.core.program.builder import OpTableBuilder
from forerun.core.program.groups import CommGroup
from forerun.core.program.types import Collective
from forerun.describe.cluster.catalog import cluster_names, load_cluster
from forerun.describe.cluster.types import KernelRates
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan
from forerun.describe.stacks.catalog import load_stack

STAGED = load_cluster("rtx4090")
DIRECT = replace(STAGED, links=(replace(STAGED.links[0], peer_to_peer=True), *STAGED.links[1:]))
KINDS = [kind for kind in Collective if kind != Collective.NONE]
SIZE = 64e6


def group(nodes: int, per_node: int) -> CommGroup:
    return CommGroup("dp_shard", nodes * per_node, nodes, per_node)


def durations_s(cluster, n_gpus: int, kind: Collective, over: CommGroup, network_rate: float = 1.0, **more):
    ops = OpTableBuilder()
    ops.collective("gradients.all_reduce", kind, 0, SIZE)
    stack = replace(load_stack("pytorch"), network_rate=network_rate)
    costs = step_costs(ops.build(), (over,), cluster, stack, Launching(), n_gpus, **more)
    return float(costs.duration_ps[0]) / PS_PER_S


@pytest.mark.parametrize(("gpus", "measured_gb_s"), [(2, 19.5), (4, 5.0), (8, 1.57)])
def test_a_measured_host_is_met(gpus, measured_gb_s):
    assert host_path_bytes_per_s(STAGED, gpus) == pytest.approx(measured_gb_s * GIGA, rel=0.08)


@given(st.integers(2, 8), st.floats(0.1, 50))
def test_a_host_that_was_measured_with_all_gpus_has_that_rate_and_more_with_fewer(gpus, gb_s):
    link = replace(STAGED.links[0], host_path_bytes_per_s=gb_s * GIGA)
    cluster = replace(STAGED, links=(link,))
    assert host_path_bytes_per_s(cluster, 8) == pytest.approx(gb_s * GIGA)
    assert host_path_bytes_per_s(cluster, gpus) >= gb_s * GIGA
    assert host_path_bytes_per_s(cluster, gpus) <= host_path_bytes_per_s(cluster, max(2, gpus - 1))


def test_devices_without_peer_access():
    without = {name for name in cluster_names() if not load_cluster(name).links[0].peer_to_peer}
    assert without == {"rtx3090", "rtx4090", "rtx5090", "a10g"}


def test_gpus_of_other_nodes_do_not_share_it():
    assert host_path_bytes_per_s(STAGED, 64) == host_path_bytes_per_s(STAGED, 8)


@pytest.mark.parametrize("name", [name for name in cluster_names() if load_cluster(name).links[0].peer_to_peer])
def test_with_peer_access_there_is_none(name):
    cluster = load_cluster(name)
    assert host_path_bytes_per_s(cluster, 8) is None
    assert all(host_path_s_per_byte(kind, group(1, 8), cluster, 8) == 0 for kind in KINDS)
    assert host_path_warnings([group(1, 8)], cluster, 8) == ()


@pytest.mark.parametrize("kind", KINDS)
def test_a_collective_of_a_node_passes_its_bus_bytes(kind):
    rate = host_path_bytes_per_s(STAGED, 8)
    assert host_path_s_per_byte(kind, group(1, 8), STAGED, 8) * rate == pytest.approx(passes(kind, 8))


@pytest.mark.parametrize("kind", KINDS)
def test_groups_of_one_gpu_a_node_do_not_go_that_way(kind):
    assert host_path_s_per_byte(kind, group(8, 1), STAGED, 64) == 0
    assert host_path_warnings([group(8, 1)], STAGED, 64) == ()


def test_a_way_is_told_of_where_any_group_has_two_gpus_of_a_node():
    assert len(host_path_warnings([group(8, 1), group(4, 2)], STAGED, 64)) == 1
    (few,), (many,) = (host_path_warnings([group(1, 2)], STAGED, n_gpus) for n_gpus in (2, 64))
    assert "messages between 2 of a node go through host memory" in few
    assert "messages between 8 of a node" in many
    assert f"{host_path_bytes_per_s(STAGED, 8) / 1e9:.1f} GB/s for each GPU" in many


def test_between_nodes_only_what_stays_in_a_node_goes_that_way():
    rate, over = host_path_bytes_per_s(STAGED, 32), group(4, 8)
    passed = {kind: host_path_s_per_byte(kind, over, STAGED, 32) * rate for kind in KINDS}
    assert passed[Collective.ALL_TO_ALL] == pytest.approx(7 / 32)
    assert passed[Collective.SEND_RECV] == 0
    assert passed[Collective.BROADCAST] == pytest.approx(1)
    assert passed[Collective.ALL_REDUCE] == pytest.approx(2 * 31 / 32)
    assert host_path_s_per_byte(Collective.NONE, over, STAGED, 32) == 0


def test_small_groups_share_the_node_with_all_others():
    alone = host_path_s_per_byte(Collective.ALL_GATHER, group(1, 2), STAGED, 2)
    among = host_path_s_per_byte(Collective.ALL_GATHER, group(1, 2), STAGED, 8)
    assert among > 5 * alone


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("nodes", "per_node"), [(1, 2), (1, 8), (4, 8)])
def test_a_step_pays_at_least_the_way_and_never_less_than_with_peer_access(kind, nodes, per_node):
    over, n_gpus = group(nodes, per_node), 8 * nodes
    found = durations_s(STAGED, n_gpus, kind, over)
    least = SIZE * host_path_s_per_byte(kind, over, STAGED, n_gpus)
    assert found == pytest.approx(max(least, durations_s(DIRECT, n_gpus, kind, over)), rel=1e-9)


def test_neither_a_stack_nor_a_faster_link_shortens_it():
    over = group(1, 8)
    base = durations_s(STAGED, 8, Collective.ALL_REDUCE, over)
    faster = replace(STAGED, links=(replace(STAGED.links[0], bytes_per_s=128e9),), rates=KernelRates(network=2.0))
    assert durations_s(STAGED, 8, Collective.ALL_REDUCE, over, network_rate=0.75) == base
    assert durations_s(faster, 8, Collective.ALL_REDUCE, over) == base


def test_patterns_as_nccl_take_the_same_way():
    over = group(1, 8)
    with_pattern = durations_s(STAGED, 8, Collective.ALL_REDUCE, over, pattern=RingAllReduce())
    assert with_pattern == durations_s(STAGED, 8, Collective.ALL_REDUCE, over)


def test_on_a_network_of_ones_own_its_links_count():
    network = parse_topology("switch:8", bandwidth=[32], latency=[1000])
    over = CommGroup("dp_shard", 8, 1, 8)
    both = [durations_s(each, 8, Collective.ALL_GATHER, over, network=network) for each in (STAGED, DIRECT)]
    assert both[0] == both[1]


def test_a_prediction_says_in_one_line_what_bounds_it():
    model = replace(load_model("llama-3.2-1b"), n_layers=2)
    plan = Plan(seq_len=512, dp_shard=8, stack="pytorch")
    staged, direct = (predict(model, plan, cluster) for cluster in (STAGED, DIRECT))
    (line,) = staged.warnings
    assert "rtx4090" in line
    assert "1.5 GB/s" in line
    assert "\n" not in line
    assert direct.warnings == ()
    assert staged.step_time_s > 2 * direct.step_time_s
    assert predict(model, replace(plan, dp_shard=1), STAGED).warnings == ()


def test_rates_fall_faster_than_gpus_grow():
    rates = np.array([host_path_bytes_per_s(STAGED, gpus) * gpus for gpus in range(2, 9)])
    assert (np.diff(rates) < 0).all()
