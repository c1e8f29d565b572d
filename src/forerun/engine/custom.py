"""Custom algorithms of collectives: every rank of a ring runs a graph of steps of its own.

A step sends a message, receives one, or takes time. It starts when all steps that it waits for have ended. A send ends
when its message has arrived, a receive when it is posted and the message is there. The phase of a rank ends with its
last step. Messages have *lanes* below 0, which tell the two steps that they join.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from forerun.engine.calendar import NOW, register, schedule
from forerun.engine.collectives import RECEIVE, STEP, Engine, ring_member
from forerun.engine.fabric import new_message, send
from forerun.engine.mailbox import post
from forerun.jit import kernel

SEND_STEP = 0
RECEIVE_STEP = 1
WAIT_STEP = 2


@kernel
def _phase_of(engine: Engine, s: int) -> Any:
    stream = engine.streams.stream[s]
    return engine.collectives.phase[engine.collectives.call[stream.call].first_phase + stream.step]


@kernel
def run_step(engine: Engine, actor: int, s: int, step: int) -> bool:
    """Step `step` of stream `s` has ended (-1: the phase starts): begin what waits for it. Whether the phase ends."""
    steps, left = engine.collectives.steps, engine.streams.steps_left
    stream = engine.streams.stream[s]
    program = _phase_of(engine, s).steps + stream.index
    first = steps.program_ptr[program]
    n = steps.program_ptr[program + 1] - first
    if step < 0:
        for k in range(n):
            left[s, k] = steps.n_pred[first + k]
        for k in range(n):
            if steps.n_pred[first + k] == 0:
                _begin(engine, actor, s, first, k)
        return bool(n == 0)
    stream.received += 1
    for c in range(steps.child_ptr[first + step], steps.child_ptr[first + step + 1]):
        child = np.int64(steps.child[c])
        left[s, child] -= 1
        if left[s, child] == 0:
            _begin(engine, actor, s, first, child)
    return bool(stream.received == n)


@kernel
def _begin(engine: Engine, actor: int, s: int, first: int, step: int) -> None:
    calendar, traffic, steps = engine.calendar, engine.traffic, engine.collectives.steps
    at = first + step
    amount = steps.amount[at]
    if steps.action[at] == WAIT_STEP:
        register(calendar, actor, amount, STEP, s, step)
        return
    stream = engine.streams.stream[s]
    communicator = engine.collectives.call[stream.call].communicator
    rank = engine.fabric.rank[actor]
    other = ring_member(engine.collectives, stream, _phase_of(engine, s), rank, np.int64(steps.other[at]))
    n_matches = len(steps.sending)
    if steps.action[at] == SEND_STEP:
        lane = -1 - (rank * n_matches + steps.match[at])
        m = new_message(calendar, traffic, other, other, communicator, stream.number, lane, amount)
        if m > 0:
            send(calendar, engine.fabric, traffic, m, rank)
        return
    lane = -1 - (other * n_matches + steps.match[at])
    if post(engine.mailbox, calendar.clock, communicator, stream.number, lane):
        m = new_message(calendar, traffic, actor, actor, communicator, stream.number, lane, amount)
        schedule(calendar, calendar.clock[NOW], RECEIVE, m)


@kernel
def sender_of(engine: Engine, lane: int) -> int:
    """The actor whose message has that lane."""
    return int((-1 - lane) // len(engine.collectives.steps.sending))


@kernel
def steps_of(engine: Engine, lane: int) -> tuple[int, int]:
    """Which step of its rank sends the message with that lane, and which receives it."""
    steps = engine.collectives.steps
    match = (-1 - lane) % len(steps.sending)
    return np.int64(steps.sending[match]), np.int64(steps.receiving[match])
