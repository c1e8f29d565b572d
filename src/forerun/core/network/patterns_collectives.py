"""Patterns made of collectives: NCCL's choice, ring, tree, reduce-scatter and all-gather, all-gather and local sums.

Without `rates` they have the times of NCCL's algorithms: a ring and a tree are subsets of its choices, with its
protocols, its base latencies and the share of the wire rate that it sustains. With `rates` they have textbook times.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

from forerun.common.errors import ForerunError
from forerun.common.units import US
from forerun.core.network.alpha_beta import AlphaBeta, ring_line, tree_line
from forerun.core.network.formulas import passes
from forerun.core.network.group_traffic import Layout
from forerun.core.network.lines import Lines
from forerun.core.network.link_load import Busiest
from forerun.core.network.nccl import algorithms, collective_lines, ring_lines, tree_lines
from forerun.core.network.on_topology import OnTopology, Way
from forerun.core.network.patterns import CommunicationPattern, Wires, has_all_reduce
from forerun.core.program.groups import CommGroup
from forerun.core.program.types import F64, Collective
from forerun.describe.plan.plan import Plan


@dataclass(frozen=True)
class CollectivePattern(CommunicationPattern):
    """A pattern of collectives of the whole gradients."""

    rates: AlphaBeta | None = None
    """textbook rates in place of NCCL's"""
    kind: ClassVar[Collective] = Collective.ALL_REDUCE

    @property
    def as_nccl(self) -> bool:
        """Returns True unless textbook rates are given."""
        return self.rates is None

    def seconds(self, size_bytes: F64, group: CommGroup, wires: Wires) -> F64:
        """Returns the times of `lines`. Subclasses add times that lines cannot express."""
        return self.lines(group, wires).seconds(size_bytes)

    def lines(self, group: CommGroup, wires: Wires) -> Lines:
        """Returns the latency and seconds per byte of the ways that the pattern may take."""
        if self.rates is None:
            return self.nccl_lines(group, wires)
        latency, slope = zip(*_textbook(self, Layout.of(group, wires.n_gpus), wires), strict=True)
        return Lines(tuple(time_s + self.rates.base_latency_us * US for time_s in latency), slope)

    def nccl_lines(self, group: CommGroup, wires: Wires) -> Lines:
        """Returns the lines with NCCL's constants, on the cluster's links or on the topology."""
        if wires.network is None:
            return self.on_links(group, wires)
        found = self.ways(group, wires)
        return Lines(tuple(way.latency_s for way in found), tuple(way.s_per_byte for way in found))

    def on_links(self, group: CommGroup, wires: Wires) -> Lines:
        """Returns all lines that NCCL chooses from for `kind` on the cluster's own links."""
        return collective_lines(self.kind, group.nodes, group.ranks_per_node, wires.cluster, wires.measured)

    def ways(self, group: CommGroup, wires: Wires) -> tuple[Way, ...]:
        """Returns all that NCCL chooses from for `kind` on the topology."""
        assert wires.network is not None
        return OnTopology(wires.network, wires.n_gpus, wires.cluster, wires.measured).ways(self.kind, group)

    def busiest(self, size_bytes: float, group: CommGroup, wires: Wires) -> Busiest | None:
        """Returns the link that the fastest way uses most. Messages take NCCL's routes also under textbook rates."""
        if wires.network is None:
            return None
        times = self.buffers(group)
        link = min(self.ways(group, wires), key=lambda way: way.latency_s + way.s_per_byte * size_bytes).busiest
        return replace(link, s_per_byte=link.s_per_byte * times)

    def buffers(self, group: CommGroup) -> float:
        """Returns the bytes of all collectives of `kind` and their counterparts over those of the gradients."""
        return 1.0

    @abstractmethod
    def textbook(self, layout: Layout, wires: Wires, rates: AlphaBeta) -> list[tuple[float, float]]:
        """Returns (latency, seconds per byte) of each way with textbook rates."""


@lru_cache(maxsize=1 << 12)
def _textbook(pattern: CollectivePattern, layout: Layout, wires: Wires) -> list[tuple[float, float]]:
    return pattern.textbook(layout, wires, pattern.rates or AlphaBeta())


def _ring_round(layout: Layout, wires: Wires, rates: AlphaBeta) -> tuple[float, float]:
    """Returns a reduce-scatter or an all-gather in a ring."""
    return ring_line(layout, passes(Collective.ALL_GATHER, layout.size), wires.fabric, wires.node_size, rates)


