"""Rings: links between neighbours in a circle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from forerun.core.network.topology.base import Links, Topology
from forerun.core.program.types import I32


@dataclass(frozen=True)
class Ring(Topology):
    """Each NPU has links to both neighbours; messages take the shorter way round, clockwise (+1) on a tie."""

    between_nodes: ClassVar[str] = "two links, to the nodes on either side"

    n: int

    @property
    def n_npus(self) -> int:
        return self.n

    def links(self) -> Links:
        npu = np.arange(self.n if self.n > 2 else 1, dtype=np.int32)
        return self.both_ways((npu, (npu + 1) % self.n))

    def next_device(self, at: I32, to: I32) -> I32:
        clockwise = (to - at) % self.n
        step = np.where(2 * clockwise <= self.n, np.int32(1), np.int32(-1))
        following: I32 = (at + step) % self.n
        return following

    def hop_counts(self, src: I32, dst: I32) -> I32:
        clockwise: I32 = (dst - src) % self.n
        return np.minimum(clockwise, self.n - clockwise)
