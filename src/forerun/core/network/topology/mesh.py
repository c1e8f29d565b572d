"""Meshes: grids of NPUs without wrap-around links."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from forerun.core.network.topology.base import Links, Topology
from forerun.core.program.types import I32


@dataclass(frozen=True)
class Mesh2D(Topology):
    """NPU x + nx * y has links to its up to four neighbours; messages go along x first, then along y (xy routing)."""

    between_nodes: ClassVar[str] = (
        "four links, to the neighbours in a grid as square as possible; those of nodes at its edge lead nowhere"
    )

    nx: int
    ny: int

    @property
    def n_npus(self) -> int:
        return self.nx * self.ny

    def links(self) -> Links:
        npu = np.arange(self.n_npus, dtype=np.int32)
        has_right = npu[npu % self.nx < self.nx - 1]
        has_upper = npu[npu // self.nx < self.ny - 1]
        return self.both_ways((has_right, has_right + 1), (has_upper, has_upper + self.nx))

    def next_device(self, at: I32, to: I32) -> I32:
        step_x = np.sign(to % self.nx - at % self.nx)
        step_y = np.sign(to // self.nx - at // self.nx)
        following: I32 = at + np.where(step_x != 0, step_x, step_y * self.nx)
        return following

    def hop_counts(self, src: I32, dst: I32) -> I32:
        hops: I32 = np.abs(dst % self.nx - src % self.nx) + np.abs(dst // self.nx - src // self.nx)
        return hops
