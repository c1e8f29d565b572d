"""Collectives as NCCL runs them: lines inside a node, rings and trees between nodes, and switches that add.

Sizes follow nccl-tests: the full buffer (gathered output of an all-gather, whole input of a reduce-scatter, send
buffer of an all-to-all). A group is (nodes, ranks per node); every GPU owns its share of its node's NICs, so a group
with p ranks on a node drives p of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from forerun.common.errors import ForerunError
from forerun.common.units import GIGA, US
from forerun.core.network.constants import NodeCollectives, NodeOp, NodeSwitches, SwitchLine, fabrics
from forerun.core.network.formulas import TREE_PASSES, exchanged, passes, rounds
from forerun.core.network.lines import FREE, Lines, smooth_minimum_s
from forerun.core.program.groups import CommGroup
from forerun.core.program.types import F64, Collective
from forerun.describe.cluster.types import Cluster, Link

_SLOWER = 8
"""Power of the norm that joins the times of two resources: near the maximum, without its kink."""


def collective_s(
    kind: Collective,
    size_bytes: npt.ArrayLike,
    group: CommGroup,
    cluster: Cluster,
    measured: NodeCollectives | None = None,
) -> F64:
    """Returns the seconds of collectives of `size_bytes` (any shape) over `group`; 0 in a group of one rank.

    `measured` holds the constants of the device's own NVLink, from its cost profile; None takes those of the link's
    kind. Never decreases with the bytes. SEND_RECV is a transfer between neighbours (see `p2p_lines`).

    Raises:
        ForerunError: the group spans nodes of a cluster that has no link between nodes.
    """
    latency, slope = collective_lines(kind, group.nodes, group.ranks_per_node, cluster, measured).columns()
    sizes = np.asarray(size_bytes, dtype=np.float64)
    return smooth_minimum_s(np.array(latency), np.array(slope), sizes)


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One algorithm that NCCL may run a collective with, under NCCL's name for it."""

    name: str
    protocols: tuple[str, ...]
    """of each line"""
    lines: Lines
    near: float
    """bytes that a rank sends inside its node, over those of the full buffer"""
    far: float
    """bytes that it sends to other nodes"""


PROTOCOLS = ("LL", "LL128", "Simple")


@lru_cache(maxsize=4096)
def algorithms(
    kind: Collective, nodes: int, ranks_per_node: int, cluster: Cluster, measured: NodeCollectives | None
) -> tuple[Algorithm, ...]:
    """Returns the algorithms among which NCCL chooses for a collective over `nodes` x `ranks_per_node` ranks of
    `cluster`.
    """
    if nodes * ranks_per_node == 1 or kind == Collective.NONE:
        return ()
    shape = nodes, ranks_per_node, cluster, measured
    if nodes == 1:
        return _in_node(kind, ranks_per_node, cluster, measured)
    if kind == Collective.SEND_RECV:
        return (Algorithm("P2P", ("LL", "Simple"), _neighbours(cluster, outer_link(cluster, nodes)), 0.0, 1.0),)
    if kind == Collective.ALL_TO_ALL:
        return (Algorithm("P2P", ("Simple",), _all_to_all(*shape), *exchanged(nodes, ranks_per_node)),)
    sent = passes(kind, nodes * ranks_per_node)
    near = sent * (ranks_per_node - 1) / ranks_per_node
    found = [Algorithm("Ring", PROTOCOLS, ring_lines(kind, *shape), near, sent / ranks_per_node)]
    if kind == Collective.ALL_REDUCE:
        trees = Algorithm("Tree", PROTOCOLS, tree_lines(*shape), near, TREE_PASSES / ranks_per_node)
        wide = rings_alone(nodes, ranks_per_node)
        found.append(_small_only(trees) if wide else trees)
        found += [each for each in _between_switches(*shape) if not wide or each.name == "CollNet"]
    return tuple(found)


def rings_alone(nodes: int, ranks: int) -> bool:
    """Returns whether all but small all-reduces over `nodes` nodes of `ranks` GPUs go round rings, as measured over
    racks."""
    return nodes > 2 and ranks > fabrics().measured_ranks


