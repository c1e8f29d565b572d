"""Converts Chakra traces to a Program, which gives traces of real training the semantics of CUDA streams.

Each node becomes an op on a stream:

* A compute node with a measured duration is a DELAY of that time; `flops` is its num_ops, `bytes_written` its
  tensor_size.
* Any other compute node is a MEMORY op of num_ops FLOPs that reads tensor_size bytes. A roofline gives its time.
* A collective is a COLLECTIVE of its group; `bytes_comm` is the full buffer, for an all-gather comm_size times ranks.
* A send or a receive is a P2P op. Both start together, as NCCL's kernels do.
* A load from or a store to remote memory is a HOST_COPY.
* A node that runs on the host is a DELAY on `node_streams.HOST_STREAM`.

A trace that names streams keeps them, with the launch order (by node id) on each: streams that block each other in
training do so here. Without names, compute has one stream, collectives have another and messages have one for each
direction. Nodes are then issued in an order in which streams never block each other for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from forerun.astrasim.chakra.groups import resolve_groups
from forerun.astrasim.chakra.issue_order import launch_order, meeting_order, predecessors
from forerun.astrasim.chakra.meetings import ALL_RANKS, Meetings, RankNodes, device_nodes, find_meetings, group_of
from forerun.astrasim.chakra.node_streams import names_streams, node_streams
from forerun.astrasim.chakra.trace import CommGroups, CommType, NodeKind, RankTrace, same_columns
from forerun.common.arrays import pointers
from forerun.common.errors import ForerunError
from forerun.common.shipped import shipped
from forerun.common.units import PS_PER_S, PS_PER_US
from forerun.core.program.builder import OpTableBuilder
from forerun.core.program.groups import CommGroup
from forerun.core.program.kinds import Direction
from forerun.core.program.types import (
    I16,
    I32,
    I64,
    N_CATEGORIES,
    Block,
    Category,
    Channel,
    Collective,
    OpTable,
    Program,
    RankClass,
)

COLLECTIVES = {
    CommType.ALL_REDUCE: Collective.ALL_REDUCE,
    CommType.ALL_GATHER: Collective.ALL_GATHER,
    CommType.REDUCE_SCATTER: Collective.REDUCE_SCATTER,
    CommType.REDUCE_SCATTER_BLOCK: Collective.REDUCE_SCATTER,
    CommType.ALL_TO_ALL: Collective.ALL_TO_ALL,
    CommType.BROADCAST: Collective.BROADCAST,
}
COMM_TYPES = {collective: kind for kind, collective in reversed(COLLECTIVES.items())}
_COMM = (NodeKind.SEND, NodeKind.RECV, NodeKind.COLLECTIVE)
_MOST = 1 << 15
"""groups and channels: a Program numbers them in 16 bits"""
Alike = Callable[[tuple[int, ...]], Hashable]
Durations = Callable[[OpTable, Sequence[tuple[int, ...]]], I64]
"""gives the duration of each op from the op table and the members of its groups"""


@dataclass(frozen=True)
class _RoughRates:
    """The rates of `rough_rates.yaml`."""

    source: str
    flops_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float


@dataclass(frozen=True)
class TracedProgram:
    """A Program and the rows of the traces that its nodes come from."""

    program: Program
    classes: tuple[RankNodes, ...]
    """for each rank class: one of its ranks, with the rows of its trace by node of the Program"""
    class_of_rank: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]
    """for each group of the Program: its ranks in ring order"""


def to_program(traces: Sequence[RankTrace], comm_groups: CommGroups, measured: bool = True) -> Program:
    """Converts the traces of all ranks to a Program; without `measured` it ignores durations in the traces.

    Raises ForerunError as `traced_program` does.
    """
    return traced_program(traces, comm_groups, measured).program


def traced_program(
    traces: Sequence[RankTrace],
    comm_groups: CommGroups,
    measured: bool = True,
    alike: Alike = len,
    durations: Durations | None = None,
) -> TracedProgram:
    """Does the same as `to_program`, and also returns the rows that nodes come from.

    Ranks with equal traces share a rank class if all their groups lie inside the class and `alike` returns the same for
    the members of each (by default, their number). `durations` decide the order of nodes without streams.

    Raises ForerunError if a group or peer is unknown, an operation has no counterpart, nodes depend on each other in a
    cycle, a trace has more streams than the engine, or a Program has no such collective.
    """
    if not traces:
        raise ForerunError("no traces")
    traces, groups = resolve_groups(traces, comm_groups)
    ranks = _in_launch_order([_with_host_launchers(trace) for trace in traces], groups)
    class_of_rank, folded = _classes(ranks, groups, alike)
    leaders = [replace(ranks[class_of_rank.index(c)], alone=folded) for c in range(max(class_of_rank) + 1)]
    no_meetings = Meetings(tuple(np.full(len(one.row), -1, np.int64) for one in leaders), np.zeros(0, np.int64), ())
    named = any(names_streams(one.trace) for one in leaders)
    meetings = no_meetings if folded else find_meetings(leaders, groups, by_tag=named)
    builder = _Builder(groups, len(traces), measured)
    op_of_row = [builder.op_of(one) for one in leaders]
    ops = builder.ops.build()
    if named:
        _check_order(leaders, meetings)
    else:
        time = durations(ops, builder.members) if durations else _rough_ps(ops)
        leaders, meetings = _in_common_order(leaders, meetings, [time[op] for op in op_of_row])
    members = zip(leaders, meetings.of_node, op_of_row, strict=True)
    blocks = tuple(_block(one, met, op, meetings) for one, met, op in members)
    program = Program(
        ops=ops,
        blocks=blocks,
        rank_classes=tuple(_rank_class(c, one, class_of_rank) for c, one in enumerate(leaders)),
        groups=tuple(builder.placed),
        channels=tuple(Channel(name, members) for name, members in meetings.channels),
        modules=("trace",),
        meta=_where(ranks, class_of_rank, leaders, builder, groups),
    )
    return TracedProgram(program, tuple(leaders), tuple(class_of_rank), tuple(builder.members))


def _where(
    ranks: Sequence[RankNodes],
    class_of_rank: Sequence[int],
    leaders: Sequence[RankNodes],
    builder: _Builder,
    groups: CommGroups,
) -> dict[str, object]:
    """Returns the ranks of each class, the named groups behind each group of the Program, and their members."""
    of_class = [[r for r, c in enumerate(class_of_rank) if c == number] for number in range(len(leaders))]
    names: list[set[str]] = [set() for _ in builder.placed]
    for one, same in zip(leaders, of_class, strict=True):
        for local in range(len(one.trace.group_names)):
            if (number := builder.places.get((one.rank, local))) is not None:
                names[number] |= {ranks[rank].trace.group_names[local] for rank in same}
    used = sorted({name for each in names for name in each})
    return {
        "ranks": of_class,
        "groups": [sorted(each) for each in names],
        "comm_groups": {name: list(groups[name]) for name in used},
    }


def _with_host_launchers(trace: RankTrace) -> RankTrace:
    """Turns communication nodes of the host, with which older PyTorch traces mark a launch, into host work."""
    launches = trace.is_cpu & np.isin(trace.kind, _COMM)
    if not launches.any():
        return trace
    return replace(trace, kind=np.where(launches, np.int8(NodeKind.COMP), trace.kind))


def _in_launch_order(traces: Sequence[RankTrace], groups: CommGroups) -> list[RankNodes]:
    done: list[RankNodes] = []
    ranks = []
    for rank, trace in enumerate(traces):
        trace = _with_peers(trace, rank, groups)
        found = next((one for one in done if same_columns(trace, one.trace)), None)
        one = RankNodes(rank, trace, found.row if found else launch_order(trace, f"rank {rank}"))
        if found is None:
            done.append(one)
        ranks.append(one)
    return ranks


def _with_peers(trace: RankTrace, rank: int, groups: CommGroups) -> RankTrace:
    """Gives sends and receives that name a group of two, as PyTorch's do, the other rank as their peer."""
    lost = np.isin(trace.kind, _COMM[:2]) & (trace.peer < 0)
    if not lost.any():
        return trace
    peer = trace.peer.copy()
    for g, name in enumerate(trace.group_names):
        members = groups.get(name, ())
        if len(members) == 2 and rank in members:
            peer[lost & (trace.group == g)] = members[1 - members.index(rank)]
    return replace(trace, peer=peer)


