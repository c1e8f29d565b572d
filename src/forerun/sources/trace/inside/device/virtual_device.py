"""The properties of the GPU that a traced program sees, and the versions of its libraries."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.common.errors import ForerunError
from forerun.common.units import GIB, MIB
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
        """The compute capability."""
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
        """The CUDA version as cudaRuntimeGetVersion() returns it."""
        major, minor = map(int, self.cuda.split("."))
        return 1000 * major + 10 * minor


_FILE = "device/devices.yaml"


def device(name: str = "h100") -> VirtualDevice:
    """Returns the device with a short name such as "h100".

    Raises:
        ForerunError: there is no such device.
    """
    data = read_data(_FILE)
    known = data["devices"]
    if name.lower() not in known:
        names = ", ".join(sorted(known))
        raise ForerunError(f"--device {name}: a program can't be traced on this device; known: {names}")
    given = data["common"] | known[name.lower()]
    major, minor = given.pop("capability")
    del given["source"]
    return VirtualDevice(
        major=major,
        minor=minor,
        total_memory=int(given.pop("memory_gib") * GIB),
        L2_cache_size=given.pop("l2_cache_mib") * MIB,
        **given,
    )


def torch_build() -> TorchBuild:
    """Returns the build of torch for CUDA."""
    given = read_data(_FILE)["torch_build"]
    return TorchBuild(given["cuda"], given["cudnn"], tuple(given["nccl"]))
