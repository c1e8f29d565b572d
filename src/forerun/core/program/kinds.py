"""The kinds of operations: the name of each, the resource that it uses, and the columns that only it has.

A new kind is a member of `OpKind` and an entry of `KINDS` here, a method of `OpTableBuilder` and a time in
`core/cost/op_costs.py`. Readers of a Program use the entry through the properties of `OpTable`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, Generic, TypeVar

import numpy as np

from forerun.core.program.causes import Cause

T = TypeVar("T")
ATTENTION_BACKWARD_FLOPS = 5 / 2
"""FLOPs of attention's backward kernel over those of its forward kernel: five products for each pair of a query and a
key where the forward kernel does two (FlashAttention-2, arXiv 2307.08691, section 4.1)"""
_NONE: Any = 0
_ONE: Any = 1


class OpKind(IntEnum):
    GEMM = 0
    """matrix products, and convolutions as implicit ones"""
    ATTENTION = 1
    """fused attention kernels"""
    MEMORY = 2
    """memory-bound kernels: element-wise, norms, optimizer, casts, copies on the device"""
    COLLECTIVE = 3
    P2P = 4
    """a send, a receive, or both at once"""
    HOST_COPY = 5
    """copy between device and host memory"""
    DELAY = 6
    """fixed time on its stream"""
    SCAN = 7
    """recurrences along the sequence: linear attention, state-space models"""


class Work(IntEnum):
    """The resource that an operation uses."""

    COMPUTE = 0
    """the multiprocessors of the device"""
    COMMUNICATION = 1
    """links between devices"""
    COPY = 2
    """the link between device and host memory"""
    DELAY = 3
    """its stream alone"""


class GemmRole(IntEnum):
    """The role of a GEMM in a layer: its forward product, or one of its gradients."""

    FORWARD = 0
    DGRAD = 1
    """gradient of the input"""
    WGRAD = 2
    """gradient of the weight"""


class Direction(IntEnum):
    """The direction in which bytes move, seen from the device that runs the operation."""

    EITHER = 0
    """both ways at once (a hop of a ring), or not known"""
    OUT = 1
    """a send, or a copy to host memory"""
    IN = -1
    """a receive, or a copy from host memory"""


# -- columns by kind -----------------------------------------------------------------------------------------------
# A class describes one row (with ints) or several (with arrays). `OpTable.details` holds the columns in this order.


@dataclass(frozen=True, slots=True)
class Details(Generic[T]):
    """The columns that only one kind has; the base class, for kinds without any."""

    def values(self) -> tuple[T, ...]:
        """Returns the columns in order."""
        return tuple(getattr(self, name) for name in columns_of(type(self)))

    def words(self, kernel: str) -> str:
        """Returns the shape of one operation that runs as `kernel`, for reports; empty if it has none."""
        return ""


@dataclass(frozen=True, slots=True)
class Gemm(Details[T]):
    """`batch` products of (m, k) by (k, n)."""

    m: T
    n: T
    k: T
    batch: T = _ONE
    role: T = _NONE
    """the GemmRole"""
    accumulate_bytes: T = _NONE
    """bytes per element of the buffer that the result is added to, 0 if the result is stored"""
    kernels: T = _ONE
    """number of kernels: 1 for a batched product, `batch` for a grouped one"""
    operand_bytes: T = _NONE
    """bytes of the operands of an implicit product, whose elements are read for many taps of a convolution; else 0"""
    result_bytes: T = _NONE
    """bytes of the result of an implicit product, else 0"""

    def words(self, kernel: str) -> str:
        return f"of {self.m} x {self.n} x {self.k}"


@dataclass(frozen=True, slots=True)
class Attention(Details[T]):
    """Fused attention of `seq_q` queries to `seq_kv` keys."""

    batch: T
    heads: T
    kv_heads: T
    seq_q: T
    seq_kv: T
    head_dim: T
    """size of a head of queries and keys"""
    causal: T
    """1 if a mask leaves out half of the square on the diagonal"""
    backward: T
    v_head_dim: T
    """size of a head of values"""

    def words(self, kernel: str) -> str:
        return f"({kernel}, head size {self.head_dim}, {self.seq_kv} keys)"


@dataclass(frozen=True, slots=True)
class Scan(Details[T]):
    """A recurrence over `seq` tokens, in which each head carries a state of `key_dim` x `value_dim`."""

    batch: T
    heads: T
    key_heads: T
    seq: T
    key_dim: T
    value_dim: T
    backward: T

    def words(self, kernel: str) -> str:
        return f"({kernel}, {self.heads} states of {self.key_dim} x {self.value_dim})"


@dataclass(frozen=True, slots=True)
class TokenExchange(Details[T]):
    """The routing of the tokens that a dispatcher's own kernel sends; all 0 for NCCL's collectives.

    A router chooses `top_groups` of `n_groups` equal groups of experts, and `top_k` experts in these.
    """

    n_experts: T = _NONE
    top_k: T = _NONE
    n_groups: T = _NONE
    top_groups: T = _NONE
    combine: T = _NONE
    """1 if results go back to the tokens' ranks, 0 if tokens go to their experts"""


@dataclass(frozen=True, slots=True)
class Transfer(Details[T]):
    """A send or a receive between two ranks."""

    direction: T


@dataclass(frozen=True, slots=True)
class HostCopy(Details[T]):
    """A copy between device and host memory."""

    direction: T


@dataclass(frozen=True, slots=True)
class Delay(Details[T]):
    """A fixed time on a stream."""

    duration_ps: T


def columns_of(details: type[Details[Any]]) -> tuple[str, ...]:
    """Returns the names of the columns in order."""
    return _COLUMNS[details]


_COLUMNS: dict[type[Details[Any]], tuple[str, ...]] = {
    one: tuple(field.name for field in fields(one))
    for one in (Details, Gemm, Attention, Scan, TokenExchange, Transfer, HostCopy, Delay)
}
N_DETAILS = max(map(len, _COLUMNS.values()))


# -- the kinds -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kind:
    """The properties of all operations of a kind."""

    work: Work
    label: str
    """name of the operations in reports, in the plural; kinds with the same label share a line"""
    cause: Cause
    """cause of their time on the compute stream"""
    details: type[Details[Any]] = Details
    sizes: int = 0
    """number of the first details that are sizes; none of them is 0"""


KINDS = {
    OpKind.GEMM: Kind(Work.COMPUTE, "matrix products", Cause.MATMUL, Gemm, sizes=4),
    OpKind.ATTENTION: Kind(Work.COMPUTE, "attention", Cause.ATTENTION, Attention, sizes=6),
    OpKind.MEMORY: Kind(Work.COMPUTE, "memory-bound kernels", Cause.MEMORY_BOUND),
    OpKind.COLLECTIVE: Kind(Work.COMMUNICATION, "collectives", Cause.MEMORY_BOUND, TokenExchange),
    OpKind.P2P: Kind(Work.COMMUNICATION, "collectives", Cause.MEMORY_BOUND, Transfer),
    OpKind.HOST_COPY: Kind(Work.COPY, "copies to the host", Cause.MEMORY_BOUND, HostCopy),
    OpKind.DELAY: Kind(Work.DELAY, "fixed delays", Cause.HOST, Delay),
    OpKind.SCAN: Kind(Work.COMPUTE, "recurrences", Cause.ATTENTION, Scan),
}
WORK = np.array([KINDS[kind].work for kind in OpKind])
"""Work of every kind, (n_kinds,)"""
WIDTH = [len(columns_of(KINDS[kind].details)) for kind in OpKind]
"""number of columns of `OpTable.details` that every kind uses, (n_kinds,)"""
