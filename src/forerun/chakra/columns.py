"""Nodes into the columns of a RankTrace, one node at a time."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.chakra.attributes import (
    DIMENSION_SPELLINGS,
    GROUP_SPELLINGS,
    Value,
    decoded,
    dimensions,
    tensors,
    text_of,
    truth,
    whole_number,
)
from forerun.chakra.trace import CommType, NodeKind, RankTrace
from forerun.program.types import I32, I64

_CACHED = 1 << 15
"""attributes kept decoded; most traces have far fewer that differ, besides the lists of tensors"""
_COMP, _SEND, _RECV, _COLLECTIVE = NodeKind.COMP, NodeKind.SEND, NodeKind.RECV, NodeKind.COLLECTIVE
_MEMORY = (NodeKind.MEM_LOAD, NodeKind.MEM_STORE)
_LAST_KIND, _LAST_COMM_TYPE = max(NodeKind), max(CommType)
_WHO = (DIMENSION_SPELLINGS[0], GROUP_SPELLINGS[0], *DIMENSION_SPELLINGS[1:], *GROUP_SPELLINGS[1:])
_INT32 = 1 << 31


class AttributeCache(dict[bytes, tuple[str, Value]]):
    """Bytes of an AttributeProto -> its name and value, decoded when first asked for."""

    def __missing__(self, blob: bytes) -> tuple[str, Value]:
        if len(self) >= _CACHED:
            self.clear()
        found = self[blob] = decoded(blob)
        return found


class _TensorTable(AttributeCache):
    """The same, but lists of tensors become rows of a table of tensors."""

    def __init__(self, keep: bool, keep_names: bool) -> None:
        super().__init__()
        self._keep, self._keep_names = keep, keep_names
        self.rows: dict[str, int] = {}
        self.sizes = array("q")

    def __missing__(self, blob: bytes) -> tuple[str, Value]:
        name, value = decoded(blob)
        if name in ("inputs", "outputs"):
            # Few lists repeat, so they are not worth their place.
            return name, [self._row(*pair) for pair in tensors(value, name)] if self._keep else ()
        if len(self) >= _CACHED:
            self.clear()
        found = self[blob] = name, value
        return found

    def _row(self, tensor: str, size: int) -> int:
        row = self.rows.setdefault(tensor, len(self.sizes))
        if row == len(self.sizes):
            self.sizes.append(size)
        return row


class Columns:
    """Grows the columns of one rank's trace."""

    def __init__(self, names: bool, tensors: bool) -> None:
        self._with_names, self._with_tensors = names, tensors
        self._table = _TensorTable(tensors, names)
        self._names: list[str] = []
        self._groups: dict[str, int] = {}
        self._dimensions: dict[int, tuple[bool, ...]] = {}
        self._lists_tensors = True
        self._column = {name: array(code) for name, code in _COLUMNS.items()}
        self._append = {name: column.append for name, column in self._column.items()}
        self._data, self._ctrl = array("Q"), array("Q")
        self._inputs, self._outputs = array("i"), array("i")
        self._pointers = {name: array("q", [0]) for name in ("data", "ctrl", "inputs", "outputs")}

    def __len__(self) -> int:
        return len(self._column["node_id"])

    def add(self, node: Any) -> None:
        """Take one RawNode; raises ValueError, saying what is wrong with it."""
        cache, append = self._table, self._append
        attributes = dict([cache[blob] for blob in node.attr])
        kind = node.type
        if not 0 <= kind <= _LAST_KIND:
            raise ValueError(f"unknown node type {kind}")
        communicates = _SEND <= kind <= _COLLECTIVE
        append["node_id"](node.id)
        append["kind"](kind)
        append["duration_us"](node.duration_micros)
        append["num_ops"](_amount(attributes, "num_ops"))
        append["tensor_size"](_amount(attributes, "tensor_size"))
        append["is_cpu"](truth(attributes["is_cpu_op"], "is_cpu_op") if "is_cpu_op" in attributes else 0)
        append["comm_size"](_amount(attributes, "comm_size", communicates))
        if communicates:
            self._add_communication(kind, attributes)
        else:
            append["comm_type"](-1)
            append["comm_tag"](0)
            append["peer"](-1)
            append["group"](-1)
            append["priority"](0)
        self._add_lists(node, attributes)

    def _add_communication(self, kind: int, attributes: dict[str, Value]) -> None:
        append = self._append
        comm_type = peer = group = -1
        if kind == _COLLECTIVE:
            comm_type = _given(attributes, "comm_type")
            if not 0 <= comm_type <= _LAST_COMM_TYPE:
                raise ValueError(f"unknown comm_type {comm_type}")
            group = self._group(attributes)
        else:
            name = "comm_dst" if kind == _SEND else "comm_src"
            peer = _given(attributes, name)
            if not 0 <= peer < _INT32:
                raise ValueError(f"{name} is {peer}, which is no rank")
        append["comm_type"](comm_type)
        append["peer"](peer)
        append["group"](group)
        append["comm_tag"](whole_number(attributes.get("comm_tag") or 0, "comm_tag"))
        priority = whole_number(attributes.get("comm_priority") or 0, "comm_priority")
        if not -_INT32 <= priority < _INT32:
            raise ValueError(f"comm_priority is {priority}, which does not fit in 32 bits")
        append["priority"](priority)

    def _group(self, attributes: dict[str, Value]) -> int:
        said = next((name for name in _WHO if attributes.get(name) is not None), None)
        if said in DIMENSION_SPELLINGS:
            self._dimensions[len(self._column["group"])] = dimensions(attributes[said], said)
            return -1
        name = text_of(attributes[said], said) if said else ""
        return self._groups.setdefault(name, len(self._groups)) if name else -1

    def _add_lists(self, node: Any, attributes: dict[str, Value]) -> None:
        pointers = self._pointers
        if self._with_names:
            self._names.append(node.name)
        if dependencies := node.data_deps:
            self._data.extend(dependencies)
        pointers["data"].append(len(self._data))
        if dependencies := node.ctrl_deps:
            self._ctrl.extend(dependencies)
        pointers["ctrl"].append(len(self._ctrl))
        if self._with_tensors:
            self._inputs.extend(attributes.get("inputs", ()))
            self._outputs.extend(attributes.get("outputs", ()))
            pointers["inputs"].append(len(self._inputs))
            pointers["outputs"].append(len(self._outputs))
            self._lists_tensors &= "inputs" in attributes and "outputs" in attributes

    def finish(self) -> RankTrace:
        """The trace; raises ValueError: a node id twice, a dependency on no node of the trace or on the node itself."""
        n = len(self)
        column = {name: _array(values, _COLUMNS[name]) for name, values in self._column.items()}
        pointer = {name: _array(values, "q") for name, values in self._pointers.items()}
        if not self._with_tensors:
            pointer["inputs"] = pointer["outputs"] = np.zeros(n + 1, np.int64)
        rows = NodeRows(column["node_id"])
        return RankTrace(
            **{**column, "is_cpu": column["is_cpu"].astype(np.bool_)},
            data_ptr=pointer["data"],
            data=rows.of(_array(self._data, "Q"), pointer["data"], "data"),
            ctrl_ptr=pointer["ctrl"],
            ctrl=rows.of(_array(self._ctrl, "Q"), pointer["ctrl"], "control"),
            input_ptr=pointer["inputs"],
            input_tensor=_array(self._inputs, "i"),
            output_ptr=pointer["outputs"],
            output_tensor=_array(self._outputs, "i"),
            tensor_bytes=_array(self._table.sizes, "q"),
            group_names=tuple(self._groups),
            names=tuple(self._names),
            tensor_names=tuple(self._table.rows) if self._with_names else (),
            involved_dims=self._dimensions or None,
            has_tensors=self._with_tensors and self._lists_tensors,
        )


