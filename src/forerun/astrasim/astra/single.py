"""Times a single collective (of all ranks, or of several groups at once) or a single message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from forerun.astrasim.astra.collectives import CollectiveTables
from forerun.astrasim.astra.custom import Algorithm
from forerun.astrasim.astra.fabric import fabric_of
from forerun.astrasim.astra.limits import MOST_RANKS, check_hops, check_times, check_work
from forerun.astrasim.astra.lockstep import lockstep
from forerun.astrasim.astra.lower import UNKNOWN_NS, LoweredProgram, empty_matches
from forerun.astrasim.astra.queueless_rings import ends_with_queues, ends_without_queues, ring_of
from forerun.astrasim.astra.reference import REFERENCE
from forerun.astrasim.astra.run import SlotRun, UnequalRanks, run_program
from forerun.astrasim.astra.symmetry import is_symmetric, repeating_block
from forerun.astrasim.astra.system import System
from forerun.astrasim.astra.wire import wire_ns
from forerun.astrasim.chakra.trace import CommType
from forerun.astrasim.messages.ready import SLOT_COMM, SLOT_COMPUTE, SLOT_NONE
from forerun.astrasim.messages.slots import COLLECTIVE, RECV, SEND, TIMED, Nodes, Result
from forerun.common.arrays import pointers
from forerun.common.errors import ForerunError
from forerun.core.network.network_file import Network
from forerun.core.program.types import I64


def chain_of(calls: Sequence[Sequence[int]], ranks: Sequence[int], tables: CollectiveTables) -> LoweredProgram:
    """Returns a program in which actor i, rank `ranks[i]`, makes the calls `calls[i]` one after the other."""
    counts = np.array([len(chain) for chain in calls], np.int64)
    n, first = int(counts.sum()), pointers(counts)
    target = np.array([call for chain in calls for call in chain], np.int32)
    position = [tables.position(call, rank) for chain, rank in zip(calls, ranks, strict=True) for call in chain]
    is_root, is_last = np.zeros(n, bool), np.zeros(n, bool)
    is_root[first[:-1][counts > 0]] = True
    is_last[first[1:][counts > 0] - 1] = True
    nothing = np.zeros(n, np.int64)
    nodes = Nodes(
        first=first,
        action=np.full(n, COLLECTIVE, np.int8),
        slot=np.full(n, SLOT_COMM, np.int8),
        duration_ns=nothing,
        tail_ns=nothing,
        target=target,
        position=np.array(position, np.int32),
        size=nothing,
        n_pred=(~is_root).astype(np.int32),
        child_ptr=pointers(~is_last),
        child=(np.flatnonzero(~is_last) + 1).astype(np.int32),
        root=np.flatnonzero(is_root).astype(np.int64),
        root_ptr=pointers(counts > 0),
    )
    return LoweredProgram(nodes, empty_matches(()), np.zeros(0, np.int64), (), ())


class CollectiveTimes(NamedTuple):
    """Holds the times at which the ranks of a collective end."""

    ends_ns: I64
    """of each rank, (n_npus,)"""
    run: SlotRun
    wire_ns: int | None
    """the least time of the busiest link (`wire_ns`)"""


def collective_times(
    network: Network,
    system: System,
    kind: CommType,
    size: int,
    groups: Sequence[tuple[int, ...]] = (),
    aware: bool = False,
    algorithm: Algorithm | None = None,
    mirror: bool = True,
) -> CollectiveTimes:
    """Returns when each rank ends a collective that all begin at 0.

    `size` is the full local buffer, for an all-gather the local shard. With `groups`, each group runs its own
    collective at the same time; ranks in no group end at 0. An `algorithm` replaces the system's.

    Where no message waits for another, rings and exchanges in lockstep take a closed form. If all ranks are alike, only
    one is simulated, or one block of ranks if blocks are. Without `mirror` every message of every rank is simulated.

    Raises ForerunError if it can't be simulated, or would take too long.
    """
    _check_ranks(network)
    algorithms = {} if algorithm is None else {kind: algorithm}
    tables = CollectiveTables(system, [dim.n_npus for dim in network.dims], algorithms=algorithms)
    everyone = groups or [tuple(range(network.n_npus))]
    if min(len(group) for group in everyone) < 2:
        raise ForerunError("a collective needs at least two ranks in every group")
    names = [str(k) for k in range(len(groups))] or [""]
    call_of: dict[int, int] = {}
    for name, group in zip(names, everyone, strict=True):
        call = tables.call(kind, size, tables.communicator(name, tuple(group)))
        call_of.update(dict.fromkeys(group, call))
    call = call_of[everyone[0][0]]
    phases = tables.phases_of(call)
    closed = _in_closed_form(network, tables, call_of, everyone, aware) if mirror else None
    if closed is not None:
        return CollectiveTimes(*closed, wire_ns(network, tables, call, everyone))
    mirrored = mirror and not aware and is_symmetric(network, phases, groups)
    block = repeating_block(network, phases, aware) if mirror and not mirrored and not groups else 0
    try:
        ends, run = _simulated(network, tables, call_of, aware, everyone[0][:1] if mirrored else (), block)
    except UnequalRanks:
        ends, run = _simulated(network, tables, call_of, aware, (), 0)
    return CollectiveTimes(ends, run, wire_ns(network, tables, call, everyone))


def _in_closed_form(
    network: Network,
    tables: CollectiveTables,
    call_of: Mapping[int, int],
    groups: Sequence[tuple[int, ...]],
    aware: bool,
) -> tuple[I64, SlotRun] | None:
    """Returns when each rank ends, and a run of no event; None if a message may wait for another."""
    calls = [call_of[group[0]] for group in groups]
    check_times(network, tables, calls[0], 1, aware)
    ends, busy_ns, carried = np.zeros(network.n_npus, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64)
    rings = [ring for ring in (ring_of(tables, call) for call in calls) if ring is not None]
    if len(rings) == len(calls):
        found = ends_without_queues(network, rings)
        if aware:
            queued = ends_with_queues(network, rings)
            if queued is None:
                return None
            found, busy_ns, carried = queued.ends_ns, queued.link_busy_ns, queued.link_bytes
        for group, of_group in zip(groups, found, strict=True):
            ends[list(group)] = of_group
    else:
        exchange = lockstep(network, tables, calls[0]) if aware and len(groups) == 1 else None
        if exchange is None:
            return None
        ends[:], busy_ns, carried = exchange.end_ns, exchange.link_busy_ns, exchange.link_bytes
    nothing = np.zeros(network.n_npus, np.int64)
    tails = nothing + (rings[0].tail_ns if rings else 0)
    return ends, SlotRun(Result(nothing, ends, nothing, ends, tails), busy_ns, carried, 0)


def _simulated(
    network: Network,
    tables: CollectiveTables,
    call_of: Mapping[int, int],
    aware: bool,
    mirrored: Sequence[int],
    block: int,
) -> tuple[I64, SlotRun]:
    """Returns when each rank ends, and the run of the `mirrored` ranks, of the first `block` ranks, or of all.

    Raises UnequalRanks if the block does not stand for all.
    """
    ranks = list(mirrored) or list(range(block or network.n_npus))
    call = next(iter(call_of.values()))
    check_work({call: len(ranks)}, tables, len(ranks))
    if aware:
        check_hops(network, tables, call, len(ranks))
    check_times(network, tables, call, len(ranks), aware)
    alike = block == 1 and aware and tables.system.active_chunks_per_dimension == 1 and tables.n_phases(call) == 1
    chunks = tables.n_chunks(call) if alike else 1  # all ranks end a chunk together, so the next one is the same again
    tables.set_chunks(call, tables.n_chunks(call) // chunks)
    program = chain_of([[call_of[rank]] if rank in call_of else [] for rank in ranks], ranks, tables)
    try:
        run = run_program(program, tables, fabric_of(network, aware, mirrored, block))
    finally:
        tables.set_chunks(call, tables.n_chunks(call) * chunks)
    ends = np.zeros(network.n_npus, np.int64)
    members = np.array(sorted(call_of))
    ends[members] = chunks * (run.result.end_ns[members % block] if block else run.result.end_ns)
    if block and aware:
        busy, size = (chunks * _on_all_links(network, block, of) for of in (run.link_busy_ns, run.link_bytes))
        run = replace(run, link_busy_ns=busy, link_bytes=size)
    return ends, run


def _on_all_links(network: Network, block: int, of_block: I64) -> I64:
    """Extends figures of the links of the first `block` ranks to all links, (links,)."""
    links, n = network.topology().links(), network.n_npus
    key = links.src.astype(np.int64) % block * n + (links.dst.astype(np.int64) - links.src) % n
    first = np.flatnonzero(links.src < block)
    order = first[np.argsort(key[first])]
    return np.asarray(of_block[order[np.searchsorted(key[order], key)]])


def message_times(network: Network, sender: int, receiver: int, size: int, aware: bool = False) -> I64:
    """Returns when each rank is done if one message of `size` bytes is sent at 0, in ns (n_npus,).

    Sender and receiver end when it arrives. The other ranks compute for `idle_ns` of `reference.yaml`.

    Raises ForerunError if sender or receiver is not a rank, or both are the same.
    """
    n = network.n_npus
    for what, rank in (("sender", sender), ("receiver", receiver)):
        if not 0 <= rank < n:
            raise ForerunError(f"{what} {str(rank)[:20]} is not a rank; the network has ranks 0 to {n - 1}")
    _check_ranks(network)
    if sender == receiver:
        raise ForerunError(f"rank {sender} can't send to itself")
    if size < 1:
        raise ForerunError("a message needs a size above 0")
    action, slot = np.full(n, TIMED, np.int8), np.full(n, SLOT_COMPUTE, np.int8)
    action[sender], slot[sender] = SEND, SLOT_COMM
    action[receiver], slot[receiver] = RECV, SLOT_NONE
    nodes = Nodes(
        first=np.arange(n + 1),
        action=action,
        slot=slot,
        duration_ns=np.where(action == SEND, UNKNOWN_NS, REFERENCE.idle_ns),
        tail_ns=np.zeros(n, np.int64),
        target=np.where(action == TIMED, -1, 0).astype(np.int32),
        position=np.where(action == SEND, receiver, 0).astype(np.int32),
        size=np.full(n, size, np.int64),
        n_pred=np.zeros(n, np.int32),
        child_ptr=np.zeros(n + 1, np.int64),
        child=np.zeros(0, np.int32),
        root=np.arange(n),
        root_ptr=np.arange(n + 1),
    )
    text = f"{size} bytes from rank {sender} to rank {receiver}"
    program = LoweredProgram(nodes, empty_matches((1,)), np.zeros(0, np.int64), (), (text,))
    tables = CollectiveTables(System.model_validate({}), [dim.n_npus for dim in network.dims])
    return run_program(program, tables, fabric_of(network, aware)).result.end_ns


def _check_ranks(network: Network) -> None:
    if network.n_npus > MOST_RANKS:
        raise ForerunError(f"{network.n_npus:,} ranks are more than the {MOST_RANKS:,} that can be simulated")
