"""Runs from event to event: all rank classes move through time together, because how fast a node progresses depends on
what runs beside it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.common.jit import inlined, kernel, njit
from forerun.core.engine.actors import Records, blocker_of, class_ends, issue, new_meetings, new_state, stream_order
from forerun.core.engine.sharing import FULL, Links, Mask
from forerun.core.program.types import F64, I8, I32, I64, Stream

_COMPUTE_STREAM = int(Stream.COMPUTE)
_NEVER = np.iinfo(np.int64).max

_BLOCKED = 0  # waits for a node, for its meeting, or has no node left
_SCHEDULED = 1  # its node becomes ready at `when`
_RUNNING = 2  # its node ends at `when`, as things stand

_NEUTRAL = 0
_COMPUTE = 1
_NETWORK = 2
_LINKED = 3  # uses links, and neither slows compute nor is slowed by it


@kernel
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


@kernel
def _load(
    c: int, op: int, stream: int, sign: int, now: int, host: Any, share: I64, carries: Mask, load: I64
) -> None:  # fmt: skip
    """Add what `op` on a stream of class `c` asks of links to their load, or take it away again."""
    for link in range(load.shape[1]):
        asked = share[op, link]
        if asked and carries[stream, link]:
            before = load[c, link]
            load[c, link] = before + sign * asked
            if max(before, load[c, link]) > FULL:
                host.loaded = now


@kernel
def _join(actor: Any, peer: int) -> None:
    """The node of `actor`, which starts, goes on together with that of actor `peer`."""
    actor.peer = peer
    actor.worst = FULL
    if actor.side == _NEUTRAL:
        actor.side = _LINKED
        actor.stretch = 1.0


@kernel
def _leave(a: int, now: int, n_streams: int, actors: Records, host: Records) -> None:
    """Actor `a` has ended its node: it no longer sets the pace of the others of its meeting."""
    before = a
    while actors[before].peer != a:
        before = actors[before].peer
        if actors[a].worst > FULL:
            host[before // n_streams].touched = now
            host[before // n_streams].loaded = now
    actors[before].peer = actors[a].peer
    actors[a].peer = a


@kernel
def _weigh(
    c: int, now: int, op: I32, actors: Records, host: Records, share: I64, carries: Mask, load: I64
) -> None:  # fmt: skip
    """Find out how far the links slow the running nodes of class `c`, and let those who meet them look again."""
    n_streams, n_links = carries.shape
    for a in range(c * n_streams, (c + 1) * n_streams):
        actor = actors[a]
        if actor.status != _RUNNING or actor.peer < 0:
            continue
        worst = FULL
        for link in range(n_links):
            if load[c, link] > worst and carries[a % n_streams, link] and share[op[actor.head], link]:
                worst = load[c, link]
        if worst != actor.worst:
            actor.worst = worst
            peer = actor.peer
            while peer != a:
                host[peer // n_streams].touched = now
                host[peer // n_streams].loaded = now
                peer = actors[peer].peer


@kernel
def _agree(c: int, n_streams: int, actors: Records) -> None:
    """Let the running nodes of class `c` go as slowly as the slowest of those whom they meet."""
    for a in range(c * n_streams, (c + 1) * n_streams):
        if actors[a].status == _RUNNING and actors[a].peer >= 0:
            worst = actors[a].worst
            peer = actors[a].peer
            while peer != a:
                worst = max(worst, actors[peer].worst)
                peer = actors[peer].peer
            actors[a].sharing = worst / FULL


@kernel
def _settle(c: int, now: int, n_streams: int, actors: Records, host: Records) -> None:
    """Change the pace of the running nodes of class `c` whose company has changed, and date its next event."""
    earliest = _NEVER
    for a in range(c * n_streams, (c + 1) * n_streams):
        actor = actors[a]
        if actor.status == _RUNNING and actor.side != _NEUTRAL:
            company = host[c].n_network if actor.side == _COMPUTE else host[c].n_compute
            pace = (actor.stretch if company > 0 else 1.0) * actor.sharing
            if pace != actor.pace:
                passed = now - actor.since
                if actor.pace != 1.0:
                    passed = min(np.int64(np.rint(passed / actor.pace)), actor.remaining)
                actor.remaining -= passed
                actor.since = now
                actor.pace = pace
                left = np.int64(np.rint(actor.remaining * pace)) if pace != 1.0 else actor.remaining
                actor.when = now + left
        earliest = min(earliest, actor.when)
    host[c].when = earliest


@kernel
def _begin(
    actor: Any, host: Any, now: int, op: int, stream: int, meets: bool, duration_ps: I64, slow_compute: F64,
    slow_network: F64, network_op: npt.NDArray[np.bool_],
) -> None:  # fmt: skip
    """Start a node at full speed; `_settle` slows it before time goes on."""
    actor.status = _RUNNING
    actor.since = now
    actor.remaining = duration_ps[op]
    actor.when = now + actor.remaining
    actor.pace = 1.0
    actor.sharing = 1.0
    actor.side = _NEUTRAL
    if network_op[op]:
        actor.side = _NETWORK
        actor.stretch = 1.0 + slow_network[op]
        host.n_network += 1
    elif stream == _COMPUTE_STREAM and not meets:
        actor.side = _COMPUTE
        actor.stretch = 1.0 + slow_compute[op]
        host.n_compute += 1


@inlined
def _arrive(
    a: int, meeting: Any, size: int, now: int, op: I32, stream: I8, duration_ps: I64, slow_compute: F64,
    slow_network: F64, network_op: npt.NDArray[np.bool_], start: I64, actors: Records, host: Records, n_streams: int,
    share: I64, carries: Mask, load: I64,
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
        if load.shape[1]:
            _join(actors[member], actors[member].link if actors[member].link >= 0 else a)
            _load(d, op[j], stream[j], 1, now, host[d], share, carries, load)
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
    following: I32, waiters: I32, more: npt.NDArray[np.bool_], share: I64, carries: Mask,
    load: I64, asks: Mask,
) -> bool:  # fmt: skip
    """Start and end what class `c` starts and ends at `now`; True where a class before it has more to do then."""
    missed = False
    shares = load.shape[1] > 0
    a = c * n_streams
    while a < (c + 1) * n_streams:
        actor = actors[a]
        if actor.when > now:
            a += 1
        elif actor.status == _SCHEDULED and meeting[actor.head] >= 0:
            m = meeting[actor.head]
            missed |= _arrive(
                a, meetings[m], meeting_size[m], now, op, stream, duration_ps, slow_compute, slow_network, network_op,
                start, actors, host, n_streams, share, carries, load,
            )  # fmt: skip
        elif actor.status == _SCHEDULED:
            i = actor.head
            start[i] = now
            _begin(actor, host[c], now, op[i], stream[i], False, duration_ps, slow_compute, slow_network, network_op)
            if shares:
                actor.peer = -1
            if shares and asks[op[i]]:
                _join(actor, a)
                _load(c, op[i], stream[i], 1, now, host[c], share, carries, load)
        else:
            i = actor.head
            end[i] = now
            host[c].n_network -= actor.side == _NETWORK
            host[c].n_compute -= actor.side == _COMPUTE
            if shares and actor.peer >= 0:
                _load(c, op[i], stream[i], -1, now, host[c], share, carries, load)
                if actor.peer != a:
                    _leave(a, now, n_streams, actors, host)
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
    links: Links,
    n_streams: int,
) -> tuple[I64, I64, I64, I64, bool]:
    """As run_dataflow, with compute and network of a class slowing each other, and nodes of it sharing `links`."""
    start, end, issued, actors, host = new_state(class_ptr, len(op), n_streams)
    continue_contended(
        class_ptr, op, stream, pred_ptr, pred, meeting, meeting_size, sync, duration_ps, issue_ps, slow_compute,
        slow_network, network_op, links, n_streams, start, end, issued, actors, host, 0,
        np.zeros(len(actors), np.bool_),
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
    links: Links,
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
    share, carries, load, asks = links
    shares = load.shape[1] > 0
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
                        meetings, following, waiters, more, share, carries, load, asks,
                    )  # fmt: skip
        if may_lack and _lacks_nodes(now, class_ptr, host):
            return now
        if shares:
            for c in range(n_classes):
                if host[c].loaded == now:
                    _weigh(c, now, op, actors, host, share, carries, load)
            for c in range(n_classes):
                if host[c].loaded == now:
                    _agree(c, n_streams, actors)
        then = _NEVER
        for c in range(n_classes):
            if host[c].touched == now:
                _settle(c, now, n_streams, actors, host)
            then = min(then, host[c].when)
        if then == _NEVER or (may_lack and _lacks_nodes(then, class_ptr, host)):
            return now
        now = then
