"""What both ways to run nodes share. Every stream of every rank class is an actor that runs its nodes in order."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from forerun.common.jit import njit
from forerun.core.program.types import I8, I32, I64

Records = npt.NDArray[np.void]

ACTOR = np.dtype(
    [
        ("head", np.int64),  # node at the front of the stream, -1 when the stream is done
        ("link", np.int64),  # next actor in the list of waiters or of meeting members that this one is in
        ("when", np.int64),
        ("since", np.int64),  # when `remaining` was true
        ("remaining", np.int64),  # work left, ps at full speed
        ("stretch", np.float64),  # time per unit of work beside the other side
        ("sharing", np.float64),  # time per unit of work by the load of links, its own and those of who meets it
        ("worst", np.int64),  # load of the fullest of its own links, at least FULL
        ("pace", np.float64),  # time per unit of work as things stand
        ("peer", np.int64),  # next running member of its meeting, in a ring; itself alone; -1: uses no links
        ("status", np.int8),
        ("side", np.int8),
    ]
)
HOST = np.dtype(
    [
        ("next", np.int64),  # first node not issued yet
        ("time", np.int64),
        ("awaits", np.int64),  # node whose end the host waits for, -1 for none
        ("n_compute", np.int64),  # compute nodes that run
        ("n_network", np.int64),  # network nodes that run
        ("when", np.int64),  # earliest event of the class
        ("touched", np.int64),  # last instant at which some node of the class started or ended
        ("loaded", np.int64),  # last instant at which links may have begun to slow other nodes, or have ceased to
        ("n_dry", np.int64),  # streams that have run all their nodes and may start one that is not there yet
    ]
)
MEETING = np.dtype([("arrived", np.int64), ("ready", np.int64), ("members", np.int64)])


@njit
def new_meetings(n_meetings: int) -> Records:
    """Meetings to which nobody has come."""
    meetings = np.zeros(n_meetings, MEETING)
    for m in range(n_meetings):
        meetings[m].members = -1
    return meetings


@njit
def new_state(class_ptr: I64, n_nodes: int, n_streams: int) -> tuple[I64, I64, I64, Records, Records]:
    """Start, end (-1: not yet) and issue end of nodes, actors and hosts at time 0, with nothing issued."""
    start = np.zeros(n_nodes, np.int64)
    end = np.full(n_nodes, -1, np.int64)
    issued = np.zeros(n_nodes, np.int64)
    actors = np.zeros((len(class_ptr) - 1) * n_streams, ACTOR)
    host = np.zeros(len(class_ptr) - 1, HOST)
    for c in range(len(host)):
        host[c].next = class_ptr[c]
        host[c].awaits = -1
        host[c].loaded = -1
    return start, end, issued, actors, host


@njit
def stream_order(class_ptr: I64, stream: I8, n_streams: int, end: I64, actors: Records) -> I32:
    """The node after each node on its stream, -1 for none; sets the head of every actor to what has not ended."""
    following = np.empty(len(stream), np.int32)
    for c in range(len(class_ptr) - 1):
        first = c * n_streams
        for s in range(n_streams):
            actors[first + s].head = -1
        for i in range(class_ptr[c + 1] - 1, class_ptr[c] - 1, -1):
            if end[i] < 0:
                a = first + stream[i]
                following[i] = actors[a].head
                actors[a].head = i
    return following


@njit
def issue(host: Records, c: int, last: int, op: I32, sync: I8, issue_ps: I64, issued: I64, release_ps: int) -> None:
    """Let the host of class `c` issue from `release_ps` until a node that it waits for, or `last` (exclusive)."""
    time = max(host[c].time, release_ps)
    i = host[c].next
    host[c].awaits = -1
    while i < last:
        time += issue_ps[op[i]]
        issued[i] = time
        i += 1
        if sync[i - 1]:
            host[c].awaits = i - 1
            break
    host[c].next = i
    host[c].time = time


@njit
def blocker_of(i: int, c: int, host: Records, pred_ptr: I64, pred: I32, end: I64) -> int:
    """A node that must end before node `i` of class `c` can be ready, -1 for none."""
    if i >= host[c].next:
        return int(host[c].awaits)
    for e in range(pred_ptr[i], pred_ptr[i + 1]):
        if end[pred[e]] < 0:
            return int(pred[e])
    return -1


@njit
def class_ends(class_ptr: I64, end: I64, host: Records) -> tuple[I64, bool]:
    """When each class is done, and whether some node never ran."""
    class_end = np.zeros(len(host), np.int64)
    stuck = False
    for c in range(len(host)):
        class_end[c] = host[c].time
        for i in range(class_ptr[c], class_ptr[c + 1]):
            stuck |= end[i] < 0
            class_end[c] = max(class_end[c], end[i])
    return class_end, stuck