def _small_only(trees: Algorithm) -> Algorithm:
    """Returns the trees of small messages."""
    lines = Lines(trees.lines.latency_s[:1], trees.lines.s_per_byte[:1])
    return replace(trees, protocols=trees.protocols[:1], lines=lines)


@lru_cache(maxsize=4096)
def collective_lines(
    kind: Collective, nodes: int, ranks_per_node: int, cluster: Cluster, measured: NodeCollectives | None
) -> Lines:
    """Returns the lines of one collective over `nodes` x `ranks_per_node` ranks of `cluster`."""
    found = algorithms(kind, nodes, ranks_per_node, cluster, measured)
    if not found:
        return FREE
    latency = tuple(time_s for each in found for time_s in each.lines.latency_s)
    return Lines(latency, tuple(slope for each in found for slope in each.lines.s_per_byte))


def chosen(found: Sequence[Algorithm], size_bytes: float) -> tuple[Algorithm, str]:
    """Returns the fastest algorithm for `size_bytes`, and its protocol."""
    ways = [
        (latency + size_bytes * slope, number, protocol)
        for number, each in enumerate(found)
        for latency, slope, protocol in zip(each.lines.latency_s, each.lines.s_per_byte, each.protocols, strict=True)
    ]
    _, number, protocol = min(ways)
    return found[number], protocol


# -- inside a node ---------------------------------------------------------------------------------------------


def measured_in_node(cluster: Cluster, measured: NodeCollectives | None) -> bool:
    """Returns whether the device's own constants hold on the innermost link of `cluster`: they were taken over
    NVLink."""
    return measured is not None and cluster.links[0].kind in fabrics().measured_links


def node_constants(cluster: Cluster, measured: NodeCollectives | None) -> tuple[NodeCollectives, float]:
    """Returns the constants of the innermost link, and its rate over theirs."""
    link = cluster.links[0]
    table = fabrics().in_node
    found = measured if measured_in_node(cluster, measured) else None
    found = found or table.get(link.kind, table["pcie"])
    return found, link.bytes_per_s / (found.link_gb_s * GIGA)


def node_op(kind: Collective, constants: NodeCollectives) -> NodeOp:
    """Returns the constants of one collective."""
    if kind == Collective.ALL_REDUCE:
        return constants.all_reduce
    if kind == Collective.REDUCE_SCATTER:
        return constants.reduce_scatter
    if kind in (Collective.ALL_TO_ALL, Collective.SEND_RECV):
        return constants.all_to_all
    return constants.all_gather


def hop_count(ranks: int) -> float:
    """Steps of a ring in a node; beyond the ranks that were measured, where trees and switches take over, they grow as
    a logarithm."""
    r, measured = float(ranks - 1), float(fabrics().measured_ranks - 1)
    return r if r <= measured else measured * (1.0 + float(np.log(r / measured)))


def measured_lines(kind: Collective, ranks: int, op: NodeOp, speed: float) -> Lines:
    """Returns the lines of a collective among `ranks` of a node, on links `speed` times as fast as those `op` was
    fitted to."""
    r, hops = ranks - 1, hop_count(ranks)
    slope = passes(kind, ranks) * (r + op.kappa) / r / (speed * GIGA)
    first = op.a_us + op.h_us * hops
    latency = (first, first + op.d2, first + op.d2 + op.d3 + op.h3 * hops)
    return Lines(tuple(t * US for t in latency), (slope / op.bw1, slope / op.bw2, slope / op.bw3))


def _in_node(kind: Collective, ranks: int, cluster: Cluster, measured: NodeCollectives | None) -> tuple[Algorithm, ...]:
    constants, speed = node_constants(cluster, measured)
    pair = kind == Collective.SEND_RECV
    members = 2 if pair else ranks
    lines, sent = measured_lines(kind, members, node_op(kind, constants), speed), passes(kind, members)
    name = "P2P" if kind in (Collective.SEND_RECV, Collective.ALL_TO_ALL) else "Ring"
    ring = Algorithm(name, PROTOCOLS, lines, sent, 0.0)
    switches = node_switches(kind, ranks, cluster)
    if switches is None:
        return (ring,)
    added = switch_lines(switches, ranks, cluster.links[0].bytes_per_s)
    return ring, Algorithm("NVLS", ("Simple",) * len(added.latency_s), added, 1.0, 0.0)


