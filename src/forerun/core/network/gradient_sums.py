"""Gradients that are summed in 8 bits on the way, or exchanged as signs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from forerun.core.network.alpha_beta import AlphaBeta, ring_line
from forerun.core.network.formulas import passes
from forerun.core.network.gradient_compression import GradientCompression
from forerun.core.network.group_traffic import Layout
from forerun.core.network.patterns import Wires
from forerun.core.network.patterns_collectives import AllGather, CollectivePattern, Nccl
from forerun.core.program.groups import CommGroup
from forerun.core.program.types import F64, Collective

_SCALE_BYTES = 4


@dataclass(frozen=True)
class AllToAll(CollectivePattern):
    """Every rank sends an equal part to each other one."""

    name: str = "all_to_all"
    kind: ClassVar[Collective] = Collective.ALL_TO_ALL

    def textbook(self, layout: Layout, wires: Wires, rates: AlphaBeta) -> list[tuple[float, float]]:
        """Returns (n - 1) alpha + (n - 1) / n bytes beta, as an all-gather of as many bytes takes."""
        rounds = passes(Collective.ALL_GATHER, layout.size)
        return [ring_line(layout, rounds, wires.fabric, wires.node_size, rates)]


@dataclass(frozen=True)
class Summed8(GradientCompression):
    """8 bits an element under one scale of all ranks, which NCCL adds as it adds any other type.

    The scale leaves room for the sum, so that n ranks lose log2(n) bits of an integer; `kind` is int8 or fp8.
    """

    kind: str
    element_bytes: int
    """of a gradient"""

    @property
    def name(self) -> str:
        """Returns the name in reports."""
        return f"{self.kind} summed"

    @property
    def as_nccl(self) -> bool:
        """Returns NCCL's all-reduce."""
        return True

    def wire_share(self, ranks: int) -> float:
        """Returns one byte for those of a gradient."""
        return 1.0 / self.element_bytes

    def residual_share(self, ranks: int) -> float:
        """Returns 0: no error is kept."""
        return 0.0

    def seconds(self, size_bytes: F64, group: CommGroup, wires: Wires) -> F64:
        """Returns the seconds to find the range (1 pass) and its largest over all ranks, quantize (1, and the bytes
        written), sum, and restore."""
        narrow = size_bytes / self.element_bytes
        sums = Nccl().nccl_lines(group, wires)
        kernels = wires.pass_s(size_bytes) + 2 * wires.pass_s(size_bytes + narrow)
        total: F64 = kernels + sums.seconds(0 * size_bytes + _SCALE_BYTES) + sums.seconds(narrow)
        return total


@dataclass(frozen=True)
class OneBit(GradientCompression):
    """Signs with one scale, and their errors fed back at both ends (1-bit Adam, arXiv 2102.02888).

    Ranks exchange the signs of a part each all to all, average their own part, and gather the signs of the averages.
    """

    element_bytes: int
    """of a gradient"""

    @property
    def name(self) -> str:
        """Returns the name in reports."""
        return "1-bit signs"

    @property
    def as_nccl(self) -> bool:
        """Returns NCCL's all-to-all and all-gather."""
        return True

    def wire_share(self, ranks: int) -> float:
        """Returns one bit for those of a gradient."""
        return 1.0 / (8 * self.element_bytes)

    def residual_share(self, ranks: int) -> float:
        """Returns the errors of all gradients, and those of the averages of a rank's own part."""
        return 1.0 + 1.0 / ranks

    def seconds(self, size_bytes: F64, group: CommGroup, wires: Wires) -> F64:
        """Returns the seconds of the kernels and of both exchanges.

        A rank adds the error (3 passes), finds the scale (1), writes signs (1) and keeps the new error (3). Of its own
        part it reads the signs of all, writes their mean, and does the same again. At last all ranks restore the signs.
        """
        bits, part = size_bytes / (8 * self.element_bytes), size_bytes / group.size
        at_worker = wires.pass_s(3 * size_bytes) + wires.pass_s(size_bytes) + wires.pass_s(size_bytes + bits)
        at_worker = at_worker + wires.pass_s(3 * size_bytes)
        at_server = wires.pass_s(bits + part) + wires.pass_s(3 * part) + wires.pass_s(2 * part) + wires.pass_s(3 * part)
        there = AllToAll().nccl_lines(group, wires).seconds(bits)
        back = AllGather().nccl_lines(group, wires).seconds(bits)
        total: F64 = at_worker + there + at_server + back + wires.pass_s(bits + size_bytes)
        return total
