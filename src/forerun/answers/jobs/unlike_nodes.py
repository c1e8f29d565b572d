"""The nodes of a cluster of unlike GPUs: where the jobs of a round lie, and which nodes fail under them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.answers.jobs.contention import SharedNetwork
from forerun.answers.jobs.failures import FailingNodes, NodeFailures
from forerun.answers.jobs.placement import Placer, Shape
from forerun.answers.jobs.placers import placer
from forerun.common.errors import ForerunError

COUNT = "count"


@dataclass(frozen=True)
class NodesOfKinds:
    """How the GPUs of each kind make up nodes, where a job's GPUs may lie, and how nodes fail."""

    per_node: int = 8
    placement: str = COUNT
    """a name of `PLACERS`"""
    failures: NodeFailures | None = None
    network: SharedNetwork | None = None
    """None: jobs don't slow each other"""
    per_switch: int | None = None
    """nodes under a switch; None: all of a kind"""

    def shape(self, gpus: int) -> Shape:
        """Returns the nodes of a kind that has so many GPUs."""
        if self.placement == COUNT:
            return Shape(1, 1, gpus)
        nodes = gpus // self.per_node
        under = min(self.per_switch or nodes, nodes)
        return Shape(nodes // under, under, self.per_node)

    def shapes(self, workers: Sequence[int]) -> tuple[Shape, ...]:
        """Returns the nodes of each kind."""
        return tuple(self.shape(max(self.per_node if self.placement != COUNT else 1, each)) for each in workers)

    def check(self, workers: Sequence[int], kinds: Sequence[str]) -> None:
        """Raises UnknownName for a placement, and ForerunError if nodes have to be known and are not whole."""
        placer(self.placement, Shape(1, 1, 1))
        for name, given in (("failures", self.failures), ("network", self.network)):
            if given is not None and self.placement == COUNT:
                raise ForerunError(
                    f"{name}: this needs to know the nodes of each job; choose placement packed or nearest"
                )
        if self.placement == COUNT:
            return
        for number, kind in zip(workers, kinds, strict=True):
            if number % self.per_node:
                raise ForerunError(
                    f"gpu_kinds: {number:,} {kind} do not fill whole nodes; say gpus_per_node, which is {self.per_node}"
                )
            nodes = number // self.per_node
            if self.per_switch is not None and nodes % min(self.per_switch, nodes):
                raise ForerunError(f"nodes_per_switch: {self.per_switch:,} do not divide the {nodes:,} nodes of {kind}")


COUNTED = NodesOfKinds()
"""only the number of GPUs matters, and none fails"""


@dataclass(frozen=True, slots=True)
class Failure:
    """A node that fails."""

    time_s: float
    kind: int
    node: int
    """its number among the nodes of the kind"""


class Nodes:
    """The state of the nodes of a cluster: those that are under repair, and the failures to come."""

    def __init__(self, workers: Sequence[int], how: NodesOfKinds) -> None:
        self.workers, self.how = workers, how
        self.shapes = how.shapes(workers)
        nodes = [number // how.per_node for number in workers]
        self._of_node = [(kind, node) for kind, number in enumerate(nodes) for node in range(number)]
        self._failing = FailingNodes(how.failures, len(self._of_node))

    def could_ever(self, kind: int, gpus: int) -> bool:
        """Returns whether the GPUs of a kind have a place for so many."""
        return gpus <= self.workers[kind] and placer(self.how.placement, self.shapes[kind]).could_ever(gpus)

    def room(self, kind: int, now_s: float) -> Placer:
        """Returns a placer for a round that begins now: all GPUs of a kind but those under repair."""
        self._failing.repaired(now_s)
        room, per_node = placer(self.how.placement, self.shapes[kind]), self.how.per_node
        for of_kind, node in (self._of_node[number] for number in self._failing.away):
            if of_kind == kind:
                room.take(((node, per_node),), per_node)
        return room

    def next_repair_s(self) -> float:
        """Returns when the next node comes back; infinite if none is away."""
        return self._failing.next_repair_s

    def next_failure(self, until_s: float) -> Failure | None:
        """Takes the next failure until a time, of a node that is not away; None if there is none."""
        failed = self._failing.fail(until_s)
        return None if failed is None else Failure(failed[0], *self._of_node[failed[1]])
