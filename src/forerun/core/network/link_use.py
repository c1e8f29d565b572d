"""The time for which a collective keeps each link of a rank busy: seconds per byte of its buffer at the link's rate.

A rank has a link at every level of its cluster: in the node, and between nodes as far out as its group reaches. What
goes to another node passes all levels on its way there. Between nodes a link sustains a share of its wire rate
(`nccl.wire_efficiency`), however many transfers it carries.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from forerun.core.network.constants import NodeCollectives
from forerun.core.network.lines import Lines
from forerun.core.network.nccl import algorithms, outer_link, wire_efficiency
from forerun.core.program.groups import CommGroup
from forerun.core.program.types import F64, Collective
from forerun.describe.cluster.types import Cluster


def link_busy_s(
    kind: Collective, size_bytes: F64, group: CommGroup, cluster: Cluster, measured: NodeCollectives | None
) -> F64:
    """Returns the seconds that collectives of `size_bytes` (sizes,) keep the links of a rank busy, (sizes, levels).

    Each way counts by itself. The algorithm is the fastest for the size, as NCCL chooses.
    """
    lines, busy = _choices(kind, group.nodes, group.ranks_per_node, cluster, measured)
    if not lines:
        return np.zeros((len(size_bytes), len(cluster.links)))
    fastest = np.argmin([each.seconds(size_bytes) for each in lines], axis=0) if len(lines) > 1 else 0
    out: F64 = size_bytes[:, None] * busy[fastest]
    return out


@lru_cache(maxsize=4096)
def _choices(
    kind: Collective, nodes: int, ranks_per_node: int, cluster: Cluster, measured: NodeCollectives | None
) -> tuple[tuple[Lines, ...], F64]:
    """Returns the lines of each algorithm that NCCL chooses from, and `_busy_s_per_byte` of each, (n, levels)."""
    found = algorithms(kind, nodes, ranks_per_node, cluster, measured)
    busy = np.array([_busy_s_per_byte(each.near, each.far, nodes, cluster) for each in found])
    return tuple(each.lines for each in found), busy


def _busy_s_per_byte(near: float, far: float, nodes: int, cluster: Cluster) -> F64:
    """Returns the seconds that a rank sends on each level for a byte of the full buffer, (levels,)."""
    reach = cluster.links.index(outer_link(cluster, nodes)) if nodes > 1 else 0
    out = np.zeros(len(cluster.links))
    for level, link in enumerate(cluster.links[: reach + 1]):
        out[level] = far / (link.bytes_per_s * wire_efficiency(link)) if level else near / link.bytes_per_s
    return out
