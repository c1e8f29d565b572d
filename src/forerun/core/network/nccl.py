"""Collectives as NCCL runs them: lines of latency and bandwidth inside a node, rings and trees between nodes.

Sizes follow nccl-tests: the full buffer (gathered output of an all-gather, whole input of a reduce-scatter, send
buffer of an all-to-all). A group is (nodes, ranks per node); every GPU owns its share of its node's NICs, so a group
with p ranks on a node drives p of them.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from forerun.common.errors import ForerunError
from forerun.common.units import GIGA
from forerun.core.network.constants import NodeCollectives, NodeOp, fabrics
from forerun.core.network.formulas import TREE_PASSES, exchanged, passes, rounds
from forerun.core.network.lines import FREE, Lines, smooth_minimum_s
from forerun.core.program.groups import CommGroup
from forerun.core.program.types import F64, Collective
from forerun.describe.cluster.types import Cluster, Link

_US = 1e-6
_SLOWER = 8
"""Power of the norm that joins the times of two resources: near the maximum, without its kink."""


def collective_s(
    kind: Collective,
    size_bytes: npt.ArrayLike,
    group: CommGroup,
    cluster: Cluster,
    measured: NodeCollectives | None = None,
) -> F64:
    """Seconds of collectives of `size_bytes` (any shape) over `group`; 0 in a group of one rank.

    `measured` holds the constants of the device's own NVLink, from its cost profile; None takes those of the link's
    kind. Never decreases with the bytes. SEND_RECV is a transfer between neighbours (see `p2p_lines`).

    Raises:
        ForerunError: the group spans nodes of a cluster that has no link between nodes.
    """
    latency, slope = collective_lines(kind, group.nodes, group.ranks_per_node, cluster, measured).columns()
    sizes = np.asarray(size_bytes, dtype=np.float64)
    return smooth_minimum_s(np.array(latency), np.array(slope), sizes)


@lru_cache(maxsize=4096)
def collective_lines(
    kind: Collective, nodes: int, ranks_per_node: int, cluster: Cluster, measured: NodeCollectives | None
) -> Lines:
    """Lines of one collective over `nodes` x `ranks_per_node` ranks of `cluster`."""
    if nodes * ranks_per_node == 1 or kind == Collective.NONE:
        return FREE
    if nodes == 1:
        return _in_node(kind, ranks_per_node, cluster, measured)
    if kind == Collective.SEND_RECV:
        return _neighbours(cluster, outer_link(cluster, nodes))
    if kind == Collective.ALL_TO_ALL:
        return _all_to_all(nodes, ranks_per_node, cluster, measured)
    return _between_nodes(kind, nodes, ranks_per_node, cluster, measured)


# -- inside a node ---------------------------------------------------------------------------------------------


def measured_in_node(cluster: Cluster, measured: NodeCollectives | None) -> bool:
    """Whether the device's own constants hold on the innermost link of `cluster`: they were taken over NVLink."""
    return measured is not None and cluster.links[0].kind in fabrics().measured_links


def node_constants(cluster: Cluster, measured: NodeCollectives | None) -> tuple[NodeCollectives, float]:
    """Constants of the innermost link, and its rate over theirs."""
    link = cluster.links[0]
    table = fabrics().in_node
    found = measured if measured_in_node(cluster, measured) else None
    found = found or table.get(link.kind, table["pcie"])
    return found, link.bytes_per_s / (found.link_gb_s * GIGA)


def node_op(kind: Collective, constants: NodeCollectives) -> NodeOp:
    """The constants of one collective."""
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
    r, measured = ranks - 1, fabrics().measured_ranks - 1
    return r if r <= measured else measured * (1.0 + float(np.log(r / measured)))


def measured_lines(kind: Collective, ranks: int, op: NodeOp, speed: float) -> Lines:
    """Lines of a collective among `ranks` of a node, on links `speed` times as fast as those `op` was fitted to."""
    r, hops = ranks - 1, hop_count(ranks)
    slope = passes(kind, ranks) * (r + op.kappa) / r / (speed * GIGA)
    first = op.a_us + op.h_us * hops
    latency = (first, first + op.d2, first + op.d2 + op.d3 + op.h3 * hops)
    return Lines(tuple(t * _US for t in latency), (slope / op.bw1, slope / op.bw2, slope / op.bw3))


def _in_node(kind: Collective, ranks: int, cluster: Cluster, measured: NodeCollectives | None) -> Lines:
    constants, speed = node_constants(cluster, measured)
    pair = kind == Collective.SEND_RECV
    return measured_lines(kind, 2 if pair else ranks, node_op(kind, constants), speed)


# -- between nodes ---------------------------------------------------------------------------------------------


