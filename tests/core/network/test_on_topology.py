"""The main job's collectives on a topology: as on a cluster's own links where those are alike, else as physics says."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.astrasim.messages.flows import share
from forerun.common.errors import ForerunError
from forerun.common.units import MIB
from forerun.core.cost.op_costs import on_topology
from forerun.core.cost.profile import load_profile
from forerun.core.network import group_traffic
from forerun.core.network.group_traffic import Layout
from forerun.core.network.lines import FREE, smooth_minimum_s
from forerun.core.network.link_load import fabric_of
from forerun.core.network.nccl import collective_s
from forerun.core.network.network_file import Network
from forerun.core.network.on_topology import check_size, load_network, network_of
from forerun.core.program.groups import CommGroup
from forerun.core.program.types import Collective
from forerun.describe.cluster.catalog import load_cluster

H100 = load_cluster("h100-sxm")
SINGLE = replace(H100, links=(replace(H100.links[0], size=1), H100.links[1]))
"""H100s with one GPU a node: only the network between nodes is left"""
KINDS = [kind for kind in Collective if kind != Collective.NONE]
RINGS = [Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER]
SIZES = (1e3, 1e5, 1e7, 1e9)
TWO_LEVELS = "switch:8@450/300,switch:8@50/1350"
"""as H100s: 450 and 50 GB/s for each GPU, 0.6 and 2.7 us from end to end"""


def seconds(kind, size_bytes, group, n_gpus, network, cluster=H100):
    """Seconds of a collective of all groups like `group` at once."""
    lines = on_topology(load_network(network), cluster, n_gpus).lines(kind, group)
    latency, slope = lines.columns()
    return float(smooth_minimum_s(np.array(latency), np.array(slope), np.array(float(size_bytes))))


def own(kind, size_bytes, group, cluster=H100):
    """The same on the links of the cluster."""
    measured = load_profile(cluster.device.cost_profile).collectives
    return float(collective_s(kind, np.array(float(size_bytes)), group, cluster, measured))


def test_one_rank_and_no_collective_are_free():
    network = on_topology(load_network(TWO_LEVELS), H100, 64)
    assert network.lines(Collective.ALL_REDUCE, CommGroup("dp", 1, 1, 1)) is FREE
    assert network.lines(Collective.NONE, CommGroup.on_mesh("dp", 8, 1, 8)) is FREE
    assert network.lines(Collective.ALL_REDUCE, CommGroup.on_mesh("dp", 2, 1, 8)) is not FREE


# -- beside the cluster's own links ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name.lower())
@pytest.mark.parametrize("size_bytes", SIZES)
@pytest.mark.parametrize(("size", "inner"), [(2, 1), (4, 2), (8, 1), (8, 8), (16, 4), (32, 1), (64, 1)])
def test_switches_like_the_links_of_the_cluster_give_its_times(kind, size_bytes, size, inner):
    """Ring and tree collectives are the same; messages to another place of another node cross their own node first,
    which small ones feel: 2 % of an all-to-all, 7 % of a transfer, 15 % of a broadcast, whose one ring is chosen for
    its bandwidth."""
    group = CommGroup.on_mesh("dp", size, inner, 8)
    on_network = seconds(kind, size_bytes, group, 64, TWO_LEVELS)
    within = {Collective.ALL_TO_ALL: 0.02, Collective.SEND_RECV: 0.07, Collective.BROADCAST: 0.15}.get(kind, 1e-9)
    assert on_network == pytest.approx(own(kind, size_bytes, group), rel=within)


@pytest.mark.parametrize("nodes", [2, 3])
def test_trees_over_two_or_three_nodes_send_less(nodes):
    """The closed form takes 2 for the bytes that pass a node in a tree of any size; over 2 nodes it is 1."""
    group = CommGroup.on_mesh("dp", 8 * nodes, 1, 8)
    times = [
        (seconds(Collective.ALL_REDUCE, x, group, 64, TWO_LEVELS), own(Collective.ALL_REDUCE, x, group)) for x in SIZES
    ]
    assert all(0.8 * closed <= found <= closed * (1 + 1e-9) for found, closed in times)
    assert times[-1][0] < times[-1][1]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name.lower())
@pytest.mark.parametrize("size_bytes", SIZES)
@pytest.mark.parametrize(("size", "inner"), [(4, 1), (8, 8), (16, 1), (64, 1)])
def test_one_switch_is_a_cluster_of_single_gpus(kind, size_bytes, size, inner):
    group = CommGroup.on_mesh("dp", size, inner, 1)
    on_network = seconds(kind, size_bytes, group, 64, "switch:64@50/1350", SINGLE)
    assert on_network == pytest.approx(own(kind, size_bytes, group, SINGLE))


def test_one_switch_for_all_is_slower_than_nodes_with_links_of_their_own():
    inside, across = CommGroup.on_mesh("tp", 8, 1, 8), CommGroup.on_mesh("dp", 64, 1, 8)
    for group in (inside, across):
        flat = seconds(Collective.ALL_GATHER, 1e9, group, 64, "switch:64@50/1350")
        assert flat > 4 * seconds(Collective.ALL_GATHER, 1e9, group, 64, TWO_LEVELS)


def test_a_rail_cluster_is_two_levels_of_switches():
    rail = "rail:8x8:node_bandwidth_gbps=450:node_latency_ns=300@50/1350"
    for kind in KINDS:
        for size, inner in ((8, 1), (8, 8), (64, 1)):
            group = CommGroup.on_mesh("dp", size, inner, 8)
            assert seconds(kind, 1e8, group, 64, rail) == pytest.approx(seconds(kind, 1e8, group, 64, TWO_LEVELS))


# -- what a topology does --------------------------------------------------------------------------------------


def test_oversubscription_slows_what_crosses_it_and_only_that():
    """A fat tree of pods of 16: neighbours stay under their edge switch, ranks 16 apart go through the core."""
    full, thin = ("fat-tree:128:radix=8" + more + "@50/500" for more in ("", ":oversubscription=4"))
    inside = [CommGroup.on_mesh("tp", 4, 1, 1), CommGroup.on_mesh("cp", 4, 4, 1)]
    across = CommGroup.on_mesh("dp", 8, 16, 1)
    for kind in (*RINGS, Collective.ALL_TO_ALL):
        for group in inside:
            assert seconds(kind, 1e9, group, 128, thin, SINGLE) == seconds(kind, 1e9, group, 128, full, SINGLE)
        slowed = seconds(kind, 1e9, across, 128, thin, SINGLE) / seconds(kind, 1e9, across, 128, full, SINGLE)
        assert 2 < slowed < 4.2


def test_groups_along_the_dimensions_of_a_torus_are_the_fastest():
    torus = "torus2d:8x8@50/500"
    rows, columns, square = (CommGroup.on_mesh("dp", 8, inner, 1) for inner in (1, 8, 4))
    for kind in RINGS:
        along = seconds(kind, 1e9, rows, 64, torus, SINGLE)
        assert seconds(kind, 1e9, columns, 64, torus, SINGLE) == pytest.approx(along)
        assert seconds(kind, 1e9, square, 64, torus, SINGLE) > 1.5 * along


def test_all_groups_of_an_axis_contend():
    """Sixteen rings over one pair of uplinks: with a few GPUs there is one."""
    tree = "tree:32:arity=16@50/500"
    group = CommGroup.on_mesh("dp", 2, 16, 1)
    alone = seconds(Collective.ALL_GATHER, 1e9, CommGroup("dp", 2, 2, 1, 1), 2, tree, SINGLE)
    assert seconds(Collective.ALL_GATHER, 1e9, group, 32, tree, SINGLE) == pytest.approx(16 * alone, rel=0.05)


def test_a_full_mesh_uses_all_its_links():
    group = CommGroup.on_mesh("tp", 8, 1, 8)
    mesh = seconds(Collective.ALL_GATHER, 1e9, group, 8, "fully-connected:8@50/300")
    assert mesh == pytest.approx(seconds(Collective.ALL_GATHER, 1e9, group, 8, "switch:8@350/300"), rel=0.01)
    assert mesh < seconds(Collective.ALL_GATHER, 1e9, group, 8, "ring:8@50/300") / 3


def test_a_pipeline_that_goes_round_pays_for_the_way_back():
    """On a mesh the last stage is far from the first, and its messages pass all the links between."""
    once, round_ = (CommGroup("pp_far", 2, 2, 1, 4, borders) for borders in (3, 4))
    mesh = "mesh2d:4x4@50/500"
    assert seconds(Collective.SEND_RECV, 1e8, round_, 16, mesh, SINGLE) > seconds(
        Collective.SEND_RECV, 1e8, once, 16, mesh, SINGLE
    )


def test_a_longer_way_takes_longer_however_small_the_message():
    group = CommGroup.on_mesh("dp", 8, 8, 8)
    near, far = (seconds(kind, 8, group, 64, f"switch:64@50/{ns}") for kind in RINGS[:1] for ns in (1350, 5000))
    assert far > near


# -- properties ------------------------------------------------------------------------------------------------

TOPOLOGIES = st.sampled_from(
    ("ring:32", "switch:32", "torus2d:8x4", "mesh2d:4x8", "fat-tree:32", "dragonfly:2x4x4", "rail:8x4", "tree:32",
     "switch:8,fat-tree:4", "ring:4,switch:8")
)  # fmt: skip
GROUPS = st.sampled_from([(2, 1), (4, 1), (8, 1), (16, 1), (32, 1), (4, 2), (4, 8), (2, 16), (8, 4), (16, 2)])


@settings(max_examples=60, deadline=None)
@given(TOPOLOGIES, GROUPS, st.sampled_from(KINDS), st.floats(1, 1e10), st.floats(1.01, 10))
def test_more_bandwidth_never_hurts_and_more_bytes_never_help(topology, shape, kind, size_bytes, factor):
    group = CommGroup.on_mesh("dp", *shape, 8)
    slow, fast = (Network(tuple(replace(dim, bandwidth_gbps=rate) for dim in load_network(topology + "@1/500").dims)
                          if "," not in topology else load_network(_everywhere(topology, rate)).dims, False)
                  for rate in (40.0, 40.0 * factor))  # fmt: skip
    base = seconds(kind, size_bytes, group, 32, slow)
    assert seconds(kind, size_bytes, group, 32, fast) <= base
    assert base <= seconds(kind, size_bytes * factor, group, 32, slow) <= base * factor * (1 + 1e-9)


def _everywhere(topology, rate):
    return ",".join(f"{dim}@{rate}/500" for dim in topology.split(","))


@settings(max_examples=40, deadline=None)
@given(TOPOLOGIES, GROUPS, st.sampled_from(KINDS), st.floats(1, 1e10))
def test_fewer_groups_are_never_slower(topology, shape, kind, size_bytes):
    """What a search's lower bounds rest on: they run a unit on as few GPUs as its groups have."""
    group = CommGroup.on_mesh("dp", *shape, 8)
    network = _everywhere(topology, 50)
    few = seconds(kind, size_bytes, group, shape[0] * shape[1], network)
    assert few <= seconds(kind, size_bytes, group, 32, network) * (1 + 1e-9)


