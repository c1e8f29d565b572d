"""Networks of ns-3 and htsim: links, routes, and files that are wrong."""

import json

import numpy as np
import pytest

from forerun.common.errors import ForerunError
from forerun.core.network.network_file import parse_topology
from forerun.core.network.packet_networks import htsim_network, ns3_network
from forerun.core.network.topology.graph import Cable, Graph

LEAVES_AND_SPINES = """8 4 8
4 5 6 7
0 4 400Gbps 0.0005ms 0
1 4 400Gbps 0.0005ms 0
2 5 400Gbps 0.0005ms 0
3 5 400Gbps 0.0005ms 0
4 6 200Gbps 1us 0
4 7 200Gbps 1us 0
5 6 200Gbps 1us 0
5 7 200Gbps 1us 0
"""
TREE = """Nodes 8
Tiers 3
Podsize 4

Tier 0
Downlink_speed_Gbps 200
Radix_Down 2
Radix_Up 2
Downlink_Latency_ns 1000
# the middle
Tier 1
Downlink_speed_Gbps 200
Radix_Down 2
Radix_Up 4
Downlink_Latency_ns 1000
Bundle 1

Tier 2
Downlink_speed_Gbps 100
Radix_Down 4
Downlink_Latency_ns 1000
Switch_Latency_ns 50
Bundle 2
"""


@pytest.fixture
def ns3(tmp_path):
    """Reads a file of links for logical dimensions."""

    def read(links=LEAVES_AND_SPINES, dims=("2", "2"), config=None):
        (tmp_path / "links.txt").write_text(links)
        (tmp_path / "dims.json").write_text(json.dumps({"logical-dims": dims}))
        (tmp_path / "config.txt").write_text(config or f"ENABLE_QCN 1\nTOPOLOGY_FILE {tmp_path / 'links.txt'}\n")
        return ns3_network(tmp_path / ("config.txt" if config is not None else "links.txt"), tmp_path / "dims.json")

    return read


def test_ns3_links_and_logical_dimensions(ns3):
    network = ns3()
    assert [dim.n_npus for dim in network.dims] == [2, 2]
    links = network.topology().links()
    assert len(links) == 16
    assert set(links.bandwidth_gbps) == {50.0, 25.0}
    assert set(links.latency_ns) == {500.0, 1000.0}
    network.topology().check()


def test_flows_to_different_npus_take_different_ways(ns3):
    topology = ns3().topology()
    assert topology.route(0, 1) == [0, 4, 1]
    assert {topology.route(0, 2)[2], topology.route(0, 3)[2]} == {6, 7}
    assert topology.most_hops == 4


def test_a_configuration_names_its_links_from_another_folder(ns3, tmp_path):
    (tmp_path / "topology").mkdir()
    (tmp_path / "topology" / "far.txt").write_text(LEAVES_AND_SPINES)
    network = ns3(config="TOPOLOGY_FILE ../../scratch/topology/far.txt\n")
    assert len(network.topology().links()) == 16


def test_a_hurried_network_is_faster_by_the_hops_of_its_longest_route(ns3):
    network = ns3()
    ratio = network.hurried().topology().links().bandwidth_gbps / network.topology().links().bandwidth_gbps
    assert set(ratio) == {4.0}


def test_an_htsim_tree(tmp_path):
    (tmp_path / "tree.topo").write_text(TREE)
    network = htsim_network(tmp_path / "tree.topo", parse_topology("ring:8@50/500"))
    topology = network.topology()
    topology.check()
    assert topology.n_devices == 8 + 4 + 4 + 4
    assert [topology.hops(0, npu) for npu in range(1, 8)] == [2, 4, 4, 6, 6, 6, 6]
    links = topology.links()
    leaving = np.bincount(links.src, links.bandwidth_gbps)
    assert leaving[:8].tolist() == [25.0] * 8
    assert leaving[8:12].tolist() == [100.0] * 4, "a ToR has as much up as down"
    assert leaving[12:16].tolist() == [100.0] * 4
    assert leaving[16:].tolist() == [50.0] * 4
    assert set(links.latency_ns) == {1000.0, 1050.0}


