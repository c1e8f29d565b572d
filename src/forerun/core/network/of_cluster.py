"""The links of a cluster as dimensions of a network, one dimension for each level of links."""

from __future__ import annotations

from forerun.common.errors import ForerunError
from forerun.describe.cluster.types import Cluster, Link

Dimension = tuple[str, int, float, float]
"""topology, NPUs, GB/s (10**9) of a link, ns of a link"""

_MESHED = frozenset({"infinity-fabric"})
"""kinds of links that join each GPU to every other one; the others go through switches"""


def cluster_dimensions(cluster: Cluster, n_gpus: int) -> list[Dimension]:
    """Returns the dimensions, inside out, that join `n_gpus` GPUs of `cluster`.

    A level behind switches is a Switch with the GPU's share of it as bandwidth, and half the latency of a hop between
    GPUs on each of its two links. A mesh is FullyConnected: its links share the GPU's bandwidth.

    Raises:
        ForerunError: fewer than two GPUs, more than the cluster joins, or not whole domains of it.
    """
    if n_gpus < 2:
        raise ForerunError(f"a network of {cluster.name} needs at least 2 GPUs, not {n_gpus}")
    if cluster.max_gpus is not None and n_gpus > cluster.max_gpus:
        raise ForerunError(f"{cluster.name} joins at most {cluster.max_gpus:,} GPUs, not {n_gpus:,}")
    dimensions, left = [], n_gpus
    for link in cluster.links:
        size = min(link.size or left, left)
        if left % size:
            raise ForerunError(f"{n_gpus} GPUs are not whole domains of {size} ({link.name} of {cluster.name})")
        left //= size
        if size > 1:
            dimensions.append(link_dimension(link, size))
    return dimensions


def link_dimension(link: Link, size: int) -> Dimension:
    """Returns the dimension that joins `size` members by `link`."""
    if link.kind in _MESHED:
        return "FullyConnected", size, link.bytes_per_s / 1e9 / (size - 1), link.latency_s * 1e9
    return "Switch", size, link.bytes_per_s / 1e9, link.latency_s * 1e9 / 2
