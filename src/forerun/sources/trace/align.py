"""Aligns three sequences of nodes, recorded at three depths, that differ by the nodes of each additional layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forerun.core.program.types import I64

_CHUNK = 256


@dataclass(frozen=True, slots=True)
class Run:
    """Nodes that all depths have in common, followed by those that every further layer adds."""

    first: tuple[int, int, int]
    """Where the common nodes begin in each sequence."""
    common: int
    added: int
    """The nodes of one layer: the second sequence has them once, the third twice."""


class NotPeriodic(Exception):
    """Raised where the sequences differ by anything else, at `node` of the third one."""

    def __init__(self, node: int) -> None:
        super().__init__(node)
        self.node = node


def align(x: I64, y: I64, z: I64) -> list[Run]:
    """Returns the runs of nodes that `y` adds to `x`, and that `z` adds once more to `y`, at the same places.

    A layer is taken to be added as late as possible; in a run of equal layers every place is as good.

    Raises:
        NotPeriodic: the sequences differ in another way.
    """
    runs = []
    i = j = k = 0
    while i < len(x) or j < len(y) or k < len(z):
        common = min(_common(x[i:], y[j:]), _common(x[i:], z[k:]))
        i, j, k = i + common, j + common, k + common
        added = 0
        if i < len(x) or j < len(y) or k < len(z):
            added = _added(x[i:], y[j:], z[k:])
            if not added:
                raise NotPeriodic(min(k, len(z) - 1))
        runs.append(Run((i - common, j - common, k - common), common, added))
        j, k = j + added, k + 2 * added
    return runs


def _common(a: I64, b: I64) -> int:
    """Returns the length of the common prefix."""
    most = min(len(a), len(b))
    at, size = 0, _CHUNK
    while at < most:
        different = np.flatnonzero(a[at : min(at + size, most)] != b[at : min(at + size, most)])
        if len(different):
            return at + int(different[0])
        at, size = at + size, 2 * size
    return most


def _added(x: I64, y: I64, z: I64) -> int:
    """Returns how many nodes `y` has before the first of `x`, where `z` has them twice; 0 for none. `x` differs from
    `y` or `z` at once.

    Of several possible numbers it is the one after which the sequences agree longest, and of those the smallest.
    """
    most = min(len(y), len(z) // 2)
    if len(z) - len(y) == len(y) - len(x):
        most = min(most, len(y) - len(x))
    if most <= 0:
        return 0
    if not len(x):
        candidates = np.array([most] if (len(y), len(z)) == (most, 2 * most) else [], np.int64)
    else:
        later = y[1 : min(most, len(y) - 1) + 1]
        candidates = np.flatnonzero(later == x[0]) + 1
        candidates = candidates[2 * candidates < len(z)]
        candidates = candidates[z[2 * candidates] == x[0]]
    candidates = candidates[z[np.minimum(candidates, len(z) - 1)] == y[0]]
    best, agreed = 0, -1
    for n in candidates.tolist():
        if not (np.array_equal(z[:n], y[:n]) and np.array_equal(z[n : 2 * n], y[:n])):
            continue
        length = min(_common(x, y[n:]), _common(x, z[2 * n :]))
        if length > agreed:
            best, agreed = n, length
    return best
