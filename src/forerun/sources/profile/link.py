"""Links a profile with PyTorch's execution trace of the same run: operators get the shapes that only the trace has.

An operator of both has the same `Record function id`. Older profiles have none; there the operators of a thread of the
trace are found as a whole in a thread of the profile, by their names in order. The profile's own data take precedence.
"""

from __future__ import annotations

import re
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from forerun.common.admission import decoded, parse_json, read_bytes
from forerun.common.errors import ForerunError
from forerun.common.execution_trace import COMMUNICATION, is_root, tensors

_MOST_RATIO, _MOST_BYTES = 300, 1 << 31
_FEWEST = 8
"""a thread of fewer operators could be found anywhere"""
_NAMES = {"float": "Float", "c10::BFloat16": "BFloat16", "c10::Half": "Half", "double": "Double", "long int": "Long"}


class Linked(NamedTuple):
    """A profile with the additions of an execution trace."""

    profile: dict[str, Any]
    matched: int
    """operators of the profile that the trace has too"""
    operators: int
    """operators of the profile"""


class _Operator(NamedTuple):
    name: str
    record: int
    thread: int
    arguments: dict[str, Any]


def read_packed_json(path: Path) -> Any:
    """Returns the value in a JSON file, plain or packed by gzip.

    Raises ForerunError, naming the file, where it can't be read, is damaged or unpacks to more than 300 times its size.
    """
    content = read_bytes(path, _MOST_BYTES)
    if content.startswith(b"\x1f\x8b"):
        unpack = zlib.decompressobj(wbits=31)
        try:
            content = unpack.decompress(content, min(_MOST_RATIO * len(content), _MOST_BYTES))
        except zlib.error as error:
            raise ForerunError(f"{path}: damaged gzip file ({error}); copy it again") from None
        if not unpack.eof:
            raise ForerunError(f"{path}: the packed file is cut short, or unpacks to more than it should")
    return parse_json(decoded(content, str(path)), str(path), any_number=True)


def link(profile: Any, trace: Any, place: str) -> Linked:
    """Adds the details of operators in the execution trace `trace` to the same operators of `profile`, Kineto's JSON.
    It changes `profile`.

    Raises ForerunError, naming `place`, where either is none, or no operator of the trace is in the profile.
    """
    if not isinstance(profile, dict) or not isinstance(profile.get("traceEvents"), list):
        raise ForerunError(f"{place}: expected a profile of PyTorch with traceEvents")
    if not isinstance(trace, dict) or not isinstance(trace.get("nodes"), list):
        raise ForerunError(f"{place}: expected an execution trace of PyTorch with nodes")
    operators = [*_operators(trace["nodes"])]
    events = [event for event in profile["traceEvents"] if _is_operator(event)]
    events.sort(key=lambda event: (event["ts"], -event["dur"]))
    pairs = [*_by_record(events, operators)] or [*_by_order(events, operators)]
    if not pairs:
        raise ForerunError(f"{place}: no operators of the execution trace are in the profile; are both of one run?")
    for event, operator in pairs:
        event["args"] = operator.arguments | event["args"]
    _describe_kernels(profile["traceEvents"], pairs)
    return Linked(profile, len({id(event) for event, _ in pairs}), len(events))


def _is_operator(event: Any) -> bool:
    return (
        isinstance(event, dict)
        and event.get("ph") == "X"
        and event.get("cat") in ("cpu_op", "user_annotation")
        and isinstance(event.setdefault("args", {}), dict)
        and isinstance(event.get("ts"), (int, float))
        and isinstance(event.get("dur"), (int, float))
    )


