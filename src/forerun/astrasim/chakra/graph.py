"""The dependency graph of one rank's trace: rows of node ids, depth, cycles."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.common.arrays import grouped, pointers, positions
from forerun.common.jit import njit
from forerun.core.program.types import I32, I64


class NodeRows:
    """Maps node ids, which may be any numbers, to rows of the trace. A repeated id maps to its first row."""

    def __init__(self, ids: I64) -> None:
        self.ids = ids
        in_order = bool((ids[1:] > ids[:-1]).all())
        self._order: I64 | None = None if in_order else np.argsort(ids, kind="stable")
        self._sorted = ids if self._order is None else ids[self._order]

    def repeated(self) -> I64:
        """Returns the ids that more than one node has, ascending."""
        if self._order is None:
            return np.zeros(0, np.int64)
        return np.unique(self._sorted[1:][self._sorted[1:] == self._sorted[:-1]])

    def of(self, wanted: npt.NDArray[np.uint64]) -> I32:
        """Returns the rows of the ids `wanted`; -1 for an id that no node has."""
        if not len(self.ids):
            return np.full(len(wanted), -1, np.int32)
        signed = wanted.astype(np.int64)  # ids above 63 bits wrap to negative numbers, which no node has
        place = np.searchsorted(self._sorted, signed)
        place[place == len(self._sorted)] = 0
        rows = place if self._order is None else self._order[place]
        return np.where(self._sorted[place] == signed, rows, -1).astype(np.int32)


class Graph:
    """The ids and dependencies (data, then control) of one rank's nodes while they are read."""

    def __init__(self) -> None:
        self._ids, self._pointer, self._wanted = array("Q"), array("q", [0]), array("Q")

    def add(self, node: Any) -> None:
        """Adds one node."""
        self._ids.append(node.id)
        if dependencies := node.data_deps:
            self._wanted.extend(dependencies)
        if dependencies := node.ctrl_deps:
            self._wanted.extend(dependencies)
        self._pointer.append(len(self._wanted))

    @property
    def n_dependencies(self) -> int:
        """Returns the number of data and control dependencies of all nodes."""
        return len(self._wanted)

    def depth(self) -> int:
        """Returns the number of nodes on the longest chain of dependencies, without nodes on or behind a cycle."""
        rows = NodeRows(as_numpy(self._ids).view(np.int64)).of(as_numpy(self._wanted))
        return int(depths(as_numpy(self._pointer), rows).max(initial=0))

    def problems(self, limit: int) -> list[tuple[str, int, str]]:
        """Returns the findings, at most `limit` of each kind: kind of finding, id of the node, message."""
        ids, pointer, wanted = as_numpy(self._ids), as_numpy(self._pointer), as_numpy(self._wanted)
        rows = NodeRows(ids.view(np.int64))
        found = [("node", int(node), "two nodes have this id") for node in rows.repeated()[:limit].view(np.uint64)]
        dependencies = rows.of(wanted)
        for place in np.flatnonzero(dependencies < 0)[:limit]:
            owner = np.searchsorted(pointer, place, "right") - 1
            found.append(("dependency", int(ids[owner]), f"depends on node {wanted[place]}, which is not in the trace"))
        depth = depths(pointer, dependencies)
        if circle := cycle(pointer, dependencies, depth):
            named = [str(ids[row]) for row in [*circle[:_SHOWN], circle[0]]]
            if len(circle) > _SHOWN:
                named[_SHOWN:] = [f"... {len(circle) - _SHOWN} more ...", named[-1]]
            waiting = np.count_nonzero(depth == 0)
            words = f"depends on itself: {' -> '.join(named)}; {waiting} nodes can never start"
            found.append(("cycle", int(ids[circle[0]]), words))
        return found


_SHOWN = 12
"""nodes of a cycle that a message names"""
_TYPES = {"b": np.int8, "i": np.int32, "q": np.int64, "Q": np.uint64}


