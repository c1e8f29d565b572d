"""Custom algorithms of collectives, written as a small class or as an execution trace a rank.

A class says the steps of each rank; this one is a broadcast from rank 0 along the ring:

    class Pipeline:
        def steps(self, rank, n_ranks, size, costs):
            arrived = ()
            if rank > 0:
                arrived = (Receive(source=rank - 1, size=size),)
                yield arrived[0]
            if rank < n_ranks - 1:
                yield Send(to=rank + 1, size=size, after=arrived)

`rank` is the place in the ring of the collective's ranks, `size` the bytes of one chunk. The k-th send to a rank with a
tag meets the k-th receive there with that tag.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from forerun.chakra.trace import NodeKind, RankTrace
from forerun.engine.custom import RECEIVE_STEP, SEND_STEP, WAIT_STEP
from forerun.engine.state import Steps
from forerun.errors import ForerunError
from forerun.program.types import I8, I32, I64

_MOST_STEPS = 50_000_000
_MOST_AMOUNT = 1 << 50


@dataclass(frozen=True, eq=False, kw_only=True)
class Step:
    """Starts when all steps of `after`, which were given before, have ended."""

    after: Sequence[Step] = ()


@dataclass(frozen=True, eq=False, kw_only=True)
class Send(Step):
    """Ends when the message has arrived."""

    to: int
    size: int
    tag: int = 0


@dataclass(frozen=True, eq=False, kw_only=True)
class Receive(Step):
    """Ends when the message is there."""

    source: int
    size: int
    tag: int = 0


@dataclass(frozen=True, eq=False, kw_only=True)
class Wait(Step):
    """Takes time: a reduction, a copy."""

    ns: int


@dataclass(frozen=True)
class Costs:
    """What the built-in algorithms reckon with between two messages."""

    endpoint_ns: int
    memory_bytes_per_s: float

    def reduction_ns(self, size: int) -> int:
        """One write and two reads of `size` bytes."""
        if self.memory_bytes_per_s <= 0:
            raise ForerunError("a reduction in memory needs local-mem-bw above 0")
        return 3 * int(size / self.memory_bytes_per_s * 1e9)


class Algorithm(Protocol):
    """Any class with this method."""

    def steps(self, rank: int, n_ranks: int, size: int, costs: Costs) -> Iterable[Step]:
        """The steps of one rank for a chunk of `size` bytes."""


@dataclass(frozen=True)
class RankSteps:
    """The steps of one rank, in columns."""

    action: I8
    other: I32
    """place of the peer in the ring, of a wait 0"""
    amount: I64
    """bytes of a message, ns of a wait"""
    tag: I64
    before_ptr: I64
    before: I64
    """steps that a step waits for"""

    def __len__(self) -> int:
        return len(self.action)


class BinomialBroadcast:
    """Broadcast from rank 0: in round k, the ranks below 2**k, which have the data, send to the rank 2**k above."""

    def steps(self, rank: int, n_ranks: int, size: int, costs: Costs) -> Iterable[Step]:
        """Its receive, and its sends one after the other."""
        last: Step = Wait(ns=costs.endpoint_ns)
        distance = 1
        if rank > 0:
            distance = 1 << rank.bit_length()
            got = Receive(source=rank - (distance >> 1), size=size)
            yield got
            last = Wait(ns=costs.endpoint_ns, after=[got])
        yield last
        while rank + distance < n_ranks:
            last = Send(to=rank + distance, size=size, after=[last])
            yield last
            distance *= 2


class RingBroadcast:
    """Broadcast from rank 0 along the ring, cut into as many pieces as there are ranks: a pipeline."""

    def steps(self, rank: int, n_ranks: int, size: int, costs: Costs) -> Iterable[Step]:
        """Pass on each piece when it is there and the piece before it has arrived at the next rank."""
        n_pieces = min(n_ranks, size)
        sent: list[Step] = []
        for k in range(n_pieces):
            piece = size // n_pieces + (k < size % n_pieces)
            ready: Step = Wait(ns=costs.endpoint_ns, after=sent)
            if rank > 0:
                got = Receive(source=rank - 1, size=piece, tag=k)
                yield got
                ready = Wait(ns=costs.endpoint_ns, after=[got])
            yield ready
            if rank < n_ranks - 1:
                sent = [Send(to=rank + 1, size=piece, tag=k, after=[ready, *sent])]
                yield sent[0]


BUILT_IN: dict[str, type[Algorithm]] = {"binomial": BinomialBroadcast, "ringPipeline": RingBroadcast}
"""algorithms of broadcasts"""


def load_algorithm(spec: str) -> Algorithm:
    """The algorithm `module:Class` or `path/to/file.py:Class`.

    Raises:
        ForerunError: there is no such class, it can't be imported, or has no method `steps`.
    """
    place, _, name = spec.rpartition(":")
    if not place or not name.isidentifier():
        raise ForerunError(f"algorithm {spec!r}: write module:Class or path/to/file.py:Class")
    try:
        module = _from_file(place) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:  # whatever the user's file raises while it is imported
        raise ForerunError(f"algorithm {spec!r}: {place} can't be imported ({type(error).__name__}: {error})") from None
    found = getattr(module, name, None)
    if not isinstance(found, type) or not callable(getattr(found, "steps", None)):
        raise ForerunError(f"algorithm {spec!r}: {place} has no class {name} with a method steps")
    try:
        made: Algorithm = found()
    except Exception as error:
        raise ForerunError(f"algorithm {spec!r}: {name}() raises {type(error).__name__}: {error}") from None
    return made


def _from_file(path: str) -> Any:
    name = f"_forerun_algorithm_{Path(path).stem}"
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise ImportError("no Python file")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # dataclasses of the file look themselves up there
    found.loader.exec_module(module)
    return module


def steps_of_algorithm(algorithm: Algorithm, n_ranks: int, size: int, costs: Costs) -> list[RankSteps]:
    """The steps of every rank.

    Raises:
        ForerunError: the algorithm raises something, or yields what is no step or waits for none given before.
    """
    programs, total = [], 0
    name = type(algorithm).__name__
    for rank in range(n_ranks):
        place = f"algorithm {name}, rank {rank} of {n_ranks}"
        steps: list[Step] = []
        try:
            for step in algorithm.steps(rank, n_ranks, size, costs):
                steps.append(step)
                total += 1
                if total > _MOST_STEPS:
                    raise ForerunError(f"more than {_MOST_STEPS:,} steps in all")
        except ForerunError as error:
            raise ForerunError(f"{place}: {error}") from None
        except Exception as error:  # whatever the user's class raises
            raise ForerunError(f"{place}: {type(error).__name__}: {error}") from None
        programs.append(_columns(steps, place))
    return programs


def _columns(steps: Sequence[Step], place: str) -> RankSteps:
    number: dict[int, int] = {}
    rows, before, pointer = [], [], [0]
    for k, step in enumerate(steps):
        if isinstance(step, Send):
            rows.append((SEND_STEP, step.to, step.size, step.tag))
        elif isinstance(step, Receive):
            rows.append((RECEIVE_STEP, step.source, step.size, step.tag))
        elif isinstance(step, Wait):
            rows.append((WAIT_STEP, 0, step.ns, 0))
        else:
            raise ForerunError(f"{place}: step {k} is {str(step)[:60]!r}, it has to be a Send, a Receive or a Wait")
        if not all(isinstance(value, (int, np.integer)) and abs(value) <= _MOST_AMOUNT for value in rows[-1]):
            raise ForerunError(f"{place}: step {k} has to name whole numbers below 2**50, got {str(step)[:120]}")
        if id(step) in number:
            raise ForerunError(f"{place}: step {k} is step {number[id(step)]} again")
        for earlier in {id(each): each for each in step.after}.values():
            if id(earlier) not in number:
                raise ForerunError(f"{place}: step {k} waits for a step that was not given before it")
            before.append(number[id(earlier)])
        number[id(step)] = k
        pointer.append(len(before))
    action, other, amount, tag = (np.array(column, np.int64) for column in zip(*rows, strict=True)) if rows else _NONE
    clipped = np.clip(other, -1, 1 << 30).astype(np.int32)
    return RankSteps(
        action.astype(np.int8), clipped, amount, tag, np.array(pointer, np.int64), np.array(before, np.int64)
    )


_NONE = (np.zeros(0, np.int64),) * 4


def steps_of_trace(trace: RankTrace, place: str) -> RankSteps:
    """The steps of one rank from its trace: sends, receives and compute nodes, which take 1 ns or their duration.

    Raises:
        ForerunError: another kind of node, or nodes that wait for each other in a circle.
    """
    kind = trace.kind.astype(np.int64)
    known = np.isin(kind, (NodeKind.SEND, NodeKind.RECV, NodeKind.COMP))
    if not known.all():
        node = int(np.argmin(known))
        name = NodeKind(int(kind[node])).name.lower()
        raise ForerunError(
            f"{place}: node {trace.node_id[node]} is a {name} node; an algorithm has sends, receives and compute"
        )
    order = np.argsort(trace.node_id, kind="stable")
    position = np.empty(len(order), np.int64)
    position[order] = np.arange(len(order))
    after = np.concatenate([np.repeat(position, np.diff(trace.data_ptr)), np.repeat(position, np.diff(trace.ctrl_ptr))])
    edges = np.unique(np.stack([after, np.concatenate([position[trace.data], position[trace.ctrl]])], axis=1), axis=0)
    compute_ns = np.where(trace.duration_us != 0, trace.duration_us * 1000, 1)
    action = np.select([kind == NodeKind.SEND, kind == NodeKind.RECV], [SEND_STEP, RECEIVE_STEP], WAIT_STEP)
    before_ptr = np.concatenate([[0], np.cumsum(np.bincount(edges[:, 0], minlength=len(order)))]).astype(np.int64)
    steps = RankSteps(
        action[order].astype(np.int8),
        np.maximum(trace.peer, -1)[order].astype(np.int32),
        np.where(action == WAIT_STEP, compute_ns, trace.comm_size)[order],
        trace.comm_tag[order],
        before_ptr,
        edges[:, 1],
    )
    steps.other[steps.action == WAIT_STEP] = 0
    if not _all_run(steps):
        raise ForerunError(f"{place}: nodes wait for each other in a circle")
    return steps


def _all_run(steps: RankSteps) -> bool:
    """Whether every step can start."""
    n = len(steps)
    left = np.diff(steps.before_ptr)
    after = np.repeat(np.arange(n), left)
    order = np.argsort(steps.before, kind="stable")
    first = np.concatenate([[0], np.cumsum(np.bincount(steps.before, minlength=n))])
    ready, seen = np.flatnonzero(left == 0).tolist(), 0
    left = left.copy()
    while ready:
        step = ready.pop()
        seen += 1
        for child in after[order[first[step] : first[step + 1]]].tolist():
            left[child] -= 1
            if left[child] == 0:
                ready.append(child)
    return seen == n


@dataclass
class StepTable:
    """The steps of all custom algorithms that a program uses."""

    _programs: list[RankSteps] = field(default_factory=list)
    _match: list[I64] = field(default_factory=list)
    """of each program: number of each step's message, -1 for a wait"""
    _sending: list[I64] = field(default_factory=list)
    _receiving: list[I64] = field(default_factory=list)
    n_matches: int = 0

    def add(self, programs: Sequence[RankSteps], place: str) -> int:
        """Index of the first of `programs`, one a rank of a ring.

        Raises:
            ForerunError: a message goes to no rank, has no size, or its other end is missing; a wait is below 0.
        """
        first = len(self._programs)
        counts = np.array([len(program) for program in programs], np.int64)
        rank = np.repeat(np.arange(len(programs)), counts)
        step = np.concatenate([np.arange(len(program)) for program in programs])
        action, other, amount, tag = (
            np.concatenate([getattr(program, name) for program in programs]).astype(np.int64)
            for name in ("action", "other", "amount", "tag")
        )
        is_message = action != WAIT_STEP
        bad = np.where(is_message, (other < 0) | (other >= len(programs)) | (other == rank) | (amount < 1), amount < 0)
        if bad.any():
            k = int(np.argmax(bad))
            what = "a message needs another rank of the ring and a size above 0" if is_message[k] else "it is below 0"
            raise ForerunError(
                f"{place}: rank {rank[k]}, step {step[k]}, {_step_text(action[k], other[k], amount[k])}: {what}"
            )
        match = np.full(len(action), -1, np.int64)
        sends, receives = _matched(action, rank, other, tag, amount, place)
        match[sends] = match[receives] = self.n_matches + np.arange(len(sends))
        self.n_matches += len(sends)
        self._sending.append(step[sends])
        self._receiving.append(step[receives])
        self._match += np.split(match, np.cumsum(counts)[:-1])
        self._programs += programs
        return first

    @property
    def most_steps(self) -> int:
        """Of any rank."""
        return max((len(program) for program in self._programs), default=0)

    @property
    def largest(self) -> int:
        """Bytes of any message, ns of any wait."""
        return max((int(program.amount.max(initial=0)) for program in self._programs), default=0)

    def table(self) -> Steps:
        """The table, as the engine reads it."""
        programs = self._programs
        counts = np.array([len(program) for program in programs], np.int64)
        children = [_children(program) for program in programs]
        edges = np.cumsum([0, *(len(child) for _, child in children)])
        pointers = [pointer[1:] + base for (pointer, _), base in zip(children, edges[:-1], strict=True)]
        return Steps(
            program_ptr=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            action=_joined([program.action for program in programs], np.int8),
            other=_joined([program.other for program in programs], np.int32),
            amount=_joined([program.amount for program in programs], np.int64),
            match=_joined(self._match, np.int64),
            n_pred=_joined([np.diff(program.before_ptr) for program in programs], np.int32),
            child_ptr=_joined([np.zeros(1), *pointers], np.int64),
            child=_joined([child for _, child in children], np.int32),
            sending=_joined(self._sending, np.int32),
            receiving=_joined(self._receiving, np.int32),
        )


