"""Checks the traces of a run: nodes, dependencies, cycles, messages and groups."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forerun.astrasim.chakra.attributes import DIMENSION_SPELLINGS, Value, decoded, participants_attribute, text_of
from forerun.astrasim.chakra.checks import Finding, Findings, Problem, attempt, number, problems, tensor_problems
from forerun.astrasim.chakra.columns import AttributeCache
from forerun.astrasim.chakra.graph import Graph
from forerun.astrasim.chakra.matching import ALL_RANKS, Collectives, Messages
from forerun.astrasim.chakra.reader import collector_paused, node_messages
from forerun.astrasim.chakra.schema import RawNode
from forerun.astrasim.chakra.trace import CommGroups, CommType, NodeKind
from forerun.astrasim.chakra.traces import trace_files
from forerun.common.admission import opened

_SEND, _COLLECTIVE, _LAST_COMM_TYPE = int(NodeKind.SEND), int(NodeKind.COLLECTIVE), int(max(CommType))
LISTED = 100
"""listed findings of each severity and kind; the others are counted"""


def validate(
    traces: str | Path | Sequence[str | Path],
    comm_groups: CommGroups | None = None,
    n_ranks: int | None = None,
    limit: int = LISTED,
) -> list[Finding]:
    """Returns the findings about the traces of a run, given its prefix, its folder or the files of some ranks.

    With the files of some ranks, only these are compared with each other. At most `limit` findings of each severity
    and kind are listed. It reads node by node, so memory grows by about 100 bytes for each node of the longest trace,
    and by the operations that wait for another rank.

    Raises ForerunError if a file can't be read or is damaged, as nothing behind that place can be checked.
    """
    files, whole = trace_files(traces, n_ranks)
    check = _Check(set(files), whole, comm_groups, Findings(limit))
    for rank, path in files.items():
        check.rank(rank, path)
    return check.end()


class _Check:
    def __init__(self, ranks: set[int], whole: bool, comm_groups: CommGroups | None, findings: Findings) -> None:
        self._ranks, self._whole = ranks, whole
        self._findings = findings
        self._messages = Messages()
        self._collectives = Collectives(comm_groups)
        for name, members in (comm_groups or {}).items():
            if whole and max(members) >= len(ranks):
                findings.add("group", f"group {name!r} has rank {max(members)}, but there are {len(ranks)} traces")

    def rank(self, rank: int, path: Path) -> None:
        """Checks one rank's trace."""
        graph = Graph()
        cache = _CheckedAttributes()
        with opened(path) as file, collector_paused():
            for node in node_messages(file, str(path), RawNode):
                graph.add(node)
                attributes = dict([cache[blob] for blob in node.attr])
                wrong = [*cache.complaints, *problems(node, attributes)]
                cache.complaints.clear()
                for severity, message in wrong:
                    self._findings.add("node", message, rank, node.id, node.name, severity)
                if _SEND <= node.type <= _COLLECTIVE:
                    self._communication(rank, node, attributes)
        self._collectives.end_rank(rank, self._findings)
        self._graph(rank, path, graph)

    def _communication(self, rank: int, node: Any, attributes: dict[str, Value]) -> None:
        size = number(attributes, "comm_size")
        if size is None:
            return
        if node.type == _COLLECTIVE:
            self._collective(rank, node, attributes, size)
            return
        is_send = node.type == _SEND
        peer = number(attributes, "comm_dst" if is_send else "comm_src")
        tag = number(attributes, "comm_tag") or 0
        if peer is None:
            return
        if peer not in self._ranks:
            if self._whole:
                what = f"its peer is rank {peer}, but there are {len(self._ranks)} traces"
                self._findings.add("message", what, rank, node.id, node.name)
            return
        route = (rank, peer, tag, size) if is_send else (peer, rank, tag, size)
        self._messages.add(is_send, route, node.id, node.name)

    def _collective(self, rank: int, node: Any, attributes: dict[str, Value], size: int) -> None:
        comm_type = number(attributes, "comm_type")
        name = participants_attribute(attributes)
        if comm_type is None or not 0 <= comm_type <= _LAST_COMM_TYPE or name in DIMENSION_SPELLINGS:
            return
        group, problem = attempt(text_of, attributes[name], name) if name else (ALL_RANKS, "")
        if not problem:
            problem = self._collectives.add(rank, group, comm_type, size, node.id & (1 << 63) - 1)
            if problem:
                self._findings.add("group", problem, rank, node.id, node.name)

    def _graph(self, rank: int, path: Path, graph: Graph) -> None:
        found = graph.problems(self._findings.left("dependency") + 1)
        if not found:
            return
        names = _names(path, {node for _, node, _ in found})
        for kind, node, message in found:
            self._findings.add(kind, message, rank, node, names.get(node, ""))

    def end(self) -> list[Finding]:
        """Returns all findings, with those that need all ranks."""
        self._messages.report(self._findings)
        self._collectives.report(self._ranks, self._findings)
        return self._findings.all()


class _CheckedAttributes(AttributeCache):
    """An AttributeCache that collects complaints about attributes, and checks lists of tensors but keeps none."""

    def __init__(self) -> None:
        super().__init__()
        self.complaints: list[Problem] = []

    def __missing__(self, blob: bytes) -> tuple[str, Value]:
        try:
            name, value = decoded(blob)
        except ValueError as error:
            self.complaints.append(("error", str(error)))
            return "", None
        if name in ("inputs", "outputs"):
            if problem := tensor_problems(name, value):
                self.complaints.append(("error", problem))
            return name, None
        return self.keep(blob, (name, value))


def _names(path: Path, nodes: set[int]) -> dict[int, str]:
    with opened(path) as file:
        return {node.id: node.name for node in node_messages(file, str(path), RawNode) if node.id in nodes}
