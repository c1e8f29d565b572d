"""The base of all topologies: devices, directed links, and the next device on the way to each NPU.

A topology defines its sizes and options as fields, its links, and `next_device`. From these follow the routes, the hop
counts, the tables for simulations, and the checks that every route uses existing links and arrives. Routing is by
destination: the next hop depends only on the present device and the destination NPU.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.common.errors import ForerunError
from forerun.common.jit import njit
from forerun.core.program.types import F64, I32, I64

_LARGEST = 1e12
"""of a bandwidth in GB/s, a latency in ns and all other figures"""
_LEAST_GBPS = 1e-9
"""a byte a second"""
MAX_DEVICES = 1 << 24
MAX_LINKS = 1 << 25
_MAX_TABLE = 200_000_000
"""entries of a table of next links: 800 MB"""
_WALK_TABLE = 1 << 22
"""routes are read from a table of next links where it has no more entries than this, or than there are routes"""
_BLOCK = 1 << 22

Connections = tuple[npt.NDArray[np.integer], npt.NDArray[np.integer]]


@dataclass(frozen=True, eq=False)
class Links:
    """Directed links, at most one from a device to another. All arrays (links,)."""

    src: I32
    dst: I32
    bandwidth_gbps: F64
    """GB/s, in the unit of the network they belong to"""
    latency_ns: F64

    def __len__(self) -> int:
        return len(self.src)


class Paths(NamedTuple):
    """Routes of many messages: message i takes the links `link[first[i] : first[i + 1]]`."""

    first: I64
    link: I32

    @property
    def hops(self) -> I64:
        return np.diff(self.first)


class _Outgoing(NamedTuple):
    """Links by the device they leave, ascending by the device they reach."""

    first: I64
    dst: I32
    link: I32


@dataclass(frozen=True)
class Topology(ABC):
    """Devices 0 .. n_npus - 1 are NPUs, the others switches.

    A subclass is a frozen dataclass. Its plain fields are sizes (integers), its keyword-only fields options.
    """

    between_nodes: ClassVar[str] = ""
    """description between the nodes of a cluster, in words; experiments offer topologies that have one"""

    bandwidth_gbps: float = field(kw_only=True)
    """of a link, GB/s in the unit of the network it belongs to"""
    latency_ns: float = field(kw_only=True)
    """of a link"""

    def __post_init__(self) -> None:
        """Checks all fields: sizes and whole-number options at least 1, bandwidths positive, other figures not
        negative.

        Raises:
            ForerunError: a value makes no sense, or the topology is too large.
        """
        for each in fields(self):
            value = getattr(self, each.name)
            if each.type == "int" or (each.type == "int | None" and value is not None):
                if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                    raise self.error(f"{each.name} is {value!r}, it has to be a whole number of at least 1")
            elif each.type == "float" or (each.type == "float | None" and value is not None):
                self._check_figure(each.name, value)
        if self.n_npus < 2:
            raise self.error("a network has at least 2 NPUs")
        if self.n_npus <= MAX_DEVICES:
            self.check_options()
        if self.n_npus > MAX_DEVICES or self.n_devices > MAX_DEVICES:
            raise self.error(f"it has more than {MAX_DEVICES:,} devices")

    def check_options(self) -> None:  # noqa: B027
        """Checks rules of several fields together; a subclass raises `self.error(...)`. The base checks nothing."""

    def _check_figure(self, name: str, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.error(f"{name} is {value!r}, it has to be a number")
        if value < 0 or (value == 0 and name.endswith("bandwidth_gbps")):
            least = "above 0" if name.endswith("bandwidth_gbps") else "0 or more"
            raise self.error(f"{name} is {value!r}, it has to be {least}")
        if value > _LARGEST:
            raise self.error(f"{name} is {value!r:.60}, at most {_LARGEST:.0e} is simulated")
        if name.endswith("bandwidth_gbps") and value < _LEAST_GBPS:
            raise self.error(f"{name} is {value!r}, at least {_LEAST_GBPS:g} is simulated")

    # -- what a topology says --------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def n_npus(self) -> int:
        """Returns the number of NPUs."""

    @property
    def n_devices(self) -> int:
        """Returns the number of NPUs and switches."""
        return self.n_npus

    @abstractmethod
    def links(self) -> Links:
        """Returns all links."""

    @abstractmethod
    def next_device(self, at: I32, to: I32) -> I32:
        """Returns the device after `at` on the way to NPU `to`, elementwise; any device where `at` is `to`."""

    # -- what follows ----------------------------------------------------------------------------------------------

    @property
    def npu_bandwidth_gbps(self) -> float:
        """Returns the bandwidth of all links that leave an NPU, for the NPU that has the least."""
        links = self.links()
        of_npu = links.src < self.n_npus
        leaving = np.bincount(links.src[of_npu], links.bandwidth_gbps[of_npu], minlength=self.n_npus)
        return float(leaving.min())

    @classmethod
    def size_names(cls) -> tuple[str, ...]:
        """Returns the names of the sizes, in their order."""
        return tuple(each.name for each in fields(cls) if not each.kw_only)

    @classmethod
    def has_plain_sizes(cls) -> bool:
        """Returns whether all sizes are integers, as a network file says them."""
        return all(each.type == "int" for each in fields(cls) if not each.kw_only)

    @classmethod
    def option_names(cls) -> tuple[str, ...]:
        """Returns the names of the arguments besides bandwidth and latency."""
        common = {each.name for each in fields(Topology)}
        return tuple(each.name for each in fields(cls) if each.kw_only and each.name not in common)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(getattr(self, name) for name in self.size_names())

    def __str__(self) -> str:
        return f"{type(self).__name__} {'x'.join(str(size) for size in self.sizes)}"

    def error(self, problem: str) -> ForerunError:
        """Returns a ForerunError about this topology."""
        return ForerunError(f"{self}: {problem}")

    def route(self, src: int, dst: int) -> list[int]:
        """Returns the devices from NPU `src` to NPU `dst`, both included."""
        path = self.routes(np.array([src], np.int32), np.array([dst], np.int32))
        return [src, *(int(device) for device in self._graph[0].dst[path.link])]

    def hops(self, src: int, dst: int) -> int:
        """Returns the links from NPU `src` to NPU `dst`."""
        ends = np.array([[src], [dst]], np.int32)
        self._check_npus(ends)
        return int(self.hop_counts(*ends)[0])

    def hop_counts(self, src: I32, dst: I32) -> I32:
        """Returns links between NPUs, elementwise; 0 from an NPU to itself."""
        return self.routes(src, dst).hops.astype(np.int32)

    def routes(self, src: I32, dst: I32) -> Paths:
        """Returns the links from NPUs `src` to NPUs `dst`, elementwise; none from an NPU to itself.

        Raises:
            ForerunError: a device is no NPU, or `next_device` leads over no link, or round in circles.
        """
        self._check_npus(src)
        self._check_npus(dst)
        if self.n_devices * self.n_npus <= max(_WALK_TABLE, len(src)):
            first, link = _walk(self.next_link(), self._graph[0].dst, src, dst)
            if not len(first):
                raise self.error("a route is a cycle")
            return Paths(first, link)
        return _paths(len(src), list(self._steps(src, dst)))

    def next_link(self, n_devices: int | None = None) -> I32:
        """Returns (devices, NPUs): index of the link that a device takes towards an NPU, -1 if it is that NPU.

        With `n_devices` the table has only that many of the devices.

        Raises:
            ForerunError: the table would be too large, or `next_device` leads over no link.
        """
        rows = self.n_devices if n_devices is None else n_devices
        n = rows * self.n_npus
        if n > _MAX_TABLE:
            raise self.error(
                f"a table of routes for {rows:,} devices and {self.n_npus:,} NPUs would have {n:,} entries,"
                f" more than {_MAX_TABLE:,}; use fewer NPUs or the congestion-unaware network"
            )
        return self._next_link if n_devices is None else self._table_of_links(rows)

    @cached_property
    def _next_link(self) -> I32:
        return self._table_of_links(self.n_devices)

    def _table_of_links(self, n_devices: int) -> I32:
        table = np.empty((n_devices, self.n_npus), np.int32)
        rows = max(1, _BLOCK // self.n_npus)
        for start in range(0, n_devices, rows):
            block = table[start : start + rows]
            at = np.repeat(np.arange(start, start + len(block), dtype=np.int32), self.n_npus)
            to = np.tile(np.arange(self.n_npus, dtype=np.int32), len(block))
            away = np.flatnonzero(at != to)
            flat = np.full(block.size, -1, np.int32)
            flat[away] = self._links_between(at[away], to[away])
            block[:] = flat.reshape(block.shape)
        return table

    def check(self) -> None:
        """Checks links and the routes between all NPUs.

        Raises:
            ForerunError: a link leads nowhere or is given twice, or a route does not arrive.
        """
        links, _ = self._graph
        ends = np.stack([links.src, links.dst])
        if len(links) and (ends.min() < 0 or ends.max() >= self.n_devices or (links.src == links.dst).any()):
            raise self.error("a link has to join two different devices")
        if len(np.unique(ends, axis=1).T) < len(links):
            raise self.error("two links go from one device to the same other one")
        if not ((links.bandwidth_gbps > 0).all() and (links.latency_ns >= 0).all()):
            raise self.error("a link has no bandwidth, or a negative latency")
        every = np.arange(self.n_npus, dtype=np.int32)
        for src in every:
            self.routes(np.full(self.n_npus, src, np.int32), every)

    def both_ways(
        self, *connections: Connections, bandwidth_gbps: float | None = None, latency_ns: float | None = None
    ) -> Links:
        """Returns the links in both directions between pairs of devices; bandwidth and latency default to the
        topology's."""
        n_links = 2 * sum(len(a) for a, _ in connections)
        if n_links > MAX_LINKS:
            raise self.error(f"it has {n_links:,} links, more than {MAX_LINKS:,}")
        one = np.concatenate([np.asarray(a, np.int32) for a, _ in connections])
        other = np.concatenate([np.asarray(b, np.int32) for _, b in connections])
        src, dst = np.concatenate([one, other]), np.concatenate([other, one])
        bandwidth = self.bandwidth_gbps if bandwidth_gbps is None else bandwidth_gbps
        latency = self.latency_ns if latency_ns is None else latency_ns
        return Links(src, dst, np.full(len(src), float(bandwidth)), np.full(len(src), float(latency)))

    @cached_property
    def _graph(self) -> tuple[Links, _Outgoing]:
        links = self.links()
        order = np.lexsort((links.dst, links.src)).astype(np.int32)
        count = np.bincount(links.src, minlength=self.n_devices)
        return links, _Outgoing(_offsets(count), links.dst[order], order)

    def _links_between(self, at: I32, to: I32) -> I32:
        following = np.asarray(self.next_device(at, to), dtype=np.int32)
        found = _find_links(*self._graph[1], at, following)
        bad = np.flatnonzero(found < 0)
        if len(bad):
            a, b, goal = at[bad[0]], following[bad[0]], to[bad[0]]
            raise self.error(f"the route to NPU {goal} goes from device {a} to {b}, but there is no such link")
        return found

    def _steps(self, src: I32, dst: I32) -> Iterator[tuple[I64, I32]]:
        """Returns step by step, which messages move and over which link."""
        links, _ = self._graph
        moving = np.flatnonzero(src != dst)
        at = src[moving]
        for _ in range(self.n_devices):
            if not len(moving):
                return
            link = self._links_between(at, dst[moving])
            yield moving, link
            at = links.dst[link]
            away = at != dst[moving]
            moving, at = moving[away], at[away]
        if len(moving):
            raise self.error("a route is a cycle")

    def _check_npus(self, npu: I32) -> None:
        bad = npu[(npu < 0) | (npu >= self.n_npus)]
        if len(bad):
            raise self.error(f"there is no NPU {bad[0]}; its NPUs are 0 to {self.n_npus - 1}")


