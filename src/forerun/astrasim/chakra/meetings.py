"""Matches the nodes of different ranks that meet: the k-th collectives of a group, and sends with their receives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from forerun.astrasim.chakra.trace import CommGroups, CommType, NodeKind, RankTrace
from forerun.common.arrays import positions
from forerun.common.errors import ForerunError
from forerun.core.program.types import I64

Mask = npt.NDArray[np.bool_]
ALL_RANKS = "all ranks"
_LISTED = 4


@dataclass(frozen=True)
class RankNodes:
    """The trace of one rank with its nodes in issue order."""

    rank: int
    trace: RankTrace
    row: I64
    """rows of the trace in issue order"""
    alone: bool = False
    """whether the rank stands for all ranks of its groups, so that its collectives wait for no other rank"""

    @cached_property
    def position(self) -> I64:
        """Returns the place of each row of the trace in issue order."""
        return positions(self.row)

    def text(self, node: int) -> str:
        """Returns the name of node number `node` of the issue order in messages."""
        row = int(self.row[node])
        name = f" ({self.trace.names[row][:80]})" if self.trace.names else ""
        return f"rank {self.rank} node {self.trace.node_id[row]}{name}{self._does(row)}"

    def _does(self, row: int) -> str:
        trace, size = self.trace, self.trace.comm_size[row]
        kind = trace.kind[row]
        if kind in (NodeKind.SEND, NodeKind.RECV) and not trace.is_cpu[row]:
            verb = "send to" if kind == NodeKind.SEND else "receive from"
            return f": {verb} rank {trace.peer[row]}, {size} bytes, tag {trace.comm_tag[row]}"
        if kind == NodeKind.COLLECTIVE and not trace.is_cpu[row]:
            group = trace.group_names[trace.group[row]] if trace.group[row] >= 0 else ALL_RANKS
            return f": {CommType(trace.comm_type[row]).name.lower()} of {size} bytes in group {group}"
        return ""


@dataclass(frozen=True)
class Meetings:
    """The meetings in which nodes take part: collectives and messages."""

    of_node: tuple[I64, ...]
    """for each rank: the meeting of every node in issue order, -1 for none"""
    channel: I64
    """the channel of each meeting; the meetings of a channel have consecutive numbers"""
    channels: tuple[tuple[str, tuple[int, ...]], ...]
    """name and member ranks of each channel"""

    def __len__(self) -> int:
        return len(self.channel)


def find_meetings(ranks: Sequence[RankNodes], groups: CommGroups, by_tag: bool = False) -> Meetings:
    """Matches the device nodes of all ranks.

    The k-th collective of a group on one member meets the k-th on every other member. Among messages of equal tag,
    sender, receiver and size, the k-th send meets the k-th receive. Each sender and receiver have one channel or, with
    `by_tag`, one channel for each tag.

    Raises ForerunError if an operation has no counterpart, or its counterpart is another kind of collective; the nodes
    are named.
    """
    calls = _Calls(ranks, groups)
    for place, one in enumerate(ranks):
        calls.add(place, one)
    return _with_messages(len(ranks), *calls.finish(), _messages(ranks, by_tag))


def device_nodes(one: RankNodes, *kinds: NodeKind) -> I64:
    """Returns the numbers, in issue order, of the device nodes of some kinds."""
    trace, row = one.trace, one.row
    return np.flatnonzero(np.isin(trace.kind[row], kinds) & ~trace.is_cpu[row])


def group_of(one: RankNodes, node: int, local: int, groups: CommGroups, n_ranks: int) -> tuple[str, tuple[int, ...]]:
    """Returns name and members of group number `local` of a trace, in which node number `node` runs a collective.

    Raises ForerunError if the group is unknown, lacks the rank, or has a rank beyond the last one.
    """
    if local < 0:
        return ALL_RANKS, tuple(range(n_ranks))
    name = one.trace.group_names[local]
    members = groups.get(name, ())
    if one.rank not in members:
        problem = f"lacks rank {one.rank}" if members else "is not among the communicator groups"
        raise ForerunError(f"{one.text(node)}: group {name!r} {problem}")
    if max(members) >= n_ranks:
        raise ForerunError(f"{one.text(node)}: group {name!r} has rank {max(members)}, there are {n_ranks} ranks")
    return name, members


def occurrence(keys: I64) -> I64:
    """Returns how many equal keys stand before each key."""
    order = np.argsort(keys, kind="stable")
    change = np.flatnonzero(np.diff(keys[order], prepend=keys[order[:1]] - 1))
    runs = np.diff(np.append(change, len(keys)))
    return positions(order) - np.repeat(change, runs)[positions(order)]


class _Calls:
    """Matches collectives: each group of several ranks is a channel."""

    def __init__(self, ranks: Sequence[RankNodes], groups: CommGroups) -> None:
        self._ranks, self._groups = ranks, groups
        self._channels: dict[str, int] = {}
        self._members: list[tuple[int, ...]] = []
        self._called: list[dict[int, I64]] = [{} for _ in ranks]

    def add(self, place: int, one: RankNodes) -> None:
        nodes = device_nodes(one, NodeKind.COLLECTIVE)
        if one.alone or not len(nodes):
            return
        local = one.trace.group[one.row[nodes]].astype(np.int64)
        for g in np.unique(local).tolist():
            mine = nodes[local == g]
            name, members = group_of(one, int(mine[0]), g, self._groups, len(self._ranks))
            if len(members) > 1:
                if name not in self._channels:
                    self._channels[name] = len(self._members)
                    self._members.append(members)
                self._called[place][self._channels[name]] = mine

    def finish(self) -> tuple[tuple[I64, ...], list[tuple[str, tuple[int, ...], int]]]:
        """Returns the meeting of every node, and each channel's name, members and number of meetings."""
        meeting = tuple(np.full(len(one.row), -1, np.int64) for one in self._ranks)
        channels, base = [], 0
        for name, number in self._channels.items():
            members = self._members[number]
            called = [self._called[rank].get(number, np.zeros(0, np.int64)) for rank in members]
            n = self._check(name, members, called)
            for rank, nodes in zip(members, called, strict=True):
                meeting[rank][nodes] = base + np.arange(n)
            channels.append((name, members, n))
            base += n
        return meeting, channels

    def _check(self, name: str, members: tuple[int, ...], called: list[I64]) -> int:
        """Returns the number of calls. Raises ForerunError if the members differ in number or kind of calls."""
        counts = [len(nodes) for nodes in called]
        most, least = max(counts), min(counts)
        kinds = [
            self._ranks[r].trace.comm_type[self._ranks[r].row[c[:least]]] for r, c in zip(members, called, strict=True)
        ]
        for rank, nodes, kind in zip(members, called, kinds, strict=True):
            wrong = np.flatnonzero(kind != kinds[0])
            if len(wrong):
                k = int(wrong[0])
                one, first = self._ranks[rank].text(int(nodes[k])), self._ranks[members[0]].text(int(called[0][k]))
                raise ForerunError(f"{one}: meets a different collective, {first}")
        if most > least:
            caller, silent = counts.index(most), members[counts.index(least)]
            waiting = self._ranks[members[caller]].text(int(called[caller][least]))
            raise ForerunError(
                f"deadlock: {waiting} is not joined by all its ranks: rank {silent} runs {least} collectives of the "
                f"group, but rank {members[caller]} runs {most}"
            )
        return most


