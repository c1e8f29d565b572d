"""Converts execution traces to nodes of the engine's slot policy, with ASTRA-sim's costs.

ASTRA-sim's costs are a roofline in doubles that is truncated to ns, nodes that take no time, and the durations of the
trace if it is only replayed. Two ranks with equal traces differ only in the members of their groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from forerun.astrasim.astra.collectives import CollectiveTables
from forerun.astrasim.astra.reference import REFERENCE
from forerun.astrasim.astra.remote_memory import RemoteMemory
from forerun.astrasim.astra.system import System
from forerun.astrasim.chakra.trace import CommGroups, CommType, NodeKind, RankTrace
from forerun.astrasim.messages.closed_form import ClosedForms, closed_forms
from forerun.astrasim.messages.ready import SLOT_COMM, SLOT_COMPUTE, SLOT_CPU, SLOT_NONE, hashed_children, hashed_roots
from forerun.astrasim.messages.slots import COLLECTIVE, INSTANT, RECV, SEND, TIMED, Matches, Nodes
from forerun.common.arrays import pointers, positions
from forerun.common.errors import ForerunError
from forerun.core.program.types import F64, I8, I32, I64

IssueOrder = Literal["ascending", "march-2025"]
_TAG_SPACE: int = REFERENCE.tag_space
_WORLD = ""
Mask = npt.NDArray[np.bool_]
_MOST_NS = 1 << 60
UNKNOWN_NS = -1
"""delay of a send that the fabric determines"""


@dataclass(frozen=True)
class LoweredTrace:
    """The nodes of one trace, for any rank that runs it. Rows are nodes by rising node id."""

    trace: RankTrace
    row: I64
    """rows of the trace in this order"""
    action: I8
    slot: I8
    duration_ns: I64
    performance: F64
    """operations/s of the roofline; 0 for nodes that it doesn't time"""
    n_pred: I32
    child_ptr: I64
    child: I32
    root: I64

    def __len__(self) -> int:
        return len(self.row)

    @property
    def has_messages(self) -> bool:
        """Returns whether some node is a send or a receive."""
        return bool(((self.action == SEND) | (self.action == RECV)).any())


@dataclass(frozen=True)
class LoweredProgram:
    """The nodes of all actors, and the messages between them."""

    nodes: Nodes
    matches: Matches
    key: I64
    """node ids for the hashed issue policy; empty for the ascending policy"""
    traces: tuple[LoweredTrace, ...]
    """for each actor: its trace"""
    match_text: tuple[str, ...]
    """the name of each match in errors"""
    forms: ClosedForms = field(default_factory=closed_forms)
    """the collectives in closed form"""


def lower_trace(trace: RankTrace, system: System, memory: RemoteMemory, place: str = "trace") -> LoweredTrace:
    """Finds costs and order of the nodes of one trace for the ascending issue policy.

    Raises ForerunError if a node can't be simulated; `place` and the node's id are named.
    """
    row = np.argsort(trace.node_id, kind="stable")
    kind = trace.kind[row].astype(np.int64)
    is_cpu = trace.is_cpu[row]
    comp = kind == NodeKind.COMP
    slot = np.where(is_cpu, SLOT_CPU, np.where(comp, SLOT_COMPUTE, SLOT_COMM))
    slot = np.where((kind == NodeKind.RECV) & ~is_cpu, SLOT_NONE, slot).astype(np.int8)
    action, duration_ns, performance = _costs(trace, row, kind, is_cpu, system, memory, place)
    n_pred, child_ptr, child = _children(trace, positions(row))
    root = np.flatnonzero(n_pred == 0)
    return LoweredTrace(trace, row, action, slot, duration_ns, performance, n_pred, child_ptr, child, root)


