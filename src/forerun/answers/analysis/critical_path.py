"""The critical path of a step: the chain of work in which each piece starts when the one before it ends.

It is found backwards from the end of the step. The start of a node waited last for the previous node on its stream, for
one of its predecessors, or for the host that issued it. A collective node waited for its last participant, and so for
the dependency of that participant. The path therefore crosses to other rank classes and, unlike the breakdown of one
class, contains no waiting.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forerun.answers.analysis.breakdown import Times, node_causes, stream_before, times_of
from forerun.answers.analysis.fold_program import FOLDED_BLOCKS
from forerun.answers.analysis.reading import Simulation
from forerun.common.errors import ForerunError
from forerun.common.jit import njit
from forerun.core.engine.actors import Nodes, nodes_of
from forerun.core.engine.simulate import Timeline
from forerun.core.program.causes import N_CAUSES, Cause
from forerun.core.program.types import I32, I64, FlatProgram, Program

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Contributor:
    """All pieces of the path whose ops have one name and one cause."""

    name: str
    cause: str
    """member of Cause in lower case; `host` where the path goes through the launch of the op"""
    count: int
    time_ps: int
    share: float
    """share of the step"""


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """The critical path of one step; its pieces follow each other without a gap from 0 to the end of the step."""

    step_ps: int
    by_cause_ps: dict[str, int]
    """Cause in lower case -> picoseconds, longest first; the sum is step_ps"""
    by_class_ps: dict[str, int]
    """name of the rank class -> picoseconds that the path spends in it, longest first; the sum is step_ps"""
    contributors: tuple[Contributor, ...]
    """longest first; their times sum to step_ps"""
    node: I64
    """node of the FlatProgram for each piece, in order of time, (pieces,)"""
    on_host: Mask
    """whether each piece is the host's launch of the node instead of the node itself, (pieces,)"""
    start_ps: I64
    end_ps: I64


def critical_path(simulation: Simulation) -> CriticalPath:
    """Returns the critical path of an unfolded `simulation`.

    Where several things end at the same time, the path prefers the previous node of the stream, then the predecessor
    that was issued first, then the host.

    Raises ForerunError if the run is folded, so the nodes inside its blocks are missing.
    """
    if FOLDED_BLOCKS in simulation.program.ops.name:
        raise ForerunError("critical path: the run is folded; simulate it with folded=False")
    return path_of(simulation.program, simulation.flat, simulation.timeline, simulation.costs.issue_ps)


def path_of(program: Program, flat: FlatProgram, timeline: Timeline, issue_ps: I64) -> CriticalPath:
    """Returns the critical path of a Timeline of `program`.

    `issue_ps` (n_ops,) is the host's time for each op, as given to `engine.simulate`.
    """
    step_ps = timeline.end_of_step_ps
    before = stream_before(flat.class_ptr, flat.stream)
    member_ptr, member = _members(flat.meeting, len(flat.meeting_size))
    owner = int(np.argmax(timeline.class_end_ps))
    mine = slice(int(flat.class_ptr[owner]), int(flat.class_ptr[owner + 1]))
    last = np.flatnonzero(timeline.end_ps[mine] == step_ps)
    by_host = len(last) == 0
    first = mine.stop - 1 if by_host else mine.start + int(last[0])
    walk = (nodes_of(flat), times_of(timeline), issue_ps, before, member_ptr, member, first, by_host)
    pieces = np.empty(_walk(*walk, np.empty(0, np.int64)), np.int64)
    _walk(*walk, pieces)
    pieces = pieces[::-1]
    on_host = pieces < 0
    node = np.where(on_host, -1 - pieces, pieces)
    end = np.where(on_host, timeline.issue_end_ps[node], timeline.end_ps[node])
    start = np.where(on_host, end - issue_ps[flat.op[node]], timeline.start_ps[node])
    cause = np.where(on_host, int(Cause.HOST), node_causes(flat, program, node))
    spent = end - start
    of_cause = _sums(cause, spent, N_CAUSES)
    names = list(dict.fromkeys(flat.class_names))
    named = np.array([names.index(name) for name in flat.class_names])
    of_class = _sums(named[np.searchsorted(flat.class_ptr, node, side="right") - 1], spent, len(names))
    return CriticalPath(
        step_ps=step_ps,
        by_cause_ps=_most_first({one.name.lower(): of_cause[one] for one in Cause}),
        by_class_ps=_most_first(dict(zip(names, of_class, strict=True))),
        contributors=_contributors(program, flat.op[node], cause, spent, step_ps),
        node=node,
        on_host=on_host,
        start_ps=start,
        end_ps=end,
    )


