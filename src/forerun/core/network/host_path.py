"""The path through host memory of GPUs without peer access. All GPUs of a node share it.

NCCL's shared-memory transport copies a message to host memory and from there to the next GPU. The bandwidth of each GPU
falls faster than the number of sending GPUs grows.
"""

from __future__ import annotations

from collections.abc import Iterable

from forerun.common.units import GIGA
from forerun.core.network.constants import fabrics
from forerun.core.network.formulas import exchanged, passes
from forerun.core.program.groups import CommGroup
from forerun.core.program.types import Collective
from forerun.describe.cluster.types import Cluster


def host_path_bytes_per_s(cluster: Cluster, n_gpus: int) -> float | None:
    """Returns the bus bandwidth of each of `n_gpus` of `cluster` inside a node; None if they reach each other
    directly.

    All GPUs of a run that share a node send at the same time, whatever groups they form.
    """
    link = cluster.links[0]
    sharing = min(n_gpus, link.size or n_gpus)
    if link.peer_to_peer or sharing < 2:
        return None
    path = fabrics().host_path
    if link.host_path_bytes_per_s is None:
        return path.pair_gb_s * GIGA * path.share(2, sharing)
    return link.host_path_bytes_per_s * path.share(link.size or sharing, sharing)


def host_path_s_per_byte(kind: Collective, group: CommGroup, cluster: Cluster, n_gpus: int) -> float:
    """Returns the least seconds that a byte of a collective over `group` takes on the path through host memory.

    The result is 0 if no byte takes that path. Neither a better link nor another stack shortens this time.
    """
    rate = host_path_bytes_per_s(cluster, n_gpus)
    return 0.0 if rate is None else _passes_in_node(kind, group) / rate


def host_path_warnings(groups: Iterable[CommGroup], cluster: Cluster, n_gpus: int) -> tuple[str, ...]:
    """Returns the warning about a run of `n_gpus` whose `groups` send through host memory; empty if none does."""
    rate = host_path_bytes_per_s(cluster, n_gpus)
    if rate is None or all(group.ranks_per_node == 1 for group in groups):
        return ()
    sharing = min(n_gpus, cluster.links[0].size or n_gpus)
    line = (
        f"GPUs of {cluster.name} have no peer access: messages between {sharing} of a node go through host"
        f" memory, which limits their collectives to {rate / GIGA:.1f} GB/s for each GPU"
    )
    return (line,)


def _passes_in_node(kind: Collective, group: CommGroup) -> float:
    """Returns the bytes that each GPU sends to GPUs of its own node over the full buffer's."""
    if group.ranks_per_node == 1 or kind == Collective.NONE:
        return 0.0
    if kind == Collective.ALL_TO_ALL:
        return exchanged(group.nodes, group.ranks_per_node)[0]
    if kind == Collective.SEND_RECV and group.nodes > 1:
        return 0.0
    return passes(kind, group.size)
