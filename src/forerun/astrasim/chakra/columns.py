"""Collects the nodes of a trace, one at a time, into the columns of a RankTrace."""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.astrasim.chakra.attributes import (
    DIMENSION_SPELLINGS,
    GROUP_SPELLINGS,
    Value,
    decoded,
    dimensions,
    is_launcher,
    participants_attribute,
    tensor_list,
    text_of,
    truth,
    whole_number,
)
from forerun.astrasim.chakra.graph import NodeRows, as_numpy, feasible
from forerun.astrasim.chakra.groups import process_groups
from forerun.astrasim.chakra.trace import CommType, NodeKind, RankTrace
from forerun.core.program.types import I32, I64

_CACHED = 1 << 15
"""decoded attributes that are kept; the trace of a rank rarely has more distinct ones"""
_METADATA, _SEND, _COLLECTIVE = int(NodeKind.METADATA), int(NodeKind.SEND), int(NodeKind.COLLECTIVE)
_LAST_KIND, _LAST_COMM_TYPE = int(max(NodeKind)), int(max(CommType))
_INT32 = 1 << 31


class AttributeCache(dict[bytes, tuple[str, Value]]):
    """Maps the bytes of an AttributeProto to its name and value, which it decodes on first use.

    The value of a list of tensors is a pair of lists: names and sizes. One cache serves all ranks of a run, since they
    differ little.
    """

    def __missing__(self, blob: bytes) -> tuple[str, Value]:
        name, value = decoded(blob)
        return self.keep(blob, (name, tensor_list(value, name) if name in ("inputs", "outputs") else value))

    def keep(self, blob: bytes, found: tuple[str, Value]) -> tuple[str, Value]:
        """Stores the name and value of `blob`; memory stays bounded."""
        if len(self) >= _CACHED:
            self.clear()
        self[blob] = found
        return found


class NumberCache(AttributeCache):
    """An AttributeCache that doesn't decode lists of tensors and takes them for empty."""

    def __missing__(self, blob: bytes) -> tuple[str, Value]:
        # An attribute begins with the tag of its name, the length of the name and the name.
        if blob.startswith((b"\n\x06inputs", b"\n\x07outputs")):
            return ("inputs" if blob[1] == len("inputs") else "outputs"), ([], [])
        return self.keep(blob, decoded(blob))


def new_cache(tensors: bool) -> AttributeCache:
    """Returns an empty cache for reading ranks with or without tensors."""
    return AttributeCache() if tensors else NumberCache()


class _TensorTable:
    """Names and sizes of the tensors of a rank. The first size that the trace gives a tensor counts."""

    def __init__(self) -> None:
        self.rows: dict[str, int] = {}
        self.sizes = array("q")

    def of(self, tensors: tuple[list[str], list[str]]) -> list[int]:
        """Returns the rows of a list of tensors. Raises ValueError for a size that is not a number."""
        names, sizes = tensors
        rows = self.rows
        try:
            return [rows[name] for name in names]
        except KeyError:
            return [self._row(name, size) for name, size in zip(names, sizes, strict=True)]

    def _row(self, tensor: str, text: str) -> int:
        row = self.rows.get(tensor)
        if row is None:
            size = whole_number(text, f"size of tensor {tensor!r}")
            if size < 0:
                raise ValueError(f"size of tensor {tensor!r} is {size}, which is negative")
            row = self.rows[tensor] = len(self.sizes)
            self.sizes.append(size)
        return row


