"""Textbook costs of patterns: a latency for each step, and bytes over bandwidth on the busiest link.

The rates of NCCL (`network.nccl`) are fitted. For studies of patterns and of ideal networks, this module computes the
time of the same messages only from alpha (the latency of a step) and beta (the seconds per byte of a link), as in
Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (2005).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil, log2
from typing import NamedTuple

from forerun.common.units import US
from forerun.core.network import group_traffic as traffic
from forerun.core.network.formulas import TREE_PASSES
from forerun.core.network.group_traffic import Flows, Layout
from forerun.core.network.link_load import Fabric


@dataclass(frozen=True)
class AlphaBeta:
    """The share of the links that a transfer reaches, and the fixed cost of a step."""

    efficiency: float = 1.0
    """share of the rate of every link that messages reach"""
    hop_latency_us: float | None = None
    """latency of a step between two ranks; None for that of the links of the route"""
    base_latency_us: float = 0.0
    """of the whole pattern, once"""


class Steps(NamedTuple):
    """The time of steps of equal messages: seconds of a byte of the buffer, and latencies of a step."""

    s_per_byte: float
    near_s: float
    """latency of a step inside a node"""
    far_s: float
    """of one between nodes"""


def steps_of(flows: Iterable[Flows], fabric: Fabric, node_size: int, rates: AlphaBeta) -> Steps:
    """Returns the time of `flows`, whose bytes all share the links, on `fabric` with nodes of `node_size` GPUs."""
    load = fabric.load(flows, node_size, 1.0, 1.0)
    near_s, far_s = load.near_latency_s, load.far_latency_s
    if rates.hop_latency_us is not None:
        near_s = far_s = rates.hop_latency_us * US
    return Steps(load.busiest.s_per_byte / rates.efficiency, near_s, far_s)


def ring_line(layout: Layout, share: float, fabric: Fabric, node_size: int, rates: AlphaBeta) -> tuple[float, float]:
    """Returns the latency and seconds per byte of one round of a ring whose ranks pass on `share` of the buffer: (n -
    1) steps.

    Of one ring through all ranks and one for each rank of a node over its own NICs, which carry the same bytes between
    nodes where every GPU has its own, the faster.
    """
    ways = [traffic.ring(layout, share)]
    if layout.per_node > 1 and layout.nodes > 1:
        ways.append(traffic.rails(layout, share, share))
    steps = min((steps_of(flows, fabric, node_size, rates) for flows in ways), key=lambda each: each.s_per_byte)
    far = 0 if layout.nodes == 1 else min(layout.size - 1, layout.nodes)
    return far * steps.far_s + (layout.size - 1 - far) * steps.near_s, steps.s_per_byte


def tree_line(layout: Layout, fabric: Fabric, node_size: int, rates: AlphaBeta) -> tuple[float, float]:
    """Returns the latency and seconds per byte of an all-reduce in double binary trees: up and down, the bytes in many
    pieces.

    Over the nodes with a chain inside each; over the ranks of a group inside one node.
    """
    if layout.nodes == 1:
        layout = replace(layout, per_node=1)
    steps = steps_of(traffic.trees(layout, TREE_PASSES), fabric, node_size, rates)
    climb_s = steps.far_s or steps.near_s
    return 2 * ((layout.per_node - 1) * steps.near_s + ceil(log2(layout.nodes)) * climb_s), steps.s_per_byte
