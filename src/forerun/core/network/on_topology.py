"""Collectives as NCCL runs them, on the links of a topology instead of the two link levels of a cluster.

Rank r is NPU r of the network, so the GPUs of a node are consecutive. All equal groups of a mesh axis work at once: all
their messages load the links of their routes, and the busiest link determines the time. As the steps of a ring or tree
are equal messages in lockstep, that is also what max-min fair sharing (`network.flows`) gives the slowest of them.
Different axes that run at once share links as `cost.link_demand` says, as with a cluster's own links.

NCCL chooses from:
* inside a node, rings over all links: one ring through the ranks, or direct shares where that is faster (a full mesh);
* between nodes, one ring through all ranks or one for each rank of a node over its own rail, and for an all-reduce
  double binary trees over the nodes; the fastest of them by size;
* if one switch connects the GPUs of a node and can reduce, all-reduces in the switch, with trees between nodes;
* all-to-all: direct. Point to point: every rank of the axis sends to the next at the same time.

Constants that are NCCL's stay as in `network.nccl`: its protocols' base latencies, steps and rates (fabrics.yaml); the
lines inside a node (cost profiles) with their latencies and the share of the links' rate that they reach; the share of
a wire's rate that collectives sustain (by the kind of the cluster's links). Bandwidths of the network are wire rates,
as those of a cluster. The latency of a hop is that of NCCL's hop, with that of the route in place of that of the link
that NCCL was measured on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from forerun.common.errors import ForerunError
from forerun.common.units import US
from forerun.common.yaml_files import read_yaml
from forerun.core.network import group_traffic as traffic
from forerun.core.network.constants import NodeCollectives, NodeOp, NodeSwitches, fabrics
from forerun.core.network.formulas import passes, rounds
from forerun.core.network.group_traffic import Flows, Layout
from forerun.core.network.lines import FREE, Lines
from forerun.core.network.link_load import Busiest, Load, Watched, fabric_of
from forerun.core.network.nccl import (
    hop_count,
    measured_lines,
    node_constants,
    node_op,
    node_switches,
    rings_alone,
    wire_efficiency,
)
from forerun.core.network.network_file import Network, network_from, parse_topology
from forerun.core.program.groups import CommGroup
from forerun.core.program.types import F64, Collective
from forerun.describe.cluster.types import Cluster

Pattern = Literal["ring", "rails", "trees", "switches", "direct", "hops"]
_FILE_SUFFIXES = (".yaml", ".yml", ".json")
_SPREAD = (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
"""collectives that rings over all links of a node can speed up"""
_FASTER = 0.9
"""share of the time of a ring for each rail in which one ring through all ranks has to be done, to be taken"""


def load_network(source: Network | str | Path) -> Network:
    """Returns the network of a file or of a line of text such as `switch:8@450/300ns,fat-tree:16@50/700ns`.

    Bandwidths are in GB/s of 10**9 bytes unless a file's `bandwidth_unit` or the text says otherwise.

    Raises:
        ForerunError: a file can't be read, or describes an impossible network.
    """
    if isinstance(source, Network):
        return source
    text = str(source)
    if isinstance(source, str) and ":" in text and not text.lower().endswith(_FILE_SUFFIXES):
        return parse_topology(text)
    return network_from({"bandwidth_unit": "GB/s", **read_yaml(Path(text))}, text)


def network_of(cluster: Cluster, source: Network | str | Path | None) -> Network | None:
    """Returns the network to communicate over: `source`, or the network that the cluster's file names; None for the
    cluster's own links.
    """
    chosen = cluster.network if source is None else source
    return None if chosen is None else load_network(chosen)


def check_size(network: Network, n_gpus: int) -> None:
    """Raises ForerunError if `network` has fewer NPUs than the run has GPUs; of one with more the first are used."""
    if network.n_npus < n_gpus:
        raise ForerunError(
            f"the network joins {network.n_npus:,} NPUs ({describe(network)}), the run has {n_gpus:,} GPUs;"
            " use a larger network or fewer GPUs"
        )


def describe(network: Network) -> str:
    """Returns dimensions from the inside out: `Switch 8 at 450 GB/s, FatTree 16 at 50 GB/s`."""
    unit = "GiB/s" if network.gib else "GB/s"
    return ", ".join(f"{dim.build()} at {dim.bandwidth_gbps:g} {unit}" for dim in network.dims)


@dataclass(frozen=True, slots=True)
class Way:
    """One algorithm and protocol of a collective: a line, and the link that limits it."""

    latency_s: float
    s_per_byte: float
    busiest: Busiest
    pattern: Pattern = "direct"
    """whose messages it sends"""
    rounds: float = 1.0
    """how often it sends them"""

    @property
    def tree(self) -> bool:
        """Returns whether it is a tree between nodes whose GPUs add."""
        return self.pattern == "trees"


@dataclass(frozen=True, slots=True)
class OnTopology:
    """Collectives of `n_gpus` GPUs of `cluster` on `network`.

    `measured` holds the constants of the device's own NVLink, from its cost profile (see `nccl.collective_s`).
    """

    network: Network
    n_gpus: int
    cluster: Cluster
    measured: NodeCollectives | None

    def lines(self, kind: Collective, group: CommGroup) -> Lines:
        """Returns the lines of a collective in `group` and all its equals at once.

        Raises:
            ForerunError: the network has too few NPUs.
        """
        if group.size == 1 or kind == Collective.NONE:
            return FREE
        found = self.ways(kind, group)
        return Lines(tuple(way.latency_s for way in found), tuple(way.s_per_byte for way in found))

    def busiest_link(self, kind: Collective, group: CommGroup, size_bytes: float) -> Busiest:
        """Returns the link that limits a collective of `size_bytes` over more than one rank."""
        return self.way(kind, group, size_bytes).busiest

    def way(self, kind: Collective, group: CommGroup, size_bytes: float) -> Way:
        """Returns NCCL's choice for a collective of `size_bytes` over more than one rank."""
        return min(self.ways(kind, group), key=lambda way: way.latency_s + way.s_per_byte * size_bytes)

    def carried(self, kind: Collective, group: CommGroup, way: Way) -> F64:
        """Returns (links,) seconds that each link of the network transmits for a byte of a collective, at the rate it
        sustains.

        Of `group` and all its equals at once, run as `way` says.
        """
        layout = Layout.of(group, self.n_gpus)
        once = _carried(layout, self.cluster, self.measured, self.network, way.pattern, kind == Collective.BROADCAST)
        return once * way.rounds

    def ways(self, kind: Collective, group: CommGroup) -> tuple[Way, ...]:
        """Returns the options of NCCL for a collective over more than one rank."""
        check_size(self.network, self.n_gpus)
        if group.runs:
            raise ForerunError(
                f"--network places groups of evenly spaced ranks, and stages of a pipeline around everything else; with"
                f" this mesh_order {group.axis} is neither, leave it out"
            )
        return _ways(kind, Layout.of(group, self.n_gpus), self.cluster, self.measured, self.network)


