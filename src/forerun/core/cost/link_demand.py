"""The share of each link that a collective or transfer of a step uses while it runs alone.

The share is the time that the op's bytes take on the link at its sustained rate, divided by the op's time. Ops that
wait for latency, or for another link, leave most of a link to others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forerun.common.units import PS_PER_S
from forerun.core.cost.profile import load_profile
from forerun.core.engine.sharing import FULL, LinkDemand, Mask
from forerun.core.network.link_load import fabric_of
from forerun.core.network.link_use import link_busy_s
from forerun.core.network.on_topology import OnTopology
from forerun.core.network.token_exchange import exchange_of
from forerun.core.program.groups import CommGroup
from forerun.core.program.types import F64, I64, Collective, OpTable
from forerun.describe.cluster.types import Cluster

_TINY = 1e-300
_FINE = 1024
"""links whose loads differ by less than 1 / _FINE of the busiest one's count as one"""


def link_demand(
    ops: OpTable,
    groups: Sequence[CommGroup],
    duration_ps: I64,
    cluster: Cluster,
    network: OnTopology | None = None,
    without: I64 | None = None,
    host_path_ps: I64 | None = None,
) -> LinkDemand | None:
    """Returns the shares of links that the rows of `ops` use in `duration_ps`; None if no row uses any.

    The links are a rank's own at every level of `cluster`, each way, or with `network` those of the topology, under all
    equal groups of an axis at once. Rows `without` use no link, because their messages are unknown. Without peer access
    the link inside a node is the path through host memory, which each op uses for `host_path_ps` (n_ops,).
    """
    moves = ops.is_communication & (duration_ps > 0)
    if without is not None:
        moves[without] = False
    rows = np.flatnonzero(moves)
    rows = rows[np.array([groups[number].size > 1 for number in ops.group[rows].tolist()], np.bool_)]
    if not len(rows):
        return None
    busy, receiving = (
        _on_levels(ops, rows, groups, cluster, host_path_ps)
        if network is None
        else _on_links(ops, rows, groups, network)
    )
    alone_s = duration_ps[rows, None] / PS_PER_S
    share = np.zeros((len(ops), busy.shape[1]), np.int64)
    share[rows] = np.rint(np.minimum(busy / alone_s, 1.0) * FULL)
    return LinkDemand.of(share, receiving)


def _on_levels(
    ops: OpTable, rows: I64, groups: Sequence[CommGroup], cluster: Cluster, host_path_ps: I64 | None
) -> tuple[F64, Mask]:
    """Returns the seconds that `rows` use the links of a rank, (rows, 2 levels): out of it, then into it."""
    measured = load_profile(cluster.device.cost_profile).collectives
    busy = np.zeros((len(rows), len(cluster.links)))
    own = np.array([ops.kernel[row] != "" for row in rows.tolist()], np.bool_)
    for at in np.flatnonzero(own).tolist():
        time = exchange_of(ops, int(rows[at]), groups, cluster)
        busy[at, 0] = ops.bytes_comm[rows[at]] * time.near_busy
        busy[at, 1:] = ops.bytes_comm[rows[at]] * time.far_busy
    by_nccl = rows[~own]
    if len(by_nccl):
        of_rows = [groups[number] for number in ops.group[by_nccl].tolist()]
        kinds = ops.collective[by_nccl].tolist()
        busy[~own] = link_busy_s(kinds, ops.bytes_comm[by_nccl], of_rows, cluster, measured)
    if host_path_ps is not None:
        busy[:, 0] = np.maximum(busy[:, 0], host_path_ps[rows] / PS_PER_S)
    return np.concatenate([busy, busy], axis=1), np.repeat([False, True], busy.shape[1])


def _on_links(ops: OpTable, rows: I64, groups: Sequence[CommGroup], network: OnTopology) -> tuple[F64, Mask]:
    """Returns the seconds that `rows` use links of a topology, (rows, kinds of links).

    Links that every algorithm of a collective loads alike count as one. In a transfer between stages the links from
    switches into NPUs are the receiver's, all others the sender's.
    """
    links = fabric_of(network.network).links
    receiving = (links.dst < network.network.n_npus) & (links.src >= network.network.n_npus)
    loads: dict[tuple[object, ...], int] = {}
    columns: list[F64] = []
    place, size = np.zeros(len(rows), np.int64), ops.bytes_comm[rows]
    for at, row in enumerate(rows.tolist()):
        kind, group = Collective(int(ops.collective[row])), groups[ops.group[row]]
        for way in network.ways(kind, group):
            if (kind, group, way.pattern) not in loads:
                loads[kind, group, way.pattern] = len(columns)
                columns.append(network.carried(kind, group, way))
        place[at] = loads[kind, group, network.way(kind, group, float(size[at])).pattern]
    carried = np.array(columns)
    fine = np.rint(carried / np.maximum(carried.max(axis=1, keepdims=True), _TINY) * _FINE)
    used = np.flatnonzero(carried.any(axis=0))
    _, first = np.unique(np.concatenate([fine[:, used], receiving[None, used]]), axis=1, return_index=True)
    kept = used[np.sort(first)]
    return size[:, None] * carried[:, kept][place], receiving[kept]
