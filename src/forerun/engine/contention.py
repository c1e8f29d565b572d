"""Runs from event to event: all rank classes move through time together, because how fast a node progresses depends on
what runs beside it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.engine.actors import Records, blocker_of, class_ends, issue, new_meetings, new_state, stream_order
from forerun.jit import inlined, njit
from forerun.program.types import F64, I8, I32, I64, Stream

_COMPUTE_STREAM = int(Stream.COMPUTE)
_NEVER = np.iinfo(np.int64).max

_BLOCKED = 0  # waits for a node, for its meeting, or has no node left
_SCHEDULED = 1  # its node becomes ready at `when`
_RUNNING = 2  # its node ends at `when`, as things stand

_NEUTRAL = 0
_COMPUTE = 1
_NETWORK = 2


@njit
def _schedule(
    a: int, c: int, now: int, actors: Records, host: Records, pred_ptr: I64, pred: I32, end: I64, issued: I64,
    waiters: I32,
) -> None:  # fmt: skip
    """Find out when the node at the head of actor `a` is ready, or park the actor on a node that must end first."""
    actors[a].status = _BLOCKED
    actors[a].when = _NEVER
    i = actors[a].head
    if i < 0:
        return
    blocker = blocker_of(i, c, host, pred_ptr, pred, end)
    if blocker >= 0:
        actors[a].link = waiters[blocker]
        waiters[blocker] = a
    else:
        actors[a].status = _SCHEDULED
        actors[a].when = max(now, issued[i])


@njit
def _settle(c: int, now: int, n_streams: int, actors: Records, host: Records) -> None:
    """Change the speed of the running nodes of class `c` that gained or lost company, and date its next event."""
    earliest = _NEVER
    for a in range(c * n_streams, (c + 1) * n_streams):
        actor = actors[a]
        if actor.status == _RUNNING and actor.side != _NEUTRAL:
            company = host[c].n_network if actor.side == _COMPUTE else host[c].n_compute
            slowed = company > 0
            if slowed != actor.slowed:
                passed = now - actor.since
                if actor.slowed:
                    passed = min(np.int64(np.rint(passed / actor.stretch)), actor.remaining)
                actor.remaining -= passed
                actor.since = now
                actor.slowed = slowed
                left = np.int64(np.rint(actor.remaining * actor.stretch)) if slowed else actor.remaining
                actor.when = now + left
        earliest = min(earliest, actor.when)
    host[c].when = earliest


@njit
def _begin(
    actor: Any, host: Any, now: int, op: int, stream: int, meets: bool, duration_ps: I64, slow_compute: F64,
    slow_network: F64, network_op: npt.NDArray[np.bool_],
) -> None:  # fmt: skip
    """Start a node at full speed; `_settle` slows it before time goes on."""
    actor.status = _RUNNING
    actor.since = now
    actor.remaining = duration_ps[op]
    actor.when = now + actor.remaining
    actor.slowed = 0
    actor.side = _NEUTRAL
    if network_op[op]:
        actor.side = _NETWORK
        actor.stretch = 1.0 + slow_network[op]
        host.n_network += 1
    elif stream == _COMPUTE_STREAM and not meets:
        actor.side = _COMPUTE
        actor.stretch = 1.0 + slow_compute[op]
        host.n_compute += 1


@njit
def _arrive(
    a: int, meeting: Any, size: int, now: int, op: I32, stream: I8, duration_ps: I64, slow_compute: F64,
    slow_network: F64, network_op: npt.NDArray[np.bool_], start: I64, actors: Records, host: Records, n_streams: int,
) -> bool:  # fmt: skip
    """Actor `a` is ready for its meeting; the last of the `size` members starts all.

    True where a class before that of `a` has something more to do now.
    """
    actors[a].status = _BLOCKED
    actors[a].when = _NEVER
    actors[a].link = meeting.members
    meeting.members = a
    meeting.arrived += 1
    member = a if meeting.arrived == size else -1
    missed = False
    while member >= 0:
        j = actors[member].head
        d = member // n_streams
        start[j] = now
        _begin(
            actors[member], host[d], now, op[j], stream[j], True, duration_ps, slow_compute, slow_network, network_op
        )
        host[d].touched = now
        host[d].when = min(host[d].when, actors[member].when)
        missed |= member < a and actors[member].when == now
        member = actors[member].link
    return missed


@inlined
def _sweep(
    c: int, now: int, class_ptr: I64, op: I32, stream: I8, pred_ptr: I64, pred: I32, meeting: I32, meeting_size: I32,
    sync: I8, duration_ps: I64, issue_ps: I64, slow_compute: F64, slow_network: F64, network_op: npt.NDArray[np.bool_],
    n_streams: int, start: I64, end: I64, issued: I64, actors: Records, host: Records, meetings: Records,
    following: I32, waiters: I32, more: npt.NDArray[np.bool_],
) -> bool:  # fmt: skip
    """Start and end what class `c` starts and ends at `now`; True where a class before it has more to do then."""
    missed = False
    a = c * n_streams
    while a < (c + 1) * n_streams:
        actor = actors[a]
        if actor.when > now:
            a += 1
        elif actor.status == _SCHEDULED and meeting[actor.head] >= 0:
            m = meeting[actor.head]
            missed |= _arrive(
                a, meetings[m], meeting_size[m], now, op, stream, duration_ps, slow_compute, slow_network, network_op,
                start, actors, host, n_streams,
            )  # fmt: skip
        elif actor.status == _SCHEDULED:
            i = actor.head
            start[i] = now
            _begin(actor, host[c], now, op[i], stream[i], False, duration_ps, slow_compute, slow_network, network_op)
        else:
            i = actor.head
            end[i] = now
            host[c].n_network -= actor.side == _NETWORK
            host[c].n_compute -= actor.side == _COMPUTE
            actor.head = following[i]
            host[c].n_dry += following[i] < 0 and more[a]
            if sync[i]:
                issue(host, c, class_ptr[c + 1], op, sync, issue_ps, issued, now)
            _schedule(a, c, now, actors, host, pred_ptr, pred, end, issued, waiters)
            waiter = waiters[i]
            while waiter >= 0:
                other = actors[waiter].link
                _schedule(waiter, c, now, actors, host, pred_ptr, pred, end, issued, waiters)
                waiter = other
            a = c * n_streams
    return missed


@inlined
def _lacks_nodes(now: int, class_ptr: I64, host: Records) -> bool:
    """Whether a host has reached, by `now`, a node that is not there yet on a stream that may start it."""
    lacks = False
    for c in range(len(host)):
        lacks |= host[c].n_dry > 0 and host[c].next == class_ptr[c + 1] and host[c].time <= now
    return lacks


@njit
def run_contended(
    class_ptr: I64,
    op: I32,
    stream: I8,
    pred_ptr: I64,
    pred: I32,
    meeting: I32,
    meeting_size: I32,
    sync: I8,
    duration_ps: I64,
    issue_ps: I64,
    slow_compute: F64,
    slow_network: F64,
    network_op: npt.NDArray[np.bool_],
    n_streams: int,
) -> tuple[I64, I64, I64, I64, bool]:
    """As run_dataflow, with compute and network of a class slowing each other."""
    start, end, issued, actors, host = new_state(class_ptr, len(op), n_streams)
    continue_contended(
        class_ptr, op, stream, pred_ptr, pred, meeting, meeting_size, sync, duration_ps, issue_ps, slow_compute,
        slow_network, network_op, n_streams, start, end, issued, actors, host, 0, np.zeros(len(actors), np.bool_),
    )  # fmt: skip
    class_end, stuck = class_ends(class_ptr, end, host)
    return start, end, issued, class_end, stuck


@njit
def continue_contended(
    class_ptr: I64,
    op: I32,
    stream: I8,
    pred_ptr: I64,
    pred: I32,
    meeting: I32,
    meeting_size: I32,
    sync: I8,
    duration_ps: I64,
    issue_ps: I64,
    slow_compute: F64,
    slow_network: F64,
    network_op: npt.NDArray[np.bool_],
    n_streams: int,
    start: I64,
    end: I64,
    issued: I64,
    actors: Records,
    host: Records,
    now: int,
    more: npt.NDArray[np.bool_],
) -> int:
    """Run what has not ended, from `now` until nothing is left to do or nodes are lacking; how far time came.

    Nodes are lacking where an actor with `more` nodes than there are has run all of them. Time then stops before
    speeds change, so that nodes which start at once are beside those that end.

    Speeds change when everything that starts or ends at an instant, in whatever class, has done so: a rate that is lost
    and won back at once leaves no trace, and the order of classes none either.
    """
    n_classes = len(class_ptr) - 1
    meetings = new_meetings(len(meeting_size))
    following = stream_order(class_ptr, stream, n_streams, end, actors)
    waiters = np.full(len(op), -1, np.int32)
    for c in range(n_classes):
        if host[c].awaits < 0:
            issue(host, c, class_ptr[c + 1], op, sync, issue_ps, issued, 0)
        host[c].n_dry = 0
        for a in range(c * n_streams, (c + 1) * n_streams):
            host[c].n_dry += actors[a].head < 0 and more[a]
            if actors[a].status != _RUNNING:
                _schedule(a, c, now, actors, host, pred_ptr, pred, end, issued, waiters)
        host[c].when = now
    may_lack = more.any()
    while True:
        missed = True
        while missed:
            missed = False
            for c in range(n_classes):
                if host[c].when <= now:
                    host[c].when = _NEVER
                    host[c].touched = now
                    missed |= _sweep(
                        c, now, class_ptr, op, stream, pred_ptr, pred, meeting, meeting_size, sync, duration_ps,
                        issue_ps, slow_compute, slow_network, network_op, n_streams, start, end, issued, actors, host,
                        meetings, following, waiters, more,
                    )  # fmt: skip
        if may_lack and _lacks_nodes(now, class_ptr, host):
            return now
        then = _NEVER
        for c in range(n_classes):
            if host[c].touched == now:
                _settle(c, now, n_streams, actors, host)
            then = min(then, host[c].when)
        if then == _NEVER or (may_lack and _lacks_nodes(then, class_ptr, host)):
            return now
        now = then