@pytest.mark.parametrize("topology", ["ring:16", "torus2d:4x4", "fat-tree:16", "dragonfly:2x2x4", "switch:4,ring:4"])
@pytest.mark.parametrize(("size", "inner"), [(4, 1), (4, 4), (2, 8), (16, 1), (8, 2)])
def test_the_busiest_link_is_what_max_min_sharing_gives_the_last_message(topology, size, inner):
    network = load_network(_everywhere(topology, 50))
    layout = Layout(size, inner, 1, 0, 16)
    for flows in (group_traffic.ring(layout, 1.0), group_traffic.direct(layout)):
        (messages,) = flows
        load = fabric_of(network).load([messages], 1, 1.0, 1.0)
        byte = np.full(len(messages.src), 10**9)
        shared = share(network.topology(), 0, messages.src, messages.dst, byte)
        without_latency_s = (shared.arrival_ns - _latency_ns(network, messages)).max() * 1e-9
        assert load.s_per_byte * 1e9 == pytest.approx(without_latency_s * messages.weight[0], rel=1e-6)


def _latency_ns(network, messages):
    return 500.0 * network.topology().hop_counts(messages.src, messages.dst)


def _sent(flows, n):
    out, into = np.zeros(n), np.zeros(n)
    for src, dst, weight in flows:
        np.add.at(out, src, weight)
        np.add.at(into, dst, weight)
    return out, into


