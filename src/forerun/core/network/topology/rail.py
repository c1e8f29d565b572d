"""Rail-optimised clusters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from forerun.core.network.topology.base import Links, Topology, joined
from forerun.core.program.types import I32


@dataclass(frozen=True)
class Rail(Topology):
    """Nodes of `gpus` GPUs with a switch inside (NVLink), and one rail switch for each place in a node.

    NPU local + gpus * node. Bandwidth and latency are those of the rails; `node_bandwidth_gbps` and `node_latency_ns`,
    those of the links inside a node, default to them. To another rail a message crosses inside its node first, as NCCL
    does (PXN), so that it stays on one rail between nodes. Node switches come before rail switches.
    """

    between_nodes: ClassVar[str] = (
        "one switch for each place in a node; messages to another place cross their own node first"
    )

    gpus: int
    nodes: int
    node_bandwidth_gbps: float | None = field(default=None, kw_only=True)
    node_latency_ns: float | None = field(default=None, kw_only=True)

    @property
    def n_npus(self) -> int:
        return self.gpus * self.nodes

    @property
    def n_devices(self) -> int:
        return self._first_rail + self.gpus

    @property
    def _first_rail(self) -> int:
        return self.n_npus + self.nodes

    def links(self) -> Links:
        npu = np.arange(self.n_npus)
        inside = self.both_ways(
            (npu, self.n_npus + npu // self.gpus),
            bandwidth_gbps=self.node_bandwidth_gbps,
            latency_ns=self.node_latency_ns,
        )
        return joined(inside, self.both_ways((npu, self._first_rail + npu % self.gpus)))

    def next_device(self, at: I32, to: I32) -> I32:
        is_npu, is_rail = at < self.n_npus, at >= self._first_rail
        node = np.where(is_npu, at // self.gpus, at - self.n_npus)
        same_node = node == to // self.gpus
        rail = to % self.gpus
        on_rail = at % self.gpus == rail
        from_npu = np.where(~same_node & on_rail, self._first_rail + rail, self.n_npus + node)
        from_rail = to // self.gpus * self.gpus + at - self._first_rail
        from_node = np.where(same_node, to, node * self.gpus + rail)
        return np.select([is_npu, is_rail], [from_npu, from_rail], from_node).astype(np.int32)