def _joined(parts: Sequence[Any], dtype: Any) -> Any:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype)


def _children(program: RankSteps) -> tuple[I64, I64]:
    """CSR of the steps that wait for each step."""
    after = np.repeat(np.arange(len(program)), np.diff(program.before_ptr))
    counts = np.bincount(program.before, minlength=len(program))
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64), after[np.argsort(program.before, kind="stable")]


def _matched(action: I64, rank: I64, other: I64, tag: I64, amount: I64, place: str) -> tuple[I64, I64]:
    """Rows of sends, and of the receives that meet them."""
    ends = []
    for kind, source, sink in ((SEND_STEP, rank, other), (RECEIVE_STEP, other, rank)):
        row = np.flatnonzero(action == kind)
        row = row[np.lexsort((row, tag[row], sink[row], source[row]))]
        ends.append((row, np.stack([source[row], sink[row], tag[row]], axis=1)))
    (sends, sent), (receives, received) = ends
    n = min(len(sends), len(receives))
    differ = np.flatnonzero((sent[:n] != received[:n]).any(axis=1))
    if len(differ) or len(sends) != len(receives):
        k = int(differ[0]) if len(differ) else n
        lone_send = k == len(receives) or (k < len(sends) and tuple(sent[k]) < tuple(received[k]))
        (source, sink, number), what = (sent[k], "receive") if lone_send else (received[k], "send")
        raise ForerunError(f"{place}: the message from rank {source} to rank {sink} with tag {number} has no {what}")
    wrong = np.flatnonzero(amount[sends] != amount[receives])
    if len(wrong):
        k = int(wrong[0])
        source, sink, number = sent[k]
        raise ForerunError(
            f"{place}: rank {source} sends {amount[sends[k]]} bytes to rank {sink} with tag {number},"
            f" which receives {amount[receives[k]]}"
        )
    return sends, receives


def _step_text(action: int, other: int, amount: int) -> str:
    if action == WAIT_STEP:
        return f"a wait of {amount} ns"
    verb = "send to" if action == SEND_STEP else "receive from"
    return f"{verb} rank {other} of {amount} bytes"
