"""Columns of a stage's ranks: one micro-batch's nodes laid out for all micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.astrasim.chakra.trace import NodeKind
from forerun.astrasim.stage.second_generation.memory import Counting, traced_size
from forerun.astrasim.stage.second_generation.nodes import (
    COMP,
    RECEIVE,
    SECOND_COMM,
    SUFFIX,
    Nodes,
    Numbers,
    stands_for,
)
from forerun.astrasim.stage.second_generation.pipeline import StageGraph
from forerun.core.program.types import I8, I32, I64

FIRST_TAG = 1
_PREFIX = ("mb{}.", "", "shadow_mb{}.")
"""of names: of a micro-batch, shared, received"""


@dataclass(frozen=True, slots=True)
class Numbering:
    """Ids and links: nodes are numbered stage by stage, messages after all of them, the sending node of a link first.

    A link is one tensor of one micro-batch that one stage receives.
    """

    first_id: int
    first_message_id: int
    first_link: I64
    """per receiving stage"""
    links_a_batch: I64
    """per receiving stage: how many tensors it receives of each micro-batch"""


@dataclass(frozen=True)
class StageColumns:
    """What is the same on every rank of a stage; shapes as in RankTrace."""

    node_id: I64
    kind: I8
    num_ops: I64
    tensor_size: I64
    comm_type: I8
    comm_size: I64
    comm_tag: I64
    degree: I32
    """of a collective: which of the degrees above 1 it goes over, else -1"""
    partner: I32
    """of a message: the stage at the other end, else -1"""
    data_ptr: I64
    data: I32
    input_ptr: I64
    input_tensor: I32
    output_ptr: I64
    output_tensor: I32
    tensor_bytes: I64
    _graph: StageGraph
    _nodes: Nodes
    _rows: _Copies
    _tensors: _Copies

    @cached_property
    def names(self) -> tuple[str, ...]:
        """`mb0.transformer.0.mha.qkv@0_COMP`, per row."""
        ids = self._ids
        owner = np.array(self._nodes.tensor, dtype=np.int64)[self._rows.source]
        owners = self._tensors.place(owner, self._rows.batch).tolist()
        suffixes = [SUFFIX[role] for role in self._nodes.role]
        return tuple(ids[o] + suffixes[s] for o, s in zip(owners, self._rows.source.tolist(), strict=True))

    @cached_property
    def tensor_names(self) -> tuple[str, ...]:
        """STAGE writes the shape behind the name: `mb0.transformer.0.mha.q@0MicroBatch/dp,Seq/cp,...`."""
        shapes: dict[int, str] = {}
        for member in self._graph.members:
            key = id(member.operation)
            if key not in shapes:
                shapes[key] = ",".join(str(dim) for dim in member.operation.result.shape)
        texts = [shapes[id(member.operation)] for member in self._graph.members]
        return tuple(name + texts[i] for name, i in zip(self._ids, self._tensors.source.tolist(), strict=True))

    @cached_property
    def _ids(self) -> list[str]:
        tensors, members = self._tensors, zip(self._graph.members, self._graph.revisions, strict=True)
        part = np.searchsorted([tensors.per_batch, tensors.end], tensors.source, side="right")
        tails = [f"{member.name}@{revision}" for member, revision in members]
        places = zip(tensors.source.tolist(), tensors.batch.tolist(), part.tolist(), strict=True)
        return [_PREFIX[kind].format(batch) + tails[source] for source, batch, kind in places]


class _Copies:
    """A list of which the first `per_batch` entries and the last `received` are there once a micro-batch: copies of the
    first, then what is between them, then copies of the last."""

    def __init__(self, length: int, per_batch: int, received: int, batches: int) -> None:
        end = length - received
        self.per_batch, self.end, self.received = per_batch, end, received
        self.first_shared = batches * per_batch
        self.first_received = self.first_shared + end - per_batch
        each = np.arange(batches, dtype=np.int64)
        self.source = np.concatenate(
            [
                np.tile(np.arange(per_batch), batches),
                np.arange(per_batch, end),
                np.tile(np.arange(end, length), batches),
            ]
        )
        """of each entry: its place in the list of one micro-batch"""
        self.batch = np.concatenate(
            [np.repeat(each, per_batch), np.zeros(end - per_batch, np.int64), np.repeat(each, received)]
        )

    def place(self, source: I64, batch: I64 | int) -> I64:
        """Where a micro-batch's copy of an entry is."""
        shared = self.first_shared + source - self.per_batch
        received = self.first_received + source - self.end + batch * self.received
        first = source + batch * self.per_batch
        return np.where(source < self.per_batch, first, np.where(source < self.end, shared, received))