def _ring_in_node(kind: Collective, group: CommGroup, wires: Wires) -> Lines:
    """Returns the measured lines of the rings inside a node, without switches that add."""
    return algorithms(kind, 1, group.ranks_per_node, wires.cluster, wires.measured)[0].lines


def _ring_all_reduce(layout: Layout, wires: Wires, rates: AlphaBeta) -> tuple[float, float]:
    latency_s, s_per_byte = _ring_round(layout, wires, rates)
    return 2 * latency_s, 2 * s_per_byte


@dataclass(frozen=True)
class Nccl(CollectivePattern):
    """NCCL's own choice by size: rings, trees or switches that add."""

    name: str = "nccl"

    def textbook(self, layout: Layout, wires: Wires, rates: AlphaBeta) -> list[tuple[float, float]]:
        """Returns the lines of a ring and of a tree."""
        fabric = wires.fabric
        return [_ring_all_reduce(layout, wires, rates), tree_line(layout, fabric, wires.node_size, rates)]

    def check(self, plan: Plan) -> None:
        """Accepts every plan."""


@dataclass(frozen=True)
class RingAllReduce(CollectivePattern):
    """A reduce-scatter and an all-gather round a ring of all ranks: 2 (n - 1) steps, 2 (n - 1) / n of the bytes.

    It enters and leaves a node over the NICs of all its GPUs, a share of the bytes over each.
    """

    name: str = "ring_allreduce"

    def on_links(self, group: CommGroup, wires: Wires) -> Lines:
        """Returns the lines of NCCL's rings; inside one node, those of its measured collectives."""
        if group.nodes == 1:
            return _ring_in_node(self.kind, group, wires)
        return ring_lines(self.kind, group.nodes, group.ranks_per_node, wires.cluster, wires.measured)

    def ways(self, group: CommGroup, wires: Wires) -> tuple[Way, ...]:
        """Returns all ways but trees and switches that add."""
        return tuple(way for way in super().ways(group, wires) if way.pattern not in ("trees", "switches"))

    def textbook(self, layout: Layout, wires: Wires, rates: AlphaBeta) -> list[tuple[float, float]]:
        """Returns 2 (n - 1) alpha + 2 (n - 1) / n bytes beta."""
        return [_ring_all_reduce(layout, wires, rates)]


@dataclass(frozen=True)
class TreeAllReduce(CollectivePattern):
    """A reduction up and a broadcast down double binary trees over the nodes: 2 log2(nodes) steps, 2 x the bytes.

    Inside a node the ranks are a chain. With few bytes or many nodes it is faster than a ring, with many bytes slower.
    """

    name: str = "tree_allreduce"

    def on_links(self, group: CommGroup, wires: Wires) -> Lines:
        """Returns the lines of NCCL's trees. Inside one node a chain sends all bytes where a ring sends (n - 1) / n."""
        if group.nodes == 1:
            ring, more = _ring_in_node(self.kind, group, wires), group.size / (group.size - 1)
            return Lines(ring.latency_s, tuple(slope * more for slope in ring.s_per_byte))
        return tree_lines(group.nodes, group.ranks_per_node, wires.cluster, wires.measured)

    def ways(self, group: CommGroup, wires: Wires) -> tuple[Way, ...]:
        """Returns NCCL's trees, or its chain inside one node."""
        found = tuple(way for way in super().ways(group, wires) if way.pattern != "switches")
        if group.nodes > 1:
            return tuple(way for way in found if way.tree)
        more = group.size / (group.size - 1)
        return tuple(
            replace(
                way,
                s_per_byte=way.s_per_byte * more,
                busiest=replace(way.busiest, s_per_byte=way.busiest.s_per_byte * more),
            )
            for way in found
        )

    def textbook(self, layout: Layout, wires: Wires, rates: AlphaBeta) -> list[tuple[float, float]]:
        """Returns 2 ceil(log2 n) alpha + 2 bytes beta."""
        return [tree_line(layout, wires.fabric, wires.node_size, rates)]


