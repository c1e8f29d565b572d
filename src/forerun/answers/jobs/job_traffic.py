"""The load that a job's communication puts on links, from the groups of its plan and the place of its GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from forerun.answers.jobs.job import Exchange, Placement
from forerun.answers.jobs.placement import Shape
from forerun.core.network.link_load import fabric_of
from forerun.core.network.network_file import Network
from forerun.core.program.types import F64, I64

Link = tuple[str, int]
"""(`node`, its number), (`switch`, its number) or (`link`, its number in the topology)"""
Loads = tuple[tuple[Link, float], ...]
"""links, with the share of a node's rate, or of the link's own on a topology, that the job takes at full rate"""
_NOWHERE = np.zeros(0, np.int64)


def messages(exchange: Exchange, nodes: I64) -> tuple[I64, I64, F64]:
    """Returns sender, receiver and weight of each message between nodes. A GPU that sends at its full rate has weight
    1.

    Args:
        nodes: (gpus,) the node of each GPU of the job. Its ranks follow the order of its GPUs.

    A ring through nodes has as many lanes as the GPUs of the group on the node that has the fewest, each over other
    GPUs of every node, as NCCL's rings over rails.
    """
    members = _groups(exchange, len(nodes))
    if exchange.pattern == "ring":
        pairs = [(_NOWHERE, _NOWHERE), *(_lanes(group, nodes) for group in members)]
        src, dst = (np.concatenate(column) for column in zip(*pairs, strict=True))
        weight = np.ones(len(src))
    else:
        src, dst, weight = _between_members(exchange, members)
    apart = nodes[src] != nodes[dst]
    return src[apart], dst[apart], weight[apart]


def _groups(exchange: Exchange, gpus: int) -> I64:
    """Returns the ranks of [group, member]."""
    size, inner = exchange.size or gpus, exchange.inner
    number = gpus // (size * inner)
    base = (np.arange(number)[:, None] * (size * inner) + np.arange(inner)).reshape(-1, 1)
    return np.asarray(base + inner * np.arange(size), np.int64)


def _between_members(exchange: Exchange, members: I64) -> tuple[I64, I64, F64]:
    """Returns sender, receiver and weight of messages that don't depend on where the members lie."""
    if exchange.pattern == "hops":
        ahead, behind = members[:, :-1].ravel(), members[:, 1:].ravel()
        return np.concatenate([ahead, behind]), np.concatenate([behind, ahead]), np.ones(2 * len(ahead))
    size = members.shape[1]
    shifts = np.arange(1, size)
    source = np.repeat(members.ravel(), len(shifts))
    others = [np.roll(members, -shift, axis=1) for shift in shifts]
    target = np.stack(others, axis=-1).ravel() if others else source
    return source, target, np.full(len(source), 1.0 / max(1, size - 1))


def volumes(exchange: Exchange, nodes: I64) -> tuple[I64, I64, F64]:
    """Returns sender, receiver and bytes of all messages, also inside nodes. Bytes are relative to all bytes that a GPU
    sends.

    A ring through nodes with few lanes sends more over each of them. Inside a node GPUs send all to their neighbours.
    """
    members = _groups(exchange, len(nodes))
    if exchange.pattern != "ring":
        return _between_members(exchange, members)
    found: list[tuple[I64, I64, F64]] = [(_NOWHERE, _NOWHERE, np.zeros(0))]
    for group in members:
        begins = np.flatnonzero(np.diff(nodes[group], prepend=-1))
        for own in np.split(group, begins[1:]):
            if len(own) > 1:
                found.append((own, np.roll(own, -1), np.ones(len(own))))
        src, dst = _lanes(group, nodes)
        found.append((src, dst, np.full(len(src), len(begins) / max(1, len(src)))))
    src, dst, sent = (np.concatenate(column) for column in zip(*found, strict=True))
    return src, dst, sent


