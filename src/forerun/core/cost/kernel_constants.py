"""Constants of the kernel-time formulas that hold on every device, from `kernels.yaml`."""

from __future__ import annotations

from dataclasses import dataclass, field

from forerun.common.errors import UnknownName
from forerun.common.shipped import shipped


@dataclass(frozen=True, slots=True)
class GemmConstants:
    """Constants of matrix products."""

    tile_outputs: int
    """results of one tile; a wave is one tile on each multiprocessor"""
    aligned_bytes: int
    """an operand is read at full speed where the bytes of its rows are a multiple of this"""
    aligned_rows: int
    """where a profile has `odd_rows`, products whose m is not a multiple of this are slower"""
    padding_gain: float
    """speed-up from which TorchInductor pads a product"""
    calibrated_sizes: tuple[int, int]
    """smallest and largest m, n and k that count as measured"""
    source: str


@dataclass(frozen=True, slots=True)
class ConvolutionConstants:
    """Constants of convolutions."""

    partial_sum_bytes: float
    """bytes moved for each partial sum of a product that is split along its depth"""
    source: str


@dataclass(frozen=True, slots=True)
class AttentionConstants:
    """Constants of fused attention."""

    block_queries: int
    """queries of one block of rows"""
    wide_block_keys: int
    """keys of one block of a kernel for elements of 4 bytes"""
    element_bytes: float
    backward_passes: float
    """bytes that the backward kernel moves divided by those of the forward kernel"""
    calibrated_lengths: tuple[int, int]
    """smallest and largest numbers of queries and of keys that count as measured"""
    source: str


@dataclass(frozen=True, slots=True)
class MemoryBoundConstants:
    """The share of HBM's bandwidth that kinds of memory-bound kernels reach.

    Streaming kernels reach the share that the device's cost profile says, and named kinds keep their ratio to them.
    """

    streaming: float
    """share of kernels that read and write in order: every kernel whose kind is not named"""
    kernels: dict[str, float] = field(hash=False)
    """share of the kernels of each named kind"""
    source: str

    def rate(self, kernel: str) -> float:
        """Returns the bandwidth of kernels of the kind `kernel`, empty for streaming ones, over that of streaming ones.

        Raises UnknownName for a kind that kernels.yaml does not have.
        """
        if kernel and kernel not in self.kernels:
            raise UnknownName("kind of memory-bound kernel", kernel, list(self.kernels))
        return self.kernels.get(kernel, self.streaming) / self.streaming


@dataclass(frozen=True, slots=True)
class CollectiveConstants:
    """Constants of collectives inside a node."""

    calibrated_ranks: int
    """largest group, in ranks, that counts as measured"""
    source: str


@dataclass(frozen=True, slots=True)
class GraphConstants:
    """Constants of CUDA graphs."""

    issue_us: float
    """microseconds of host time for each kernel"""
    source: str


@dataclass(frozen=True, slots=True)
class KernelConstants:
    """All constants of kernels.yaml."""

    gemm: GemmConstants
    convolution: ConvolutionConstants
    attention: AttentionConstants
    memory_bound: MemoryBoundConstants
    collectives: CollectiveConstants
    cuda_graph: GraphConstants


def kernel_constants() -> KernelConstants:
    """Returns the constants that the package ships."""
    return shipped(KernelConstants, "forerun.core.cost", "kernels.yaml")
