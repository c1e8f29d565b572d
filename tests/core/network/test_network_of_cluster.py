"""Networks made of the links of Forerun's clusters."""

import pytest

from forerun.common.errors import ForerunError
from forerun.core.network.network_file import network_from
from forerun.describe.cluster.catalog import load_cluster


def test_a_cluster_is_a_level_of_switches_inside_and_one_between_nodes():
    network = network_from({"cluster": "h100-sxm", "gpus": 64}, "file")
    links = load_cluster("h100-sxm").links
    assert [(dim.topology, dim.n_npus) for dim in network.dims] == [("Switch", 8), ("Switch", 8)]
    for dim, link in zip(network.dims, links, strict=True):
        assert dim.bandwidth_gbps == link.bytes_per_s / 1e9
        assert 2 * dim.latency_ns == pytest.approx(link.latency_s * 1e9)
    assert not network.gib


def test_a_mesh_shares_the_bandwidth_of_a_gpu():
    (dim,) = network_from({"cluster": "mi300x", "gpus": 8}, "file").dims
    assert dim.topology == "FullyConnected"
    assert 7 * dim.bandwidth_gbps == pytest.approx(load_cluster("mi300x").links[0].bytes_per_s / 1e9)


def test_fewer_gpus_than_a_node_have_one_level():
    assert [dim.n_npus for dim in network_from({"cluster": "h100-sxm", "gpus": 4}, "file").dims] == [4]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"cluster": "h900", "gpus": 8}, "h900"),
        ({"cluster": "h100-sxm"}, "gpus"),
        ({"cluster": "h100-sxm", "gpus": "8"}, "gpus"),
        ({"cluster": "h100-sxm", "gpus": 1}, "at least 2"),
        ({"cluster": "h100-sxm", "gpus": 12}, "whole domains of 8"),
        ({"cluster": "h100-sxm", "gpus": 8, "latency": 1}, "cluster"),
        ({"device": "h100-sxm"}, "cluster, gpus"),
    ],
)
def test_what_makes_no_sense_is_named(data, words):
    with pytest.raises(ForerunError, match=words):
        network_from(data, "file")
