"""Dragonflies."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from forerun.core.network.topology.base import MAX_LINKS, Links, Topology, joined
from forerun.core.program.types import I32

Integers = npt.NDArray[np.integer]


@dataclass(frozen=True)
class Dragonfly(Topology):
    """Groups of routers, after Kim et al. (ISCA 2008): all routers of a group, and all groups, are joined.

    NPU i + npus * (router + routers * group). `global_links` join every two groups; their ends go round the routers of
    a group. `global_bandwidth_gbps` and `global_latency_ns` default to those of the other links. Routing is minimal: to
    the router with the global link, over it, to the last router. The number of the NPU that receives a message selects
    one of several global links.
    """

    npus: int
    routers: int
    groups: int
    global_links: int = field(default=1, kw_only=True)
    global_bandwidth_gbps: float | None = field(default=None, kw_only=True)
    global_latency_ns: float | None = field(default=None, kw_only=True)

    def check_options(self) -> None:
        if self.global_links > self.routers:
            raise self.error(f"{self.global_links} global links between two groups of only {self.routers} routers")

    @property
    def n_npus(self) -> int:
        return self.npus * self.routers * self.groups

    @property
    def n_devices(self) -> int:
        return self.n_npus + self.routers * self.groups

    def links(self) -> Links:
        n_global = self.groups * (self.groups - 1) * self.global_links
        n_local = self.groups * self.routers * (self.routers - 1)
        if n_global + n_local > MAX_LINKS:
            raise self.error(f"it has {n_global + n_local:,} links between routers, more than {MAX_LINKS:,}")
        npu = np.arange(self.n_npus)
        one, other = np.triu_indices(self.routers, 1)
        first = np.repeat(np.arange(self.groups) * self.routers, len(one)) + self.n_npus
        near = self.both_ways(
            (npu, self.n_npus + npu // self.npus),
            (first + np.tile(one, self.groups), first + np.tile(other, self.groups)),
        )
        if self.groups == 1:
            return near
        here, there = (np.repeat(group, self.global_links) for group in np.triu_indices(self.groups, 1))
        number = np.tile(np.arange(self.global_links), len(here) // self.global_links)
        far = self.both_ways(
            (self._gateway(here, there, number), self._gateway(there, here, number)),
            bandwidth_gbps=self.global_bandwidth_gbps,
            latency_ns=self.global_latency_ns,
        )
        return joined(near, far)

    def _gateway(self, group: Integers, other: Integers, number: Integers) -> Integers:
        """Returns the router of `group` that has the global link of that number to group `other`."""
        distance = (other - group - 1) % self.groups
        return self.n_npus + group * self.routers + (distance * self.global_links + number) % self.routers

    def next_device(self, at: I32, to: I32) -> I32:
        goal = self.n_npus + to // self.npus
        group = np.maximum(at - self.n_npus, 0) // self.routers
        goal_group = to // (self.npus * self.routers)
        number = to % self.global_links
        gateway = self._gateway(group, goal_group, number)
        beyond = self._gateway(goal_group, group, number)
        across = np.where(at == gateway, beyond, gateway)
        nearby = np.where(at == goal, to, goal)
        from_router = np.where(group == goal_group, nearby, across)
        return np.where(at < self.n_npus, self.n_npus + at // self.npus, from_router).astype(np.int32)
