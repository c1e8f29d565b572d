"""Networks read from files and from text."""

import re
from contextlib import suppress

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.common.errors import ForerunError
from forerun.core.network.network_file import (
    Network,
    NetworkDim,
    bytes_per_ns,
    network_from,
    parse_topology,
    read_network,
)
from forerun.core.network.topology.registry import TOPOLOGIES
from forerun.core.network.topology.ring import Ring
from forerun.core.network.topology.stacked import Stacked

THREE = """
# as shipped with ASTRA-sim
topology: [ Ring, FullyConnected, Switch ]
npus_count: [ 2, 8, 4 ]
bandwidth: [ 200.0, 100.0, 50.0 ]  # GB/s
latency: [ 50.0, 500.0, 2000.0 ]  # ns
"""


def read(tmp_path, text):
    (tmp_path / "network.yml").write_text(text)
    return read_network(tmp_path / "network.yml")


def test_a_file_of_astra_sim_is_read_as_it_is(tmp_path):
    network = read(tmp_path, THREE)
    assert network.dims == (
        NetworkDim("Ring", (2,), 200.0, 50.0),
        NetworkDim("FullyConnected", (8,), 100.0, 500.0),
        NetworkDim("Switch", (4,), 50.0, 2000.0),
    )
    assert network.gib
    assert (network.n_npus, network.strides) == (64, (1, 2, 16))
    assert network.bytes_per_ns(2) == 50.0 * 2**30 / 1e9
    assert network.dim_topology(0) == Ring(2, bandwidth_gbps=200.0, latency_ns=50.0)
    topology = network.topology()
    assert isinstance(topology, Stacked)
    assert (topology.n_npus, topology.n_devices) == (64, 64 + 16)
    topology.check()


def test_one_dimension_is_not_stacked(tmp_path):
    network = read(tmp_path, "topology: Ring\nnpus_count: 8\nbandwidth: 50\nlatency: 500\n")
    assert network.topology() == Ring(8, bandwidth_gbps=50.0, latency_ns=500.0)


def test_one_number_goes_for_all_dimensions(tmp_path):
    network = read(tmp_path, "topology: [Ring, Switch]\nnpus_count: [2, 4]\nbandwidth: 50\nlatency: 500\n")
    assert [(dim.bandwidth_gbps, dim.latency_ns) for dim in network.dims] == [(50.0, 500.0)] * 2


def test_sizes_options_and_unit_are_forerun_s_own(tmp_path):
    network = read(
        tmp_path,
        "topology: [mesh-2d, FatTree]\nnpus_count: [[4, 2], 16]\nbandwidth: 50\nlatency: 500\n"
        "options: [{}, {oversubscription: 2}]\nbandwidth_unit: GB/s\n",
    )
    assert network.dims == (
        NetworkDim("Mesh2D", (4, 2), 50.0, 500.0),
        NetworkDim("FatTree", (16,), 50.0, 500.0, (("oversubscription", 2),)),
    )
    assert (network.gib, network.n_npus, network.bytes_per_ns(0)) == (False, 128, 50.0)


def test_keys_that_astra_sim_ignores_are_ignored(tmp_path):
    assert read(tmp_path, THREE + "comment: of an older version\n") == read(tmp_path, THREE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topology": None}, "key 'topology' is missing; a network has topology, npus_count, bandwidth, latency"),
        ({"latency": None}, "key 'latency' is missing"),
        ({"topology": ["Ring", "Rong"]}, "dimension 1: unknown topology 'Rong'; did you mean Ring?"),
        ({"topology": ["Ring", 3]}, "dimension 1: topology is 3, it has to be a name"),
        ({"topology": []}, "npus_count lists 2 values, topology 0 dimensions"),
        ({"npus_count": [4]}, "npus_count lists 1 values, topology 2 dimensions"),
        ({"npus_count": [4, 1]}, "dimension 1: npus_count is 1, Switch has to join more than 1 NPU"),
        ({"npus_count": [4, -8]}, "dimension 1: npus_count is -8"),
        ({"npus_count": [4, 2.5]}, "npus_count is 2.5, it has to be a whole number"),
        ({"npus_count": [4, True]}, "npus_count is True, it has to be a whole number"),
        ({"npus_count": [4, 10**6000]}, "npus_count is a number of 19932 bits"),
        ({"npus_count": [4, [2, 2]]}, "dimension 1: Switch takes 1 size (n), got 2"),
        ({"npus_count": [4096, 8192]}, "33,554,432 NPUs are more than 16,777,216"),
        ({"bandwidth": [50, 0]}, "dimension 1: Switch 8: bandwidth_gbps is 0.0, it has to be above 0"),
        ({"bandwidth": [50, "fast"]}, "dimension 1: bandwidth is 'fast', it has to be a number"),
        ({"bandwidth": [50, float("inf")]}, "bandwidth is inf"),
        ({"latency": [500, -1]}, "latency_ns is -1.0, it has to be 0 or more"),
        ({"latency": [500, 1, 2]}, "latency lists 3 values, topology 2 dimensions"),
        ({"bandwidth_unit": "Gbit/s"}, "bandwidth_unit is 'Gbit/s', it has to be one of: GiB/s, GB/s"),
        ({"options": [{}, 3]}, "dimension 1: options are 3"),
        ({"options": [{}, {"arity": 2}]}, "dimension 1: Switch has no options, got 'arity'"),
        ({"option": [{}, {}]}, "unknown key 'option'; did you mean options?"),
    ],
)
def test_what_makes_no_sense_is_named(change, message):
    good = {"topology": ["Ring", "Switch"], "npus_count": [4, 8], "bandwidth": [50, 25], "latency": [500, 0]}
    data = {key: value for key, value in (good | change).items() if value is not None}
    with pytest.raises(ForerunError, match=re.escape(message)):
        network_from(data, "network.yml")