def joined(*parts: Links) -> Links:
    """Returns the links of all `parts`."""
    return Links(*(np.concatenate(columns) for columns in zip(*(_columns(part) for part in parts), strict=True)))


def _columns(links: Links) -> tuple[I32, I32, F64, F64]:
    return links.src, links.dst, links.bandwidth_gbps, links.latency_ns


def _offsets(count: npt.NDArray[np.integer]) -> I64:
    first = np.zeros(len(count) + 1, np.int64)
    np.cumsum(count, out=first[1:])
    return first


def _paths(n: int, steps: list[tuple[I64, I32]]) -> Paths:
    hops = np.zeros(n, np.int64)
    for moving, _ in steps:
        hops[moving] += 1
    first = _offsets(hops)
    link = np.empty(first[-1], np.int32)
    for number, (moving, over) in enumerate(steps):
        link[first[moving] + number] = over
    return Paths(first, link)


@njit
def _find_links(first: I64, dst: I32, link: I32, at: I32, to: I32) -> I32:
    """Returns the index of the link from `at` to `to`, elementwise, -1 for none."""
    found = np.full(len(at), -1, np.int32)
    for i in range(len(at)):
        low, high = first[at[i]], first[at[i] + 1]
        end = high
        while low < high:
            middle = (low + high) >> 1
            if dst[middle] < to[i]:
                low = middle + 1
            else:
                high = middle
        if low < end and dst[low] == to[i]:
            found[i] = link[low]
    return found


@njit
def _walk(next_link: I32, link_dst: I32, src: I32, dst: I32) -> tuple[I64, I32]:
    """Returns paths out of the table of next links; empty `first` if one goes round in circles."""
    n = len(src)
    first = np.zeros(n + 1, np.int64)
    for i in range(n):
        at, hops = src[i], 0
        while at != dst[i]:
            at = link_dst[next_link[at, dst[i]]]
            hops += 1
            if hops > len(next_link):
                return np.zeros(0, np.int64), np.zeros(0, np.int32)
        first[i + 1] = first[i] + hops
    link = np.empty(first[n], np.int32)
    for i in range(n):
        at = src[i]
        for k in range(first[i], first[i + 1]):
            link[k] = next_link[at, dst[i]]
            at = link_dst[link[k]]
    return first, link
