"""The time for which a collective keeps each link of a rank busy: seconds per byte of its buffer at the link's rate.

A rank has a link at every level of its cluster: in the node, and between nodes as far out as its group reaches. What
goes to another node passes all levels on its way there. Between nodes a link sustains a share of its wire rate
(`nccl.wire_efficiency`), however many transfers it carries.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from forerun.core.network.constants import NodeCollectives
from forerun.core.network.formulas import TREE_PASSES, exchanged, passes
from forerun.core.network.lines import Lines
from forerun.core.network.nccl import outer_link, ring_lines, tree_lines, wire_efficiency
from forerun.core.program.groups import CommGroup
from forerun.core.program.types import F64, Collective
from forerun.describe.cluster.types import Cluster


@lru_cache(maxsize=4096)
def _busy_s_per_byte(kind: Collective, nodes: int, ranks: int, cluster: Cluster, tree: bool = False) -> F64:
    """(levels,) seconds that a rank sends on each level for a byte of the full buffer."""
    n = nodes * ranks
    far, pair = 0.0, kind == Collective.SEND_RECV
    if nodes == 1:
        near = passes(kind, 2 if pair else ranks)
    elif pair:
        near, far = 0.0, 1.0
    elif kind == Collective.ALL_TO_ALL:
        near, far = exchanged(nodes, ranks)
    else:
        near = passes(kind, n) * (ranks - 1) / ranks
        far = (TREE_PASSES if tree else passes(kind, nodes)) / ranks
    reach = cluster.links.index(outer_link(cluster, nodes)) if nodes > 1 else 0
    out = np.zeros(len(cluster.links))
    for level, link in enumerate(cluster.links[: reach + 1]):
        out[level] = far / (link.bytes_per_s * wire_efficiency(link)) if level else near / link.bytes_per_s
    return out


def link_busy_s(
    kind: Collective, size_bytes: F64, group: CommGroup, cluster: Cluster, measured: NodeCollectives | None
) -> F64:
    """(sizes, levels) seconds that collectives of `size_bytes` (sizes,) keep the links of a rank busy, each way.

    An all-reduce between nodes takes the faster of ring and tree, as NCCL does.
    """
    nodes, ranks = group.nodes, group.ranks_per_node
    if group.size == 1 or kind == Collective.NONE:
        return np.zeros((len(size_bytes), len(cluster.links)))
    busy = size_bytes[:, None] * _busy_s_per_byte(kind, nodes, ranks, cluster)
    if kind == Collective.ALL_REDUCE and nodes > 1:
        ring, tree = (lines(nodes, ranks, cluster, measured) for lines in (_ring, tree_lines))
        in_trees = size_bytes[:, None] * _busy_s_per_byte(kind, nodes, ranks, cluster, tree=True)
        busy = np.where((tree.seconds(size_bytes) < ring.seconds(size_bytes))[:, None], in_trees, busy)
    return busy


def _ring(nodes: int, ranks: int, cluster: Cluster, measured: NodeCollectives | None) -> Lines:
    return ring_lines(Collective.ALL_REDUCE, nodes, ranks, cluster, measured)
