"""The YAML keys of devices and clusters. The keys name their units, so that nobody confuses GB/s with Gbit/s."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from forerun.common.units import GIB, GIGA, TERA
from forerun.common.yaml_files import Entry
from forerun.describe.cluster.types import Device, Link, LinkKind

Dtype = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "nvfp4"]
Positive = Annotated[float, Field(gt=0, le=1e9)]
NotNegative = Annotated[float, Field(ge=0, le=1e9)]
Count = Annotated[int, Field(ge=1, le=10**9)]
Name = Annotated[str, Field(min_length=1, max_length=100)]

BITS_PER_BYTE = 8
US_PER_S = 10**6


class LinkEntry(Entry):
    """One link, for each GPU and direction: `gb_s` in 1e9 bytes a second or `gbit_s_per_gpu` in 1e9 bits a second."""

    kind: LinkKind
    gb_s: Positive | None = None
    gbit_s_per_gpu: Positive | None = None
    latency_us: NotNegative | None = None
    peer_to_peer: bool | None = None
    """where absent: that of the reference system of the device if its link is of the same kind, else true"""
    host_path_gb_s: Positive | None = None
    reduces: bool | None = None
    """whether its switches add what they pass on: of NVSwitch (NVLS; false before NCCL 2.17), of InfiniBand (SHARP)"""
    source: str = ""

    @model_validator(mode="after")
    def _host_path(self) -> LinkEntry:
        if self.peer_to_peer is False and self.kind != "pcie":
            raise ValueError(f"peer_to_peer: false is for pcie links between GPUs, and this one is {self.kind}")
        if self.host_path_gb_s is not None and self.peer_to_peer is not False:
            raise ValueError(
                "host_path_gb_s is the rate through the host of GPUs without peer access: add peer_to_peer: false"
            )
        return self

    @model_validator(mode="after")
    def _can_reduce(self) -> LinkEntry:
        if self.reduces and self.kind not in ("nvswitch", "infiniband"):
            raise ValueError(
                f"reduces: true is for nvswitch (NVLS) and infiniband (SHARP), and this one is {self.kind}"
            )
        return self

    @model_validator(mode="after")
    def _one_rate(self) -> LinkEntry:
        if (self.gb_s is None) == (self.gbit_s_per_gpu is None):
            raise ValueError("give one of gb_s (GB/s for each GPU and direction) and gbit_s_per_gpu (Gbit/s)")
        return self

    def link(self, name: str, size: int, default_latency_s: float) -> Link:
        """Returns the Link that joins `size` members of the level below (0: as many as there are)."""
        if self.gb_s is not None:
            bytes_per_s = self.gb_s * GIGA
        else:
            assert self.gbit_s_per_gpu is not None
            bytes_per_s = self.gbit_s_per_gpu * GIGA / BITS_PER_BYTE
        latency_s = default_latency_s if self.latency_us is None else self.latency_us / US_PER_S
        host_path = None if self.host_path_gb_s is None else self.host_path_gb_s * GIGA
        peers = self.peer_to_peer is not False
        return Link(name, self.kind, size, bytes_per_s, latency_s, self.source, peers, host_path, self.reduces)


class LinkKindEntry(Entry):
    """The defaults of links of one kind."""

    latency_us: NotNegative
    source: str


class SystemEntry(Entry):
    """The system around the devices: node size, links and host."""

    gpus_per_node: Count | None = None
    """GPUs of one NVLink (or PCIe) domain: 72 for an NVL72 rack"""
    intra_node: LinkEntry | None = None
    inter_node: LinkEntry | None = None
    host_gb_s: Positive | None = None
    """GPU to host memory, for each GPU and direction"""
    host_speed: Positive | None = None
    """speed of one core of the host in Python, over that of a DGX H100"""
    source: dict[str, str] = Field(default_factory=dict)
    """where each figure comes from, by its key"""

    @field_validator("inter_node")
    @classmethod
    def _no_peers_between_nodes(cls, value: LinkEntry | None) -> LinkEntry | None:
        if value is not None and value.peer_to_peer is not None:
            raise ValueError("peer_to_peer is for GPUs of one node: put it under intra_node")
        return value


class CudaEntry(Entry):
    """The properties that CUDA reports about a GPU beside its memory, bandwidth and multiprocessors. A traced program
    sees them."""

    name: Name
    """as `torch.cuda.get_device_name` returns it"""
    capability: Annotated[str, Field(pattern=r"^[0-9]+\.[0-9]$")]
    """compute capability, in quotes: "9.0" """
    l2_cache_mib: Positive
    shared_memory_kib: Count
    """shared memory of a multiprocessor"""
    threads_per_multiprocessor: Count
    clock_mhz: Positive
    """highest clock of the multiprocessors"""
    memory_bus_bits: Count
    source: str


class DeviceEntry(SystemEntry):
    """One accelerator and the reference system its vendor puts it in."""

    vendor: str = "unknown"
    architecture: Annotated[str, Field(pattern=r"^[a-z0-9-]+$", max_length=100)]
    """architecture that a shipped device names too: attention kernels have one rate for each architecture"""
    peak_tflops: Annotated[dict[Dtype, Positive], Field(min_length=1)]
    """dense, never with sparsity"""
    memory_gib: Positive | None = None
    """as torch reports it: 2**30 bytes"""
    memory_gb: Positive | None = None
    """1e9 bytes"""
    memory_gb_s: Positive
    multiprocessors: Count
    power_w: Positive
    cost_profile: Annotated[str, Field(pattern=r"^([a-z0-9_-]+|.+\.ya?ml)$", max_length=4096)] = "generic"
    """name of a shipped profile, or a file that `forerun calibrate` wrote, relative to the file of the cluster"""
    sustained: Annotated[float, Field(gt=0, le=2)] = 1.0
    cuda: CudaEntry | None = None
    """`forerun trace --device` knows the devices whose file has it"""

    @model_validator(mode="after")
    def _one_memory(self) -> DeviceEntry:
        if (self.memory_gib is None) == (self.memory_gb is None):
            raise ValueError("give one of memory_gib (2**30 bytes, as torch reports it) and memory_gb (1e9 bytes)")
        return self

    def device(self, name: str, sustained: float | None = None) -> Device:
        """Returns the Device, in bytes and FLOP/s; `sustained` replaces the entry's own."""
        if self.memory_gib is not None:
            memory_bytes = round(self.memory_gib * GIB)
        else:
            assert self.memory_gb is not None
            memory_bytes = round(self.memory_gb * GIGA)
        return Device(
            name=name,
            vendor=self.vendor,
            architecture=self.architecture,
            peak_flops={dtype: tflops * TERA for dtype, tflops in self.peak_tflops.items()},
            memory_bytes=memory_bytes,
            memory_bytes_per_s=self.memory_gb_s * GIGA,
            multiprocessors=self.multiprocessors,
            power_w=self.power_w,
            cost_profile=self.cost_profile,
            sustained=self.sustained if sustained is None else sustained,
            source=self.source,
        )


class ClusterEntry(SystemEntry):
    """A cluster; the reference system of its device fills in the keys that are left out."""

    page = "docs/extending.md"

    name: Name | None = None
    device: str | dict[str, Any]
    """name of a device, or the keys of a DeviceEntry, which may start from a known device by `like: NAME`"""
    price_per_gpu_hour: NotNegative | None = None
    mtbf_gpu_hours: Positive | None = None
    network: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """file of the network over which the GPUs communicate, relative to the file of the cluster"""
    sustained: Annotated[float, Field(gt=0, le=2)] | None = None

    @field_validator("device", mode="before")
    @classmethod
    def _name_or_keys(cls, value: Any) -> Any:
        if not isinstance(value, str | dict):
            raise ValueError(f"expected the name of a device or its keys, got {value!r}")
        return value
