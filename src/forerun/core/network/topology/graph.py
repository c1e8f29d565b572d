"""Networks given link by link, as packet simulators describe them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from forerun.core.network.topology.base import Links, Topology
from forerun.core.program.types import I32

_FAR = 1 << 20
_MOST_ROUTES = 20_000_000


class Cable(NamedTuple):
    """A connection of two devices, which carries its bandwidth in either direction."""

    one: int
    other: int
    bandwidth_gbps: float
    """GB/s of 10**9 bytes"""
    latency_ns: float


@dataclass(frozen=True)
class Graph(Topology):
    """Devices joined by `cables`: the first `npus` are NPUs, the other devices switches.

    A message takes a route of the fewest links. Where several links lead on as directly, it takes one by the number of
    the NPU that it goes to, where packet simulators draw or hash one for each flow. Cables between the same devices act
    as one that has the bandwidth of all.
    """

    npus: int
    devices: int
    cables: Sequence[Cable] = field(repr=False)

    def check_options(self) -> None:
        ends = [end for cable in self.cables for end in cable[:2]]
        if not ends or min(ends) < 0 or max(ends) >= self.devices or any(c.one == c.other for c in self.cables):
            raise self.error("a link has to join two different devices of the network")
        if self.devices * self.npus > _MOST_ROUTES:
            raise self.error(f"{self.devices:,} devices with {self.npus:,} NPUs are too many for a table of routes")
        for cable in self.cables:
            self._check_figure("bandwidth_gbps", cable.bandwidth_gbps)
            self._check_figure("latency_ns", cable.latency_ns)
        if (self._distance[: self.npus] >= _FAR).any():
            raise self.error("some NPU can't reach another one")

    def __str__(self) -> str:
        return f"network of {self.npus} NPUs and {self.devices - self.npus} other devices"

    @property
    def n_npus(self) -> int:
        return self.npus

    @property
    def n_devices(self) -> int:
        return self.devices

    def links(self) -> Links:
        return self._links

    @property
    def most_hops(self) -> int:
        """Returns the links of the longest route between NPUs."""
        return int(self._distance[: self.npus].max())

    @cached_property
    def _links(self) -> Links:
        ends = np.array([cable[:2] for cable in self.cables], np.int64).reshape(-1, 2)
        both = np.concatenate([ends, ends[:, ::-1]])
        pair, number = np.unique(both, axis=0, return_inverse=True)
        speed = np.tile([cable.bandwidth_gbps for cable in self.cables], 2)
        delay = np.tile([cable.latency_ns for cable in self.cables], 2)
        latency = np.zeros(len(pair))
        np.maximum.at(latency, number.reshape(-1), delay)
        src, dst = pair.astype(np.int32).T
        return Links(src, dst, np.bincount(number.reshape(-1), speed).astype(np.float64), latency)

    @cached_property
    def _distance(self) -> I32:
        """Returns (devices, NPUs): links of the shortest route."""
        links = self._links
        far = np.full((self.devices, self.npus), _FAR, np.int32)
        far[np.arange(self.npus), np.arange(self.npus)] = 0
        order = np.argsort(links.src, kind="stable")
        first = np.flatnonzero(np.diff(links.src[order], prepend=-1))
        while True:
            nearest = np.minimum.reduceat(far[links.dst[order]] + 1, first, axis=0)
            joined = links.src[order][first]
            nearer = np.minimum(far[joined], nearest)
            if np.array_equal(nearer, far[joined]):
                return far
            far[joined] = nearer

    @cached_property
    def _following(self) -> I32:
        """Returns (devices, NPUs): the next device on the way."""
        links, distance = self._links, self._distance
        following = np.zeros((self.devices, self.npus), np.int32)
        to = np.arange(self.npus)
        for device in np.unique(links.src).tolist():
            others = links.dst[links.src == device]
            leads_on = distance[others] == distance[device] - 1
            wanted = to % np.maximum(leads_on.sum(axis=0), 1)
            following[device] = others[np.argmax(leads_on & (np.cumsum(leads_on, axis=0) == wanted + 1), axis=0)]
        return following

    def next_device(self, at: I32, to: I32) -> I32:
        """Returns one of the next devices of the shortest routes, by the number of the NPU."""
        following: I32 = self._following[at, to]
        return following
