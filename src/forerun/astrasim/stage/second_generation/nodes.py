"""Nodes of one pipeline stage: what each tensor costs, the collectives before it, messages, and their dependencies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from forerun.astrasim.chakra.trace import CommType, NodeKind
from forerun.astrasim.stage.second_generation.matching import collectives
from forerun.astrasim.stage.second_generation.pipeline import StageGraph
from forerun.astrasim.stage.sizes import Size
from forerun.astrasim.stage.tensors import Kind, Operation
from forerun.common.errors import ForerunError


class Numbers:
    """Sizes as the numbers that STAGE writes: evaluated as a double, then truncated."""

    def __init__(self, values: Mapping[str, int], degrees: tuple[str, ...]) -> None:
        self.degrees = degrees
        """degrees of parallelism above 1, by symbol"""
        self._values = values
        self._elements: dict[int, float] = {}
        self._num_ops: dict[int, float] = {}
        self._comms: dict[tuple[int, int, bool], list[tuple[CommType, int]]] = {}

    def of(self, size: Size) -> float:
        """Raises ForerunError where it does not fit in 63 bits."""
        value = float(size.value(self._values))
        if value >= _LIMIT:
            raise ForerunError(f"{size} comes to {value:.3g}, which does not fit in 63 bits: use smaller sizes")
        return value

    def elements(self, operation: Operation) -> float:
        """Of the tensor that it makes, on one rank."""
        if id(operation) not in self._elements:
            self._elements[id(operation)] = self.of(operation.result.elements)
        return self._elements[id(operation)]

    def num_ops(self, operation: Operation) -> float:
        """Of it on one rank."""
        if id(operation) not in self._num_ops:
            self._num_ops[id(operation)] = self.of(operation.num_ops)
        return self._num_ops[id(operation)]

    def comms(self, producer: Operation, consumer: Operation, second: bool) -> list[tuple[CommType, int]]:
        """Collectives before an operand: type and place in `degrees`."""
        key = id(producer), id(consumer), second
        if key not in self._comms:
            want = consumer.second if second else consumer.first
            assert want is not None
            found = collectives(producer.result, want, self.degrees)
            self._comms[key] = [(comm, self.degrees.index(degree)) for comm, degree in found]
        return self._comms[key]


_Value = TypeVar("_Value")
_LIMIT = float(1 << 63)
NO_COMM = -1
SUFFIX = ("_COMP", "_X1COMM", "_X2_COMM", "_Y_SEND", "_Y_RECV")
COMP, FIRST_COMM, SECOND_COMM, SEND, RECEIVE = range(5)


@dataclass(slots=True)
class Nodes:
    """Nodes of a stage for one micro-batch, in file order; `deps` are positions in the same lists."""

    tensor: list[int] = field(default_factory=list)
    """member that the node belongs to"""
    role: list[int] = field(default_factory=list)
    """place in SUFFIX"""
    number: list[int] = field(default_factory=list)
    """which of the ids of its part (per micro-batch, shared, received); of messages: which link"""
    kind: list[int] = field(default_factory=list)
    num_ops: list[float] = field(default_factory=list)
    elements: list[float] = field(default_factory=list)
    """of the tensor computed or moved"""
    comm: list[int] = field(default_factory=list)
    degree: list[int] = field(default_factory=list)
    """place in the degrees above 1 of a collective's group"""
    partner: list[int] = field(default_factory=list)
    """stage at the other end of a message"""
    deps: list[list[int]] = field(default_factory=list)
    ids: list[int] = field(default_factory=lambda: [0, 0, 0])
    """how many ids the parts use up"""

    def _add(self, tensor: int, role: int, number: int, kind: NodeKind, elements: float) -> int:
        self.tensor.append(tensor)
        self.role.append(role)
        self.number.append(number)
        self.kind.append(kind)
        self.num_ops.append(0.0)
        self.elements.append(elements)
        self.comm.append(CommType.NONE)
        self.degree.append(NO_COMM)
        self.partner.append(-1)
        self.deps.append([])
        return len(self.deps) - 1

    def take(self, part: int) -> int:
        self.ids[part] += 1
        return self.ids[part] - 1

    def compute(self, tensor: int, part: int, operation: Operation, numbers: Numbers) -> int:
        node = self._add(tensor, COMP, self.take(part), NodeKind.COMP, numbers.elements(operation))
        self.num_ops[node] = numbers.num_ops(operation)
        return node

    def collective(
        self, tensor: int, part: int, role: int, elements: float, comm: tuple[CommType, int], before: int | None
    ) -> int:
        node = self._add(tensor, role, self.take(part), NodeKind.COLLECTIVE, elements)
        self.comm[node], self.degree[node] = comm
        if before is not None:
            self.deps[node].append(before)
        return node

    def message(self, tensor: int, kind: NodeKind, link: int, elements: float, partner: int) -> int:
        role = SEND if kind is NodeKind.SEND else RECEIVE
        node = self._add(tensor, role, link, kind, elements)
        self.partner[node] = partner
        return node


