"""Cost profiles: the fitted constants of a device, as data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources

import pydantic
import yaml

from forerun.errors import ForerunError, UnknownName


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class GemmProfile(_Strict):
    """Padded roofline of matrix multiplications. Fractions are of the device's datasheet figures."""

    source: str
    peak_fraction: float
    fp8_peak_fraction: float
    memory_fraction: float
    launch_us: float
    wave_fraction: float
    """of a wave of 128 x 128 tiles by which the output is padded"""
    depth_pad: float
    """elements by which the depth is padded (pipeline fill and epilogue)"""
    slowdown: float
    """of long kernels, relative; reached over slowdown_tau_us"""
    slowdown_tau_us: float


class HeadProfile(_Strict):
    """Fused attention forward at one head size."""

    peak_fraction: float
    keys: float
    """extra keys that a row block of 128 queries costs"""
    launch_us: float
    tail: float
    """share of the longest row block that stands alone at the end"""


class AttentionProfile(_Strict):
    source: str
    head_dims: dict[int, HeadProfile]


class ProtocolLines(_Strict):
    """Three lines (LL-, LL128- and Simple-like) of a collective inside a node; bandwidths are bus GB/s."""

    a_us: float
    h_us: float
    bw1: float
    d2_us: float
    bw2: float
    d3_us: float
    h3_us: float
    bw3: float
    kappa: float


class CollectiveProfile(_Strict):
    source: str
    link_gb_s: float
    """link rate, per GPU and direction, of the device that was measured"""
    all_reduce: ProtocolLines
    all_gather: ProtocolLines
    reduce_scatter: ProtocolLines
    all_to_all: ProtocolLines


class Profile(_Strict):
    """Everything fitted for one device."""

    gemm: GemmProfile
    attention: AttentionProfile
    collectives: CollectiveProfile


class AttentionKernel(_Strict):
    """Rates of a kernel: forward over the device's calibrated rate, backward over its own forward."""

    forward: float
    backward: float


@dataclass(frozen=True, slots=True)
class Common:
    """Constants that no profile measures device by device (common.yaml)."""

    simt_peak_fraction: float
    wgrad_slowdown: float
    accumulate_exposed: float
    memory_fraction: float
    memory_launch_us: float
    backward_flops_ratio: float
    misaligned_head_penalty: float
    host_copy_fraction: float


def profile_names() -> list[str]:
    """Names of the shipped profiles, sorted."""
    folder = resources.files("forerun.cost") / "devices"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


@cache
def load_profile(name: str) -> Profile:
    """The shipped profile `name`. Raises UnknownName, or ForerunError naming a wrong key."""
    if name not in profile_names():
        raise UnknownName("cost profile", name, profile_names())
    text = (resources.files("forerun.cost") / "devices" / f"{name}.yaml").read_text(encoding="utf-8")
    try:
        return Profile.model_validate(yaml.safe_load(text))
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ForerunError(f"cost profile {name}: {place}: {first['msg']}") from None


@lru_cache(maxsize=1)
def common() -> Common:
    """The constants of common.yaml."""
    data = yaml.safe_load((resources.files("forerun.cost") / "common.yaml").read_text(encoding="utf-8"))
    return Common(**{name: float(entry["value"]) for name, entry in data.items()})


@cache
def attention_kernel(kernel: str, architecture: str) -> AttentionKernel:
    """Rates of an attention kernel on an architecture; the default where it has none of its own.

    Raises:
        UnknownName: no such kernel.
    """
    data = yaml.safe_load(
        (resources.files("forerun.cost") / "fused_attention_kernels.yaml").read_text(encoding="utf-8")
    )
    if kernel not in data or kernel == "default":
        raise UnknownName("attention kernel", kernel, ["naive", *(name for name in data if name != "default")])
    return AttentionKernel.model_validate(data[kernel].get(architecture, data["default"]))
