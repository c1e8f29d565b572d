"""What the formulas of kernels' times take for granted on every device, from `kernels.yaml`."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.common.shipped import shipped


@dataclass(frozen=True, slots=True)
class GemmConstants:
    """Matrix products."""

    tile_outputs: int
    """results of one tile, the unit of a wave for each multiprocessor"""
    aligned_bytes: int
    """what the bytes of an operand's row have to be a multiple of to be read at full speed"""
    aligned_rows: int
    """what m has to be a multiple of where a profile knows `odd_rows`"""
    padding_gain: float
    """how many times as fast a padded product has to be for TorchInductor to pad it"""
    calibrated_sizes: tuple[int, int]
    """smallest and largest m, n and k that count as measured"""
    source: str


@dataclass(frozen=True, slots=True)
class ConvolutionConstants:
    """Convolutions."""

    partial_sum_bytes: float
    """bytes moved for each partial sum of a product that is split along its depth"""
    source: str


@dataclass(frozen=True, slots=True)
class AttentionConstants:
    """Fused attention."""

    block_queries: int
    """queries of one block of rows"""
    element_bytes: float
    backward_passes: float
    """bytes that the backward kernel moves over those of the forward kernel"""
    calibrated_lengths: tuple[int, int]
    """smallest and largest numbers of queries and of keys that count as measured"""
    source: str


@dataclass(frozen=True, slots=True)
class CollectiveConstants:
    """Collectives inside a node."""

    calibrated_ranks: int
    """most ranks of a group that counts as measured"""
    source: str


@dataclass(frozen=True, slots=True)
class GraphConstants:
    """CUDA graphs."""

    issue_us: float
    """host time of each kernel"""
    source: str


@dataclass(frozen=True, slots=True)
class KernelConstants:
    """All of them."""

    gemm: GemmConstants
    convolution: ConvolutionConstants
    attention: AttentionConstants
    collectives: CollectiveConstants
    cuda_graph: GraphConstants


def kernel_constants() -> KernelConstants:
    """The constants that the package ships."""
    return shipped(KernelConstants, "forerun.core.cost", "kernels.yaml")
