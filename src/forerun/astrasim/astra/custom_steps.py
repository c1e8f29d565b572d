"""Converts custom algorithms, from classes or from traces, to the engine's tables of steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from forerun.astrasim.astra.custom import Algorithm, Costs, Receive, Send, Step, Wait
from forerun.astrasim.chakra.graph import depths
from forerun.astrasim.chakra.trace import NodeKind, RankTrace
from forerun.astrasim.messages.custom import RECEIVE_STEP, SEND_STEP, WAIT_STEP
from forerun.astrasim.messages.state import Steps
from forerun.common.arrays import grouped, pointers, positions
from forerun.common.errors import ForerunError
from forerun.core.program.types import I8, I32, I64

_MOST_STEPS = 50_000_000
_MOST_AMOUNT = 1 << 50


@dataclass(frozen=True)
class RankSteps:
    """The steps of one rank in columns."""

    action: I8
    other: I32
    """ring position of the peer; 0 for a wait"""
    amount: I64
    """bytes of a message, ns of a wait"""
    tag: I64
    before_ptr: I64
    before: I64
    """steps for which a step waits"""

    def __len__(self) -> int:
        return len(self.action)


def steps_of_algorithm(algorithm: Algorithm, n_ranks: int, size: int, costs: Costs) -> list[RankSteps]:
    """Runs an algorithm's class for every rank and returns the steps of each.

    Raises ForerunError if the class raises an exception, or yields something that is not a step or waits for a later
    one.
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
            raise ForerunError(f"{place}: step {k} is {str(step)[:60]!r}, it must be a Send, a Receive or a Wait")
        if not all(isinstance(value, (int, np.integer)) and abs(value) <= _MOST_AMOUNT for value in rows[-1]):
            raise ForerunError(f"{place}: step {k} must have whole numbers below 2**50, got {str(step)[:120]}")
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
    """Converts one rank's trace to steps: sends, receives and compute nodes, which take 1 ns or their duration.

    Raises ForerunError if there is another kind of node, or nodes wait for each other in a cycle.
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
    position = positions(order)
    after = np.concatenate([np.repeat(position, np.diff(trace.data_ptr)), np.repeat(position, np.diff(trace.ctrl_ptr))])
    edges = np.unique(np.stack([after, np.concatenate([position[trace.data], position[trace.ctrl]])], axis=1), axis=0)
    compute_ns = np.where(trace.duration_us != 0, trace.duration_us * 1000, 1)
    action = np.select([kind == NodeKind.SEND, kind == NodeKind.RECV], [SEND_STEP, RECEIVE_STEP], WAIT_STEP)
    before_ptr = pointers(np.bincount(edges[:, 0], minlength=len(order)))
    steps = RankSteps(
        action[order].astype(np.int8),
        np.maximum(trace.peer, -1)[order].astype(np.int32),
        np.where(action == WAIT_STEP, compute_ns, trace.comm_size)[order],
        trace.comm_tag[order],
        before_ptr,
        edges[:, 1],
    )
    steps.other[steps.action == WAIT_STEP] = 0
    if not depths(before_ptr, edges[:, 1].astype(np.int32)).all():
        raise ForerunError(f"{place}: nodes wait for each other in a cycle")
    return steps


@dataclass
class StepTable:
    """The steps of all custom algorithms of a program."""

    _programs: list[RankSteps] = field(default_factory=list)
    _match: list[I64] = field(default_factory=list)
    """for each program: the message of every step, -1 for a wait"""
    _sending: list[I64] = field(default_factory=list)
    _receiving: list[I64] = field(default_factory=list)
    n_matches: int = 0

    def add(self, programs: Sequence[RankSteps], place: str) -> int:
        """Adds the steps of all ranks of a ring and returns the index of the first rank's.

        Raises ForerunError if a message goes to no rank, has no size or no counterpart, or a wait is below 0.
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
        """Returns the largest number of steps of any rank."""
        return max((len(program) for program in self._programs), default=0)

    @property
    def largest(self) -> int:
        """Returns the largest number of bytes of a message or ns of a wait."""
        return max((int(program.amount.max(initial=0)) for program in self._programs), default=0)

    def table(self) -> Steps:
        """Returns the engine's table."""
        programs = self._programs
        children = [_children(program) for program in programs]
        edges = np.cumsum([0, *(len(child) for _, child in children)])
        child_ptr = [pointer[1:] + base for (pointer, _), base in zip(children, edges[:-1], strict=True)]
        return Steps(
            program_ptr=pointers([len(program) for program in programs]),
            action=_joined([program.action for program in programs], np.int8),
            other=_joined([program.other for program in programs], np.int32),
            amount=_joined([program.amount for program in programs], np.int64),
            match=_joined(self._match, np.int64),
            n_pred=_joined([np.diff(program.before_ptr) for program in programs], np.int32),
            child_ptr=_joined([np.zeros(1), *child_ptr], np.int64),
            child=_joined([child for _, child in children], np.int32),
            sending=_joined(self._sending, np.int32),
            receiving=_joined(self._receiving, np.int32),
        )


def _joined(parts: Sequence[Any], dtype: Any) -> Any:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype)


def _children(program: RankSteps) -> tuple[I64, I64]:
    """Returns the steps that wait for each step, as CSR."""
    after = np.repeat(np.arange(len(program)), np.diff(program.before_ptr))
    return grouped(program.before, after, len(program))


def _matched(action: I64, rank: I64, other: I64, tag: I64, amount: I64, place: str) -> tuple[I64, I64]:
    """Returns the rows of sends, and of the receives that match them."""
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
