"""The Program: the work of one optimizer step on each distinct rank, in columns.

Three foldings keep it small. *Ops* are distinct (kind, shapes, dtype) signatures, costed once. *Blocks* are runs of
nodes that repeat (a layer's forward, a layer's backward), stored once. *Rank classes* are ranks that do the same work
at the same place of the network, simulated once.

The order of execution is that of CUDA. A rank class executes its blocks in host issue order. Every node goes to a
stream, and streams run in order. Events order nodes across streams: a node may *record* an event slot. A node that
waits for a slot waits for the node that last recorded the slot before it in issue order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.core.program.groups import CommGroup
from forerun.core.program.kinds import (
    KINDS,
    WIDTH,
    WORK,
    Attention,
    Delay,
    Details,
    Direction,
    Gemm,
    HostCopy,
    OpKind,
    Scan,
    TokenExchange,
    Transfer,
    Work,
)

I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]
I16 = npt.NDArray[np.int16]
I8 = npt.NDArray[np.int8]
F64 = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


class Phase(IntEnum):
    FORWARD = 0
    BACKWARD = 1
    RECOMPUTE = 2
    OPTIMIZER = 3


class Stream(IntEnum):
    COMPUTE = 0
    GATHER = 1
    """parameter all-gathers"""
    REDUCE = 2
    """gradient reductions"""
    TP = 3
    CP = 4
    EP = 5
    PP_SEND = 6
    """activations to the next pipeline stage; gradients to the previous one have streams of their own"""
    PP_RECV = 7
    COPY = 8
    """device-host copies"""
    PP_SEND_GRAD = 9
    PP_RECV_GRAD = 10
    PP_SEND_BACK = 11
    """this and the next three: the transfers on the way back of a V schedule, where the neighbours are swapped"""
    PP_RECV_BACK = 12
    PP_SEND_GRAD_BACK = 13
    PP_RECV_GRAD_BACK = 14


N_STREAMS = len(Stream)


class Collective(IntEnum):
    NONE = 0
    ALL_REDUCE = 1
    ALL_GATHER = 2
    REDUCE_SCATTER = 3
    ALL_TO_ALL = 4
    BROADCAST = 5
    SEND_RECV = 6


class Category(IntEnum):
    """The purpose of a tensor: a category of the memory report."""

    PARAMETER = 0
    GRADIENT = 1
    OPTIMIZER = 2
    ACTIVATION = 3
    """tensors saved for backward"""
    TEMPORARY = 4
    """tensors that are allocated and freed inside a block"""
    UNSHARDED = 5
    """unsharded parameters and unreduced gradients"""
    LOGITS = 6
    COMMUNICATION = 7
    GRAPH_POOL = 8
    """tensors of CUDA graphs in a private pool, which PyTorch reserves and does not count as allocated"""


N_CATEGORIES = len(Category)


class OpRow(NamedTuple):
    """One row of an OpTable, field by field."""

    name: str
    kind: int
    dtype: str = ""
    kernel: str = ""
    details: tuple[int, ...] = ()
    """the values of the columns that only the row's kind has"""
    flops: float = 0.0
    bytes_read: float = 0.0
    bytes_written: float = 0.0
    collective: int = 0
    group: int = -1
    bytes_comm: float = 0.0
    launches: int = 1

    def without_sizes(self) -> tuple[object, ...]:
        """Returns the fields that identify the row, without its sizes."""
        return (self.name, self.kind, self.dtype, self.kernel, self.collective, self.group)

    def amounts(self) -> tuple[float, float, float, float, int]:
        """Returns FLOPs, bytes read, written and communicated, and launches."""
        return (self.flops, self.bytes_read, self.bytes_written, self.bytes_comm, self.launches)


