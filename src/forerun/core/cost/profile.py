"""Profile: the kernel constants of one measured device, from `kernels` of its file (`describe/cluster/devices`).

A profile states rates as measured, beside the peaks of the device they were measured on. A device that uses the
profile of another reaches the same fractions: compute scales with its peak, memory traffic with its HBM bandwidth,
collectives with its link rate (network/nccl.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import pydantic

from forerun.common.admission import read_text
from forerun.common.errors import ForerunError, UnknownName
from forerun.common.shipped import shipped_data
from forerun.common.yaml_files import parse_yaml
from forerun.core.network.constants import NodeCollectives
from forerun.describe.cluster.catalog import device_kernels
from forerun.describe.cluster.types import is_profile_file
from forerun.describe.kernels.attention import KernelRate

STRICT = pydantic.ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True)
class Reference:
    """Datasheet figures of the device that was measured."""

    peak_tflops: dict[str, float] = field(hash=False)
    hbm_gb_s: float


@dataclass(frozen=True, slots=True)
class GemmEntry:
    """Constants of matrix multiplications in one dtype (formula in cost/gemm.py)."""

    p_tflops: float
    hbm_gb_s: float
    launch_us: float
    wave_fraction: float
    """unused share of a wave of 128 x 128 tiles, one on each multiprocessor"""
    depth_pad: float
    """pipeline fill and epilogue, in elements of k"""
    slowdown: float
    """how much longer a very long kernel takes than its rate says, as the benchmark's GPU throttles (cost/clock.py)"""
    slowdown_tau_us: float
    """length of a kernel at half of that"""
    source: str
    overlap: float = 3.0
    """power of the norm of compute and memory time: 1 is their sum, a large one the longer of the two"""
    odd_rows: float = 0.0
    """fraction by which a product takes longer where m is not a multiple of 16"""
    gradient_slowdown: float = 0.0
    """fraction by which products of the backward pass take longer, where frameworks accumulate gradients in fp32
    throughout and the forward pass faster"""
    quant_passes: float = 0.0
    """passes over the first operand that quantise it inside the kernel"""
    own_wgrad_rate: float = 0.0
    """rate of products of weight gradients over that of forward ones; 0: as `gemm_roles` says for all dtypes"""


@dataclass(frozen=True, slots=True)
class GemmRoles:
    """Rates of backward multiplications relative to forward ones."""

    dgrad_rate: float
    wgrad_rate: float
    accumulate_exposed: float
    """share of the traffic of an accumulating output that does not overlap with the multiplication"""
    source: str
    unaligned: float = 0.0
    """fraction by which a product of 2-byte elements takes longer where rows of an operand or of the result do not
    start at multiples of 16 bytes, so that no copy engine can move them"""


@dataclass(frozen=True, slots=True)
class AttentionEntry:
    """Constants of fused causal attention at one head size (formula in cost/attention.py)."""

    p_tflops: float
    extra_keys: float
    """extra work of each query, in keys: mask diagonal, prologue, softmax tail"""
    launch_us: float
    tail: float
    """exposed fraction of the longest block of queries"""
    slowdown: float = 0.0
    """how much longer a very long kernel takes than its rate says"""
    slowdown_tau_us: float = 1000.0
    """length of a kernel at half of that"""


@dataclass(frozen=True, slots=True)
class AttentionTable:
    """Constants of fused attention by head size."""

    hbm_fraction: float
    head_dim: dict[int, AttentionEntry] = field(hash=False)
    source: str
    rates: dict[str, KernelRate] = field(default_factory=dict, hash=False)
    """rates of attention kernels on this device that differ from its architecture's (describe/kernels)"""


@dataclass(frozen=True, slots=True)
class MemoryEntry:
    """Constants of memory-bound kernels."""

    hbm_fraction: float
    launch_us: float
    source: str


@dataclass(frozen=True, slots=True)
class HostCopyEntry:
    """Constants of copies between device and pinned host memory."""

    link_fraction: float
    launch_us: float
    source: str