def _classes(ranks: Sequence[RankNodes], groups: CommGroups, alike: Alike) -> tuple[list[int], bool]:
    """Returns the class of each rank, and whether all collectives stay inside a class."""
    numbers: dict[int, int] = {}
    classes = [numbers.setdefault(id(one.row), len(numbers)) for one in ranks]
    apart = list(range(len(ranks)))
    if len(numbers) == len(ranks) or any(np.isin(one.trace.kind, _COMM[:2]).any() for one in ranks):
        return apart, False
    seen: dict[tuple[int, int], Hashable] = {}
    for one, c in zip(ranks, classes, strict=True):
        nodes = device_nodes(one, NodeKind.COLLECTIVE)
        local = one.trace.group[one.row[nodes]]
        for g, k in zip(*np.unique(local, return_index=True), strict=True):
            _, members = group_of(one, int(nodes[k]), int(g), groups, len(ranks))
            signature = alike(members)
            inside = all(classes[member] == c for member in members)
            if not inside or seen.setdefault((c, int(g)), signature) != signature:
                return apart, False
            # A member that numbers this group differently runs its collectives at other nodes than this rank.
            name = one.trace.group_names[g] if g >= 0 else ALL_RANKS
            if any(g >= 0 and ranks[member].trace.group_names[g] != name for member in members):
                return apart, False
    return classes, True


