"""One switch that connects all NPUs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forerun.core.network.topology.base import Links, Topology
from forerun.core.program.types import I32


@dataclass(frozen=True)
class Switch(Topology):
    """Two hops from any NPU to any other: to the switch (device n), and from it."""

    n: int

    @property
    def n_npus(self) -> int:
        return self.n

    @property
    def n_devices(self) -> int:
        return self.n + 1

    def links(self) -> Links:
        npu = np.arange(self.n, dtype=np.int32)
        return self.both_ways((npu, np.full_like(npu, self.n)))

    def next_device(self, at: I32, to: I32) -> I32:
        return np.where(at == self.n, to, np.int32(self.n))