def _costs(
    trace: RankTrace, row: I64, kind: I64, is_cpu: Mask, system: System, memory: RemoteMemory, place: str
) -> tuple[I8, I64, F64]:
    """Returns action, duration and roofline performance of every node."""
    replayed_ns = np.where(trace.duration_us[row] != 0, trace.duration_us[row] * 1000, 1)
    performance = np.zeros(len(row))
    if system.replay_only:
        return np.full(len(row), TIMED, np.int8), replayed_ns, performance
    action = np.full(len(row), TIMED, np.int8)
    duration_ns = replayed_ns.copy()
    action[(kind == NodeKind.INVALID) | (kind == NodeKind.METADATA)] = INSTANT
    comm = kind == NodeKind.COLLECTIVE
    _refuse(trace, row, is_cpu & (kind >= NodeKind.SEND), place, "a communication node can't run on the host")
    _refuse(trace, row, comm & (trace.comm_size[row] < 0), place, "its size is below 0")
    action[comm & (trace.comm_type[row] != CommType.BROADCAST)] = COLLECTIVE
    action[kind == NodeKind.SEND] = SEND
    duration_ns[kind == NodeKind.SEND] = UNKNOWN_NS
    action[kind == NodeKind.RECV] = RECV
    storage = (kind == NodeKind.MEM_LOAD) | (kind == NodeKind.MEM_STORE)
    if storage.any():
        duration_ns[storage] = memory.runtime_ns(trace.tensor_size[row][storage])
    if system.roofline_enabled:
        timed = (kind == NodeKind.COMP) & ~is_cpu
        size = trace.tensor_size[row].astype(np.float64)
        ops = trace.num_ops[row].astype(np.float64)
        _refuse(trace, row, timed & ((size < 0) | (ops < 0)), place, "its tensor_size or num_ops is below 0")
        action[timed & (size == 0)] = INSTANT
        timed &= size > 0
        if timed.any():
            if not (system.local_mem_bw and system.peak_perf):
                raise ForerunError(f"{place}: the roofline needs local-mem-bw and peak-perf above 0 in the system file")
            _refuse(trace, row, timed & (ops == 0), place, "num_ops is 0, so the roofline gives no time")
            intensity = np.divide(ops, size, out=np.zeros_like(ops), where=timed)
            performance = np.where(timed, np.minimum(system.memory_bytes_per_s * intensity, system.peak_flops), 0.0)
            seconds = np.divide(ops, performance, out=np.zeros_like(ops), where=timed)
            nanoseconds = seconds * 1e9
            _refuse(trace, row, nanoseconds > _MOST_NS, place, "takes longer than 2**60 ns")
            duration_ns[timed] = nanoseconds[timed].astype(np.int64)
    return action, duration_ns, performance


def _refuse(trace: RankTrace, row: I64, bad: Mask, place: str, why: str) -> None:
    if bad.any():
        raise ForerunError(f"{place}: node {trace.node_id[row[int(np.argmax(bad))]]}: {why}")


def _children(trace: RankTrace, position: I64) -> tuple[I32, I64, I32]:
    """Returns the number of distinct predecessors, and successors (CSR) in trace order, of nodes by rising id."""
    n = len(position)
    parents = [position[trace.data], position[trace.ctrl]]
    children = [np.repeat(np.arange(n), np.diff(trace.data_ptr)), np.repeat(np.arange(n), np.diff(trace.ctrl_ptr))]
    parent, child_row = np.concatenate(parents), np.concatenate(children)
    pair = np.unique(parent * n + child_row) if n else np.zeros(0, np.int64)
    parent, child_row = np.divmod(pair, max(n, 1))
    child = position[child_row].astype(np.int32)
    n_pred = np.bincount(child, minlength=n).astype(np.int32)
    return n_pred, pointers(np.bincount(parent, minlength=n)), child


def in_hashed_order(lowered: LoweredTrace) -> LoweredTrace:
    """Reorders children and roots for the hashed issue policy, which keeps them in unordered C++ containers."""
    trace, key = lowered.trace, lowered.trace.node_id[lowered.row]
    dependencies = (trace.data_ptr, trace.data, trace.ctrl_ptr, trace.ctrl)
    return replace(
        lowered,
        child=hashed_children(key, lowered.child_ptr, lowered.child),
        root=hashed_roots(key, lowered.row, positions(lowered.row), *dependencies),
    )