def as_numpy(values: array[int]) -> npt.NDArray[Any]:
    """Returns a numpy array on the memory of `values`, which can't grow any more."""
    return np.frombuffer(values, _TYPES[values.typecode]) if len(values) else np.zeros(0, _TYPES[values.typecode])


@njit
def depths(pointer: I64, dependencies: I32) -> I32:
    """Returns the length (in nodes) of the longest chain that ends at each node; 0 for nodes on or behind a cycle.

    Node i depends on rows `dependencies[pointer[i]:pointer[i + 1]]`; negative ones don't count.
    """
    n = len(pointer) - 1
    start = np.zeros(n + 1, np.int64)
    for dependency in dependencies:
        if dependency >= 0:
            start[dependency + 1] += 1
    for row in range(n):
        start[row + 1] += start[row]
    users = np.empty(start[n], np.int32)
    filled = start[:n].copy()
    waiting = np.zeros(n, np.int32)
    depth = np.zeros(n, np.int32)
    ready = np.empty(n, np.int32)
    n_ready = 0
    for row in range(n):
        for place in range(pointer[row], pointer[row + 1]):
            dependency = dependencies[place]
            if dependency >= 0:
                users[filled[dependency]] = row
                filled[dependency] += 1
                waiting[row] += 1
        if waiting[row] == 0:
            depth[row] = 1
            ready[n_ready] = row
            n_ready += 1
    reached = np.zeros(n, np.int32)
    done = 0
    while done < n_ready:
        row = ready[done]
        done += 1
        for place in range(start[row], start[row + 1]):
            user = users[place]
            reached[user] = max(reached[user], depth[row])
            waiting[user] -= 1
            if waiting[user] == 0:
                depth[user] = reached[user] + 1
                ready[n_ready] = user
                n_ready += 1
    return depth


def cycle(pointer: I64, dependencies: I32, depth: I32) -> list[int]:
    """Returns the rows of one cycle; each row depends on the next. The result is empty without a cycle.

    `depth` is the result of `depths`.
    """
    stuck = np.flatnonzero(depth == 0)
    if not len(stuck):
        return []
    row, place, path = int(stuck[0]), dict[int, int](), list[int]()
    while row not in place:
        place[row] = len(path)
        path.append(row)
        # A node that never became ready waits for another one that never did.
        waited = dependencies[pointer[row] : pointer[row + 1]]
        waited = waited[waited >= 0]
        row = int(waited[depth[waited] == 0][0])
    return path[place[row] :]


def feasible(data_ptr: I64, data: I32, ctrl_ptr: I64, ctrl: I32) -> tuple[I64, I32]:
    """Returns control dependencies (CSR) without those that can't be met.

    These are dependencies on a missing node (negative) or on the node itself and, on a cycle, those against the order
    of data dependencies. In PyTorch's traces a control dependency names the caller of a node, which a converter may
    have dropped or put behind the nodes that it calls.
    """
    n = len(ctrl_ptr) - 1
    owner = np.repeat(np.arange(n), np.diff(ctrl_ptr))
    kept = (ctrl >= 0) & (ctrl != owner)
    owner, ctrl = owner[kept], ctrl[kept]
    user = np.concatenate([np.repeat(np.arange(n), np.diff(data_ptr)), owner])
    wanted = np.concatenate([data, ctrl])
    stuck = depths(*_edges(user, wanted, n)) == 0
    if stuck.any():
        # Nodes behind a cycle and nodes before one are not on it.
        stuck &= depths(*_edges(wanted, user, n)) == 0
        place = positions(np.argsort(depths(data_ptr, data), kind="stable"))
        kept = ~(stuck[owner] & stuck[ctrl]) | (place[ctrl] < place[owner])
        owner, ctrl = owner[kept], ctrl[kept]
    return pointers(np.bincount(owner, minlength=n)), ctrl


def _edges(owner: npt.NDArray[Any], values: npt.NDArray[Any], n: int) -> tuple[I64, I32]:
    pointer, entries = grouped(owner, values, n)
    return pointer, entries.astype(np.int32)
