"""What share of each link a collective keeps busy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.common.units import PS_PER_S
from forerun.core.cost.link_demand import link_demand
from forerun.core.cost.op_costs import durations_ps, on_topology
from forerun.core.cost.step_costs import Launching, step_costs
from forerun.core.engine.sharing import FULL, LinkDemand
from forerun.core.network.nccl import wire_efficiency
from forerun.core.network.on_topology import load_network
from forerun.core.program.builder import OpTableBuilder
from forerun.core.program.groups import CommGroup
from forerun.core.program.types import Collective, Stream
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.cluster.types import KernelRates
from forerun.describe.stacks.catalog import load_stack

CLUSTER = load_cluster("h100-sxm")
NEAR = CLUSTER.links[0].bytes_per_s
FAR = CLUSTER.links[1].bytes_per_s * wire_efficiency(CLUSTER.links[1])
NODE = CommGroup("tp", 8, 1, 8)
NODES = CommGroup("dp", 4, 4, 1, 8)
BOTH = CommGroup("fsdp", 32, 4, 8)
GIB = float(2**30)
ROUTED = load_network("switch:8@450/300ns,switch:4@50/700ns")


def demand_of(kind: Collective, group: CommGroup, size_bytes: float, seconds: float | None = None) -> LinkDemand:
    """Of one collective on the links of CLUSTER that takes `seconds`, or as long as it does."""
    ops = OpTableBuilder()
    if kind == Collective.SEND_RECV:
        ops.p2p("op", 0, size_bytes)
    else:
        ops.collective("op", kind, 0, size_bytes)
    table = ops.build()
    duration = durations_ps(table, [group], CLUSTER, KernelRates())[0]
    if seconds is not None:
        duration = np.full(1, round(seconds * PS_PER_S))
    found = link_demand(table, [group], duration, CLUSTER)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("kind", "group", "near_bytes", "far_bytes"),
    [
        (Collective.ALL_GATHER, NODE, 7 / 8, 0),
        (Collective.REDUCE_SCATTER, NODE, 7 / 8, 0),
        (Collective.ALL_REDUCE, NODE, 1, 0),  # the switches of the node add
        (Collective.ALL_TO_ALL, NODE, 7 / 8, 0),
        (Collective.ALL_GATHER, NODES, 0, 3 / 4),
        (Collective.ALL_TO_ALL, NODES, 0, 3 / 4),
        (Collective.ALL_GATHER, BOTH, 31 / 32 * 7 / 8, 31 / 32 / 8),
        (Collective.ALL_TO_ALL, BOTH, 7 / 32, 24 / 32),
        (Collective.SEND_RECV, CommGroup("pp_far", 2, 2, 1, 8, 1), 0, 1),
        (Collective.SEND_RECV, CommGroup("pp_near", 2, 1, 2, 1, 1), 1, 0),
    ],
)
def test_a_link_is_busy_for_its_bytes_over_its_rate(
    kind: Collective, group: CommGroup, near_bytes: float, far_bytes: float
) -> None:
    share = demand_of(kind, group, GIB, seconds=1.0).share[0] / FULL
    once = [near_bytes * GIB / NEAR, far_bytes * GIB / FAR]
    np.testing.assert_allclose(share, [*once, *once], rtol=1e-6)


def test_large_collectives_fill_most_of_their_link_and_small_ones_nearly_nothing() -> None:
    large, small = (demand_of(Collective.ALL_GATHER, BOTH, size).share[0] / FULL for size in (4 * GIB, 2.0**16))
    assert 0.75 < large[1] <= 1
    assert large[0] < 0.9
    assert small.max() < 0.02


@given(st.sampled_from(list(Collective)[1:]), st.sampled_from([NODE, NODES, BOTH]), st.floats(8, 1e11))
def test_a_share_is_never_more_than_the_link(kind: Collective, group: CommGroup, size_bytes: float) -> None:
    share = demand_of(kind, group, size_bytes).share
    assert 0 <= share.min() <= share.max() <= FULL


def test_a_stage_sends_on_its_way_out_and_receives_on_its_way_in() -> None:
    demand = demand_of(Collective.SEND_RECV, CommGroup("pp_far", 2, 2, 1, 8, 1), GIB)
    out, into = demand.carries[Stream.PP_SEND], demand.carries[Stream.PP_RECV]
    assert (out == [True, True, False, False]).all()
    assert (into == [False, False, True, True]).all()
    assert demand.carries[Stream.GATHER].all()


def test_nobody_asks_where_nothing_moves() -> None:
    ops = OpTableBuilder()
    ops.gemm("gemm", 64, 64, 64)
    ops.collective("alone", Collective.ALL_REDUCE, 0, GIB)
    assert link_demand(ops.build(), [CommGroup("tp", 1, 1, 1)], np.array([5, 5]), CLUSTER) is None


@pytest.mark.parametrize("group", [replace(NODES, inner=8), replace(BOTH, inner=1)])
@pytest.mark.parametrize("kind", [Collective.ALL_GATHER, Collective.ALL_REDUCE, Collective.ALL_TO_ALL])
def test_switches_like_the_links_of_a_cluster_are_as_busy(kind: Collective, group: CommGroup) -> None:
    ops = OpTableBuilder()
    ops.collective("op", kind, 0, 4 * GIB)
    table, duration = ops.build(), np.full(1, PS_PER_S)
    levels = replace(
        CLUSTER, links=(replace(CLUSTER.links[0], bytes_per_s=450e9), replace(CLUSTER.links[1], bytes_per_s=50e9))
    )
    on_levels = link_demand(table, [group], duration, levels)
    on_links = link_demand(table, [group], duration, levels, on_topology(ROUTED, levels, 32))
    assert on_levels is not None
    assert on_links is not None
    assert on_links.share.max() == pytest.approx(on_levels.share.max(), rel=0.05)


def test_the_way_through_host_memory_is_a_link_that_axes_share() -> None:
    """Without peer access a collective that this way bounds keeps all of it busy, whatever the PCIe link could do."""
    cluster = load_cluster("rtx4090")
    group = CommGroup("tp", 4, 1, 4)
    ops = OpTableBuilder()
    ops.collective("op", Collective.ALL_GATHER, 0, GIB)
    table = ops.build()
    costs = step_costs(table, (group,), cluster, load_stack("torchtitan"), Launching(), 8)
    assert costs.demand is not None
    np.testing.assert_allclose(costs.demand.share[0] / FULL, [1, 0, 1, 0], rtol=1e-6)
    direct = replace(cluster, links=(replace(cluster.links[0], peer_to_peer=True), *cluster.links[1:]))
    with_peers = step_costs(table, (group,), direct, load_stack("torchtitan"), Launching(), 8)
    assert with_peers.duration_ps[0] < costs.duration_ps[0]
