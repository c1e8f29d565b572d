"""Nodes of one pipeline stage with symbolic sizes: computations, the collectives before them, messages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from forerun.astrasim.chakra.trace import CommType, NodeKind
from forerun.astrasim.stage.first_generation.members import Form, Member, StageMembers
from forerun.astrasim.stage.matching import collectives
from forerun.astrasim.stage.reference import FIRST_GENERATION
from forerun.astrasim.stage.sizes import ZERO, Size
from forerun.astrasim.stage.tensors import Kind, Layout

Amount = tuple[Size, ...]
"""sizes that are evaluated one by one and added up as doubles"""
SUFFIX = ("_COMP", "_X1COMM", "_X2_COMM", "_Y_SEND", "_Y_RECV")
COMP, FIRST_COMM, SECOND_COMM, SENT, RECEIVED = range(5)
"""the role of a node for its tensor: index into SUFFIX"""


@dataclass(slots=True, eq=False)
class Node:
    """A node of a trace; its dependencies are other nodes."""

    member: Member
    role: int
    kind: NodeKind
    number: int
    """number of nodes of the stage that were made before it, without messages; -1 for a message"""
    size: Amount
    """elements that it reads and writes, or moves"""
    num_ops: Amount = ()
    comm_type: CommType = CommType.NONE
    degree: str = ""
    is_backward: bool = False
    """whether a message goes to the previous position"""
    data: list[Node] = field(default_factory=list)
    ctrl: list[Node] = field(default_factory=list)

    @property
    def inputs(self) -> Iterable[Member]:
        """Returns the tensors that it reads; another layout of a tensor counts as that tensor."""
        member = self.member
        if self.role == COMP:
            operands = [member.x1, member.x2]
        elif self.role == SENT:
            operands = [member]
        else:
            operands = [member.x1 if self.role == FIRST_COMM else member.x2 if self.role == SECOND_COMM else None]
        return [_stands_for(operand) for operand in operands if operand is not None]

    @property
    def outputs(self) -> Iterable[Member]:
        return [self.member] if self.role in (COMP, RECEIVED) else []


def _stands_for(member: Member) -> Member:
    return member.x1 if member.operation.kind is Kind.SAME and member.x1 is not None else member


def stage_nodes(stage: StageMembers, degrees: tuple[str, ...]) -> tuple[list[Node], dict[int, int]]:
    """Returns the nodes in file order, and the number of ids of each member, by id() of the member.

    Computations that cost nothing are left out, but take ids.
    """
    by_member: dict[int, list[Node]] = {}
    output: dict[int, Node] = {}
    entries: list[tuple[Node, Member]] = []
    count = 0
    counts = {}
    for member in stage.members:
        own, wanted = _member_nodes(member, degrees, count)
        counts[id(member)] = len(own)
        count += len(own)
        entries += wanted
        if id(member) in stage.sent:
            own.append(_message(member, SENT, stage.sent[id(member)]))
            own[-1].data.append(own[0])
        if member.form is Form.RECEIVED:
            own.append(_message(member, RECEIVED, member.is_backward))
        by_member[id(member)] = own
        output[id(member)] = own[-1] if member.form is Form.RECEIVED else own[0]
    for node, operand in entries:
        node.data.append(output[id(operand)])
    nodes = _without_free([node for own in by_member.values() for node in own])
    for member in stage.members:
        own = by_member[id(member)]
        for other in member.after:
            (own[1] if own[1:] and own[1].role == FIRST_COMM else own[0]).ctrl.append(output[id(other)])
    _chain(nodes)
    return nodes, counts


def _member_nodes(member: Member, degrees: tuple[str, ...], count: int) -> tuple[list[Node], list[tuple[Node, Member]]]:
    """Returns the computation of a member and the collectives before it, and which of them wait for which operand."""
    operation = member.operation
    size = operation.result.elements, _elements(operation.x1), _elements(operation.x2)
    num_ops = (operation.num_ops,) if operation.num_ops.terms else ()
    comp = Node(member, COMP, NodeKind.COMP, count, size, num_ops)
    nodes, entries = [comp], []
    operands = (member.x1, operation.x1, FIRST_COMM), (member.x2, operation.x2, SECOND_COMM)
    for operand, want, role in operands:
        if operand is None or want is None:
            continue
        made = operand.operation.result
        own = [
            Node(member, role, NodeKind.COLLECTIVE, 0, (made.elements,), (), comm, degree)
            for comm, degree in collectives(made, want, degrees, shared_dims=False)
        ]
        for number, node in enumerate(own):
            node.number = count + len(nodes) + number
            node.data += own[max(number - 1, 0) : number]
        comp.data += own[-1:]
        nodes += own
        entries.append((own[0] if own else comp, operand))
    return nodes, entries


def _elements(at: Layout | None) -> Size:
    return ZERO if at is None else at.elements


def _message(member: Member, role: int, is_backward: bool) -> Node:
    kind = NodeKind.SEND if role == SENT else NodeKind.RECV
    return Node(member, role, kind, -1, (member.operation.result.elements,), is_backward=is_backward)


def _without_free(nodes: list[Node]) -> list[Node]:
    """Leaves out computations that cost nothing; their dependants inherit their dependencies."""
    dependants: dict[int, list[Node]] = {}
    for node in nodes:
        for dep in node.data:
            dependants.setdefault(id(dep), []).append(node)
    free = [node for node in nodes if node.kind is NodeKind.COMP and not node.num_ops]
    for node in free:
        for dependant in dependants.get(id(node), ()):
            dependant.data.remove(node)
            dependant.data += node.data
    left_out = {id(node) for node in free}
    left = [node for node in nodes if id(node) not in left_out]
    for node in left:
        node.data = list(dict.fromkeys(node.data))
    return left


def _chain(nodes: list[Node]) -> None:
    """Chains the collectives that wait for nothing (gathers of weights), as STAGE does."""
    first = [node for node in nodes if node.kind is NodeKind.COLLECTIVE and not node.data and not node.ctrl]
    if len(first) >= FIRST_GENERATION.chained_collectives:
        for before, node in pairwise(first):
            node.ctrl.append(before)
