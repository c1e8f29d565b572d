"""Runs a lowered program on the engine, with tables that grow until they are large enough."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forerun.astrasim.astra.collectives import CollectiveTables
from forerun.astrasim.astra.deadlock import deadlock_text
from forerun.astrasim.astra.limits import check_work
from forerun.astrasim.astra.lower import LoweredProgram
from forerun.astrasim.messages.calendar import SEQUENCE, TIE, UNEQUAL, new_calendar
from forerun.astrasim.messages.fabric import Fabric, new_traffic
from forerun.astrasim.messages.mailbox import new_mailbox
from forerun.astrasim.messages.ready import new_ready
from forerun.astrasim.messages.slots import COLLECTIVE, Result, run_slots
from forerun.astrasim.messages.state import STREAM, Engine, Streams
from forerun.common.errors import ForerunError
from forerun.core.program.types import I64

_SMALLEST = 1 << 10
_LARGEST = 1 << 27
"""outstanding events; beyond this the tables would take more than 10 GB"""
_LATEST_NS = 1 << 62


class Deadlock(ForerunError):
    """Ranks wait for each other for ever. The message says for which messages and collectives."""


class UnequalRanks(ForerunError):
    """One block of ranks does not stand for all."""


class UnequalCalls(ForerunError):
    """Members of a communicator meet in different collectives."""


@dataclass(frozen=True)
class SlotRun:
    """The times of all nodes, and the traffic of the links (empty if the network is congestion-unaware)."""

    result: Result
    link_busy_ns: I64
    link_bytes: I64
    n_events: int
    """events that the simulation handled"""


def run_program(
    program: LoweredProgram, tables: CollectiveTables, fabric: Fabric, actors_are_ranks: bool = True
) -> SlotRun:
    """Runs `program`. Actors that stand for several ranks can't tell who waits for whom.

    Raises:
        Deadlock: some node never ran.
        UnequalCalls: some collectives have a closed form, and members of a communicator meet in different ones whose
            messages are of one size.
        UnequalRanks: the fabric has a block of ranks, and ranks one block apart may differ.
        ForerunError: there are more messages or chunks than can be simulated, or times are too large.
    """
    called = program.nodes.target[program.nodes.action == COLLECTIVE]
    calls = dict(zip(*(column.tolist() for column in np.unique(called, return_counts=True)), strict=True))
    check_work(calls, tables, len(program.nodes.first) - 1)
    capacity = _SMALLEST
    while True:
        engine = _engine(program, tables, fabric, capacity)
        matches = program.matches._replace(
            **{name: getattr(program.matches, name).copy() for name in ("n_sent", "n_received", "state", "sender")},
            receiver=program.matches.receiver.copy(),
        )
        ready = new_ready(program.nodes.first, program.nodes.slot, program.key)
        result, overflow = run_slots(engine, program.nodes, matches, ready)
        if overflow == TIE:
            raise UnequalRanks("messages of different ranks come to a link at the same time")
        if overflow == UNEQUAL:
            raise UnequalCalls("members of a group meet in different collectives")
        if not overflow:
            break
        capacity *= 8
        if capacity > _LARGEST:
            raise ForerunError("more messages are under way at the same time than the simulation can hold")
    if _is_too_long(result):
        raise ForerunError("it takes longer than a simulation can count in ns; check bandwidths, latencies and sizes")
    if _is_unfinished(result):
        raise Deadlock(deadlock_text(program, tables, result) if actors_are_ranks else "deadlock")
    return SlotRun(result, engine.traffic.link_used_ns, engine.traffic.link_bytes, int(engine.calendar.clock[SEQUENCE]))


def is_void(result: Result) -> bool:
    """Returns whether some node never ran, or times are too large."""
    return _is_too_long(result) or _is_unfinished(result)


def _is_too_long(result: Result) -> bool:
    late = result.end_ns.max(initial=0) > _LATEST_NS
    return bool(late or (result.end_ns < result.start_ns)[result.end_ns >= 0].any())


def _is_unfinished(result: Result) -> bool:
    return bool((result.finish_ns < 0).any() or (result.end_ns < 0).any())


def _engine(program: LoweredProgram, tables: CollectiveTables, fabric: Fabric, capacity: int) -> Engine:
    collectives, forms = tables.tables(), program.forms
    n_actors = len(program.nodes.first) - 1
    most = 2 * tables.most_chunks
    n_queues, n_dims = tables.n_queues * len(tables.dims), len(tables.dims)
    stream = np.zeros(n_actors * most, STREAM)
    stream["node"] = -1
    allocator = np.zeros((n_actors, n_dims, 3), np.int64)
    allocator[:, :, 2] = tables.n_queues // 2
    streams = Streams(
        stream=stream,
        capacity=most,
        queue_of=np.zeros((n_actors * most, tables.most_phases), np.int64),
        queued=np.zeros((n_actors, n_queues, most), np.int64),
        n_queued=np.zeros((n_actors, n_queues), np.int64),
        n_running=np.zeros((n_actors, n_queues), np.int64),
        allocator=allocator,
        tree_counter=np.zeros((n_actors, tables.n_counters), np.int64),
        n_made=np.zeros(max(1, len(collectives.member)), np.int64),
        priority=np.zeros(n_actors, np.int64),
        chunks_left=np.zeros(len(program.nodes.action), np.int64),
        steps_left=np.zeros((n_actors * most, tables.most_steps + 1), np.int32),
    )
    return Engine(
        new_calendar(n_actors, capacity),
        fabric,
        new_traffic(fabric, capacity),
        new_mailbox(2 * capacity),
        collectives,
        streams,
        forms._replace(**{name: getattr(forms, name).copy() for name in ("start_ns", "node", "n_begun", "open_call")}),
    )
