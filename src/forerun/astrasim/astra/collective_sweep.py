"""Sweeps of one collective over sizes and algorithms, with the bandwidths that nccl-tests defines.

The size is that of nccl-tests: the bytes of the buffer of an all-reduce, a reduce-scatter, an all-to-all or a
broadcast, and the bytes that an all-gather makes (n times the shard of a rank; the simulation counts by shards).
Bandwidths are in GB/s of 10**9 bytes: `algbw` is size over time, and `busbw` is algbw times the share of the size that
crosses each rank's links, so it compares with their speed:
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from forerun.astrasim.astra.collective_cases import COLLECTIVES, implementations
from forerun.astrasim.astra.custom import BUILT_IN, Algorithm, load_algorithm
from forerun.astrasim.astra.fabric import has_closed_form
from forerun.astrasim.astra.hot_links import HotLink, hottest_links
from forerun.astrasim.astra.single import collective_times
from forerun.astrasim.astra.system import System
from forerun.astrasim.chakra.trace import CommType
from forerun.common.errors import ForerunError, UnknownName
from forerun.core.network.network_file import Network

KINDS = {**COLLECTIVES, "broadcast": CommType.BROADCAST}
_MOST_QUEUED = 1024
"""up to this many NPUs trees and custom algorithms, whose loads have no rule, run with queues by default"""
ALGORITHMS = ("ring", "direct", "halvingDoubling", "doubleBinaryTree")


@dataclass(frozen=True)
class Point:
    """One size with one algorithm."""

    algorithm: str
    size_bytes: int
    time_ns: int | None = None
    """time of the slowest rank; None if it can't run"""
    algbw_gbps: float = 0.0
    busbw_gbps: float = 0.0
    error: str = ""
    hottest: tuple[HotLink, ...] = ()
    unqueued_ns: int | None = None
    """time of the slowest rank if no message waits for another, as ASTRA-sim reckons; None if links are queues"""
    beyond_links: bool = False
    """whether busbw is above the bandwidth of all links of a rank, which only messages that never queue can reach"""


@dataclass(frozen=True)
class Setting:
    """The network, the system and the groups of a sweep."""

    network: Network
    system: System
    groups: tuple[tuple[int, ...], ...] = ()
    """groups that run one collective each at the same time; () for one of all ranks"""
    aware: bool = False
    hottest: int = 0
    """number of busiest links to list"""
    fitting: bool = False
    """whether the network, not the user, determined `aware`"""
    serial: bool = False
    """whether a collective takes at least the time in which links carry its bytes one after the other (`wire_ns`)"""

    @property
    def n_ranks(self) -> int:
        """Returns the number of ranks in one collective."""
        return len(self.groups[0]) if self.groups else self.network.n_npus

    @cached_property
    def rank_links_gbps(self) -> float:
        """Returns the bandwidth of all links of a rank together, in GB/s of 10**9 bytes."""
        return self.network.npu_bytes_per_ns


def fitting_setting(
    network: Network, system: System, groups: tuple[tuple[int, ...], ...] = (), hottest: int = 0
) -> Setting:
    """Returns a setting without queues if ASTRA-sim times the network in closed form, else a congestion-aware one.

    Links of a mesh, a torus or a fat tree lie on the routes of many ranks, so they are queues. Elsewhere links carry
    bytes one after the other.
    """
    closed = has_closed_form(network)
    return Setting(network, system, groups, not closed, hottest, fitting=True, serial=closed)


def bus_factor(collective: str, n_ranks: int) -> float:
    """Returns busbw over algbw."""
    if collective == "broadcast":
        return 1.0
    share = (n_ranks - 1) / n_ranks
    return 2 * share if collective == "all_reduce" else share


def default_algorithms(collective: str, grouped: bool = False) -> list[str]:
    """Returns the algorithms of a collective; groups smaller than the system have the ring alone."""
    if collective == "broadcast":
        return list(BUILT_IN)
    if grouped:
        return ["ring"]
    return [name for name in ALGORITHMS if _knows(name, collective)]


