"""Derives the dependencies and the collectives of a step's operations from the order in which one replica ran them.

The rules are those of pipelined training with data parallelism, as in "Understanding Stragglers in Large Model Training
Using What-if Analysis" (arXiv 2505.05713). Each stage computes in one order and has a stream for each direction of
sending and receiving. A transfer out waits for its pass, a pass for its transfer in. After the last pass come the
reductions of gradients, the clipping, at which all ranks meet, and the optimizer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from forerun.answers.stragglers.kinds import (
    BACKWARD,
    CLIP,
    COLLECT,
    COMPUTE,
    EMBEDDING,
    FORWARD,
    GATHER,
    NORMS,
    OF_ALL_REPLICAS,
    OPTIMIZER,
    RECEIVE_BACKWARD,
    RECEIVE_FORWARD,
    REDUCE,
    REDUCE_APART,
    SEND_BACKWARD,
    SEND_FORWARD,
    TRANSFERS,
)
from forerun.answers.stragglers.recorded_steps import RecordedSteps
from forerun.common.errors import ForerunError

_CLOCKS_S = 5e-5
"""by how much clocks of ranks differ when transfers are told from those that were recorded, but never launched"""
_PEER = {
    SEND_FORWARD: (RECEIVE_FORWARD, 1),
    RECEIVE_FORWARD: (SEND_FORWARD, -1),
    SEND_BACKWARD: (RECEIVE_BACKWARD, -1),
    RECEIVE_BACKWARD: (SEND_BACKWARD, 1),
}
"""a transfer's kind at the other side, and how many stages further that side is"""
_PASS = {SEND_FORWARD: FORWARD, RECEIVE_FORWARD: FORWARD, SEND_BACKWARD: BACKWARD, RECEIVE_BACKWARD: BACKWARD}
_SENDS = (SEND_FORWARD, SEND_BACKWARD)


class Meeting(NamedTuple):
    """Operations that move data once the last of them has started; a single one may meet that of other replicas."""

    members: tuple[int, ...]
    of_all_replicas: bool


@dataclass(frozen=True)
class Dependencies:
    """The graph of a step; operations are numbers of `RecordedSteps.operations`."""

    waits_for: tuple[tuple[int, ...], ...]
    """of each operation: those that end before it starts"""
    meetings: tuple[Meeting, ...]
    order: tuple[tuple[int, ...], ...]
    """all operations, those of a meeting together, each after those that it waits for"""


def dependencies(recorded: RecordedSteps) -> Dependencies:
    """Returns the graph of a step, found in the first replica's first one.

    Raises ForerunError if transfers don't match passes or operations would wait for each other in a circle.
    """
    graph = _Graph(recorded)
    for stage in range(recorded.stages):
        _order_of_stage(graph, stage)
    meetings = _meetings(graph)
    return Dependencies(
        tuple(tuple(sorted(graph.waits_for[i])) for i in range(len(recorded.operations))),
        tuple(meetings),
        tuple(_in_order(graph, meetings)),
    )


class _Graph:
    def __init__(self, recorded: RecordedSteps) -> None:
        self.recorded = recorded
        self.starts = recorded.start_s[:, 0, 0]
        self.ends = self.starts + recorded.duration_s[:, 0, 0]
        self.waits_for: list[set[int]] = [set() for _ in recorded.operations]
        self.pass_of: dict[int, int] = {}
        """the pass of each transfer that was launched"""
        self.idle: set[int] = set()
        """transfers without another side"""
        self.sorted = sorted(
            range(len(recorded.operations)),
            key=lambda i: (self.starts[i], recorded.operations[i].number, recorded.operations[i].kind),
        )

    def of(self, stage: int, *kinds: str) -> list[int]:
        """Returns the operations of these kinds on a stage, in the order of start."""
        operations = self.recorded.operations
        return [i for i in self.sorted if operations[i].stage == stage and operations[i].kind in kinds]

    def chain(self, operations: Iterable[int], after: Sequence[int] = ()) -> None:
        """Makes each operation wait for the one before, and the first for those in `after`."""
        for operation in operations:
            self.waits_for[operation].update(after)
            after = (operation,)


def _order_of_stage(graph: _Graph, stage: int) -> None:
    passes = graph.of(stage, *COMPUTE)
    if not passes:
        raise ForerunError(f"{graph.recorded.name}: stage {stage} has no forward or backward pass")
    graph.chain(passes)
    for kind in TRANSFERS:
        transfers = graph.of(stage, kind)
        graph.chain(transfers)
        _match(graph, stage, kind, transfers)
    _first_way_back(graph, stage, passes)
    _around_passes(graph, stage, passes)


def _match(graph: _Graph, stage: int, kind: str, transfers: Sequence[int]) -> None:
    """Joins the transfers of a stage with their passes, in order; those that were never launched stay alone."""
    recorded, sends = graph.recorded, kind in _SENDS
    passes = graph.of(stage, _PASS[kind])
    if sends:
        from_s = min(graph.ends[i] for i in passes) - _CLOCKS_S
        launched = [i for i in transfers if graph.ends[i] >= from_s]
    else:
        until_s = max(graph.starts[i] for i in passes) + _CLOCKS_S
        launched = [i for i in transfers if graph.starts[i] <= until_s]
    at_an_end = stage in (0, recorded.stages - 1)
    if len(launched) not in ((len(passes), len(passes) - 1, 0) if at_an_end else (len(passes),)):
        raise ForerunError(
            f"{recorded.name}: stage {stage} has {len(launched):,} {kind} for {len(passes):,} {_PASS[kind]}"
        )
    skipped = 0 if sends else len(passes) - len(launched)
    graph.idle.update(set(transfers) - set(launched))
    last = max(recorded.model_chunks)
    for i, transfer in enumerate(launched):
        own = passes[i + skipped]
        graph.pass_of[transfer] = own
        peer_chunk = recorded.model_chunks[own] + _PEER[kind][1]
        if not 0 <= peer_chunk <= last:
            graph.idle.add(transfer)
        if sends:
            graph.waits_for[transfer].add(own)
        else:
            graph.waits_for[own].add(transfer)
            if i + skipped:
                graph.waits_for[transfer].add(passes[i + skipped - 1])


