"""Chooses the jobs that are preempted for a job before them in the policy's order: the last ones go first."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from forerun.answers.jobs.job import Placement
from forerun.answers.jobs.placement import Packed, Placer, Shape
from forerun.answers.jobs.policies import Numbers

_NOBODY = np.iinfo(np.int64).max
"""the place in the order of who holds a free GPU: behind all jobs"""


class Displacing(ABC):
    """Finds the jobs that have to stop so that another one finds a place."""

    @abstractmethod
    def look(self, order: Numbers, runs: npt.NDArray[np.bool_], gpus: Numbers) -> None:
        """Takes note of an order of jobs: their numbers, whether they run, and their GPUs."""

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

    def __init__(self, place: Placer) -> None:
        self.place = place

    def look(self, order: Numbers, runs: npt.NDArray[np.bool_], gpus: Numbers) -> None:
        """Notes the jobs that run."""
        at = np.flatnonzero(runs)
        self.running = list(zip(at.tolist(), gpus[at].tolist(), strict=True))

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
        self.of_gpu = np.full((shape.switches * shape.nodes, shape.gpus), self.nobody, dtype=np.int64)
        """for each GPU the number of the job that holds it"""
        self.stands = np.empty(jobs + 2, dtype=np.int64)
        """for each job its place in the order; last who holds free GPUs, and those under repair"""
        self.stands[self.nobody], self.stands[self.repair] = _NOBODY, -1
        self._sorted: Numbers | None = None

    def look(self, order: Numbers, runs: npt.NDArray[np.bool_], gpus: Numbers) -> None:
        """Notes where each job stands."""
        self.stands[order] = np.arange(len(order))
        self._sorted = None

    @property
    def at(self) -> Numbers:
        """Returns for each node the places of those that hold its GPUs, ascending: (nodes, GPUs)."""
        if self._sorted is None:
            self._sorted = np.sort(self.stands[self.of_gpu], axis=1)
        return self._sorted

    def limits(self, sizes: Numbers) -> Numbers:
        """Returns the places of the running jobs whose nodes, or GPUs of one node, are enough."""
        per_node, held = self.shape.gpus, self.at
        in_node = held.max(axis=0)[::-1]
        idle = np.sort(held[:, 0].reshape(self.shape.switches, self.shape.nodes), axis=1).max(axis=0)[::-1]
        small = sizes[sizes <= per_node]
        return np.concatenate([in_node[small - 1], idle[sizes[len(small) :] // per_node - 1]])

    def who(self, gpus: int, at: int) -> list[int] | None:
        """Returns the jobs on the nodes that can be had at the cost of the last ones."""
        per_node, held = self.shape.gpus, self.at
        if gpus <= per_node:
            node = int(held[:, per_node - gpus].argmax())
            return _ascending(held[node, per_node - gpus :]) if held[node, per_node - gpus] > at else None
        whole, rest = divmod(gpus, per_node)
        first = held[:, 0].reshape(self.shape.switches, self.shape.nodes)
        ranked = np.argsort(first, axis=1, kind="stable")[:, ::-1]
        least = first[np.arange(len(first)), ranked[:, whole - 1]]
        for switch in np.argsort(-least, kind="stable").tolist():
            if least[switch] <= at:
                return None
            nodes = switch * self.shape.nodes + ranked[switch]
            gives = held[nodes[:whole]].ravel()
            if not rest:
                return _ascending(gives)
            others = held[nodes[whole:], per_node - rest]
            if len(others) and others.max() > at:
                return _ascending(np.concatenate([gives, held[nodes[whole + int(others.argmax())], per_node - rest :]]))
        return None

    def took(self, place: Placement, number: int) -> None:
        """Gives the job as many free GPUs of each node."""
        whole = [node for node, taken in place if taken == self.shape.gpus]
        self.of_gpu[whole] = number
        for node, taken in place:
            if taken < self.shape.gpus:
                row = self.of_gpu[node]
                row[(row == self.nobody).nonzero()[0][:taken]] = number
        self._again([node for node, _ in place])

    def left(self, place: Placement, number: int) -> None:
        """Takes them back."""
        nodes = [node for node, _ in place]
        held = self.of_gpu[nodes]
        held[held == number] = self.nobody
        self.of_gpu[nodes] = held
        self._again(nodes)

    def away(self, nodes: list[int]) -> None:
        """Takes away the nodes under repair, and gives back the others."""
        self.of_gpu[self.of_gpu == self.repair] = self.nobody
        self.of_gpu[nodes] = self.repair

    def _again(self, nodes: list[int]) -> None:
        if self._sorted is not None:
            places = self.stands[self.of_gpu[nodes]]
            places.sort(axis=1)
            self._sorted[nodes] = places


def _ascending(places: Numbers) -> list[int]:
    return sorted(set(places.tolist()) - {_NOBODY})


def displacing(place: Placer, jobs: int) -> Displacing:
    """Returns the object that finds jobs to displace, for `jobs` jobs that `place` places."""
    if isinstance(place, Packed) and place.on_whole_nodes:
        return OnNodes(place.shape, jobs)
    return Last(place)
