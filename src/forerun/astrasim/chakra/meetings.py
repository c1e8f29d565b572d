"""Which nodes of different ranks meet: the k-th calls of a group, and sends with their receives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forerun.astrasim.chakra.trace import CommGroups, CommType, NodeKind, RankTrace
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
    """whether it stands for all ranks of its groups, so that its collectives meet nobody"""

    def text(self, node: int) -> str:
        """How node number `node` of the issue order is called in a message."""
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
    """Numbers of the meetings that nodes take part in, -1 for none."""

    of_node: tuple[I64, ...]
    """of each rank, by issue order"""
    channel: I64
    """of each meeting; the meetings of a channel are numbered one after the other"""
    channels: tuple[tuple[str, tuple[int, ...]], ...]
    """name of each channel, and which of the ranks are its members"""

    def __len__(self) -> int:
        return len(self.channel)


def find_meetings(ranks: Sequence[RankNodes], groups: CommGroups, by_tag: bool = False) -> Meetings:
    """Match the device nodes of all ranks.

    The k-th collective of a group on one member meets the k-th of every other; a message is matched by tag, sender,
    receiver and size, the k-th send with the k-th receive. Messages from a rank to another are on one channel, or on
    one for each tag.

    Raises:
        ForerunError: operations that nobody matches, or a collective of another kind on another rank; they are named.
    """
    calls = _Calls(ranks, groups)
    for place, one in enumerate(ranks):
        calls.add(place, one)
    return _with_messages(len(ranks), *calls.finish(), _messages(ranks, by_tag))


def device_nodes(one: RankNodes, *kinds: NodeKind) -> I64:
    """Numbers in issue order of the nodes of some kinds that run on the device."""
    trace, row = one.trace, one.row
    return np.flatnonzero(np.isin(trace.kind[row], kinds) & ~trace.is_cpu[row])


def group_of(one: RankNodes, node: int, local: int, groups: CommGroups, n_ranks: int) -> tuple[str, tuple[int, ...]]:
    """Name and members of group `local` of a trace, of which node number `node` runs a collective.

    Raises:
        ForerunError: there is no such group, or it lacks the rank.
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
    """How many equal keys are before each key."""
    order = np.argsort(keys, kind="stable")
    change = np.flatnonzero(np.diff(keys[order], prepend=keys[order[:1]] - 1))
    runs = np.diff(np.append(change, len(keys)))
    number = np.empty(len(keys), np.int64)
    number[order] = np.arange(len(keys)) - np.repeat(change, runs)
    return number


class _Calls:
    """Collectives by channel."""

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
        """Meetings of all nodes, and name, members and number of meetings of each channel."""
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
        """Number of calls; raises ForerunError where members differ in number or kind."""
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
                raise ForerunError(f"{one}: meets another collective, {first}")
        if most > least:
            caller, silent = counts.index(most), members[counts.index(least)]
            waiting = self._ranks[members[caller]].text(int(called[caller][least]))
            raise ForerunError(
                f"deadlock: {waiting} is not joined by all its ranks: rank {silent} runs {least} collectives of the "
                f"group, rank {members[caller]} {most}"
            )
        return most


def _messages(ranks: Sequence[RankNodes], by_tag: bool) -> tuple[I64, I64, I64, I64]:
    """Rank, node and match of every send and receive, and (sender, receiver, tag or 0) of every match."""
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
    # By sender and the order in which it sends.
    sent = np.empty(len(pair), np.int64)
    sent[match[sends]] = node[sends]
    order = np.lexsort((sent, of_match[:, 0]))
    place_of = np.empty(len(pair), np.int64)
    place_of[order] = np.arange(len(pair))
    return place, node, place_of[match], of_match[order]


def _with_messages(
    n_ranks: int,
    meeting: tuple[I64, ...],
    channels: list[tuple[str, tuple[int, ...], int]],
    messages: tuple[I64, I64, I64, I64],
) -> Meetings:
    """Add a channel for each sender and receiver."""
    place, node, match, route = messages
    base = sum(n for _, _, n in channels)
    named = [(name, members) for name, members, _ in channels]
    counts = [n for _, _, n in channels]
    pairs, pair_of = np.unique(route, axis=0, return_inverse=True)
    # Matches in order of their channel, so that the meetings of a channel are numbered one after the other.
    order = np.argsort(pair_of.reshape(-1), kind="stable")
    number = np.empty(len(route), np.int64)
    number[order] = base + np.arange(len(route))
    for i in range(n_ranks):
        mine = place == i
        meeting[i][node[mine]] = number[match[mine]]
    named += [(f"rank {source} to rank {sink}", (source, sink)) for source, sink, _ in pairs.tolist()]
    counts += np.bincount(pair_of.reshape(-1), minlength=len(pairs)).tolist()
    return Meetings(meeting, np.repeat(np.arange(len(counts)), counts), tuple(named))