def _in_common_order(
    ranks: Sequence[RankNodes], meetings: Meetings, duration: Sequence[I64]
) -> tuple[list[RankNodes], Meetings]:
    """Puts ranks and meetings in an order in which streams can't block each other; leaves them if there is none."""
    order = meeting_order(ranks, meetings, [node_streams(one) for one in ranks], duration)
    if order is None:
        _check_order(ranks, meetings)
        return list(ranks), meetings
    of_node = tuple(met[new] for met, new in zip(meetings.of_node, order, strict=True))
    return [replace(one, row=one.row[new]) for one, new in zip(ranks, order, strict=True)], replace(
        meetings, of_node=of_node
    )


def _rough_ps(ops: OpTable) -> I64:
    """Estimates durations at the rates of `rough_rates.yaml`, for an order of nodes where no costs are known."""
    rates = shipped(_RoughRates, __package__, "rough_rates.yaml")
    rough = ops.flops / rates.flops_per_s + (ops.bytes_read + ops.bytes_written) / rates.memory_bytes_per_s
    rough += ops.bytes_comm / rates.link_bytes_per_s
    out = (rough * PS_PER_S).astype(np.int64)
    delays = np.flatnonzero(ops.is_delay)
    out[delays] = ops.delay(delays).duration_ps
    return out


def _check_order(ranks: Sequence[RankNodes], meetings: Meetings) -> None:
    """Raises ForerunError if a rank meets its peers in another order than they meet it."""
    for one, met in zip(ranks, meetings.of_node, strict=True):
        nodes = np.flatnonzero(met >= 0)
        channel = meetings.channel[met[nodes]]
        order = np.argsort(channel, kind="stable")
        late = (np.diff(met[nodes[order]]) < 0) & (np.diff(channel[order]) == 0)
        for k in np.flatnonzero(late)[:1].tolist():
            raise ForerunError(f"deadlock: {one.text(int(nodes[order][k]))} is launched in another order than its peer")


