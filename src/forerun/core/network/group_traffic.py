"""Messages of collectives: who sends which share of the buffer to whom, in all equal groups of a mesh axis at once.

Rank r is NPU r. The groups of an axis have the ranks `base + inner * j`, and there are as many as `n_ranks` has room
for: tensor-parallel groups all reduce at the same time, and so do data-parallel ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.core.program.groups import CommGroup
from forerun.core.program.types import F64, I32

_MOST_SHIFTS = 128
_GOLDEN = 0.6180339887498949
_CHUNK = 1 << 18
"""messages of an exchange looked at together"""


class Flows(NamedTuple):
    """Messages as columns (messages,)."""

    src: I32
    dst: I32
    weight: F64
    """bytes over those of the collective's full buffer"""


@dataclass(frozen=True)
class Layout:
    """The place of an axis's groups: `size` ranks spaced `inner` apart, `per_node` of them on a node."""

    size: int
    inner: int
    per_node: int
    borders: int
    n_ranks: int

    @classmethod
    def of(cls, group: CommGroup, n_ranks: int) -> Layout:
        """Returns the layout of `group` and its equals among `n_ranks`."""
        return cls(group.size, group.inner, group.ranks_per_node, group.borders, n_ranks)

    @property
    def nodes(self) -> int:
        return self.size // self.per_node

    def members(self) -> I32:
        """Returns (groups, size): the ranks of each group, in their order."""
        blocks = max(1, self.n_ranks // (self.size * self.inner))
        base = np.arange(blocks)[:, None] * (self.size * self.inner) + np.arange(self.inner)
        return (base.reshape(-1, 1) + self.inner * np.arange(self.size)).astype(np.int32)


def ring(layout: Layout, share: float) -> Iterator[Flows]:
    """Returns rings through all ranks in order, one each way round with half of the bytes; `share` of the buffer in
    all."""
    yield _circles(layout.members(), share)


def rails(layout: Layout, share: float, node_share: float) -> Iterator[Flows]:
    """Returns as many rings as a node has ranks, each through another one's NICs, and round the ranks of each node.

    `share` of the buffer goes out of a node over all rings, `node_share` along every hop inside.
    """
    yield _circles(_lanes(layout), share / layout.per_node)
    if layout.per_node > 1:
        yield _circles(_node_members(layout), node_share)


def trees(layout: Layout, node_share: float) -> Iterator[Flows]:
    """Yields double binary trees over the nodes, a pair for each rank of a node: an all-reduce up and down both.

    Each carries half of its bytes up and down; every rank but a tree's root has a parent. Inside a node as `rails`.
    """
    lanes = _lanes(layout)
    n = lanes.shape[1]
    up = _parents(n)
    node = np.arange(n)
    other = (n - 1 - node) if n % 2 == 0 else (node + 1) % n
    """the inner ranks of one tree are leaves of the other: mirrored, or shifted where their number is odd"""
    child = np.flatnonzero(up >= 0)
    for place in (node, other):
        low, high = lanes[:, place[child]].ravel(), lanes[:, place[up[child]]].ravel()
        ends = np.concatenate([low, high]), np.concatenate([high, low])
        yield Flows(*ends, np.full(2 * len(low), 0.5 / layout.per_node))
    if layout.per_node > 1:
        yield _circles(_node_members(layout), node_share)


def direct(layout: Layout) -> Iterator[Flows]:
    """Returns flows in which every rank sends a share of the buffer to every other one of its group.

    Of groups with more than 128 others, 128 distances between ranks stand for all.
    """
    members = layout.members()
    shifts = _shifts(layout.size)
    weight = (layout.size - 1) / layout.size / len(shifts)
    step = max(1, _CHUNK // members.size)
    for start in range(0, len(shifts), step):
        some = shifts[start : start + step]
        src = np.tile(members.ravel(), len(some))
        dst = np.concatenate([np.roll(members, -shift, axis=1).ravel() for shift in some])
        yield Flows(src, dst, np.full(len(src), weight))


def hops(layout: Layout) -> Iterator[Flows]:
    """Returns flows in which every rank sends to the next one: of its group, or of the pipeline over each of its
    borders."""
    if layout.borders:
        stages = max(1, layout.n_ranks // layout.inner)
        stage = np.arange(layout.borders)[:, None] % stages
        place = np.arange(layout.inner)
        src, dst = (((s % stages) * layout.inner + place).ravel() for s in (stage, stage + 1))
    else:
        members = layout.members()
        src, dst = members.ravel(), np.roll(members, -1, axis=1).ravel()
    yield Flows(src.astype(np.int32), dst.astype(np.int32), np.ones(len(src)))


def _circles(members: I32, share: float) -> Flows:
    """Returns rings along the last axis, both ways round."""
    following = np.roll(members, -1, axis=-1).ravel()
    here = members.ravel()
    ends = np.concatenate([here, following]), np.concatenate([following, here])
    return Flows(*ends, np.full(2 * len(here), share / 2))


def _node_members(layout: Layout) -> I32:
    return layout.members().reshape(-1, layout.per_node)


def _lanes(layout: Layout) -> I32:
    """Returns (lanes, nodes): ranks at the same place of each node of a group."""
    by_node = layout.members().reshape(-1, layout.nodes, layout.per_node)
    return np.ascontiguousarray(by_node.transpose(0, 2, 1).reshape(-1, layout.nodes))


def _parents(n: int) -> npt.NDArray[np.int64]:
    """Returns (n,): the parent of each node of a binary tree in which they are in order from left to right, -1 of node
    0.

    With k trailing zeros, a node's parent differs in bit k and sets bit k + 1; where there is none of that number, it
    only lacks bit k (Sanders, Speck and Traeff, "Two-tree algorithms", 2009, as NCCL numbers its trees).
    """
    node = np.arange(n)
    bit = node & -node
    above = (node ^ bit) | (bit << 1)
    parent = np.where(above < n, above, node ^ bit)
    parent[0] = -1
    return parent


def _shifts(size: int) -> list[int]:
    """Returns distances between the ranks of a group: all of them, or 128 spread evenly but not regularly."""
    if size <= _MOST_SHIFTS + 1:
        return list(range(1, size))
    picked: dict[int, None] = {}
    k = 0
    while len(picked) < _MOST_SHIFTS:
        k += 1
        picked[1 + int(k * _GOLDEN % 1 * (size - 1))] = None
    return sorted(picked)