@dataclass(frozen=True, slots=True)
class OpTable:
    """One row for each distinct operation.

    Columns that only one kind has are in `details`, and are read by name: `ops.gemm(rows).m`,
    `ops.delay(rows).duration_ps`.
    """

    name: tuple[str, ...]
    kind: I8
    """OpKind of each op, (n_ops,)"""
    dtype: tuple[str, ...]
    """dtype of the arithmetic, or of the bytes moved; empty if it is not known"""
    kernel: tuple[str, ...]
    """for attention its kernel; for collectives the dispatcher whose own kernel sends tokens; for memory-bound ops
    their kind, which determines their share of HBM's bandwidth; otherwise empty
    """
    details: I64
    """(n_ops, N_DETAILS): the columns of each row's own kind (`kinds.KINDS`), then zeros"""
    flops: F64
    bytes_read: F64
    bytes_written: F64
    collective: I8
    group: I16
    """index into Program.groups, -1 for none"""
    bytes_comm: F64
    """bytes of a copy; for a collective or transfer, of the full buffer by nccl-tests' convention (for an all-gather
    the gathered output, for a reduce-scatter the whole input), (n_ops,)"""
    launches: I16
    """kernels that the host launches for this op"""

    def __len__(self) -> int:
        return len(self.kind)

    def gemm(self, rows: I64) -> Gemm[I64]:
        """Returns the columns of `rows`, all of them matrix products."""
        return Gemm(*self.details[rows, : WIDTH[OpKind.GEMM]].T)

    def attention(self, rows: I64) -> Attention[I64]:
        """Returns the columns of `rows`, all of them attention kernels."""
        return Attention(*self.details[rows, : WIDTH[OpKind.ATTENTION]].T)

    def scan(self, rows: I64) -> Scan[I64]:
        """Returns the columns of `rows`, all of them recurrences."""
        return Scan(*self.details[rows, : WIDTH[OpKind.SCAN]].T)

    def token_exchange(self, row: int) -> TokenExchange[int]:
        """Returns the routing of the tokens that `row`, a dispatcher's kernel, sends."""
        return TokenExchange(*self.details[row, : WIDTH[OpKind.COLLECTIVE]].tolist())

    def transfer(self, rows: I64) -> Transfer[I64]:
        """Returns the columns of `rows`, all of them sends and receives."""
        return Transfer(self.details[rows, 0])

    def host_copy(self, rows: I64) -> HostCopy[I64]:
        """Returns the columns of `rows`, all of them copies between device and host memory."""
        return HostCopy(self.details[rows, 0])

    def delay(self, rows: I64) -> Delay[I64]:
        """Returns the columns of `rows`, all of them delays."""
        return Delay(self.details[rows, 0])

    def details_of(self, row: int) -> Details[int]:
        """Returns the columns that only the kind of `row` has."""
        kind = OpKind(self.kind[row])
        return KINDS[kind].details(*self.details[row, : WIDTH[kind]].tolist())

    # Masks compare with values of enums: numpy asks the class of an enum for its protocols, which takes longer.

    @property
    def work(self) -> I64:
        """Returns the resource that each op uses, a `Work`, (n_ops,)."""
        return WORK[self.kind]

    @property
    def is_compute(self) -> Mask:
        """Returns the mask (n_ops,) of the ops that are kernels on the device."""
        return np.asarray(self.work == Work.COMPUTE.value)

    @property
    def is_communication(self) -> Mask:
        """Returns the mask (n_ops,) of the ops that are collectives or transfers between ranks."""
        return np.asarray(self.work == Work.COMMUNICATION.value)

    @property
    def is_host_copy(self) -> Mask:
        """Returns the mask (n_ops,) of the ops that copy between device and host memory."""
        return np.asarray(self.work == Work.COPY.value)

    @property
    def is_delay(self) -> Mask:
        """Returns the mask (n_ops,) of the ops that are fixed times."""
        return np.asarray(self.work == Work.DELAY.value)

    @property
    def is_collective(self) -> Mask:
        """Returns the mask (n_ops,) of the ops that are collectives."""
        return np.asarray(self.kind == OpKind.COLLECTIVE.value)

    @property
    def is_transfer(self) -> Mask:
        """Returns the mask (n_ops,) of the ops that are sends, receives or both."""
        return np.asarray(self.kind == OpKind.P2P.value)

    @property
    def sends(self) -> Mask:
        """Returns the mask (n_ops,) of the ops that are sends."""
        return np.asarray(self.is_transfer & (self.details[:, 0] == Direction.OUT))

    @property
    def is_memory_bound(self) -> Mask:
        """Returns the mask (n_ops,) of the ops that are memory-bound kernels."""
        return np.asarray(self.kind == OpKind.MEMORY.value)

    @property
    def is_gemm(self) -> Mask:
        """Returns the mask (n_ops,) of the ops that are matrix products."""
        return np.asarray(self.kind == OpKind.GEMM.value)

    @property
    def is_scan(self) -> Mask:
        """Returns the mask (n_ops,) of the ops that are recurrences."""
        return np.asarray(self.kind == OpKind.SCAN.value)

    @property
    def is_attention(self) -> Mask:
        """Returns the mask (n_ops,) of the ops that are fused attention."""
        return np.asarray(self.kind == OpKind.ATTENTION.value)

    def rows(self) -> list[OpRow]:
        """Returns all rows, as `OpTableBuilder.add` takes them."""
        columns = {
            name: column if isinstance(column, tuple) else column.tolist() for name, column in self._columns().items()
        }
        pairs = zip(columns["details"], columns["kind"], strict=True)
        columns["details"] = [tuple(row[: WIDTH[kind]]) for row, kind in pairs]
        return [OpRow(*row) for row in zip(*columns.values(), strict=True)]

    def take(self, rows: Sequence[int] | I64) -> OpTable:
        """Returns the table of `rows` alone, in their order."""
        numbers = np.asarray(rows, np.int64)
        columns: dict[str, Any] = {
            name: tuple(column[row] for row in numbers.tolist()) if isinstance(column, tuple) else column[numbers]
            for name, column in self._columns().items()
        }
        return OpTable(**columns)

    def _columns(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in OpRow._fields}


