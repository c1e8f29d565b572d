"""Topologies: routes go over links, arrive, and are as short as they should be."""

import re
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_topologies import sizes_of, topologies
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import shortest_path

from forerun.common.errors import ForerunError, UnknownName
from forerun.core.network.network_file import parse_topology
from forerun.core.network.topology import base, fully_connected, stacked
from forerun.core.network.topology import dragonfly as dragonfly_module
from forerun.core.network.topology.base import Links, Topology
from forerun.core.network.topology.dragonfly import Dragonfly
from forerun.core.network.topology.registry import TOPOLOGIES, find, make
from forerun.core.network.topology.stacked import Stacked


def all_pairs(topology):
    npus = np.arange(topology.n_npus, dtype=np.int32)
    return np.repeat(npus, len(npus)), np.tile(npus, len(npus))


def graph_distance(topology):
    links = topology.links()
    graph = csr_matrix((np.ones(len(links)), (links.src, links.dst)), shape=(topology.n_devices,) * 2)
    return shortest_path(graph, unweighted=True)[: topology.n_npus, : topology.n_npus]


def test_every_registered_topology_is_tested_here():
    assert set(sizes_of) == set(TOPOLOGIES)


@settings(max_examples=80, deadline=None)
@given(topologies())
def test_routes_arrive_over_links_and_are_shortest(topology):
    topology.check()
    src, dst = all_pairs(topology)
    hops = topology.hop_counts(src, dst)
    np.testing.assert_array_equal(hops, topology.routes(src, dst).hops)
    hops = hops.reshape(topology.n_npus, -1)
    np.testing.assert_array_equal(hops, hops.T)
    if not isinstance(topology, Dragonfly):  # two global links may be shorter than the way to the one
        np.testing.assert_array_equal(hops, graph_distance(topology))


@settings(max_examples=40, deadline=None)
@given(topologies())
def test_links_come_in_pairs_of_both_directions(topology):
    links = topology.links()
    there = set(zip(links.src, links.dst, links.bandwidth_gbps, links.latency_ns, strict=True))
    assert there == {(dst, src, bandwidth, latency) for src, dst, bandwidth, latency in there}
    assert len(there) == len(links)