def _messages(ranks: Sequence[RankNodes], by_tag: bool) -> tuple[I64, I64, I64, I64]:
    """Returns rank, node and match of every send and receive, and (sender, receiver, tag or 0) of every match."""
    keys, places, nodes, is_send = [np.zeros((0, 4), np.int64)], [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], []
    for number, one in enumerate(ranks):
        found = device_nodes(one, NodeKind.SEND, NodeKind.RECV)
        trace, row = one.trace, one.row[found]
        peer, sends = trace.peer[row].astype(np.int64), trace.kind[row] == NodeKind.SEND
        for wrong in found[(peer < 0) | (peer >= len(ranks)) | (peer == one.rank)][:1].tolist():
            raise ForerunError(f"{one.text(wrong)}: its peer must be another rank, 0 to {len(ranks) - 1}")
        source, sink = np.where(sends, one.rank, peer), np.where(sends, peer, one.rank)
        keys.append(np.stack([trace.comm_tag[row], source, sink, trace.comm_size[row]], axis=1))
        places.append(np.full(len(found), number))
        nodes.append(found)
        is_send.append(sends)
    route: I64 = np.concatenate(keys)
    place: I64 = np.concatenate(places)
    node: I64 = np.concatenate(nodes)
    sends = np.concatenate([np.zeros(0, bool), *is_send])
    same_route: I64 = np.unique(route, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)
    k = occurrence(same_route * 2 + sends)
    pair, inverse = np.unique(np.stack([same_route, k], axis=1), axis=0, return_inverse=True)
    match: I64 = inverse.reshape(-1).astype(np.int64)
    ends = np.bincount(match, minlength=len(pair))
    alone = np.flatnonzero(ends[match] != 2)
    if len(alone):
        texts = [ranks[place[i]].text(int(node[i])) for i in alone[:_LISTED].tolist()]
        more = f" and {len(alone) - _LISTED} more" if len(alone) > _LISTED else ""
        raise ForerunError(f"deadlock: not matched by any other node: {'; '.join(texts)}{more}")
    of_match = np.zeros((len(pair), 3), np.int64)
    of_match[match] = np.stack([route[:, 1], route[:, 2], route[:, 0] * by_tag], axis=1)
    # Number the matches by sender, in the order in which it sends.
    sent = np.empty(len(pair), np.int64)
    sent[match[sends]] = node[sends]
    order = np.lexsort((sent, of_match[:, 0]))
    return place, node, positions(order)[match], of_match[order]


def _with_messages(
    n_ranks: int,
    meeting: tuple[I64, ...],
    channels: list[tuple[str, tuple[int, ...], int]],
    messages: tuple[I64, I64, I64, I64],
) -> Meetings:
    """Adds a channel for each sender and receiver."""
    place, node, match, route = messages
    base = sum(n for _, _, n in channels)
    named = [(name, members) for name, members, _ in channels]
    counts = [n for _, _, n in channels]
    pairs, pair_of = np.unique(route, axis=0, return_inverse=True)
    # The meetings of a channel get consecutive numbers.
    number = base + positions(np.argsort(pair_of.reshape(-1), kind="stable"))
    for i in range(n_ranks):
        mine = place == i
        meeting[i][node[mine]] = number[match[mine]]
    named += [(f"rank {source} to rank {sink}", (source, sink)) for source, sink, _ in pairs.tolist()]
    counts += np.bincount(pair_of.reshape(-1), minlength=len(pairs)).tolist()
    return Meetings(meeting, np.repeat(np.arange(len(counts)), counts), tuple(named))
