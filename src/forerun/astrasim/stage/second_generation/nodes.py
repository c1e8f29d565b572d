"""Nodes of one pipeline stage: computations, the collectives before them, messages, and their dependencies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from forerun.astrasim.chakra.trace import CommType, NodeKind
from forerun.astrasim.stage.matching import collectives
from forerun.astrasim.stage.second_generation.pipeline import StageGraph
from forerun.astrasim.stage.sizes import Size
from forerun.astrasim.stage.tensors import Kind, Operation
from forerun.common.errors import ForerunError


class Numbers:
    """Evaluates symbolic sizes as doubles, as STAGE does, which truncates them when it writes them."""

    def __init__(self, values: Mapping[str, int], degrees: tuple[str, ...]) -> None:
        self.degrees = degrees
        """degrees of parallelism above 1, by symbol"""
        self._values = values
        self._elements: dict[int, float] = {}
        self._num_ops: dict[int, float] = {}
        self._comms: dict[tuple[int, int, bool], list[tuple[CommType, int]]] = {}

    def of(self, size: Size) -> float:
        """Returns the value of a size. Raises ForerunError if it doesn't fit in 63 bits."""
        value = float(size.value(self._values))
        if value >= _LIMIT:
            raise ForerunError(f"{size} comes to {value:.3g}, which does not fit in 63 bits: use smaller sizes")
        return value

    def elements(self, operation: Operation) -> float:
        """Returns the elements on one rank of the tensor that an operation makes."""
        if id(operation) not in self._elements:
            self._elements[id(operation)] = self.of(operation.result.elements)
        return self._elements[id(operation)]

    def num_ops(self, operation: Operation) -> float:
        """Returns the num_ops of an operation on one rank."""
        if id(operation) not in self._num_ops:
            self._num_ops[id(operation)] = self.of(operation.num_ops)
        return self._num_ops[id(operation)]

    def comms(self, producer: Operation, consumer: Operation, of_x2: bool) -> list[tuple[CommType, int]]:
        """Returns the collectives before an operand (x1 or x2): type and index into `degrees`."""
        key = id(producer), id(consumer), of_x2
        if key not in self._comms:
            want = consumer.x2 if of_x2 else consumer.x1
            assert want is not None
            found = collectives(producer.result, want, self.degrees, shared_dims=True)
            self._comms[key] = [(comm, self.degrees.index(degree)) for comm, degree in found]
        return self._comms[key]


_LIMIT = float(1 << 63)
SUFFIX = ("_COMP", "_X1COMM", "_X2_COMM", "_Y_SEND", "_Y_RECV")
COMP, FIRST_COMM, SECOND_COMM, SEND, RECEIVE = range(5)
"""the role of a node for its tensor: index into SUFFIX"""


@dataclass(slots=True)
class Node:
    """A node of one micro-batch; dependencies are positions in `Nodes.nodes`."""

    tensor: int
    """member of the stage that the node belongs to"""
    role: int
    kind: NodeKind
    elements: float
    """elements of the tensor that is computed or moved"""
    num_ops: float = 0.0
    number: int = 0
    """which of the ids of its part; of a message, which link"""
    comm: CommType = CommType.NONE
    degree: int = -1
    """of a collective: index of its group into the degrees above 1"""
    partner: int = -1
    """of a message: the other stage"""
    deps: list[int] = field(default_factory=list)

    @property
    def is_free(self) -> bool:
        """Returns whether it is a computation that costs nothing."""
        return self.kind is NodeKind.COMP and not self.num_ops


@dataclass(slots=True)
class Nodes:
    """The nodes of a stage for one micro-batch, in file order."""

    nodes: list[Node] = field(default_factory=list)
    ids: list[int] = field(default_factory=lambda: [0, 0, 0])
    """number of ids of each part: of a micro-batch, shared, received"""

    def add(self, node: Node, part: int | None = None) -> int:
        """Appends a node, which takes the next id of its part unless it is a message, and returns its position."""
        if part is not None:
            node.number = self.ids[part]
            self.ids[part] += 1
        self.nodes.append(node)
        return len(self.nodes) - 1

    def column(self, name: str) -> Any:
        """Returns one attribute of all nodes as an array."""
        return np.array([getattr(node, name) for node in self.nodes])


