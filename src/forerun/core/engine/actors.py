"""Runs with and without a clock share these parts: columns of a run, and the host that issues nodes.

Every stream of every rank class is an actor, which runs the nodes of the stream in order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.common.jit import kernel, njit
from forerun.core.program.types import F64, I8, I32, I64, N_STREAMS, FlatProgram

Mask = npt.NDArray[np.bool_]
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
    ]
)
MEETING = np.dtype([("arrived", np.int64), ("ready", np.int64), ("members", np.int64)])


class Nodes(NamedTuple):
    """The columns of a FlatProgram that decide when its nodes run."""

    class_ptr: I64
    op: I32
    stream: I8
    pred_ptr: I64
    pred: I32
    meeting: I32
    meeting_size: I32
    sync: I8


def nodes_of(flat: FlatProgram) -> Nodes:
    """Returns the columns of `flat` that the engine reads."""
    return Nodes(
        flat.class_ptr, flat.op, flat.stream, flat.pred_ptr, flat.pred, flat.meeting, flat.meeting_size, flat.sync
    )


class OpCosts(NamedTuple):
    """The cost of each op, in columns of (n_ops,)."""

    duration_ps: I64
    """time at full speed"""
    issue_ps: I64
    """time that the host takes to launch it"""
    slow_compute: F64
    """how much longer a compute node takes beside a network node, as a share of its time"""
    slow_network: F64
    """the same of a network node beside a compute node"""
    network_op: Mask
    """whether it keeps the network busy"""


class Run(NamedTuple):
    """A run under way."""

    start: I64
    """(nodes,) ps"""
    end: I64
    """(nodes,) ps, -1 for a node that has not ended"""
    issued: I64
    """(nodes,) when the host has issued each node, ps"""
    following: I32
    """(nodes,) the next node on the same stream, -1 for none"""
    waiters: I32
    """(nodes,) the first actor that waits for each node, -1 for none; `link` leads to the others"""
    actors: Records
    """(classes * streams,) of ACTOR"""
    hosts: Records
    """(classes,) of HOST"""
    meetings: Records
    """of MEETING"""


@njit
def new_run(nodes: Nodes) -> Run:
    """Returns a run at time 0, in which nothing is issued."""
    n_nodes, n_classes = len(nodes.op), len(nodes.class_ptr) - 1
    actors = np.zeros(n_classes * N_STREAMS, ACTOR)
    hosts = np.zeros(n_classes, HOST)
    meetings = np.zeros(len(nodes.meeting_size), MEETING)
    following = np.empty(n_nodes, np.int32)
    _start(nodes, following, actors, hosts, meetings)
    return Run(
        np.zeros(n_nodes, np.int64),
        np.full(n_nodes, -1, np.int64),
        np.zeros(n_nodes, np.int64),
        following,
        np.full(n_nodes, -1, np.int32),
        actors,
        hosts,
        meetings,
    )


@kernel
def _start(nodes: Nodes, following: I32, actors: Records, hosts: Records, meetings: Records) -> None:
    """Puts the nodes of each stream in a row, and every actor at the first of its own."""
    for a in range(len(actors)):
        actors[a].head = -1
    for c in range(len(hosts)):
        hosts[c].next = nodes.class_ptr[c]
        hosts[c].awaits = -1
        hosts[c].loaded = -1
        for i in range(nodes.class_ptr[c + 1] - 1, nodes.class_ptr[c] - 1, -1):
            a = c * N_STREAMS + nodes.stream[i]
            following[i] = actors[a].head
            actors[a].head = i
    for m in range(len(meetings)):
        meetings[m].members = -1


@kernel
def issue(c: int, release_ps: int, nodes: Nodes, costs: OpCosts, run: Run) -> None:
    """Lets the host of class `c` issue from `release_ps` until the next node that it waits for."""
    host = run.hosts[c]
    time = max(host.time, release_ps)
    i = host.next
    host.awaits = -1
    while i < nodes.class_ptr[c + 1]:
        time += costs.issue_ps[nodes.op[i]]
        run.issued[i] = time
        i += 1
        if nodes.sync[i - 1]:
            host.awaits = i - 1
            break
    host.next = i
    host.time = time


@kernel
def blocker_of(i: int, c: int, nodes: Nodes, run: Run) -> int:
    """Returns a node that must end before node `i` of class `c` can be ready, -1 for none."""
    if i >= run.hosts[c].next:
        return int(run.hosts[c].awaits)
    for e in range(nodes.pred_ptr[i], nodes.pred_ptr[i + 1]):
        if run.end[nodes.pred[e]] < 0:
            return int(nodes.pred[e])
    return -1


@njit
def class_ends(nodes: Nodes, run: Run) -> tuple[I64, bool]:
    """Returns when each class is done, (classes,) ps, and whether some node never ran."""
    class_end = np.zeros(len(run.hosts), np.int64)
    return class_end, _find_ends(nodes, run, class_end)


@kernel
def _find_ends(nodes: Nodes, run: Run, class_end: I64) -> bool:
    stuck = False
    for c in range(len(class_end)):
        class_end[c] = run.hosts[c].time
        for i in range(nodes.class_ptr[c], nodes.class_ptr[c + 1]):
            stuck |= run.end[i] < 0
            class_end[c] = max(class_end[c], run.end[i])
    return stuck
