"""Devices, links, storages and entries of files, by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from forerun.common.errors import ForerunError
from forerun.common.yaml_files import Entry, check
from forerun.describe.cluster.catalog import cluster_table, cuda_entries, load_cluster, load_device
from forerun.describe.cluster.schema import ClusterEntry, DeviceEntry, LinkEntry
from forerun.describe.cluster.storage import Storage, usual_storage
from forerun.describe.cluster.types import Cluster, KernelRates, Link, is_profile_file

DEVICE = {
    "architecture": "hopper",
    "peak_tflops": {"bf16": 100.0},
    "memory_gib": 80.0,
    "memory_gb_s": 2000.0,
    "multiprocessors": 100,
    "power_w": 500.0,
}


def test_rates_multiply_one_by_one_and_are_one_by_default() -> None:
    first, second = KernelRates(2.0, 3.0, 5.0, 7.0, 11.0), KernelRates(0.5, 2.0, 3.0, 4.0, 5.0)
    assert first.times(second) == KernelRates(1.0, 6.0, 15.0, 28.0, 55.0)
    assert first.times(KernelRates()) == first


def test_a_cluster_joins_the_product_of_its_levels_or_as_many_as_there_are() -> None:
    h100 = load_cluster("h100-sxm")
    inner, outer = h100.links
    assert (h100.node_size, h100.max_gpus) == (8, None)
    assert replace(h100, links=(inner, replace(outer, size=4))).max_gpus == 32
    assert replace(h100, links=(inner,)).max_gpus == 8


def test_a_cluster_that_states_least() -> None:
    h100 = load_cluster("h100-sxm")
    plain = Cluster("plain", h100.device, h100.links, 1e9)
    assert (plain.price_per_gpu_hour, plain.mtbf_gpu_hours, plain.network, plain.source) == (None, None, None, {})
    assert plain.rates == KernelRates()
    link = Link("link", "pcie", 8, 1e9, 1e-6)
    assert (link.peer_to_peer, link.host_path_bytes_per_s) == (True, None)
    assert is_profile_file("mine.yaml")
    assert is_profile_file("mine.yml")
    assert not is_profile_file("h100")


def test_units_of_an_entry() -> None:
    link = LinkEntry(kind="infiniband", gbit_s_per_gpu=400.0, latency_us=2.0).link("outer", 0, 9.0)
    assert (link.size, link.bytes_per_s, link.latency_s) == (0, 50e9, pytest.approx(2e-6))
    assert link.peer_to_peer is True
    usual = LinkEntry(kind="pcie", gb_s=25.0, peer_to_peer=False, host_path_gb_s=3.0).link("inner", 8, 9.0)
    assert (usual.bytes_per_s, usual.latency_s, usual.peer_to_peer) == (25e9, 9.0, False)
    assert usual.host_path_bytes_per_s == 3e9
    device = DeviceEntry(**DEVICE).device("mine")
    assert (device.memory_bytes, device.memory_bytes_per_s) == (80 * 2**30, 2e12)
    assert (device.peak_flops, device.sustained, device.cost_profile) == ({"bf16": 100e12}, 1.0, "generic")
    decimal = DeviceEntry(**{**DEVICE, "memory_gib": None, "memory_gb": 80.0}, sustained=0.75)
    assert decimal.device("mine").memory_bytes == 80 * 10**9
    assert [decimal.device("mine", given).sustained for given in (None, 0.5)] == [0.75, 0.5]


@pytest.mark.parametrize(
    ("entry", "good", "bad"),
    [
        (LinkEntry, {"kind": "pcie", "gb_s": 1e9}, {"kind": "pcie", "gb_s": 1.01e9}),
        (LinkEntry, {"kind": "pcie", "gb_s": 1e-9}, {"kind": "pcie", "gb_s": 0.0}),
        (
            LinkEntry,
            {"kind": "pcie", "gb_s": 1.0, "latency_us": 0.0},
            {"kind": "pcie", "gb_s": 1.0, "latency_us": -1.0},
        ),
        (ClusterEntry, {"device": "h100", "gpus_per_node": 1}, {"device": "h100", "gpus_per_node": 0}),
        (ClusterEntry, {"device": "h100", "gpus_per_node": 10**9}, {"device": "h100", "gpus_per_node": 10**9 + 1}),
        (ClusterEntry, {"device": "h100", "name": "x" * 100}, {"device": "h100", "name": "x" * 101}),
        (ClusterEntry, {"device": "h100", "name": "x"}, {"device": "h100", "name": ""}),
        (ClusterEntry, {"device": "h100", "sustained": 2.0}, {"device": "h100", "sustained": 2.01}),
        (ClusterEntry, {"device": "h100", "network": "x" * 4096}, {"device": "h100", "network": "x" * 4097}),
        (ClusterEntry, {"device": "h100", "network": "x"}, {"device": "h100", "network": ""}),
        (DeviceEntry, {**DEVICE, "sustained": 2.0}, {**DEVICE, "sustained": 2.1}),
        (DeviceEntry, {**DEVICE, "sustained": 0.001}, {**DEVICE, "sustained": 0.0}),
        (DeviceEntry, DEVICE, {**DEVICE, "peak_tflops": {}}),
        (DeviceEntry, {**DEVICE, "architecture": "x" * 100}, {**DEVICE, "architecture": "x" * 101}),
    ],
)
def test_the_ends_of_what_a_key_may_be(entry: type[Entry], good: dict[str, object], bad: dict[str, object]) -> None:
    check(entry, good, "here")
    with pytest.raises(ForerunError, match=r"^here: "):
        check(entry, bad, "here")


def test_a_storage_takes_as_long_as_its_slower_limit() -> None:
    storage = Storage(2e9, 8e9)
    assert [storage.transfer_s(10e9, total) for total in (20e9, 80e9)] == [5.0, 10.0]
    assert Storage(2e9).transfer_s(10e9, 1e30) == 5.0
    assert Storage.of_text("2,100") == Storage(2e9, 100e9)
    assert Storage.of_text("0.5") == Storage(0.5e9, math.inf)
    assert usual_storage().bytes_per_s_per_rank > 0
    assert usual_storage().bytes_per_s_total == math.inf
    assert usual_storage().source
    for text in ("0", "-1", "x", "1,2,3", "1,0", "inf"):
        with pytest.raises(ForerunError, match="expected GB/s of a rank"):
            Storage.of_text(text)


def test_rows_of_the_table_are_in_the_units_of_their_names() -> None:
    row = next(row for row in cluster_table() if row.name == "h100-sxm")
    cluster = load_cluster("h100-sxm")
    assert (row.gpus_per_node, row.intra_node, row.inter_node) == (8, "nvswitch", cluster.links[1].kind)
    assert row.memory_gib == cluster.device.memory_bytes / 2**30
    assert row.bf16_tflops == pytest.approx(989.4, rel=0.01)
    assert row.intra_node_gb_s == pytest.approx(450)
    assert row.inter_node_gbit_s == pytest.approx(400)
    assert row.price_per_gpu_hour == cluster.price_per_gpu_hour


def test_devices_that_a_trace_can_be_are_those_with_a_cuda_section() -> None:
    found = cuda_entries()
    assert found["h100-sxm-80gb"].capability == "9.0"
    assert all(load_device(name).vendor.lower() == "nvidia" for name in found)


def test_clusters_can_be_keys_and_sources_do_not_tell_them_apart() -> None:
    h100 = load_cluster("h100-sxm")
    unsourced = replace(
        h100,
        source={},
        device=replace(h100.device, source={}),
        links=tuple(replace(link, source="") for link in h100.links),
    )
    assert unsourced == h100
    assert hash(unsourced) == hash(h100)
    assert replace(h100, device=replace(h100.device, peak_flops={"bf16": 1.0})) != h100
    assert Storage(1.0, source="a") == Storage(1.0, source="b")
