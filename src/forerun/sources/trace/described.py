"""Describes a recording node by node in a way that doesn't depend on the number of layers.

Module paths lose their numbers, a wait becomes "the node before the last one on stream 2", and tensors become what a
node allocates and what is freed after it. So recordings of one program with different numbers of layers have equal
nodes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from forerun.core.program.types import I64, N_CATEGORIES, OpRow
from forerun.sources.trace.order import last_ended
from forerun.sources.trace.recording import Recording
from forerun.sources.trace.roles import Roles
from forerun.sources.trace.tracks import tracks_of

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")

Waits = tuple[tuple[int, int], ...]
"""For each wait: the stream, and how many nodes of that stream lie between."""
Tensors = tuple[tuple[int, int], ...]
"""(bytes, category) of each tensor, in rising order."""


@dataclass(frozen=True, slots=True)
class Path:
    """A module path: its text with a star for every number, and the numbers."""

    text: str
    numbers: tuple[int, ...]

    @staticmethod
    def of(path: str) -> Path:
        """Splits `path`."""
        return Path(_NUMBER.sub("*", path), tuple(int(number) for number in _NUMBER.findall(path)))

    def with_numbers(self, numbers: Sequence[int]) -> str:
        """Returns the path with these numbers."""
        words = iter(numbers)
        return re.sub(r"\*", lambda _: str(next(words)), self.text)


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A node without the numbers in its module path. The nodes of equal layers are one object."""

    row: OpRow
    place: tuple[object, ...]
    """Stream, phase, module path without numbers, peer, sync, compiled."""
    waits: Waits
    allocates: Tensors
    frees: Tensors

    def without_distances(self) -> tuple[object, ...]:
        """Returns the node without how far its waits reach back."""
        return (self.row, self.place, tuple(stream for stream, _ in self.waits), self.allocates, self.frees)

    def loosely(self) -> tuple[object, ...]:
        """Returns the node without its sizes."""
        return (self.row.without_sizes(), self.place, tuple(stream for stream, _ in self.waits))


Known = dict[tuple[object, ...], Node]
"""Every different node so far."""


@dataclass(frozen=True)
class Described:
    """The description of one recording."""

    recording: Recording
    """The recording, without waits that others imply."""
    nodes: list[Node]
    paths: list[Path]
    """The module path of every node."""
    start_bytes: I64
    """The bytes of each category that are allocated before the first node."""

    def where(self, node: int) -> str:
        """Returns a node as text for an error message."""
        one = self.recording
        path = one.modules[one.module[node]]
        line = f", {one.lines[one.line[node]]}" if one.line[node] >= 0 else ""
        return f"node {node} ({one.ops.name[one.op[node]]}{f' in {path}' if path else ''}{line})"


def describe(roles: Roles, role: int, known: Known) -> Described:
    """Describes one recording of a run. Nodes that are equal to `known` ones are those; new ones are added."""
    one = _without_implied_waits(roles, role)
    rows, paths = one.ops.rows(), [Path.of(path) for path in one.modules]
    path_of = [paths[k] for k in one.module.tolist()]
    columns = (one.op, one.stream, one.phase, one.peer, one.sync, one.compiled)
    told = zip(*(column.tolist() for column in columns), (path.text for path in path_of), strict=True)
    allocates = _tensors_of_nodes(one, one.tensor_alloc)
    frees = _tensors_of_nodes(one, one.tensor_free)
    waits = relative_waits(one)
    mine: dict[tuple[object, ...], Node] = {}
    nodes = []
    for i, (op, *place) in enumerate(told):
        key = (op, *place, waits[i], allocates.get(i, ()), frees.get(i, ()))
        if key not in mine:
            parts = (rows[op], tuple(place), *key[-3:])
            if parts not in known:
                known[parts] = Node(rows[op], tuple(place), waits[i], allocates.get(i, ()), frees.get(i, ()))
            mine[key] = known[parts]
        nodes.append(mine[key])
    start = np.zeros(N_CATEGORIES, np.int64)
    there = one.tensor_alloc < 0
    np.add.at(start, one.tensor_category[there], one.tensor_bytes[there])
    return Described(one, nodes, path_of, start)


def _without_implied_waits(roles: Roles, role: int) -> Recording:
    one, tracks = roles.recordings[role], tracks_of(roles, role)
    _, keep = last_ended(tracks.of_node, tracks.pred_ptr, tracks.pred, one.sync, len(tracks.tracks))
    waiter = np.repeat(np.arange(len(one)), np.diff(tracks.pred_ptr))
    said = np.repeat(np.arange(len(one)), np.diff(one.wait_ptr)) * len(one) + one.wait
    keep &= np.isin(waiter * len(one) + tracks.pred, said)
    ptr = np.zeros(len(one) + 1, np.int64)
    np.cumsum(np.bincount(waiter[keep], minlength=len(one)), out=ptr[1:])
    return replace(one, wait_ptr=ptr, wait=tracks.pred[keep])


def _tensors_of_nodes(one: Recording, at: np.ndarray[tuple[int], np.dtype[np.int32]]) -> dict[int, Tensors]:
    found: dict[int, list[tuple[int, int]]] = {}
    columns = (at.tolist(), one.tensor_bytes.tolist(), one.tensor_category.tolist())
    for node, size, category in zip(*columns, strict=True):
        if node >= 0:
            found.setdefault(node, []).append((size, category))
    return {node: tuple(sorted(tensors)) for node, tensors in found.items()}


# -- waits by distance -------------------------------------------------------------------------------------------------


def relative_waits(one: Recording) -> list[Waits]:
    """Returns (stream, nodes of that stream in between) for every wait of every node, in order."""
    keys, n = _by_stream(one.stream), len(one)
    waiter = np.repeat(np.arange(n), np.diff(one.wait_ptr))
    stream = one.stream[one.wait].astype(np.int64)
    between = np.searchsorted(keys, stream * n + waiter) - 1 - np.searchsorted(keys, stream * n + one.wait)
    pairs = list(zip(stream.tolist(), between.tolist(), strict=True))
    ptr = one.wait_ptr.tolist()
    return [tuple(sorted(pairs[ptr[i] : ptr[i + 1]])) for i in range(n)]


def absolute_waits(stream: I64, waiter: I64, of_stream: I64, between: I64) -> I64:
    """Returns the nodes that `waiter` wait for: the inverse of `relative_waits`; -1 if a stream has too few nodes
    before."""
    n = len(stream)
    keys = _by_stream(stream)
    place = np.searchsorted(keys, of_stream * n + waiter) - 1 - between
    found = keys[np.maximum(place, 0)]
    return np.where((place >= 0) & (found // n == of_stream), found % n, -1)


def _by_stream(stream: np.ndarray[tuple[int], np.dtype[np.int32]] | I64) -> I64:
    """Returns stream x N + node of every node, sorted."""
    return np.sort(stream.astype(np.int64) * len(stream) + np.arange(len(stream)))
