"""Profiles: complete, sourced, checked."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import yaml

from forerun.common.errors import ForerunError, UnknownName
from forerun.core.cost.attention import attention_rates
from forerun.core.cost.gemm import gemm_rates, gemm_s
from forerun.core.cost.profile import load_profile, parse_profile, profile_names
from forerun.describe.cluster.catalog import device_kernels, load_cluster, load_device


@pytest.fixture
def data() -> dict[str, Any]:
    return {**deepcopy(device_kernels()["h100"]), "name": "mine"}


@pytest.mark.parametrize("name", profile_names())
def test_every_shipped_profile_is_valid_and_says_where_it_comes_from(name):
    profile = load_profile(name)
    entries = [profile.gemm_roles, profile.attention, profile.memory_bound, profile.host_copy, *profile.gemm.values()]
    if profile.collectives is not None:
        entries.append(profile.collectives)
    assert profile.name == name
    assert {"bf16", "fp32"} <= set(profile.gemm)
    assert all(len(entry.source) > 20 for entry in entries)


def test_an_unknown_profile_is_an_error_that_lists_the_known_ones():
    with pytest.raises(UnknownName, match=r"unknown cost profile 'h10O'.*b200.*generic.*l40s"):
        load_profile("h10O")


def changed(data: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    copy = deepcopy(data)
    place = copy
    *parents, last = path.split(".")
    for key in parents:
        place = place[int(key) if key.isdigit() else key]
    place[last] = value
    return copy


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("gemm.bf16.speed", 3, r"gemm\.bf16\.speed"),
        ("surprise", 1, "surprise"),
        ("gemm.bf16.p_tflops", "fast", r"gemm\.bf16\.p_tflops"),
        ("gemm.bf16.p_tflops", 1000, r"gemm\.bf16\.p_tflops: must be above 0 and at most the reference's 989.4"),
        ("gemm.bf16.hbm_gb_s", 4000, r"gemm\.bf16\.hbm_gb_s: must be above 0 and at most"),
        ("attention.head_dim.128.p_tflops", -1, r"attention\.head_dim\.128\.p_tflops: must be above 0"),
        ("gemm.int8", {}, r"gemm\.int8"),
        ("gemm", {}, r"reference\.peak_tflops and gemm need bf16"),
        ("reference.peak_tflops", {"fp32": 67}, r"reference\.peak_tflops and gemm need bf16"),
        ("attention.head_dim", {}, r"attention\.head_dim: give at least one head size"),
        ("gemm.bf16.launch_us", -1.0, r"gemm\.bf16\.launch_us: expected a number, at least 0, got -1"),
        ("gemm.bf16.slowdown", float("nan"), r"gemm\.bf16\.slowdown: expected a number, at least 0, got nan"),
        ("memory_bound.hbm_fraction", 0.0, r"memory_bound\.hbm_fraction: expected a number above 0, got 0"),
    ],
)
def test_a_wrong_entry_is_one_line_that_names_it(data, path, value, message):
    with pytest.raises(ForerunError, match=message) as caught:
        parse_profile(changed(data, path, value), "my profile")
    assert str(caught.value).startswith("my profile: ")
    assert "\n" not in str(caught.value)


def test_a_dtype_without_a_reference_peak_is_refused(data):
    entry = data["gemm"]["bf16"]
    with pytest.raises(ForerunError, match=r"gemm\.tf32: reference\.peak_tflops has no tf32"):
        parse_profile(changed(data, "gemm.tf32", entry), "my profile")


def test_a_device_takes_a_profile_from_a_file(data, tmp_path):
    slower = changed(data, "gemm.bf16.p_tflops", 500)
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(slower))
    cluster_file = tmp_path / "cluster.yaml"
    cluster_file.write_text("device: {like: h100-sxm, cost_profile: mine.yaml}\n")
    cluster = load_cluster(cluster_file)
    assert cluster.device.cost_profile == str(tmp_path / "mine.yaml")
    assert load_profile(cluster.device.cost_profile).name == "mine"
    assert gemm_s(8192, 8192, 8192, gemm_rates(cluster.device, "bf16")) > 1.5 * gemm_s(
        8192, 8192, 8192, gemm_rates(load_cluster("h100").device, "bf16")
    )


def test_a_file_that_was_written_again_counts_at_once(data, tmp_path):
    (tmp_path / "cluster.yaml").write_text("device: {like: h100-sxm, cost_profile: mine.yaml}\n")
    times, devices = [], []
    for p_tflops in (500, 600.5):
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump(changed(data, "gemm.bf16.p_tflops", p_tflops)))
        devices.append(load_cluster(tmp_path / "cluster.yaml").device)
        times.append(float(gemm_s(8192, 8192, 8192, gemm_rates(devices[-1], "bf16"))))
    assert devices[0] != devices[1]
    assert times[0] / times[1] == pytest.approx(600.5 / 500, rel=0.05)


def test_a_cluster_whose_profile_is_missing_is_one_line(tmp_path):
    (tmp_path / "cluster.yaml").write_text("device: {like: h100-sxm, cost_profile: mine.yaml}\n")
    with pytest.raises(
        ForerunError, match=r"cluster\.yaml: device\.cost_profile: .*mine\.yaml: can't be read: No such"
    ):
        load_cluster(tmp_path / "cluster.yaml")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "mine.yaml: can't be read"),
        ("gemm: [", "mine.yaml, line 1: not valid YAML"),
        ("source: here\n", "mine.yaml: calibrated: Field required"),
    ],
)
def test_a_bad_profile_file_is_one_line_that_names_it(tmp_path, content, message):
    if content is not None:
        (tmp_path / "mine.yaml").write_text(content)
    with pytest.raises(ForerunError, match=message) as caught:
        load_profile(str(tmp_path / "mine.yaml"))
    assert "\n" not in str(caught.value)


def test_a_device_can_have_rates_of_its_own_for_an_attention_kernel(data, tmp_path):
    data["attention"]["rates"] = {"flash4": {"forward": 0.9, "backward": 0.7}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"kernels": data}), encoding="utf-8")
    shipped = load_device("h100")
    own = replace(shipped, cost_profile=str(tmp_path / "mine.yaml"))
    assert attention_rates(own, "flash4", 128).calibrated
    assert attention_rates(own, "flash4", 128).backward_rate == 0.7
    assert attention_rates(own, "flash3", 128) == attention_rates(shipped, "flash3", 128)
