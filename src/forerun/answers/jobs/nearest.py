"""Placers that know the topology: a job's GPUs as near to each other as they can be, or on the same rails."""

from __future__ import annotations

import numpy as np

from forerun.answers.jobs.job import Placement
from forerun.answers.jobs.placement import Placer, Shape
from forerun.core.program.types import I64


class Nearest(Placer):
    """Puts a job into the smallest unit that has room: a node, a domain, the nodes of a switch, the cluster.

    Of several units a job takes the one with the fewest free GPUs, so that larger ones stay free for larger jobs.
    Within a unit it takes the emptiest parts first, so that it lies in few of them, and for the rest the fullest that
    has room.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.of_node: I64 = np.full(shape.switches * shape.nodes, shape.gpus, np.int64)
        """free GPUs of each node"""
        self.units = tuple(dict.fromkeys((1, shape.domain, shape.nodes, shape.switches * shape.nodes)))
        """nodes of a unit of each level, the smallest first"""

    def place(self, gpus: int) -> Placement | None:
        """Takes GPUs that lie near each other."""
        if gpus > self.free:
            return None
        for level, size in enumerate(self.units):
            room = self.of_node.reshape(-1, size).sum(axis=1)
            fits = np.flatnonzero(room >= gpus)
            if len(fits):
                unit = int(fits[room[fits].argmin()])
                found = tuple(sorted(self._within(unit * size, level, gpus)))
                self.take(found, gpus)
                return found
        return None

    def _within(self, first: int, level: int, gpus: int) -> list[tuple[int, int]]:
        """Returns the GPUs for a job within the unit whose first node is `first`, which has room for it."""
        if level == 0:
            return [(first, gpus)]
        size, part = self.units[level], self.units[level - 1]
        room = self.of_node[first : first + size].reshape(-1, part).sum(axis=1)
        found: list[tuple[int, int]] = []
        for each in np.argsort(-room, kind="stable").tolist():
            if not gpus:
                break
            enough = np.flatnonzero(room >= gpus)
            if len(enough):
                each = int(enough[room[enough].argmin()])
            taken = min(gpus, int(room[each]))
            found += self._within(first + each * part, level - 1, taken)
            gpus, room[each] = gpus - taken, 0
        return found

    def release(self, place: Placement, gpus: int) -> None:
        """Gives them back to their nodes."""
        for node, taken in place:
            self.of_node[node] += taken
        self.free += gpus

    def take(self, place: Placement, gpus: int) -> None:
        """Takes GPUs of the same nodes."""
        for node, taken in place:
            self.of_node[node] -= taken
        self.free -= gpus

    def could_ever(self, gpus: int) -> bool:
        """Returns whether the cluster has as many."""
        return gpus <= self.shape.total


class Rails(Nearest):
    """Puts a job that is larger than a node onto the same GPUs of several nodes of a switch, where it can.

    GPU i of each node has its NIC on rail i, so that a job on the same GPUs of all its nodes stays on its rails. It
    takes as many GPUs of each node as it can. Where nothing on rails is free, its GPUs lie as near as they can.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self._all = (1 << shape.gpus) - 1
        self.rails = [self._all] * len(self.of_node)
        """free GPUs of each node, as bits"""
        self._held: dict[Placement, list[tuple[int, ...]]] = {}
        """bits of the GPUs of each node, for the jobs on a placement; such jobs can stand for each other"""
        self._last: tuple[Placement, tuple[int, ...]] = ((), ())

    def place(self, gpus: int) -> Placement | None:
        """Takes GPUs on the same rails, or near each other."""
        if gpus > self.free:
            return None
        if gpus > self.shape.gpus:
            for each in range(self.shape.gpus, 0, -1):
                found = self._on_rails(gpus // each, each) if gpus % each == 0 else None
                if found is not None:
                    place, bits = tuple((node, each) for node in found[0]), found[1]
                    self._take(place, gpus, (bits,) * len(place))
                    return place
        return super().place(gpus)

    def _on_rails(self, nodes: int, each: int) -> tuple[list[int], int] | None:
        """Returns so many nodes of one switch that have `each` GPUs of the same rails free, and the rails as bits."""
        if nodes > self.shape.nodes:
            return None
        for first in range(0, len(self.rails), self.shape.nodes):
            free = self.rails[first : first + self.shape.nodes]
            for bits in dict.fromkeys(_lowest_bits(mask, each) for mask in free if mask.bit_count() >= each):
                found = [node for node, mask in enumerate(free) if mask & bits == bits]
                if len(found) >= nodes:
                    fullest = sorted(found, key=lambda node: free[node].bit_count())[:nodes]
                    return sorted(first + node for node in fullest), bits
        return None

    def release(self, place: Placement, gpus: int) -> None:
        """Gives them back to their nodes."""
        of_jobs = self._held.get(place)
        bits = of_jobs.pop() if of_jobs else tuple(self._all for _ in place)
        if not of_jobs:
            self._held.pop(place, None)
        for (node, _), mask in zip(place, bits, strict=True):
            self.rails[node] |= mask
        self._last = place, bits
        super().release(place, gpus)

    def take(self, place: Placement, gpus: int) -> None:
        """Takes GPUs of the same nodes: those that the last job there had, where they are free, else the first ones."""
        before, bits = self._last
        if place != before or any(self.rails[node] & mask != mask for (node, _), mask in zip(place, bits, strict=True)):
            bits = tuple(_lowest_bits(self.rails[node], taken) for node, taken in place)
        self._take(place, gpus, bits)

    def _take(self, place: Placement, gpus: int, bits: tuple[int, ...]) -> None:
        for (node, _), mask in zip(place, bits, strict=True):
            self.rails[node] &= ~mask
        self._held.setdefault(place, []).append(bits)
        super().take(place, gpus)

    def on_rails(self, place: Placement) -> bool:
        """Returns whether the job that was placed last on `place` has the same GPUs of each of its nodes."""
        return len({*self._held[place][-1]}) == 1


def _lowest_bits(mask: int, number: int) -> int:
    """Returns the lowest `number` bits of `mask`."""
    found = 0
    for _ in range(number):
        lowest = mask & -mask
        found, mask = found | lowest, mask ^ lowest
    return found
