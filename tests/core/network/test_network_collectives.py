"""Collectives: free alone, monotone, continuous, bounded by the links, as published."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.common.errors import ForerunError
from forerun.common.units import GIB, KIB, MIB
from forerun.core.cost.profile import load_profile
from forerun.core.network.nccl import collective_lines, collective_s
from forerun.core.program.groups import CommGroup
from forerun.core.program.types import Collective
from forerun.describe.cluster.catalog import cluster_names, load_cluster
from forerun.describe.cluster.types import Cluster

KINDS = [kind for kind in Collective if kind != Collective.NONE]
CLUSTERS = [load_cluster(name) for name in cluster_names()]
JOINED = [cluster for cluster in CLUSTERS if len(cluster.links) > 1]
MEASURED = [load_cluster(name) for name in ("a100", "h100", "h200", "b200", "gb200-nvl72")]
kinds = st.sampled_from(KINDS)
clusters = st.sampled_from(JOINED)
nodes = st.integers(1, 300)
ranks = st.integers(1, 16)
sizes = st.floats(1, 1e11)


def seconds(kind: Collective, size: float, n_nodes: int, per_node: int, cluster: Cluster) -> float:
    group = CommGroup("dp", n_nodes * per_node, n_nodes, per_node)
    measured = load_profile(cluster.device.cost_profile).collectives
    return float(collective_s(kind, np.array(size), group, cluster, measured))


@given(kinds, st.sampled_from(CLUSTERS), sizes)
def test_one_rank_is_free(kind, cluster, size):
    assert seconds(kind, size, 1, 1, cluster) == 0


@given(kinds, clusters, nodes, ranks, sizes, st.floats(1.001, 100))
def test_more_bytes_take_longer_and_at_most_in_proportion(kind, cluster, n_nodes, per_node, size, factor):
    if n_nodes * per_node == 1:
        n_nodes = 2
    base, more = (seconds(kind, x, n_nodes, per_node, cluster) for x in (size, size * factor))
    assert base < more * (1 + 1e-12)
    assert more <= factor * base * (1 + 1e-12)


@given(kinds, clusters, nodes, ranks, st.integers(0, 36))
def test_time_is_continuous_at_powers_of_two(kind, cluster, n_nodes, per_node, power):
    below, above = (seconds(kind, 2.0**power * f, n_nodes + 1, per_node, cluster) for f in (1 - 1e-6, 1 + 1e-6))
    assert above / below == pytest.approx(1, abs=3e-6)


@given(kinds, clusters, st.integers(2, 300), ranks, sizes)
def test_more_nodes_never_help(kind, cluster, n_nodes, per_node, size):
    base = seconds(kind, size, n_nodes, per_node, cluster)
    assert seconds(kind, size, n_nodes + 1, per_node, cluster) >= base * (1 - 1e-9)


@given(kinds, clusters, nodes, ranks, sizes)
def test_a_slower_link_never_helps(kind, cluster, n_nodes, per_node, size):
    slow = replace(cluster, links=tuple(replace(link, bytes_per_s=link.bytes_per_s / 2) for link in cluster.links))
    assert seconds(kind, size, n_nodes, per_node, slow) >= seconds(kind, size, n_nodes, per_node, cluster)


@given(clusters, st.integers(2, 300), ranks, sizes)
def test_gather_and_scatter_are_alike_between_nodes(cluster, n_nodes, per_node, size):
    gather = seconds(Collective.ALL_GATHER, size, n_nodes, per_node, cluster)
    assert gather == seconds(Collective.REDUCE_SCATTER, size, n_nodes, per_node, cluster)


@given(st.sampled_from(MEASURED), st.integers(2, 8), sizes)
def test_an_all_reduce_is_no_faster_than_a_gather_in_a_node(cluster, per_node, size):
    gather = seconds(Collective.ALL_GATHER, size, 1, per_node, cluster)
    assert seconds(Collective.ALL_REDUCE, size, 1, per_node, cluster) >= 0.97 * gather


@given(clusters, st.integers(2, 64), st.integers(1, 8))
def test_an_all_reduce_of_much_is_slower_than_a_gather_between_nodes(cluster, n_nodes, per_node):
    """Two nodes whose switches add exchange each byte once, as they do in a gather."""
    size = 100 * GIB
    gather = seconds(Collective.ALL_GATHER, size, n_nodes, per_node, cluster)
    least = 1.5 if n_nodes > 2 else 1.1
    assert seconds(Collective.ALL_REDUCE, size, n_nodes, per_node, cluster) > least * gather


@given(clusters, st.integers(2, 64), ranks, sizes)
def test_no_collective_beats_the_wire(cluster, n_nodes, per_node, size):
    wire = per_node * cluster.links[1].bytes_per_s
    through = size * (n_nodes - 1) / n_nodes / wire
    assert seconds(Collective.ALL_GATHER, size, n_nodes, per_node, cluster) >= through
    assert seconds(Collective.ALL_REDUCE, size, n_nodes, per_node, cluster) >= 2 * through


@pytest.mark.parametrize("cluster", MEASURED, ids=lambda cluster: cluster.name)
@pytest.mark.parametrize("kind", [Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL])
def test_large_collectives_stay_below_the_links_rate(cluster, kind):
    rate = 16 * GIB * 7 / 8 / seconds(kind, 16 * GIB, 1, 8, cluster)
    assert 0.6 * cluster.links[0].bytes_per_s < rate < cluster.links[0].bytes_per_s


def test_rings_and_trees_have_the_published_latencies():
    h100 = load_cluster("h100")
    for n_nodes, ring_us in {2: 70, 4: 146, 8: 297, 16: 599, 32: 1204}.items():
        lines = collective_lines(Collective.ALL_GATHER, n_nodes, 8, h100, None)
        assert lines.latency_s[2] * 1e6 == pytest.approx(ring_us, rel=0.01)
    for n_nodes, tree_us in {2: 53, 4: 81, 8: 109, 32: 165}.items():
        lines = collective_lines(Collective.ALL_REDUCE, n_nodes, 8, h100, None)
        assert lines.latency_s[6] * 1e6 == pytest.approx(tree_us, rel=0.02)
    for n_nodes, exchange_us in {2: 37, 4: 42, 8: 60, 16: 98, 32: 290}.items():
        assert seconds(Collective.ALL_TO_ALL, 8, n_nodes, 8, h100) * 1e6 == pytest.approx(exchange_us, rel=0.3)


def test_large_collectives_between_nodes_have_the_published_bandwidth():
    h100 = load_cluster("h100")
    for n_nodes in (2, 4, 8):
        bus = 4 * GIB * (8 * n_nodes - 1) / (8 * n_nodes) / seconds(Collective.ALL_GATHER, 4 * GIB, n_nodes, 8, h100)
        assert bus / 1e9 == pytest.approx(0.83 * 390, rel=0.07)
    tree = 4 * GIB / seconds(Collective.ALL_REDUCE, 4 * GIB, 8, 8, h100)
    assert tree / 1e9 == pytest.approx(160, rel=0.12)


def test_a_mesh_of_two_uses_one_link():
    mesh = load_cluster("mi300x")
    for per_node, gb_s in {2: 47.7, 8: 313}.items():
        bus = 16 * GIB * 2 * (per_node - 1) / per_node / seconds(Collective.ALL_REDUCE, 16 * GIB, 1, per_node, mesh)
        assert bus / 1e9 == pytest.approx(gb_s, rel=0.1)


def test_neighbours_share_nothing_but_the_wire():
    h100 = load_cluster("h100")
    near, far = (seconds(Collective.SEND_RECV, GIB, *shape, h100) for shape in ((1, 2), (2, 1)))
    assert near < far
    assert GIB / 50e9 < far < 1.4 * GIB / 50e9
    assert far == seconds(Collective.SEND_RECV, GIB, 4, 2, h100)


def test_small_messages_cost_latency_and_a_slow_fabric_more():
    wide, cloud = load_cluster("h100"), load_cluster("aws-p5")
    small = [seconds(Collective.ALL_REDUCE, 4 * KIB, 8, 8, cluster) for cluster in (wide, cloud)]
    large = [seconds(Collective.ALL_REDUCE, 8 * GIB, 8, 8, cluster) for cluster in (wide, cloud)]
    assert small[1] > 1.3 * small[0]
    assert large[1] < 1.3 * large[0]


def test_a_rack_of_nvlink_is_one_node():
    rack = load_cluster("gb200-nvl72")
    inside = seconds(Collective.ALL_GATHER, 256 * MIB, 1, 64, rack)
    assert inside < 0.6 * seconds(Collective.ALL_GATHER, 256 * MIB, 8, 8, load_cluster("b200"))


def test_more_nodes_than_a_link_joins_take_the_next_one_or_are_refused():
    h100 = load_cluster("h100")
    near = replace(h100.links[1], size=4)
    far = replace(h100.links[1], name="spine", bytes_per_s=h100.links[1].bytes_per_s / 4)
    deep = replace(h100, links=(h100.links[0], near, far))
    assert seconds(Collective.ALL_GATHER, GIB, 4, 8, deep) == seconds(Collective.ALL_GATHER, GIB, 4, 8, h100)
    assert seconds(Collective.ALL_GATHER, GIB, 5, 8, deep) > 2 * seconds(Collective.ALL_GATHER, GIB, 5, 8, h100)
    with pytest.raises(ForerunError, match=r"cluster h100.*: no link joins 5 nodes"):
        seconds(Collective.ALL_GATHER, GIB, 5, 8, replace(h100, links=(h100.links[0], near)))


def test_bytes_take_as_long_over_many_nodes_as_over_few():
    h100 = load_cluster("h100")
    size = 1e12

    def per_byte(kind: Collective, n_nodes: int) -> float:
        moved = (8 * n_nodes - 1) / (8 * n_nodes) * size
        return seconds(kind, size, n_nodes, 8, h100) / moved

    for kind in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_REDUCE):
        assert per_byte(kind, 256) == pytest.approx(per_byte(kind, 8), rel=0.02)
    assert seconds(Collective.SEND_RECV, size, 64, 8, h100) == seconds(Collective.SEND_RECV, size, 2, 8, h100)
