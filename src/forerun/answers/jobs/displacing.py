"""Chooses the jobs that are preempted for a job before them in the policy's order: the last ones go first."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from forerun.answers.jobs.holders import Holders, hand_over, note_all, who_on_one_node, who_on_whole_nodes
from forerun.answers.jobs.job import Placement
from forerun.answers.jobs.placement import Packed, Placer, Shape
from forerun.answers.jobs.policies import Numbers

_NOBODY = np.iinfo(np.int64).max
"""the place in the order of who holds a free GPU: behind all jobs"""


class Displacing(ABC):
    """Finds the jobs that have to stop so that another one finds a place."""

    @abstractmethod
    def look(self, order: Numbers, running: Numbers) -> None:
        """Takes note of an order of jobs: their numbers, and the places of those that run, ascending."""

    @abstractmethod
    def limits(self, sizes: Numbers) -> Numbers:
        """Returns for jobs of `sizes` GPUs, ascending, the place in the order before which one may get room."""

    @abstractmethod
    def who(self, gpus: int, at: int) -> list[int] | None:
        """Returns the places of those that give way to a job of `gpus` at place `at`, all behind it; None if none do.

        Where it returns None, no job of as many GPUs further down the order gets room either.
        """

    def took(self, place: Placement, number: int) -> None:  # noqa: B027
        """Takes note of a job that started."""

    def left(self, place: Placement, number: int) -> None:  # noqa: B027
        """Takes note of a job that stopped."""

    def away(self, nodes: list[int]) -> None:  # noqa: B027
        """Takes note of the nodes that are under repair."""


class Last(Displacing):
    """Displaces as many of the last jobs as necessary. It serves placements that can use any free GPUs."""

    def __init__(self, place: Placer, gpus: Numbers) -> None:
        self.place, self.gpus = place, gpus

    def look(self, order: Numbers, running: Numbers) -> None:
        """Notes the jobs that run."""
        self.running = list(zip(running.tolist(), self.gpus[order[running]].tolist(), strict=True))

    def limits(self, sizes: Numbers) -> Numbers:
        """Returns the places of those whose stop frees enough GPUs."""
        held = np.array([gpus for _, gpus in self.running[::-1]], dtype=np.int64)
        enough = np.searchsorted(np.cumsum(np.concatenate([[self.place.free], held])), sizes)
        return np.array([_NOBODY, *(at for at, _ in self.running[::-1]), -1])[enough]

    def who(self, gpus: int, at: int) -> list[int] | None:
        """Returns the last jobs behind `at`."""
        found: list[int] = []
        free = self.place.free
        while free < gpus:
            if len(found) == len(self.running) or self.running[-1 - len(found)][0] < at:
                return None
            free += self.running[-1 - len(found)][1]
            found.append(self.running[-1 - len(found)][0])
        del self.running[len(self.running) - len(found) :]
        return found


class OnNodes(Displacing):
    """Displaces those on the nodes with the last jobs, where a job needs whole nodes or GPUs of one node."""

    def __init__(self, shape: Shape, jobs: int) -> None:
        self.shape = shape
        self.nobody, self.repair = jobs, jobs + 1
        nodes = shape.switches * shape.nodes
        self.holders = Holders(
            of_gpu=np.full((nodes, shape.gpus), self.nobody, dtype=np.int64),
            stands=np.empty(jobs + 2, dtype=np.int64),
            places=np.empty((nodes, shape.gpus), dtype=np.int64),
            heap=np.empty(shape.nodes, dtype=np.int64),
            last=np.empty(shape.switches, dtype=np.int64),
            found=np.empty(shape.nodes * shape.gpus, dtype=np.int64),
        )
        self.holders.stands[:] = -1
        self.holders.stands[self.nobody] = _NOBODY
        self.in_node = np.empty(shape.gpus, dtype=np.int64)
        """the latest place that the i-th of a node has, on any node"""

    def look(self, order: Numbers, running: Numbers) -> None:
        """Notes where each job stands."""
        self.holders.stands[order] = np.arange(len(order))
        note_all(self.holders, self.in_node)

    def limits(self, sizes: Numbers) -> Numbers:
        """Returns the places of the running jobs whose nodes, or GPUs of one node, are enough."""
        per_node = self.shape.gpus
        first = self.holders.places[:, 0].reshape(self.shape.switches, self.shape.nodes)
        idle = np.sort(first, axis=1).max(axis=0)[::-1]
        small = sizes[sizes <= per_node]
        return np.concatenate([self.in_node[per_node - small], idle[sizes[len(small) :] // per_node - 1]])

    def who(self, gpus: int, at: int) -> list[int] | None:
        """Returns the jobs on the nodes that can be had at the cost of the last ones."""
        if gpus <= self.shape.gpus:
            number = who_on_one_node(self.holders, gpus, at)
        else:
            number = who_on_whole_nodes(self.holders, *divmod(gpus, self.shape.gpus), at)
        return None if number < 0 else sorted(set(self.holders.found[:number].tolist()) - {_NOBODY})

    def took(self, place: Placement, number: int) -> None:
        """Gives the job as many free GPUs of each node."""
        hand_over(self.holders, np.array(place), self.nobody, number)

    def left(self, place: Placement, number: int) -> None:
        """Takes them back."""
        hand_over(self.holders, np.array(place), number, self.nobody)

    def away(self, nodes: list[int]) -> None:
        """Takes away the nodes under repair, and gives back the others."""
        of_gpu = self.holders.of_gpu
        of_gpu[of_gpu == self.repair] = self.nobody
        of_gpu[nodes] = self.repair


def displacing(place: Placer, gpus: Numbers) -> Displacing:
    """Returns the object that finds jobs to displace, for jobs of so many `gpus` that `place` places."""
    if isinstance(place, Packed) and place.on_whole_nodes:
        return OnNodes(place.shape, len(gpus))
    return Last(place, gpus)