@lru_cache(maxsize=1 << 16)
def _ways(
    kind: Collective, layout: Layout, cluster: Cluster, measured: NodeCollectives | None, network: Network
) -> tuple[Way, ...]:
    loads = _Loads(layout, cluster, measured, network)
    if layout.nodes == 1:
        return _in_node(kind, loads)
    if kind == Collective.SEND_RECV:
        load = loads.hops()
        ends = (fabrics().ring[end].on(loads.fabric) for end in (0, -1))
        extra = loads.far_extra_us(load)
        return tuple(_way(p.base_us + p.net_hop_us + p.crossings * extra, load, "hops", rate=p.rate) for p in ends)
    if kind == Collective.ALL_TO_ALL:
        load = loads.direct()
        latency_us = fabrics().all_to_all.latency_us(layout.size, loads.far_extra_us(load), loads.fabric)
        return (_way(latency_us, load, "direct"),)
    return _between_nodes(kind, loads)


def _in_node(kind: Collective, loads: _Loads) -> tuple[Way, ...]:
    """Returns the lines measured over NVLink, at the share of their links' rate that they reach."""
    constants, _ = node_constants(loads.cluster, loads.measured)
    op = node_op(kind, constants)
    ranks = 2 if kind == Collective.SEND_RECV else loads.layout.size
    pattern: Pattern = "ring"
    if kind == Collective.SEND_RECV:
        load, steps, pattern = loads.hops(), 1.0, "hops"
    elif kind == Collective.ALL_TO_ALL:
        load, steps, pattern = loads.direct(), 1.0, "direct"
    else:
        load, steps = loads.ring(kind), rounds(kind) * hop_count(ranks)
        if kind in _SPREAD and loads.direct().s_per_byte < load.s_per_byte:
            load, pattern = loads.direct(), "direct"
    extra_us = loads.near_extra_us(load) * steps
    latency_s = measured_lines(kind, ranks, op, 1.0).latency_s
    loss = sharing(op, ranks) * constants.link_gb_s
    found = [
        _way(time_s / US + extra_us, load, pattern, rounds(kind), bandwidth / loss)
        for time_s, bandwidth in zip(latency_s, (op.bw1, op.bw2, op.bw3), strict=True)
    ]
    switches = loads.added_in_nodes(kind)
    if switches is not None:
        load = loads.switches()
        found += [
            _way(line.latency_us + loads.near_extra_us(load), load, "switches", rate=line.bus_gb_s / switches.link_gb_s)
            for line in switches.lines
        ]
    return tuple(found)