class Columns:
    """The columns of one rank's trace while it is read."""

    def __init__(self, names: bool, tensors: bool, cache: AttributeCache | None = None) -> None:
        self._with_names, self._with_tensors = names, tensors
        self._table = _TensorTable()
        self._attributes = new_cache(tensors) if cache is None else cache
        self._names: list[str] = []
        self._groups: dict[str, int] = {}
        self._dimensions: dict[int, tuple[bool, ...]] = {}
        self._lists_tensors = True
        self._node = [array(code) for code in _NODE_COLUMNS.values()]
        self._communication = [array(code) for code, _ in _COMMUNICATION_COLUMNS.values()]
        self._communicating = array("q")
        self._data, self._ctrl = array("Q"), array("Q")
        self._inputs, self._outputs = array("i"), array("i")
        self._pointers = [array("q", [0]) for _ in range(4)]
        self._streams = array("i")
        self._process_groups: dict[str, tuple[int, ...]] = {}

    def __len__(self) -> int:
        return len(self._node[0])

    def add(self, node: Any) -> None:
        """Adds one RawNode. Raises ValueError, which describes the error in the node, or OverflowError."""
        cache = self._attributes
        attributes = dict([cache[blob] for blob in node.attr])
        kind = node.type
        if not 0 <= kind <= _LAST_KIND:
            raise ValueError(f"unknown node type {kind}")
        if _SEND <= kind <= _COLLECTIVE:
            self._add_communication(kind, attributes)
        elif kind == _METADATA:
            self._process_groups.update(process_groups(node.inputs.values))
        if "stream" in attributes:
            self._add_stream(whole_number(attributes["stream"] or 0, "stream"))
        node_id, kinds, is_cpu, duration, num_ops, tensor_size = self._node
        node_id.append(node.id)
        kinds.append(kind)
        is_cpu.append(truth(attributes["is_cpu_op"], "is_cpu_op") if "is_cpu_op" in attributes else 0)
        duration.append(node.duration_micros)
        num_ops.append(_amount(attributes, "num_ops") if "num_ops" in attributes else 0)
        tensor_size.append(_amount(attributes, "tensor_size") if "tensor_size" in attributes else 0)
        self._add_lists(node, attributes)

    def _add_communication(self, kind: int, attributes: dict[str, Value]) -> None:
        comm_type = peer = group = -1
        if kind == _COLLECTIVE and is_launcher(attributes):
            attributes = {**attributes, "comm_size": attributes.get("comm_size") or 0}
        elif kind == _COLLECTIVE:
            comm_type = whole_number(_given(attributes, "comm_type"), "comm_type")
            if not 0 <= comm_type <= _LAST_COMM_TYPE:
                raise ValueError(f"unknown comm_type {comm_type}")
            group = self._group(attributes)
        else:
            name = "comm_dst" if kind == _SEND else "comm_src"
            if attributes.get(name) is None and participants_attribute(attributes) in GROUP_SPELLINGS:
                group = self._group(attributes)  # PyTorch's traces name the group of two instead
            else:
                peer = whole_number(_given(attributes, name), name)
                if not 0 <= peer < _INT32:
                    raise ValueError(f"{name} is {peer}, not a rank")
        priority = whole_number(attributes.get("comm_priority") or 0, "comm_priority")
        if not -_INT32 <= priority < _INT32:
            raise ValueError(f"comm_priority is {priority}, which does not fit in 32 bits")
        _given(attributes, "comm_size")
        size, tag = _amount(attributes, "comm_size"), whole_number(attributes.get("comm_tag") or 0, "comm_tag")
        values = (comm_type, size, tag, peer, group, priority)
        for column, value in zip(self._communication, values, strict=True):
            column.append(value)
        self._communicating.append(len(self))

    def _add_stream(self, stream: int) -> None:
        if not 0 <= stream < _INT32:
            raise ValueError(f"stream is {stream}, not a stream")
        self._streams.extend([-1] * (len(self) - len(self._streams)))
        self._streams.append(stream)

    def _group(self, attributes: dict[str, Value]) -> int:
        attribute = participants_attribute(attributes)
        if attribute in DIMENSION_SPELLINGS:
            self._dimensions[len(self)] = dimensions(attributes[attribute], attribute)
            return -1
        name = text_of(attributes[attribute], attribute) if attribute else ""
        return self._groups.setdefault(name, len(self._groups)) if name else -1

    def _add_lists(self, node: Any, attributes: dict[str, Value]) -> None:
        data_ptr, ctrl_ptr, input_ptr, output_ptr = self._pointers
        if self._with_names:
            self._names.append(node.name)
        if dependencies := node.data_deps:
            self._data.extend(dependencies)
        data_ptr.append(len(self._data))
        if dependencies := node.ctrl_deps:
            self._ctrl.extend(dependencies)
        ctrl_ptr.append(len(self._ctrl))
        if self._with_tensors:
            if "inputs" in attributes:
                self._inputs.extend(self._table.of(attributes["inputs"]))
            if "outputs" in attributes:
                self._outputs.extend(self._table.of(attributes["outputs"]))
            input_ptr.append(len(self._inputs))
            output_ptr.append(len(self._outputs))
            self._lists_tensors &= "inputs" in attributes and "outputs" in attributes

    def finish(self, lenient: bool = False) -> RankTrace:
        """Returns the trace. Raises ValueError as `rank_trace` does."""
        column = {name: as_numpy(values) for name, values in zip(_NODE_COLUMNS, self._node, strict=True)}
        for (name, (_, default)), values in zip(_COMMUNICATION_COLUMNS.items(), self._communication, strict=True):
            some = as_numpy(values)
            column[name] = np.full(len(self), default, some.dtype)
            column[name][as_numpy(self._communicating)] = some
        data_ptr, ctrl_ptr, input_ptr, output_ptr = (as_numpy(values) for values in self._pointers)
        stream, no_tensors = None, np.zeros(len(self) + 1, np.int64)
        if len(self._streams):
            stream = np.full(len(self), -1, np.int32)
            stream[: len(self._streams)] = as_numpy(self._streams)
        return rank_trace(
            Wanted(data_ptr, as_numpy(self._data), ctrl_ptr, as_numpy(self._ctrl)),
            lenient,
            **{**column, "is_cpu": column["is_cpu"].astype(np.bool_)},
            input_ptr=input_ptr if self._with_tensors else no_tensors,
            input_tensor=as_numpy(self._inputs),
            output_ptr=output_ptr if self._with_tensors else no_tensors,
            output_tensor=as_numpy(self._outputs),
            tensor_bytes=as_numpy(self._table.sizes),
            group_names=tuple(self._groups),
            names=tuple(self._names),
            tensor_names=tuple(self._table.rows) if self._with_names else (),
            involved_dims=self._dimensions or None,
            has_tensors=self._with_tensors and self._lists_tensors,
            stream=stream,
            process_groups=self._process_groups or None,
        )


