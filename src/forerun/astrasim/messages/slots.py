"""The slot issue policy of ASTRA-sim's workload layer: a rank has hardware slots instead of streams.

A rank has one slot for compute, one for communication and one for the host; receives need none. At the start, and
whenever one of its nodes ends, it looks through its ready nodes and issues those whose slot is free. It sees a node
that becomes ready meanwhile only the next time. Collectives and sends run as messages (`collectives`, `fabric`), or
take a known time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.astrasim.messages import ready as queue
from forerun.astrasim.messages.algorithms import bundle_done, packet_received
from forerun.astrasim.messages.calendar import NOW, OVERFLOW, WAKE, next_event, register, schedule, take_callback
from forerun.astrasim.messages.closed_form import NODE_DONE, TAIL, begin_ring
from forerun.astrasim.messages.collectives import find_stream, next_phase, retire, start_collective
from forerun.astrasim.messages.custom import run_step, steps_of_route
from forerun.astrasim.messages.fabric import ARRIVAL, LINK_FREE, forward, free_link, free_message, new_message, send
from forerun.astrasim.messages.mailbox import arrive
from forerun.astrasim.messages.ready import SLOT_COMPUTE, SLOT_CPU, SLOT_NONE, Ready
from forerun.astrasim.messages.state import BUNDLE, RECEIVE, STEP, Engine
from forerun.common.jit import inlined, kernel
from forerun.core.program.types import I8, I32, I64

TIMED = 0
"""takes `duration_ns`; for a known collective an event `tail_ns` before its end stands for its last message"""
INSTANT = 1
"""ends when it is issued, and no rank then looks for nodes that became ready"""
COLLECTIVE = 2
SEND = 3
RECV = 4
IN_CLOSED_FORM = 5
"""a collective without simulated messages (`closed_form`)"""

_LOOK = np.int64(0)  # planned actions; the subject of this one is an actor
_END_NODE = np.int64(1)
_END_PHASE = np.int64(2)  # a stream
_RETIRE = np.int64(3)
_END_STEP = np.int64(4)  # stream and step, packed

_UNDER_WAY = 1
_ARRIVED = 2
_NONE = np.int64(-1)
_MOST_PLANNED = 8


class Nodes(NamedTuple):
    """The nodes of all actors, actor by actor, by rising node number. Nothing here changes during a run."""

    first: I64
    """(actors + 1,)"""
    action: I8
    slot: I8
    duration_ns: I64
    """of TIMED nodes; of SEND nodes the time until the message arrives, -1 if the fabric determines it"""
    tail_ns: I64
    target: I32
    """the call of a COLLECTIVE or of one IN_CLOSED_FORM, the match of a SEND or RECV, else -1"""
    position: I32
    """of a collective the position of the rank in the communicator, of a SEND the receiving actor"""
    size: I64
    """bytes of a SEND"""
    n_pred: I32
    child_ptr: I64
    child: I32
    root: I64
    """nodes without dependencies, in the order in which they become ready"""
    root_ptr: I64


class Matches(NamedTuple):
    """Sends and receives of equal tag, sender, receiver and size, which match in the order in which they are issued."""

    first: I64
    """(matches + 1,) first pair (k-th send and k-th receive) of each match"""
    n_sent: I64
    n_received: I64
    state: I8
    """(pairs,)"""
    sender: I64
    """(pairs,) sending node, -1 before it is issued"""
    receiver: I64


class Result(NamedTuple):
    """The times at which the nodes ran."""

    start_ns: I64
    """-1 for a node that never ran"""
    end_ns: I64
    done_order: I64
    """(nodes,) position of each node in the order in which the nodes of its actor ended"""
    finish_ns: I64
    """(actors,) when the actor had no node left, -1 for never"""
    last_tail_ns: I64
    """(nodes,) of a COLLECTIVE the time between the last event before its end and its end"""


class Run(NamedTuple):
    """The state that changes while a program runs."""

    busy: npt.NDArray[np.bool_]
    """(actors, slots)"""
    pred_left: I32
    n_running: I64
    """(actors,) nodes that are issued and have not ended"""
    n_done: I64
    fresh: I64
    looked: I64
    planned: I64
    """(plans, 2) actions that happen at this tick, each with its node, stream or actor"""
    n_planned: I64
    since: I64
    """(1,) when the event that ended the last phase was registered"""


def run_slots(engine: Engine, nodes: Nodes, matches: Matches, ready: Ready) -> tuple[Result, int]:
    """Runs the program. The second result is 0 if the first is valid. Otherwise it is 1 (a table of the engine was too
    small), `TIE` or `UNEQUAL`.
    """
    n_actors, n_nodes = len(nodes.first) - 1, len(nodes.action)
    result = Result(
        np.full(n_nodes, -1, np.int64),
        np.full(n_nodes, -1, np.int64),
        np.zeros(n_nodes, np.int64),
        np.full(n_actors, -1, np.int64),
        np.zeros(n_nodes, np.int64),
    )
    longest = int(np.diff(nodes.first).max(initial=0))
    run = Run(
        np.zeros((n_actors, queue.N_SLOTS), np.bool_),
        nodes.n_pred.copy(),
        np.zeros(n_actors, np.int64),
        np.zeros(n_actors, np.int64),
        np.zeros(longest, np.int64),
        np.zeros(longest if len(ready.key) else 0, np.int64),
        np.zeros((_MOST_PLANNED, 2), np.int64),
        np.zeros(1, np.int64),
        np.zeros(1, np.int64),
    )
    _run(engine, nodes, matches, ready, run, result)
    return result, int(engine.calendar.clock[OVERFLOW])


@kernel
def _run(engine: Engine, nodes: Nodes, matches: Matches, ready: Ready, run: Run, result: Result) -> None:
    calendar, steps = engine.calendar, engine.streams.steps_left.shape[1]
    for actor in range(len(nodes.first) - 1):
        for k in range(nodes.root_ptr[actor], nodes.root_ptr[actor + 1]):
            queue.add(ready, actor, nodes.root[k])
    actor, w = 0, _NONE
    while True:
        if actor < len(nodes.first) - 1:
            _plan(run, _LOOK, actor)
            actor += 1
        elif w >= 0:
            kind, subject, extra, since = take_callback(calendar, w)
            if kind == NODE_DONE:
                _plan(run, _END_NODE, subject)
            elif kind == BUNDLE and extra >= 0:
                register(calendar, calendar.wake[w].actor, extra, BUNDLE, subject, _NONE)
            elif kind == BUNDLE:
                if bundle_done(engine, calendar.wake[w].actor, subject):
                    run.since[0] = since
                    _plan(run, _END_PHASE, subject)
            elif kind == STEP:
                _plan(run, _END_STEP, subject * steps + extra + 1)
            else:
                w = _NONE
        else:
            kind, subject = next_event(calendar)
            if kind == WAKE:
                w = subject
            elif kind == ARRIVAL:
                if forward(calendar, engine.fabric, engine.traffic, subject):
                    _arrived(engine, matches, run, subject)
            elif kind == LINK_FREE:
                free_link(calendar, engine.fabric, engine.traffic, subject)
            elif kind == RECEIVE:
                _receive(engine, matches, run, subject)
            elif kind == TAIL:
                register(calendar, _owner(nodes, subject), nodes.tail_ns[subject], NODE_DONE, subject, _NONE)
            else:
                break
        k = 0
        while k < run.n_planned[0]:
            what, subject = run.planned[k, 0], run.planned[k, 1]
            k += 1
            if what == _END_PHASE:
                _phase_done(engine, run, result, subject)
            elif what == _RETIRE:
                retire(engine, subject)
            elif what == _END_STEP:
                s = subject // steps
                if run_step(engine, s, subject % steps - 1):
                    run.since[0] = calendar.clock[NOW]
                    _plan(run, _END_PHASE, s)
            else:
                _look_again(engine, nodes, matches, ready, run, result, what, subject)
        run.n_planned[0] = 0
        if calendar.clock[OVERFLOW] != 0:
            break


@inlined
def _plan(run: Run, what: int, subject: int) -> None:
    """Plans an action for this tick, after those planned so far."""
    n = run.n_planned[0]
    run.planned[n, 0] = what
    run.planned[n, 1] = subject
    run.n_planned[0] = n + 1


@inlined
def _owner(nodes: Nodes, node: int) -> int:
    return int(np.searchsorted(nodes.first, node, side="right")) - 1


@inlined
def _look(engine: Engine, nodes: Nodes, matches: Matches, ready: Ready, run: Run, result: Result, actor: int) -> None:
    """Issues the nodes that are ready now and whose slot is free."""
    n_fresh = np.int64(0)
    if len(ready.key):
        n = queue.snapshot(ready, actor, run.looked)
        for k in range(n):
            node = run.looked[k]
            slot = nodes.slot[node]
            if slot == SLOT_NONE or not run.busy[actor, slot]:
                queue.erase(ready, actor, node)
                n_fresh = _issue(engine, nodes, matches, run, result, actor, node, n_fresh)
    else:
        while True:
            node = queue.lowest(ready, actor, np.int64(SLOT_NONE))
            for slot in range(SLOT_COMPUTE, SLOT_CPU + 1):
                if not run.busy[actor, slot]:
                    other = queue.lowest(ready, actor, np.int64(slot))
                    if other >= 0 and (node < 0 or other < node):
                        node = other
            if node < 0:
                break
            queue.pop(ready, actor, nodes.slot[node])
            n_fresh = _issue(engine, nodes, matches, run, result, actor, node, n_fresh)
    for k in range(n_fresh):
        queue.add(ready, actor, run.fresh[k])


@inlined
def _issue(
    engine: Engine, nodes: Nodes, matches: Matches, run: Run, result: Result, actor: int, node: int, n_fresh: int
) -> int:
    """Starts a node. Nodes that an instant one makes ready go to `fresh`; returns the new length of `fresh`."""
    calendar = engine.calendar
    now = calendar.clock[NOW]
    slot, action = nodes.slot[node], nodes.action[node]
    result.start_ns[node] = now
    if action == INSTANT:
        result.end_ns[node] = now
        result.done_order[node] = run.n_done[actor]
        run.n_done[actor] += 1
        for k in range(nodes.child_ptr[node], nodes.child_ptr[node + 1]):
            child = nodes.child[k]
            run.pred_left[child] -= 1
            if run.pred_left[child] == 0:
                run.fresh[n_fresh] = child
                n_fresh += 1
        return n_fresh
    run.n_running[actor] += 1
    if slot != SLOT_NONE:
        run.busy[actor, slot] = True
    if action == TIMED:
        tail = nodes.tail_ns[node]
        if tail > 0:
            schedule(calendar, now + nodes.duration_ns[node] - tail, TAIL, node)
        else:
            register(calendar, actor, nodes.duration_ns[node], NODE_DONE, node, _NONE)
    elif action == COLLECTIVE:
        start_collective(engine, actor, node, np.int64(nodes.target[node]), np.int64(nodes.position[node]))
    elif action == IN_CLOSED_FORM:
        c, position = np.int64(nodes.target[node]), np.int64(nodes.position[node])
        begin_ring(calendar, engine.forms, nodes.first, actor, node, c, position)
    elif action == SEND:
        match = nodes.target[node]
        pair = matches.first[match] + matches.n_sent[match]
        matches.n_sent[match] += 1
        matches.sender[pair] = node
        matches.state[pair] = _UNDER_WAY
        target = np.int64(nodes.position[node])
        m = new_message(calendar, engine.traffic, target, target, _NONE, pair, _NONE, nodes.size[node])
        if nodes.duration_ns[node] >= 0:
            schedule(calendar, now + nodes.duration_ns[node], ARRIVAL, m)
        elif m > 0:
            send(calendar, engine.fabric, engine.traffic, m, engine.fabric.rank[actor])
    else:
        match = nodes.target[node]
        pair = matches.first[match] + matches.n_received[match]
        matches.n_received[match] += 1
        matches.receiver[pair] = node
        if matches.state[pair] == _ARRIVED:
            m = new_message(calendar, engine.traffic, actor, actor, _NONE, pair, _NONE, _NONE)
            schedule(calendar, now, RECEIVE, m)
    return n_fresh


@inlined
def _look_again(
    engine: Engine, nodes: Nodes, matches: Matches, ready: Ready, run: Run, result: Result, what: int, subject: int
) -> None:
    """Ends a node (if `what` is _END_NODE), makes its children ready, and lets the rank look for nodes to issue."""
    actor = subject
    if what == _END_NODE:
        node = subject
        actor = _owner(nodes, node)
        result.end_ns[node] = engine.calendar.clock[NOW]
        result.done_order[node] = run.n_done[actor]
        run.n_done[actor] += 1
        run.n_running[actor] -= 1
        if nodes.slot[node] != SLOT_NONE:
            run.busy[actor, nodes.slot[node]] = False
        for k in range(nodes.child_ptr[node], nodes.child_ptr[node + 1]):
            child = nodes.child[k]
            run.pred_left[child] -= 1
            if run.pred_left[child] == 0:
                queue.add(ready, actor, np.int64(child))
    _look(engine, nodes, matches, ready, run, result, actor)
    if run.n_running[actor] == 0 and not queue.any_ready(ready, actor):
        result.finish_ns[actor] = engine.calendar.clock[NOW]


@kernel
def _phase_done(engine: Engine, run: Run, result: Result, s: int) -> None:
    """Ends a phase of a chunk. The last phase of the last chunk ends the collective on this rank."""
    if next_phase(engine, s):
        return
    node = engine.streams.stream[s].node
    engine.streams.chunks_left[node] -= 1
    if engine.streams.chunks_left[node] == 0:
        result.last_tail_ns[node] = engine.calendar.clock[NOW] - run.since[0]
        _plan(run, _END_NODE, node)
    _plan(run, _RETIRE, s)


@inlined
def _arrived(engine: Engine, matches: Matches, run: Run, m: int) -> None:
    """Delivers message `m` to its receiver: this ends the send, and the receive if it was posted."""
    message = engine.traffic.message[m]
    if message.communicator >= 0:
        if message.route < 0:
            sender, step, _ = steps_of_route(engine, message.route)
            s = find_stream(engine, sender, message.communicator, message.stream)
            _plan(run, _END_STEP, s * engine.streams.steps_left.shape[1] + step + 1)
        of_message = message.communicator, message.stream, message.route, message.size
        if arrive(engine.mailbox, engine.calendar.clock, *of_message):
            _receive(engine, matches, run, m)
        else:
            free_message(engine.traffic, m)
        return
    pair = message.stream
    free_message(engine.traffic, m)
    _plan(run, _END_NODE, matches.sender[pair])
    matches.state[pair] = _ARRIVED
    if matches.receiver[pair] >= 0:
        _plan(run, _END_NODE, matches.receiver[pair])


@inlined
def _receive(engine: Engine, matches: Matches, run: Run, m: int) -> None:
    """Ends the receive of message `m`."""
    message = engine.traffic.message[m]
    communicator, stream, actor, route = message.communicator, message.stream, message.to, message.route
    free_message(engine.traffic, m)
    if communicator < 0:
        _plan(run, _END_NODE, matches.receiver[stream])
        return
    s = find_stream(engine, actor, communicator, stream)
    if route < 0:
        _plan(run, _END_STEP, s * engine.streams.steps_left.shape[1] + steps_of_route(engine, route)[2] + 1)
    elif packet_received(engine, actor, s):
        run.since[0] = engine.calendar.clock[NOW]
        _plan(run, _END_PHASE, s)
