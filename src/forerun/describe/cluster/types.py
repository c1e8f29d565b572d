"""Device, Link and Cluster, on which a plan runs. Each figure is a datasheet value or has its source in the YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import prod
from typing import Literal

from forerun.common.errors import ForerunError

LinkKind = Literal[
    "nvswitch", "nvlink", "pcie", "infinity-fabric", "ici", "infiniband", "roce", "efa", "omnipath", "ethernet"
]


@dataclass(frozen=True, slots=True)
class KernelRates:
    """Factors on the rates of kernels, of links and of the host."""

    gemm: float = 1.0
    attention: float = 1.0
    attention_backward: float = 1.0
    """additional factor on attention's backward pass; `attention` applies to both passes"""
    memory: float = 1.0
    network: float = 1.0
    host: float = 1.0
    """factor on the speed at which the host launches kernels"""

    def times(self, other: KernelRates) -> KernelRates:
        """Returns the products of these factors and the other's."""
        return KernelRates(*(getattr(self, one.name) * getattr(other, one.name) for one in fields(self)))


@dataclass(frozen=True)
class Device:
    """One accelerator. Peaks are dense (no sparsity)."""

    name: str
    vendor: str
    architecture: str
    """such as ampere, hopper or blackwell; attention kernels have one rate for each architecture"""
    peak_flops: dict[str, float] = field(hash=False)
    """dtype (fp32, tf32, bf16, fp16, fp8, nvfp4) -> FLOP/s"""
    memory_bytes: int
    memory_bytes_per_s: float
    multiprocessors: int
    power_w: float
    cost_profile: str
    """kernel constants: the name of a device's `kernels`, `generic`, or the path of a user's own file (.yaml, .yml)"""
    profile_digest: str = ""
    """digest of a user's own `cost_profile` file, so that saved results of different files are kept apart"""
    sustained: float = 1.0
    """clock of a long training step, divided by the clock that the power limit allows (core/cost/clock.py); below 1 on
    a hot host"""
    source: Mapping[str, str] = field(default_factory=dict, hash=False, compare=False)
    """where the figures come from, by key of the device file"""

    def peak(self, dtype: str) -> float:
        """Returns the dense peak of matrix multiplications in `dtype`, in FLOP/s."""
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
    """number of members of the level below that the link connects; 0 for all of them"""
    bytes_per_s: float
    """for each GPU and direction: the GPU's share of its node's NICs"""
    latency_s: float
    """for one hop of a small message"""
    source: str = field(default="", compare=False)
    """where the figures come from"""
    peer_to_peer: bool = True
    """whether GPUs access each other's memory; otherwise all messages go through host memory"""
    host_path_bytes_per_s: float | None = None
    """bus bandwidth of each GPU without peer access while all `size` GPUs send; None: that of a measured host"""
    reduces: bool | None = None
    """whether its switches sum messages (in-network reduction); None: the default (NVLink switches do, switches between
    nodes don't)"""


@dataclass(frozen=True)
class Cluster:
    """Equal devices joined by links, ordered from the inside out."""

    name: str
    device: Device
    links: tuple[Link, ...]
    host_bytes_per_s: float
    """between a GPU and host memory, for each GPU and direction"""
    host_speed: float = 1.0
    """speed of one host core in Python, relative to that of a DGX H100"""
    price_per_gpu_hour: float | None = None
    mtbf_gpu_hours: float | None = None
    network: str | None = None
    """file of the network over which the GPUs communicate instead of `links`"""
    rates: KernelRates = KernelRates()
    """corrections from measured steps, on top of the rates of the device and the training framework"""
    doubts: tuple[str, ...] = field(default=(), compare=False)
    """doubts about `rates`, one line each"""
    source: Mapping[str, str] = field(default_factory=dict, hash=False, compare=False)
    """where price, failure rate and host rate come from, by key of the cluster file"""

    @property
    def node_size(self) -> int:
        """Returns the number of GPUs in one innermost (NVLink or PCIe) domain."""
        return self.links[0].size

    def with_outermost_link(self, factor: float) -> Cluster:
        """Returns the cluster with an outermost link of `factor` times the bandwidth."""
        last = self.links[-1]
        return replace(self, links=(*self.links[:-1], replace(last, bytes_per_s=last.bytes_per_s * factor)))

    @property
    def max_gpus(self) -> int | None:
        """Returns the number of GPUs that the links connect; None if the outermost link has no limit."""
        sizes = [link.size for link in self.links]
        return None if 0 in sizes else prod(sizes)


def is_profile_file(cost_profile: str) -> bool:
    """Returns whether a device's `cost_profile` is the path of a file, not the name of a shipped profile."""
    return cost_profile.endswith((".yaml", ".yml"))