def stage_nodes(graph: StageGraph, numbers: Numbers) -> Nodes:
    """Returns the nodes of a stage, without those that cost nothing."""
    nodes = Nodes()
    members = graph.members
    first_received = len(members) - len(graph.received_from)
    inputs: list[tuple[int, int]] = []
    output: list[int] = []
    for index, member in enumerate(members):
        part = 0 if index < graph.per_batch else 1 if index < first_received else 2
        elements = numbers.elements(member.operation)
        num_ops = numbers.num_ops(member.operation)
        comp = nodes.add(Node(index, COMP, NodeKind.COMP, elements, num_ops), part)
        entries = []
        for role, operand in ((FIRST_COMM, member.x1), (SECOND_COMM, member.x2)):
            entry, last = comp, None
            if operand >= 0:
                producer = members[operand].operation
                moved = numbers.elements(producer)
                for comm, degree in numbers.comms(producer, member.operation, role == SECOND_COMM):
                    own = Node(index, role, NodeKind.COLLECTIVE, moved, comm=comm, degree=degree)
                    own.deps += [] if last is None else [last]
                    last = nodes.add(own, part)
                    entry = last if entry == comp else entry
            if last is not None:
                nodes.nodes[comp].deps.append(last)
            entries.append(entry)
        inputs.append((entries[0], entries[1]))
        for stage in graph.sent_to.get(index, ()):
            link = graph.rank_of_send[index, stage]
            nodes.add(Node(index, SEND, NodeKind.SEND, elements, number=link, partner=stage, deps=[comp]))
        if part == 2:
            link = index - first_received
            home = graph.received_from[link]
            output.append(nodes.add(Node(index, RECEIVE, NodeKind.RECV, elements, number=link, partner=home)))
        else:
            output.append(comp)
    for member, nodes_of_operands in zip(members, inputs, strict=True):
        for operand, node in zip((member.x1, member.x2), nodes_of_operands, strict=True):
            if operand >= 0:
                nodes.nodes[node].deps.append(output[operand])
    for index, member in enumerate(members):
        nodes.nodes[output[index]].deps.extend(output[other] for other in member.after)
    return _without_free(nodes)


def _without_free(nodes: Nodes) -> Nodes:
    """Leaves out computations that cost nothing; their dependants inherit their dependencies.

    It works in rounds as STAGE does, since this decides the order of dependencies. A round drops, in file order, the
    computations that depend on no computation that was free when the round began. The dependencies of a dropped one go
    to the end of its dependants' lists.
    """
    all_nodes = nodes.nodes
    left = [number for number, node in enumerate(all_nodes) if node.is_free]
    while left:
        waiting = set(left)
        dependants: dict[int, list[Node]] = {number: [] for number in left}
        for number, node in enumerate(all_nodes):
            if not node.is_free or number in waiting:
                for dep in node.deps:
                    if dep in waiting:
                        dependants[dep].append(node)
        still = []
        for number in left:
            own = all_nodes[number].deps
            if any(dep in waiting for dep in own):
                still.append(number)
                continue
            for dependant in dependants[number]:
                dependant.deps.remove(number)
                dependant.deps += own
        left = still
    kept = [number for number, node in enumerate(all_nodes) if not node.is_free]
    new = {number: place for place, number in enumerate(kept)}
    for number in kept:
        all_nodes[number].deps = list(dict.fromkeys(new[dep] for dep in all_nodes[number].deps))
    return Nodes([all_nodes[number] for number in kept], nodes.ids)


def stands_for(graph: StageGraph, member: int) -> int:
    """Returns the member whose memory a tensor uses: another layout of a tensor counts as that tensor."""
    own = graph.members[member]
    return own.x1 if own.operation.kind is Kind.SAME else member
