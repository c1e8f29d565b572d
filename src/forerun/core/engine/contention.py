"""Runs from event to event: all rank classes move through time together, because the rate of a node depends on the
nodes that run beside it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from forerun.common.jit import inlined, kernel, njit
from forerun.core.engine.actors import Nodes, OpCosts, Records, Run, blocker_of, class_ends, issue, new_run
from forerun.core.engine.sharing import FULL, Links
from forerun.core.program.types import I32, I64, N_STREAMS, Stream

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
def _schedule(a: int, c: int, now: int, nodes: Nodes, run: Run) -> None:
    """Finds out when the node at the head of actor `a` is ready, or parks the actor on a node that must end first."""
    actor = run.actors[a]
    actor.status = _BLOCKED
    actor.when = _NEVER
    i = actor.head
    if i < 0:
        return
    blocker = blocker_of(i, c, nodes, run)
    if blocker >= 0:
        actor.link = run.waiters[blocker]
        run.waiters[blocker] = a
    else:
        actor.status = _SCHEDULED
        actor.when = max(now, run.issued[i])


@kernel
def _load(c: int, op: int, stream: int, sign: int, now: int, host: Any, links: Links) -> None:
    """Adds the demand of `op` on a stream of class `c` to the load of its links, or removes it again."""
    for link in range(links.load.shape[1]):
        asked = links.share[op, link]
        if asked and links.carries[stream, link]:
            before = links.load[c, link]
            links.load[c, link] = before + sign * asked
            if max(before, links.load[c, link]) > FULL:
                host.loaded = now


@kernel
def _join(actor: Any, peer: int) -> None:
    """Joins the node of `actor`, which starts, to the meeting of actor `peer`, or to itself where it meets nobody."""
    actor.peer = peer
    actor.worst = FULL
    if actor.side == _NEUTRAL:
        actor.side = _LINKED
        actor.stretch = 1.0


@kernel
def _leave(a: int, now: int, run: Run) -> None:
    """Takes actor `a`, which has ended its node, out of its meeting, so that it no longer slows the other members."""
    actors = run.actors
    before = a
    while actors[before].peer != a:
        before = actors[before].peer
        if actors[a].worst > FULL:
            run.hosts[before // N_STREAMS].touched = now
            run.hosts[before // N_STREAMS].loaded = now
    actors[before].peer = actors[a].peer
    actors[a].peer = a


@kernel
def _weigh(c: int, now: int, op: I32, links: Links, run: Run) -> None:
    """Finds the fullest link of each running node of class `c`, and marks those who meet it for `_agree`."""
    for stream in range(N_STREAMS):
        a = c * N_STREAMS + stream
        actor = run.actors[a]
        if actor.status != _RUNNING or actor.peer < 0:
            continue
        worst = FULL
        for link in range(links.load.shape[1]):
            load = links.load[c, link]
            if load > worst and links.carries[stream, link] and links.share[op[actor.head], link]:
                worst = load
        if worst != actor.worst:
            actor.worst = worst
            peer = actor.peer
            while peer != a:
                run.hosts[peer // N_STREAMS].touched = now
                run.hosts[peer // N_STREAMS].loaded = now
                peer = run.actors[peer].peer


@kernel
def _agree(c: int, actors: Records) -> None:
    """Lets the running nodes of class `c` go as slowly as the slowest of those whom they meet."""
    for a in range(c * N_STREAMS, (c + 1) * N_STREAMS):
        if actors[a].status == _RUNNING and actors[a].peer >= 0:
            worst = actors[a].worst
            peer = actors[a].peer
            while peer != a:
                worst = max(worst, actors[peer].worst)
                peer = actors[peer].peer
            actors[a].sharing = worst / FULL


@kernel
def _settle(c: int, now: int, run: Run) -> None:
    """Changes the pace of the running nodes of class `c` whose company has changed, and dates its next event."""
    host = run.hosts[c]
    earliest = _NEVER
    for a in range(c * N_STREAMS, (c + 1) * N_STREAMS):
        actor = run.actors[a]
        if actor.status == _RUNNING and actor.side != _NEUTRAL:
            company = host.n_network if actor.side == _COMPUTE else host.n_compute
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
    host.when = earliest


@kernel
def _begin(actor: Any, host: Any, now: int, op: int, is_compute: bool, costs: OpCosts) -> None:
    """Starts a node at full speed; `_settle` slows it before time goes on."""
    actor.status = _RUNNING
    actor.since = now
    actor.remaining = costs.duration_ps[op]
    actor.when = now + actor.remaining
    actor.pace = 1.0
    actor.sharing = 1.0
    actor.side = _NEUTRAL
    if costs.network_op[op]:
        actor.side = _NETWORK
        actor.stretch = 1.0 + costs.slow_network[op]
        host.n_network += 1
    elif is_compute:
        actor.side = _COMPUTE
        actor.stretch = 1.0 + costs.slow_compute[op]
        host.n_compute += 1


@inlined
def _arrive(a: int, m: int, now: int, nodes: Nodes, costs: OpCosts, links: Links, run: Run) -> bool:
    """Lets actor `a`, which is ready, arrive at meeting `m`. The last member to arrive starts all of them.

    Returns True where a class before that of `a` has something more to do now.
    """
    actors, meeting = run.actors, run.meetings[m]
    actors[a].status = _BLOCKED
    actors[a].when = _NEVER
    actors[a].link = meeting.members
    meeting.members = a
    meeting.arrived += 1
    member = a if meeting.arrived == nodes.meeting_size[m] else -1
    missed = False
    while member >= 0:
        actor = actors[member]
        j = actor.head
        d = member // N_STREAMS
        host = run.hosts[d]
        run.start[j] = now
        _begin(actor, host, now, nodes.op[j], False, costs)
        if links.load.shape[1]:
            _join(actor, actor.link if actor.link >= 0 else a)
            _load(d, nodes.op[j], nodes.stream[j], 1, now, host, links)
        host.touched = now
        host.when = min(host.when, actor.when)
        missed |= member < a and actor.when == now
        member = actor.link
    return missed


@inlined
def _sweep(c: int, now: int, nodes: Nodes, costs: OpCosts, links: Links, run: Run) -> bool:
    """Starts and ends the nodes of class `c` that start or end at `now`.

    Returns True where a class before it has more to do then.
    """
    missed = False
    shares = links.load.shape[1] > 0
    host = run.hosts[c]
    a = c * N_STREAMS
    while a < (c + 1) * N_STREAMS:
        actor = run.actors[a]
        if actor.when > now:
            a += 1
        elif actor.status == _SCHEDULED and nodes.meeting[actor.head] >= 0:
            missed |= _arrive(a, nodes.meeting[actor.head], now, nodes, costs, links, run)
        elif actor.status == _SCHEDULED:
            i = actor.head
            op = nodes.op[i]
            run.start[i] = now
            _begin(actor, host, now, op, nodes.stream[i] == _COMPUTE_STREAM, costs)
            if shares:
                actor.peer = -1
                if links.asks[op]:
                    _join(actor, a)
                    _load(c, op, nodes.stream[i], 1, now, host, links)
        else:
            i = actor.head
            run.end[i] = now
            host.n_network -= actor.side == _NETWORK
            host.n_compute -= actor.side == _COMPUTE
            if shares and actor.peer >= 0:
                _load(c, nodes.op[i], nodes.stream[i], -1, now, host, links)
                if actor.peer != a:
                    _leave(a, now, run)
            actor.head = run.following[i]
            if nodes.sync[i]:
                issue(c, now, nodes, costs, run)
            _schedule(a, c, now, nodes, run)
            waiter = run.waiters[i]
            while waiter >= 0:
                other = run.actors[waiter].link
                _schedule(waiter, c, now, nodes, run)
                waiter = other
            a = c * N_STREAMS
    return missed


@njit
def run_contended(nodes: Nodes, costs: OpCosts, links: Links) -> tuple[I64, I64, I64, I64, bool]:
    """Runs the nodes as `run_dataflow` does. Compute and network of a class slow each other and share `links`."""
    run = new_run(nodes)
    _run(nodes, costs, links, run)
    class_end, stuck = class_ends(nodes, run)
    return run.start, run.end, run.issued, class_end, stuck


@kernel
def _run(nodes: Nodes, costs: OpCosts, links: Links, run: Run) -> None:
    """Runs every node that can run.

    Speeds change after all starts and ends of an instant, in all classes. So a rate that changes and changes back at
    once has no effect, and neither has the order of classes.
    """
    hosts = run.hosts
    n_classes = len(hosts)
    for c in range(n_classes):
        issue(c, 0, nodes, costs, run)
        for a in range(c * N_STREAMS, (c + 1) * N_STREAMS):
            _schedule(a, c, 0, nodes, run)
    shares = links.load.shape[1] > 0
    now = 0
    while now != _NEVER:
        missed = True
        while missed:
            missed = False
            for c in range(n_classes):
                if hosts[c].when <= now:
                    hosts[c].when = _NEVER
                    hosts[c].touched = now
                    missed |= _sweep(c, now, nodes, costs, links, run)
        if shares:
            for c in range(n_classes):
                if hosts[c].loaded == now:
                    _weigh(c, now, nodes.op, links, run)
            for c in range(n_classes):
                if hosts[c].loaded == now:
                    _agree(c, run.actors)
        then = _NEVER
        for c in range(n_classes):
            if hosts[c].touched == now:
                _settle(c, now, run)
            then = min(then, hosts[c].when)
        now = then
