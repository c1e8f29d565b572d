"""The nodes of a pipeline stage in columns, whatever the sizes are; layers between the outer ones are copies of one.

Rows come in *segments*: the nodes of one position's own tensors, of its updated weights, of what it receives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from forerun.program.types import I8, I32, I64
from forerun.stage.first.members import Form, Member, deal, model
from forerun.stage.first.nodes import Amount, Node, stage_nodes

DEGREES = ("dp", "tp", "sp")
_LAYERS_A_STAGE = 3
"""as many as tell the first and last layer of a stage from those between"""


@dataclass(frozen=True, slots=True)
class Places:
    """Where each entry of a list belongs; entries of a segment are side by side."""

    form: I8
    """Form"""
    user: I32
    """position whose segment it is in"""

    def __len__(self) -> int:
        return len(self.form)


@dataclass(frozen=True, slots=True)
class Lists:
    """For each row a list of entries of another list."""

    ptr: I64
    entry: I32


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensors that nodes read or make."""

    places: Places
    position: I32
    """position whose tensor it is: of what is received, the sender"""
    name: I32
    """into StageSkeleton.names"""
    amount: I32
    """into ModelSkeleton.amounts"""


@dataclass(frozen=True, slots=True)
class StageSkeleton:
    """One pipeline stage; one row a node, in file order."""

    places: Places
    position: I32
    """position whose tensor the node works for: of a RECV, the sender"""
    name: I32
    """that tensor's name, into ModelSkeleton.names"""
    role: I8
    """into SUFFIX"""
    kind: I8
    number: I32
    """how many nodes of the stage are numbered before it; of a message -1"""
    is_backward: I8
    num_ops: I32
    size: I32
    """amounts: what a computation costs and touches, what a communication moves"""
    comm_type: I8
    degree: I8
    """into DEGREES, -1"""
    data: Lists
    ctrl: Lists
    inputs: Lists
    outputs: Lists
    tensors: Tensors
    numbered: I32
    """nodes numbered in each segment, (3, positions)"""


@dataclass(frozen=True, slots=True)
class ModelSkeleton:
    """All pipeline stages, in the order of their ranks."""

    stages: tuple[StageSkeleton, ...]
    names: tuple[str, ...]
    """of tensors within their blocks, with their shapes"""
    shapes: tuple[str, ...]
    amounts: tuple[Amount, ...]
    layers: int


class _Table(dict[Any, int]):
    """Numbers what it is asked for, from 0."""

    def __missing__(self, key: Any) -> int:
        self[key] = len(self)
        return self[key]


def build(sharded: bool, recompute: bool, degrees: tuple[str, ...], stages: int, layers: int) -> ModelSkeleton:
    """Every node made on its own. `degrees` are those above 1."""
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
    ptr = np.zeros(len(lists) + 1, dtype=np.int64)
    np.cumsum([len(entries) for entries in lists], out=ptr[1:])
    return Lists(ptr, _int32(entry for entries in lists for entry in entries))


def smallest(stages: int, layers: int) -> int:
    """How many layers are enough to `stretch` to this many."""
    return min(layers, _LAYERS_A_STAGE * stages + layers % stages)


def stretch(base: ModelSkeleton, stages: int, layers: int) -> ModelSkeleton:
    """The skeleton of `layers` layers from that of `smallest(stages, layers)`: on every stage, copies of its second
    layer put in behind it."""
    if layers == base.layers:
        return base
    more = (layers - base.layers) // stages
    return replace(
        base, stages=tuple(_stretch(stage, stages, base.layers, more) for stage in base.stages), layers=layers
    )


@dataclass(frozen=True, slots=True)
class _Copy:
    """How a stretched list comes from the list it was made of."""

    source: I64
    """of each new entry: the old one"""
    user: I32
    """its position"""
    old: Places
    offset: I32
    """of each old entry: its place in its segment"""
    start: I64
    """of each new segment, (3, positions)"""


