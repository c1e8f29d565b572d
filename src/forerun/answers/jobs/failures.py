"""Draws failures of nodes under jobs, and computes the loss of a job by each."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

import numpy as np

from forerun.common.errors import ForerunError
from forerun.common.units import DAY_S

MOST_FAILURES = 2_000_000
"""of one schedule; more take minutes"""


@dataclass(frozen=True, slots=True)
class NodeFailures:
    """Nodes fail independently of each other, at a constant rate.

    A job on a failed node stops everywhere, and goes on from its last checkpoint when it next starts. The node is away
    until it is repaired.
    """

    per_1000_node_days: float
    repair_s: float
    checkpoint_s: float
    """seconds between two checkpoints of a job, of its running time"""
    seed: int = 0

    def draw(self, nodes: int) -> Iterator[tuple[float, int]]:
        """Yields (time, node) of failures of a cluster of so many nodes.

        Raises ForerunError after MOST_FAILURES of them.
        """
        random = np.random.default_rng(self.seed)
        gap_s = 1000.0 * DAY_S / (self.per_1000_node_days * nodes)
        now_s = 0.0
        for _ in range(MOST_FAILURES):
            now_s += float(random.exponential(gap_s))
            yield now_s, int(random.integers(nodes))
        raise ForerunError(
            f"more than {MOST_FAILURES:,} failures of nodes come before the last job ends; lower per_1000_node_days,"
            " or schedule fewer nodes or shorter jobs"
        )

    def kept_s(self, done_s: float) -> float:
        """Returns how much of a job's running time survives a failure."""
        return max(0.0, done_s // self.checkpoint_s * self.checkpoint_s)


class FailingNodes:
    """The nodes of a cluster over time: which are away for repair, and when the next one fails or comes back."""

    def __init__(self, failures: NodeFailures | None, nodes: int) -> None:
        """`failures`: None if no node ever fails."""
        self._repair_s = 0.0 if failures is None else failures.repair_s
        self._draws: Iterator[tuple[float, int]] = iter(()) if failures is None else failures.draw(nodes)
        self._next = next(self._draws, (inf, -1))
        self._away: list[tuple[float, int]] = []
        """(time of the repair, node), as a heap"""

    @property
    def next_failure_s(self) -> float:
        """Returns when a node fails next, unless that one is away."""
        return self._next[0]

    @property
    def next_repair_s(self) -> float:
        """Returns when the next node comes back; infinite if none is away."""
        return self._away[0][0] if self._away else inf

    @property
    def away(self) -> list[int]:
        """Returns the nodes that failed and were not taken back yet."""
        return [node for _, node in self._away]

    def repaired(self, now_s: float) -> list[int]:
        """Takes back the nodes whose repair is done, and returns them."""
        found = []
        while self.next_repair_s <= now_s:
            found.append(heapq.heappop(self._away)[1])
        return found

    def fail(self, until_s: float) -> tuple[float, int] | None:
        """Takes a node away that fails until then, the earliest one, and returns when and which; None if none does."""
        while self._next[0] <= until_s:
            (time_s, node), self._next = self._next, next(self._draws)
            if all(node != away or repair_s <= time_s for repair_s, away in self._away):
                heapq.heappush(self._away, (time_s + self._repair_s, node))
                return time_s, node
        return None
