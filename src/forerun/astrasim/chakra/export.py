"""Converts a Program to Chakra traces, one for each rank, for simulators that read them.

Ranks of class 0 come first, then those of class 1, and so on. The order that streams imply becomes explicit: every node
has a control dependency on the node before it on its stream, and on the node that the host last waited for. Nodes that
take no time and only join others are left out; their dependants inherit their dependencies. The traces name streams, so
that reading them gives the same Program again.

Compute nodes have num_ops (at least 1, since a roofline gives no time for 0) and tensor_size (bytes read and written).
A Program doesn't hold the time that the host takes to launch kernels, and neither do the traces.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.astrasim.chakra.node_streams import HOST_STREAM
from forerun.astrasim.chakra.program import COMM_TYPES
from forerun.astrasim.chakra.trace import CommGroups, CommType, NodeKind, RankTrace, new_trace
from forerun.astrasim.chakra.writer import write_rank
from forerun.common.arrays import csr
from forerun.common.errors import ForerunError
from forerun.common.files import make_folder, whole_files
from forerun.common.units import PS_PER_US
from forerun.core.program.kinds import Delay, Direction, HostCopy, Transfer
from forerun.core.program.origin import Origin
from forerun.core.program.places import role_ranks, tiles_of
from forerun.core.program.types import I64, N_STREAMS, Collective, FlatProgram, OpTable, Program, Stream
from forerun.core.program.unfold import unfold

_SENDS = {int(stream) for stream in Stream if stream.name.startswith("PP_SEND")}
_EVERYONE = -1
"""the group of all ranks, which needs no name"""


def to_traces(program: Program, duration_ps: I64 | None = None) -> tuple[list[RankTrace], CommGroups]:
    """Returns the traces of all ranks, and their communicator groups.

    With `duration_ps` (n_ops,), the times of the ops, the traces hold durations. Their sum is exact to a microsecond.

    Raises ForerunError if the groups of the Program don't fit its numbers of ranks.
    """
    places = _Places.of(program)
    flat = unfold(program)
    traces: list[RankTrace | None] = [None] * places.n_ranks
    for number in range(len(program.rank_classes)):
        columns = _Columns(program, flat, number, duration_ps)
        shared = columns.trace()
        for place, rank in enumerate(places.ranks[number]):
            peers = [places.peer(program, one, number, place) for one in columns.communication]
            groups = [places.group(program, one, number, place) for one in columns.communication]
            traces[rank] = _of_rank(shared, columns.communication, peers, groups)
    return [trace for trace in traces if trace is not None], places.groups


def write_run(folder: str | Path, program: Program, duration_ps: I64 | None = None) -> int:
    """Writes `trace.<rank>.et` of every rank and `comm_group.json` to `folder`, and returns the number of ranks.

    Raises ForerunError as `to_traces` does, or if a file can't be written.
    """
    traces, groups = to_traces(program, duration_ps)
    place = make_folder(folder)
    with whole_files() as files:
        with files.open(place / "comm_group.json") as file:
            file.write(json.dumps(groups).encode())
        for rank, trace in enumerate(traces):
            write_rank(place / f"trace.{rank}.et", trace, files)
    return len(traces)


@dataclass(frozen=True, slots=True)
class _Communication:
    """A node whose peer or group depends on the rank."""

    row: int
    op: int
    channel: int
    kind: NodeKind


@dataclass
class _Places:
    """The rank numbers of each rank class, and the groups that they are in."""

    ranks: list[list[int]]
    """for each rank class: its ranks"""
    names: list[list[str]]
    """for each group: the named groups that it stands for"""
    groups: dict[str, tuple[int, ...]]
    by_members: dict[tuple[int, ...], str] = field(default_factory=dict)
    of_group: list[dict[int, tuple[int, ...]]] | None = None
    """for each group of a traced Program: rank -> members of the copy that the rank is in"""

    @property
    def n_ranks(self) -> int:
        return sum(len(ranks) for ranks in self.ranks)

    @staticmethod
    def of(program: Program) -> _Places:
        """Takes ranks from the traces or the recorded roles behind a Program; else it numbers class by class."""
        meta = program.meta
        if "ranks" in meta and "groups" in meta and "comm_groups" in meta:
            ranks, names, groups = meta["ranks"], meta["groups"], meta["comm_groups"]
            assert isinstance(ranks, list)
            assert isinstance(names, list)
            assert isinstance(groups, dict)
            members = {name: tuple(group) for name, group in groups.items()}
            return _Places(ranks, names, members, {group: name for name, group in members.items()})
        counts = [one.n_ranks for one in program.rank_classes]
        ends = np.cumsum(counts).tolist()
        ranks = [list(range(end - count, end)) for end, count in zip(ends, counts, strict=True)]
        group_ranks = Origin.of(program).group_ranks
        if group_ranks is None:
            return _Places(ranks, [[] for _ in program.groups], {})
        copies = [tiles_of(one, ends[-1]) if one and max(one) < ends[-1] else [] for one in group_ranks]
        of_group = [{rank: copy for copy in of_one for rank in copy} for of_one in copies]
        return _Places(_recorded_ranks(program, counts) or ranks, [[] for _ in program.groups], {}, of_group=of_group)

    def group(self, program: Program, one: _Communication, number: int, place: int) -> str | int:
        """Returns the name of the group in which rank number `place` of a class runs a collective."""
        if one.kind != NodeKind.COLLECTIVE:
            return ""
        rank, group = self.ranks[number][place], int(program.ops.group[one.op])
        name = next((name for name in self.names[group] if rank in self.groups[name]), None)
        if name is not None:
            return name
        if one.channel >= 0 and self.of_group is None:
            members = tuple(self._at(c, place, program) for c in program.channels[one.channel].members)
        else:
            members = self._members(program, group, number, place)
        if members == tuple(range(self.n_ranks)):
            return _EVERYONE
        if members not in self.by_members:
            name = self.by_members[members] = str(len(self.by_members) + 1)
            self.groups[name] = members
        return self.by_members[members]

    def peer(self, program: Program, one: _Communication, number: int, place: int) -> int:
        """Returns the rank at the other end of a message."""
        if one.kind == NodeKind.COLLECTIVE:
            return -1
        if one.channel >= 0:
            others = [c for c in program.channels[one.channel].members if c != number]
            if len(others) != 1:
                name = program.channels[one.channel].name
                raise ForerunError(f"channel {name!r}: a message has two ends, not {len(others) + 1}")
            return self._at(others[0], place, program)
        members = self._members(program, int(program.ops.group[one.op]), number, place)
        at = members.index(self.ranks[number][place])
        return members[(at + (1 if one.kind == NodeKind.SEND else -1)) % len(members)]

    def _at(self, number: int, place: int, program: Program) -> int:
        if place >= len(self.ranks[number]):
            raise ForerunError(f"rank class {program.rank_classes[number].name!r} has no rank number {place} to meet")
        return self.ranks[number][place]

    def _members(self, program: Program, number: int, owner: int, place: int) -> tuple[int, ...]:
        """Returns the ranks of a group: those that were traced, or ranks at the distance that the group states.

        Ranks count class by class here, so a group that is wider than a class takes ranks of several classes.
        """
        if self.of_group is not None:
            rank = self.ranks[owner][place]
            if rank not in self.of_group[number]:
                raise ForerunError(f"group {program.groups[number].axis!r}: none of its copies contains rank {rank}")
            return self.of_group[number][rank]
        group, ranks = program.groups[number], [rank for each in self.ranks for rank in each]
        span = group.inner * group.size
        if len(ranks) % span:
            raise ForerunError(
                f"group {group.axis!r} of {group.size} ranks, {group.inner} apart, does not divide the {len(ranks)} "
                "ranks of the Program"
            )
        at = sum(len(each) for each in self.ranks[:owner]) + place
        first = at // span * span + at % group.inner
        return tuple(ranks[first + k * group.inner] for k in range(group.size))


def _recorded_ranks(program: Program, counts: list[int]) -> list[list[int]] | None:
    """Returns the ranks of each rank class if the Program was recorded in a run of this size."""
    roles = program.meta.get("roles")
    if not isinstance(roles, dict) or roles.get("world_size") != sum(counts):
        return None
    ranks = role_ranks(roles["ranks"], sum(counts))
    return None if ranks is None or [len(one) for one in ranks] != counts else [list(one) for one in ranks]


class _Columns:
    """The nodes of one rank class."""

    def __init__(self, program: Program, flat: FlatProgram, number: int, duration_ps: I64 | None) -> None:
        self._ops, self._groups = program.ops, program.groups
        self._rows: list[tuple[int, ...]] = []
        self._names: list[str] = []
        self._data: list[list[int]] = []
        self._ctrl: list[list[int]] = []
        self.communication: list[_Communication] = []
        self._ends = [frozenset[int]()] * N_STREAMS
        """for each stream: the rows that its next node waits for"""
        self._host, self._epoch, self._seen = frozenset[int](), 0, [0] * N_STREAMS
        self._time_ps, self._times = 0, duration_ps
        self._add_all(flat, number)

    def _add_all(self, flat: FlatProgram, number: int) -> None:
        first, last = int(flat.class_ptr[number]), int(flat.class_ptr[number + 1])
        rows_of: list[frozenset[int]] = []
        pointer = flat.pred_ptr[first : last + 1].tolist()
        preds = (flat.pred[pointer[0] : pointer[-1]] - first).tolist()
        meeting = flat.meeting[first:last]
        channels = np.where(meeting >= 0, flat.meeting_channel[meeting] if len(flat.meeting_channel) else -1, -1)
        nodes = zip(flat.op[first:last].tolist(), flat.stream[first:last].tolist(), channels.tolist(), strict=True)
        joins = _joins(self._ops, self._times).tolist()
        sync = flat.sync[first:last].tolist()
        for i, (op, stream, channel) in enumerate(nodes):
            mine = preds[pointer[i] - pointer[0] : pointer[i + 1] - pointer[0]]
            data = frozenset().union(*(rows_of[p] for p in mine))
            before = self._ends[stream]
            if self._seen[stream] < self._epoch:
                self._seen[stream] = self._epoch
                before = before | self._host
            if channel < 0 and joins[op] and stream != HOST_STREAM:
                done = data | before
            else:
                done = self._add(op, stream, channel, data, before - data)
            rows_of.append(done)
            self._ends[stream] = done
            if sync[i]:
                self._host, self._epoch = done, self._epoch + 1

    def _add(self, op: int, stream: int, channel: int, data: frozenset[int], ctrl: frozenset[int]) -> frozenset[int]:
        """Appends a node, or a send and a receive for a hop of a ring, and returns their rows."""
        details = self._ops.details_of(op)
        if isinstance(details, Transfer) and channel < 0 and details.direction == Direction.EITHER:
            # On one stream the send and the receive would wait for each other round the ring.
            sent = self._node(op, NodeKind.SEND, stream, channel, data, ctrl)
            return frozenset({sent, self._node(op, NodeKind.RECV, stream + N_STREAMS, channel, data, ctrl)})
        return frozenset({self._node(op, _node_kind(self._ops, op, stream), stream, channel, data, ctrl)})

    def _node(
        self, op: int, kind: NodeKind, stream: int, channel: int, data: frozenset[int], ctrl: frozenset[int]
    ) -> int:
        row, ops = len(self._rows), self._ops
        on_host = stream == HOST_STREAM and ops.is_delay[op]
        num_ops = touched = comm_size = duration_us = 0
        comm_type = int(CommType.NONE)
        if kind in (NodeKind.SEND, NodeKind.RECV, NodeKind.COLLECTIVE):
            comm_size = int(ops.bytes_comm[op])
            if kind == NodeKind.COLLECTIVE:
                comm_type = int(COMM_TYPES[Collective(int(ops.collective[op]))])
                comm_size //= self._groups[ops.group[op]].size if comm_type == CommType.ALL_GATHER else 1
            self.communication.append(_Communication(row, op, channel, kind))
        elif kind == NodeKind.COMP:
            num_ops, touched = self._work(op, on_host)
            duration_us = self._duration_us(op)
        else:
            touched = int(ops.bytes_comm[op])
            duration_us = self._duration_us(op) if self._times is not None else 0
        tag = channel + 1 if kind in (NodeKind.SEND, NodeKind.RECV) else 0
        shown = -1 if on_host else stream
        self._rows.append((int(kind), on_host, duration_us, num_ops, touched, comm_type, comm_size, tag, shown))
        self._names.append(ops.name[op])
        self._data.append(sorted(data))
        self._ctrl.append(sorted(ctrl))
        return row

    def _work(self, op: int, on_host: bool) -> tuple[int, int]:
        """Returns num_ops and tensor_size."""
        ops = self._ops
        if isinstance(ops.details_of(op), Delay):
            return int(ops.flops[op]), int(ops.bytes_written[op])
        touched = int(ops.bytes_read[op] + ops.bytes_written[op])
        return max(1, round(ops.flops[op])), max(1, touched)

    def _duration_us(self, op: int) -> int:
        """Returns whole microseconds. What rounding takes from one node goes to the next."""
        if self._times is not None:
            time_ps = int(self._times[op])
        elif isinstance(details := self._ops.details_of(op), Delay):
            time_ps = details.duration_ps
        else:
            return 0
        before = round(self._time_ps / PS_PER_US)
        self._time_ps += time_ps
        return round(self._time_ps / PS_PER_US) - before

    def trace(self) -> RankTrace:
        """Returns the trace, still without peers and groups."""
        n = len(self._rows)
        table = np.array(self._rows, np.int64).reshape(n, len(_COLUMNS))
        columns: dict[str, Any] = {name: table[:, k].astype(dtype) for k, (name, dtype) in enumerate(_COLUMNS.items())}
        data_ptr, data = csr(self._data)
        ctrl_ptr, ctrl = csr(self._ctrl)
        return new_trace(
            n,
            **columns,
            node_id=np.arange(1, n + 1, dtype=np.int64),
            data_ptr=data_ptr,
            data=data.astype(np.int32),
            ctrl_ptr=ctrl_ptr,
            ctrl=ctrl.astype(np.int32),
            names=tuple(self._names),
            has_tensors=False,
        )


_COLUMNS: dict[str, type] = {
    "kind": np.int8, "is_cpu": np.bool_, "duration_us": np.int64, "num_ops": np.int64, "tensor_size": np.int64,
    "comm_type": np.int8, "comm_size": np.int64, "comm_tag": np.int64, "stream": np.int32,
}  # fmt: skip
"""the columns of `_Columns._rows`, in order"""


def _joins(ops: OpTable, duration_ps: I64 | None) -> npt.NDArray[np.bool_]:
    """Tells which ops take no time and do nothing."""
    idle: npt.NDArray[np.bool_] = (
        (ops.flops == 0) & (ops.bytes_written == 0) & (ops.bytes_read == 0) & (ops.is_compute | ops.is_delay)
    )
    delays = np.flatnonzero(ops.is_delay)
    idle[delays] &= ops.delay(delays).duration_ps == 0
    return idle if duration_ps is None else idle & (duration_ps == 0)


def _node_kind(ops: OpTable, op: int, stream: int) -> NodeKind:
    details = ops.details_of(op)
    if isinstance(details, Transfer):
        sends = details.direction == Direction.OUT if details.direction else stream in _SENDS
        return NodeKind.SEND if sends else NodeKind.RECV
    if isinstance(details, HostCopy):
        return NodeKind.MEM_LOAD if details.direction == Direction.IN else NodeKind.MEM_STORE
    return NodeKind.COLLECTIVE if ops.is_collective[op] else NodeKind.COMP


def _of_rank(
    shared: RankTrace, communication: Sequence[_Communication], peers: Sequence[int], groups: Sequence[str | int]
) -> RankTrace:
    """Returns the trace of one rank of a class."""
    names = list(dict.fromkeys(group for group in groups if isinstance(group, str) and group))
    number = {name: k for k, name in enumerate(names)}
    peer, group = shared.peer.copy(), shared.group.copy()
    rows = [one.row for one in communication]
    peer[rows] = peers
    group[rows] = [number.get(name, -1) if isinstance(name, str) else -1 for name in groups]
    return replace(shared, peer=peer, group=group, group_names=tuple(names))