def _lanes(group: I64, nodes: I64) -> tuple[I64, I64]:
    """Returns who sends to whom in rings through the nodes of one group."""
    begins = np.flatnonzero(np.diff(nodes[group], prepend=-1))
    if len(begins) < 2:
        return _NOWHERE, _NOWHERE
    lanes = int(np.diff(begins, append=len(group)).min())
    ring = group[begins[:, None] + np.arange(lanes)]
    return ring.ravel(), np.roll(ring, -1, axis=0).ravel()


@lru_cache(maxsize=16_384)
def loads_of_switches(
    exchange: Exchange, place: Placement, shape: Shape, shared_nics: bool, rails: bool, nvlink_domains: bool
) -> Loads:
    """Returns the load on the links of nodes, if all GPUs of a node share one, and on those of switches to others.

    It is in rates of a node. `rails`: GPU i of every node is on a rail switch of its own and the job has other GPUs of
    its nodes, so that all its traffic goes over the links above. `nvlink_domains`: messages inside a domain load no
    link.
    """
    nodes = np.repeat([node for node, _ in place], [number for _, number in place])
    src, dst, weight = messages(exchange, nodes)
    src, dst = nodes[src], nodes[dst]
    if nvlink_domains:
        apart = src // shape.domain != dst // shape.domain
        src, dst, weight = src[apart], dst[apart], weight[apart]
    if not len(src):
        return ()
    of_node = np.bincount(src, weight, shape.switches * shape.nodes)
    full = float(of_node.max()) if shared_nics else float(shape.gpus)
    found: list[tuple[Link, float]] = []
    if shared_nics:
        found += [(("node", int(node)), float(of_node[node]) / full) for node in np.flatnonzero(of_node)]
    leaves = (src // shape.nodes != dst // shape.nodes) | rails
    above = np.bincount(src[leaves] // shape.nodes, weight[leaves], shape.switches)
    found += [(("switch", int(switch)), float(above[switch]) / full) for switch in np.flatnonzero(above)]
    return tuple(found)


@lru_cache(maxsize=16_384)
def loads_of_topology(exchange: Exchange, gpus: tuple[int, ...], per_node: int, network: Network) -> Loads:
    """Returns the load on the links of a topology, as shares of their bandwidth while the job has them to itself.

    Args:
        gpus: the numbers of the job's GPUs, which are the NPUs of `network`.
    """
    places = np.array(gpus)
    src, dst, weight = messages(exchange, places // per_node)
    if not len(src):
        return ()
    carried = _carried(network, places[src], places[dst], weight)
    return tuple((("link", int(link)), float(carried[link] / carried.max())) for link in np.flatnonzero(carried))


@lru_cache(maxsize=16_384)
def longest_s(exchange: Exchange, gpus: tuple[int, ...], per_node: int, network: Network) -> float:
    """Returns how long the fullest link of a topology takes for an exchange, in seconds for each byte that a GPU sends.

    Args:
        gpus: the numbers of the job's GPUs, which are the NPUs of `network`.
    """
    places = np.array(gpus)
    src, dst, sent = volumes(exchange, places // per_node)
    if not len(src):
        return 0.0
    return float(_carried(network, places[src], places[dst], sent).max())


def _carried(network: Network, src: I64, dst: I64, sent: F64) -> F64:
    """Returns the bytes on each link over its bandwidth, (links,), if NPUs `src` send `sent` to NPUs `dst`."""
    fabric = fabric_of(network)
    paths = fabric.topology.routes(src.astype(np.int32), dst.astype(np.int32))
    carried = np.bincount(paths.link, np.repeat(sent, paths.hops), len(fabric.bytes_per_s))
    return np.asarray(carried / fabric.bytes_per_s)


def numbered(places: Sequence[Placement], per_node: int) -> list[tuple[int, ...]]:
    """Returns the numbers of the GPUs of each job: on every node those that the jobs before it leave."""
    taken: dict[int, int] = {}
    found = []
    for place in places:
        own: list[int] = []
        for node, number in place:
            first = taken.get(node, 0)
            taken[node] = first + number
            own += range(node * per_node + first, node * per_node + first + number)
        found.append(tuple(own))
    return found