@pytest.mark.parametrize(("size", "inner", "per_node"), [(8, 1, 4), (4, 4, 1), (16, 1, 8), (2, 8, 1), (6, 2, 3)])
def test_every_rank_sends_and_receives_its_share(size, inner, per_node):
    layout = Layout(size, inner, per_node, 0, size * inner)
    n, nodes = layout.n_ranks, layout.nodes
    for flows, total in (
        (group_traffic.ring(layout, 0.7), 0.7),
        (group_traffic.direct(layout), (size - 1) / size),
        (group_traffic.rails(layout, 0.6, 0.0), 0.6 / per_node),
        (group_traffic.hops(layout), 1.0),
    ):
        out, into = _sent(flows, n)
        assert out == pytest.approx(np.full(n, total))
        assert into == pytest.approx(np.full(n, total))
    out, into = _sent(group_traffic.trees(layout, 0.0), n)
    assert out == pytest.approx(into)
    edges = 2 * (nodes - 1)
    assert out.sum() == pytest.approx(edges * inner)
    assert out.max() * per_node <= 2 + 1e-12


def test_both_trees_span_the_nodes_and_are_binary():
    for n in range(2, 40):
        layout = Layout(n, 1, 1, 0, n)
        for tree in group_traffic.trees(layout, 0.0):
            assert (np.bincount(tree.src, minlength=n) <= 3).all()
            seen, new = {0}, [0]
            while new:
                new = [int(dst) for src, dst in zip(tree.src, tree.dst, strict=True) if src in new and dst not in seen]
                seen.update(new)
            assert seen == set(range(n))