def _rank_class(number: int, one: RankNodes, class_of_rank: Sequence[int]) -> RankClass:
    n_ranks = class_of_rank.count(number)
    name = f"rank {one.rank}" if n_ranks == 1 else f"rank {one.rank} and {n_ranks - 1} like it"
    resident = np.zeros(N_CATEGORIES, np.int64)
    tensors = _tensors(one)
    resident[Category.PARAMETER] = tensors[0][tensors[1] < 0].sum()
    return RankClass(
        name, n_ranks, np.full(1, number, np.int32), np.zeros(1, np.int32), np.full(1, -1, np.int32), resident
    )


def _tensors(one: RankNodes) -> tuple[I64, I64, I64]:
    """Returns the size of each used tensor, the node before which it is allocated and the one after which it is freed.

    A tensor that is read before it is written exists before the step (allocated at -1). One that is never read outlives
    the step (freed at -1).
    """
    trace = one.trace
    n, last = len(trace.tensor_bytes), len(one.row)
    written, first_read, last_read = np.full(n, last), np.full(n, last), np.full(n, -1)
    writer = one.position[np.repeat(np.arange(len(trace)), np.diff(trace.output_ptr))]
    reader = one.position[np.repeat(np.arange(len(trace)), np.diff(trace.input_ptr))]
    np.minimum.at(written, trace.output_tensor, writer)
    np.minimum.at(first_read, trace.input_tensor, reader)
    np.maximum.at(last_read, trace.input_tensor, reader)
    used = np.minimum(written, first_read) < last
    alloc = np.where(written < first_read, written, -1)
    free = np.where(last_read >= alloc, last_read, -1)
    return trace.tensor_bytes[used], alloc[used], free[used]


def _block(one: RankNodes, met: I64, op_of_row: I32, meetings: Meetings) -> Block:
    """Returns the nodes of one rank class as a block; `met` are their meetings."""
    trace, n = one.trace, len(one.row)
    pointer, wanted = predecessors(trace)
    counts = np.diff(pointer)[one.row]
    pred_ptr = pointers(counts)
    edge = np.repeat(pointer[:-1][one.row] - pred_ptr[:-1], counts) + np.arange(len(wanted))
    channel = np.full(n, -1, np.int16)
    channel[met >= 0] = _small(meetings.channel[met[met >= 0]], "pairs of ranks and groups that communicate")
    size, alloc, free = _tensors(one)
    return Block(
        name=f"rank {one.rank}",
        op=op_of_row[one.row],
        stream=node_streams(one)[one.row],
        phase=np.zeros(n, np.int8),
        module=np.zeros(n, np.int32),
        pred_ptr=pred_ptr.astype(np.int32),
        pred=one.position[wanted[edge]].astype(np.int32),
        record=np.full(n, -1, np.int16),
        channel=channel,
        sync=np.zeros(n, np.int8),
        tensor_bytes=size,
        tensor_category=np.where(alloc < 0, int(Category.PARAMETER), int(Category.ACTIVATION)).astype(np.int8),
        tensor_alloc=alloc.astype(np.int32),
        tensor_free=np.where(alloc < 0, -1, free).astype(np.int32),
    )