def _sums(key: I64, spent: I64, size: int) -> list[int]:
    out = np.zeros(size, np.int64)
    np.add.at(out, key, spent)
    return [int(total) for total in out]


def _most_first(times: dict[str, int]) -> dict[str, int]:
    return dict(sorted(((name, time) for name, time in times.items() if time), key=lambda item: -item[1]))


def _contributors(program: Program, op: I32, cause: I64, spent: I64, step_ps: int) -> tuple[Contributor, ...]:
    """Groups the pieces that take time by name of op and cause."""
    taking = spent > 0
    keys, place = np.unique(op[taking].astype(np.int64) * N_CAUSES + cause[taking], return_inverse=True)
    totals, counts = _sums(place, spent[taking], len(keys)), np.bincount(place, minlength=len(keys)).tolist()
    merged: dict[tuple[str, int], tuple[int, int]] = {}
    for key, total, count in zip(keys.tolist(), totals, counts, strict=True):
        name = program.ops.name[key // N_CAUSES]
        n, time = merged.get((name, key % N_CAUSES), (0, 0))
        merged[name, key % N_CAUSES] = n + count, time + total
    rows = [
        Contributor(name, Cause(number).name.lower(), n, time, time / step_ps)
        for (name, number), (n, time) in merged.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.time_ps, row.name, row.cause)))


@njit
def _members(meeting: I32, n_meetings: int) -> tuple[I64, I32]:
    """Returns the nodes of each meeting in their order, as CSR."""
    ptr = np.zeros(n_meetings + 2, np.int64)
    for m in meeting:
        if m >= 0:
            ptr[m + 2] += 1
    for m in range(n_meetings + 1):
        ptr[m + 1] += ptr[m]
    member = np.empty(ptr[-1], np.int32)
    for i in range(len(meeting)):
        if meeting[i] >= 0:
            member[ptr[meeting[i] + 1]] = i
            ptr[meeting[i] + 1] += 1
    return ptr[:-1], member


@njit
def _waited_for(i: int, at: int, nodes: Nodes, times: Times, before: I32) -> tuple[bool, int]:
    """Returns whether node `i` was ready no earlier than `at`, and the node that it waited for last (-1: the host)."""
    if before[i] >= 0 and times.end[before[i]] == at:
        return True, before[i]
    found = -1
    for e in range(nodes.pred_ptr[i], nodes.pred_ptr[i + 1]):
        p = nodes.pred[e]
        if times.end[p] == at and (found < 0 or p < found):
            found = p
    return found >= 0 or times.issued[i] == at, found


@njit
def _walk(
    nodes: Nodes, times: Times, issue_ps: I64, before: I32, member_ptr: I64, member: I32, first: int, by_host: bool,
    pieces: I64,
) -> int:  # fmt: skip
    """Walks back from the end of node `first`, or of its launch, and returns the number of pieces.

    Writes the pieces to `pieces` unless it is empty: a node, or -1 - node for its launch.
    """
    n, node, host = 0, first, by_host
    while node >= 0:
        if len(pieces):
            pieces[n] = -1 - node if host else node
        n += 1
        if host:
            at = times.issued[node] - issue_ps[nodes.op[node]]
            if at == 0:
                break
            node -= 1
            host = not (nodes.sync[node] and times.end[node] == at)
            continue
        at = times.start[node]
        if at == 0:
            break
        own, found = _waited_for(node, at, nodes, times, before)
        if not own:
            for k in range(member_ptr[nodes.meeting[node]], member_ptr[nodes.meeting[node] + 1]):
                other, found = _waited_for(member[k], at, nodes, times, before)
                if other:
                    node = member[k]
                    break
        if found >= 0:
            node = found
        else:
            host = True
    return n
