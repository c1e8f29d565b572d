"""Divides the time of each collective of a simulated step into parts that add up.

The time of a collective on one rank, from the moment when it could start, has five parts, which add up:

* waiting: the other ranks have not arrived yet;
* wire: the time of the bytes at the full rate of the slowest link;
* latency: the time of the algorithm for an empty buffer;
* protocol: what NCCL needs in addition, because protocols and rings don't reach the full rate of the link;
* sharing: the slowdown by collectives and kernels that run at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from forerun.answers.analysis.bottlenecks import op_name
from forerun.answers.analysis.breakdown import ready_ps
from forerun.answers.analysis.reading import Simulation
from forerun.answers.analysis.setup import Setup
from forerun.common.units import PS_PER_S
from forerun.core.cost.profile import load_profile
from forerun.core.network.nccl import algorithms, chosen, outer_link
from forerun.core.program.groups import CommGroup
from forerun.core.program.types import Collective
from forerun.describe.cluster.types import Cluster


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """The collectives of one kind and one group in a step of the rank that sets the pace, in seconds."""

    name: str
    """`all-reduce over data-parallel ranks (2 nodes x 8)`"""
    way: str
    """algorithm and protocol that NCCL chooses; empty if several sizes choose different ones"""
    count: int
    size_bytes: float
    waiting_s: float
    wire_s: float
    latency_s: float
    protocol_s: float
    sharing_s: float

    @property
    def total_s(self) -> float:
        """Returns the sum of the parts: from when the collectives could start to their ends, hidden or not."""
        return self.waiting_s + self.wire_s + self.latency_s + self.protocol_s + self.sharing_s


def collectives_of(setup: Setup, simulation: Simulation) -> tuple[CollectiveTime, ...]:
    """Returns `collective_times` of a simulated setup.

    The result is empty if collectives don't have NCCL's times on sound links: on a topology, under another
    communication pattern, or on slow links.
    """
    if setup.network is not None or setup.pattern is not None or setup.slow_links != 1.0:
        return ()
    return collective_times(simulation, setup.cluster)


def collective_times(simulation: Simulation, cluster: Cluster) -> tuple[CollectiveTime, ...]:
    """Returns the parts of the collectives of an unfolded `simulation` on the links of `cluster`, the longest first.

    Transfers between pipeline stages are left out: their waiting is the pipeline's bubble.
    """
    flat, program, timeline = simulation.flat, simulation.program, simulation.timeline
    nodes = np.arange(int(flat.class_ptr[simulation.slowest]), int(flat.class_ptr[simulation.slowest + 1]))
    ops = program.ops
    kinds = ops.collective[flat.op[nodes]]
    nodes = nodes[(kinds != Collective.NONE) & (kinds != Collective.SEND_RECV)]
    waiting = timeline.start_ps[nodes] - ready_ps(flat, timeline, nodes)
    running = timeline.end_ps[nodes] - timeline.start_ps[nodes]
    found: dict[str, list[CollectiveTime]] = {}
    for row in np.unique(flat.op[nodes]).tolist():
        group = program.groups[int(ops.group[row])]
        if group.size == 1:
            continue
        mine = flat.op[nodes] == row
        n, size, alone_ps = int(mine.sum()), float(ops.bytes_comm[row]), int(simulation.costs.duration_ps[row])
        alone_s, name = alone_ps / PS_PER_S, op_name(simulation, row)
        way, wire_s, latency_s = _least(Collective(int(ops.collective[row])), group, size, alone_s, cluster)
        found.setdefault(name, []).append(
            CollectiveTime(
                name=name,
                way=way,
                count=n,
                size_bytes=n * size,
                waiting_s=int(waiting[mine].sum()) / PS_PER_S,
                wire_s=n * wire_s,
                latency_s=n * latency_s,
                protocol_s=n * (alone_s - wire_s - latency_s),
                sharing_s=(int(running[mine].sum()) - n * alone_ps) / PS_PER_S,
            )
        )
    return tuple(sorted(map(_sum, found.values()), key=lambda each: -each.total_s))


def _least(
    kind: Collective, group: CommGroup, size: float, alone_s: float, cluster: Cluster
) -> tuple[str, float, float]:
    """Returns the way that NCCL goes, and the seconds of the wire and of latency, which are at most `alone_s`."""
    measured = load_profile(cluster.device.cost_profile).collectives
    ways = algorithms(kind, group.nodes, group.ranks_per_node, cluster, measured)
    way, protocol = chosen(ways, size)
    wire_s = size * way.near / cluster.links[0].bytes_per_s if group.ranks_per_node > 1 else 0.0
    if group.nodes > 1:
        wire_s = max(wire_s, size * way.far / outer_link(cluster, group.nodes).bytes_per_s)
    wire_s = min(wire_s, alone_s)
    latency_s = way.lines.latency_s[way.protocols.index(protocol)]
    return f"{way.name}, {protocol}", wire_s, min(latency_s, alone_s - wire_s)


def _sum(some: Sequence[CollectiveTime]) -> CollectiveTime:
    """Returns the sum of the collectives of one name."""
    ways = {each.way for each in some}
    totals = {name: sum(getattr(each, name) for each in some) for name in _SUMMED}
    return replace(some[0], way=ways.pop() if len(ways) == 1 else "", **totals)


_SUMMED = ("count", "size_bytes", "waiting_s", "wire_s", "latency_s", "protocol_s", "sharing_s")
