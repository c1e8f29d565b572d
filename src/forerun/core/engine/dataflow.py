"""Runs without a clock: where nothing slows anything, a node's start follows from its predecessors alone.

An actor runs until it meets a node whose inputs are not known yet, and parks on the first of them.
"""

from __future__ import annotations

import numpy as np

from forerun.common.jit import njit
from forerun.core.engine.actors import Records, blocker_of, class_ends, issue, new_meetings, new_state, stream_order
from forerun.core.program.types import I8, I32, I64


@njit
def run_dataflow(
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
    n_streams: int,
) -> tuple[I64, I64, I64, I64, bool]:
    """Start, end and issue end of every node, end of every class, and whether nodes are left that never ran."""
    start, end, issued, actors, host = new_state(class_ptr, len(op), n_streams)
    continue_dataflow(
        class_ptr, op, stream, pred_ptr, pred, meeting, meeting_size, sync, duration_ps, issue_ps, n_streams, start,
        end, issued, actors, host,
    )  # fmt: skip
    class_end, stuck = class_ends(class_ptr, end, host)
    return start, end, issued, class_end, stuck


@njit
def continue_dataflow(
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
    n_streams: int,
    start: I64,
    end: I64,
    issued: I64,
    actors: Records,
    host: Records,
) -> None:
    """Run every node that has not ended, as far as the nodes that there are allow it. `when` of an actor is when the
    last node of its stream ended; who waits where is worked out anew."""
    n_classes = len(class_ptr) - 1
    meetings = new_meetings(len(meeting_size))
    following = stream_order(class_ptr, stream, n_streams, end, actors)
    waiters = np.full(len(op), -1, np.int32)
    runnable = np.arange(len(actors))
    n_runnable = len(actors)
    for c in range(n_classes):
        if host[c].awaits < 0:
            issue(host, c, class_ptr[c + 1], op, sync, issue_ps, issued, 0)

    finished = np.empty(len(actors), np.int64)
    while n_runnable:
        n_runnable -= 1
        a = runnable[n_runnable]
        c = a // n_streams
        while actors[a].head >= 0:
            i = actors[a].head
            blocker = blocker_of(i, c, host, pred_ptr, pred, end)
            if blocker >= 0:
                actors[a].link = waiters[blocker]
                waiters[blocker] = a
                break
            ready = max(actors[a].when, issued[i])
            for e in range(pred_ptr[i], pred_ptr[i + 1]):
                ready = max(ready, end[pred[e]])
            n_finished = 1
            finished[0] = a
            m = meeting[i]
            if m >= 0:
                meetings[m].arrived += 1
                meetings[m].ready = max(meetings[m].ready, ready)
                actors[a].link = meetings[m].members
                meetings[m].members = a
                if meetings[m].arrived < meeting_size[m]:
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
                start[j] = ready
                end[j] = ready + duration_ps[op[j]]
                actors[b].when = end[j]
                actors[b].head = following[j]
                if sync[j]:
                    d = b // n_streams
                    issue(host, d, class_ptr[d + 1], op, sync, issue_ps, issued, end[j])
                waiter = waiters[j]
                while waiter >= 0:
                    runnable[n_runnable] = waiter
                    n_runnable += 1
                    waiter = actors[waiter].link
                if b != a:
                    runnable[n_runnable] = b
                    n_runnable += 1