@dataclass(frozen=True)
class Profile:
    """The kernel constants of one device, or the `generic` ones."""

    name: str
    source: str
    calibrated: bool
    """whether the constants were measured on this device; else they are a judgement"""
    reference: Reference
    gemm: dict[str, GemmEntry] = field(hash=False)
    gemm_roles: GemmRoles
    attention: AttentionTable
    memory_bound: MemoryEntry
    host_copy: HostCopyEntry
    collectives: NodeCollectives | None = None
    """collectives inside a node over NVLink; None: the constants of the link's kind"""

    __pydantic_config__ = STRICT


_GENERIC = "generic"
"""the profile of devices that were not measured"""
_ADAPTER = pydantic.TypeAdapter(Profile)


def profile_names() -> list[str]:
    """Returns the names of the shipped profiles, sorted."""
    return sorted([_GENERIC, *device_kernels()])


def parse_profile(data: dict[str, Any], place: str) -> Profile:
    """Returns the Profile of `data`, checked.

    Raises:
        ForerunError: an unknown key, a missing one, a wrong type, a number that is negative or not finite, or a rate
            above the reference's peak.
    """
    try:
        profile = _ADAPTER.validate_python(data)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise ForerunError(f"{place}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    peaks = profile.reference.peak_tflops
    if "bf16" not in peaks or "bf16" not in profile.gemm:
        raise ForerunError(f"{place}: reference.peak_tflops and gemm need bf16, which other dtypes fall back to")
    if not profile.attention.head_dim:
        raise ForerunError(f"{place}: attention.head_dim: give at least one head size")
    for dtype, entry in profile.gemm.items():
        if dtype not in peaks:
            raise ForerunError(f"{place}: gemm.{dtype}: reference.peak_tflops has no {dtype}; add it")
        _below(entry.p_tflops, peaks[dtype], f"{place}: gemm.{dtype}.p_tflops")
        _below(entry.hbm_gb_s, profile.reference.hbm_gb_s, f"{place}: gemm.{dtype}.hbm_gb_s")
    for head_dim, attention in profile.attention.head_dim.items():
        _below(attention.p_tflops, peaks["bf16"], f"{place}: attention.head_dim.{head_dim}.p_tflops")
    _check_numbers(asdict(profile), place)
    return profile


_POSITIVE = {"bw1", "bw2", "bw3", "link_gb_s", "hbm_fraction", "link_fraction", "dgrad_rate", "wgrad_rate"}


def _check_numbers(values: Mapping[Any, Any], place: str, path: str = "") -> None:
    """Checks that every number is finite and at least 0, and that divisors are above 0."""
    for key, value in values.items():
        here = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping):
            _check_numbers(value, place, here)
        elif isinstance(value, float) and not (0 <= value < math.inf and (value > 0 or key not in _POSITIVE)):
            least = "a number above 0" if key in _POSITIVE else "a number, at least 0"
            raise ForerunError(f"{place}: {here}: expected {least}, got {value:g}")


def _below(value: float, peak: float, place: str) -> None:
    if not 0 < value <= peak:
        raise ForerunError(f"{place}: must be above 0 and at most the reference's {peak:g}, got {value:g}")


def load_profile(name: str) -> Profile:
    """Returns the shipped profile `name`, or the one in a file whose path ends in .yaml or .yml.

    Raises:
        ForerunError: a file that can't be read, or a wrong entry in it (see `parse_profile`).
        UnknownName: no shipped profile; the known ones are listed.
    """
    return _of_text(name, read_text(Path(name))) if is_profile_file(name) else _shipped(name)


@lru_cache(maxsize=16)
def _of_text(path: str, text: str) -> Profile:
    """Returns the profile in the text of a file: all of it, or its `kernels`; cached by text, so edits are seen."""
    data = parse_yaml(text, path)
    own = data["kernels"] if isinstance(data.get("kernels"), dict) else data
    return parse_profile({"name": Path(path).stem, **own}, path)


@cache
def _shipped(name: str) -> Profile:
    if name not in profile_names():
        raise UnknownName("cost profile", name, profile_names())
    place = f"cost profile {name}"
    if name == _GENERIC:
        return parse_profile({"name": name, **shipped_data("forerun.core.cost", "generic_kernels.yaml")}, place)
    return parse_profile({"name": name, **device_kernels()[name]}, place)