_COLUMNS = {
    "node_id": "q",
    "kind": "b",
    "is_cpu": "b",
    "duration_us": "q",
    "num_ops": "q",
    "tensor_size": "q",
    "comm_type": "b",
    "comm_size": "q",
    "comm_tag": "q",
    "peer": "i",
    "group": "i",
    "priority": "i",
}


class NodeRows:
    """From node ids, which are any numbers, to rows of the trace."""

    def __init__(self, node_id: I64) -> None:
        self._ids = node_id
        self._in_order = bool((node_id[1:] > node_id[:-1]).all())
        self._order: I64 = np.arange(len(node_id)) if self._in_order else np.argsort(node_id, kind="stable")
        self._sorted = node_id if self._in_order else node_id[self._order]
        same = np.flatnonzero(self._sorted[1:] == self._sorted[:-1])
        if len(same):
            raise ValueError(f"node {self._sorted[same[0]]}: two nodes have this id; give every node its own")

    def of(self, wanted: npt.NDArray[np.uint64], pointer: I64, what: str) -> I32:
        """Rows of the ids `wanted`, of which node i lists `pointer[i]` to `pointer[i + 1]`; `what` names the list.

        Raises ValueError where an id is of no node, or is the node's own.
        """
        if not len(wanted):
            return np.zeros(0, np.int32)
        ids = wanted.astype(np.int64)
        place = np.minimum(np.searchsorted(self._sorted, ids), len(self._sorted) - 1)
        unknown = np.flatnonzero(self._sorted[place] != ids)
        if len(unknown):
            node = self._ids[np.searchsorted(pointer, unknown[0], "right") - 1]
            raise ValueError(f"node {node}: {what} dependency on node {wanted[unknown[0]]}, which is not in the trace")
        rows = self._order[place].astype(np.int32)
        owner = np.repeat(np.arange(len(self._ids), dtype=np.int32), np.diff(pointer))
        own = np.flatnonzero(rows == owner)
        if len(own):
            raise ValueError(f"node {self._ids[owner[own[0]]]}: {what} dependency on itself; remove it")
        return rows


def _array(values: array[Any], code: str) -> npt.NDArray[Any]:
    return np.frombuffer(values, dtype=np.dtype(code)) if len(values) else np.zeros(0, np.dtype(code))


def _given(attributes: dict[str, Value], name: str) -> int:
    if attributes.get(name) is None:
        raise ValueError(f"{name} is missing")
    return whole_number(attributes[name], name)


def _amount(attributes: dict[str, Value], name: str, needed: bool = False) -> int:
    value = attributes.get(name)
    if value is None:
        if needed:
            raise ValueError(f"{name} is missing")
        return 0
    amount = whole_number(value, name)
    if amount < 0:
        raise ValueError(f"{name} is {amount}, which is negative")
    return amount