def joined_ops(tables: Sequence[OpTable]) -> OpTable:
    """Joins the rows of `tables`, one table after the other."""
    columns: dict[str, Any] = {}
    for name in OpRow._fields:
        parts = [getattr(table, name) for table in tables]
        columns[name] = sum(parts, ()) if isinstance(parts[0], tuple) else np.concatenate(parts)
    return OpTable(**columns)


@dataclass(frozen=True, slots=True)
class Block:
    """A run of nodes that repeats. Node indices are local to the block."""

    name: str
    op: I32
    stream: I8
    phase: I8
    module: I32
    """index into Program.modules, relative to the step's layer"""
    pred_ptr: I32
    """CSR row pointer, (n + 1)"""
    pred: I32
    """>= 0: node of this block; < 0: event slot -1 - pred"""
    record: I16
    """event slot recorded when the node ends, -1 for none"""
    channel: I16
    """rendezvous channel into Program.channels, -1 for none"""
    sync: I8
    """1 if the host waits for the node before it goes on"""
    tensor_bytes: I64
    tensor_category: I8
    tensor_alloc: I32
    """node before which the tensor is allocated; -1: it is allocated before the block"""
    tensor_free: I32
    """node after which it is freed; -1: it outlives the block"""

    def __len__(self) -> int:
        return len(self.op)

    @property
    def n_pred(self) -> I32:
        """Returns the number of predecessors of each node, (nodes,)."""
        return self.pred_ptr[1:] - self.pred_ptr[:-1]


@dataclass(frozen=True, slots=True)
class RankClass:
    """Ranks that execute the same steps at the same place of the network."""

    name: str
    n_ranks: int
    block: I32
    """block executed at each step"""
    microbatch: I32
    layer: I32
    resident_bytes: I64
    """bytes by Category that stay allocated through the step, (N_CATEGORIES,)"""


@dataclass(frozen=True, slots=True)
class Channel:
    """A rendezvous between rank classes: the k-th nodes of all members on this channel start together."""

    name: str
    members: tuple[int, ...]
    """indices of the rank classes that take part"""


@dataclass(frozen=True)
class Program:
    """One optimizer step of every rank class."""

    ops: OpTable
    blocks: tuple[Block, ...]
    rank_classes: tuple[RankClass, ...]
    groups: tuple[CommGroup, ...]
    channels: tuple[Channel, ...]
    modules: tuple[str, ...]
    meta: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FlatProgram:
    """A Program with its blocks expanded: one entry for each node, rank class by rank class, in issue order."""

    n_ops: int
    class_ptr: I64
    """first node of each rank class, (n_classes + 1)"""
    op: I32
    stream: I8
    phase: I8
    step: I32
    """index of the node's step in its rank class, (nodes,)"""
    module: I32
    pred_ptr: I64
    pred: I32
    """CSR predecessors, as node numbers of the whole program"""
    meeting: I32
    """rendezvous number of each node, -1 for none; all nodes with one number start together"""
    meeting_size: I32
    """number of participants of each rendezvous, (meetings,)"""
    sync: I8
    meeting_channel: I32
    """channel of each rendezvous, (meetings,)"""
    class_names: tuple[str, ...]
    channel_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.op)
