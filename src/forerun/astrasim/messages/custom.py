"""Custom collective algorithms, in which every rank of a ring runs its own graph of steps.

A step sends a message, receives one, or takes time. It starts when all steps that it waits for have ended. A send ends
when its message has arrived, a receive when it is posted and its message has arrived. The phase of a rank ends with its
last step. The *route* of such a message is below 0 and encodes the step that sends it and the one that receives it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from forerun.astrasim.messages.algorithms import ring_member
from forerun.astrasim.messages.calendar import NOW, register, schedule
from forerun.astrasim.messages.fabric import new_message, send
from forerun.astrasim.messages.mailbox import post
from forerun.astrasim.messages.state import RECEIVE, STEP, Engine
from forerun.common.jit import inlined, kernel

SEND_STEP = 0
RECEIVE_STEP = 1
WAIT_STEP = 2


@inlined
def run_step(engine: Engine, s: int, step: int) -> bool:
    """Begins the steps that waited for `step` of stream `s` (-1: the start). Returns whether the phase has ended."""
    steps, left = engine.collectives.steps, engine.streams.steps_left
    stream = engine.streams.stream[s]
    phase = engine.collectives.phase[engine.collectives.call[stream.call].first_phase + stream.step]
    first = steps.program_ptr[phase.steps + stream.index]
    n = steps.program_ptr[phase.steps + stream.index + 1] - first
    begin, end = np.int64(0), n
    if step >= 0:
        stream.received += 1
        begin, end = steps.child_ptr[first + step], steps.child_ptr[first + step + 1]
    for c in range(begin, end):
        k = np.int64(steps.child[c]) if step >= 0 else np.int64(c)
        left[s, k] = left[s, k] - 1 if step >= 0 else steps.n_pred[first + k]
        if left[s, k] == 0:
            _begin(engine, s, phase, first, k)
    return bool(stream.received == n)


@inlined
def _begin(engine: Engine, s: int, phase: Any, first: int, step: int) -> None:
    calendar, traffic, steps = engine.calendar, engine.traffic, engine.collectives.steps
    stream = engine.streams.stream[s]
    actor = s // engine.streams.capacity
    amount, action = steps.amount[first + step], steps.action[first + step]
    if action == WAIT_STEP:
        register(calendar, actor, amount, STEP, s, step)
        return
    communicator = engine.collectives.call[stream.call].communicator
    rank = engine.fabric.rank[actor]
    other = ring_member(engine.collectives, stream, phase, rank, np.int64(steps.other[first + step]))
    to, source = (other, rank) if action == SEND_STEP else (actor, other)
    route = -1 - (source * len(steps.sending) + steps.match[first + step])
    if action == RECEIVE_STEP and not post(engine.mailbox, calendar.clock, communicator, stream.number, route, amount):
        return
    m = new_message(calendar, traffic, to, to, communicator, stream.number, route, amount)
    if action == RECEIVE_STEP:
        schedule(calendar, calendar.clock[NOW], RECEIVE, m)
    elif m > 0:
        send(calendar, engine.fabric, traffic, m, rank)


@kernel
def steps_of_route(engine: Engine, route: int) -> tuple[int, int, int]:
    """Returns the sender of the message with this route, the step that sends it and the step that receives it."""
    steps = engine.collectives.steps
    sender, match = divmod(-1 - route, len(steps.sending))
    return sender, np.int64(steps.sending[match]), np.int64(steps.receiving[match])