def stage_nodes(graph: StageGraph, numbers: Numbers) -> Nodes:
    """The nodes of a stage, without those that cost nothing."""
    nodes = Nodes()
    members = graph.members
    first_received = len(members) - len(graph.received_from)
    inputs: list[tuple[int, int]] = []
    output: list[int] = []
    for index, member in enumerate(members):
        part = 0 if index < graph.per_batch else 1 if index < first_received else 2
        comp = nodes.compute(index, part, member.operation, numbers)
        entries = []
        for role, operand in ((FIRST_COMM, member.first), (SECOND_COMM, member.second)):
            entry, last = comp, None
            if operand >= 0:
                producer = members[operand].operation
                for comm in numbers.comms(producer, member.operation, role == SECOND_COMM):
                    last = nodes.collective(index, part, role, numbers.elements(producer), comm, last)
                    entry = last if entry == comp else entry
            if last is not None:
                nodes.deps[comp].append(last)
            entries.append(entry)
        inputs.append((entries[0], entries[1]))
        elements = numbers.elements(member.operation)
        for stage in graph.sent_to.get(index, ()):
            send = nodes.message(index, NodeKind.SEND, graph.rank_of_send[index, stage], elements, stage)
            nodes.deps[send].append(comp)
        if part == 2:
            home = graph.received_from[index - first_received]
            output.append(nodes.message(index, NodeKind.RECV, index - first_received, elements, home))
        else:
            output.append(comp)
    for member, nodes_of_operands in zip(members, inputs, strict=True):
        for operand, node in zip((member.first, member.second), nodes_of_operands, strict=True):
            if operand >= 0:
                nodes.deps[node].append(output[operand])
    for index, member in enumerate(members):
        if member.after:
            comp = output[index]
            nodes.deps[comp] += [output[other] for other in member.after]
    return _without_free(nodes)


def _without_free(nodes: Nodes) -> Nodes:
    """Leave out computations that cost nothing: what depended on one depends on what it depended on.

    In rounds, as STAGE does it, for this decides the order of dependencies: a round drops in file order those with no
    dependency that was free when the round began; a dropped one's dependencies go to the end of its dependants' lists.
    """
    free = [kind == NodeKind.COMP and not ops for kind, ops in zip(nodes.kind, nodes.num_ops, strict=True)]
    deps = nodes.deps
    left = [node for node, is_free in enumerate(free) if is_free]
    while left:
        waiting = set(left)
        dependants: dict[int, list[int]] = {node: [] for node in left}
        for node, own in enumerate(deps):
            if not free[node] or node in waiting:
                for dep in own:
                    if dep in waiting:
                        dependants[dep].append(node)
        still = []
        for node in left:
            if any(dep in waiting for dep in deps[node]):
                still.append(node)
                continue
            for dependant in dependants[node]:
                deps[dependant].remove(node)
                deps[dependant] += deps[node]
        left = still
    return _kept(nodes, [not is_free for is_free in free])


def _kept(nodes: Nodes, keep: Sequence[bool]) -> Nodes:
    new: dict[int, int] = {}
    for node, kept in enumerate(keep):
        if kept:
            new[node] = len(new)

    def rows(column: list[_Value]) -> list[_Value]:
        return [column[node] for node in new]

    return Nodes(
        rows(nodes.tensor),
        rows(nodes.role),
        rows(nodes.number),
        rows(nodes.kind),
        rows(nodes.num_ops),
        rows(nodes.elements),
        rows(nodes.comm),
        rows(nodes.degree),
        rows(nodes.partner),
        [list(dict.fromkeys(new[dep] for dep in nodes.deps[node])) for node in new],
        nodes.ids,
    )


def stands_for(graph: StageGraph, member: int) -> int:
    """The member whose memory a tensor is: another layout of a tensor counts as that tensor."""
    own = graph.members[member]
    return own.first if own.operation.kind is Kind.SAME else member