class _Builder:
    """The ops and groups of all rank classes while they are collected."""

    def __init__(self, groups: CommGroups, n_ranks: int, measured: bool) -> None:
        self.ops = OpTableBuilder()
        self.placed: list[CommGroup] = []
        self.members: list[tuple[int, ...]] = []
        self.places: dict[tuple[int, int], int] = {}
        """(rank, its number of a group) -> number of the group in the Program"""
        self._groups, self._n_ranks, self._measured = groups, n_ranks, measured
        self._numbers: dict[tuple[str, tuple[int, ...]], int] = {}

    def op_of(self, one: RankNodes) -> I32:
        """Returns the op of every row; rows with equal columns (and names) share an op."""
        trace = one.trace
        named = np.zeros(len(trace), np.int64)
        if trace.names:
            named = np.unique(np.array(trace.names, object), return_inverse=True)[1].astype(np.int64)
        columns = (trace.kind, trace.is_cpu, trace.duration_us, trace.num_ops, trace.tensor_size, trace.comm_type)
        table = np.stack([*columns, trace.comm_size, trace.peer, trace.group, named], axis=1).astype(np.int64)
        _, first, inverse = np.unique(table, axis=0, return_index=True, return_inverse=True)
        ops = [self._op(one, row, int(one.position[row])) for row in first.tolist()]
        return np.array(ops, np.int32)[inverse.reshape(-1)]

    def _op(self, one: RankNodes, row: int, node: int) -> int:
        trace = one.trace
        kind, size = NodeKind(int(trace.kind[row])), int(trace.comm_size[row])
        name = trace.names[row] if trace.names else _op_name(trace, row)
        if not trace.is_cpu[row] and kind == NodeKind.COLLECTIVE:
            return self._collective(one, row, node, name)
        if not trace.is_cpu[row] and kind in _COMM:
            pair = (one.rank, int(trace.peer[row]))
            ends = pair if kind == NodeKind.SEND else pair[::-1]
            direction = Direction.OUT if kind == NodeKind.SEND else Direction.IN
            return self.ops.p2p(name, self._group(f"{ends[0]} to {ends[1]}", ends), size, "", direction=direction)
        touched = float(trace.tensor_size[row])
        if kind in (NodeKind.MEM_LOAD, NodeKind.MEM_STORE):
            return self.ops.host_copy(name, touched, "", Direction.IN if kind == NodeKind.MEM_LOAD else Direction.OUT)
        duration_us, flops = int(trace.duration_us[row]), float(trace.num_ops[row])
        timed = (duration_us > 0 and self._measured) or trace.is_cpu[row] or kind != NodeKind.COMP
        if timed or not (flops or touched):
            return self.ops.delay(name, duration_us * PS_PER_US, flops=flops, bytes_written=touched)
        return self.ops.memory(name, touched, 0.0, flops=flops, dtype="")

    def _collective(self, one: RankNodes, row: int, node: int, name: str) -> int:
        trace = one.trace
        comm_type = CommType(int(trace.comm_type[row]))
        if comm_type not in COLLECTIVES:
            known = ", ".join(kind.name.lower() for kind in COLLECTIVES)
            raise ForerunError(f"{one.text(node)}: a Program has no such collective; known: {known}")
        if trace.involved_dims and row in trace.involved_dims and not all(trace.involved_dims[row]):
            raise ForerunError(f"{one.text(node)}: it names dimensions of a network; name a group of ranks instead")
        label, members = group_of(one, node, int(trace.group[row]), self._groups, self._n_ranks)
        full = int(trace.comm_size[row]) * (len(members) if comm_type == CommType.ALL_GATHER else 1)
        number = self._group(label, members)
        self.places[one.rank, int(trace.group[row])] = number
        return self.ops.collective(name, COLLECTIVES[comm_type], number, full, "")

    def _group(self, name: str, members: tuple[int, ...]) -> int:
        if (name, members) not in self._numbers:
            self._numbers[name, members] = len(self.placed)
            inner = max(1, members[1] - members[0]) if len(members) > 1 else 1
            self.placed.append(CommGroup(name, len(members), 1, len(members), inner))
            self.members.append(members)
            _small(np.array([len(self.placed)]), "groups")
        return self._numbers[name, members]


def _op_name(trace: RankTrace, row: int) -> str:
    kind = NodeKind(int(trace.kind[row]))
    if kind == NodeKind.COLLECTIVE and not trace.is_cpu[row]:
        return CommType(int(trace.comm_type[row])).name.lower()
    return "host" if trace.is_cpu[row] else kind.name.lower()


def _small(numbers: I64, what: str) -> I16:
    if len(numbers) and numbers.max() >= _MOST:
        raise ForerunError(f"the traces have more than {_MOST - 1} {what}; a Program can't hold them")
    return numbers.astype(np.int16)