# -- in switches -----------------------------------------------------------------------------------------------


def node_switches(kind: Collective, ranks: int, cluster: Cluster) -> NodeSwitches | None:
    """Returns the constants of switches that add an all-reduce among `ranks` of a node; None if none does."""
    link = cluster.links[0]
    if kind != Collective.ALL_REDUCE or link.kind != "nvswitch" or link.reduces is False:
        return None
    return fabrics().in_switch.of(cluster.device.architecture, ranks)


def switch_lines(switches: NodeSwitches, ranks: int, bytes_per_s: float) -> Lines:
    """Returns the lines of an all-reduce that the switches of a node add, on links of `bytes_per_s`."""
    lines = switches.lines
    slopes = tuple(_switch_slope(line, switches, ranks, bytes_per_s) for line in lines)
    return Lines(tuple(line.latency_us * US for line in lines), slopes)


def _switch_slope(line: SwitchLine, switches: NodeSwitches, ranks: int, bytes_per_s: float) -> float:
    speed = bytes_per_s / (switches.link_gb_s * GIGA)
    return passes(Collective.ALL_REDUCE, ranks) / (line.bus_gb_s * GIGA * speed)


def _between_switches(nodes: int, ranks: int, cluster: Cluster, measured: NodeCollectives | None) -> list[Algorithm]:
    """Returns all-reduces over several nodes that switches add, inside nodes or between them too."""
    switches, link = node_switches(Collective.ALL_REDUCE, ranks, cluster), outer_link(cluster, nodes)
    around = passes(Collective.ALL_REDUCE, ranks)
    if switches is None:
        inside, sent = _node_slope(Collective.ALL_GATHER, ranks, around, cluster, measured), around
    else:
        inside = _switch_slope(switches.lines[-1], switches, ranks, cluster.links[0].bytes_per_s)
        sent = 1.0
    found = [] if switches is None else [_switch_trees(nodes, ranks, link, inside)]
    return [*found, _fabric_switches(nodes, ranks, link, inside, sent)] if link.reduces else found


def _switch_trees(nodes: int, ranks: int, link: Link, inside: float) -> Algorithm:
    """Returns trees between nodes whose switches take `inside` seconds per byte. Of two, each sends all bytes once."""
    far, tree = 1.0 if nodes == 2 else TREE_PASSES, fabrics().in_switch.tree.of(nodes, link.kind)
    latency = tree.tree_us(nodes, 0.0, 0.0, _extra_hop_us(link))
    slope = slower(inside, far / _nics_bytes_per_s(link, ranks)) / tree.rate
    return Algorithm("NVLSTree", ("Simple",), Lines((latency * US,), (slope,)), 1.0, far / ranks)


def _fabric_switches(nodes: int, ranks: int, link: Link, inside: float, near: float) -> Algorithm:
    """Returns switches between nodes that add; `inside` a node takes seconds per byte, and each GPU sends `near` of
    them."""
    fabric = fabrics().in_switch.fabric
    latency = fabric.base_us + fabric.net_hop_us + _extra_hop_us(link)
    slope = slower(inside, 1.0 / _nics_bytes_per_s(link, ranks)) / fabric.rate
    return Algorithm("CollNet", ("Simple",), Lines((latency * US,), (slope,)), near, 1.0 / ranks)


# -- between nodes ---------------------------------------------------------------------------------------------


def outer_link(cluster: Cluster, nodes: int) -> Link:
    """Returns the innermost link between nodes that joins at least `nodes` of them. Raises ForerunError if there is
    none."""
    reach = 1
    for link in cluster.links[1:]:
        reach *= link.size
        if link.size == 0 or reach >= nodes:
            return link
    raise ForerunError(
        f"cluster {cluster.name}: no link joins {nodes} nodes of {cluster.node_size} GPUs; "
        "give it an inter_node link, or use fewer GPUs"
    )


def wire_efficiency(link: Link) -> float:
    """Returns the share of a link's rate between nodes that large transfers sustain."""
    return fabrics().efficiency.get(link.kind, fabrics().efficiency_other)


