"""Full meshes: a link between every two NPUs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forerun.core.network.topology.base import MAX_LINKS, Links, Topology
from forerun.core.program.types import I32


@dataclass(frozen=True)
class FullyConnected(Topology):
    """Each NPU has a link to every other one."""

    n: int

    @property
    def n_npus(self) -> int:
        return self.n

    def links(self) -> Links:
        if self.n * (self.n - 1) > MAX_LINKS:
            raise self.error(f"it has {self.n * (self.n - 1):,} links, more than {MAX_LINKS:,}")
        return self.both_ways(np.triu_indices(self.n, 1))

    @property
    def npu_bandwidth_gbps(self) -> float:
        return (self.n - 1) * self.bandwidth_gbps

    def next_device(self, at: I32, to: I32) -> I32:
        return to
