"""The Program: what one optimizer step executes on each distinct rank, in columns.

Three foldings keep it small. *Ops* are distinct (kind, shapes, dtype) signatures, costed once. *Blocks* are runs of
nodes that repeat (a layer's forward, a layer's backward), stored once. *Rank classes* are ranks that do the same work
at the same place of the network, simulated once.

Order is CUDA's. A rank class executes its blocks in host issue order; every node goes to a stream, streams run in
order, and events order nodes across streams: a node may *record* an event slot, and waits for the node that last
recorded the slot before it in issue order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from forerun.core.program.groups import CommGroup

I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]
I16 = npt.NDArray[np.int16]
I8 = npt.NDArray[np.int8]
F64 = npt.NDArray[np.float64]


class OpKind(IntEnum):
    GEMM = 0
    ATTENTION = 1
    MEMORY = 2
    """memory-bound kernels: element-wise, norms, optimizer, casts, copies on the device"""
    COLLECTIVE = 3
    P2P = 4
    HOST_COPY = 5
    """copy between device and host memory"""
    DELAY = 6
    """fixed time on its stream (`bytes_read` is picoseconds)"""


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
    """the same four on the way back of a V schedule, whose neighbours are the other way round"""
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
    """What a tensor is for; the categories of the memory report."""

    PARAMETER = 0
    GRADIENT = 1
    OPTIMIZER = 2
    ACTIVATION = 3
    """saved for backward"""
    TEMPORARY = 4
    """lives within a block"""
    UNSHARDED = 5
    """gathered parameters and unreduced gradients"""
    LOGITS = 6
    COMMUNICATION = 7


N_CATEGORIES = len(Category)


@dataclass(frozen=True, slots=True)
class OpTable:
    """One row for each distinct operation.

    `dims` by kind: GEMM (m, n, k, batch, role, accumulate_bytes, kernels, operand_bytes, result_bytes) with role
    0 forward, 1 dgrad, 2 wgrad, and the bytes of operands and result of an implicit product (a convolution's), else 0;
    ATTENTION (batch, heads, kv_heads, seq_q, seq_kv, head_dim, causal, backward, v_head_dim).
    COLLECTIVE and P2P: `bytes_comm` is the full buffer, nccl-tests' convention (for an all-gather the gathered
    output, for a reduce-scatter the whole input).
    """

    name: tuple[str, ...]
    kind: I8
    dtype: tuple[str, ...]
    """dtype of the arithmetic, or the attention kernel's name for ATTENTION rows"""
    dims: I64
    """(n_ops, 9)"""
    flops: F64
    bytes_read: F64
    bytes_written: F64
    collective: I8
    group: I16
    """index into Program.groups, -1 for none"""
    bytes_comm: F64
    launches: I16
    """kernels that the host launches for this op"""

    def __len__(self) -> int:
        return len(self.kind)


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
    """1 where the host waits for the node before it goes on"""
    tensor_bytes: I64
    tensor_category: I8
    tensor_alloc: I32
    """node before which the tensor is allocated; -1: it was there before the block"""
    tensor_free: I32
    """node after which it is freed; -1: it outlives the block"""

    def __len__(self) -> int:
        return len(self.op)


@dataclass(frozen=True, slots=True)
class RankClass:
    """Ranks that execute the same steps at the same place."""

    name: str
    n_ranks: int
    block: I32
    """block executed at each step"""
    microbatch: I32
    layer: I32
    resident_bytes: I64
    """bytes by Category that live through the step, (N_CATEGORIES,)"""


@dataclass(frozen=True, slots=True)
class Channel:
    """A rendezvous between rank classes: the k-th node of each member on this channel meet."""

    name: str
    members: tuple[int, ...]
    """rank classes that take part"""


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
    """A Program with its blocks expanded: one entry a node, rank classes one after the other, in issue order."""

    n_ops: int
    class_ptr: I64
    """first node of each rank class, (n_classes + 1)"""
    op: I32
    stream: I8
    phase: I8
    step: I32
    """which step of its rank class the node belongs to"""
    module: I32
    pred_ptr: I64
    pred: I32
    """CSR predecessors, node numbers of the whole program"""
    meeting: I32
    """rendezvous number, -1 for none; every node with the same number starts together"""
    meeting_size: I32
    """participants of each rendezvous"""
    sync: I8
    meeting_channel: I32
    """channel of each rendezvous"""
    class_names: tuple[str, ...]
    channel_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.op)
