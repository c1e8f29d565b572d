"""Where the GPUs of a job lie: anywhere, or packed onto few nodes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from forerun.answers.jobs.job import Placement
from forerun.common.errors import UnknownName


@dataclass(frozen=True, slots=True)
class Shape:
    """A cluster of equal nodes, in equal groups that share a switch."""

    switches: int
    nodes: int
    """nodes of a switch"""
    gpus: int
    """GPUs of a node"""

    @property
    def total(self) -> int:
        """The number of GPUs."""
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
    def clear(self) -> None:
        """Takes the GPUs of all jobs back."""

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

    def clear(self) -> None:
        """Frees all GPUs."""
        self.free = self.shape.total

    def could_ever(self, gpus: int) -> bool:
        """Returns whether the cluster has as many."""
        return gpus <= self.shape.total


class Packed(Placer):
    """Puts a job on one node where it fits, else on idle nodes and the rest of one more, all under one switch."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.of_node = [shape.gpus] * (shape.switches * shape.nodes)
        self._hopeless: set[int] = set()
        """numbers of GPUs that found no place since GPUs were last released"""

    def place(self, gpus: int) -> Placement | None:
        """Takes GPUs of the first nodes that have room."""
        if gpus > self.free or gpus in self._hopeless:
            return None
        for switch in range(self.shape.switches):
            nodes = range(switch * self.shape.nodes, (switch + 1) * self.shape.nodes)
            found = self._under(nodes, gpus)
            if found is not None:
                for node, taken in found:
                    self.of_node[node] -= taken
                self.free -= gpus
                return found
        self._hopeless.add(gpus)
        return None

    def _under(self, nodes: range, gpus: int) -> Placement | None:
        whole, rest = divmod(gpus, self.shape.gpus) if gpus > self.shape.gpus else (0, gpus)
        idle = [node for node in nodes if self.of_node[node] == self.shape.gpus][:whole]
        if len(idle) < whole:
            return None
        found = tuple((node, self.shape.gpus) for node in idle)
        if not rest:
            return found
        last = next((node for node in nodes if self.of_node[node] >= rest and node not in idle), None)
        return None if last is None else (*found, (last, rest))

    def release(self, place: Placement, gpus: int) -> None:
        """Gives them back to their nodes."""
        for node, taken in place:
            self.of_node[node] += taken
        self.free += gpus
        self._hopeless.clear()

    def clear(self) -> None:
        """Frees all nodes."""
        self.of_node = [self.shape.gpus] * len(self.of_node)
        self.free = self.shape.total
        self._hopeless.clear()

    def could_ever(self, gpus: int) -> bool:
        """Returns whether one switch has as many."""
        return gpus <= self.shape.nodes * self.shape.gpus


class Spread(Packed):
    """Puts a job on the nodes with the most free GPUs, of any switch."""

    def place(self, gpus: int) -> Placement | None:
        """Takes GPUs of the emptiest nodes first."""
        if gpus > self.free:
            return None
        taken: list[tuple[int, int]] = []
        left = gpus
        for node in sorted(range(len(self.of_node)), key=lambda node: -self.of_node[node]):
            share = min(left, self.of_node[node])
            taken.append((node, share))
            self.of_node[node] -= share
            left -= share
            if not left:
                break
        self.free -= gpus
        return tuple(taken)

    def could_ever(self, gpus: int) -> bool:
        """Returns whether the cluster has as many."""
        return gpus <= self.shape.total


PLACERS: dict[str, type[Placer]] = {"count": Counted, "packed": Packed, "spread": Spread}


def placer(name: str, shape: Shape) -> Placer:
    """Returns the placement called `name`. Raises UnknownName if there is none."""
    if name not in PLACERS:
        raise UnknownName("placement", name, list(PLACERS))
    return PLACERS[name](shape)