def _between_nodes(kind: Collective, loads: _Loads) -> tuple[Way, ...]:
    """Returns the faster of one ring and a ring for each rail; for an all-reduce also trees."""
    nodes, ranks = loads.layout.nodes, loads.layout.per_node
    load, times = loads.rails(kind), rounds(kind)
    pattern: Pattern = "rails"
    if ranks > 1 and loads.ring(kind).s_per_byte < _FASTER * load.s_per_byte:
        load, pattern = loads.ring(kind), "ring"
    near_us, far_us, hops = loads.near_extra_us(load), loads.far_extra_us(load), hop_count(ranks)
    rings, trees = ([p.on(loads.fabric) for p in protocols] for protocols in (fabrics().ring, fabrics().tree))
    alone = rings_alone(nodes, ranks)
    trees = trees[:1] if alone else trees
    found = [_way(p.ring_us(nodes, hops, times, near_us, far_us), load, pattern, times, p.rate) for p in rings]
    if kind == Collective.ALL_REDUCE:
        load = loads.trees()
        near_us, far_us = loads.near_extra_us(load), loads.far_extra_us(load)
        found += [_way(p.tree_us(nodes, hops, near_us, far_us), load, "trees", rate=p.rate) for p in trees]
    if loads.added_in_nodes(kind) is not None and not alone:
        load, tree = loads.switches(), fabrics().in_switch.tree.of(nodes, loads.fabric)
        found.append(_way(tree.tree_us(nodes, 0.0, 0.0, loads.far_extra_us(load)), load, "switches", rate=tree.rate))
    return tuple(found)


def _way(latency_us: float, load: Load, pattern: Pattern, rounds: float = 1.0, rate: float = 1.0) -> Way:
    link = load.busiest
    busiest = Busiest(link.src, link.dst, link.s_per_byte * rounds)
    return Way(latency_us * US, load.s_per_byte * rounds / rate, busiest, pattern, rounds)


def sharing(op: NodeOp, ranks: int) -> float:
    """Returns how many times longer the bytes of a group of `ranks` take in a node: (r + kappa) / r.

    A kappa beyond the peers of a GPU was measured over a full mesh, and says how many of its links small groups leave
    unused; here the topology does.
    """
    peers = fabrics().measured_ranks - 1
    r = peers if op.kappa > peers else ranks - 1
    return (r + op.kappa) / r


def _efficiency(cluster: Cluster) -> float:
    """Returns `nccl.wire_efficiency` of the link that joins the nodes of `cluster`."""
    if len(cluster.links) > 1:
        return wire_efficiency(cluster.links[-1])
    return fabrics().efficiency_other


