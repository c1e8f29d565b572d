"""Exchanges in which all ranks move in step: with queues at links, they take a closed form too.

In each step of halving-doubling every rank sends a message over one distance. Suppose that all begin at the same time,
all routes have the same number of equal links, and no link is the k-th one of two routes. Then no message waits: each
goes over one link at a time, beside all the others. So all ranks end the step at the same time, and begin the next one
together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forerun.astrasim.astra.collectives import CollectiveTables
from forerun.astrasim.astra.queueless_rings import packet_reduction_ns
from forerun.astrasim.messages import state as codes
from forerun.core.network.network_file import Network, bytes_per_ns
from forerun.core.program.types import I32, I64

_MOST_HOPS = 1 << 26
"""links of all routes of a step, which are held at a time"""


@dataclass(frozen=True)
class Exchange:
    """A collective of all ranks in lockstep."""

    end_ns: int
    link_busy_ns: I64
    """(links,)"""
    link_bytes: I64


def lockstep(network: Network, tables: CollectiveTables, call: int) -> Exchange | None:
    """Returns when all ranks end halving-doubling that they begin together; None if some messages may wait for links.

    The call has to be one of all ranks in a single phase, whose chunks run one after the other.
    """
    phases, n = tables.phases_of(call), network.n_npus
    if len(phases) != 1 or tables.n_queues != 1 or tables.system.active_chunks_per_dimension != 1:
        return None
    phase = phases[0]
    if phase["algorithm"] != codes.HALVING_DOUBLING or phase["stride"] != 1 or phase["n"] != n:
        return None
    steps = slice(phase["steps"], phase["steps"] + phase["n_messages"] + 1)
    sizes, distances = (column[steps].tolist() for column in tables.exchanges())
    topology = network.topology()
    links = topology.links()
    rate = np.asarray(bytes_per_ns(links.bandwidth_gbps, gib=network.gib))
    busy_ns, carried = np.zeros(len(links), np.int64), np.zeros(len(links), np.int64)
    rank, on_ways = np.arange(n, dtype=np.int32), {}
    time_ns = packet_reduction_ns(phase, 0, sizes[0], tables) + phase["endpoint_ns"]
    for k, (size, distance) in enumerate(zip(sizes[:-1], distances[:-1], strict=True)):
        if distance not in on_ways:
            partner = np.where((rank // distance) % 2 == 0, rank + distance, rank - distance).astype(np.int32)
            if int(topology.hop_counts(rank[:1], partner[:1])[0]) * n > _MOST_HOPS:
                return None
            paths = topology.routes(rank, partner)
            ways = _apart(paths.first, paths.link, len(links))
            alike = all((column[paths.link] == column[paths.link[0]]).all() for column in (links.latency_ns, rate))
            if ways is None or not alike:
                return None
            on_ways[distance] = ways[0, 0], ways.shape[1], np.bincount(paths.link, minlength=len(links))
        link, hops, uses = on_ways[distance]
        transmit_ns = size / rate[link]
        time_ns += hops * int(links.latency_ns[link] + transmit_ns)
        time_ns += phase["endpoint_ns"] + packet_reduction_ns(phase, k + 1, sizes[k + 1], tables)
        busy_ns += uses * int(transmit_ns)
        carried += uses * size
    chunks = tables.n_chunks(call)
    return Exchange(chunks * time_ns, chunks * busy_ns, chunks * carried)


def _apart(first: I64, link: I32, n_links: int) -> I32 | None:
    """Returns the links of each route, (routes, hops); None if routes differ in hops or meet at a link in some hop."""
    hops = np.diff(first)
    if not len(hops) or (hops != hops[0]).any():
        return None
    ways = link.reshape(len(hops), -1)
    for of_hop in np.ascontiguousarray(ways.T):
        if np.bincount(of_hop, minlength=n_links).max() > 1:
            return None
    return ways
