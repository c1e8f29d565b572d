"""Patterns as messages: in each round ranks send bytes to others, and the links of the routes determine the time.

A round ends when its busiest link has transmitted all its bytes and its longest route is complete; then the next round
starts. All equal groups of the mesh axis send at the same time. Messages have the performance of NCCL's point-to-point
transfers: the base latency, the steps and the rates of its protocols between nodes, and those of the device's lines
inside a node.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from forerun.common.errors import ForerunError
from forerun.common.units import US
from forerun.core.network.alpha_beta import AlphaBeta
from forerun.core.network.constants import fabrics
from forerun.core.network.group_traffic import Flows, Layout
from forerun.core.network.lines import Lines
from forerun.core.network.link_load import Busiest
from forerun.core.network.nccl import node_constants, wire_efficiency
from forerun.core.network.on_topology import sharing
from forerun.core.network.patterns import CommunicationPattern, Wires
from forerun.core.program.groups import CommGroup
from forerun.core.program.types import F64, I32

Message = tuple[int, int, float]
"""rank that sends, rank that receives, bytes; ranks are those of the group, 0 to its size - 1"""


@dataclass(frozen=True)
class Round:
    """Messages that are sent together."""

    messages: Sequence[Message]
    times: int = 1
    """how often in a row"""


class MessagePattern(CommunicationPattern):
    """A user's own pattern, which lists its rounds. Ranks i p to i p + p - 1 of a group share a node of p ranks."""

    rates: AlphaBeta | None = None
    """textbook rates in place of those of NCCL's transfers"""

    @property
    def as_nccl(self) -> bool:
        """Returns True unless textbook rates are given."""
        return self.rates is None

    @abstractmethod
    def rounds(self, group: CommGroup, size_bytes: float) -> Iterable[Round | Sequence[Message]]:
        """Returns the rounds that sum gradients of `size_bytes` over `group`, each a Round or its messages."""

    def local_bytes(self, group: CommGroup, size_bytes: float) -> float:
        """Returns the bytes that the busiest rank reads and writes to sum; 0 unless a pattern overrides it."""
        return 0.0

    def seconds(self, size_bytes: F64, group: CommGroup, wires: Wires) -> F64:
        """Returns the time of the rounds, one after the other. Raises ForerunError for an invalid message."""
        return np.array([float(self._one(float(size), group, wires)) for size in size_bytes], np.float64)

    def _one(self, size_bytes: float, group: CommGroup, wires: Wires) -> float:
        local = self.local_bytes(group, size_bytes)
        sent = float(self.lines_of(size_bytes, group, wires).seconds(np.array(1.0)))
        return sent + (float(wires.pass_s(np.array(local))) if local else 0.0)

    def lines_of(self, size_bytes: float, group: CommGroup, wires: Wires) -> Lines:
        """Returns the latency of the rounds and the seconds that the bytes of all rounds take, for each protocol."""
        rounds = list(_timed(self, size_bytes, group, wires))
        if self.rates is not None:
            hop_us = self.rates.hop_latency_us
            steps = (one.times * (max(one.near_s, one.far_s) if hop_us is None else hop_us * US) for one in rounds)
            busy_s = sum(one.times * one.busy_s for one in rounds) / self.rates.efficiency
            return Lines((self.rates.base_latency_us * US + sum(steps),), (busy_s,))
        busy_s = sum(one.times * one.busy_s for one in rounds)
        return (_lines_in_node if group.nodes == 1 else _lines_between_nodes)(rounds, busy_s, group, wires)

    def busiest(self, size_bytes: float, group: CommGroup, wires: Wires) -> Busiest | None:
        """Returns the link that transmits longest over all rounds."""
        if wires.network is None or size_bytes <= 0:
            return None
        rounds = _sent(self, size_bytes, group, wires)
        flows = [one._replace(weight=one.weight * times) for times, one in rounds]
        if not flows:
            return None
        link = wires.fabric.load(flows, wires.node_size, 1.0, 1.0).busiest
        return replace(link, s_per_byte=link.s_per_byte / size_bytes)


