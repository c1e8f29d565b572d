"""The load that messages sent together put on the links of a network."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from forerun.common.units import GIGA, NS_PER_S
from forerun.core.network.group_traffic import Flows
from forerun.core.network.nccl import slower
from forerun.core.network.network_file import Network, bytes_per_ns
from forerun.core.network.topology.base import Links, Paths, Topology
from forerun.core.program.types import F64

Watched = Literal["all", "near", "far"]


@dataclass(frozen=True, slots=True)
class Busiest:
    """The link that limits a collective."""

    src: int
    """device: an NPU below the number of NPUs, a switch from there on"""
    dst: int
    s_per_byte: float
    """time it transmits for each byte of the collective's buffer, at its full rate"""


@dataclass(frozen=True, slots=True)
class Load:
    """The load that a collective in all groups of an axis at once puts on the links."""

    s_per_byte: float
    """of the collective's buffer"""
    near_latency_s: float
    """of the longest route between ranks of a node; 0 if there is none"""
    far_latency_s: float
    """of the longest route between nodes; 0 if there is none"""
    busiest: Busiest


@dataclass(frozen=True, eq=False)
class Fabric:
    """A network with its links as columns (links,)."""

    topology: Topology
    links: Links
    bytes_per_s: F64
    latency_s: F64

    def load(
        self, flows: Iterable[Flows], node_size: int, near_cost: float, far_cost: float, watched: Watched = "all"
    ) -> Load:
        """Returns the load of `flows`, all sent at once.

        Messages between ranks of a node of `node_size` take `near_cost` times as long as at the full rate of a link,
        others `far_cost` times. A link takes the sum of all that it carries, and links that carry only one sort work
        side by side with the others. Only links of the `watched` sort count.
        """
        near, far = np.zeros(len(self.bytes_per_s)), np.zeros(len(self.bytes_per_s))
        near_latency, far_latency = 0.0, 0.0
        for src, dst, weight in flows:
            paths = self.topology.routes(src, dst)
            is_near = src // node_size == dst // node_size
            latency = self._latency_s(paths)
            near_latency = max(near_latency, float(latency[is_near].max(initial=0.0)))
            far_latency = max(far_latency, float(latency[~is_near].max(initial=0.0)))
            near += self._bytes(paths, np.where(is_near, weight, 0.0))
            far += self._bytes(paths, np.where(is_near, 0.0, weight))
        near, far = near / self.bytes_per_s, far / self.bytes_per_s
        if watched != "all":
            chosen = (near if watched == "near" else far) > 0
            if chosen.any():
                near, far = near * chosen, far * chosen
        total = near * near_cost + far * far_cost
        apart = slower(float(near.max()) * near_cost, float(far.max()) * far_cost)
        link = int(np.argmax(total))
        busiest = Busiest(int(self.links.src[link]), int(self.links.dst[link]), float(near[link] + far[link]))
        return Load(max(apart, float(total[link])), near_latency, far_latency, busiest)

    def carried(self, flows: Iterable[Flows], node_size: int, far_cost: float) -> F64:
        """Returns (links,) seconds that each link transmits for a byte of the buffer of `flows`.

        Messages between nodes of `node_size` take `far_cost` times as long as at the full rate of a link.
        """
        total = np.zeros(len(self.bytes_per_s))
        for src, dst, weight in flows:
            cost = np.where(src // node_size == dst // node_size, 1.0, far_cost)
            total += self._bytes(self.topology.routes(src, dst), weight * cost)
        out: F64 = total / self.bytes_per_s
        return out

    def _bytes(self, paths: Paths, weight: F64) -> F64:
        carried = np.bincount(paths.link, weights=np.repeat(weight, paths.hops), minlength=len(self.bytes_per_s))
        return carried.astype(np.float64)

    def _latency_s(self, paths: Paths) -> F64:
        return np.add.reduceat(self.latency_s[paths.link], paths.first[:-1])


@lru_cache(maxsize=8)
def fabric_of(network: Network) -> Fabric:
    """Returns the links of `network`; the topology keeps its tables of routes."""
    topology = network.topology()
    links = topology.links()
    rate = np.asarray(bytes_per_ns(links.bandwidth_gbps, gib=network.gib)) * GIGA
    return Fabric(topology, links, rate, links.latency_ns / NS_PER_S)
