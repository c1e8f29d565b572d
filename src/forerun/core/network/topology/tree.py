"""Trees of switches: exactly one route between any two NPUs."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import numpy as np

from forerun.core.network.topology.base import Links, Topology
from forerun.core.program.types import I32

_NONE = -1


@dataclass(frozen=True)
class Tree(Topology):
    """A tree of switches with `arity` children each and the NPUs as its leaves, in order; all links are alike.

    Switches are numbered level by level upwards; the last is the root. With `npu_nodes` there are no switches: the NPUs
    are the nodes, NPU 0 is the root and the children of NPU i are i * arity + 1 to i * arity + arity.
    """

    between_nodes: ClassVar[str] = (
        "a binary tree of switches whose links are all alike: half of all traffic meets at the root"
    )

    n: int
    arity: int = field(default=2, kw_only=True)
    npu_nodes: bool = field(default=False, kw_only=True)

    def check_options(self) -> None:
        if self.arity < 2:
            raise self.error("arity is 1, a tree branches in at least 2")

    @property
    def n_npus(self) -> int:
        return self.n

    @property
    def n_devices(self) -> int:
        return self.n if self.npu_nodes else sum(self._level_sizes)

    @cached_property
    def _level_sizes(self) -> list[int]:
        """Returns the devices of each level, leaves first."""
        sizes = [self.n]
        while sizes[-1] > 1:
            sizes.append(-(-sizes[-1] // self.arity))
        return sizes

    @cached_property
    def _parent(self) -> I32:
        """Returns (devices,): the parent of each device, -1 of the root."""
        if self.npu_nodes:
            return ((np.arange(self.n, dtype=np.int32) - 1) // self.arity).astype(np.int32)
        parts, first = [], 0
        for size in self._level_sizes[:-1]:
            first += size
            parts.append(first + np.arange(size, dtype=np.int32) // self.arity)
        return np.concatenate([*parts, [_NONE]]).astype(np.int32)

    @cached_property
    def _depth(self) -> I32:
        depth = np.zeros(self.n_devices, np.int32)
        above = self._parent
        while (above >= 0).any():
            depth += above >= 0
            above = np.where(above >= 0, self._parent[above], _NONE)
        return depth

    @cached_property
    def _ancestors(self) -> I32:
        """Returns (depths, NPUs): the ancestor of each NPU at each depth, itself at its own, -1 below."""
        table = np.full((int(self._depth.max()) + 1, self.n), _NONE, np.int32)
        device = np.arange(self.n, dtype=np.int32)
        npu = device
        while len(npu):
            table[self._depth[device], npu] = device
            device = self._parent[device]
            npu, device = npu[device >= 0], device[device >= 0]
        return table

    def links(self) -> Links:
        children = np.flatnonzero(self._parent >= 0)
        return self.both_ways((children, self._parent[children]))

    def next_device(self, at: I32, to: I32) -> I32:
        """Goes down where `to` is below `at`, else up."""
        depth = self._depth[at]
        below = self._ancestors[depth, to] == at
        child_depth = np.minimum(depth + 1, len(self._ancestors) - 1)
        return np.where(below, self._ancestors[child_depth, to], self._parent[at])