@dataclass(frozen=True, slots=True)
class _Loads:
    """Loads of the algorithms of one axis, in one direction of an all-reduce (trees: in both)."""

    layout: Layout
    cluster: Cluster
    measured: NodeCollectives | None
    network: Network

    def ring(self, kind: Collective) -> Load:
        return _load(self, "ring", kind == Collective.BROADCAST)

    def rails(self, kind: Collective) -> Load:
        return _load(self, "rails", kind == Collective.BROADCAST)

    def trees(self) -> Load:
        return _load(self, "trees")

    def direct(self) -> Load:
        return _load(self, "direct")

    def hops(self) -> Load:
        return _load(self, "hops")

    def switches(self) -> Load:
        return _load(self, "switches")

    @property
    def fabric(self) -> str:
        """Returns the kind of the links that join the nodes of the cluster."""
        return self.cluster.links[-1].kind if len(self.cluster.links) > 1 else ""

    def added_in_nodes(self, kind: Collective) -> NodeSwitches | None:
        """Returns the constants of the switches that add `kind` inside nodes; None without one switch for a node."""
        inner = self.network.dims[0]
        one_switch = inner.topology in ("Switch", "Rail") and inner.sizes[0] >= self.layout.per_node
        return node_switches(kind, self.layout.per_node, self.cluster) if one_switch else None

    def far_extra_us(self, load: Load) -> float:
        """Returns the latency of a hop between nodes beyond that of the fabric that was measured."""
        return (load.far_latency_s or load.near_latency_s) / US - fabrics().reference_latency_us

    def near_extra_us(self, load: Load) -> float:
        """Returns the latency of a hop inside a node beyond that of the cluster's own link."""
        return max(0.0, load.near_latency_s - self.cluster.links[0].latency_s) / US

    def costs(self, pattern: Pattern) -> tuple[float, float]:
        """Returns how many times longer messages inside and between nodes take than at the full rate of a link.

        Both are 1 for groups inside a node, whose lines were measured and contain the losses.
        """
        if self.layout.nodes == 1:
            return 1.0, 1.0
        constants, _ = node_constants(self.cluster, self.measured)
        op = constants.all_to_all if pattern in ("direct", "hops") else constants.all_gather
        ranks = 2 if pattern == "hops" else max(2, self.layout.per_node)
        if pattern in ("direct", "hops"):
            far = 1.0 / _efficiency(self.cluster) / (fabrics().all_to_all.rate if pattern == "direct" else 1.0)
        else:
            far = max(1.0, self.layout.per_node / fabrics().most_nics) / _efficiency(self.cluster)
        switches = self.added_in_nodes(Collective.ALL_REDUCE) if pattern == "switches" else None
        if switches is not None:
            return switches.link_gb_s / switches.lines[-1].bus_gb_s, far
        return sharing(op, ranks) * constants.link_gb_s / op.bw3, far

    def flows(self, pattern: Pattern, whole: bool) -> Iterator[Flows]:
        """Returns the messages of an algorithm. With `whole` every rank passes on all bytes, as in a broadcast."""
        layout = self.layout
        share = 1.0 if whole else passes(Collective.ALL_GATHER, layout.size)
        if pattern == "ring":
            return traffic.ring(layout, share)
        if pattern == "rails":
            return traffic.rails(layout, share, share)
        if pattern == "switches":
            added = passes(Collective.ALL_REDUCE, layout.per_node)
            return traffic.ring(layout, added) if layout.nodes == 1 else traffic.trees(layout, added)
        if pattern == "trees":
            return traffic.trees(layout, 2 * share)
        return traffic.direct(layout) if pattern == "direct" else traffic.hops(layout)


@lru_cache(maxsize=256)
def _carried(
    layout: Layout,
    cluster: Cluster,
    measured: NodeCollectives | None,
    network: Network,
    pattern: Pattern,
    whole: bool,
) -> F64:
    flows = _Loads(layout, cluster, measured, network).flows(pattern, whole)
    return fabric_of(network).carried(flows, max(1, cluster.node_size), 1.0 / _efficiency(cluster))


@lru_cache(maxsize=1 << 16)
def _load(loads: _Loads, pattern: Pattern, whole: bool = False) -> Load:
    watched: Watched = "all"
    if loads.layout.borders:
        watched = "near" if loads.layout.nodes == 1 else "far"
    node_size = max(1, loads.cluster.node_size)
    return fabric_of(loads.network).load(loads.flows(pattern, whole), node_size, *loads.costs(pattern), watched)
