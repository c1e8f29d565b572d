"""Times, link loads and messages of collectives, multiplied out by hand from the constants of fabrics.yaml."""

from __future__ import annotations

from dataclasses import replace
from math import log2

import numpy as np
import pytest

from forerun.core.cost.profile import load_profile
from forerun.core.network import group_traffic
from forerun.core.network.alpha_beta import AlphaBeta, ring_line, steps_of, tree_line
from forerun.core.network.constants import HostPath, fabrics
from forerun.core.network.gradient_compression import TopK
from forerun.core.network.group_traffic import Layout
from forerun.core.network.lines import Lines
from forerun.core.network.link_load import fabric_of
from forerun.core.network.link_use import link_busy_s
from forerun.core.network.nccl import algorithms, chosen, collective_lines, collective_s, hop_count, slower
from forerun.core.network.on_topology import OnTopology, load_network
from forerun.core.network.patterns import Wires
from forerun.core.network.patterns_messages import (
    MessagePattern,
    ParameterServer,
    Round,
    _lines_between_nodes,
    _lines_in_node,
    _Timed,
)
from forerun.core.program.groups import CommGroup
from forerun.core.program.types import F64, Collective
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.cluster.types import Cluster

H100 = load_cluster("h100-sxm")
NEAR, FAR = H100.links
MEASURED = load_profile(H100.device.cost_profile).collectives
NEAR_S, FAR_S = 1 / NEAR.bytes_per_s, 1 / (FAR.bytes_per_s * fabrics().efficiency["infiniband"])
"""seconds of a byte on NVLink, and on a NIC at the rate that it sustains"""
US = 1e-6
EXTRA_US = FAR.latency_s / US - fabrics().reference_latency_us
"""latency of a hop of this fabric beyond that of the fabric on which the hops were measured"""
GATHER, SCATTER, REDUCE = Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_REDUCE
EXCHANGE, SEND, BROADCAST = Collective.ALL_TO_ALL, Collective.SEND_RECV, Collective.BROADCAST


