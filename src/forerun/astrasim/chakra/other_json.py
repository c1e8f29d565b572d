"""JSON that other tools write: Chakra's own forms of a trace, and PyTorch's execution traces.

* Chakra's feeder reads one object, {"workload_graph": [{"Id": 1, "Name": ..., "NodeType": 4, "runtime": 3, ...}]}.
* `chakra_jsonizer` writes the metadata and every node as an object of its own, one behind the other.
* PyTorch's `ExecutionTraceObserver` writes {"schema": "1.0.2-chakra.0.0.4", "nodes": [...]}: the operators of one rank
  with their callers and tensors, and without times.

Each becomes the messages of a Chakra trace: metadata, then nodes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from forerun.astrasim.chakra.schema import AttributeProto, GlobalMetadata, Node
from forerun.astrasim.chakra.trace import CommType, NodeKind
from forerun.common.admission import parse_json
from forerun.common.errors import ForerunError
from forerun.common.execution_trace import COMMUNICATION, is_root, tensors

_NUMBERS = (
    *("num_ops", "tensor_size", "comm_type", "comm_priority", "comm_size", "comm_src", "comm_dst", "comm_tag"),
    "stream",
)
_TEXTS = ("pg_name",)
_CAMEL = {"ctrlDeps": "ctrl_deps", "dataDeps": "data_deps", "durationMicros": "duration_micros"}
_BESIDE, _SPACE = re.compile(r"\}\s*\{"), re.compile(r"\s*")
_PROCESS_GROUPS = "## process_group:init ##"
_COLLECTIVES = (
    ("reduce_scatter", CommType.REDUCE_SCATTER),
    ("reducescatter", CommType.REDUCE_SCATTER),
    ("all_reduce", CommType.ALL_REDUCE),
    ("allreduce", CommType.ALL_REDUCE),
    ("all_gather", CommType.ALL_GATHER),
    ("allgather", CommType.ALL_GATHER),
    ("all_to_all", CommType.ALL_TO_ALL),
    ("alltoall", CommType.ALL_TO_ALL),
    ("broadcast", CommType.BROADCAST),
)
"""parts of the names by which PyTorch calls collectives"""


def is_workload_graph(data: Any) -> bool:
    """Returns whether `data` is a trace in the form of Chakra's feeder."""
    return isinstance(data, dict) and isinstance(data.get("workload_graph"), list)


def is_execution_trace(data: Any) -> bool:
    """Returns whether `data` is an execution trace of PyTorch."""
    return isinstance(data, dict) and isinstance(data.get("nodes"), list) and "schema" in data


def workload_graph(data: dict[str, Any], place: str) -> Iterator[Any]:
    """Yields the messages of a trace in the form of Chakra's feeder.

    A collective of the device without a kind is a compute node, because nothing but its time is known.

    Raises ForerunError, naming the node by its place in the file, for one that lacks its number or has a wrong value.
    """
    yield GlobalMetadata(version="0.0.4")
    for number, record in enumerate(data["workload_graph"], 1):
        where = f"{place}, node number {number}"
        if not isinstance(record, dict) or "Id" not in record or "NodeType" not in record:
            raise ForerunError(f"{where}: a node needs Id and NodeType, got {json.dumps(record)[:60]}")
        record = {_CAMEL.get(key, key): value for key, value in record.items()}
        is_cpu, kind = bool(record.get("is_cpu_op", False)), record["NodeType"]
        if kind == NodeKind.COLLECTIVE and not is_cpu and "comm_type" not in record:
            kind = int(NodeKind.COMP)
        yield _node(
            where,
            id=record["Id"],
            name=record.get("Name", ""),
            type=kind,
            data_deps=record.get("data_deps", []),
            ctrl_deps=record.get("ctrl_deps", []),
            duration_micros=record.get("runtime", 0),
            attributes={"is_cpu_op": is_cpu, **{key: record[key] for key in (*_NUMBERS, *_TEXTS) if key in record}},
        )


def concatenated(text: str, place: str) -> list[Any] | None:
    """Returns the objects of a text that is several, one behind the other; None for a text that is one.

    Raises ForerunError, naming the place, where one of them is damaged.
    """
    if not _BESIDE.search(text):
        return None
    decoder, found, text, at = json.JSONDecoder(), list[Any](), text.strip(), 0
    while at < len(text):
        try:
            record, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            if not found:
                return None
            raise ForerunError(f"{place}: object number {len(found) + 1} can't be read ({error})") from None
        found.append(record)
        at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
    return found if len(found) > 1 else None


