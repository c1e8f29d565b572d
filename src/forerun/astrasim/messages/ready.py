"""The ready nodes of each rank under two issue policies.

*Ascending*: a rank looks through its ready nodes by rising node number. A heap for each hardware slot avoids nodes
whose slot is busy. *Hashed*: it looks through them in the iteration order of libstdc++'s `unordered_set<uint64_t>`.
That set is a linked list. A new element goes before the first element of its bucket, or to the front of the list if the
bucket is empty. The number of buckets grows as in the library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from forerun.common.jit import kernel, njit
from forerun.common.shipped import shipped
from forerun.core.program.types import I8, I32, I64

N_SLOTS = 4
SLOT_COMPUTE = 0
SLOT_COMM = 1
SLOT_CPU = 2
SLOT_NONE = 3
"""receives: any number at a time"""


@dataclass(frozen=True)
class _LibStdCxx:
    """The keys of `libstdcxx.yaml`."""

    source: str
    bucket_counts: list[int]


BUCKETS = np.array(shipped(_LibStdCxx, __package__, "libstdcxx.yaml").bucket_counts, np.int64)
"""bucket counts that a growing set of libstdc++ goes through"""


class Ready(NamedTuple):
    """The ready nodes of all actors."""

    first: I64
    """(actors + 1,) first node of each actor"""
    slot: I8
    heap: I64
    """(slots, nodes) a heap of nodes for each actor and slot, in the actor's range of nodes"""
    n_heap: I64
    """(actors, slots)"""
    key: I64
    """(nodes,) node ids, which the hashed policy hashes; empty for the ascending policy"""
    following: I64
    """(nodes,) next node in the actor's set, -1 for the last"""
    before_bucket: I64
    """element before the first of each bucket: -2 for none, -1 for the head of the list"""
    bucket_ptr: I64
    """(actors + 1,) first bucket of each actor"""
    set_head: I64
    set_size: I64
    set_level: I64
    """(actors,) index into BUCKETS; -1 before the first insertion"""


def new_ready(first: I64, slot: I8, key: I64) -> Ready:
    """Returns an empty set of ready nodes; the policy is ascending if `key` is empty, else hashed."""
    n_actors, hashed = len(first) - 1, len(key) > 0
    n_heap = 0 if hashed else len(slot)
    room = np.zeros(n_actors + 1, np.int64)
    if hashed:
        levels = np.searchsorted(BUCKETS, np.diff(first))
        room[1:] = np.cumsum(BUCKETS[np.minimum(levels, len(BUCKETS) - 1)])
    return Ready(
        first=first,
        slot=slot,
        heap=np.zeros((N_SLOTS, n_heap), np.int64),
        n_heap=np.zeros((n_actors, N_SLOTS), np.int64),
        key=key,
        following=np.full(len(slot) if hashed else 0, -1, np.int64),
        before_bucket=np.full(room[-1], -2, np.int64),
        bucket_ptr=room,
        set_head=np.full(n_actors, -1, np.int64),
        set_size=np.zeros(n_actors, np.int64),
        set_level=np.full(n_actors, -1, np.int64),
    )


@kernel
def push(heap: I64, n: int, node: int) -> None:
    """Adds a node to a heap of `n` nodes."""
    i = n
    while i > 0 and heap[(i - 1) >> 1] > node:
        heap[i] = heap[(i - 1) >> 1]
        i = (i - 1) >> 1
    heap[i] = node


@kernel
def pop_lowest(heap: I64, n: int) -> None:
    """Removes the lowest of the `n` nodes of a heap, which is its first."""
    n -= 1
    node, i = heap[n], 0
    while True:
        child = 2 * i + 1
        if child >= n:
            break
        if child + 1 < n and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] > node:
            break
        heap[i] = heap[child]
        i = child
    heap[i] = node


@kernel
def add(ready: Ready, actor: int, node: int) -> None:
    """Adds node `node` of `actor`, which has no dependency left."""
    if len(ready.key):
        _insert(ready, actor, node)
        return
    slot = ready.slot[node]
    push(ready.heap[slot, ready.first[actor] :], ready.n_heap[actor, slot], node)
    ready.n_heap[actor, slot] += 1


@kernel
def lowest(ready: Ready, actor: int, slot: int) -> int:
    """Returns the lowest ready node for a slot, or -1 (ascending policy)."""
    return int(ready.heap[slot, ready.first[actor]]) if ready.n_heap[actor, slot] else -1


@kernel
def pop(ready: Ready, actor: int, slot: int) -> None:
    """Removes the node that `lowest` returns."""
    pop_lowest(ready.heap[slot, ready.first[actor] :], ready.n_heap[actor, slot])
    ready.n_heap[actor, slot] -= 1


@kernel
def any_ready(ready: Ready, actor: int) -> bool:
    """Returns whether a node of `actor` waits to be issued."""
    return bool(ready.set_size[actor] > 0 or ready.n_heap[actor].sum() > 0)