def _stretch(stage: StageSkeleton, stages: int, layers: int, more: int) -> StageSkeleton:
    on_stage = np.unique(stage.places.user)
    second = int(on_stage[(on_stage >= 1) & (on_stage <= layers)][1])
    moved = more * stages

    def copied(places: Places) -> _Copy:
        return _copied(places, second, stages, layers, more)

    rows, tensors = copied(stage.places), copied(stage.tensors.places)

    def place(copy: _Copy, entries: Any, owner_old: Any, owner_new: Any) -> Any:
        """New number of old `entries` of a list, each told by the position of who refers to it."""
        user = copy.old.user[entries]
        is_end = (user == 0) | (user == layers + 1)
        new = np.where(is_end, np.where(user == 0, 0, user + moved), user + owner_new - owner_old)
        return copy.start[copy.old.form[entries], new] + copy.offset[entries]

    def lists(old: Lists, copy: _Copy) -> Lists:
        length = np.diff(old.ptr)[rows.source]
        ptr = np.zeros(len(length) + 1, dtype=np.int64)
        np.cumsum(length, out=ptr[1:])
        entries = old.entry[np.arange(ptr[-1]) + np.repeat(old.ptr[rows.source] - ptr[:-1], length)]
        owner = np.repeat(stage.places.user[rows.source], length), np.repeat(rows.user, length)
        return Lists(ptr, place(copy, entries, *owner).astype(np.int32))

    def shifted(position: I32, copy: _Copy) -> I32:
        old_user = copy.old.user[copy.source]
        return (position[copy.source] + copy.user - old_user).astype(np.int32)

    numbered = _numbered(stage.numbered, second, stages, layers, more)
    before_old, before_new = _starts(stage.numbered), _starts(numbered)
    form, old_user = stage.places.form[rows.source], stage.places.user[rows.source]
    number = stage.number[rows.source]
    number = np.where(number < 0, -1, number - before_old[form, old_user] + before_new[form, rows.user])
    plain = ("name", "role", "kind", "is_backward", "num_ops", "size", "comm_type", "degree")
    kept = {column: getattr(stage, column)[rows.source] for column in plain}
    return StageSkeleton(
        places=Places(form, rows.user),
        position=shifted(stage.position, rows),
        number=number.astype(np.int32),
        data=lists(stage.data, rows),
        ctrl=lists(stage.ctrl, rows),
        inputs=lists(stage.inputs, tensors),
        outputs=lists(stage.outputs, tensors),
        tensors=Tensors(
            Places(stage.tensors.places.form[tensors.source], tensors.user),
            shifted(stage.tensors.position, tensors),
            stage.tensors.name[tensors.source],
            stage.tensors.amount[tensors.source],
        ),
        numbered=numbered,
        **kept,
    )


def _starts(lengths: Any) -> I64:
    """First number of each segment where segments come by form, in each the embeddings before the layers."""
    end = lengths.shape[1] - 1
    order = np.array([0, end, *range(1, end)])
    flat = lengths[:, order].ravel()
    starts = np.zeros(lengths.shape, dtype=np.int64)
    starts[:, order] = (np.cumsum(flat) - flat).reshape(lengths.shape)
    return starts


def _numbered(lengths: I32, second: int, stages: int, layers: int, more: int) -> I32:
    """Lengths of segments by (form, position), with `more` copies of position `second` put in."""
    moved = more * stages
    new = np.zeros((len(lengths), lengths.shape[1] + moved), dtype=np.int32)
    new[:, : second + 1] = lengths[:, : second + 1]
    new[:, second + 1 + moved :] = lengths[:, second + 1 :]
    new[:, second + stages : second + moved + 1 : stages] = lengths[:, second, None]
    return new


def _copied(places: Places, second: int, stages: int, layers: int, more: int) -> _Copy:
    old_lengths = np.zeros((len(Form), layers + 2), dtype=np.int32)
    np.add.at(old_lengths, (places.form, places.user), 1)
    lengths = _numbered(old_lengths, second, stages, layers, more)
    old_start, start = _starts(old_lengths), _starts(lengths)
    offset = np.arange(len(places)) - old_start[places.form, places.user]
    pieces, users = [], []
    end = layers + 1
    for form in Form:
        for old in (0, end, *range(1, end)):
            length = int(old_lengths[form, old])
            if not length:
                continue
            rows = np.arange(old_start[form, old], old_start[form, old] + length)
            first = old + more * stages if old > second else old
            times = more + 1 if old == second else 1
            pieces.append(np.tile(rows, times))
            users.append(np.repeat(first + stages * np.arange(times), length))
    return _Copy(np.concatenate(pieces), np.concatenate(users).astype(np.int32), places, offset.astype(np.int32), start)