class _Timed(NamedTuple):
    times: int
    busy_s: float
    """time of the busiest link"""
    near_s: float
    far_s: float
    """latencies of the longest routes inside a node and between nodes, 0 if there is none"""


def _timed(pattern: MessagePattern, size_bytes: float, group: CommGroup, wires: Wires) -> Iterator[_Timed]:
    near_cost, far_cost = (1.0, 1.0) if pattern.rates is not None else _costs(group, wires)
    for times, flows in _sent(pattern, size_bytes, group, wires):
        load = wires.fabric.load([flows], wires.node_size, near_cost, far_cost)
        busy_s = load.s_per_byte if pattern.rates is None else load.busiest.s_per_byte
        yield _Timed(times, busy_s, load.near_latency_s, load.far_latency_s)


def _sent(pattern: MessagePattern, size_bytes: float, group: CommGroup, wires: Wires) -> Iterator[tuple[int, Flows]]:
    """Yields the number of repetitions of each round, and its messages in all groups of the axis at once, with their
    bytes.
    """
    members = Layout.of(group, wires.n_gpus).members()
    for number, one in enumerate(_rounds(pattern, size_bytes, group)):
        src, dst, sent = _columns(pattern, number, one, group)
        if len(src) and one.times:
            every = np.tile(sent, len(members))
            yield one.times, Flows(members[:, src].ravel(), members[:, dst].ravel(), every)


def _rounds(pattern: MessagePattern, size_bytes: float, group: CommGroup) -> list[Round]:
    """Returns the rounds of a pattern. Its code may be a user's, so that any exception becomes a ForerunError."""
    try:
        return [one if isinstance(one, Round) else Round(one) for one in pattern.rounds(group, size_bytes)]
    except Exception as error:
        told = " ".join(f"{type(error).__name__}: {error}".split())
        raise ForerunError(f"communication pattern {pattern.name}: its rounds can't be made: {told}") from error


def _columns(pattern: MessagePattern, number: int, one: Round, group: CommGroup) -> tuple[I32, I32, F64]:
    """Returns the senders, receivers and bytes of all messages that are not empty, after checking them."""
    where = f"communication pattern {pattern.name}: round {number}"
    try:
        table = np.array(one.messages, np.float64).reshape(-1, 3)
    except (TypeError, ValueError):
        raise ForerunError(f"{where}: messages have to be (from, to, bytes)") from None
    src, dst, sent = table.T
    ends = table[:, :2]
    if not (np.isfinite(table).all() and (ends == np.floor(ends)).all() and (ends >= 0).all()):
        raise ForerunError(f"{where}: messages have to be (from, to, bytes), from and to whole numbers")
    if len(table) and ends.max() >= group.size:
        raise ForerunError(f"{where}: there is no rank {ends.max():.0f}; the group has ranks 0 to {group.size - 1}")
    if (sent < 0).any() or not isinstance(one.times, int) or one.times < 0:
        raise ForerunError(f"{where}: bytes and times have to be 0 or more, times a whole number")
    real = (src != dst) & (sent > 0)
    return src[real].astype(np.int32), dst[real].astype(np.int32), sent[real]


def _costs(group: CommGroup, wires: Wires) -> tuple[float, float]:
    """Returns how many times longer messages inside and between nodes take than at the full rate of a link."""
    constants, _ = node_constants(wires.cluster, wires.measured)
    op = constants.all_to_all
    outer = wires.cluster.links[-1] if len(wires.cluster.links) > 1 else None
    efficiency = fabrics().efficiency_other if outer is None else wire_efficiency(outer)
    return sharing(op, max(2, group.ranks_per_node)) * constants.link_gb_s / op.bw3, 1.0 / efficiency


