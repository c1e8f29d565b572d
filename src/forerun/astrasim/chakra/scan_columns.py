"""Holds what the scanner of a trace file writes: columns of nodes, their lists, repeated values, and counters."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.astrasim.chakra.attributes import PARTICIPANTS
from forerun.astrasim.chakra.wire import I64, N_FOUND
from forerun.common.interned import Texts

I8 = npt.NDArray[np.int8]
I32 = npt.NDArray[np.int32]
U64 = npt.NDArray[np.uint64]


class Status(IntEnum):
    """The reason for which a scan ended."""

    MORE = 0
    """the buffer is over, or ends inside a message"""
    GROW = 1
    """there is no room for the next node"""
    UNUSUAL = 2
    """the next message is one that the scanner doesn't know"""


class State(IntEnum):
    """Counters that go from one scan to the next."""

    MESSAGES = 0
    NODES = 1
    DATA = 2
    CTRL = 3
    INPUTS = 4
    OUTPUTS = 5
    HAS_STREAMS = 6
    LACKS_TENSORS = 7
    """1 if a node has no list of inputs or outputs"""
    WANTED = 8
    """bytes that the next message takes in the buffer, as far as they are known"""
    METADATA_FIRST = 9
    METADATA_END = 10
    """where the first message lies in the buffer of the first scan that met it"""


class Rows(NamedTuple):
    """Columns of all nodes, as RankTrace has them unless said otherwise. Pointers have an entry more."""

    node_id: I64
    kind: I8
    is_cpu: npt.NDArray[np.bool_]
    duration_us: I64
    num_ops: I64
    tensor_size: I64
    comm_type: I8
    comm_size: I64
    comm_tag: I64
    peer: I32
    participants: I32
    """number of the attribute that says who takes part, -1 for none"""
    priority: I32
    stream: I32
    data_ptr: I64
    ctrl_ptr: I64
    input_ptr: I64
    output_ptr: I64
    name_first: I64
    """where the name lies in the buffer of the scan that read the node"""
    name_end: I64
    text_first: I64
    """where the text of the inputs lies in that buffer, which METADATA nodes have"""
    text_end: I64

    @classmethod
    def empty(cls, n_nodes: int) -> Rows:
        """Returns columns for `n_nodes` nodes that hold nothing yet."""
        wide, narrow, small = np.int64, np.int32, np.int8
        types = (wide, small, np.bool_, wide, wide, wide, small, wide, wide, narrow, narrow, narrow, narrow)
        columns = (np.empty(n_nodes, one) for one in types)
        pointers = (np.zeros(n_nodes + 1, wide) for _ in range(4))
        spans = (np.empty(n_nodes, wide) for _ in range(4))
        return cls(*columns, *pointers, *spans)  # type: ignore[arg-type]


class Lists(NamedTuple):
    """Entries of all nodes: ids that they depend on, numbers of tensors."""

    data: U64
    ctrl: U64
    inputs: I32
    outputs: I32

    @classmethod
    def empty(cls, n_ids: int, n_tensors: int) -> Lists:
        """Returns room for so many entries."""
        data, ctrl = (np.empty(n_ids, np.uint64) for _ in range(2))
        inputs, outputs = (np.empty(n_tensors, np.int32) for _ in range(2))
        return cls(data, ctrl, inputs, outputs)


class Known(NamedTuple):
    """Holds repeated values: names of attributes (the first ones are `KEYS`), lists of participants, and tensors."""

    names: Texts
    participants: Texts
    tensors: Texts
    tensor_bytes: I64


KEYS = (
    *("num_ops", "tensor_size", "is_cpu_op", "stream", "comm_type", "comm_size", "comm_tag", "comm_priority"),
    *("comm_dst", "comm_src", "inputs", "outputs"),
    *PARTICIPANTS,
)
"""the attributes that are read, those that say who takes part in order of precedence"""


class Scratch(NamedTuple):
    """Holds the values that the scanner keeps of one node and of one attribute."""

    node: I64
    attributes: npt.NDArray[np.int64]
    """(KEYS, values that are kept of each)"""
    found: I64

    @classmethod
    def empty(cls) -> Scratch:
        """Returns room for one node."""
        return cls(np.zeros(9, np.int64), np.zeros((len(KEYS), 7), np.int64), np.zeros(N_FOUND, np.int64))
