"""Measures how busy a step keeps the links of a network: the busiest link of each mesh axis."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from forerun.core.cost.gradient_exchange import priced_rows, wires_of
from forerun.core.cost.op_costs import on_topology
from forerun.core.network.link_load import Busiest
from forerun.core.network.network_file import Network
from forerun.core.network.on_topology import OnTopology, describe
from forerun.core.network.patterns import CommunicationPattern, Wires
from forerun.core.program.origin import Origin
from forerun.core.program.types import F64, Collective, Program
from forerun.describe.cluster.types import Cluster


@dataclass(frozen=True)
class AxisUse:
    """The use that the communication of one mesh axis makes of the link that limits it."""

    axis: str
    ranks: int
    apart: int
    """distance between neighbours of a group, in ranks"""
    busiest_link: str
    """`NPU 3 -> switch 64`; the first of equally busy links"""
    busy_s: float
    """seconds of a step that the link transmits for this axis at its full rate"""
    utilisation: float
    """busy_s over the step time"""


@dataclass(frozen=True)
class NetworkUse:
    """The network that a prediction ran on, and how busy its links are."""

    topology: str
    npus: int
    axes: tuple[AxisUse, ...]
    """the busiest first"""


def network_use(
    program: Program,
    network: Network,
    cluster: Cluster,
    n_gpus: int,
    step_s: float,
    pattern: CommunicationPattern | None = None,
) -> NetworkUse:
    """Finds the busiest link of each axis in a step of `program` from the bytes that its collectives put on the link.

    Where GPUs of several kinds run the program, the kind that uses the link most counts. The bytes that `pattern` sends
    count where the pattern knows its links.
    """
    limits, times = _Limits.of(program, network, cluster, n_gpus, pattern), _times(program)
    starts = Origin.of(program).part_ops or (0,)
    busy: dict[int, _Links] = {}
    for start, end in pairwise((*starts, len(program.ops))):
        for number, links in _busy_links(program, limits, times, range(start, end)).items():
            if number not in busy or sum(links.values()) > sum(busy[number].values()):
                busy[number] = links
    axes = []
    for number, links in busy.items():
        group, first = program.groups[number], max(links, key=lambda link: links[link])
        busy_s = sum(links.values())
        name = f"{_device(first.src, network)} -> {_device(first.dst, network)}"
        axes.append(AxisUse(group.axis, group.size, group.inner, name, busy_s, busy_s / step_s))
    return NetworkUse(describe(network), network.n_npus, tuple(sorted(axes, key=lambda axis: -axis.busy_s)))


_Links = dict[Busiest, float]
"""link -> seconds that it is busy"""


@dataclass(frozen=True)
class _Limits:
    """Finds the link that limits each collective."""

    placed: OnTopology
    pattern: CommunicationPattern | None
    wires: Wires
    rows: frozenset[int]
    """indices of the ops that the pattern runs"""

    @classmethod
    def of(
        cls, program: Program, network: Network, cluster: Cluster, n_gpus: int, pattern: CommunicationPattern | None
    ) -> _Limits:
        rows = [] if pattern is None else priced_rows(program.ops, program.groups, pattern).tolist()
        wires = wires_of(cluster, n_gpus, network)
        return cls(on_topology(network, cluster, n_gpus), pattern, wires, frozenset(rows))

    def link(self, program: Program, row: int) -> Busiest | None:
        group, size_bytes = program.groups[program.ops.group[row]], float(program.ops.bytes_comm[row])
        if self.pattern is not None and row in self.rows:
            return self.pattern.busiest(size_bytes, group, self.wires)
        return self.placed.busiest_link(Collective(program.ops.collective[row]), group, size_bytes)


def _busy_links(program: Program, limits: _Limits, times: F64, rows: range) -> dict[int, _Links]:
    """Returns, for each group, the links that limit its collectives among the ops `rows`."""
    busy: dict[int, _Links] = {}
    ops = program.ops
    for row in rows:
        number = int(ops.group[row])
        if number < 0 or times[row] == 0 or program.groups[number].size == 1:
            continue
        link = limits.link(program, row)
        if link is not None:
            links = busy.setdefault(number, {})
            links[link] = links.get(link, 0.0) + float(times[row] * ops.bytes_comm[row]) * link.s_per_byte
    return busy


def _times(program: Program) -> F64:
    """Returns the number of times that a rank runs each op in a step, (n_ops,). The rank class that runs the op most
    often counts.

    A send and a receive between stages count half each, because the two use links of opposite direction.
    """
    most = np.zeros(len(program.ops))
    joint = np.zeros(len(program.channels) + 1, np.bool_)
    joint[list(Origin.of(program).joint_channels)] = True
    per_block = []
    for block in program.blocks:
        weight = np.where((block.channel >= 0) & ~joint[block.channel], 0.5, 1.0)
        per_block.append(np.bincount(block.op, weights=weight, minlength=len(program.ops)))
    for rank_class in program.rank_classes:
        steps = np.bincount(rank_class.block, minlength=len(program.blocks))
        total = np.zeros(len(program.ops))
        for number in np.flatnonzero(steps).tolist():
            total += steps[number] * per_block[number]
        most = np.maximum(most, total)
    return most


def _device(number: int, network: Network) -> str:
    return f"NPU {number}" if number < network.n_npus else f"switch {number}"
