"""The columns of a stage's ranks, in which the nodes of one micro-batch are repeated for all micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from forerun.astrasim.chakra.trace import NodeKind, RankTrace, new_trace
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
from forerun.common.arrays import csr, pointers
from forerun.core.program.types import I32, I64

FIRST_TAG = 1
_PREFIX = ("mb{}.", "", "shadow_mb{}.")
"""prefixes of names: of a micro-batch, shared, received"""


@dataclass(frozen=True, slots=True)
class Numbering:
    """The ids of nodes and links. Nodes are numbered stage by stage, then messages, each send before its receive.

    A link is one tensor of one micro-batch that one stage receives.
    """

    first_id: int
    first_message_id: int
    first_link: I64
    """for each receiving stage: its first link"""
    links_a_batch: I64
    """for each receiving stage: the number of tensors that it receives in each micro-batch"""


@dataclass(frozen=True)
class StageColumns:
    """The part of the traces that is the same on every rank of a stage."""

    trace: RankTrace
    """without peers and group names"""
    partner: I32
    """of a message: the other stage; else -1"""
    _graph: StageGraph
    _nodes: Nodes
    _rows: _Copies
    _tensors: _Copies

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Returns the name of every row, such as `mb0.transformer.0.mha.qkv@0_COMP`."""
        ids = self._ids
        owner = self._nodes.column("tensor")[self._rows.source]
        owners = self._tensors.place(owner, self._rows.batch).tolist()
        suffixes = [SUFFIX[node.role] for node in self._nodes.nodes]
        return tuple(ids[o] + suffixes[s] for o, s in zip(owners, self._rows.source.tolist(), strict=True))

    @cached_property
    def tensor_names(self) -> tuple[str, ...]:
        """Returns the name of every tensor with its shape, such as
        `mb0.transformer.0.mha.q@0MicroBatch/dp,Seq/cp,...`."""
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
    """A list whose first `per_batch` and last `received` entries exist once for each micro-batch.

    It holds all copies of the first entries, then the entries between them, then all copies of the last ones.
    """

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
        """for each entry: its place in the list of one micro-batch"""
        self.batch = np.concatenate(
            [np.repeat(each, per_batch), np.zeros(end - per_batch, np.int64), np.repeat(each, received)]
        )

    def place(self, source: I64, batch: I64 | int) -> I64:
        """Returns the place of a micro-batch's copy of an entry."""
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
    """Lays out `batches` micro-batches, each with its own copy of the nodes and tensors that are not shared."""
    members, received = len(graph.members), len(graph.received_from)
    tensors = _Copies(members, graph.per_batch, received, batches)
    owner = nodes.column("tensor")
    rows = _Copies(len(owner), int((owner < graph.per_batch).sum()), int((owner >= members - received).sum()), batches)
    elements, computes = nodes.column("elements").astype(np.int64), nodes.column("kind") == NodeKind.COMP
    node_id, tag = _ids_and_tags(stage, nodes, rows, numbering)
    sizes = np.array([traced_size(graph, index, numbers, counting) for index in range(members)], dtype=np.float64)
    data_ptr, data = _dependencies([node.deps for node in nodes.nodes], rows, batches)
    input_ptr, input_tensor = _lists(_inputs(graph, nodes), rows, tensors)
    output_ptr, output_tensor = _lists(_outputs(graph, nodes), rows, tensors)
    trace = new_trace(
        len(node_id),
        node_id=node_id,
        kind=nodes.column("kind")[rows.source].astype(np.int8),
        num_ops=nodes.column("num_ops")[rows.source].astype(np.int64),
        tensor_size=np.where(computes, elements, 0)[rows.source],
        comm_type=nodes.column("comm")[rows.source].astype(np.int8),
        comm_size=np.where(computes, 0, elements)[rows.source],
        comm_tag=tag,
        group=nodes.column("degree")[rows.source].astype(np.int32),
        data_ptr=data_ptr,
        data=data,
        input_ptr=input_ptr,
        input_tensor=input_tensor,
        output_ptr=output_ptr,
        output_tensor=output_tensor,
        tensor_bytes=sizes.astype(np.int64)[tensors.source],
    )
    partner = nodes.column("partner")[rows.source].astype(np.int32)
    return StageColumns(trace, partner, graph, nodes, rows, tensors)


def _ids_and_tags(stage: int, nodes: Nodes, rows: _Copies, numbering: Numbering) -> tuple[I64, I64]:
    part = np.searchsorted([rows.per_batch, rows.end], rows.source, side="right")
    per_batch, shared, received = nodes.ids
    batches = rows.first_shared // rows.per_batch
    first = np.array([0, batches * per_batch, batches * per_batch + shared])
    number = nodes.column("number")[rows.source]
    node_id = numbering.first_id + first[part] + rows.batch * np.array([per_batch, 0, received])[part] + number
    kind = nodes.column("kind")[rows.source]
    sends, receives = kind == NodeKind.SEND, kind == NodeKind.RECV
    receiver = np.where(sends, nodes.column("partner")[rows.source], stage)
    link = numbering.first_link[receiver] + rows.batch * numbering.links_a_batch[receiver] + number
    message_id = numbering.first_message_id + 2 * link + receives
    is_message = sends | receives
    return np.where(is_message, message_id, node_id), np.where(is_message, FIRST_TAG + link, 0)


def _lists(lists: Sequence[Sequence[int]], rows: _Copies, targets: _Copies) -> tuple[I64, I32]:
    """Returns lists of entries of `targets`, each micro-batch with its own copies."""
    one_ptr, one = csr(lists)
    length = np.diff(one_ptr)[rows.source]
    ptr = pointers(length)
    index = np.arange(ptr[-1]) + np.repeat(one_ptr[rows.source] - ptr[:-1], length)
    return ptr, targets.place(one[index], np.repeat(rows.batch, length)).astype(np.int32)


def _dependencies(deps: Sequence[Sequence[int]], rows: _Copies, batches: int) -> tuple[I64, I32]:
    """Returns dependencies: shared nodes wait for all micro-batches, the others for their own."""
    own = [() if rows.per_batch <= row < rows.end else entries for row, entries in enumerate(deps)]
    ptr, data = _lists(own, rows, rows)
    shared = []
    for entries in deps[rows.per_batch : rows.end]:
        sources = np.array(entries, dtype=np.int64)
        places = np.concatenate([rows.place(sources, batch) for batch in range(batches)])
        shared.append(list(dict.fromkeys(places.tolist())))
    shared_ptr, shared_data = csr(shared)
    at = ptr[rows.first_shared]
    lengths = np.diff(ptr)
    lengths[rows.first_shared : rows.first_received] = np.diff(shared_ptr)
    return pointers(lengths), np.concatenate([data[:at], shared_data, data[at:]]).astype(np.int32)


def _inputs(graph: StageGraph, nodes: Nodes) -> list[list[int]]:
    found = []
    for node in nodes.nodes:
        member = graph.members[node.tensor]
        if node.role == COMP:
            operands = [member.x1, member.x2]
        elif node.kind == NodeKind.COLLECTIVE:
            operands = [member.x2 if node.role == SECOND_COMM else member.x1]
        else:
            operands = [node.tensor] if node.kind == NodeKind.SEND else []
        found.append([stands_for(graph, operand) for operand in operands if operand >= 0])
    return found


def _outputs(graph: StageGraph, nodes: Nodes) -> list[list[int]]:
    return [[stands_for(graph, node.tensor)] if node.role in (COMP, RECEIVE) else [] for node in nodes.nodes]
