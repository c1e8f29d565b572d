"""Topologies under the names of experiment files: how nodes are connected, with each GPU's share of their NICs.

Inside a node GPUs have the cluster's own link. Between nodes the GPUs at the same place of each node (a plane) are
joined by one instance of the topology, as a node's GPUs have NICs of their own. A GPU sends and receives
`bandwidth_gbit_s` in every topology. If it has several links (ring 2, torus and mesh up to 4), each has a part of this
bandwidth. So topologies differ in the sharing of routes and not in the number of cables.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from math import isqrt

import numpy as np

from forerun.common.errors import ForerunError, UnknownName
from forerun.common.units import GIGA
from forerun.core.network.nccl import outer_link
from forerun.core.network.network_file import Network, NetworkDim
from forerun.core.network.of_cluster import link_dimension
from forerun.core.network.topology.registry import TOPOLOGIES, make
from forerun.core.network.topology.switch import Switch
from forerun.describe.cluster.types import Cluster

CLUSTER = "cluster"
_SWITCH, _RAIL = "full_mesh", "rail"
_FOUND = {re.sub(r"(?<=[a-z])(?=[A-Z0-9])", "_", name).lower(): kind for name, kind in TOPOLOGIES.items()}
TOPOLOGY_TYPES = {
    CLUSTER: "the cluster's own links: switches that never block",
    _SWITCH: "one hop from any node to any other at full bandwidth: no topology is faster",
    **{name: kind.between_nodes for name, kind in _FOUND.items() if "between_nodes" in vars(kind)},
}
_US_TO_NS = 1e3
_GBIT_TO_GB = 1 / 8


def topology_of(
    topology_type: str,
    cluster: Cluster,
    n_nodes: int,
    bandwidth_gbit_s: float | None = None,
    base_latency_us: float | None = None,
    oversubscription: float = 1,
    radix: int | None = None,
) -> Network | None:
    """Returns the network of `n_nodes` nodes of `cluster`, one of TOPOLOGY_TYPES.

    Returns None if the cluster's own links are used: for `cluster`, and for a single node, which has no network.

    Args:
        bandwidth_gbit_s: of a GPU in each direction, Gbit/s; that of the cluster's link between nodes unless given.
        base_latency_us: from a node to its neighbour: over one direct link, or two links and the switch between; that
            of the cluster's link between nodes unless given.
        oversubscription: of `fat_tree`: ports down over ports up of its aggregation switches, a whole number.
        radix: of `fat_tree`: ports of a switch; of `tree`: children of a switch, 2 unless given.

    Raises:
        ForerunError: an unknown type, a cluster without a link between nodes, a figure that makes no sense.
    """
    kind = topology_type.strip().lower().replace("-", "_")
    if kind not in TOPOLOGY_TYPES:
        raise UnknownName("topology_type", topology_type, list(TOPOLOGY_TYPES))
    options = _options(kind, oversubscription, radix)
    if kind == CLUSTER or n_nodes == 1:
        return None
    link = outer_link(cluster, n_nodes)
    bandwidth_gb_s = link.bytes_per_s / GIGA if bandwidth_gbit_s is None else bandwidth_gbit_s * _GBIT_TO_GB
    latency_ns = (link.latency_s * 1e6 if base_latency_us is None else base_latency_us) * _US_TO_NS
    if not 0 < bandwidth_gb_s < float("inf") or not 0 <= latency_ns < float("inf"):
        raise ForerunError(
            f"topology_type {kind}: bandwidth {bandwidth_gbit_s} Gbit/s has to be above 0, base_latency_us"
            f" {base_latency_us} 0 or more"
        )
    if kind == _RAIL:
        return Network((_rail(cluster, n_nodes, bandwidth_gb_s, latency_ns),), gib=False)
    outer = _between_nodes(kind, n_nodes, bandwidth_gb_s, latency_ns, options)
    return Network((*_inside(cluster), outer), gib=False)


@contextmanager
def _named(kind: str) -> Iterator[None]:
    """Makes whatever is wrong with a topology name the type that the experiment asked for."""
    try:
        yield
    except ForerunError as error:
        raise ForerunError(f"topology_type {kind}: {error}") from None


def grid(n_nodes: int) -> tuple[int, int]:
    """Returns sides of the squarest grid of exactly `n_nodes`, the longer first; n x 1 of a prime number: a ring or a
    line."""
    short = next(side for side in range(isqrt(n_nodes), 0, -1) if n_nodes % side == 0)
    return n_nodes // short, short


def _inside(cluster: Cluster) -> tuple[NetworkDim, ...]:
    """Returns the links of a node, if it has more than one GPU."""
    if cluster.node_size < 1:
        raise ForerunError(f"cluster {cluster.name} is one node of any size: say how many GPUs a node has")
    if cluster.node_size == 1:
        return ()
    name, size, bandwidth_gb_s, latency_ns = link_dimension(cluster.links[0], cluster.node_size)
    return (NetworkDim(name, (size,), bandwidth_gb_s, latency_ns),)


def _rail(cluster: Cluster, n_nodes: int, bandwidth_gb_s: float, latency_ns: float) -> NetworkDim:
    """Returns the network of a rail. A link to a switch takes half of the way to a neighbour, inside a node too."""
    _inside(cluster)
    inner = cluster.links[0]
    options = (
        ("node_bandwidth_gbps", inner.bytes_per_s / GIGA),
        ("node_latency_ns", inner.latency_s * 1e9 / 2),
    )
    return NetworkDim("Rail", (cluster.node_size, n_nodes), bandwidth_gb_s, latency_ns / 2, options)


def _options(kind: str, oversubscription: float, radix: int | None) -> dict[str, int]:
    """Returns the options of the topology. Raises ForerunError for one that it doesn't have."""
    has = _FOUND[kind].option_names() if kind in _FOUND else ()
    if oversubscription != 1 and ("oversubscription" not in has or oversubscription < 1 or oversubscription % 1):
        raise ForerunError(
            f"topology_type {kind}: oversubscription is {oversubscription:g}; it goes with fat_tree and is a whole"
            " number of at least 1"
        )
    ports = next((name for name in ("radix", "arity") if name in has), None)
    if radix is not None and ports is None:
        raise ForerunError(f"topology_type {kind}: radix goes with fat_tree and tree")
    given = {} if radix is None or ports is None else {ports: radix}
    return given | ({} if oversubscription == 1 else {"oversubscription": int(oversubscription)})


def _between_nodes(
    kind: str, n_nodes: int, bandwidth_gb_s: float, latency_ns: float, options: dict[str, int]
) -> NetworkDim:
    """Returns one plane: the topology of the GPUs at the same place of each node.

    Where it has no switches, a link goes the whole way to a neighbour and has its share of the GPU's bandwidth; else
    the way to a neighbour takes two links.
    """
    found = _FOUND.get(kind, Switch)
    sizes = (n_nodes,) if len(found.size_names()) == 1 else grid(n_nodes)
    with _named(kind):
        probe = make(found.__name__, sizes, bandwidth_gb_s, latency_ns, **options)
        if probe.n_devices > probe.n_npus:
            return NetworkDim(found.__name__, sizes, bandwidth_gb_s, latency_ns / 2, tuple(options.items()))
        ports = int(np.bincount(probe.links().src).max())
        return NetworkDim(found.__name__, sizes, bandwidth_gb_s / ports, latency_ns, tuple(options.items()))