def lower_program(
    traces: Sequence[LoweredTrace],
    ranks: Sequence[int],
    groups: Sequence[tuple[str, ...]],
    comm_groups: CommGroups,
    tables: CollectiveTables,
    order: IssueOrder = "ascending",
    messages: Messages | None = None,
) -> LoweredProgram:
    """Joins the nodes of all actors: actor i is rank `ranks[i]`, runs `traces[i]` and names its groups `groups[i]`.

    `messages` says which sends and receives match if an actor stands for several ranks.

    Raises ForerunError if a group is unknown or lacks the rank, a send has no valid peer, or a collective can't be
    simulated.
    """
    first = pointers([len(trace) for trace in traces])
    target = np.full(first[-1], -1, np.int32)
    alike: dict[int, tuple[I64, I64, I64]] = {}
    position = np.zeros(first[-1], np.int32)
    for actor, (lowered, rank) in enumerate(zip(traces, ranks, strict=True)):
        nodes = np.flatnonzero(lowered.action == COLLECTIVE)
        if len(nodes):
            calls, places = _calls(lowered, nodes, rank, groups[actor], comm_groups, tables, alike)
            target[first[actor] + nodes] = calls
            position[first[actor] + nodes] = places
    messages = messages or match_messages(traces, ranks, tables.n_ranks)
    at = first[messages.actor] + messages.node
    target[at], position[at] = messages.match, messages.receiver
    duration_ns = np.concatenate([trace.duration_ns for trace in traces])
    duration_ns[at] = messages.delay_ns
    shift, edges = first[:-1], pointers([len(trace.child) for trace in traces])[:-1]
    nodes_of = Nodes(
        first=first,
        action=np.concatenate([trace.action for trace in traces]),
        slot=np.concatenate([trace.slot for trace in traces]),
        duration_ns=duration_ns,
        tail_ns=np.zeros(first[-1], np.int64),
        target=target,
        position=position,
        size=np.concatenate([trace.trace.comm_size[trace.row] for trace in traces]),
        n_pred=np.concatenate([trace.n_pred for trace in traces]),
        child_ptr=np.concatenate(
            [[0], *(trace.child_ptr[1:] + base for trace, base in zip(traces, edges, strict=True))]
        ).astype(np.int64),
        child=np.concatenate([trace.child + base for trace, base in zip(traces, shift, strict=True)]).astype(np.int32),
        root=np.concatenate([trace.root + base for trace, base in zip(traces, shift, strict=True)]).astype(np.int64),
        root_ptr=pointers([len(trace.root) for trace in traces]),
    )
    key = np.zeros(0, np.int64)
    if order == "march-2025":
        key = np.concatenate([trace.trace.node_id[trace.row] for trace in traces]).astype(np.int64)
    return LoweredProgram(nodes_of, _matches(messages), key, tuple(traces), messages.texts)


def _calls(
    lowered: LoweredTrace, nodes: I64, rank: int, groups: tuple[str, ...], comm_groups: CommGroups,
    tables: CollectiveTables, alike: dict[int, tuple[I64, I64, I64]],
) -> tuple[I32, I32]:  # fmt: skip
    """Returns the call of each collective node, and the rank's position in its communicator.

    `alike` has the distinct collectives of traces with equal columns, by their rows.
    """
    trace, rows = lowered.trace, lowered.row[nodes]
    involved: Mapping[int, tuple[bool, ...]] = trace.involved_dims or {}
    dims = np.array([row if row in involved else -1 for row in rows.tolist()]) if involved else np.full(len(rows), -1)
    customs, custom = _custom_of(lowered, rows, dims, tables.system.custom_of_nodes, rank)
    plain = not involved and len(customs) == 1
    found = alike.get(id(lowered.row)) if plain else None
    if found is None:
        columns: list[npt.NDArray[Any]] = [trace.comm_type[rows], trace.comm_size[rows], trace.group[rows]]
        table = np.stack([*columns, trace.priority[rows], dims, custom], axis=1).astype(np.int64)
        unique, first, of_row = np.unique(table, axis=0, return_index=True, return_inverse=True)
        found = unique, first, of_row.reshape(-1)
        if plain:  # Custom algorithms go by the numbers of nodes, which differ between ranks of equal columns.
            alike[id(lowered.row)] = found
    distinct, example, inverse = found
    calls, places = np.empty(len(distinct), np.int32), np.empty(len(distinct), np.int32)
    for k, (kind, size, group, priority, dims_row, prefix) in enumerate(distinct.tolist()):
        name = groups[group] if group >= 0 and dims_row < 0 else _WORLD
        if name == _WORLD:
            members, place = tuple(range(tables.n_ranks)), rank
            communicator = tables.communicator(_WORLD if dims_row < 0 else "dimensions", members)
        else:
            node = trace.node_id[rows[example[k]]]
            members = comm_groups.get(name, ())
            if rank not in members:
                problem = f"lacks rank {rank}" if name in comm_groups else "is not in the communicator group file"
                raise ForerunError(f"rank {rank}, node {node}: group {name!r} {problem}")
            place, communicator = members.index(rank), tables.communicator(name, members)
        try:
            of_dims = involved.get(dims_row)
            calls[k] = tables.call(CommType(kind), size, communicator, priority, of_dims, customs[prefix])
        except ForerunError as error:
            node = trace.node_id[rows[example[k]]]
            raise ForerunError(f"rank {rank}, node {node}: {error}") from None
        places[k] = place
    return calls[inverse], places[inverse]


