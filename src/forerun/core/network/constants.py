"""Constants of collectives: inside a node by link, between nodes by fabric (`fabrics.yaml`)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
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
class Over:
    """The changes that a fabric of one kind makes to a `Protocol`."""

    rate: float
    crossings: float


@dataclass(frozen=True, slots=True)
class Protocol:
    """One NCCL protocol between nodes."""

    base_us: float
    node_hop_us: float
    """of a hop inside a node"""
    net_hop_us: float
    """of a hop between nodes, on a fabric of reference latency"""
    rate: float
    """bandwidth as a share of the rate that the fabric sustains"""
    crossings: float = 1.0
    """number of times that a hop between nodes has the additional latency of a fabric over the reference's"""
    over: dict[str, Over] = field(default_factory=dict, hash=False)
    """fabrics over which it differs, by the kind of their links"""

    def on(self, kind: str) -> Protocol:
        """Returns the protocol over links of `kind`."""
        own = self.over.get(kind)
        return self if own is None else replace(self, rate=own.rate, crossings=own.crossings)

    def ring_us(self, nodes: int, hops: float, rounds: float, near_us: float, far_us: float) -> float:
        """Returns the latency of so many rounds of a ring over `nodes` nodes with `hops` hops inside each.

        Every hop takes `near_us` more inside a node and `far_us` more between nodes than where it was measured. The
        last step of a round stays inside a node, as NCCL counts.
        """
        near = nodes * hops * (self.node_hop_us + near_us)
        return self.base_us + rounds * (near + (nodes - 1) * (self.net_hop_us + self.crossings * far_us))

    def tree_us(self, nodes: int, hops: float, near_us: float, far_us: float) -> float:
        """Returns the latency of an all-reduce up and down a binary tree over the nodes, with a chain of `hops` in each
        node."""
        climb = hops * (self.node_hop_us + near_us) + log2(nodes) * (self.net_hop_us + self.crossings * far_us)
        return self.base_us + 2 * climb


@dataclass(frozen=True, slots=True)
class SwitchLine:
    """One line of an all-reduce inside a node that its switches add."""

    latency_us: float
    bus_gb_s: float


@dataclass(frozen=True, slots=True)
class NodeSwitches:
    """All-reduces that the NVSwitches of a node add, on GPUs of one architecture (NCCL: NVLS)."""

    link_gb_s: float
    """of a GPU's links in one direction where it was measured; the bandwidths scale with it"""
    lines: tuple[SwitchLine, ...]
    source: str


@dataclass(frozen=True, slots=True)
class SwitchTree:
    """All-reduces that switches add inside each node and GPUs in trees between nodes (NCCL: NVLSTree)."""

    pair: Protocol
    """over two nodes; its base is that of the switches, its rate a share of the rate that links and NICs sustain"""
    more: Protocol
    """over more nodes"""

    def of(self, nodes: int, kind: str) -> Protocol:
        """Returns the constants over `nodes` nodes that links of `kind` join."""
        return (self.pair if nodes == 2 else self.more).on(kind)


@dataclass(frozen=True, slots=True)
class FabricSwitches:
    """All-reduces that the switches between nodes add too (NCCL: CollNet, with InfiniBand's SHARP)."""

    base_us: float
    net_hop_us: float
    rate: float
    """bandwidth as a share of the rate that links and NICs sustain"""


@dataclass(frozen=True, slots=True)
class InSwitch:
    """Reductions inside switches, and when NCCL takes them."""

    nccl: str
    """first version that has them"""
    least_ranks: int
    """ranks in a node from which on NCCL prefers them to rings"""
    architectures: dict[str, NodeSwitches]
    tree: SwitchTree
    fabric: FabricSwitches

    def of(self, architecture: str, ranks: int) -> NodeSwitches | None:
        """Returns the constants of all-reduces among `ranks` GPUs of a node; None if NCCL takes none."""
        return self.architectures.get(architecture) if ranks >= self.least_ranks else None


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
    rate: float
    """bandwidth as a share of the rate that rings sustain on the fabric"""
    crossings: dict[str, float] = field(hash=False)
    """number of times that an exchange has the additional latency of a fabric over the reference's, by kind; once if
    not listed
    """

    def latency_us(self, ranks: int, far_us: float, kind: str) -> float:
        """Returns the latency of an exchange among `ranks` over links of `kind`, whose hops take `far_us` beyond the
        reference."""
        growth = float(self.growth_us * (ranks / self.node_ranks) ** self.power)
        return self.base_us + growth + self.crossings.get(kind, 1.0) * far_us


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
    in_switch: InSwitch
    all_to_all: AllToAll
    reference_latency_us: float
    """of the fabric that the hops were measured on; a slower one adds its difference to every hop"""
    efficiency: dict[str, float]
    """link kind -> share of the wire rate that large collectives sustain"""
    efficiency_other: float
    most_nics: float
    """NICs of a node whose bandwidth the rings and trees of one collective reach together"""
    host_path: HostPath
    measured_ranks: int
    """most ranks of a node that collectives inside one were measured on"""
    measured_links: tuple[str, ...]
    """kinds of links over which the collectives of a device's own profile were measured"""
    in_node: dict[str, NodeCollectives]
    source: dict[str, str]

    __pydantic_config__ = pydantic.ConfigDict(extra="forbid")


def fabrics() -> Fabrics:
    """Returns the shipped constants."""
    return shipped(Fabrics, "forerun.core.network", "fabrics.yaml")
