"""Gradient compression: low-rank factors, 8 bits, or only the largest gradients.

Kernels compress a bucket, collectives exchange the result, and kernels restore it. The kernels are memory-bound: a
method states how many bytes they move for each byte of gradients. They count as part of the exchange, and slow the
kernels beside it like any collective. The model does not include the host's launches and the effect of compression on
convergence.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace

from forerun.common.errors import ForerunError
from forerun.core.network.link_load import Busiest
from forerun.core.network.patterns import CommunicationPattern, Wires, has_all_reduce
from forerun.core.network.patterns_collectives import AllGather
from forerun.core.program.groups import CommGroup
from forerun.core.program.types import F64
from forerun.describe.model.matrices import Matrix
from forerun.describe.plan.plan import Plan

_INDEX_BYTES = 4
"""of the place of an element that is sent by itself (int32)"""
_LEAST_SAVING = 2
"""min_compression_rate of torch's PowerSGDState: matrices that would save less are sent as they are"""


class GradientCompression(CommunicationPattern):
    """A way to send gradients smaller than they are."""

    def check(self, plan: Plan) -> None:
        """Raises ForerunError if ranks don't all-reduce the gradients of whole parameters."""
        if not has_all_reduce(plan) or plan.zero_stage:
            raise ForerunError(
                f"gradient_compression: with zero_stage {plan.zero_stage} gradients are reduce-scattered, and what is"
                " compressed is all-reduced; use zero_stage 0"
            )
        for axis in ("tp", "ep"):
            if getattr(plan, axis) > 1:
                raise ForerunError(
                    f"gradient_compression: {axis} {getattr(plan, axis)} splits the parameters; use {axis} 1"
                )

    @abstractmethod
    def seconds(self, size_bytes: F64, group: CommGroup, wires: Wires) -> F64:
        """Returns the time to compress, exchange and restore."""

    @abstractmethod
    def wire_share(self, ranks: int) -> float:
        """Returns the bytes that a rank sends over those of an all-reduce of all gradients (2 for each of theirs)."""

    @abstractmethod
    def residual_share(self, ranks: int) -> float:
        """Returns the bytes that a rank keeps from step to step over those of its gradients."""


@dataclass(frozen=True)
class PowerSgd(GradientCompression):
    """PowerSGD (arXiv 1905.13727), as torch's powerSGD_hook runs it. A matrix M of n x m is sent as P = M Q of n x r
    and Q = M^T P of m x r. So r (n + m) elements replace n m.

    Each bucket has three all-reduces: the uncompressed tensors, all P, and all Q. Every bucket is taken to be made of
    matrices as the whole model is.
    """

    pattern: CommunicationPattern
    """the pattern that sums the factors"""
    rank: int
    plain: float
    """share of the gradients that is sent as it is: vectors, and matrices that would save too little"""
    first: float
    """elements of all P over those of all gradients"""
    second: float
    """elements of all Q over those of all gradients"""

    @staticmethod
    def of(found: Mapping[Matrix, int], parameters: int, rank: int, pattern: CommunicationPattern) -> PowerSgd:
        """Returns PowerSGD of `rank` for a model of so many `parameters`, whose matrices are `found`."""
        compressed = first = second = 0
        for (n, m), count in found.items():
            r = min(rank, n, m)
            if r * (n + m) * _LEAST_SAVING < n * m:
                compressed += count * n * m
                first, second = first + count * r * n, second + count * r * m
        return PowerSgd(pattern, rank, 1 - compressed / parameters, first / parameters, second / parameters)

    @property
    def name(self) -> str:
        """Returns the name with the rank, and how many times fewer bytes are sent."""
        return f"powersgd rank {self.rank} over {self.pattern.name} ({1 / self.share:.3g}x fewer bytes)"

    @property
    def share(self) -> float:
        """Returns the bytes on the wire over those of the gradients."""
        return self.plain + self.first + self.second

    def wire_share(self, ranks: int) -> float:
        """Returns the same share for any number of ranks."""
        return self.share

    def residual_share(self, ranks: int) -> float:
        """Returns the bytes of the errors, and of P and Q, relative to the gradients. The hook keeps errors of whole
        buckets, also where tensors are sent as they are. The next step starts from this Q (warm_start).
        """
        return 1 + self.first + self.second

    @property
    def as_nccl(self) -> bool:
        """Returns that of the pattern."""
        return self.pattern.as_nccl

    def seconds(self, size_bytes: F64, group: CommGroup, wires: Wires) -> F64:
        """Returns the seconds of torch's hook.

        It adds the error (3 passes over the bucket), keeps a copy (2), reads M for P and for Q (1 each), writes M (1),
        and takes its difference to the copy for the new error (3). Gradients that stay plain are copied twice.
        """
        packed = (1 - self.plain) * size_bytes
        kernels = sum(wires.pass_s(times * size_bytes) for times in (3, 2, 3)) + 3 * wires.pass_s(packed)
        total: F64 = kernels + 2 * wires.pass_s(2 * self.plain * size_bytes) * (self.plain > 0)
        for share in (self.plain, self.first, self.second):
            if share > 0:
                total = total + self.pattern.seconds(share * size_bytes, group, wires)
        return total

    def busiest(self, size_bytes: float, group: CommGroup, wires: Wires) -> Busiest | None:
        """Returns the busiest link of the pattern, with fewer bytes."""
        link = self.pattern.busiest(size_bytes * self.share, group, wires)
        return None if link is None else replace(link, s_per_byte=link.s_per_byte * self.share)


