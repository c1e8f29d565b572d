"""RankTrace, the execution trace of one rank in columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from forerun.core.program.types import I8, I32, I64


class NodeKind(IntEnum):
    """Chakra's NodeType."""

    INVALID = 0
    METADATA = 1
    MEM_LOAD = 2
    MEM_STORE = 3
    COMP = 4
    SEND = 5
    RECV = 6
    COLLECTIVE = 7


class CommType(IntEnum):
    """Chakra's CollectiveCommType."""

    NONE = -1
    ALL_REDUCE = 0
    REDUCE = 1
    ALL_GATHER = 2
    GATHER = 3
    SCATTER = 4
    BROADCAST = 5
    ALL_TO_ALL = 6
    REDUCE_SCATTER = 7
    REDUCE_SCATTER_BLOCK = 8
    BARRIER = 9


@dataclass(frozen=True, slots=True)
class RankTrace:
    """The nodes of one rank in file order: columns have shape (n,), CSR pointers (n + 1,).

    Dependencies are row numbers of this trace. A tensor has a name (into which STAGE writes its shape too) and a size.
    The k-th input of node i is entry `input_ptr[i] + k` of `input_tensor`.
    """

    node_id: I64
    kind: I8
    """NodeKind"""
    is_cpu: npt.NDArray[np.bool_]
    duration_us: I64
    num_ops: I64
    tensor_size: I64
    """bytes that a COMP or MEM node reads and writes, in the trace's bytes"""
    comm_type: I8
    """CommType"""
    comm_size: I64
    comm_tag: I64
    peer: I32
    """receiver of a SEND, sender of a RECV, else -1"""
    group: I32
    """index into `group_names` of a COLLECTIVE's communicator group, -1 for all ranks"""
    priority: I32
    data_ptr: I64
    data: I32
    """data dependencies"""
    ctrl_ptr: I64
    ctrl: I32
    """control dependencies"""
    input_ptr: I64
    input_tensor: I32
    output_ptr: I64
    output_tensor: I32
    tensor_bytes: I64
    """size of each tensor, in the trace's bytes"""
    group_names: tuple[str, ...]
    names: tuple[str, ...] = ()
    """node names; () if they were not read"""
    tensor_names: tuple[str, ...] = ()
    """tensor names; () if they were not read"""
    involved_dims: Mapping[int, tuple[bool, ...]] | None = None
    """row of a COLLECTIVE that names dimensions instead of a group -> which dimensions of the network take part"""
    has_tensors: bool = True
    """whether nodes list their inputs and outputs"""
    stream: I32 | None = None
    """the stream that each node names, -1 for none; None if no node names one"""
    process_groups: Mapping[str, tuple[int, ...]] | None = None
    """groups of METADATA nodes: name -> ranks, () for all"""

    def __len__(self) -> int:
        return len(self.node_id)


@runtime_checkable
class TracesByClass(Protocol):
    """The traces of all ranks, made on use. Traces of a class differ at most in the columns that `same_columns`
    omits.
    """

    @property
    def classes(self) -> Sequence[RankTrace]:
        """Returns the trace of the first rank of each class."""

    @property
    def class_of_rank(self) -> I32:
        """Returns the index into `classes` for each rank, (ranks,)."""

    @property
    def group_names_of_ranks(self) -> Sequence[tuple[str, ...]]:
        """Returns the names of the communicator groups of each rank, as column `group` of its trace numbers them."""

    def __len__(self) -> int: ...

    def __getitem__(self, rank: int, /) -> RankTrace: ...


def new_trace(n: int, **columns: Any) -> RankTrace:
    """Returns a trace of `n` nodes with these columns; the others are 0, -1 for "none", or empty lists."""
    zero, no_entry = np.zeros(n, np.int64), np.zeros(0, np.int32)
    none, small = np.full(n, -1, np.int32), np.zeros(n, np.int8)
    defaults = dict.fromkeys(("node_id", "duration_us", "num_ops", "tensor_size", "comm_size", "comm_tag"), zero)
    defaults |= dict.fromkeys(("data_ptr", "ctrl_ptr", "input_ptr", "output_ptr"), np.zeros(n + 1, np.int64))
    entries = dict.fromkeys(("data", "ctrl", "input_tensor", "output_tensor"), no_entry)
    others = {"kind": small, "is_cpu": small.astype(np.bool_), "comm_type": small - 1, "priority": none + 1}
    lists = {"peer": none, "group": none, "tensor_bytes": zero[:0], "group_names": ()}
    return RankTrace(**{**defaults, **entries, **others, **lists, **columns})


_NOT_COMPARED = {
    *("node_id", "group_names", "names", "tensor_names"),
    *("involved_dims", "process_groups", "peer", "comm_tag"),
}
_COMPARED = [field.name for field in fields(RankTrace) if field.name not in _NOT_COMPARED]


def same_columns(a: RankTrace, b: RankTrace, order: I64 | None = None) -> bool:
    """Returns whether two traces differ at most in node ids (but not in their order), names, group members, peers and
    tags.

    `order`, if given, holds the rows of `b` in the order of their node ids.
    """
    if a is b:
        return True
    if len(a) != len(b) or a.involved_dims != b.involved_dims or a.has_tensors != b.has_tensors:
        return False
    if (a.stream is None) != (b.stream is None):
        return False
    if a.node_id is not b.node_id:
        order = np.argsort(b.node_id, kind="stable") if order is None else order
        if not (np.diff(a.node_id[order]) > 0).all():
            return False
    return all(x is y or np.array_equal(x, y) for x, y in ((getattr(a, name), getattr(b, name)) for name in _COMPARED))


CommGroups = Mapping[str, tuple[int, ...]]
"""communicator groups: name -> ranks in ring order"""