def _knows(algorithm: str, collective: str) -> bool:
    only_others = {"halvingDoubling": collective == "all_to_all", "doubleBinaryTree": collective != "all_reduce"}
    return not only_others.get(algorithm, False)


def sweep(setting: Setting, collective: str, sizes: Sequence[int], algorithms: Sequence[str]) -> list[Point]:
    """Times the collective at each size with each algorithm.

    An algorithm is a name, `direct` followed by a window, the names for all dimensions joined by +, or a custom
    algorithm as `module:Class` or `file.py:Class`. A point that can't run has an error.

    Raises ForerunError if the collective or an algorithm is unknown, or no point can run.
    """
    if collective not in KINDS:
        raise UnknownName("collective", collective, list(KINDS))
    prepared = [(name, *_prepared(setting, collective, name)) for name in algorithms]
    points = []
    for size in sizes:
        for name, system, custom in prepared:
            try:
                points.append(_point(setting, collective, size, name, system, custom))
            except ForerunError as error:
                points.append(Point(name, size, error=str(error)))
    if points and all(point.error for point in points):
        raise ForerunError(f"{collective}, {points[0].algorithm}: {points[0].error}")
    return points


def _prepared(setting: Setting, collective: str, name: str) -> tuple[System, Algorithm | None]:
    """Returns the system and the custom algorithm for a name."""
    if ":" in name:
        return setting.system, load_algorithm(name)
    if collective == "broadcast":
        if name not in BUILT_IN:
            raise UnknownName("algorithm of a broadcast", name, [*BUILT_IN, "module:Class"])
        return setting.system, BUILT_IN[name]()
    if setting.groups and name != "ring":
        raise ForerunError(f"groups run the ring algorithm, as in ASTRA-sim, or a custom one; {name} is for all ranks")
    for part in name.split("+"):
        if not _knows(part, collective):
            raise ForerunError(f"{part} has no {collective}; use {', '.join(default_algorithms(collective))}")
    of_dims = name.split("+") if "+" in name else [name] * len(setting.network.dims)
    try:
        keys = {key.replace("-", "_"): tuple(value) for key, value in implementations(of_dims).items()}
        return System.model_validate({**setting.system.model_dump(), **keys}), None
    except ValueError:
        raise UnknownName("algorithm", name, [*ALGORITHMS, "module:Class"]) from None


def _point(setting: Setting, collective: str, size: int, name: str, system: System, custom: Algorithm | None) -> Point:
    n = setting.n_ranks
    local = size // n if collective == "all_gather" else size
    if local < 1:
        raise ForerunError(f"an all_gather over {n} ranks needs at least {n} bytes")
    made = local * n if collective == "all_gather" else size
    kind = KINDS[collective]
    ends, run, wire_ns = collective_times(setting.network, system, kind, local, setting.groups, setting.aware, custom)
    unqueued_ns = time_ns = int(ends.max())
    factor = bus_factor(collective, n)
    if setting.serial and wire_ns is None and setting.network.n_npus <= _MOST_QUEUED:
        queued = collective_times(setting.network, system, kind, local, setting.groups, True, custom)
        time_ns = int(queued.ends_ns.max())
    elif setting.serial:
        time_ns = max(time_ns, wire_ns or 0, math.ceil(made * factor / setting.rank_links_gbps))
    algbw = made / time_ns if time_ns else 0.0
    hottest = hottest_links(setting.network, run, time_ns, setting.hottest) if setting.aware else ()
    busbw = algbw * factor
    beyond = busbw > setting.rank_links_gbps
    unqueued = None if setting.aware else unqueued_ns
    return Point(name, made, time_ns, algbw, busbw, hottest=hottest, unqueued_ns=unqueued, beyond_links=beyond)
