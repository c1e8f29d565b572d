"""Runs without a clock: where nothing slows anything, a node's start follows from its predecessors alone.

An actor runs until it meets a node whose inputs are not known yet, and parks on the first of them.
"""

from __future__ import annotations

import numpy as np

from forerun.common.jit import kernel, njit
from forerun.core.engine.actors import Nodes, OpCosts, Run, blocker_of, class_ends, issue, new_run
from forerun.core.program.types import I64, N_STREAMS


@njit
def run_dataflow(nodes: Nodes, costs: OpCosts) -> tuple[I64, I64, I64, I64, bool]:
    """Returns start, end and issue end of every node, the end of every class, and whether some node never ran."""
    run = new_run(nodes)
    _run(nodes, costs, run, np.arange(len(run.actors)), np.empty(len(run.actors), np.int64))
    class_end, stuck = class_ends(nodes, run)
    return run.start, run.end, run.issued, class_end, stuck


@kernel
def _run(nodes: Nodes, costs: OpCosts, run: Run, runnable: I64, finished: I64) -> None:
    """Runs every node that can run. `runnable` (actors,) lists all actors, `finished` (actors,) is space to work in.

    `when` of an actor is when the last node of its stream ended.
    """
    actors, hosts, meetings, end, waiters = run.actors, run.hosts, run.meetings, run.end, run.waiters
    for c in range(len(hosts)):
        issue(c, 0, nodes, costs, run)
    n_runnable = len(actors)
    while n_runnable:
        n_runnable -= 1
        a = runnable[n_runnable]
        c = a // N_STREAMS
        while actors[a].head >= 0:
            i = actors[a].head
            blocker = blocker_of(i, c, nodes, run)
            if blocker >= 0:
                actors[a].link = waiters[blocker]
                waiters[blocker] = a
                break
            ready = max(actors[a].when, run.issued[i])
            for e in range(nodes.pred_ptr[i], nodes.pred_ptr[i + 1]):
                ready = max(ready, end[nodes.pred[e]])
            n_finished = 1
            finished[0] = a
            m = nodes.meeting[i]
            if m >= 0:
                meetings[m].arrived += 1
                meetings[m].ready = max(meetings[m].ready, ready)
                actors[a].link = meetings[m].members
                meetings[m].members = a
                if meetings[m].arrived < nodes.meeting_size[m]:
                    break
                ready = meetings[m].ready
                n_finished = 0
                member = a
                while member >= 0:
                    finished[n_finished] = member
                    n_finished += 1
                    member = actors[member].link
            for f in range(n_finished):
                b = finished[f]
                j = actors[b].head
                run.start[j] = ready
                end[j] = ready + costs.duration_ps[nodes.op[j]]
                actors[b].when = end[j]
                actors[b].head = run.following[j]
                if nodes.sync[j]:
                    issue(b // N_STREAMS, end[j], nodes, costs, run)
                waiter = waiters[j]
                while waiter >= 0:
                    runnable[n_runnable] = waiter
                    n_runnable += 1
                    waiter = actors[waiter].link
                if b != a:
                    runnable[n_runnable] = b
                    n_runnable += 1