def test_large_exchanges_are_sampled_without_changing_their_bytes():
    layout = Layout(512, 1, 8, 0, 512)
    out, into = _sent(group_traffic.direct(layout), 512)
    assert out == pytest.approx(np.full(512, 511 / 512))
    assert into == pytest.approx(out)
    exact = seconds(Collective.ALL_TO_ALL, 1e9, CommGroup.on_mesh("ep", 128, 1, 8), 128, "switch:128@50/500")
    sampled = seconds(Collective.ALL_TO_ALL, 1e9, CommGroup.on_mesh("ep", 256, 1, 8), 256, "switch:256@50/500")
    assert sampled == pytest.approx(exact, rel=0.1)


# -- networks --------------------------------------------------------------------------------------------------


def test_a_file_without_a_unit_means_gb_of_10_to_the_9(tmp_path):
    text = "topology: [Switch]\nnpus_count: [8]\nbandwidth: [50]\nlatency: [500]\n"
    plain, binary = tmp_path / "network.yml", tmp_path / "binary.yml"
    plain.write_text(text)
    binary.write_text(text + "bandwidth_unit: GiB/s\n")
    assert not load_network(plain).gib
    assert load_network(str(binary)).gib
    group = CommGroup.on_mesh("tp", 8, 1, 8)
    slow, fast = (seconds(Collective.ALL_GATHER, 1024 * MIB, group, 8, path) for path in (plain, binary))
    assert slow / fast == pytest.approx(2**30 / 1e9, rel=0.01)


def test_the_first_npus_of_a_larger_network_are_used():
    group = CommGroup.on_mesh("tp", 8, 1, 8)
    times = [seconds(Collective.ALL_REDUCE, 1e8, group, 8, f"switch:{n}@50/500") for n in (8, 64)]
    assert times[0] == times[1]


def test_a_network_that_is_too_small_is_refused():
    network = load_network("switch:8@450/300,switch:2@50/500")
    check_size(network, 16)
    with pytest.raises(ForerunError, match=r"joins 16 NPUs \(Switch 8 at 450 GB/s, Switch 2 at 50 GB/s\).* 32 GPUs"):
        check_size(network, 32)
    with pytest.raises(ForerunError, match="joins 16 NPUs"):
        seconds(Collective.ALL_REDUCE, 1e8, CommGroup.on_mesh("dp", 32, 1, 8), 32, network)


def test_a_cluster_file_can_name_its_network(tmp_path):
    (tmp_path / "fabric.yml").write_text("topology: Ring\nnpus_count: [8]\nbandwidth: 50\nlatency: 500\n")
    (tmp_path / "cluster.yaml").write_text("device: h100-sxm\nnetwork: fabric.yml\n")
    cluster = load_cluster(tmp_path / "cluster.yaml")
    assert network_of(cluster, None) == load_network(tmp_path / "fabric.yml")
    assert network_of(cluster, "switch:8@50/500") == load_network("switch:8@50/500")
    assert network_of(H100, None) is None