def stage_columns(
    stage: int,
    graph: StageGraph,
    nodes: Nodes,
    batches: int,
    numbering: Numbering,
    numbers: Numbers,
    counting: Counting,
) -> StageColumns:
    """Lay out `batches` micro-batches, each with its own copy of what is not shared."""
    members = len(graph.members)
    received = len(graph.received_from)
    tensors = _Copies(members, graph.per_batch, received, batches)
    owner = np.array(nodes.tensor, dtype=np.int64)
    rows = _Copies(len(owner), int((owner < graph.per_batch).sum()), int((owner >= members - received).sum()), batches)
    kind = np.array(nodes.kind, dtype=np.int8)
    elements = np.array(nodes.elements).astype(np.int64)
    computes = kind == NodeKind.COMP
    node_id, tag = _ids_and_tags(stage, nodes, rows, numbering)
    sizes = np.array([traced_size(graph, index, numbers, counting) for index in range(members)], dtype=np.float64)
    source = rows.source

    def column(values: Any, dtype: npt.DTypeLike) -> Any:
        return np.asarray(values)[source].astype(dtype)

    return StageColumns(
        node_id,
        kind[source],
        column(nodes.num_ops, np.int64),
        column(np.where(computes, elements, 0), np.int64),
        column(nodes.comm, np.int8),
        column(np.where(computes, 0, elements), np.int64),
        tag,
        column(nodes.degree, np.int32),
        column(nodes.partner, np.int32),
        *_dependencies(nodes.deps, rows, batches),
        *_lists(_inputs(graph, nodes), rows, tensors),
        *_lists(_outputs(graph, nodes), rows, tensors),
        sizes.astype(np.int64)[tensors.source],
        graph,
        nodes,
        rows,
        tensors,
    )


def _ids_and_tags(stage: int, nodes: Nodes, rows: _Copies, numbering: Numbering) -> tuple[I64, I64]:
    part = np.searchsorted([rows.per_batch, rows.end], rows.source, side="right")
    per_batch, shared, received = nodes.ids
    batches = rows.first_shared // rows.per_batch
    first = np.array([0, batches * per_batch, batches * per_batch + shared])
    number = np.array(nodes.number, dtype=np.int64)[rows.source]
    node_id = numbering.first_id + first[part] + rows.batch * np.array([per_batch, 0, received])[part] + number
    kind = np.array(nodes.kind)[rows.source]
    sends, receives = kind == NodeKind.SEND, kind == NodeKind.RECV
    receiver = np.where(sends, np.array(nodes.partner)[rows.source], stage)
    link = numbering.first_link[receiver] + rows.batch * numbering.links_a_batch[receiver] + number
    message_id = numbering.first_message_id + 2 * link + receives
    is_message = sends | receives
    return np.where(is_message, message_id, node_id), np.where(is_message, FIRST_TAG + link, 0)


def _csr(lists: Sequence[Sequence[int]]) -> tuple[I64, I64]:
    ptr = np.zeros(len(lists) + 1, dtype=np.int64)
    np.cumsum([len(entries) for entries in lists], out=ptr[1:])
    return ptr, np.array([entry for entries in lists for entry in entries], dtype=np.int64)


def _lists(lists: Sequence[Sequence[int]], rows: _Copies, targets: _Copies) -> tuple[I64, I32]:
    """Lists of entries of `targets`, of each micro-batch its own."""
    one_ptr, one = _csr(lists)
    length = np.diff(one_ptr)[rows.source]
    ptr = np.zeros(len(length) + 1, dtype=np.int64)
    np.cumsum(length, out=ptr[1:])
    index = np.arange(ptr[-1]) + np.repeat(one_ptr[rows.source] - ptr[:-1], length)
    return ptr, targets.place(one[index], np.repeat(rows.batch, length)).astype(np.int32)


def _dependencies(deps: Sequence[Sequence[int]], rows: _Copies, batches: int) -> tuple[I64, I32]:
    """What is shared waits for all micro-batches, the rest for its own."""
    own = [() if rows.per_batch <= row < rows.end else entries for row, entries in enumerate(deps)]
    ptr, data = _lists(own, rows, rows)
    shared = []
    for entries in deps[rows.per_batch : rows.end]:
        sources = np.array(entries, dtype=np.int64)
        places = np.concatenate([rows.place(sources, batch) for batch in range(batches)])
        shared.append(list(dict.fromkeys(places.tolist())))
    shared_ptr, shared_data = _csr(shared)
    at = ptr[rows.first_shared]
    lengths = np.diff(ptr)
    lengths[rows.first_shared : rows.first_received] = np.diff(shared_ptr)
    ptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    return ptr, np.concatenate([data[:at], shared_data, data[at:]]).astype(np.int32)


def _inputs(graph: StageGraph, nodes: Nodes) -> list[list[int]]:
    found = []
    for tensor, role, kind in zip(nodes.tensor, nodes.role, nodes.kind, strict=True):
        member = graph.members[tensor]
        if role == COMP:
            operands = [member.first, member.second]
        elif kind == NodeKind.COLLECTIVE:
            operands = [member.second if role == SECOND_COMM else member.first]
        else:
            operands = [tensor] if kind == NodeKind.SEND else []
        found.append([stands_for(graph, operand) for operand in operands if operand >= 0])
    return found


def _outputs(graph: StageGraph, nodes: Nodes) -> list[list[int]]:
    made = {COMP, RECEIVE}
    return [
        [stands_for(graph, tensor)] if role in made else []
        for tensor, role in zip(nodes.tensor, nodes.role, strict=True)
    ]
