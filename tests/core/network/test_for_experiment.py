"""Topologies by the names that experiments have: what they join, what they cost, and which are never the faster."""

from dataclasses import replace
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.common.errors import ForerunError
from forerun.core.cost.op_costs import on_topology
from forerun.core.network.alpha_beta import AlphaBeta
from forerun.core.network.for_experiment import TOPOLOGY_TYPES, grid, topology_of
from forerun.core.network.patterns import Wires
from forerun.core.network.patterns_collectives import Nccl, RingAllReduce
from forerun.core.network.patterns_messages import ParameterServer
from forerun.core.program.groups import CommGroup
from forerun.core.program.types import Collective
from forerun.describe.cluster.catalog import load_cluster

H100 = load_cluster("h100-sxm")
SINGLE = replace(H100, links=(replace(H100.links[0], size=1), H100.links[1]))
KINDS = [kind for kind in Collective if kind != Collective.NONE]
TOPOLOGIES = [name for name in TOPOLOGY_TYPES if name != "cluster"]
NODES = (2, 4, 8, 16, 64)
CLUSTERS = pytest.mark.parametrize("cluster", [SINGLE, H100], ids=["1", "8"])


def seconds(kind, size_bytes, topology, cluster, nodes, **options):
    """Of one collective of all GPUs, as NCCL runs it."""
    n = nodes * cluster.node_size
    network = topology_of(topology, cluster, nodes, **options)
    group = CommGroup.on_mesh("dp", n, 1, cluster.node_size)
    return float(on_topology(network, cluster, n).lines(kind, group).seconds(np.array(float(size_bytes))))


def pattern_s(pattern, size_bytes, topology, cluster, nodes):
    n = nodes * cluster.node_size
    wires = Wires(cluster, n, topology_of(topology, cluster, nodes))
    group = CommGroup.on_mesh("dp", n, 1, cluster.node_size)
    return float(pattern.seconds(np.array([float(size_bytes)]), group, wires)[0])


def sent_gb_s(network, per_node):
    """What the best placed GPU sends to other nodes, over all of its links there."""
    topology = network.topology()
    links = topology.links()
    ends = np.stack([links.src, links.dst])
    inside = (ends < network.n_npus).all(axis=0) & (ends[0] // per_node == ends[1] // per_node)
    mine = (links.src < network.n_npus) & ~inside
    return float(np.bincount(links.src[mine], weights=links.bandwidth_gbps[mine]).max())


# -- what they are ---------------------------------------------------------------------------------------------


@CLUSTERS
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("nodes", [*NODES, 3, 7, 12])
def test_every_route_arrives(topology, nodes, cluster):
    network = topology_of(topology, cluster, nodes)
    assert network.n_npus == nodes * cluster.node_size
    assert not network.gib
    if network.n_npus <= 64:
        network.topology().check()


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("nodes", NODES)
def test_no_gpu_has_more_bandwidth_in_one_topology_than_in_another(topology, nodes):
    network = topology_of(topology, SINGLE, nodes, bandwidth_gbit_s=400)
    if topology == "rail":  # its node switch, which joins one GPU, leads nowhere
        assert network.dims[0].bandwidth_gbps == 50
    else:
        assert sent_gb_s(network, 1) == pytest.approx(50)


@pytest.mark.parametrize("topology", TOPOLOGY_TYPES)
def test_one_node_has_no_network(topology):
    assert topology_of(topology, H100, 1) is None
    assert topology_of("cluster", H100, 64) is None


def test_bandwidth_and_latency_are_those_of_the_cluster_unless_given():
    (inner, outer) = topology_of("full-mesh", H100, 4).dims
    assert (inner.topology, inner.sizes, inner.bandwidth_gbps) == ("Switch", (8,), 450)
    assert (outer.sizes, outer.bandwidth_gbps, outer.latency_ns) == ((4,), 50, 1350)
    (_, given) = topology_of("torus_2d", H100, 16, bandwidth_gbit_s=100, base_latency_us=1.5).dims
    assert (given.sizes, given.bandwidth_gbps, given.latency_ns) == ((4, 4), 12.5 / 4, 1500)


def test_grids_are_as_square_as_possible():
    assert [grid(n) for n in (1, 2, 4, 7, 8, 12, 64, 96)] == [
        (1, 1), (2, 1), (2, 2), (7, 1), (4, 2), (4, 3), (8, 8), (12, 8),
    ]  # fmt: skip
    assert all(prod(grid(n)) == n for n in range(1, 300))


@pytest.mark.parametrize("nodes", [3, 7, 13])
def test_a_torus_of_a_prime_number_of_nodes_is_a_ring(nodes):
    for kind in KINDS:
        ring, torus = (seconds(kind, 1e8, name, SINGLE, nodes) for name in ("ring", "torus_2d"))
        assert torus == pytest.approx(ring, rel=1e-12)


# -- what they cost --------------------------------------------------------------------------------------------


@CLUSTERS
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name.lower())
@pytest.mark.parametrize("nodes", [2, 8, 16, 64])
def test_no_topology_beats_a_full_mesh(topology, kind, nodes, cluster):
    for size_bytes in (1, 1e6, 1e9):
        best = seconds(kind, size_bytes, "full_mesh", cluster, nodes)
        assert best <= seconds(kind, size_bytes, topology, cluster, nodes) * (1 + 1e-9)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("nodes", NODES)
