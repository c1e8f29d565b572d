"""Placers decide where the GPUs of a job lie: anywhere, packed onto few nodes, or spread over many."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from forerun.answers.jobs.job import Placement
from forerun.common.errors import ForerunError

_MOST_GPUS = 10_000_000


@dataclass(frozen=True, slots=True)
class Shape:
    """A cluster of equal nodes, in equal groups that share a switch."""

    switches: int
    nodes: int
    """nodes of a switch"""
    gpus: int
    """GPUs of a node"""
    domain: int = 1
    """nodes that are joined closer than by their switch: those of an NVLink domain or a rack"""

    def __post_init__(self) -> None:
        """Raises ForerunError for domains that don't fill a switch, or more GPUs than can be simulated."""
        if self.nodes % self.domain:
            nodes = f"{self.nodes:,} nodes under a switch"
            raise ForerunError(f"{nodes} are not a whole number of domains of {self.domain:,}; change one of both")
        if self.total > _MOST_GPUS:
            raise ForerunError(f"a cluster of {self.total:,} GPUs is more than the {_MOST_GPUS:,} that are simulated")

    @property
    def total(self) -> int:
        """Returns the number of GPUs."""
        return self.switches * self.nodes * self.gpus


class Placer(ABC):
    """Gives GPUs to jobs, all of a job's at once, and takes them back."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.free = shape.total

    @abstractmethod
    def place(self, gpus: int) -> Placement | None:
        """Takes GPUs and returns where they are; None, and nothing is taken, where they can't be had."""

    @abstractmethod
    def release(self, place: Placement, gpus: int) -> None:
        """Takes the GPUs of a job back."""

    @abstractmethod
    def take(self, place: Placement, gpus: int) -> None:
        """Takes GPUs of a place that was just released."""

    def on_rails(self, place: Placement) -> bool:
        """Returns whether a job has the same GPUs of each of its nodes, as whole nodes are."""
        return all(taken == self.shape.gpus for _, taken in place)

    @abstractmethod
    def could_ever(self, gpus: int) -> bool:
        """Returns whether the empty cluster has a place for so many GPUs."""


class Counted(Placer):
    """Counts GPUs only: a job takes any that are free."""

    def place(self, gpus: int) -> Placement | None:
        """Takes `gpus` free GPUs."""
        if gpus > self.free:
            return None
        self.free -= gpus
        return ()

    def release(self, place: Placement, gpus: int) -> None:
        """Gives them back."""
        self.free += gpus

    def take(self, place: Placement, gpus: int) -> None:
        """Takes them again."""
        self.free -= gpus

    def could_ever(self, gpus: int) -> bool:
        """Returns whether the cluster has as many."""
        return gpus <= self.shape.total


class Packed(Placer):
    """Puts a job on one node where it fits, else on idle nodes and the rest of one more, all under one switch."""

    on_whole_nodes: ClassVar[bool] = True
    """whether GPUs of several nodes have to be whole nodes"""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.of_node = [shape.gpus] * (shape.switches * shape.nodes)
        """free GPUs of each node"""
        all_nodes = (1 << shape.nodes) - 1
        self.nodes_with = [[0] * shape.gpus + [all_nodes] for _ in range(shape.switches)]
        """for each switch and each number of free GPUs: the nodes that have as many, as bits"""
        self._hopeless: set[int] = set()
        """numbers of GPUs that found no place since GPUs were last released"""

    def place(self, gpus: int) -> Placement | None:
        """Takes GPUs of the first nodes that have room."""
        if gpus > self.free or gpus in self._hopeless:
            return None
        for switch in range(self.shape.switches):
            found = self._under(switch, gpus)
            if found is not None:
                self.take(found, gpus)
                return found
        self._hopeless.add(gpus)
        return None

    def _under(self, switch: int, gpus: int) -> Placement | None:
        whole, rest = divmod(gpus, self.shape.gpus) if gpus > self.shape.gpus else (0, gpus)
        nodes_with, first = self.nodes_with[switch], switch * self.shape.nodes
        idle = nodes_with[-1]
        if idle.bit_count() < whole:
            return None
        found = [(first + node, self.shape.gpus) for node in _lowest(idle, whole)]
        if rest:
            for node, _ in found:
                idle ^= 1 << node - first
            for nodes in nodes_with[rest:-1]:
                idle |= nodes
            if not idle:
                return None
            found += [(first + node, rest) for node in _lowest(idle, 1)]
        return tuple(found)

    def release(self, place: Placement, gpus: int) -> None:
        """Gives them back to their nodes."""
        self._add(place, 1)
        self.free += gpus
        self._hopeless.clear()

    def take(self, place: Placement, gpus: int) -> None:
        """Takes them again on the same nodes."""
        self._add(place, -1)
        self.free -= gpus

    def _add(self, place: Placement, sign: int) -> None:
        """Adds the GPUs of a place, or takes them away, to those that its nodes have free."""
        for node, gpus in place:
            free = self.of_node[node]
            switch, own = divmod(node, self.shape.nodes)
            nodes_with, bit = self.nodes_with[switch], 1 << own
            nodes_with[free] ^= bit
            free += sign * gpus
            nodes_with[free] ^= bit
            self.of_node[node] = free

    def could_ever(self, gpus: int) -> bool:
        """Returns whether one switch has as many."""
        return gpus <= self.shape.nodes * self.shape.gpus


def _lowest(bits: int, number: int) -> list[int]:
    """Returns the places of the lowest bits that are set."""
    found = []
    for _ in range(number):
        lowest = bits & -bits
        found.append(lowest.bit_length() - 1)
        bits ^= lowest
    return found


class Spread(Packed):
    """Puts a job on the nodes with the most free GPUs, of any switch."""

    on_whole_nodes: ClassVar[bool] = False

    def place(self, gpus: int) -> Placement | None:
        """Takes GPUs of the emptiest nodes first."""
        if gpus > self.free:
            return None
        taken: list[tuple[int, int]] = []
        left = gpus
        for free in range(self.shape.gpus, 0, -1):
            for switch, nodes_with in enumerate(self.nodes_with):
                number = min(nodes_with[free].bit_count(), -(-left // free))
                for node in _lowest(nodes_with[free], number):
                    taken.append((switch * self.shape.nodes + node, min(left, free)))
                    left -= min(left, free)
            if not left:
                break
        self.take(tuple(taken), gpus)
        return tuple(taken)

    def could_ever(self, gpus: int) -> bool:
        """Returns whether the cluster has as many."""
        return gpus <= self.shape.total
