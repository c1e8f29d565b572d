"""The properties of the GPU that a traced program sees, and the versions of its libraries."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.common.errors import ForerunError, UnknownName
from forerun.common.units import KIB, MIB
from forerun.describe.cluster.catalog import cuda_entries, load_device
from forerun.describe.cluster.schema import BITS_PER_BYTE
from forerun.sources.trace.inside.data_files import read_data


@dataclass(frozen=True, slots=True)
class VirtualDevice:
    """The fields of `torch.cuda.get_device_properties`. Sizes are bytes, clock rates kHz, the bus width bits."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int
    L2_cache_size: int
    shared_memory_per_multiprocessor: int
    shared_memory_per_block: int
    shared_memory_per_block_optin: int
    max_threads_per_multi_processor: int
    max_threads_per_block: int
    regs_per_multiprocessor: int
    warp_size: int
    clock_rate: int
    memory_clock_rate: int
    memory_bus_width: int
    is_integrated: int = 0
    is_multi_gpu_board: int = 0
    pci_bus_id: int = 0
    pci_device_id: int = 0
    pci_domain_id: int = 0
    gcnArchName: str = ""
    uuid: str = "00000000-0000-0000-0000-000000000000"

    @property
    def capability(self) -> tuple[int, int]:
        """Returns the compute capability."""
        return self.major, self.minor


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """The libraries of the torch build that a traced program believes to use."""

    cuda: str
    """The version as text."""
    cudnn: int
    """The version as cudnnGetVersion() returns it."""
    nccl: tuple[int, int, int]

    @property
    def cuda_number(self) -> int:
        """Returns the CUDA version as cudaRuntimeGetVersion() returns it."""
        major, minor = map(int, self.cuda.split("."))
        return 1000 * major + 10 * minor


_FILE = "device/cuda.yaml"
_TRANSFERS = 2
"""Transfers of a memory pin in a clock: memory of GPUs has a double data rate."""


def device(name: str = "h100") -> VirtualDevice:
    """Returns the device with a name or alias such as "h100".

    Raises:
        ForerunError: there is no such device, or its file lacks the section `cuda`.
    """
    known = cuda_entries()
    try:
        found = load_device(name)
        cuda = known[found.name]
    except (UnknownName, KeyError):
        names = ", ".join(known)
        raise ForerunError(
            f"--device {name}: there is no such device with a section `cuda` in its file (describe/cluster/devices);"
            f" choose one of the known: {names}"
        ) from None
    common = read_data(_FILE)["all_devices"]
    major, minor = map(int, cuda.capability.split("."))
    bytes_per_clock = _TRANSFERS * cuda.memory_bus_bits / BITS_PER_BYTE
    return VirtualDevice(
        name=cuda.name,
        major=major,
        minor=minor,
        total_memory=found.memory_bytes,
        multi_processor_count=found.multiprocessors,
        L2_cache_size=round(cuda.l2_cache_mib * MIB),
        shared_memory_per_multiprocessor=cuda.shared_memory_kib * KIB,
        shared_memory_per_block_optin=(cuda.shared_memory_kib - common["reserved_shared_memory_kib"]) * KIB,
        shared_memory_per_block=common["shared_memory_per_block_kib"] * KIB,
        max_threads_per_multi_processor=cuda.threads_per_multiprocessor,
        max_threads_per_block=common["threads_per_block"],
        regs_per_multiprocessor=common["registers_per_multiprocessor"],
        warp_size=common["warp_size"],
        clock_rate=round(cuda.clock_mhz * 1000),
        memory_clock_rate=round(found.memory_bytes_per_s / bytes_per_clock / 1000),
        memory_bus_width=cuda.memory_bus_bits,
    )


def torch_build() -> TorchBuild:
    """Returns the build of torch for CUDA."""
    given = read_data(_FILE)["torch_build"]
    return TorchBuild(given["cuda"], given["cudnn"], tuple(given["nccl"]))