@kernel
def _link(ready: Ready, actor: int, node: int) -> None:
    """Puts `node` into the list, at the place of its bucket."""
    base = ready.bucket_ptr[actor]
    n = BUCKETS[ready.set_level[actor]]
    bucket = base + ready.key[node] % n
    before = ready.before_bucket[bucket]
    if before >= 0:
        ready.following[node] = ready.following[before]
        ready.following[before] = node
    elif before == -1:
        ready.following[node] = ready.set_head[actor]
        ready.set_head[actor] = node
    else:
        after = ready.set_head[actor]
        ready.following[node] = after
        ready.set_head[actor] = node
        ready.before_bucket[bucket] = -1
        if after >= 0:
            ready.before_bucket[base + ready.key[after] % n] = node


@kernel
def _insert(ready: Ready, actor: int, node: int) -> None:
    level = ready.set_level[actor]
    if level < 0 or ready.set_size[actor] + 1 > BUCKETS[level]:
        ready.set_level[actor] = level + 1
        base = ready.bucket_ptr[actor]
        ready.before_bucket[base : base + BUCKETS[level + 1]] = -2
        element = ready.set_head[actor]
        ready.set_head[actor] = -1
        while element >= 0:
            after = ready.following[element]
            _link(ready, actor, element)
            element = after
    _link(ready, actor, node)
    ready.set_size[actor] += 1


@kernel
def erase(ready: Ready, actor: int, node: int) -> None:
    """Removes `node` from the set (hashed policy)."""
    base = ready.bucket_ptr[actor]
    n = BUCKETS[ready.set_level[actor]]
    bucket = base + ready.key[node] % n
    before = -1
    element = ready.set_head[actor]
    while element != node:
        before = element
        element = ready.following[element]
    after = ready.following[node]
    next_bucket = base + ready.key[after] % n if after >= 0 else -1
    if before >= 0:
        ready.following[before] = after
    else:
        ready.set_head[actor] = after
    if next_bucket != bucket:
        if next_bucket >= 0:
            ready.before_bucket[next_bucket] = before
        if ready.before_bucket[bucket] == before:
            ready.before_bucket[bucket] = -2
    ready.set_size[actor] -= 1


@kernel
def snapshot(ready: Ready, actor: int, out: I64) -> int:
    """Copies the set to `out` in iteration order. Returns the number of elements."""
    n = 0
    element = ready.set_head[actor]
    while element >= 0:
        out[n] = element
        n += 1
        element = ready.following[element]
    return n


@njit
def hashed_children(key: I64, child_ptr: I64, child: I32) -> I32:
    """Returns the children of every node in the iteration order of a set of their ids, inserted in the given order."""
    ordered: I32 = child.copy()
    for i in range(len(child_ptr) - 1):
        first, last = child_ptr[i], child_ptr[i + 1]
        if last - first > 1:
            order = set_order(key[child[first:last]])
            for k in range(last - first):
                ordered[first + k] = child[first + order[k]]
    return ordered


@njit
def hashed_roots(key: I64, row: I64, position: I64, data_ptr: I64, data: I32, ctrl_ptr: I64, ctrl: I32) -> I64:
    """Returns nodes without parents in the iteration order of ASTRA-sim's map from nodes to sets of parents.

    The map is filled in trace order: each node, then its parents that are not in the map yet, in the order of the set
    of its parents. `key` and the answer count nodes by rising id; the other columns are by row of the trace.
    """
    n = len(row)
    is_in, has_parent = np.zeros(n, np.bool_), np.zeros(n, np.bool_)
    inserted, n_inserted = np.empty(n, np.int64), 0
    for i in range(n):
        n_data, n_ctrl = data_ptr[i + 1] - data_ptr[i], ctrl_ptr[i + 1] - ctrl_ptr[i]
        parents, n_parents = np.empty(n_data + n_ctrl, np.int64), 0
        for k in range(n_data + n_ctrl):
            parent = data[data_ptr[i] + k] if k < n_data else ctrl[ctrl_ptr[i] + k - n_data]
            at = position[parent]
            if not (parents[:n_parents] == at).any():
                parents[n_parents] = at
                n_parents += 1
        here = position[i]
        has_parent[here] = n_parents > 0
        if not is_in[here]:
            is_in[here] = True
            inserted[n_inserted] = here
            n_inserted += 1
        for k in set_order(key[parents[:n_parents]]):
            if not is_in[parents[k]]:
                is_in[parents[k]] = True
                inserted[n_inserted] = parents[k]
                n_inserted += 1
    in_order = inserted[set_order(key[inserted])]
    roots: I64 = in_order[~has_parent[in_order]]
    return roots


@njit
def set_order(keys: I64) -> I64:
    """Returns the positions of `keys` in the iteration order of a set into which they are inserted one by one."""
    n = len(keys)
    ready = _one_set(keys)
    for i in range(n):
        _insert(ready, 0, i)
    out = np.empty(n, np.int64)
    snapshot(ready, 0, out)
    return out


@njit
def _one_set(keys: I64) -> Ready:
    n = len(keys)
    level = 0
    while BUCKETS[level] < n:
        level += 1
    return Ready(
        np.zeros(2, np.int64), np.zeros(0, np.int8), np.zeros((4, 0), np.int64), np.zeros((1, 4), np.int64), keys,
        np.full(n, -1, np.int64), np.full(BUCKETS[level], -2, np.int64), np.zeros(2, np.int64),
        np.full(1, -1, np.int64), np.zeros(1, np.int64), np.full(1, -1, np.int64),
    )  # fmt: skip
