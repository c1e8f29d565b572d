"""Names, users' own files, and clusters put together from parts."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from forerun.common.errors import ForerunError, UnknownName
from forerun.common.units import GIB
from forerun.describe.cluster.catalog import cluster_from_parts, cluster_names, device_names, load_cluster, load_device
from forerun.describe.cluster.types import Cluster

EXAMPLE = Path(__file__).parents[3] / "examples" / "my_cluster.yaml"

INLINE = {
    "name": "toy", "architecture": "hopper", "peak_tflops": {"bf16": 100, "fp8": 200}, "memory_gib": 10,
    "memory_gb_s": 1000, "multiprocessors": 50, "power_w": 300,
}  # fmt: skip
FULL = {
    "name": "mine", "device": INLINE, "gpus_per_node": 4, "intra_node": {"kind": "pcie", "gb_s": 25},
    "inter_node": {"kind": "ethernet", "gbit_s_per_gpu": 25, "latency_us": 20}, "host_gb_s": 12,
    "price_per_gpu_hour": 1.5, "mtbf_gpu_hours": 1000, "sustained": 0.9,
}  # fmt: skip


def write(folder: Path, content: Any) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content), encoding="utf-8")
    return path


def refusal(path: str | Path) -> str:
    """The one line with which a file is refused; it names the file."""
    with pytest.raises(ForerunError) as caught:
        load_cluster(path)
    message = str(caught.value)
    assert message.splitlines() == [message]
    assert str(path) in message
    return message


@pytest.mark.parametrize(
    ("alias", "name"),
    [("a100", "a100-80gb-sxm"), ("H100", "h100-sxm"), (" h200 ", "h200-sxm"), ("b200", "b200-sxm"),
     ("gb200", "gb200-nvl72"), ("DGX-A100", "a100-80gb-sxm"), ("rtx-4090", "rtx4090"), ("v100", "v100-dgx1")],
)  # fmt: skip
def test_aliases_in_any_case(alias: str, name: str) -> None:
    assert load_cluster(alias) == load_cluster(name)
    assert load_cluster(alias).name == name


def test_unknown_device_lists_the_known_ones() -> None:
    with pytest.raises(UnknownName, match=r"unknown device 'h300'; .*known: ") as caught:
        load_device("h300")
    assert all(name in str(caught.value) for name in device_names())


def test_an_unknown_cluster_names_the_command_that_lists_the_known_ones() -> None:
    with pytest.raises(UnknownName, match="'dgx-9000'") as caught:
        load_cluster("dgx-9000")
    assert f"forerun clusters lists the {len(cluster_names())} known ones" in str(caught.value)


def test_the_example_file() -> None:
    cluster = load_cluster(str(EXAMPLE))
    reference = load_cluster("h100")
    assert cluster.name == "my-h100s"
    assert cluster.device.sustained == 0.97
    assert cluster.device.peak_flops == reference.device.peak_flops
    assert cluster.links[0] == reference.links[0]
    assert cluster.links[1].kind == "roce"
    assert cluster.links[1].bytes_per_s == 25e9
    assert cluster.links[1].latency_s == pytest.approx(3e-6)
    assert cluster.price_per_gpu_hour == 2.5


def test_a_file_of_one_line_is_the_reference_system(tmp_path: Path) -> None:
    cluster = load_cluster(write(tmp_path, "device: B200\n"))
    reference = load_cluster("b200")
    assert cluster.name == "cluster"
    assert (cluster.device, cluster.links) == (reference.device, reference.links)


def test_a_full_file(tmp_path: Path) -> None:
    cluster = load_cluster(write(tmp_path, FULL))
    assert (cluster.name, cluster.device.name, cluster.device.vendor) == ("mine", "toy", "unknown")
    assert cluster.device.peak_flops == {"bf16": 100e12, "fp8": 200e12}
    assert (cluster.device.memory_bytes, cluster.device.memory_bytes_per_s) == (10 * GIB, 1e12)
    assert (cluster.device.cost_profile, cluster.device.sustained) == ("generic", 0.9)
    assert [(link.kind, link.size, link.bytes_per_s) for link in cluster.links] == [
        ("pcie", 4, 25e9),
        ("ethernet", 0, 3.125e9),
    ]
    assert cluster.links[1].latency_s == pytest.approx(20e-6)
    assert (cluster.host_bytes_per_s, cluster.price_per_gpu_hour, cluster.mtbf_gpu_hours) == (12e9, 1.5, 1000)


def test_a_file_without_a_network_is_one_node(tmp_path: Path) -> None:
    cluster = load_cluster(write(tmp_path, {key: value for key, value in FULL.items() if key != "inter_node"}))
    assert cluster.max_gpus == cluster.node_size == 4


def test_a_device_like_a_known_one(tmp_path: Path) -> None:
    device = {"like": "h100-sxm", "name": "slow", "power_w": 500, "memory_gb": 50}
    cluster = load_cluster(write(tmp_path, {"device": device}))
    h100 = load_device("h100")
    assert (cluster.device.name, cluster.device.power_w) == ("slow", 500)
    assert cluster.device.memory_bytes == 50e9
    assert cluster.device.peak_flops == h100.peak_flops
    assert cluster.links == load_cluster("h100").links
    assert set(h100.source) - set(cluster.device.source) == {"power_w", "memory_gib"}


@pytest.mark.parametrize(
    ("link", "peers", "host_path"),
    [
        (None, False, None),
        ({"kind": "pcie", "gb_s": 64}, False, None),
        ({"kind": "pcie", "gb_s": 32, "peer_to_peer": True}, True, None),
        ({"kind": "pcie", "gb_s": 32, "peer_to_peer": False, "host_path_gb_s": 3}, False, 3e9),
        ({"kind": "nvlink", "gb_s": 50}, True, None),
    ],
)
def test_a_link_without_peer_access(link: Any, peers: bool, host_path: float | None, tmp_path: Path) -> None:
    """A PCIe link of a device whose driver gives it no peer access has none, unless the file says otherwise."""
    own = {"device": "rtx-4090"} | ({} if link is None else {"intra_node": link})
    found = load_cluster(write(tmp_path, own)).links[0]
    assert (found.peer_to_peer, found.host_path_bytes_per_s) == (peers, host_path)


def test_another_kind_of_link_in_place_of_one_without_peer_access() -> None:
    assert cluster_from_parts("x", "rtx-4090", 4, intra_kind="nvlink").links[0].peer_to_peer
    assert not cluster_from_parts("x", "rtx-4090", 4, intra_bytes_per_s=16e9).links[0].peer_to_peer


def test_a_replaced_figure_loses_its_source(tmp_path: Path) -> None:
    assert "host_gb_s" in load_cluster("h100").source
    assert "host_gb_s" not in load_cluster(write(tmp_path, {"device": "h100", "host_gb_s": 20})).source


@given(gb_s=st.floats(min_value=0.001, max_value=1e6))
def test_gigabytes_are_eight_times_gigabits(gb_s: float, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("rates")
    in_bytes = load_cluster(write(folder, FULL | {"inter_node": {"kind": "roce", "gb_s": gb_s}}))
    in_bits = load_cluster(write(folder, FULL | {"inter_node": {"kind": "roce", "gbit_s_per_gpu": 8 * gb_s}}))
    assert in_bytes.links[1].bytes_per_s == pytest.approx(gb_s * 1e9)
    assert in_bits.links[1].bytes_per_s == pytest.approx(in_bytes.links[1].bytes_per_s)


def as_file(cluster: Cluster) -> dict[str, Any]:
    """The file that describes a cluster in full."""
    device, (intra, inter) = cluster.device, cluster.links
    return {
        "name": cluster.name,
        "device": {
            "name": device.name, "vendor": device.vendor, "architecture": device.architecture,
            "peak_tflops": {dtype: flops / 1e12 for dtype, flops in device.peak_flops.items()},
            "memory_gb": device.memory_bytes / 1e9, "memory_gb_s": device.memory_bytes_per_s / 1e9,
            "multiprocessors": device.multiprocessors, "power_w": device.power_w,
            "cost_profile": device.cost_profile, "sustained": device.sustained,
        },
        "gpus_per_node": cluster.node_size,
        "intra_node": {"kind": intra.kind, "gb_s": intra.bytes_per_s / 1e9},
        "inter_node": {
            "kind": inter.kind,
            "gb_s": inter.bytes_per_s / 1e9,
            "latency_us": round(inter.latency_s * 1e6, 6),
        },
        "host_gb_s": cluster.host_bytes_per_s / 1e9,
        "price_per_gpu_hour": cluster.price_per_gpu_hour,
        "mtbf_gpu_hours": cluster.mtbf_gpu_hours,
    }  # fmt: skip


@pytest.mark.parametrize("name", cluster_names())
def test_presets_survive_a_file(name: str, tmp_path: Path) -> None:
    cluster = load_cluster(name)
    again = load_cluster(write(tmp_path, as_file(cluster)))
    assert again.device.peak_flops == pytest.approx(cluster.device.peak_flops)
    assert again.device.memory_bytes == cluster.device.memory_bytes
    assert again.device.memory_bytes_per_s == pytest.approx(cluster.device.memory_bytes_per_s)
    assert [link.bytes_per_s for link in again.links] == pytest.approx([link.bytes_per_s for link in cluster.links])
    assert [link.latency_s for link in again.links] == pytest.approx([link.latency_s for link in cluster.links])
    assert (again.price_per_gpu_hour, again.mtbf_gpu_hours) == (cluster.price_per_gpu_hour, cluster.mtbf_gpu_hours)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"gpus": 8}, "unknown key 'gpus'; known: "),
        ({"gpus_per_node": 0}, "gpus_per_node: "),
        ({"gpus_per_node": "8"}, "gpus_per_node: input should be a valid integer, got '8'"),
        ({"gpus_per_node": True}, "gpus_per_node: "),
        ({"gpus_per_node": 4.5}, "gpus_per_node: "),
        ({"host_gb_s": -1}, "host_gb_s: "),
        ({"host_gb_s": float("nan")}, "host_gb_s: "),
        ({"host_gb_s": 1e300}, "host_gb_s: "),
        ({"sustained": 0}, "sustained: "),
        ({"price_per_gpu_hour": "cheap"}, "price_per_gpu_hour: "),
        ({"aliases": ["x"]}, "unknown key 'aliases'; known: "),
        ({"device": 5}, "device: expected the name of a device or its keys, got 5"),
        ({"device": None}, "device: expected the name of a device or its keys, got None"),
        ({"device": "h300"}, "device: unknown device 'h300'; "),
        ({"device": {"like": "h300"}}, "device.like: unknown device 'h300'; "),
        ({"device": {"like": 5}}, "device.like: expected text, got 5"),
        ({"device": {"like": False}}, "device.like: expected text, got False"),
        ({"device": {"like": "h100", "tdp": 5}}, "device: unknown key 'tdp'; known: "),
        ({"device": {"like": "h100", "source": "me"}}, "device: source: "),
        ({"device": INLINE | {"name": 7}}, "device.name: expected text, got 7"),
        ({"device": INLINE | {"memory_gb": 10}}, "device: give one of memory_gib"),
        ({"device": INLINE | {"architecture": "kepler"}}, "device: architecture: "),
        ({"device": INLINE | {"peak_tflops": {}}}, "device: peak_tflops: "),
        ({"device": INLINE | {"peak_tflops": {"bf17": 1}}}, "device: peak_tflops.bf17"),
        ({"device": INLINE | {"peak_tflops": {"a\nb": 1}}}, "device: peak_tflops.a b"),
        ({"device": {key: INLINE[key] for key in INLINE if key != "power_w"}}, "device: key 'power_w' is missing"),
        ({"intra_node": "nvlink"}, "intra_node: "),
        ({"intra_node": {"kind": "pcie"}}, "intra_node: give one of gb_s"),
        ({"intra_node": {"kind": "pcie", "gb_s": 1, "gbit_s_per_gpu": 8}}, "intra_node: give one of gb_s"),
        ({"intra_node": {"kind": "token-ring", "gb_s": 1}}, "intra_node.kind: "),
        (
            {"intra_node": {"kind": "nvlink", "gb_s": 1, "peer_to_peer": False}},
            "intra_node: peer_to_peer: false is for pcie links between GPUs, and this one is nvlink",
        ),
        (
            {"inter_node": {"kind": "pcie", "gb_s": 1, "peer_to_peer": False}},
            "inter_node: peer_to_peer is for GPUs of one node: put it under intra_node",
        ),
        (
            {"intra_node": {"kind": "pcie", "gb_s": 1, "host_path_gb_s": 2}},
            "intra_node: host_path_gb_s is the rate through the host of GPUs without peer access:"
            " add peer_to_peer: false",
        ),
        (
            {"inter_node": {"kind": "roce", "gbps": 1}},
            "unknown key 'inter_node.gbps'; did you mean gb_s? known: gb_s, gbit_s_per_gpu",
        ),
        ({"inter_node": {"gb_s": 1}}, "key 'inter_node.kind' is missing"),
        ({"intra_node": None}, "key 'intra_node' is missing, and only known devices have a reference system"),
        ({"host_gb_s": None}, "key 'host_gb_s' is missing"),
        ({"gpus_per_node": None}, "key 'gpus_per_node' is missing"),
    ],
)
def test_a_wrong_key_or_value_is_named(change: dict[str, Any], expected: str, tmp_path: Path) -> None:
    assert expected in refusal(write(tmp_path, FULL | change))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "expected keys and values, got None"),
        ("- 1\n- 2\n", "expected keys and values"),
        ("device: [h100\n", "line 2: not valid YAML"),
        ('{"device": "h100", "gpus_per_', "not valid YAML"),
        ("device: h100\ndevice: a100\n", "line 2: not valid YAML: key 'device' is given twice"),
        ("device: h100\n\tgpus_per_node: 8\n", "line 2: not valid YAML"),
        ("device: !!python/object:os.system x\n", "not valid YAML"),
        ("price_per_gpu_hour: 1\n", "key 'device' is missing"),
        ("name: 2024-13-45\n", ""),
        ("device: \x00", "not valid YAML"),
    ],
)
def test_a_malformed_file_is_refused(text: str, expected: str, tmp_path: Path) -> None:
    assert expected in refusal(write(tmp_path, text))


def test_a_missing_file(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "absent.yaml")
    assert "No such file" in refusal("absent.yaml")


def test_a_folder_and_bytes_that_are_not_text(tmp_path: Path) -> None:
    assert "can't be read" in refusal(tmp_path)
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"device: \xff\xfe")
    assert "not UTF-8 text" in refusal(path)


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["h100"])
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*FULL, *INLINE, "kind", "gb_s", "like", 3]), inner, max_size=4)
    ),
    max_leaves=8,
)


@given(key=st.sampled_from(list(FULL)), value=TREES)
def test_any_value_loads_or_gives_one_line(key: str, value: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = write(tmp_path_factory.mktemp("fuzz"), FULL | {key: value})
    message = ""
    try:
        cluster = load_cluster(path)
    except ForerunError as error:
        message = str(error)
    else:
        assert all(link.bytes_per_s > 0 for link in cluster.links)
    assert len(message.splitlines()) <= 1


@given(text=st.text(max_size=60))
def test_any_text_loads_or_gives_one_line(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "cluster.yaml"
    path.write_bytes(text.encode("utf-8", errors="surrogatepass"))
    with pytest.raises(ForerunError) as caught:
        load_cluster(path)
    assert len(str(caught.value).splitlines()) == 1


def test_parts_default_to_the_reference_system() -> None:
    cluster = cluster_from_parts("x", "A100")
    reference = load_cluster("a100")
    assert cluster.name == "x"
    assert (cluster.device, cluster.links) == (reference.device, reference.links)
    assert cluster.host_bytes_per_s == reference.host_bytes_per_s


def test_parts_replace_what_they_give() -> None:
    cluster = cluster_from_parts(
        "x", load_device("h100"), 4, intra_bytes_per_s=200e9, inter_bytes_per_s=12.5e9, inter_kind="ethernet",
        host_bytes_per_s=1e9, price_per_gpu_hour=1.0, mtbf_gpu_hours=5.0,
    )  # fmt: skip
    intra, inter = cluster.links
    assert (intra.kind, intra.size, intra.bytes_per_s) == ("nvswitch", 4, 200e9)
    assert (inter.kind, inter.bytes_per_s) == ("ethernet", 12.5e9)
    assert inter.latency_s == load_cluster("rtx4090").links[1].latency_s
    assert (cluster.host_bytes_per_s, cluster.price_per_gpu_hour, cluster.mtbf_gpu_hours) == (1e9, 1.0, 5.0)


def test_parts_of_a_device_of_ones_own(tmp_path: Path) -> None:
    toy = load_cluster(write(tmp_path, FULL)).device
    cluster = cluster_from_parts("x", toy, 2, intra_bytes_per_s=1e9, intra_kind="pcie", host_bytes_per_s=1e9)
    assert cluster.max_gpus == 2
    with pytest.raises(ForerunError, match="cluster x: the intra-node link needs a kind"):
        cluster_from_parts("x", toy, 2, intra_bytes_per_s=1e9)
    with pytest.raises(ForerunError, match="cluster x: key 'gpus_per_node' is missing"):
        cluster_from_parts("x", toy)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_parts_refuse_an_impossible_rate(rate: float) -> None:
    with pytest.raises(ForerunError, match=r"cluster x: inter-node bytes_per_s is .*, expected a positive number"):
        cluster_from_parts("x", "a100", inter_bytes_per_s=rate)


def test_parts_refuse_an_impossible_node() -> None:
    with pytest.raises(ForerunError, match="cluster x: gpus_per_node: "):
        cluster_from_parts("x", "a100", 0)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"device": "a100-sxm-80gb"}, 0.55),
        ({"device": "a100-sxm-80gb", "host_speed": 2.0}, 2.0),
        ({"device": "h100-sxm"}, 1.0),
        ({"device": INLINE}, 1.0),
        ({"device": INLINE, "host_speed": 0.8}, 0.8),
    ],
    ids=str,
)
def test_a_host_is_as_fast_as_stated_else_as_that_of_the_devices_system(
    given: dict[str, Any], expected: float, tmp_path: Path
) -> None:
    assert load_cluster(write(tmp_path, {**FULL, **given})).host_speed == expected


@pytest.mark.parametrize("made", [False, True])
def test_a_profile_that_cannot_be_read_is_named_with_the_reason(made: bool, tmp_path: Path) -> None:
    profile = tmp_path / "mine.yaml"
    if made:
        profile.mkdir()
    message = refusal(write(tmp_path, {**FULL, "device": {**INLINE, "cost_profile": "mine.yaml"}}))
    reason = "it is a folder; give a regular file" if made else "No such file or directory; check the path"
    assert message.endswith(f"device.cost_profile: {profile}: can't be read: {reason}")
