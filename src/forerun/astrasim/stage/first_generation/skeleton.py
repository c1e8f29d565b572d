"""The nodes of a pipeline stage in columns, independent of sizes.

Rows come in *segments*: the nodes of one position's own tensors, of its updated weights, of its received tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forerun.astrasim.stage.first_generation.members import Form, Member, deal, model
from forerun.astrasim.stage.first_generation.nodes import Amount, Node, stage_nodes
from forerun.common.arrays import csr
from forerun.core.program.types import I8, I32, I64

DEGREES = ("dp", "tp", "sp")


@dataclass(frozen=True, slots=True)
class Places:
    """The segment of each entry of a list; the entries of a segment are adjacent."""

    form: I8
    """Form"""
    user: I32
    """position of its segment"""


@dataclass(frozen=True, slots=True)
class Lists:
    """A list of entries for each row, as CSR."""

    ptr: I64
    entry: I32


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensors that nodes read or write."""

    places: Places
    position: I32
    """position of the tensor; of a received one, the sender's"""
    name: I32
    """into ModelSkeleton.names"""
    amount: I32
    """into ModelSkeleton.amounts"""


@dataclass(frozen=True, slots=True)
class StageSkeleton:
    """One pipeline stage: a row for each node, in file order."""

    places: Places
    position: I32
    """position of the node's tensor; of a RECV, the sender's"""
    name: I32
    """name of that tensor: index into ModelSkeleton.names"""
    role: I8
    """index into SUFFIX"""
    kind: I8
    number: I32
    """number of ids of the stage before it; -1 for a message"""
    is_backward: I8
    num_ops: I32
    size: I32
    """indexes into ModelSkeleton.amounts: the operations, and the elements that the node touches or moves"""
    comm_type: I8
    degree: I8
    """index into DEGREES, -1 for none"""
    data: Lists
    ctrl: Lists
    inputs: Lists
    outputs: Lists
    tensors: Tensors
    numbered: I32
    """number of ids in each segment, (3, positions)"""


@dataclass(frozen=True, slots=True)
class ModelSkeleton:
    """All pipeline stages, in the order of their ranks."""

    stages: tuple[StageSkeleton, ...]
    names: tuple[str, ...]
    """names of tensors in their blocks"""
    shapes: tuple[str, ...]
    """shapes of these tensors"""
    amounts: tuple[Amount, ...]
    layers: int


class _Table(dict[Any, int]):
    """Numbers its keys from 0 in the order of first use."""

    def __missing__(self, key: Any) -> int:
        self[key] = len(self)
        return self[key]


def build(sharded: bool, recompute: bool, degrees: tuple[str, ...], stages: int, layers: int) -> ModelSkeleton:
    """Builds every node anew; `degrees` are those above 1."""
    names, amounts = _Table(), _Table()
    assert amounts[()] == 0
    parts = deal(model(sharded, recompute, layers), layers, stages)
    columns = tuple(_columns(*stage_nodes(part, degrees), part.members, layers, names, amounts) for part in parts)
    texts, shapes = zip(*names, strict=True)
    return ModelSkeleton(columns, texts, shapes, tuple(amounts), layers)


def _columns(
    nodes: list[Node], counts: dict[int, int], members: list[Member], layers: int, names: _Table, amounts: _Table
) -> StageSkeleton:
    row = {id(node): number for number, node in enumerate(nodes)}
    seen = {id(member) for node in nodes for member in (*node.inputs, *node.outputs)}
    listed = [member for member in members if id(member) in seen]
    tensor = {id(member): number for number, member in enumerate(listed)}
    numbered = np.zeros((len(Form), layers + 2), dtype=np.int32)
    for member in members:
        numbered[member.form, member.user] += counts[id(member)]

    def name(member: Member) -> int:
        return names[member.name, ",".join(str(dim) for dim in member.operation.result.shape)]

    return StageSkeleton(
        places=_places([node.member for node in nodes]),
        position=_int32(node.member.position for node in nodes),
        name=_int32(name(node.member) for node in nodes),
        role=_int8(node.role for node in nodes),
        kind=_int8(node.kind for node in nodes),
        number=_int32(node.number for node in nodes),
        is_backward=_int8(node.is_backward for node in nodes),
        num_ops=_int32(amounts[node.num_ops] for node in nodes),
        size=_int32(amounts[node.size] for node in nodes),
        comm_type=_int8(node.comm_type for node in nodes),
        degree=_int8(DEGREES.index(node.degree) if node.degree else -1 for node in nodes),
        data=_lists([[row[id(other)] for other in node.data] for node in nodes]),
        ctrl=_lists([[row[id(other)] for other in node.ctrl] for node in nodes]),
        inputs=_lists([[tensor[id(member)] for member in node.inputs] for node in nodes]),
        outputs=_lists([[tensor[id(member)] for member in node.outputs] for node in nodes]),
        tensors=Tensors(
            _places(listed),
            _int32(member.position for member in listed),
            _int32(name(member) for member in listed),
            _int32(amounts[(member.operation.result.elements,)] for member in listed),
        ),
        numbered=numbered,
    )


def _int8(values: Any) -> I8:
    return np.fromiter(values, dtype=np.int8)


def _int32(values: Any) -> I32:
    return np.fromiter(values, dtype=np.int32)


def _places(members: Sequence[Member]) -> Places:
    return Places(_int8(member.form for member in members), _int32(member.user for member in members))


def _lists(lists: Sequence[Sequence[int]]) -> Lists:
    ptr, entries = csr(lists)
    return Lists(ptr, entries.astype(np.int32))