def test_no_topology_beats_the_bandwidth_of_a_gpu(topology, nodes):
    wire_s = (nodes - 1) / nodes * 1e9 / 50e9
    for kind, passes in ((Collective.ALL_GATHER, 1), (Collective.ALL_TO_ALL, 1), (Collective.ALL_REDUCE, 2)):
        assert seconds(kind, 1e9, topology, SINGLE, nodes) >= passes * wire_s
    assert pattern_s(RingAllReduce(AlphaBeta()), 1e9, topology, SINGLE, nodes) >= 2 * wire_s * (1 - 1e-9)


@CLUSTERS
@pytest.mark.parametrize("nodes", [2, 3, 4, 7, 8, 12, 16, 36, 64])
def test_wrapping_around_never_hurts_rings_and_exchanges(nodes, cluster):
    """Trees are left out: of two equally long ways round the torus takes one, where the mesh has only the other."""
    kinds = [kind for kind in KINDS if kind != Collective.ALL_REDUCE]
    for kind in kinds:
        torus, mesh = (seconds(kind, 1e9, name, cluster, nodes) for name in ("torus_2d", "mesh_2d"))
        assert torus <= mesh * (1 + 1e-9)
    torus, mesh = (pattern_s(RingAllReduce(), 1e9, name, cluster, nodes) for name in ("torus_2d", "mesh_2d"))
    assert torus <= mesh * (1 + 1e-9)


@CLUSTERS
def test_exchanges_suffer_where_the_middle_is_thin(cluster):
    """Between the halves of 64 nodes: switches join 32 to 32, a torus has 16 links of a quarter, a mesh 8 of them, a
    tree one whole link, a ring two halves."""
    names = ("full_mesh", "fat_tree", "torus_2d", "mesh_2d", "tree", "ring")
    times = [seconds(Collective.ALL_TO_ALL, 1e9, name, cluster, 64) for name in names]
    assert times == sorted(times)
    assert times[2] > 3 * times[1]
    assert times[4] > 1.9 * times[3]
    clockwise = {8: 1 + 2 + 3 + 4, 64: sum(range(33))}
    """links that all messages round a ring of so many nodes take in the direction that has the ties"""
    known = {"torus_2d": 4 * 8 * clockwise[8] / 63, "ring": 2 * clockwise[64] / 63, "tree": 32 * 32 / 63}
    if cluster is SINGLE:
        switch = seconds(Collective.ALL_TO_ALL, 1e12, "full_mesh", cluster, 64)
        for name, slower in known.items():
            ratio = seconds(Collective.ALL_TO_ALL, 1e12, name, cluster, 64) / switch
            assert ratio == pytest.approx(slower, rel=1e-3)