@dataclass(frozen=True)
class ReduceScatter(CollectivePattern):
    """ZeRO: gradients are reduce-scattered, every rank updates its share, and parameters are all-gathered.

    That is a plan with `zero_stage` 1 or more, whose collectives and memory are simulated as they are. What such a step
    still all-reduces (over replicas, or of a stack that all-reduces all the same) costs both collectives in turn.
    """

    name: str = "reduce_scatter"
    kind: ClassVar[Collective] = Collective.REDUCE_SCATTER

    @property
    def zero_stage(self) -> int:
        """Returns 1: the optimizer state is sharded."""
        return 1

    def seconds(self, size_bytes: F64, group: CommGroup, wires: Wires) -> F64:
        """Returns the time of a reduce-scatter and then an all-gather."""
        if self.rates is not None:
            return super().seconds(size_bytes, group, wires)
        gather = AllGather().nccl_lines(group, wires).seconds(size_bytes)
        return gather + self.nccl_lines(group, wires).seconds(size_bytes)

    def buffers(self, group: CommGroup) -> float:
        """Returns 2: the all-gather sends as many bytes as the reduce-scatter."""
        return 2.0

    def textbook(self, layout: Layout, wires: Wires, rates: AlphaBeta) -> list[tuple[float, float]]:
        """Returns the line of a ring, with the base latency twice."""
        latency_s, s_per_byte = _ring_all_reduce(layout, wires, rates)
        return [(latency_s + rates.base_latency_us * US, s_per_byte)]


@dataclass(frozen=True)
class AllGather(CollectivePattern):
    """Every rank gathers the gradients of all ranks and sums them itself: n - 1 times the bytes, and a pass over them.

    The buffer of n times the gradients is not in the memory that Forerun counts.
    """

    name: str = "all_gather"
    kind: ClassVar[Collective] = Collective.ALL_GATHER

    def seconds(self, size_bytes: F64, group: CommGroup, wires: Wires) -> F64:
        """Returns the time of the all-gather and of the sum, which reads n buffers and writes one."""
        gathered = size_bytes * group.size
        return self.lines(group, wires).seconds(gathered) + wires.pass_s(gathered + size_bytes)

    def buffers(self, group: CommGroup) -> float:
        """Returns n: every rank gathers the buffers of all."""
        return float(group.size)

    def textbook(self, layout: Layout, wires: Wires, rates: AlphaBeta) -> list[tuple[float, float]]:
        """Returns (n - 1) alpha + (n - 1) bytes beta."""
        return [_ring_round(layout, wires, rates)]


@dataclass(frozen=True)
class Compressed(CommunicationPattern):
    """Another pattern with `ratio` times fewer bytes on the wire, for a pass over the gradients before and after.

    What is compressed has to be summable as it is (16-bit or 8-bit casts, low-rank factors, a sparse set that all ranks
    agree on), or be gathered by `AllGather`. What it does to convergence is not simulated.
    """

    pattern: CommunicationPattern
    ratio: float
    """bytes of the gradients over those on the wire"""
    passes: float = 1.0
    """how often the gradients are read to compress them, and written to have them back"""

    def __post_init__(self) -> None:
        """Raises ForerunError for a ratio below 1 or less than no pass."""
        if not 1 <= self.ratio < float("inf") or not 0 <= self.passes < float("inf"):
            raise ForerunError(
                f"gradient compression: ratio {self.ratio:g} has to be 1 or more, passes {self.passes:g} 0 or more"
            )

    @property
    def name(self) -> str:
        """Returns the name of the pattern, and the compression ratio."""
        return f"{self.pattern.name} compressed {self.ratio:g}x"

    @property
    def zero_stage(self) -> int:
        """Returns that of the pattern."""
        return self.pattern.zero_stage

    @property
    def as_nccl(self) -> bool:
        """Returns that of the pattern."""
        return self.pattern.as_nccl

    def seconds(self, size_bytes: F64, group: CommGroup, wires: Wires) -> F64:
        """Returns the time to compress, exchange and decompress."""
        wire_bytes = size_bytes / self.ratio
        around = wires.pass_s(self.passes * size_bytes + wire_bytes)
        return self.pattern.seconds(wire_bytes, group, wires) + 2 * around

    def busiest(self, size_bytes: float, group: CommGroup, wires: Wires) -> Busiest | None:
        """Returns the busiest link of the pattern, with fewer bytes."""
        link = self.pattern.busiest(size_bytes / self.ratio, group, wires)
        return None if link is None else replace(link, s_per_byte=link.s_per_byte / self.ratio)

    def check(self, plan: Plan) -> None:
        """Raises ForerunError if nothing that could be compressed is all-reduced."""
        self.pattern.check(plan)
        if not has_all_reduce(plan):
            raise ForerunError(
                f"gradient compression: with zero_stage {plan.zero_stage} gradients are reduce-scattered, and what is"
                " compressed is all-reduced; use zero_stage 0"
            )