def group(size: int, per_node: int) -> CommGroup:
    return CommGroup("dp", size, size // per_node, per_node)


# -- how long a byte keeps the links of a rank busy --------------------------------------------------------------------


def busy_s(kind: Collective, sizes: F64, over: CommGroup, cluster: Cluster = H100) -> F64:
    """Returns the seconds that collectives of `sizes` (n,) over one group keep links of a rank busy, (n, levels)."""
    return link_busy_s([kind] * len(sizes), sizes, [over] * len(sizes), cluster, MEASURED)


@pytest.mark.parametrize(
    ("kind", "size", "per_node", "near", "far"),
    [
        (REDUCE, 4, 4, 2 * 3 / 4, 0),
        (GATHER, 8, 8, 7 / 8, 0),
        (SCATTER, 4, 4, 3 / 4, 0),
        (EXCHANGE, 8, 8, 7 / 8, 0),
        (SEND, 8, 8, 1, 0),
        (BROADCAST, 8, 8, 1, 0),
        (GATHER, 16, 8, 15 / 16 * 7 / 8, 15 / 16 / 8),  # in one of 8 rings a rank sends to the other node
        (SCATTER, 32, 8, 31 / 32 * 7 / 8, 31 / 32 / 8),
        (GATHER, 4, 1, 0, 3 / 4),
        (EXCHANGE, 16, 8, 7 / 16, 8 / 16),  # a sixteenth for every other rank
        (EXCHANGE, 4, 1, 0, 3 / 4),
        (SEND, 16, 8, 0, 1),
        (BROADCAST, 16, 8, 7 / 8, 1 / 8),
        (GATHER, 1, 1, 0, 0),
        (Collective.NONE, 8, 8, 0, 0),
    ],
)
def test_bytes_that_pass_the_links_of_a_rank(
    kind: Collective, size: int, per_node: int, near: float, far: float
) -> None:
    sizes = np.array([1e3, 1e9])
    found = busy_s(kind, sizes, group(size, per_node))
    np.testing.assert_allclose(found, sizes[:, None] * [near * NEAR_S, far * FAR_S])


def test_a_small_all_reduce_between_nodes_takes_a_tree_and_a_large_one_a_ring() -> None:
    """A tree sends all bytes up and down, a ring twice what a rank does not own; over 16 nodes of 4."""
    small, large = busy_s(REDUCE, np.array([1e4, 1e10]), group(64, 4))
    around = 2 * 63 / 64
    np.testing.assert_allclose(small / 1e4, [around * 3 / 4 * NEAR_S, 2 / 4 * FAR_S])
    np.testing.assert_allclose(large / 1e10, [around * 3 / 4 * NEAR_S, around / 4 * FAR_S])


def test_switches_that_add_take_the_bytes_once() -> None:
    """In a node, in trees over two nodes (each sends all bytes) and over four (up and down)."""
    sizes = np.array([1e10])
    np.testing.assert_allclose(busy_s(REDUCE, sizes, group(8, 8))[0] / 1e10, [NEAR_S, 0])
    np.testing.assert_allclose(busy_s(REDUCE, sizes, group(16, 8))[0] / 1e10, [NEAR_S, FAR_S / 8])
    adding = replace(H100, links=(NEAR, replace(FAR, reduces=True)))
    found = busy_s(REDUCE, sizes, group(64, 8), adding)[0] / 1e10
    np.testing.assert_allclose(found, [NEAR_S, FAR_S / 8])


def test_what_goes_far_passes_every_level_on_its_way() -> None:
    """Groups over 2 of 4 nodes of a rack do not leave it; groups over 8 nodes pass the rack's link and the next one."""
    spine = replace(FAR, name="spine", size=0, bytes_per_s=FAR.bytes_per_s / 2)
    deep = replace(H100, links=(NEAR, replace(FAR, size=4), spine))
    inside, across = (link_busy_s([SEND], np.ones(1), [group(nodes * 8, 8)], deep, None)[0] for nodes in (2, 8))
    np.testing.assert_allclose(inside, [0, FAR_S, 0])
    np.testing.assert_allclose(across, [0, FAR_S, 2 * FAR_S])


# -- lines of NCCL -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [2, 8])
@pytest.mark.parametrize("kind", [GATHER, SCATTER, BROADCAST])
def test_a_ring_between_single_gpus_has_a_hop_for_every_node(kind: Collective, nodes: int) -> None:
    lines = collective_lines(kind, nodes, 1, H100, MEASURED)
    sent = 1.0 if kind == BROADCAST else (nodes - 1) / nodes
    assert lines.latency_s == pytest.approx(
        [(p.base_us + (nodes - 1) * (p.net_hop_us + EXTRA_US)) * US for p in fabrics().ring]
    )
    assert lines.s_per_byte == pytest.approx([sent * FAR_S / p.rate for p in fabrics().ring])


def test_an_all_reduce_goes_round_twice_or_up_and_down_a_tree() -> None:
    """On 4 nodes of 8 GPUs, of which the NICs are the slower part."""
    slow = replace(H100, links=(replace(NEAR, bytes_per_s=1e15, reduces=False), FAR))
    found = collective_lines(REDUCE, 4, 8, slow, MEASURED)
    ring, tree = fabrics().ring, fabrics().tree
    round_us = [p.base_us + 2 * (4 * 7 * p.node_hop_us + 3 * (p.net_hop_us + EXTRA_US)) for p in ring]
    climb_us = [p.base_us + 2 * (7 * p.node_hop_us + 2 * (p.net_hop_us + EXTRA_US)) for p in tree]
    assert found.latency_s == pytest.approx([time * US for time in round_us + climb_us])
    slopes = [2 * 31 / 32 / 8 * FAR_S / p.rate for p in ring] + [2 / 8 * FAR_S / p.rate for p in tree]
    assert found.s_per_byte == pytest.approx(slopes)


def test_an_exchange_between_nodes_has_a_latency_that_grows_with_the_ranks() -> None:
    constants = fabrics().all_to_all
    (latency,), (slope,) = (lambda one: (one.latency_s, one.s_per_byte))(collective_lines(EXCHANGE, 4, 1, H100, None))
    assert latency == pytest.approx((constants.base_us + constants.growth_us / 2**constants.power + EXTRA_US) * US)
    assert slope == pytest.approx(3 / 4 * FAR_S / constants.rate)


def test_a_transfer_between_nodes_takes_the_first_or_the_last_protocol() -> None:
    found, ends = collective_lines(SEND, 4, 8, H100, MEASURED), (fabrics().ring[0], fabrics().ring[-1])
    assert found.latency_s == pytest.approx([(p.base_us + p.net_hop_us + EXTRA_US) * US for p in ends])
    assert found.s_per_byte == pytest.approx([FAR_S / p.rate for p in ends])


@pytest.mark.parametrize(("kind", "sent"), [(REDUCE, 2 * 3 / 4), (GATHER, 3 / 4), (EXCHANGE, 3 / 4), (BROADCAST, 1)])
def test_lines_inside_a_node_are_those_of_its_constants(kind: Collective, sent: float) -> None:
    op = {REDUCE: MEASURED.all_reduce, EXCHANGE: MEASURED.all_to_all}.get(kind, MEASURED.all_gather)
    found, r = collective_lines(kind, 1, 4, H100, MEASURED), 3
    first = op.a_us + op.h_us * r
    assert found.latency_s == pytest.approx(
        [first * US, (first + op.d2) * US, (first + op.d2 + op.d3 + op.h3 * r) * US]
    )
    scale = MEASURED.link_gb_s * 1e9 / NEAR.bytes_per_s
    slopes = [sent * (r + op.kappa) / r / (bandwidth * 1e9) * scale for bandwidth in (op.bw1, op.bw2, op.bw3)]
    assert found.s_per_byte == pytest.approx(slopes)


def test_steps_grow_as_a_logarithm_beyond_eight_ranks() -> None:
    assert [hop_count(ranks) for ranks in (2, 8)] == [1, 7]
    assert hop_count(15) == pytest.approx(7 * (1 + np.log(2)))


def test_rates_of_the_links_of_a_cluster() -> None:
    """A node's constants hold for NVLink of their own rate; other links have those of their kind."""
    faster = replace(H100, links=(replace(NEAR, bytes_per_s=2 * NEAR.bytes_per_s), FAR))
    slow, fast = (collective_lines(GATHER, 1, 8, cluster, MEASURED) for cluster in (H100, faster))
    assert fast.latency_s == slow.latency_s
    assert fast.s_per_byte == pytest.approx([slope / 2 for slope in slow.s_per_byte])
    pcie = replace(H100, links=(replace(NEAR, kind="pcie"), FAR))
    assert collective_lines(GATHER, 1, 8, pcie, MEASURED) == collective_lines(GATHER, 1, 8, pcie, None)
    assert collective_lines(GATHER, 1, 8, H100, MEASURED) != collective_lines(GATHER, 1, 8, H100, None)


def test_of_two_equal_resources_either_takes_a_little_longer() -> None:
    assert slower(3.0, 3.0) == pytest.approx(3 * 2 ** (1 / 8))
    assert slower(5.0, 0.0) == 5


def test_of_two_equal_lines_either_is_a_little_faster() -> None:
    assert float(Lines((1.0,), (2.0,)).seconds(np.array(3.0))) == pytest.approx(7)
    assert float(Lines((1.0, 1.0), (2.0, 2.0)).seconds(np.array(3.0))) == pytest.approx(7 / 2 ** (1 / 8))


def test_factors_of_host_memory() -> None:
    path = HostPath(pair_gb_s=20, power=2)
    assert path.share(known=2, gpus=8) == pytest.approx(1 / 16)


@pytest.mark.parametrize("ranks", [2, 4, 5])
def test_few_gpus_of_a_node_reduce_in_rings(ranks: int) -> None:
    assert [each.name for each in algorithms(REDUCE, 1, ranks, H100, MEASURED)] == ["Ring"]
    assert [each.name for each in algorithms(REDUCE, 4, ranks, H100, MEASURED)] == ["Ring", "Tree"]


def test_switches_of_a_node_add_for_many_gpus_of_architectures_that_can() -> None:
    assert [each.name for each in algorithms(REDUCE, 1, 8, H100, MEASURED)] == ["Ring", "NVLS"]
    assert [each.name for each in algorithms(REDUCE, 2, 8, H100, MEASURED)] == ["Ring", "Tree", "NVLSTree"]
    for kind in (GATHER, SCATTER, BROADCAST):
        assert [each.name for each in algorithms(kind, 2, 8, H100, MEASURED)] == ["Ring"]
    old = replace(H100, links=(replace(NEAR, reduces=False), FAR))
    assert [each.name for each in algorithms(REDUCE, 1, 8, old, MEASURED)] == ["Ring"]
    assert [each.name for each in algorithms(REDUCE, 1, 8, load_cluster("a100"), None)] == ["Ring"]


def test_switches_between_nodes_add_where_the_cluster_says_so() -> None:
    adding = replace(H100, links=(NEAR, replace(FAR, reduces=True)))
    found = {each.name: each.lines for each in algorithms(REDUCE, 8, 8, adding, MEASURED)}
    assert list(found) == ["Ring", "Tree", "NVLSTree", "CollNet"]
    (latency,), (slope,) = found["CollNet"].latency_s, found["CollNet"].s_per_byte
    table, (line,) = fabrics().in_switch, fabrics().in_switch.architectures["hopper"].lines
    assert latency == pytest.approx((table.fabric.base_us + table.fabric.net_hop_us + EXTRA_US) * US)
    assert slope == pytest.approx(slower(1.75 / (line.bus_gb_s * 1e9), FAR_S / 8) / table.fabric.rate)


def test_an_all_reduce_that_switches_add_takes_the_lines_of_its_architecture() -> None:
    ring, added = algorithms(REDUCE, 1, 8, H100, MEASURED)
    line, *_ = fabrics().in_switch.architectures["hopper"].lines
    assert added.lines.latency_s[0] == pytest.approx(line.latency_us * US)
    assert added.lines.s_per_byte[0] == pytest.approx(1.75 / (line.bus_gb_s * 1e9))
    assert chosen((ring, added), 1e9) == (added, "Simple")
    assert chosen((ring, added), 1e3) == (ring, "LL")


def test_trees_of_switches_send_all_bytes_over_two_nodes_and_twice_over_more() -> None:
    line, tree = fabrics().in_switch.architectures["hopper"].lines[-1], fabrics().in_switch.tree
    near = 1.75 / (line.bus_gb_s * 1e9)
    for nodes, passed, constants in ((2, 1, tree.pair), (4, 2, tree.more)):
        *_, found = algorithms(REDUCE, nodes, 8, H100, MEASURED)
        assert found.lines.s_per_byte[0] == pytest.approx(slower(near, passed * FAR_S / 8) / constants.rate)
        hops_us = 2 * log2(nodes) * (constants.net_hop_us + constants.crossings * EXTRA_US)
        assert found.lines.latency_s[0] == pytest.approx((constants.base_us + hops_us) * US)


def test_racks_reduce_much_in_rings_over_some_of_their_nics() -> None:
    rack = load_cluster("gb200-nvl72")
    names = [[(each.name, each.protocols) for each in algorithms(REDUCE, nodes, 72, rack, None)] for nodes in (2, 3)]
    every = ("LL", "LL128", "Simple")
    assert names == [
        [("Ring", every), ("Tree", every), ("NVLSTree", ("Simple",))],
        [("Ring", every), ("Tree", ("LL",))],
    ]
    few, many = (algorithms(GATHER, 20, ranks, rack, None)[0].lines.s_per_byte[-1] for ranks in (12, 72))
    assert many == pytest.approx(few, rel=0.02)


def test_a_fabric_may_change_a_protocol() -> None:
    cloud = load_cluster("aws-p5")
    far = cloud.links[1]
    _, ll128, simple = (p.on("efa") for p in fabrics().ring)
    assert (ll128.rate, simple.crossings) != (fabrics().ring[1].rate, fabrics().ring[2].crossings)
    extra_us = far.latency_s / US - fabrics().reference_latency_us
    found = algorithms(GATHER, 3, 1, cloud, None)[0].lines
    expected = [p.base_us + 2 * (p.net_hop_us + p.crossings * extra_us) for p in (ll128, simple)]
    assert [time_s / US for time_s in found.latency_s[1:]] == pytest.approx(expected)
    wire = far.bytes_per_s * fabrics().efficiency["efa"]
    assert found.s_per_byte[1:] == pytest.approx([2 / 3 / wire / p.rate for p in (ll128, simple)])
    assert fabrics().ring[1].on("infiniband") is fabrics().ring[1]


# -- messages ----------------------------------------------------------------------------------------------------------


def sent(flows: group_traffic.Flows) -> dict[tuple[int, int], float]:
    return {(src, dst): weight for src, dst, weight in zip(*(column.tolist() for column in flows), strict=True)}


def both_ways(*pairs: tuple[int, int], share: float) -> dict[tuple[int, int], float]:
    return {ends: share for pair in pairs for ends in (pair, pair[::-1])}


def test_a_ring_of_all_ranks_and_rings_over_the_rails_of_nodes() -> None:
    layout = Layout(size=6, inner=1, per_node=3, borders=0, n_ranks=6)
    (whole,) = group_traffic.ring(layout, 0.8)
    assert sent(whole) == both_ways((0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 0), share=0.4)
    far, near = group_traffic.rails(Layout(9, 1, 3, 0, 9), 0.9, 0.6)
    lanes = [(lane + 3 * node, lane + 3 * ((node + 1) % 3)) for lane in range(3) for node in range(3)]
    assert sent(far) == pytest.approx(both_ways(*lanes, share=0.15))
    circles = [(3 * node + place, 3 * node + (place + 1) % 3) for place in range(3) for node in range(3)]
    assert sent(near) == pytest.approx(both_ways(*circles, share=0.3))


def test_trees_of_an_odd_number_of_nodes_are_shifted_and_of_an_even_number_mirrored() -> None:
    """Node 0 is the root of the first tree, and every odd one a leaf of it."""
    first, second = group_traffic.trees(Layout(3, 1, 1, 0, 3), 0.0)
    assert sent(first) == both_ways((2, 0), (1, 2), share=0.5)
    assert sent(second) == both_ways((0, 1), (2, 0), share=0.5)
    first, second = group_traffic.trees(Layout(4, 1, 1, 0, 4), 0.0)
    assert sent(first) == both_ways((2, 0), (1, 2), (3, 2), share=0.5)
    assert sent(second) == both_ways((1, 3), (2, 1), (0, 1), share=0.5)
    assert len(list(group_traffic.trees(Layout(4, 1, 2, 0, 4), 0.5))) == 3


def test_an_exchange_sends_an_equal_share_to_every_other_rank() -> None:
    (flows,) = group_traffic.direct(Layout(4, 1, 1, 0, 4))
    assert sent(flows) == {(a, b): 1 / 4 for a in range(4) for b in range(4) if a != b}


def test_transfers_go_to_the_next_rank_or_stage() -> None:
    (flows,) = group_traffic.hops(Layout(2, 1, 2, 0, 4))
    assert sent(flows) == {(0, 1): 1, (1, 0): 1, (2, 3): 1, (3, 2): 1}
    (flows,) = group_traffic.hops(Layout(2, 2, 1, 2, 6))  # three stages of two ranks and two borders
    assert sent(flows) == {(0, 2): 1, (1, 3): 1, (2, 4): 1, (3, 5): 1}
    (flows,) = group_traffic.hops(Layout(2, 2, 1, 3, 6))
    assert sent(flows) == {(0, 2): 1, (1, 3): 1, (2, 4): 1, (3, 5): 1, (4, 0): 1, (5, 1): 1}


# -- on a topology -----------------------------------------------------------------------------------------------------


def test_the_ways_of_an_all_reduce_over_four_nodes_behind_a_switch() -> None:
    """Links as fast as the cluster's, and twice as slow to cross: 2.7 us a link in place of 1.35 us."""
    single = replace(H100, links=(replace(NEAR, size=1), FAR))
    network = load_network("switch:4@50/2700ns")
    ways = OnTopology(network, 4, single, None).ways(REDUCE, group(4, 1))
    extra_us = 2 * 2.7 - fabrics().reference_latency_us
    rings = [(p.base_us + 2 * 3 * (p.net_hop_us + p.crossings * extra_us)) * US for p in fabrics().ring]
    trees = [(p.base_us + 2 * log2(4) * (p.net_hop_us + p.crossings * extra_us)) * US for p in fabrics().tree]
    assert [way.latency_s for way in ways] == pytest.approx(rings + trees)
    assert [way.tree for way in ways] == [False] * 3 + [True] * 3
    assert [way.s_per_byte for way in ways[:3]] == pytest.approx([2 * 3 / 4 * FAR_S / p.rate for p in fabrics().ring])


def test_links_carry_what_a_ring_lays_on_them() -> None:
    """Each of 4 NPUs sends half of 3 / 4 of the buffer each way round, twice for an all-reduce."""
    single = replace(H100, links=(replace(NEAR, size=1), FAR))
    topology = OnTopology(load_network("switch:4@50/1350ns"), 4, single, None)
    for kind, rounds in ((GATHER, 1), (REDUCE, 2)):
        way = topology.way(kind, group(4, 1), 1e10)
        assert topology.carried(kind, group(4, 1), way) == pytest.approx(np.full(8, rounds * 3 / 4 * FAR_S))
        assert topology.busiest_link(kind, group(4, 1), 1e10).s_per_byte == pytest.approx(rounds * 3 / 4 / 50e9)


# -- patterns ----------------------------------------------------------------------------------------------------------


class Once(MessagePattern):
    """Every rank sends half of the gradients to the next one, twice in a row."""

    name = "once"

    def rounds(self, group: CommGroup, size_bytes: float) -> list[Round]:
        return [Round([(rank, (rank + 1) % group.size, size_bytes / 2) for rank in range(group.size)], 2)]

    def local_bytes(self, group: CommGroup, size_bytes: float) -> float:
        return 3 * size_bytes


def test_sums_add_the_time_of_passes_over_memory_to_that_of_messages() -> None:
    single = replace(H100, links=(replace(NEAR, size=1), FAR))
    with_memory = Wires(single, 4, memory_bytes_per_s=1e12, launch_s=5e-6)
    times = [Once().seconds(np.array([1e8]), group(4, 1), wires)[0] for wires in (Wires(single, 4), with_memory)]
    assert times[1] - times[0] == pytest.approx(5e-6 + 3e8 / 1e12)
    assert times[0] > 2 * 1e8 / 2 * FAR_S


def test_rounds_in_a_node_step_as_an_all_reduce_does_at_the_rates_of_an_exchange() -> None:
    """Three rounds over routes that are 2 us longer than the link; then one over a shorter route."""
    assert MEASURED is not None
    op, reduce, wires = MEASURED.all_to_all, MEASURED.all_reduce, Wires(H100, 8, measured=MEASURED)
    lines = _lines_in_node(
        [_Timed(3, 0.0, NEAR.latency_s + 2e-6, 0.0), _Timed(1, 0.0, 0.0, 0.0)], 1e-3, group(8, 8), wires
    )
    first, second, third = op.a_us, op.a_us + op.d2, op.a_us + op.d2 + op.d3
    hop, last = reduce.h_us / 2, (reduce.h_us + reduce.h3) / 2
    expected = (first + 4 * hop + 6, second + 4 * hop + 6, third + 4 * last + 6)
    assert [time_s / US for time_s in lines.latency_s] == pytest.approx(expected)
    assert lines.s_per_byte == pytest.approx((1e-3 * op.bw3 / op.bw1, 1e-3 * op.bw3 / op.bw2, 1e-3))


def test_rounds_between_nodes_have_a_hop_of_the_network_or_of_the_node_each() -> None:
    rounds = [_Timed(3, 0.0, NEAR.latency_s + 2e-6, 0.0), _Timed(2, 0.0, 0.0, 5e-6)]
    lines = _lines_between_nodes(rounds, 1e-3, group(16, 8), Wires(H100, 16))
    far_us = 5 - fabrics().reference_latency_us
    expected = [p.base_us + 3 * (p.node_hop_us + 2) + 2 * (p.net_hop_us + far_us) for p in fabrics().ring]
    assert [time_s / US for time_s in lines.latency_s] == pytest.approx(expected)
    assert lines.s_per_byte == pytest.approx([1e-3 / p.rate for p in fabrics().ring])


def test_servers_are_spread_over_the_nodes_first_and_a_single_one_is_rank_0() -> None:
    assert ParameterServer(1).places(group(16, 8)) == [0]
    assert ParameterServer(3).places(group(16, 8)) == [0, 8, 1]
    assert ParameterServer(99).places(group(4, 2)) == [0, 2, 1, 3]
    (push,) = ParameterServer(2).rounds(group(4, 2), 100.0)
    assert push.times == 2
    assert sorted(push.messages) == [(0, 2, 50.0), (1, 0, 50.0), (1, 2, 50.0), (2, 0, 50.0), (3, 0, 50.0), (3, 2, 50.0)]
    assert ParameterServer(2).local_bytes(group(4, 2), 100.0) == 250.0


def test_one_rank_is_free_and_a_hundredth_of_the_gradients_is_the_usual_share() -> None:
    assert collective_s(REDUCE, 1e9, group(1, 1), H100) == 0
    assert TopK(4).density == 0.01


# -- textbook costs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("near_gb_s", "far_gb_s"), [(60, 25), (60, 35), (25, 60)])
def test_steps_take_the_fullest_link_at_its_share_of_the_rate(near_gb_s: float, far_gb_s: float) -> None:
    """Two nodes of two GPUs, rings both ways round: each GPU sends a quarter of the buffer to either neighbour, and
    what goes to the other node crosses its own node first."""
    fabric = fabric_of(load_network(f"switch:2@{near_gb_s}/100,switch:2@{far_gb_s}/700"))
    flows = list(group_traffic.ring(Layout.of(CommGroup.on_mesh("dp", 4, 1, 2), 4), 0.5))
    plain = steps_of(flows, fabric, 2, AlphaBeta())
    assert plain.s_per_byte == pytest.approx(max(0.5 / near_gb_s, 0.25 / far_gb_s) / 1e9)
    assert (plain.near_s, plain.far_s) == pytest.approx((200e-9, 1600e-9))
    slow = steps_of(flows, fabric, 2, AlphaBeta(efficiency=0.5, hop_latency_us=3.0))
    assert slow.s_per_byte == pytest.approx(2 * plain.s_per_byte)
    assert (slow.near_s, slow.far_s) == pytest.approx((3e-6, 3e-6))


def test_a_textbook_ring_crosses_each_node_once_and_a_tree_climbs_and_comes_back() -> None:
    """Four nodes of four GPUs: 15 steps, four of them to the next node; a tree of four nodes over a chain of four."""
    fabric = fabric_of(load_network("switch:4@400/100,switch:4@50/700"))
    whole, node = (Layout.of(CommGroup.on_mesh("dp", size, 1, 4), 16) for size in (16, 4))
    at_once = AlphaBeta(hop_latency_us=1.0)
    assert ring_line(whole, 0.5, fabric, 4, at_once)[0] == pytest.approx(15e-6)
    assert ring_line(whole, 0.5, fabric, 4, AlphaBeta())[0] == pytest.approx(4 * 1400e-9 + 11 * 200e-9)
    assert ring_line(node, 0.5, fabric, 4, AlphaBeta())[0] == pytest.approx(3 * 200e-9)
    assert tree_line(whole, fabric, 4, at_once)[0] == pytest.approx(2 * (3 + 2) * 1e-6)
    assert tree_line(whole, fabric, 4, AlphaBeta())[0] == pytest.approx(2 * (3 * 200e-9 + 2 * 1400e-9))
    assert tree_line(node, fabric, 4, at_once)[0] == pytest.approx(2 * 2 * 1e-6)