def test_sizes_of_one_dimension_in_a_flat_list_get_a_hint():
    data = {"topology": ["Mesh2D"], "npus_count": [4, 4], "bandwidth": [50], "latency": [500]}
    with pytest.raises(
        ForerunError, match=re.escape("sizes of one dimension go into a list of their own, as [[4, 4]]")
    ):
        network_from(data, "network.yml")


def test_a_file_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(ForerunError, match="can't be read"):
        read_network(tmp_path / "none.yml")


# -- text ----------------------------------------------------------------------------------------------------------


def test_text_describes_dimensions_innermost_first():
    assert parse_topology("ring:8,switch:4", [50, 25], [500, 100]) == Network(
        (NetworkDim("Ring", (8,), 50, 500), NetworkDim("Switch", (4,), 25, 100)), gib=False
    )


def test_text_may_name_bandwidths_latencies_and_options():
    network = parse_topology("mesh2d:4x2@100GBps/0.5us, fat-tree:16:oversubscription=2:radix=4@400Gbps", latency=[700])
    assert network.dims == (
        NetworkDim("Mesh2D", (4, 2), 100.0, 500.0),
        NetworkDim("FatTree", (16,), 50.0, 700, (("oversubscription", 2), ("radix", 4))),
    )


@pytest.mark.parametrize(("text", "gib"), [("ring:4@5GiBps/1", True), ("ring:4@5GBps/1", False)])
def test_the_unit_of_text_is_kept(text, gib):
    assert parse_topology(text, gib=not gib).gib == gib
    assert parse_topology("ring:4@5/1", gib=gib).gib == gib


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected name:sizes"),
        ("ring", "expected name:sizes"),
        ("ring:4@5/1,,switch:2", "expected name:sizes"),
        ("ring:4", "'ring:4' has no bandwidth: write ring:4@50/500ns, or give --bandwidth"),
        ("ring:4@50", "has no latency"),
        ("ring:n@50/1", "npus_count is 'n', it has to be a whole number"),
        ("ring:1@50/1", "has to join more than 1 NPU"),
        ("rings:4@50/1", "unknown topology 'rings'; did you mean Ring?"),
        ("ring:4@50Tbps/1", "has to end in Gbps, GBps, GiBps or nothing"),
        ("ring:4@50/1ms", "has to end in ns, us or nothing"),
        ("ring:4@./1", "bandwidth is '.', it has to be a number"),
        ("tree:4:arity@50/1", "'arity' is not option=value"),
        ("tree:4:arity=two@50/1", "arity is 'two', it has to be a number"),
        ("ring:4@5GBps/1,ring:4@5GiBps/1", "give all bandwidths in one unit"),
    ],
)
def test_text_that_makes_no_sense_is_named(text, message):
    with pytest.raises(ForerunError, match=re.escape(message)):
        parse_topology(text)


def test_figures_for_another_number_of_dimensions_are_refused():
    with pytest.raises(ForerunError, match="--bandwidth has 2 values, the topology 3 dimensions"):
        parse_topology("ring:2,ring:2,ring:2", [1, 2], [1])


def test_the_gigabyte_of_astra_sim_is_of_two_to_the_thirty_bytes():
    assert bytes_per_ns(50.0, gib=True) == 50.0 * 2**30 / 1e9
    assert bytes_per_ns(50.0, gib=False) == 50.0


# -- anything ------------------------------------------------------------------------------------------------------

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(1, 9), st.floats(), st.text(max_size=5), st.just("8")
)
names = st.sampled_from([*TOPOLOGIES, "ring", "Rong"]) | scalars
sizes = st.integers(1, 9) | scalars | st.lists(st.integers(0, 6) | scalars, max_size=3)
options = st.dictionaries(st.sampled_from(["arity", "radix", "global_links", "x"]), scalars, max_size=2) | scalars


def values(each):
    return each | st.lists(each, max_size=3)


@settings(max_examples=100)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "topology": values(names),
            "npus_count": values(sizes),
            "bandwidth": values(scalars),
            "latency": values(scalars),
            "options": values(options),
            "bandwidth_unit": scalars,
        },
    )
)
def test_any_mapping_is_a_network_or_an_error(data):
    result_or_error(lambda: network_from(data, "network.yml"))


@settings(max_examples=100)
@given(data=st.dictionaries(st.text(max_size=8), values(scalars), max_size=4) | values(scalars))
def test_any_file_is_a_network_or_an_error(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("fuzz") / "network.yml"
    path.write_text(yaml.safe_dump(data, allow_unicode=False), encoding="utf-8")
    result_or_error(lambda: read_network(path))


@settings(max_examples=100)
@given(st.text("ring:,@/x=48 GBps.e-", max_size=30) | st.text(max_size=20))
def test_any_text_is_a_network_or_an_error(text):
    result_or_error(lambda: parse_topology(text, [50], [500]))


def result_or_error(read):
    with suppress(ForerunError):
        network = read()
        assert network.n_npus >= 2
        if network.n_npus <= 1000:
            network.topology().links()