def _operators(nodes: list[Any]) -> Iterator[_Operator]:
    known = [node for node in nodes if isinstance(node, dict) and isinstance(node.get("id"), int)]
    for node in sorted(known, key=lambda node: node["id"]):
        name = str(node.get("name", ""))
        if is_root(name):
            continue
        inputs = node.get("inputs", [])
        of: dict[str, Any] = inputs if isinstance(inputs, dict) else {}
        shapes = of.get("shapes", node.get("input_shapes")) or []
        types = of.get("types", node.get("input_types")) or []
        values = of.get("values", inputs)
        kinds = [_plain(one) for one in types if isinstance(one, str)] if isinstance(types, (list, tuple)) else []
        arguments: dict[str, Any] = {"Input Dims": shapes, "Input type": kinds}
        if name == COMMUNICATION:
            arguments |= _call(values, kinds)
        yield _Operator(name, _attribute(node, "rf_id"), _attribute(node, "tid"), arguments)


def _attribute(node: dict[str, Any], name: str) -> int:
    """Returns a number of a node; releases write it in two ways. Returns 0 if there is none."""
    listed = node.get("attrs", [])
    of = (
        {str(one.get("name")): one.get("value") for one in listed if isinstance(one, dict)}
        if isinstance(listed, list)
        else {}
    )
    found = node.get(name, of.get(name))
    return found if isinstance(found, int) else 0


def _plain(text: str) -> str:
    """Returns `float` for `Tensor(float)`, as profiles write it. The text is empty for any other type."""
    match = re.search(r"Tensor\(([^()]*)\)", text)
    return match[1] if match else ""


def _call(values: Any, types: list[str]) -> dict[str, Any]:
    """Returns the entries that profiles since 2024 have for a collective, as far as the inputs of its call give
    them.
    """
    given = values if isinstance(values, list) else []
    name = next((one for one in given if isinstance(one, str) and one.isidentifier()), "")
    elements = sum(tensor[3] for tensor in tensors(given[:1]))
    found: dict[str, Any] = {"Collective name": name, "In msg nelems": elements} if name else {}
    dtype = next((_NAMES.get(one, one) for one in types if one), "")
    size = given[-1] if given and isinstance(given[-1], int) and not isinstance(given[-1], bool) else 0
    if found and dtype and size > 1:
        gathers = "gather" in name
        found |= {"dtype": dtype, "Group size": size, "Out msg nelems": elements * size if gathers else elements}
    return found


def _by_record(events: list[dict[str, Any]], operators: list[_Operator]) -> Iterator[tuple[dict[str, Any], _Operator]]:
    of_record = {operator.record: operator for operator in operators if operator.record}
    for event in events:
        operator = of_record.get(event["args"].get("Record function id", 0))
        if operator is not None and operator.name == event.get("name"):
            yield event, operator


def _by_order(events: list[dict[str, Any]], operators: list[_Operator]) -> Iterator[tuple[dict[str, Any], _Operator]]:
    """Finds the names of each thread of the trace, one after the other, wherever a thread of the profile has them."""
    of_thread, on_thread = defaultdict(list), defaultdict(list)
    for operator in operators:
        of_thread[operator.thread].append(operator)
    for event in events:
        on_thread[event.get("pid"), event.get("tid")].append(event)
    for wanted in of_thread.values():
        if len(wanted) < _FEWEST:
            continue
        text = _text(operator.name for operator in wanted)
        for found in on_thread.values():
            all_names = _text(str(event.get("name")) for event in found)
            at = all_names.find(text)
            while at >= 0:
                first = all_names.count("\n", 0, at)
                yield from zip(found[first : first + len(wanted)], wanted, strict=True)
                at = all_names.find(text, at + len(text) - 1)


def _text(names: Iterator[str]) -> str:
    """Returns the names, each between line ends, so that one is found whole only."""
    return "\n" + "".join(" ".join(name.split()) + "\n" for name in names)


def _describe_kernels(events: list[Any], pairs: list[tuple[dict[str, Any], _Operator]]) -> None:
    """Adds the details of the calls of collectives to their kernels."""
    calls = {
        event["args"].get("External id"): operator.arguments
        for event, operator in pairs
        if "Collective name" in operator.arguments
    }
    for event in events:
        if calls and isinstance(event, dict) and event.get("cat") == "kernel" and isinstance(event.get("args"), dict):
            said = calls.get(event["args"].get("External id"), {})
            event["args"] = {key: said[key] for key in said if not key.startswith("Input")} | event["args"]