def _lines_in_node(rounds: list[_Timed], busy_s: float, group: CommGroup, wires: Wires) -> Lines:
    """Returns lines with the launch and rates of an all-to-all, and the steps of an all-reduce, which wait for data."""
    constants, _ = node_constants(wires.cluster, wires.measured)
    op, steps = constants.all_to_all, sum(one.times for one in rounds)
    link_s = wires.cluster.links[0].latency_s
    extra_us = sum(one.times * max(0.0, one.near_s - link_s) for one in rounds) / US
    reduce, bandwidths = constants.all_reduce, (op.bw1, op.bw2, op.bw3)
    hop_us = (reduce.h_us / 2, reduce.h_us / 2, (reduce.h_us + reduce.h3) / 2)
    """an all-reduce of r + 1 ranks takes h r for 2 r steps"""
    base_us = (op.a_us, op.a_us + op.d2, op.a_us + op.d2 + op.d3)
    latency = tuple((base + steps * hop + extra_us) * US for base, hop in zip(base_us, hop_us, strict=True))
    return Lines(latency, tuple(busy_s * op.bw3 / bandwidth for bandwidth in bandwidths))


def _lines_between_nodes(rounds: list[_Timed], busy_s: float, group: CommGroup, wires: Wires) -> Lines:
    """Returns the lines of NCCL's protocols between nodes: a base latency, a step for each round, and a rate."""
    link_s, reference_us = wires.cluster.links[0].latency_s, fabrics().reference_latency_us
    latency, slope = [], []
    for p in fabrics().ring:
        steps_us = 0.0
        for one in rounds:
            near_us = p.node_hop_us + max(0.0, one.near_s - link_s) / US
            far_us = p.net_hop_us + one.far_s / US - reference_us
            steps_us += one.times * (far_us if one.far_s else near_us)
        latency.append((p.base_us + steps_us) * US)
        slope.append(busy_s / p.rate)
    return Lines(tuple(latency), tuple(slope))


@dataclass(frozen=True)
class ParameterServer(MessagePattern):
    """All ranks push their gradients to a server and pull the sum.

    Both rounds load the links of the server (incast). Servers are ranks of the group. A single server is rank 0; its
    links carry (n - 1) times the bytes in each direction. Several servers have equal shares of the gradients and are
    spread over the nodes first. With as many servers as ranks, links carry the same bytes as in a ring, in 2 steps.
    """

    servers: int = 1
    name: str = "parameter_server"
    rates: AlphaBeta | None = None

    def __post_init__(self) -> None:
        """Raises ForerunError for less than one server."""
        if isinstance(self.servers, bool) or not isinstance(self.servers, int) or self.servers < 1:
            raise ForerunError(
                f"parameter_server: servers is {self.servers!r}, it has to be a whole number of at least 1"
            )

    def places(self, group: CommGroup) -> list[int]:
        """Returns the ranks of `group` that are servers, at most all of them."""
        count = min(self.servers, group.size)
        return [number % group.nodes * group.ranks_per_node + number // group.nodes for number in range(count)]

    def rounds(self, group: CommGroup, size_bytes: float) -> Iterator[Round]:
        """Yields the push twice: the pull sends as much over the same links in the other direction."""
        places = self.places(group)
        share = size_bytes / len(places)
        yield Round([(rank, server, share) for server in places for rank in range(group.size) if rank != server], 2)

    def local_bytes(self, group: CommGroup, size_bytes: float) -> float:
        """Returns the bytes of a server, which reads the gradients of all ranks and writes the sum."""
        return (group.size + 1) * size_bytes / len(self.places(group))

    def seconds(self, size_bytes: F64, group: CommGroup, wires: Wires) -> F64:
        """Returns the time of push, pull and sum. It is linear in the bytes: one load of the links serves all sizes."""
        lines = _server_lines(self, replace(group, axis=""), wires)
        return lines.seconds(size_bytes) + wires.pass_s(self.local_bytes(group, 1.0) * size_bytes)

    def busiest(self, size_bytes: float, group: CommGroup, wires: Wires) -> Busiest | None:
        """Returns a link into a server. It carries the pushes alone: pulls take the link of the other direction."""
        link = super().busiest(size_bytes, group, wires)
        return None if link is None else replace(link, s_per_byte=link.s_per_byte / 2)


@lru_cache(maxsize=1 << 12)
def _server_lines(pattern: ParameterServer, group: CommGroup, wires: Wires) -> Lines:
    return pattern.lines_of(1.0, group, wires)
