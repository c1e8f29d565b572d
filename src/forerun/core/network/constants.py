"""Constants of collectives: inside a node by link, between nodes by fabric (`fabrics.yaml`)."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

import pydantic

from forerun.common.shipped import shipped


@dataclass(frozen=True, slots=True)
class NodeOp:
    """One collective inside a node, three protocols; times in microseconds, bandwidths in GB/s of bus bandwidth.

    With r = ranks - 1, g = r / (r + kappa) and x the bytes that pass each rank's link:
    a + h r + x / (bw1 g),  a + d2 + h r + x / (bw2 g),  a + d2 + d3 + (h + h3) r + x / (bw3 g).
    """

    a_us: float
    h_us: float
    bw1: float
    d2: float
    bw2: float
    d3: float
    h3: float
    bw3: float
    kappa: float


@dataclass(frozen=True, slots=True)
class NodeCollectives:
    """Collectives inside a node whose links run at `link_gb_s` per GPU and direction; other rates scale with it."""

    link_gb_s: float
    all_reduce: NodeOp
    all_gather: NodeOp
    reduce_scatter: NodeOp
    all_to_all: NodeOp
    source: str


@dataclass(frozen=True, slots=True)
class Protocol:
    """One NCCL protocol between nodes."""

    base_us: float
    node_hop_us: float
    """of a hop inside a node"""
    net_hop_us: float
    """of a hop between nodes, on a fabric of reference latency"""
    rate: float
    """bandwidth as a share of what the fabric sustains"""

    def ring_us(self, nodes: int, ranks: int, rounds: float, near_us: float, far_us: float) -> float:
        """Latency of so many rounds of a ring over `nodes` nodes of `ranks` ranks.

        Every hop takes `near_us` more inside a node and `far_us` more between nodes than where it was measured.
        """
        step = (ranks - 1) * (self.node_hop_us + near_us) + self.net_hop_us + far_us
        return self.base_us + rounds * nodes * step

    def tree_us(self, nodes: int, ranks: int, near_us: float, far_us: float) -> float:
        """Latency of an all-reduce up and down a binary tree over the nodes, with a chain of ranks in each node."""
        climb = (ranks - 1) * (self.node_hop_us + near_us) + log2(nodes) * (self.net_hop_us + far_us)
        return self.base_us + 2 * climb


@dataclass(frozen=True, slots=True)
class AllToAll:
    """An exchange between nodes, in which each rank sends to every other."""

    base_us: float
    growth_us: float
    """on one node"""
    power: float
    """power of the number of nodes with which the latency grows"""
    node_ranks: int
    """GPUs of a node where it was measured"""

    def latency_us(self, ranks: int) -> float:
        """Latency of an exchange among `ranks`."""
        return self.base_us + float(self.growth_us * (ranks / self.node_ranks) ** self.power)


@dataclass(frozen=True, slots=True)
class Crowding:
    """Bandwidth that rings and trees lose on a fabric: none over `nodes` nodes or fewer, `loss` with each doubling."""

    nodes: int
    loss: float

    def factor(self, nodes: int) -> float:
        """Time over `nodes` nodes over that without other flows."""
        return 1.0 + self.loss * log2(max(nodes / self.nodes, 1.0))


@dataclass(frozen=True, slots=True)
class HostPath:
    """Bus bandwidth of each GPU where GPUs have no peer access and n of a node send at once through host memory."""

    pair_gb_s: float
    """of two GPUs"""
    power: float
    """n GPUs have (2 / n)^power of that"""

    def share(self, known: int, gpus: int) -> float:
        """Returns the bandwidth of each of `gpus` GPUs divided by that of each of `known` GPUs."""
        return float((known / gpus) ** self.power)


@dataclass(frozen=True, slots=True)
class Fabrics:
    """Everything in `fabrics.yaml`."""

    ring: tuple[Protocol, ...]
    tree: tuple[Protocol, ...]
    all_to_all: AllToAll
    reference_latency_us: float
    """of the fabric that the hops were measured on; a slower one adds its difference to every hop"""
    efficiency: dict[str, float]
    """link kind -> share of the wire rate that large collectives sustain"""
    efficiency_other: float
    crowding: Crowding
    host_path: HostPath
    measured_ranks: int
    """most ranks of a node that collectives inside one were measured on"""
    measured_links: tuple[str, ...]
    """kinds of links over which the collectives of a device's own profile were measured"""
    in_node: dict[str, NodeCollectives]
    source: dict[str, str]

    __pydantic_config__ = pydantic.ConfigDict(extra="forbid")


def fabrics() -> Fabrics:
    """The shipped constants."""
    return shipped(Fabrics, "forerun.core.network", "fabrics.yaml")