def test_rings_lose_no_bandwidth_on_a_ring_of_links():
    ring, best = (pattern_s(RingAllReduce(), 1e10, name, SINGLE, 16) for name in ("ring", "full_mesh"))
    assert ring == pytest.approx(best, rel=1e-9)


@CLUSTERS
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("size_bytes", [1e3, 1e6, 1e9])
def test_more_nodes_take_longer(topology, size_bytes, cluster):
    """But for the square of 4 nodes: where a ring of ranks changes rows it takes two links of a torus, which it finds
    busy; one of 8 nodes goes round. And but for the fat tree of 16 nodes, on whose links routes of large messages meet
    more often than on those of the tree of 64."""
    some = [nodes for nodes in NODES if nodes != {"torus_2d": 4, "fat_tree": 16}.get(topology)]
    times = [
        [pattern_s(pattern, size_bytes, topology, cluster, nodes) for nodes in some]
        for pattern in (Nccl(), RingAllReduce(), ParameterServer())
    ]
    for row in times:
        assert row == sorted(row)


def test_a_rail_costs_what_a_switch_for_each_place_does():
    for kind in KINDS:
        rail, mesh = (seconds(kind, 1e8, name, H100, 8) for name in ("rail", "full_mesh"))
        assert rail == pytest.approx(mesh)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(TOPOLOGIES),
    st.sampled_from(KINDS),
    st.sampled_from([2, 6, 8, 16]),
    st.floats(1, 1e10),
    st.floats(1.01, 20),
)
def test_more_bandwidth_and_less_latency_never_hurt(topology, kind, nodes, size_bytes, factor):
    base = seconds(kind, size_bytes, topology, H100, nodes, bandwidth_gbit_s=100, base_latency_us=5)
    assert seconds(kind, size_bytes, topology, H100, nodes, bandwidth_gbit_s=100 * factor, base_latency_us=5) <= base
    assert seconds(
        kind, size_bytes, topology, H100, nodes, bandwidth_gbit_s=100, base_latency_us=5 / factor
    ) <= base * (1 + 1e-12)


def test_oversubscription_slows_what_goes_through_the_core():
    full, thin = (seconds(Collective.ALL_TO_ALL, 1e9, "fat_tree", H100, 16, oversubscription=k) for k in (1, 2))
    assert thin > 1.3 * full


# -- what makes no sense ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topology", "options", "problem"),
    [
        ("thorus_2d", {}, "unknown topology_type 'thorus_2d'; did you mean torus_2d"),
        ("ring", {"oversubscription": 2}, "topology_type ring: oversubscription is 2; it goes with fat_tree"),
        ("fat_tree", {"oversubscription": 1.5}, "whole number"),
        ("fat_tree", {"oversubscription": 3}, "topology_type fat_tree: FatTree 16: oversubscription 3 does not divide"),
        ("fat_tree", {"radix": 5}, "radix is 5, it has to be an even number"),
        ("tree", {"radix": 1}, "topology_type tree: Tree 16: arity is 1"),
        ("ring", {"radix": 4}, "radix goes with fat_tree and tree"),
        ("ring", {"bandwidth_gbit_s": 0}, "bandwidth 0 Gbit/s has to be above 0"),
        ("ring", {"base_latency_us": -1}, "base_latency_us -1"),
    ],
)
def test_what_makes_no_sense_is_named(topology, options, problem):
    with pytest.raises(ForerunError, match=problem):
        topology_of(topology, H100, 16, **options)


def test_a_cluster_that_is_one_node_has_no_network():
    with pytest.raises(ForerunError, match="no link joins 4 nodes"):
        topology_of("ring", replace(H100, links=H100.links[:1]), 4)
    with pytest.raises(ForerunError, match="say how many GPUs a node has"):
        topology_of("ring", replace(H100, links=(replace(H100.links[0], size=0), H100.links[1])), 4)
