"""The time for which a collective keeps each link of a rank busy: seconds per byte of its buffer at the link's rate.

A rank has a link at every level of its cluster: in the node, and between nodes as far out as its group reaches. What
goes to another node passes all levels on its way there. Between nodes a link sustains a share of its wire rate
(`nccl.wire_efficiency`), however many transfers it carries.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from forerun.core.network.constants import NodeCollectives
from forerun.core.network.lines import Lines, smooth_minimum_s
from forerun.core.network.nccl import algorithms, outer_link, wire_efficiency
from forerun.core.program.groups import CommGroup
from forerun.core.program.types import F64, Collective
from forerun.describe.cluster.types import Cluster


def link_busy_s(
    kinds: Sequence[int],
    size_bytes: F64,
    groups: Sequence[CommGroup],
    cluster: Cluster,
    measured: NodeCollectives | None,
) -> F64:
    """Returns the seconds that collectives keep the links of a rank busy, (n, levels).

    The collectives have `kinds` (n,), buffers of `size_bytes` (n,) and `groups` (n,). Each way counts by itself. The
    algorithm is the fastest for the size, as NCCL chooses.
    """
    table = _choices(cluster, measured)
    found = []
    for kind, group in zip(kinds, groups, strict=True):
        key = kind, group.nodes, group.ranks_per_node
        if key not in table:
            table[key] = _choices_of(Collective(kind), group.nodes, group.ranks_per_node, cluster, measured)
        found.append(table[key])
    latency, slope, busy = (np.array(column) for column in zip(*found, strict=True))
    fastest = np.argmin(smooth_minimum_s(latency, slope, size_bytes[:, None]), axis=1)
    out: F64 = size_bytes[:, None] * busy[np.arange(len(busy)), fastest]
    return out


_Choices = tuple[F64, F64, F64]
"""latencies and seconds per byte of the lines of each algorithm that NCCL chooses from, (_MOST_ALGORITHMS, N_LINES)
each, and `_busy_s_per_byte` of each, (_MOST_ALGORITHMS, levels); those that are missing never win"""
_MOST_ALGORITHMS = 4


@lru_cache(maxsize=256)
def _choices(cluster: Cluster, measured: NodeCollectives | None) -> dict[tuple[int, int, int], _Choices]:
    """Returns the cache of `_choices_of` for one cluster, which `link_busy_s` fills for all Programs on it."""
    return {}


def _choices_of(
    kind: Collective, nodes: int, ranks_per_node: int, cluster: Cluster, measured: NodeCollectives | None
) -> _Choices:
    found = algorithms(kind, nodes, ranks_per_node, cluster, measured)
    lines = [each.lines for each in found] + [Lines((), ())] * (_MOST_ALGORITHMS - len(found))
    latency, slope = zip(*(each.columns() for each in lines), strict=True)
    busy = np.zeros((_MOST_ALGORITHMS, len(cluster.links)))
    for row, each in zip(busy, found, strict=False):
        row[:] = _busy_s_per_byte(each.near, each.far, nodes, cluster)
    return np.array(latency), np.array(slope), busy


def _busy_s_per_byte(near: float, far: float, nodes: int, cluster: Cluster) -> F64:
    """Returns the seconds that a rank sends on each level for a byte of the full buffer, (levels,)."""
    reach = cluster.links.index(outer_link(cluster, nodes)) if nodes > 1 else 0
    out = np.zeros(len(cluster.links))
    for level, link in enumerate(cluster.links[: reach + 1]):
        out[level] = far / (link.bytes_per_s * wire_efficiency(link)) if level else near / link.bytes_per_s
    return out