def outer_link(cluster: Cluster, nodes: int) -> Link:
    """The innermost link between nodes that joins at least `nodes` of them. Raises ForerunError where there is none."""
    reach = 1
    for link in cluster.links[1:]:
        reach *= link.size
        if link.size == 0 or reach >= nodes:
            return link
    raise ForerunError(
        f"cluster {cluster.name}: no link joins {nodes} nodes of {cluster.node_size} GPUs; "
        "give it an inter_node link, or use fewer GPUs"
    )


def wire_efficiency(link: Link, nodes: int = 1) -> float:
    """The share of a link's rate between nodes that large transfers sustain, in rings and trees over `nodes` nodes."""
    return fabrics().efficiency.get(link.kind, fabrics().efficiency_other) / fabrics().crowding.factor(nodes)


def _wire_bytes_per_s(link: Link, nodes: int = 1) -> float:
    return link.bytes_per_s * wire_efficiency(link, nodes)


def _extra_hop_us(link: Link) -> float:
    """Returns the latency of a hop of this fabric beyond that of the fabric that was measured."""
    return link.latency_s / _US - fabrics().reference_latency_us


def slower(*times: float) -> float:
    """Smooth maximum: the slower of resources that work side by side."""
    worst = max(times)
    total: float = sum((t / worst) ** _SLOWER for t in times) ** (1 / _SLOWER)
    return worst * total


def _node_slope(
    kind: Collective, ranks: int, passes: float, cluster: Cluster, measured: NodeCollectives | None
) -> float:
    """Seconds per byte that the links inside a node take for their part of a collective between nodes."""
    if ranks == 1:
        return 0.0
    constants, speed = node_constants(cluster, measured)
    op = node_op(kind, constants)
    return passes * (ranks - 1 + op.kappa) / (ranks - 1) / (op.bw3 * speed * GIGA)


def _between_nodes(
    kind: Collective, nodes: int, ranks: int, cluster: Cluster, measured: NodeCollectives | None
) -> Lines:
    """Ring over all ranks; for an all-reduce also a tree over nodes, of which NCCL takes the faster."""
    ring = ring_lines(kind, nodes, ranks, cluster, measured)
    if kind != Collective.ALL_REDUCE:
        return ring
    tree = tree_lines(nodes, ranks, cluster, measured)
    return Lines(ring.latency_s + tree.latency_s, ring.s_per_byte + tree.s_per_byte)


def ring_lines(kind: Collective, nodes: int, ranks: int, cluster: Cluster, measured: NodeCollectives | None) -> Lines:
    """A ring over all ranks of several nodes.

    Through the NICs of a node go (nodes - 1) / nodes of the buffer, twice that for an all-reduce.
    """
    link = outer_link(cluster, nodes)
    node_slope = _node_slope(Collective.ALL_GATHER, ranks, passes(kind, nodes * ranks), cluster, measured)
    wire, extra = ranks * _wire_bytes_per_s(link, nodes), _extra_hop_us(link)
    slope = slower(passes(kind, nodes) / wire, node_slope)
    protocols = fabrics().ring
    latency = tuple(p.ring_us(nodes, ranks, rounds(kind), 0.0, extra) * _US for p in protocols)
    return Lines(latency, tuple(slope / p.rate for p in protocols))


def tree_lines(nodes: int, ranks: int, cluster: Cluster, measured: NodeCollectives | None) -> Lines:
    """An all-reduce in double binary trees over several nodes: 2 of the buffer go through the NICs of a node."""
    link = outer_link(cluster, nodes)
    around = passes(Collective.ALL_REDUCE, nodes * ranks)
    node_slope = _node_slope(Collective.ALL_GATHER, ranks, around, cluster, measured)
    slope, extra = slower(TREE_PASSES / (ranks * _wire_bytes_per_s(link, nodes)), node_slope), _extra_hop_us(link)
    protocols = fabrics().tree
    latency = tuple(p.tree_us(nodes, ranks, 0.0, extra) * _US for p in protocols)
    return Lines(latency, tuple(slope / p.rate for p in protocols))


def _all_to_all(nodes: int, ranks: int, cluster: Cluster, measured: NodeCollectives | None) -> Lines:
    """Each rank sends a share of its buffer to every other: over its own NIC to those of other nodes."""
    link, (near, far) = outer_link(cluster, nodes), exchanged(nodes, ranks)
    node_slope = _node_slope(Collective.ALL_TO_ALL, ranks, near, cluster, measured)
    latency = fabrics().all_to_all.latency_us(nodes * ranks) + _extra_hop_us(link)
    return Lines((latency * _US,), (slower(far / _wire_bytes_per_s(link), node_slope),))


def _neighbours(cluster: Cluster, link: Link) -> Lines:
    """A transfer over one GPU's share of the NICs."""
    wire, extra = _wire_bytes_per_s(link), _extra_hop_us(link)
    first, *_, last = fabrics().ring
    latency = tuple((p.base_us + p.net_hop_us + extra) * _US for p in (first, last))
    return Lines(latency, (1 / (wire * first.rate), 1 / (wire * last.rate)))