@dataclass(frozen=True)
class _Gathered(GradientCompression):
    """Every rank gathers the messages of all ranks and sums them itself, because their parts can't be summed on the
    way.
    """

    element_bytes: int
    """of a gradient"""

    @property
    def as_nccl(self) -> bool:
        """Returns NCCL's all-gather."""
        return True

    def gather_s(self, size_bytes: F64, group: CommGroup, wires: Wires) -> F64:
        """Returns the seconds until every rank has the `size_bytes` of each."""
        return AllGather().nccl_lines(group, wires).seconds(size_bytes * group.size)


@dataclass(frozen=True)
class Int8(_Gathered):
    """8 bits an element with one scale for each bucket and rank, as torch's quantization_pertensor_hook runs it."""

    @property
    def name(self) -> str:
        """Returns the name in reports."""
        return "int8 gathered"

    def wire_share(self, ranks: int) -> float:
        """Returns n - 1 narrow parts over the two that an all-reduce sends of each gradient."""
        return ranks / 2 / self.element_bytes

    def residual_share(self, ranks: int) -> float:
        """Returns 0: no error is kept."""
        return 0.0

    def seconds(self, size_bytes: F64, group: CommGroup, wires: Wires) -> F64:
        """Returns the seconds of the kernels and of both gathers.

        A rank finds the range (1 pass), gathers the scales, quantizes (1, and the bytes written) and gathers the
        result. It restores the gradients of each rank to the full width and adds them to the sum (4).
        """
        narrow = size_bytes / self.element_bytes
        compress = wires.pass_s(size_bytes) + wires.pass_s(size_bytes + narrow)
        scales = self.gather_s(0 * size_bytes + 2 * 4, group, wires)
        restore = wires.pass_s(narrow + size_bytes) + wires.pass_s(3 * size_bytes)
        return compress + scales + self.gather_s(narrow, group, wires) + group.size * restore


@dataclass(frozen=True)
class TopK(_Gathered):
    """The largest gradients with their places, the rest kept for later steps (arXiv 1704.05021), with torch.topk."""

    density: float = 0.01
    """share of the gradients that is sent"""

    @property
    def name(self) -> str:
        """Returns the name with the share that is sent."""
        return f"top {self.density:.3g} of gradients gathered"

    def wire_share(self, ranks: int) -> float:
        """Returns n - 1 parts of values and places over the two that an all-reduce sends of each gradient."""
        return ranks / 2 * self.density * (1 + _INDEX_BYTES / self.element_bytes)

    def residual_share(self, ranks: int) -> float:
        """Returns 1, because gradients that are not sent are kept."""
        return 1.0

    def seconds(self, size_bytes: F64, group: CommGroup, wires: Wires) -> F64:
        """Returns the seconds of the kernels and of the exchange.

        The kernels add the residuals of earlier steps (3 passes) and take magnitudes (2). torch.topk finds the
        threshold by radix in digits of 8 bits, a pass for each, and collects what exceeds it (1); what is sent leaves
        the rest. At last the places of all ranks are read, and their gradients added.
        """
        chosen = self.density * size_bytes
        wire = chosen * (1 + _INDEX_BYTES / self.element_bytes)
        select = wires.pass_s((3 + 2) * size_bytes) + self.element_bytes * wires.pass_s(size_bytes)
        collect = wires.pass_s(size_bytes + wire) + wires.pass_s(chosen)
        restore = wires.pass_s(size_bytes) + group.size * wires.pass_s(wire + 2 * chosen)
        return select + collect + self.gather_s(wire, group, wires) + restore