@settings(max_examples=30, deadline=None)
@given(st.lists(topologies(), min_size=2, max_size=3).filter(lambda dims: np.prod([d.n_npus for d in dims]) < 300))
def test_a_stack_settles_the_lowest_dimension_first(dims):
    stack = Stacked(tuple(dims))
    stack.check()
    src, dst = all_pairs(stack)
    np.testing.assert_array_equal(stack.hop_counts(src, dst), stack.routes(src, dst).hops)
    for goal in (stack.n_npus - 1, stack.n_npus // 2):
        npus = np.array([device for device in stack.route(0, goal) if device < stack.n_npus])
        settled = [
            npus // stride % each.n_npus == goal // stride % each.n_npus
            for each, stride in zip(dims, stack.strides, strict=False)
        ]
        lowest_open = np.argmin([*settled, np.zeros(len(npus), bool)], axis=0)
        assert (np.diff(lowest_open) >= 0).all()
        assert lowest_open[-1] == len(dims)


@settings(max_examples=30, deadline=None)
@given(topologies())
def test_the_table_and_the_steps_give_the_same_routes(topology):
    src, dst = all_pairs(topology)
    table = topology.next_link()
    assert table.shape == (topology.n_devices, topology.n_npus)
    assert ((table[: topology.n_npus] < 0) == np.eye(topology.n_npus, dtype=bool)).all()
    by_table = topology.routes(src, dst)
    by_steps = base._paths(len(src), list(topology._steps(src, dst)))
    np.testing.assert_array_equal(by_table.first, by_steps.first)
    np.testing.assert_array_equal(by_table.link, by_steps.link)


def test_a_ring_of_two_has_one_link_each_way():
    assert len(make("Ring", 2, 50, 500).links()) == 2


def test_a_ring_goes_clockwise_on_a_tie():
    assert make("Ring", 6, 50, 500).route(4, 1) == [4, 5, 0, 1]


def test_xy_routing_goes_along_x_first():
    assert make("Mesh2D", (4, 3), 50, 500).route(0, 11) == [0, 1, 2, 3, 7, 11]


def test_a_torus_takes_the_shorter_way_round():
    assert make("Torus2D", (5, 4), 50, 500).route(0, 4 + 5 * 2) == [0, 4, 9, 14]
    assert make("Torus3D", (3, 3, 3), 50, 500).route(0, 26) == [0, 2, 8, 26]


def test_a_tree_has_its_npus_at_the_leaves_or_as_nodes():
    assert make("Tree", 4, 50, 500).route(0, 3) == [0, 4, 6, 5, 3]
    assert make("Tree", 7, 50, 500, npu_nodes=True).route(3, 6) == [3, 1, 0, 2, 6]


def test_a_full_fat_tree_has_the_switches_of_the_paper():
    tree = make("FatTree", 128, 50, 500, radix=8)
    assert tree.n_devices - tree.n_npus == 5 * 8**2 // 4
    assert len(tree.links()) == 2 * 3 * 128
    assert tree.hops(0, 1) == 2
    assert tree.hops(0, 4) == 4
    assert tree.hops(0, 16) == 6


def test_oversubscription_leaves_out_uplinks():
    tree = make("FatTree", 128, 50, 500, radix=8, oversubscription=2, edge_oversubscription=4)
    links = tree.links()
    edge, aggregation = (links.src >= 128) & (links.src < 160), links.src >= 160
    assert (edge & (links.dst >= 160)).sum() == 32 * 1
    assert (aggregation & (links.dst > links.src)).sum() == 8 * 1 * 2


def test_the_shift_permutations_of_a_full_fat_tree_share_no_link():
    tree = make("FatTree", 54, 50, 500)
    npus = np.arange(54, dtype=np.int32)
    for shift in range(9, 54, 9):
        used = tree.routes(npus, (npus + shift) % 54).link
        assert len(used) == len(set(used))


def test_another_rail_is_reached_by_crossing_inside_the_node_first():
    rail = make("Rail", (4, 3), 50, 500)
    assert rail.route(0, 8) == [0, 15, 8]
    assert rail.route(0, 9) == [0, 12, 1, 16, 9]
    assert rail.route(0, 3) == [0, 12, 3]


def test_links_inside_a_node_have_their_own_bandwidth():
    links = make("Rail", (4, 2), 50, 500, node_bandwidth_gbps=450.0, node_latency_ns=0.0).links()
    assert (
        sorted(zip(links.bandwidth_gbps, links.latency_ns, strict=True)) == [(50.0, 500.0)] * 16 + [(450.0, 0.0)] * 16
    )


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 2), st.integers(1, 4), st.integers(1, 6), st.integers(1, 4))
def test_a_dragonfly_crosses_at_most_one_global_link(npus, routers, groups, global_links):
    if npus * routers * groups < 2 or global_links > routers:
        return
    dragonfly = make("Dragonfly", (npus, routers, groups), 50, 500, global_links=global_links, global_latency_ns=9.0)
    dragonfly.check()
    links = dragonfly.links()
    is_global = links.latency_ns == 9.0
    assert is_global.sum() == groups * (groups - 1) * global_links
    src, dst = all_pairs(dragonfly)
    path = dragonfly.routes(src, dst)
    crossed = np.bincount(np.repeat(np.arange(len(src)), path.hops), weights=is_global[path.link], minlength=len(src))
    per_group = npus * routers
    np.testing.assert_array_equal(crossed, src // per_group != dst // per_group)
    assert path.hops.max() <= 5


@pytest.mark.parametrize(
    ("name", "sizes", "options", "message"),
    [
        ("Ring", 1, {}, "at least 2 NPUs"),
        ("Ring", 0, {}, "n is 0"),
        ("Ring", (4, 4), {}, "Ring takes 1 size (n), got 2"),
        ("Mesh2D", 4, {}, "Mesh2D takes 2 sizes (nx, ny), got 1"),
        ("Ring", True, {}, "n is True"),
        ("Ring", 2**24 + 1, {}, "more than 16,777,216"),
        ("Tree", 4, {"arity": 1}, "at least 2"),
        ("FatTree", 17, {"radix": 4}, "join at most 16 NPUs"),
        ("FatTree", 16, {"radix": 5}, "even number"),
        ("FatTree", 16, {"oversubscription": 3}, "does not divide"),
        ("Dragonfly", (1, 2, 3), {"global_links": 3}, "only 2 routers"),
        ("Rail", (2, 2), {"node_bandwidth_gbps": 0.0}, "above 0"),
        ("Ring", 4, {"arity": 2}, "Ring has no options"),
    ],
)
def test_sizes_and_options_that_make_no_sense_are_refused(name, sizes, options, message):
    with pytest.raises(ForerunError, match=re.escape(message)):
        make(name, sizes, 50.0, 500.0, **options)


@pytest.mark.parametrize(
    ("bandwidth", "latency"), [(0, 1), (-1, 1), (float("nan"), 1), (1, -1), (1, float("inf")), ("1", 1)]
)
def test_bandwidths_and_latencies_that_make_no_sense_are_refused(bandwidth, latency):
    with pytest.raises(ForerunError, match="it has to be"):
        make("Ring", 4, bandwidth, latency)


def test_names_are_found_whatever_their_spelling():
    assert find("fully-connected") is find("FullyConnected") is find("FULLY_CONNECTED")
    with pytest.raises(UnknownName, match="did you mean Mesh2D"):
        find("mesh")
    with pytest.raises(UnknownName, match="known: edge_oversubscription, oversubscription, radix"):
        make("FatTree", 16, 50, 500, ratio=2)


def test_a_table_of_routes_that_would_be_too_large_is_refused():
    with pytest.raises(ForerunError, match="4,294,967,296 entries"):
        make("Ring", 65_536, 50, 500).next_link()


def test_too_many_links_are_refused():
    with pytest.raises(ForerunError, match="links, more than"):
        make("FullyConnected", 100_000, 50, 500).links()


@pytest.mark.parametrize(
    ("module", "topology", "n_links"),
    [
        (fully_connected, make("FullyConnected", 5, 50, 500), 5 * 4),
        (dragonfly_module, make("Dragonfly", (3, 3, 4), 50, 500, global_links=2), 4 * 3 * 2 + 4 * 3 * 2),
        (stacked, Stacked((make("Ring", 4, 50, 500), make("Ring", 3, 50, 500))), 3 * 8 + 4 * 6),
        (base, make("Ring", 4, 50, 500), 8),
    ],
    ids=lambda each: type(each).__name__,
)
def test_the_most_links_that_a_fabric_may_have(module, topology, n_links, monkeypatch):
    monkeypatch.setattr(module, "MAX_LINKS", n_links)
    topology.links()
    monkeypatch.setattr(module, "MAX_LINKS", n_links - 1)
    with pytest.raises(ForerunError, match=f"it has {n_links:,} links.*, more than {n_links - 1:,}"):
        topology.links()


def test_the_most_devices_and_routes_that_a_fabric_may_have(monkeypatch):
    monkeypatch.setattr(base, "MAX_DEVICES", 9)
    make("Switch", 8, 50, 500)
    with pytest.raises(ForerunError, match="more than 9 devices"):
        make("Switch", 9, 50, 500)
    monkeypatch.setattr(base, "_MAX_TABLE", 72)
    make("Switch", 8, 50, 500).next_link()
    monkeypatch.setattr(base, "_MAX_TABLE", 71)
    with pytest.raises(ForerunError, match="9 devices and 8 NPUs would have 72 entries, more than 71"):
        make("Switch", 8, 50, 500).next_link()


@pytest.mark.parametrize("rows", [1, 7, 8, 1000])
def test_a_table_that_is_made_in_blocks_is_the_same(rows, monkeypatch):
    whole = make("Tree", 8, 50, 500).next_link()
    monkeypatch.setattr(base, "_BLOCK", rows)
    np.testing.assert_array_equal(make("Tree", 8, 50, 500).next_link(), whole)


def test_links_have_the_bandwidth_and_latency_of_their_topology_in_both_directions():
    links = make("Ring", 3, 50, 500).links()
    assert sorted(zip(links.src.tolist(), links.dst.tolist(), strict=True)) == [
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 2),
        (2, 0),
        (2, 1),
    ]
    assert set(links.bandwidth_gbps) == {50.0}
    assert set(links.latency_ns) == {500.0}
    far = make("Dragonfly", (1, 2, 3), 50, 500, global_bandwidth_gbps=25.0).links()
    assert sorted(far.bandwidth_gbps) == [25.0] * 6 + [50.0] * 18
    assert set(far.latency_ns) == {500.0}