def execution_trace(data: dict[str, Any], place: str) -> Iterator[Any]:
    """Yields the messages of an execution trace of PyTorch.

    Operators are nodes of the host without a time. They depend on their callers and on the operators that last wrote
    their inputs. `record_param_comms` is the collective itself.

    Raises ForerunError, which names the place in the file, for an entry that is not a node of such a trace.
    """
    yield GlobalMetadata(version="0.0.4")
    groups: dict[Any, str] = {}
    last_writer: dict[Any, int] = {}
    known: set[int] = set()
    for number, record in enumerate(sorted(data["nodes"], key=_id_of), 1):
        where = f"{place}, node number {number} by id"
        if not isinstance(record, dict) or not isinstance(record.get("id"), int):
            raise ForerunError(f"{where}: a node needs an id, got {json.dumps(record)[:60]}")
        name, node_id = str(record.get("name", "")), record["id"]
        if is_root(name):
            continue
        inputs, outputs = _values(record, "inputs"), _values(record, "outputs")
        attributes: dict[str, Any] = {"is_cpu_op": True}
        kind, text = NodeKind.COMP, ""
        if name == _PROCESS_GROUPS:
            kind, text = NodeKind.METADATA, repr([str(value) for value in inputs])
            groups.update(_process_groups(inputs))
        elif name == COMMUNICATION and (meant := _collective(inputs, groups)):
            kind, attributes = NodeKind.COLLECTIVE, meant
        caller = record.get("ctrl_deps", record.get("parent"))
        reads = dict.fromkeys(last_writer[one] for one in _storages(inputs) if one in last_writer)
        node = _node(
            where, id=node_id, name=name, type=int(kind), attributes=attributes,
            ctrl_deps=[caller] if isinstance(caller, int) and caller in known else [], data_deps=[*reads],
        )  # fmt: skip
        node.inputs.values = text
        yield node
        known.add(node_id)
        last_writer.update((one, node_id) for one in _storages(outputs))


def _id_of(record: Any) -> int:
    found = record.get("id") if isinstance(record, dict) else None
    return found if isinstance(found, int) else -1


def _node(place: str, attributes: dict[str, Any], **fields: Any) -> Any:
    try:
        node = Node(**fields)
        for name, value in attributes.items():
            kind = "bool_val" if isinstance(value, bool) else "string_val" if isinstance(value, str) else "int64_val"
            node.attr.append(AttributeProto(name=name, **{kind: value}))
    except (TypeError, ValueError, OverflowError) as error:
        raise ForerunError(f"{place}: {error}") from None
    return node


def _values(record: dict[str, Any], side: str) -> list[Any]:
    given = record.get(side, [])
    values = given.get("values", []) if isinstance(given, dict) else given
    return values if isinstance(values, list) else []


def _storages(values: list[Any]) -> list[int]:
    return [tensor[1] for tensor in tensors(values)]


def _process_groups(inputs: list[Any]) -> dict[Any, str]:
    """Returns the names of groups by the number of their backend, as collectives call them, and by name."""
    found: dict[Any, str] = {}
    for text in inputs:
        try:
            items = parse_json(text, "groups") if isinstance(text, str) else []
        except ForerunError:
            continue
        for item in items if isinstance(items, list) else []:
            if isinstance(item, dict) and "pg_name" in item:
                name = str(item["pg_name"])
                found |= {item.get("backend_id", name): name, name: name}
    return found


def _collective(inputs: list[Any], groups: dict[Any, str]) -> dict[str, Any] | None:
    """Returns the attributes of the collective that `record_param_comms` describes. Returns None for any other node."""
    texts = [value.lower() for value in inputs if isinstance(value, str)]
    kind = next((kind for text in texts for part, kind in _COLLECTIVES if part in text), None)
    if kind is None:
        return None
    size = sum(tensor[3] * tensor[4] for tensor in tensors(inputs[0] if inputs else []))
    candidates = [one for value in inputs for one in (value if isinstance(value, list) else [value])]
    group = next((groups[one] for one in candidates if isinstance(one, (int, str)) and one in groups), "")
    named = {"pg_name": group} if group else {}
    return {"is_cpu_op": False, "comm_type": int(kind), "comm_size": int(size), **named}