def test_cables_between_the_same_devices_act_as_one():
    cables = (Cable(0, 2, 10.0, 5.0), Cable(2, 0, 10.0, 7.0), Cable(1, 2, 30.0, 5.0))
    links = Graph(2, 3, cables, bandwidth_gbps=1.0, latency_ns=1.0).links()
    of = {
        (a, b): (w, t) for a, b, w, t in zip(links.src, links.dst, links.bandwidth_gbps, links.latency_ns, strict=True)
    }
    assert of == {(0, 2): (20, 7), (2, 0): (20, 7), (1, 2): (30, 5), (2, 1): (30, 5)}


@pytest.mark.parametrize(
    ("links", "dims", "problem"),
    [
        ("", ("4",), "it has 0 lines"),
        ("9 1\n", ("4",), "line 1: expected the numbers of devices, switches and links, got '9 1'"),
        ("3 1 2\n2\n0 2 1Gbps 1us 0\n", ("2",), "it lists 1 links, and its first line says 2"),
        ("3 1 1\n2\n0 2 1Gbit 1us 0\n", ("2",), "line 3: expected a number in Gbps, Mbps"),
        ("3 1 1\n2\n0 2 0Gbps 1us 0\n", ("2",), "line 3: a link needs a rate above 0, got '0Gbps'"),
        ("3 1 1\n2\n0 2 1e300Gbps 1us 0\n", ("2",), "line 3: expected a number in Gbps, Mbps"),
        ("3 1 1\n0\n0 2 1Gbps 1us 0\n", ("2",), "NPUs are devices 0 to 1, and some of them are switches"),
        ("3 1 1\n2\n0 2 1Gbps 1us 0\n", ("2",), "some NPU can't reach another one"),
        ("3 1 1\n2\n0 7 1Gbps 1us 0\n", ("2",), "a link joins two of the devices 0 to 2, got 0 and 7"),
        (LEAVES_AND_SPINES, ("1",), "logical-dims make 1 NPUs"),
        (LEAVES_AND_SPINES, ("two",), "expected the sizes of logical dimensions"),
        (LEAVES_AND_SPINES, ("8",), "NPUs are devices 0 to 7"),
    ],
)
def test_a_wrong_ns3_file_is_one_line(ns3, links, dims, problem):
    with pytest.raises(ForerunError) as caught:
        ns3(links, dims)
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("Nodes 8", "Nodes 16"), "the tree has 16 nodes, and the network 8 NPUs"),
        (("Podsize 4", "Podsize 3"), "nodes by Podsize: 8 is not a multiple of 3"),
        (("Tiers 3", "Tiers 100000000"), "an htsim topology has 2 or 3 tiers"),
        (("Radix_Up 4", "Radix_Up 100000000"), "the tree has 200,000,016 links; at most 2,000,000 are simulated"),
        (("Tiers 3", "Tiers 2"), "an htsim topology has 2 or 3 tiers"),
        (("Radix_Up 4", "Radix_Up 3"), "Radix_Up of tier 1 by Bundle of tier 2: 3 is not a multiple of 2"),
        (("Radix_Down 4", "Radix_Down 6"), "Radix_Down of tier 2 is 6, 2 pods have 4 links up to it"),
        (("Bundle 1", "Colour 1"), "'Colour' is not a key of an htsim topology here"),
        (("Downlink_speed_Gbps 100", ""), "missing: downlink_speed_gbps of tier 2"),
    ],
)
def test_a_wrong_htsim_file_is_one_line(tmp_path, change, problem):
    (tmp_path / "tree.topo").write_text(TREE.replace(*change))
    with pytest.raises(ForerunError) as caught:
        htsim_network(tmp_path / "tree.topo", parse_topology("ring:8@50/500"))
    assert problem in str(caught.value)