def test_global_links_of_a_dragonfly_go_round_the_routers():
    """Two routers (NPUs 0 to 5 have the routers 6 to 11); the group after the own hangs at router 0, the next at 1."""
    links = make("Dragonfly", (1, 2, 3), 50, 500, global_latency_ns=9.0).links()
    over = links.latency_ns == 9.0
    ends = {(src, dst) for src, dst in zip(links.src[over].tolist(), links.dst[over].tolist(), strict=True)}
    assert ends == {(6, 9), (9, 6), (8, 11), (11, 8), (10, 7), (7, 10)}


def test_large_fabrics_give_single_routes():
    torus = make("Torus3D", (64, 32, 32), 50, 500)
    assert torus.n_npus == 65_536
    assert torus.hops(0, 65_535) == 3
    assert torus.route(0, 65_535) == [0, 63, 63 + 64 * 31, 65_535]


def test_npus_that_are_not_there_are_refused():
    with pytest.raises(ForerunError, match="there is no NPU 8; its NPUs are 0 to 7"):
        make("Switch", 8, 50, 500).hops(0, 8)


@dataclass(frozen=True)
class Line(Topology):
    """Three NPUs in a line; where each sends what is not for it."""

    after: tuple[int, int, int]

    @property
    def n_npus(self) -> int:
        return 3

    def links(self) -> Links:
        return self.both_ways((np.arange(2), np.arange(2) + 1))

    def next_device(self, at, to):
        return np.array(self.after, np.int32)[at]