def _first_way_back(graph: _Graph, stage: int, passes: Sequence[int]) -> None:
    """Makes the first transfers of gradients wait for the forward pass that is the last but one before them."""
    kinds = [graph.recorded.operations[i].kind for i in passes]
    first = kinds.index(BACKWARD) if BACKWARD in kinds else 0
    if first >= 2:
        for kind in (RECEIVE_BACKWARD, SEND_BACKWARD):
            for transfer in graph.of(stage, kind)[:1]:
                graph.waits_for[transfer].add(passes[first - 2])


def _around_passes(graph: _Graph, stage: int, passes: Sequence[int]) -> None:
    """Gathers parameters before the passes, reduces gradients and updates parameters after them."""
    recorded = graph.recorded
    graph.chain(graph.of(stage, GATHER, REDUCE))
    overlaps = any(each.kind == REDUCE_APART for each in recorded.operations)
    forward, backward = graph.of(stage, FORWARD), graph.of(stage, BACKWARD)
    for gather in _one_of_each_chunk(recorded, graph.of(stage, GATHER)[::-1]):
        used_by = next((i for i in forward if recorded.chunks[i] == recorded.chunks[gather]), None)
        if used_by is not None:
            graph.waits_for[used_by].add(gather)
    reductions = graph.of(stage, REDUCE)
    if overlaps:
        for reduction in _one_of_each_chunk(recorded, reductions):
            made_by = [i for i in backward if recorded.chunks[i] == recorded.chunks[reduction]]
            if made_by:
                graph.waits_for[reduction].add(max(made_by, key=lambda i: float(graph.ends[i])))
    last = max(passes, key=lambda i: float(graph.ends[i]))
    collections = graph.of(stage, COLLECT)
    graph.chain(collections, (last,))
    after = [*reductions[-1:], *(collections[-1:] or [last])] if overlaps else collections[-1:] or [last]
    between = graph.of(stage, REDUCE_APART) if overlaps else reductions
    graph.chain(
        (
            *graph.of(stage, NORMS),
            *graph.of(stage, EMBEDDING),
            *between,
            *graph.of(stage, CLIP),
            *graph.of(stage, OPTIMIZER),
        ),
        after,
    )


def _one_of_each_chunk(recorded: RecordedSteps, operations: Iterable[int]) -> list[int]:
    first: dict[int, int] = {}
    for operation in operations:
        first.setdefault(recorded.chunks[operation], operation)
    return list(first.values())


def _meetings(graph: _Graph) -> list[Meeting]:
    recorded = graph.recorded
    found = [Meeting((i,), False) for i in sorted(graph.idle)]
    for stage in range(recorded.stages):
        for kind in _SENDS:
            found += _pairs(graph, stage, kind)
        for i in graph.of(stage, *OF_ALL_REPLICAS):
            if recorded.operations[i].kind != CLIP:
                found.append(Meeting((i,), True))
    for kind, of_all_replicas in ((EMBEDDING, False), (CLIP, True)):
        alike: dict[int, list[int]] = {}
        for stage in range(recorded.stages):
            for i in graph.of(stage, kind):
                alike.setdefault(recorded.operations[i].number, []).append(i)
        found += [Meeting(tuple(members), of_all_replicas) for members in alike.values()]
    return found


def _pairs(graph: _Graph, stage: int, kind: str) -> list[Meeting]:
    """Returns the n-th send of a stage with the n-th receive of the stage that it goes to."""
    peer_kind, step = _PEER[kind]
    peer = (stage + step) % graph.recorded.stages
    sends = [i for i in graph.of(stage, kind) if i not in graph.idle]
    receives = [i for i in graph.of(peer, peer_kind) if i not in graph.idle]
    if len(sends) != len(receives):
        raise ForerunError(
            f"{graph.recorded.name}: stage {stage} has {len(sends):,} {kind}, and stage {peer} {len(receives):,}"
            f" {peer_kind}"
        )
    return [Meeting(pair, False) for pair in zip(sends, receives, strict=True)]


def _in_order(graph: _Graph, meetings: Sequence[Meeting]) -> list[tuple[int, ...]]:
    """Returns operations, those of a meeting together, each after those that it waits for."""
    units = [each.members for each in meetings]
    met = {i for unit in units for i in unit}
    units += [(i,) for i in range(len(graph.waits_for)) if i not in met]
    unit_of = {i: number for number, unit in enumerate(units) for i in unit}
    waits = [{unit_of[j] for i in unit for j in graph.waits_for[i]} for unit in units]
    followers: list[list[int]] = [[] for _ in units]
    for number, before in enumerate(waits):
        for each in before:
            followers[each].append(number)
    left = [len(before) for before in waits]
    ready = deque(number for number, count in enumerate(left) if not count)
    order = []
    while ready:
        number = ready.popleft()
        order.append(units[number])
        for each in followers[number]:
            left[each] -= 1
            if not left[each]:
                ready.append(each)
    if len(order) < len(units):
        stuck = graph.recorded.operations[units[next(i for i, count in enumerate(left) if count)][0]]
        raise ForerunError(f"{graph.recorded.name}: operations wait for each other in a cycle, such as {stuck}")
    return order
