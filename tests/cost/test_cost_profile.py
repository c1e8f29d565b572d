"""Profiles: complete, sourced, checked."""

from copy import deepcopy
from importlib.resources import files
from typing import Any

import pytest
import yaml

from forerun.cost.profile import load_profile, parse_profile, profile_names
from forerun.errors import ForerunError, UnknownName


@pytest.fixture
def data() -> dict[str, Any]:
    text = (files("forerun.cost") / "profiles" / "h100.yaml").read_text(encoding="utf-8")
    return {"name": "mine", **yaml.safe_load(text)}


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