@pytest.mark.parametrize("walk_table", [0, 1 << 22])
@pytest.mark.parametrize(
    ("after", "message"),
    [((1, 0, 1), "a route is a cycle"), ((2, 0, 1), "goes from device 0 to 2, but there is no such link")],
)
def test_routing_that_does_not_arrive_is_noticed(after, message, walk_table, monkeypatch):
    monkeypatch.setattr(base, "_WALK_TABLE", walk_table)
    line = Line(after, bandwidth_gbps=1.0, latency_ns=1.0)
    with pytest.raises(ForerunError, match=message):
        line.routes(np.array([0], np.int32), np.array([2], np.int32))


@given(topologies())
@settings(deadline=None)
def test_what_the_links_of_an_npu_carry_is_what_leaves_the_one_with_least(topology):
    links = topology.links()
    leaving = [links.bandwidth_gbps[links.src == npu].sum() for npu in range(topology.n_npus)]
    assert topology.npu_bandwidth_gbps == pytest.approx(min(leaving))


@pytest.mark.parametrize("text", ["ring:4,switch:2", "mesh2d:3x2,fullyconnected:3@25", "torus2d:4x4,ring:3"])
def test_links_of_an_npu_in_all_dimensions_are_the_sum_of_each(text):
    network = parse_topology(text, [50.0], [500.0])
    assert network.npu_bytes_per_ns == pytest.approx(network.topology().npu_bandwidth_gbps)
