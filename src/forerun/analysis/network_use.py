"""How busy a step keeps the links of a network."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from forerun.cluster.types import Cluster
from forerun.cost.op_costs import on_topology
from forerun.network.link_load import Busiest
from forerun.network.network_file import Network
from forerun.network.on_topology import OnTopology, describe
from forerun.program.origin import Origin
from forerun.program.types import F64, Collective, Program


@dataclass(frozen=True)
class AxisUse:
    """What the communication of one mesh axis does to the link that limits it."""

    axis: str
    ranks: int
    apart: int
    """ranks between neighbours of a group"""
    busiest_link: str
    """`NPU 3 -> switch 64`; of equally busy ones the first"""
    busy_s: float
    """time in a step that the link transmits for this axis at its full rate"""
    utilisation: float
    """busy_s over the step time"""


@dataclass(frozen=True)
class NetworkUse:
    """The network that a prediction ran on."""

    topology: str
    npus: int
    axes: tuple[AxisUse, ...]
    """the busiest first"""


def network_use(program: Program, network: Network, cluster: Cluster, n_gpus: int, step_s: float) -> NetworkUse:
    """The busiest link of each axis in a step of `program`, by what its collectives put on the link.

    Where GPUs of several kinds run it, by what those put there that use it most.
    """
    placed, times = on_topology(network, cluster, n_gpus), _times(program)
    starts = Origin.of(program).part_ops or (0,)
    busy: dict[int, _Links] = {}
    for start, end in pairwise((*starts, len(program.ops))):
        for number, links in _busy_links(program, placed, times, range(start, end)).items():
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


def _busy_links(program: Program, placed: OnTopology, times: F64, rows: range) -> dict[int, _Links]:
    """By group, the links that limit collectives among the ops `rows`."""
    busy: dict[int, _Links] = {}
    ops = program.ops
    for row in rows:
        number, size_bytes = int(ops.group[row]), float(ops.bytes_comm[row])
        if number >= 0 and times[row] > 0 and program.groups[number].size > 1:
            link = placed.busiest_link(Collective(ops.collective[row]), program.groups[number], size_bytes)
            links = busy.setdefault(number, {})
            links[link] = links.get(link, 0.0) + float(times[row]) * size_bytes * link.s_per_byte
    return busy


def _times(program: Program) -> F64:
    """(ops,): how often a rank runs each op in a step, of the rank class that does most often.

    The two ends of a transfer between stages count half: a rank's sends and receives use links of their own direction.
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