def _wire_bytes_per_s(link: Link) -> float:
    return link.bytes_per_s * wire_efficiency(link)


def _nics_bytes_per_s(link: Link, ranks: int) -> float:
    """Returns the bytes/s that rings and trees through `ranks` GPUs of each node send out of the node."""
    return min(ranks, fabrics().most_nics) * _wire_bytes_per_s(link)


def _extra_hop_us(link: Link) -> float:
    """Returns the latency of a hop of this fabric beyond that of the fabric that was measured."""
    return link.latency_s / US - fabrics().reference_latency_us


def slower(*times: float) -> float:
    """Returns a smooth maximum: the slower of resources that work side by side."""
    worst = max(times)
    total: float = sum((t / worst) ** _SLOWER for t in times) ** (1 / _SLOWER)
    return worst * total


def _node_slope(
    kind: Collective, ranks: int, passes: float, cluster: Cluster, measured: NodeCollectives | None
) -> float:
    """Returns the seconds per byte that the links inside a node take for their part of a collective between nodes."""
    if ranks == 1:
        return 0.0
    constants, speed = node_constants(cluster, measured)
    op = node_op(kind, constants)
    return passes * (ranks - 1 + op.kappa) / (ranks - 1) / (op.bw3 * speed * GIGA)


def ring_lines(kind: Collective, nodes: int, ranks: int, cluster: Cluster, measured: NodeCollectives | None) -> Lines:
    """Returns rings through all ranks of several nodes, each in and out of a node over another GPU's NIC.

    Every hop carries (n - 1) / n of the buffer, whether it leaves a node or not.
    """
    link, sent = outer_link(cluster, nodes), passes(kind, nodes * ranks)
    node_slope = _node_slope(Collective.ALL_GATHER, ranks, sent, cluster, measured)
    wire, extra = _nics_bytes_per_s(link, ranks), _extra_hop_us(link)
    slope = slower(sent / wire, node_slope)
    protocols = [p.on(link.kind) for p in fabrics().ring]
    latency = tuple(p.ring_us(nodes, hop_count(ranks), rounds(kind), 0.0, extra) * US for p in protocols)
    return Lines(latency, tuple(slope / p.rate for p in protocols))


def tree_lines(nodes: int, ranks: int, cluster: Cluster, measured: NodeCollectives | None) -> Lines:
    """Returns an all-reduce in double binary trees over several nodes: 2 of the buffer go through the NICs of a
    node."""
    link = outer_link(cluster, nodes)
    around = passes(Collective.ALL_REDUCE, nodes * ranks)
    node_slope = _node_slope(Collective.ALL_GATHER, ranks, around, cluster, measured)
    slope, extra = slower(TREE_PASSES / _nics_bytes_per_s(link, ranks), node_slope), _extra_hop_us(link)
    protocols = [p.on(link.kind) for p in fabrics().tree]
    latency = tuple(p.tree_us(nodes, hop_count(ranks), 0.0, extra) * US for p in protocols)
    return Lines(latency, tuple(slope / p.rate for p in protocols))


def _all_to_all(nodes: int, ranks: int, cluster: Cluster, measured: NodeCollectives | None) -> Lines:
    """Returns the lines of an all-to-all. Each rank sends a share of its buffer to every other: over its own NIC to
    those of other nodes."""
    link, (near, far) = outer_link(cluster, nodes), exchanged(nodes, ranks)
    node_slope = _node_slope(Collective.ALL_TO_ALL, ranks, near, cluster, measured)
    exchange = fabrics().all_to_all
    latency = exchange.latency_us(nodes * ranks, _extra_hop_us(link), link.kind)
    return Lines((latency * US,), (slower(far / (_wire_bytes_per_s(link) * exchange.rate), node_slope),))


def _neighbours(cluster: Cluster, link: Link) -> Lines:
    """Returns a transfer over one GPU's share of the NICs."""
    wire, extra = _wire_bytes_per_s(link), _extra_hop_us(link)
    first, *_, last = (p.on(link.kind) for p in fabrics().ring)
    latency = tuple((p.base_us + p.net_hop_us + p.crossings * extra) * US for p in (first, last))
    return Lines(latency, (1 / (wire * first.rate), 1 / (wire * last.rate)))
