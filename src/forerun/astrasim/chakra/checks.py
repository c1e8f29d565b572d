"""Checks of a single node, and findings: errors and oddities of traces, as a list."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from forerun.astrasim.chakra.attributes import (
    DIMENSION_SPELLINGS,
    Value,
    dimensions,
    is_launcher,
    participants_attribute,
    tensor_list,
    text_of,
    truth,
    whole_number,
)
from forerun.astrasim.chakra.trace import CommType, NodeKind

Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong (error) or suspicious (warning)."""

    severity: Severity
    kind: str
    """node, dependency, cycle, message, group or collective"""
    rank: int | None
    node: int | None
    """id of the node that it is about"""
    name: str
    message: str

    def __str__(self) -> str:
        where = [] if self.rank is None else [f"rank {self.rank}"]
        if self.node is not None:
            where.append(f"node {self.node} ({self.name})" if self.name else f"node {self.node}")
        return f"{self.severity}: {', '.join(where) + ': ' if where else ''}{self.message}"


class Findings:
    """Collects the first `limit` findings of each severity and kind, and counts the others."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._found: list[Finding] = []
        self._counts: Counter[tuple[Severity, str]] = Counter()

    def add(
        self,
        kind: str,
        message: str,
        rank: int | None = None,
        node: int | None = None,
        name: str = "",
        severity: Severity = "error",
    ) -> None:
        self._counts[severity, kind] += 1
        if self._counts[severity, kind] <= self._limit:
            self._found.append(Finding(severity, kind, rank, node, name, message))

    def left(self, kind: str) -> int:
        """Returns the number of errors of this kind that may still be listed."""
        return max(self._limit - self._counts["error", kind], 0)

    def all(self) -> list[Finding]:
        """Returns the findings in the order of discovery, then how many more there are of each kind."""
        more = [
            Finding(severity, kind, None, None, "", f"{count - self._limit} more of kind {kind}")
            for (severity, kind), count in self._counts.items()
            if count > self._limit
        ]
        return [*self._found, *more]


Problem = tuple[Severity, str]
Read = Callable[[Value, str], Any]
_AMOUNTS = ("num_ops", "tensor_size", "comm_size")
_NEEDED: dict[int, tuple[str, ...]] = {
    NodeKind.MEM_LOAD: ("tensor_size",),
    NodeKind.MEM_STORE: ("tensor_size",),
    NodeKind.SEND: ("comm_size", "comm_dst"),
    NodeKind.RECV: ("comm_size", "comm_src"),
    NodeKind.COLLECTIVE: ("comm_size", "comm_type"),
}
_COMMUNICATING = (NodeKind.SEND, NodeKind.RECV, NodeKind.COLLECTIVE)
_LAST_KIND, _LAST_COMM_TYPE = int(max(NodeKind)), int(max(CommType))
_INT32, _INT63 = 1 << 31, 1 << 63


def problems(node: Any, attributes: dict[str, Value]) -> Iterator[Problem]:
    """Yields the errors of a node by itself; `attributes` are its attributes by name."""
    kind = node.type
    if node.id >= _INT63:
        yield "error", "its id does not fit in 63 bits"
    if not 0 <= kind <= _LAST_KIND:
        yield "error", f"unknown node type {kind}"
        return
    if kind == NodeKind.INVALID:
        yield "warning", "its type is INVALID_NODE, so it takes no time"
    launches = kind == NodeKind.COLLECTIVE and _launches(attributes)
    for name in () if launches else _NEEDED.get(kind, ()):
        if attributes.get(name) is None:
            yield "error", f"{name} is missing"
    if kind == NodeKind.COMP and not node.duration_micros:
        if attributes.get("num_ops") is None:
            yield "error", "it has neither num_ops nor a duration"
        elif attributes.get("tensor_size") is None:
            yield "error", "tensor_size is missing"
    yield from _numbers(attributes)
    if kind in _COMMUNICATING:
        yield from _communication(kind, attributes)


def _numbers(attributes: dict[str, Value]) -> Iterator[Problem]:
    for name in _AMOUNTS:
        if attributes.get(name) is None:
            continue
        amount, problem = attempt(whole_number, attributes[name], name)
        if problem:
            yield "error", problem
        elif amount < 0:
            yield "error", f"{name} is {amount}, which is negative"
    yield from _unreadable(attributes, truth, "is_cpu_op")


def _unreadable(attributes: dict[str, Value], read: Read, *names: str) -> Iterator[Problem]:
    """Yields the complaints of `read` about the attributes `names`, as far as the node has them."""
    for name in names:
        if attributes.get(name) is not None and (problem := attempt(read, attributes[name], name)[1]):
            yield "error", problem


def _communication(kind: int, attributes: dict[str, Value]) -> Iterator[Problem]:
    yield from _unreadable(attributes, whole_number, "comm_tag", "comm_priority")
    if attributes.get("comm_size") is not None and number(attributes, "comm_size") == 0:
        yield "warning", "comm_size is 0"
    if kind == NodeKind.COLLECTIVE:
        yield from _collective(attributes)
        return
    name = "comm_dst" if kind == NodeKind.SEND else "comm_src"
    if attributes.get("comm_tag") is None:
        yield "warning", "comm_tag is missing, so it counts as 0"
    if attributes.get(name) is not None:
        peer, problem = attempt(whole_number, attributes[name], name)
        if problem or not 0 <= peer < _INT32:
            yield "error", problem or f"{name} is {peer}, not a rank"


def _launches(attributes: dict[str, Value]) -> bool:
    """Returns whether a collective node is known to only launch one, so that it needs neither a size nor a type."""
    try:
        return is_launcher(attributes)
    except ValueError:
        return False


def _collective(attributes: dict[str, Value]) -> Iterator[Problem]:
    if attributes.get("comm_type") is not None:
        comm_type, problem = attempt(whole_number, attributes["comm_type"], "comm_type")
        if problem or not 0 <= comm_type <= _LAST_COMM_TYPE:
            yield "error", problem or f"unknown comm_type {comm_type}"
    if name := participants_attribute(attributes):
        yield from _unreadable(attributes, dimensions if name in DIMENSION_SPELLINGS else text_of, name)


def tensor_problems(name: str, value: Value) -> str:
    """Returns the error in `value`, a list of tensors in the attribute `name`. The text is empty if there is none."""
    lists, problem = attempt(tensor_list, value, name)
    for tensor, text in zip(*(lists or ((), ())), strict=True):
        size, problem = attempt(whole_number, text, f"size of tensor {tensor!r}")
        if problem or size < 0:
            return problem or f"size of tensor {tensor!r} is {size}, which is negative"
    return problem


def number(attributes: dict[str, Value], name: str) -> int | None:
    """Returns the attribute `name` as a number, or None if it is missing or not a number."""
    if attributes.get(name) is None:
        return None
    value, problem = attempt(whole_number, attributes[name], name)
    return None if problem else value


def attempt(read: Read, value: Value, name: str) -> tuple[Any, str]:
    """Returns the result of `read` for `value`, and the message if it raises ValueError."""
    try:
        return read(value, name), ""
    except ValueError as error:
        return None, str(error)