class Wanted(NamedTuple):
    """The ids of the nodes that each node depends on, as CSR."""

    data_ptr: I64
    data: npt.NDArray[np.uint64]
    ctrl_ptr: I64
    ctrl: npt.NDArray[np.uint64]


def rank_trace(wanted: Wanted, lenient: bool, **columns: Any) -> RankTrace:
    """Returns the trace of these columns. With `lenient`, control dependencies that can't be met are dropped (see
    `feasible`).

    Raises ValueError for a repeated node id, and for a dependency on a missing node or on the node itself.
    """
    rows = NodeRows(columns["node_id"])
    twice = rows.repeated()
    if len(twice):
        raise ValueError(f"node {twice[0]}: two nodes have this id; give every node its own")
    data_ptr, ctrl_ptr = wanted.data_ptr, wanted.ctrl_ptr
    data = _dependencies(rows, wanted.data, data_ptr, "data")
    if lenient:
        ctrl_ptr, ctrl = feasible(data_ptr, data, ctrl_ptr, rows.of(wanted.ctrl))
    else:
        ctrl = _dependencies(rows, wanted.ctrl, ctrl_ptr, "control")
    return RankTrace(**columns, data_ptr=data_ptr, data=data, ctrl_ptr=ctrl_ptr, ctrl=ctrl)


_NODE_COLUMNS = {"node_id": "q", "kind": "b", "is_cpu": "b", "duration_us": "q", "num_ops": "q", "tensor_size": "q"}
_COMMUNICATION_COLUMNS = {
    "comm_type": ("b", -1),
    "comm_size": ("q", 0),
    "comm_tag": ("q", 0),
    "peer": ("i", -1),
    "group": ("i", -1),
    "priority": ("i", 0),
}
"""name -> type code, and the value for nodes that don't communicate"""


def _dependencies(rows: NodeRows, wanted: npt.NDArray[np.uint64], pointer: I64, what: str) -> I32:
    """Converts ids to rows; node i depends on `wanted[pointer[i]:pointer[i + 1]]`. `what` names the kind in errors."""
    found = rows.of(wanted)
    owner = np.repeat(np.arange(len(pointer) - 1, dtype=np.int32), np.diff(pointer))
    for wrong in np.flatnonzero((found < 0) | (found == owner))[:1]:
        node = f"node {rows.ids[owner[wrong]]}: {what} dependency on"
        if found[wrong] < 0:
            hint = "; --semantics streams leaves out those that converters of PyTorch's traces write" * (
                what == "control"
            )
            raise ValueError(f"{node} node {wanted[wrong]}, which is not in the trace{hint}")
        raise ValueError(f"{node} itself; remove it")
    return found


def _given(attributes: dict[str, Value], name: str) -> Value:
    if attributes.get(name) is None:
        raise ValueError(f"{name} is missing")
    return attributes[name]


def _amount(attributes: dict[str, Value], name: str) -> int:
    amount = whole_number(attributes[name] or 0, name)
    if amount < 0:
        raise ValueError(f"{name} is {amount}, which is negative")
    return amount
