"""The traffic and the time of kernels that send each token once to a node and once to a GPU, as DeepEP's do.

A token goes over the network to the GPU of the same place in each node that has experts for it, and from there over
NVLink to the GPUs of these experts. Results come back the same way, summed at each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import comb

from forerun.common.units import GIGA, US
from forerun.core.network.nccl import outer_link, slower
from forerun.core.program.groups import CommGroup
from forerun.core.program.kinds import TokenExchange
from forerun.core.program.types import OpTable
from forerun.describe.cluster.types import Cluster
from forerun.describe.kernels.dispatchers import Transport, transport_of


@lru_cache(maxsize=4096)
def parts_reached(parts: int, routing: TokenExchange[int]) -> float:
    """Returns in how many of `parts` equal parts of all experts, on average, the experts of one token lie.

    The router first chooses groups of experts and then experts in these groups, each as often as any other.
    """
    in_group = routing.n_experts // routing.n_groups
    candidates = in_group * routing.top_groups
    least = comb(candidates, routing.top_k)
    if parts >= routing.n_groups:
        missed = comb(candidates - routing.n_experts // parts, routing.top_k) / least
        chance = routing.top_groups / routing.n_groups
        return parts * chance * (1.0 - missed)
    inside = routing.n_groups // parts
    outside = routing.n_groups - inside
    missed = 0.0
    for chosen in range(max(0, routing.top_groups - outside), min(inside, routing.top_groups) + 1):
        ways = comb(inside, chosen) * comb(outside, routing.top_groups - chosen)
        chance = ways / comb(routing.n_groups, routing.top_groups)
        missed += chance * comb(candidates - chosen * in_group, routing.top_k) / least
    return parts * (1.0 - missed)


def copies_sent(routing: TokenExchange[int], group: CommGroup) -> tuple[float, float]:
    """Returns the copies of a token that go over NVLink, and those that go to other nodes."""
    on_gpus, on_nodes = parts_reached(group.size, routing), parts_reached(group.nodes, routing)
    return (
        on_gpus * (group.ranks_per_node - 1) / group.ranks_per_node,
        on_nodes * (group.nodes - 1) / group.nodes,
    )


@dataclass(frozen=True, slots=True)
class ExchangeTime:
    """The time of an exchange: a fixed time, and the time of each byte of all copies of the tokens."""

    latency_s: float
    s_per_byte: float
    near_busy: float
    """seconds that a byte keeps NVLink busy"""
    far_busy: float
    """seconds that it keeps the link between nodes busy"""


@lru_cache(maxsize=4096)
def exchange_time(
    routing: TokenExchange[int], transport: Transport, group: CommGroup, cluster: Cluster
) -> ExchangeTime:
    """Returns the time of a dispatch or combine over `group`, by bytes of a buffer with top_k copies of each token.

    Raises ForerunError if the group spans nodes of a cluster that has no link between nodes.
    """
    if group.size == 1:
        return ExchangeTime(0.0, 0.0, 0.0, 0.0)
    near, far = (copies / routing.top_k for copies in copies_sent(routing, group))
    across = group.nodes > 1
    moved = (transport.sm_gb_s_across if across else transport.sm_gb_s)[routing.combine] * transport.sms * GIGA
    near_s = near / min(transport.near_share * cluster.links[0].bytes_per_s, moved)
    far_s = far / (transport.far_share * outer_link(cluster, group.nodes).bytes_per_s) if across else 0.0
    return ExchangeTime(transport.notify_us * US, slower(near_s, far_s), near_s, far_s)


def exchange_of(ops: OpTable, row: int, groups: Sequence[CommGroup], cluster: Cluster) -> ExchangeTime:
    """Returns the time of `row`, a kernel of a dispatcher."""
    transport = transport_of(ops.kernel[row])
    return exchange_time(ops.token_exchange(row), transport, groups[ops.group[row]], cluster)


def sent_share(ops: OpTable, row: int, groups: Sequence[CommGroup]) -> float:
    """Returns the bytes that `row`, a kernel of a dispatcher, sends over those of a copy for each expert."""
    routing, group = ops.token_exchange(row), groups[ops.group[row]]
    near, far = copies_sent(routing, group)
    own: float = routing.top_k * max(1, group.size - 1) / group.size
    return (near + far) / own
