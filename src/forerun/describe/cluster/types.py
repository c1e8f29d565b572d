"""Device, Link and Cluster: what a plan runs on. Every figure is a datasheet value or has its source in the YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import prod
from typing import Literal

from forerun.common.errors import ForerunError

LinkKind = Literal[
    "nvswitch", "nvlink", "pcie", "infinity-fabric", "ici", "infiniband", "roce", "efa", "omnipath", "ethernet"
]


@dataclass(frozen=True, slots=True)
class KernelRates:
    """Multipliers on the rates of kernels and links."""

    gemm: float = 1.0
    attention: float = 1.0
    attention_backward: float = 1.0
    """beside `attention`, which counts in both directions"""
    memory: float = 1.0
    network: float = 1.0

    def times(self, other: KernelRates) -> KernelRates:
        """Both together."""
        return KernelRates(*(getattr(self, one.name) * getattr(other, one.name) for one in fields(self)))


@dataclass(frozen=True)
class Device:
    """One accelerator. Peaks are dense (no sparsity)."""

    name: str
    vendor: str
    architecture: str
    """as ampere, hopper, blackwell: kernels have rates by architecture"""
    peak_flops: dict[str, float] = field(hash=False)
    """dtype (fp32, tf32, bf16, fp16, fp8, nvfp4) -> FLOP/s"""
    memory_bytes: int
    memory_bytes_per_s: float
    multiprocessors: int
    power_w: float
    cost_profile: str
    """kernel constants: the name of a device's `kernels`, `generic`, or the path of a user's own file (.yaml, .yml)"""
    profile_digest: str = ""
    """of what a user's own file of `cost_profile` holds: what was computed under another is not taken for this one's"""
    sustained: float = 1.0
    """clock under a long training step over the clock at which the cost profile was measured"""
    source: Mapping[str, str] = field(default_factory=dict, hash=False, compare=False)
    """where the figures come from, by key of the device file"""

    def peak(self, dtype: str) -> float:
        """Dense peak in FLOP/s of matrix multiplications in `dtype`."""
        if dtype not in self.peak_flops:
            known = ", ".join(sorted(self.peak_flops))
            raise ForerunError(f"device {self.name} has no {dtype} matrix unit; it has: {known}")
        return self.peak_flops[dtype]


@dataclass(frozen=True)
class Link:
    """One level of the network, seen by one GPU."""

    name: str
    kind: LinkKind
    size: int
    """how many members of the level below it joins; 0 for as many as there are"""
    bytes_per_s: float
    """per GPU and direction: the GPU's share of its node's NICs"""
    latency_s: float
    """of one hop of a small message"""
    source: str = field(default="", compare=False)
    """where the figures come from"""
    peer_to_peer: bool = True
    """GPUs read and write each other's memory; otherwise all that they send passes through memory of the host"""
    host_path_bytes_per_s: float | None = None
    """without peer access: bus bandwidth of each GPU when all `size` send at once; None: that of a measured host"""


@dataclass(frozen=True)
class Cluster:
    """Equal devices joined by links, ordered from the inside out."""

    name: str
    device: Device
    links: tuple[Link, ...]
    host_bytes_per_s: float
    """GPU to host memory, per GPU and direction"""
    price_per_gpu_hour: float | None = None
    mtbf_gpu_hours: float | None = None
    network: str | None = None
    """network file whose topology the GPUs communicate over in place of `links`"""
    rates: KernelRates = KernelRates()
    """what measured steps have shown, over what is known of the device and of the training framework"""
    source: Mapping[str, str] = field(default_factory=dict, hash=False, compare=False)
    """where price, failure rate and host rate come from, by key of the cluster file"""

    @property
    def node_size(self) -> int:
        """GPUs of one innermost (NVLink or PCIe) domain."""
        return self.links[0].size

    @property
    def max_gpus(self) -> int | None:
        """How many GPUs the links join; None where the outermost one joins as many as there are."""
        sizes = [link.size for link in self.links]
        return None if 0 in sizes else prod(sizes)


def is_profile_file(cost_profile: str) -> bool:
    """Whether a device's `cost_profile` is the path of a file and not the name of a shipped one."""
    return cost_profile.endswith((".yaml", ".yml"))
