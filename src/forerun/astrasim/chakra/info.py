"""Counts the contents of traces: nodes by type, operations, bytes by collective and group, depth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forerun.astrasim.chakra.attributes import DIMENSION_SPELLINGS, Value, participants_attribute, text_of, whole_number
from forerun.astrasim.chakra.columns import NumberCache
from forerun.astrasim.chakra.graph import Graph
from forerun.astrasim.chakra.reader import collector_paused, describe, metadata, node_messages
from forerun.astrasim.chakra.schema import RawNode
from forerun.astrasim.chakra.trace import CommType, NodeKind
from forerun.astrasim.chakra.traces import trace_files
from forerun.common.admission import opened
from forerun.common.errors import ForerunError

_BY_DIMENSION = "(by dimension)"
"""stands for the group of collectives that name dimensions of the network"""
_COUNTED = 1 << 16
"""groups that are counted separately"""


@dataclass(slots=True)
class TraceInfo:
    """Figures of one trace, or of several together."""

    nodes: Counter[str] = field(default_factory=Counter)
    """type of node -> number of nodes"""
    dependencies: int = 0
    num_ops: int = 0
    """of COMP nodes"""
    tensor_bytes: int = 0
    """the traffic of COMP and MEM nodes, in the trace's bytes"""
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(operation, group) -> number of calls; the group is empty for messages and for all ranks"""
    comm_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(operation, group) -> sum of comm_size"""
    depth: int = 0
    """nodes on the longest chain of dependencies of any one trace"""

    def add(self, other: TraceInfo) -> None:
        """Adds the figures of another trace."""
        self.nodes += other.nodes
        self.calls += other.calls
        self.comm_bytes.update(other.comm_bytes)
        self.dependencies += other.dependencies
        self.num_ops += other.num_ops
        self.tensor_bytes += other.tensor_bytes
        self.depth = max(self.depth, other.depth)

    def record(self) -> dict[str, Any]:
        """Returns the figures as JSON values."""
        return {
            "nodes": self.nodes.total(),
            "nodes_by_type": dict(sorted(self.nodes.items())),
            "dependencies": self.dependencies,
            "num_ops": self.num_ops,
            "tensor_bytes": self.tensor_bytes,
            "critical_path_nodes": self.depth,
            "communication": [
                {"operation": operation, "group": group, "calls": calls, "bytes": self.comm_bytes[operation, group]}
                for (operation, group), calls in sorted(self.calls.items())
            ],
        }


@dataclass(slots=True)
class RankInfo:
    """Figures of one rank's trace, and its metadata."""

    rank: int
    path: str
    metadata: dict[str, str]
    figures: TraceInfo


def info(traces: str | Path | Sequence[str | Path], n_ranks: int | None = None) -> list[RankInfo]:
    """Returns the figures of each rank of a run, given its prefix, its folder or the files of some ranks.

    It reads node by node, so memory grows by about 100 bytes for each node of the longest trace.

    Raises ForerunError if a file can't be read, is damaged, or has text where a number belongs.
    """
    files, _ = trace_files(traces, n_ranks)
    return [_rank_info(rank, path) for rank, path in files.items()]


def overall(ranks: Iterable[RankInfo]) -> TraceInfo:
    """Adds up the figures of all ranks."""
    total = TraceInfo()
    for rank in ranks:
        total.add(rank.figures)
    return total


def _rank_info(rank: int, path: Path) -> RankInfo:
    figures, graph, cache = TraceInfo(), Graph(), NumberCache()
    with opened(path) as file, collector_paused():
        for node in node_messages(file, str(path), RawNode):
            graph.add(node)
            try:
                _count(figures, node, dict([cache[blob] for blob in node.attr]))
            except ValueError as error:
                raise ForerunError(f"{path}: {describe(node)}: {error}") from None
    figures.depth, figures.dependencies = graph.depth(), graph.n_dependencies
    head = metadata(path)
    said = {attribute.name: attribute.string_val for attribute in head.attr if attribute.string_val}
    return RankInfo(rank, str(path), {"version": head.version, **said} if head.version else said, figures)


_KINDS = {int(kind): kind.name.lower() for kind in NodeKind}
_OPERATIONS = {int(kind): kind.name.lower() for kind in CommType}
_SEND, _COLLECTIVE = int(NodeKind.SEND), int(NodeKind.COLLECTIVE)


def _count(figures: TraceInfo, node: Any, attributes: dict[str, Value]) -> None:
    kind = node.type
    operation = _KINDS.get(kind) or f"type {kind}"
    figures.nodes[operation] += 1
    if "num_ops" in attributes:
        figures.num_ops += whole_number(attributes["num_ops"] or 0, "num_ops")
    if "tensor_size" in attributes:
        figures.tensor_bytes += whole_number(attributes["tensor_size"] or 0, "tensor_size")
    if not _SEND <= kind <= _COLLECTIVE:
        return
    group = ""
    if kind == _COLLECTIVE:
        comm_type = whole_number(attributes.get("comm_type", -1), "comm_type")
        operation = _OPERATIONS.get(comm_type) or f"comm_type {comm_type}"
        attribute = participants_attribute(attributes)
        if attribute in DIMENSION_SPELLINGS:
            group = _BY_DIMENSION
        elif attribute:
            group = text_of(attributes[attribute], attribute)
    key = operation, group
    if key not in figures.calls and len(figures.calls) >= _COUNTED:
        key = operation, "(others)"
    figures.calls[key] += 1
    figures.comm_bytes[key] += whole_number(attributes.get("comm_size") or 0, "comm_size")
