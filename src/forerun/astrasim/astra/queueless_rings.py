"""Which collectives have a closed form, and how long they take: rings on which no message waits for a link.

A collective has one if its chunks run a ring algorithm in a single phase. Without queues at links that is all. With
queues, each link has to be on the way of one pair of neighbours at most, and each message has to find it free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from forerun.astrasim.astra.collectives import CollectiveTables, Phase
from forerun.astrasim.astra.lower import LoweredProgram
from forerun.astrasim.astra.symmetry import delays_ns
from forerun.astrasim.messages import state as codes
from forerun.astrasim.messages.algorithms import reduction_ns
from forerun.astrasim.messages.closed_form import RING_CALL, ClosedForms, closed_forms, ring_ends
from forerun.astrasim.messages.slots import COLLECTIVE, IN_CLOSED_FORM
from forerun.common.arrays import pointers
from forerun.core.network.network_file import Network
from forerun.core.network.network_file import bytes_per_ns as in_bytes_per_ns
from forerun.core.program.types import I64

_MOST_NS = 1 << 60


@dataclass(frozen=True)
class Ring:
    """A collective on a ring of n members, as a recurrence (`messages.closed_form`)."""

    members: I64
    """(n,) ranks in the order of the ring"""
    message_bytes: int
    n_messages: int
    """that each member sends for a chunk"""
    packets_ns: int
    """the time of the packets of a member for a chunk"""
    n_chunks: int
    rounds: int
    """chunks that run one after the other, or sets of chunks that run at the same time"""
    tail_ns: int
    """the time between the last event before an end and the end"""


@dataclass(frozen=True)
class QueuedRings:
    """Rings whose messages never wait for a link."""

    ends_ns: list[I64]
    """of each ring: when its members end, (n,)"""
    link_busy_ns: I64
    """(links,)"""
    link_bytes: I64


def ring_of(tables: CollectiveTables, call: int) -> Ring | None:
    """Returns the ring on which a call runs, None if it has more than one phase, or one of another algorithm."""
    phases, members = tables.phases_of(call), tables.members_of(call)
    if len(phases) != 1 or tables.n_queues != 1:
        return None
    phase, n = phases[0], len(members)
    everyone = phase["stride"] == 1 and members == tuple(range(tables.n_ranks))
    if phase["algorithm"] != codes.RING or phase["n"] != n or not (phase["stride"] == 0 or everyone):
        return None
    packets = phase["n_messages"] + 1
    reduction = packet_reduction_ns(phase, 1, phase["message"], tables)  # of the n - 1 packets behind the first one
    packets_ns = packets * phase["endpoint_ns"] + (n - 1) * reduction
    tail_ns = reduction if phase["collective"] == codes.REDUCE_SCATTER else phase["endpoint_ns"]
    chunks = tables.n_chunks(call)
    rounds = -(-chunks // tables.system.active_chunks_per_dimension)
    ranks = np.array(members, np.int64)
    return Ring(ranks, phase["message"], phase["n_messages"], packets_ns, chunks, rounds, tail_ns)


def with_closed_forms(program: LoweredProgram, tables: CollectiveTables, network: Network) -> LoweredProgram:
    """Returns the program with its rings in closed form, for a network without queues.

    A communicator stays as it is if one of its collectives has no closed form or takes longer than 64 bits can count.
    """
    nodes = program.nodes
    at = np.flatnonzero(nodes.action == COLLECTIVE)
    rings = {call: ring_of(tables, call) for call in np.unique(nodes.target[at]).tolist()}
    by_messages = {
        tables.communicator_of(call) for call, ring in rings.items() if ring is None or not is_countable(ring, network)
    }
    known = {
        call: ring
        for call, ring in rings.items()
        if ring is not None and tables.communicator_of(call) not in by_messages
    }
    if not known:
        return program
    forms = _tables_of(known, tables, network)
    at = at[np.isin(nodes.target[at], list(known))]
    action, tail_ns = nodes.action.copy(), nodes.tail_ns.copy()
    action[at], tail_ns[at] = IN_CLOSED_FORM, forms.call["tail_ns"][nodes.target[at]]
    return replace(program, nodes=nodes._replace(action=action, tail_ns=tail_ns), forms=forms)


def ends_without_queues(network: Network, rings: Sequence[Ring]) -> list[I64]:
    """Returns when the members of each ring end, (n,), if all begin at 0 and no message waits for a link."""
    return [_ends(ring, _delays(network, ring)) for ring in rings]


def ends_with_queues(network: Network, rings: Sequence[Ring]) -> QueuedRings | None:
    """Returns the end times of the members of each ring, if all begin at 0 and links are queues. Returns None if
    messages may wait.

    The *lead* of a member is the time from its own message to the arrival of the same-numbered message of the member
    before it. The lead passes from member to member, because a message follows from the one before. So where the least
    lead of all members is at least the time in which a link transmits a message, each link is free for the next one.
    """
    if any(ring.rounds != ring.n_chunks for ring in rings):
        return None
    topology = network.topology()
    links = topology.links()
    source = np.concatenate([ring.members for ring in rings]).astype(np.int32)
    target = np.concatenate([np.roll(ring.members, -1) for ring in rings]).astype(np.int32)
    paths = topology.routes(source, target)
    if len(paths.link) and np.bincount(paths.link).max() > 1:
        return None
    size = np.concatenate([np.full(len(ring.members), ring.message_bytes, np.int64) for ring in rings])
    rate = np.asarray(in_bytes_per_ns(links.bandwidth_gbps, gib=network.gib))
    transmit = np.repeat(size, paths.hops) / rate[paths.link]
    delay = np.add.reduceat((links.latency_ns[paths.link] + transmit).astype(np.int64), paths.first[:-1])
    ends, first = [], 0
    busy, carried = np.zeros(len(links), np.int64), np.zeros(len(links), np.int64)
    for ring in rings:
        last = first + len(ring.members)
        on_way = slice(paths.first[first], paths.first[last])
        longest = int(transmit[on_way].max())
        of_ring = _ends(ring, delay[first:last], longest)
        if of_ring is None:
            return None
        ends.append(of_ring)
        messages = ring.n_chunks * ring.n_messages
        busy[paths.link[on_way]] = messages * transmit[on_way].astype(np.int64)
        carried[paths.link[on_way]] = messages * ring.message_bytes
        first = last
    return QueuedRings(ends, busy, carried)


def _ends(ring: Ring, delay_ns: I64, least_lead_ns: int = -1) -> Any:
    """Returns when the members of a ring end, None if some lead is below `least_lead_ns`."""
    start_ns, scratch = np.zeros(len(delay_ns), np.int64), np.empty((3, len(delay_ns)), np.int64)
    for _ in range(ring.rounds):
        if least_lead_ns >= 0 and (np.roll(start_ns + delay_ns, 1) - start_ns).min() < least_lead_ns:
            return None
        ring_ends(start_ns, delay_ns, ring.n_messages, ring.packets_ns, start_ns, scratch)
    return start_ns


def _delays(network: Network, ring: Ring) -> I64:
    """Returns how long a message of each member to the next one is under way without queues."""
    size = np.full(len(ring.members), ring.message_bytes, np.int64)
    return delays_ns(network, ring.members, np.roll(ring.members, -1), size)


def is_countable(ring: Ring, network: Network) -> bool:
    """Returns whether 64 bits can count the ns of a ring from when its last member begins, with hops as slow as any."""
    hop_ns = network.n_npus * max(dim.latency_ns for dim in network.dims)
    hop_ns += ring.message_bytes / min(network.bytes_per_ns(d) for d in range(len(network.dims)))
    return ring.rounds * (ring.packets_ns + ring.n_messages * hop_ns) <= _MOST_NS


def _tables_of(rings: dict[int, Ring], tables: CollectiveTables, network: Network) -> ClosedForms:
    """Returns the engine's tables, in which no collective has begun."""
    call = np.zeros(max(rings) + 1, RING_CALL)
    delays: dict[tuple[int, int], tuple[int, I64]] = {}
    n_delays = 0
    for c, ring in rings.items():
        communicator = tables.communicator_of(c)
        key = communicator, ring.message_bytes
        if key not in delays:
            delays[key] = n_delays, _delays(network, ring)
            n_delays += len(ring.members)
        n_messages, packets_ns = ring.rounds * ring.n_messages, ring.rounds * ring.packets_ns
        call[c] = communicator, delays[key][0], n_messages, packets_ns, ring.tail_ns
    sizes = np.zeros(int(call["communicator"].max()) + 1, np.int64)
    for c, ring in rings.items():
        sizes[tables.communicator_of(c)] = len(ring.members)
    return closed_forms(call, np.concatenate([delay for _, delay in delays.values()]), pointers(sizes))


def packet_reduction_ns(phase: Phase, k: int, size_bytes: int, tables: CollectiveTables) -> int:
    """Returns the time for which packet `k` is reduced in memory, in a phase with one packet at a time; 0 if it is not
    reduced.

    Packets come in rounds. The first round is never reduced, and in an all-reduce every second round is not either.
    """
    turn, place = divmod(k, phase["unreduced"] + 1)
    reduces = phase["collective"] == codes.REDUCE_SCATTER or (phase["collective"] == codes.ALL_REDUCE and turn % 2 == 0)
    if not place or not reduces:
        return 0
    return int(cast(Any, reduction_ns).py_func(size_bytes, tables.system.memory_bytes_per_s))
