"""The presets: complete, sourced, dense, and consistent with each other."""

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import yaml

from forerun.common.errors import ForerunError
from forerun.common.units import GIB, TERA
from forerun.core.cost.profile import profile_names
from forerun.describe.cluster.catalog import cluster_names, cluster_table, device_names, load_cluster, load_device

HARDWARE = Path(__file__).parents[3].parent / "shared" / "validation" / "hardware.yaml"
COST_PROFILES = set(profile_names())


def preset(file_name: str) -> dict[str, Any]:
    return yaml.safe_load((files("forerun.describe.cluster") / "presets" / file_name).read_text(encoding="utf-8"))


def device_file(name: str) -> dict[str, Any]:
    text = (files("forerun.describe.cluster") / "devices" / f"{name}.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)


def is_numeric(value: Any) -> bool:
    if isinstance(value, dict):
        return bool(value) and all(is_numeric(item) for item in value.values())
    return isinstance(value, int | float)


def unsourced(entry: dict[str, Any], place: str) -> Iterator[str]:
    """Keys with a number that neither their own `source` text nor the `source` mapping beside them explains."""
    source = entry.get("source", {})
    for key, value in entry.items():
        if is_numeric(value):
            text = source if isinstance(source, str) else source.get(key, "")
            if len(text) < 10:
                yield f"{place}.{key}"
        elif isinstance(value, dict) and key != "source":
            yield from unsourced(value, f"{place}.{key}")


@pytest.mark.parametrize("file_name", ["clusters.yaml", "links.yaml"])
def test_every_number_has_a_source(file_name: str) -> None:
    assert list(unsourced(preset(file_name), file_name)) == []


@pytest.mark.parametrize("name", device_names())
def test_every_number_of_a_device_has_a_source(name: str) -> None:
    assert list(unsourced(with_documents(device_file(name)), name)) == []


def with_documents(entry: Any) -> Any:
    """`entry` with the texts of documents in place of their keys."""
    documents = preset("documents.yaml")
    if isinstance(entry, dict):
        return {key: with_documents(value) for key, value in entry.items() if key != "kernels"}
    return documents.get(entry, entry) if isinstance(entry, str) else entry


def test_every_document_is_the_source_of_a_figure() -> None:
    named = {text for name in device_names() for text in texts(device_file(name))}
    assert set(preset("documents.yaml")) <= named


def texts(entry: dict[str, Any]) -> Iterator[str]:
    for value in entry.values():
        yield from texts(value) if isinstance(value, dict) else [value] if isinstance(value, str) else []


def test_the_search_for_missing_sources_finds_them() -> None:
    entry = {"a": 1, "b": {"c": 2}, "d": {"kind": "x", "e": 3}, "source": {"a": "some datasheet"}}
    assert list(unsourced(entry, "x")) == ["x.b", "x.d.e"]


def test_sources_are_of_figures_that_are_there() -> None:
    entries = preset("clusters.yaml")["clusters"] | {name: device_file(name) for name in device_names()}
    stray = [f"{n}.{key}" for n, entry in entries.items() for key in entry.get("source", {}) if key not in entry]
    assert stray == []


@pytest.mark.parametrize("name", device_names())
def test_device_loads(name: str) -> None:
    device = load_device(name)
    assert device.name == name
    assert device.cost_profile in COST_PROFILES
    assert 10 * GIB < device.memory_bytes < 300 * GIB
    assert 0.25e12 < device.memory_bytes_per_s < 10e12
    assert 0.3 <= device.sustained <= 1.05, "benchmarks and steps are of different machines"
    assert device == load_device(name.upper())
    assert hash(device) == hash(load_device(name))


@pytest.mark.parametrize("name", device_names())
def test_every_device_has_a_reference_system(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.device == load_device(name)
    assert [link.name for link in cluster.links] == ["intra-node", "inter-node"]


@pytest.mark.parametrize("name", cluster_names())
def test_cluster_loads(name: str) -> None:
    cluster = load_cluster(name)
    intra, inter = cluster.links
    assert cluster.name == name
    assert cluster.node_size == intra.size >= 1
    assert inter.size == 0
    assert cluster.max_gpus is None
    assert intra.bytes_per_s > inter.bytes_per_s
    assert 0 < intra.latency_s < inter.latency_s < 1e-4
    assert cluster.host_bytes_per_s > 0
    assert intra.source
    assert inter.source
    assert "host_gb_s" in cluster.source


@pytest.mark.parametrize("name", device_names())
def test_peaks_are_ordered(name: str) -> None:
    peaks = load_device(name).peak_flops
    rates = [peaks[dtype] for dtype in ("fp32", "tf32", "bf16", "fp8", "nvfp4") if dtype in peaks]
    assert rates == sorted(rates)
    if "bf16" in peaks and "fp16" in peaks:
        assert peaks["bf16"] == peaks["fp16"]
    if "fp8" in peaks:
        assert peaks["fp8"] / peaks["bf16"] == pytest.approx(2, rel=0.02)


@pytest.mark.parametrize(
    ("name", "sparse_bf16_tflops"),
    [("a100", 624), ("h100", 1979), ("h100-pcie", 1513), ("h200", 1979), ("b200", 4500), ("gb200", 5000),
     ("mi300x", 2614.9), ("l40s", 724), ("rtx4090", 330.3), ("a6000", 309.7)],
)  # fmt: skip
def test_peaks_are_dense(name: str, sparse_bf16_tflops: float) -> None:
    assert load_device(name).peak("bf16") / TERA == pytest.approx(sparse_bf16_tflops / 2, rel=0.01)


def test_a_dtype_without_a_matrix_unit_is_refused() -> None:
    with pytest.raises(ForerunError, match="v100-sxm2-32gb has no bf16 matrix unit; it has: fp16, fp32"):
        load_device("v100").peak("bf16")


def test_export_parts_differ_in_nvlink_only() -> None:
    for export, original in (("a800", "a100"), ("h800", "h100")):
        assert load_device(export).peak_flops == load_device(original).peak_flops
        assert load_cluster(export).links[0].bytes_per_s == 200e9


def test_bidirectional_nvlink_is_halved() -> None:
    vendor_gb_s = {"v100": 300, "a100": 600, "h100": 900, "h200": 900, "b200": 1800, "gb200": 1800, "gb300": 1800}
    for name, both_ways in vendor_gb_s.items():
        assert load_cluster(name).links[0].bytes_per_s == both_ways / 2 * 1e9


def test_the_nvlink_domain_is_the_node() -> None:
    sizes = {"gb200-nvl72": 72, "gb200-nvl4": 4, "gb300-nvl72": 72, "h100": 8, "v100-dgx2": 16}
    assert {name: load_cluster(name).node_size for name in sizes} == sizes


@pytest.mark.parametrize(
    ("name", "kind", "gbit_s"),
    [("a100", "infiniband", 200), ("h100", "infiniband", 400), ("aws-p4d", "efa", 50), ("aws-p5", "efa", 400),
     ("a100-omnipath", "omnipath", 50), ("a100-roce-800g", "roce", 100), ("h100-grand-teton", "roce", 400)],
)  # fmt: skip
def test_network_of_a_preset(name: str, kind: str, gbit_s: float) -> None:
    inter = load_cluster(name).links[1]
    assert (inter.kind, inter.bytes_per_s) == (kind, gbit_s * 1e9 / 8)


def test_memory_is_what_torch_reports() -> None:
    reported_gib = {"a100": 79.2, "h100": 79.18, "h100-96gb": 94.99, "h200": 139.8, "b200": 178.35}
    for name, gib in reported_gib.items():
        assert load_device(name).memory_bytes == round(gib * GIB)


def test_table_has_a_row_for_each_preset() -> None:
    rows = {row.name: row for row in cluster_table()}
    assert list(rows) == cluster_names()
    h100 = rows["h100-sxm"]
    assert (h100.device, h100.gpus_per_node, h100.bf16_tflops) == ("h100-sxm-80gb", 8, pytest.approx(989.4))
    assert (h100.intra_node, h100.intra_node_gb_s) == ("nvswitch", 450)
    assert (h100.inter_node, h100.inter_node_gbit_s) == ("infiniband", 400)
    assert "h100" in h100.aliases
    assert rows["v100-dgx1"].bf16_tflops is None


@pytest.mark.skipif(not HARDWARE.exists(), reason="the published measurements are not beside this checkout")
def test_agrees_with_the_hardware_of_published_measurements() -> None:
    for name, facts in yaml.safe_load(HARDWARE.read_text(encoding="utf-8"))["gpus"].items():
        device = load_device(name)
        for dtype, tflops in facts["tflops"].items():
            assert device.peak(dtype) / TERA == pytest.approx(tflops, rel=0.002), (name, dtype)
        if isinstance(facts["hbm_gb_s"], int):
            assert device.memory_bytes_per_s / 1e9 == pytest.approx(facts["hbm_gb_s"]), name
        if "nvlink_gb_s" in facts:
            assert load_cluster(device.name).links[0].bytes_per_s == facts["nvlink_gb_s"] / 2 * 1e9, name
        if "sms" in facts:
            assert device.multiprocessors == facts["sms"], name
        if "tdp_w" in facts:
            assert device.power_w == facts["tdp_w"], name