def _custom_of(
    lowered: LoweredTrace, rows: I64, dims: npt.NDArray[Any], of_nodes: Mapping[int, str], rank: int
) -> tuple[list[str], npt.NDArray[Any]]:
    """Returns prefixes of custom traces, the first one "", and the index of the prefix that each collective runs.

    Raises ForerunError if collectives of one kind in a group differ, because ASTRA-sim runs all of them as the first
    one.
    """
    trace = lowered.trace
    prefixes = ["", *dict.fromkeys(of_nodes.values())]
    if not of_nodes:
        return prefixes, np.zeros(len(rows), np.int64)
    index = np.array([prefixes.index(of_nodes.get(node, "")) for node in trace.node_id[rows].tolist()], np.int64)
    in_group = (trace.group[rows] >= 0) & (dims < 0)
    of_group = np.stack([trace.group[rows], trace.comm_type[rows]], axis=1)[in_group]
    kinds, kind = np.unique(of_group, axis=0, return_inverse=True)
    if len(np.unique(np.stack([kind.reshape(-1), index[in_group]], axis=1), axis=0)) > len(kinds):
        raise ForerunError(
            f"rank {rank}: per-node-custom-implementation names some of the collectives of a kind in a group;"
            " ASTRA-sim runs all of them as the first one, so name all or none"
        )
    return prefixes, index


@dataclass(frozen=True)
class Messages:
    """The sends and receives of the actors, one node in each row."""

    actor: I64
    node: I64
    """node of the actor"""
    is_send: Mask
    match: I64
    """equal for sends and receives that match"""
    receiver: I64
    """of a send, the actor that receives it; of a receive, the actor itself"""
    peer: I64
    """the other rank"""
    delay_ns: I64
    texts: tuple[str, ...]
    """the name of each match in errors"""


def match_messages(traces: Sequence[LoweredTrace], ranks: Sequence[int], n_ranks: int) -> Messages:
    """Matches sends and receives of equal tag, sender, receiver and size.

    Raises ForerunError if a message goes to no other rank or has no size.
    """
    none = np.zeros(0, np.int64)
    keys, columns = [np.zeros((0, 4), np.int64)], [(none, none, np.zeros(0, bool), none)]
    for actor, (lowered, rank) in enumerate(zip(traces, ranks, strict=True)):
        node = np.flatnonzero((lowered.action == SEND) | (lowered.action == RECV))
        if not len(node):
            continue
        trace, rows = lowered.trace, lowered.row[node]
        is_send = lowered.action[node] == SEND
        peer = trace.peer[rows].astype(np.int64)
        bad = (peer < 0) | (peer >= n_ranks) | (peer == rank)
        _refuse(trace, rows, bad, f"rank {rank}", f"its peer must be another rank, 0 to {n_ranks - 1}")
        _refuse(trace, rows, trace.comm_size[rows] <= 0, f"rank {rank}", "a message needs a size above 0")
        source, sink = np.where(is_send, rank, peer), np.where(is_send, peer, rank)
        keys.append(np.stack([trace.comm_tag[rows] % _TAG_SPACE, source, sink, trace.comm_size[rows]], axis=1))
        columns.append((np.full(len(node), actor), node, is_send, peer))
    actor_of, node_of, is_send, peer = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    distinct, match = np.unique(np.concatenate(keys), axis=0, return_inverse=True)
    texts = tuple(f"tag {tag} from rank {a} to rank {b}, {size} bytes" for tag, a, b, size in distinct.tolist())
    unknown = np.full(len(node_of), UNKNOWN_NS, np.int64)
    return Messages(
        actor_of, node_of, is_send, match.reshape(-1), np.where(is_send, peer, actor_of), peer, unknown, texts
    )


def _matches(messages: Messages) -> Matches:
    """Returns the engine's table of pairs, all of them open."""
    n = len(messages.texts)
    sent = np.bincount(messages.match[messages.is_send], minlength=n)
    received = np.bincount(messages.match[~messages.is_send], minlength=n)
    return empty_matches(np.maximum(sent, received))


def empty_matches(counts: Sequence[int] | I64) -> Matches:
    """Returns a table of matches with `counts` pairs each. None of them is sent or received yet."""
    n, n_pairs = len(counts), int(sum(counts))
    return Matches(
        pointers(counts),
        np.zeros(n, np.int64),
        np.zeros(n, np.int64),
        np.zeros(n_pairs, np.int8),
        np.full(n_pairs, -1, np.int64),
        np.full(n_pairs, -1, np.int64),
    )
