"""The nodes that are under repair, serve as spares, or are missing from a run."""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from math import inf

from forerun.answers.goodput.request import FailureKind, RunRequest


class Pool:
    """Spare nodes, and replicas that wait for nodes. A cluster without spares of its own always has another node."""

    def __init__(self, request: RunRequest) -> None:
        self._spares, self._elastic = request.spares, request.elastic
        self._free = 0 if request.spares is None else request.spares.nodes
        self._repairs: list[float] = []
        self._returns: list[float] = []
        """when each missing replica is back, in rising order"""

    def replace_s(self, kind: FailureKind, now_s: float) -> float:
        """Takes the nodes of a failure out and returns the seconds until others stand in their place."""
        spares = self._spares
        if spares is None or not kind.nodes:
            return 0.0
        while self._repairs and self._repairs[0] <= now_s:
            heapq.heappop(self._repairs)
            self._free = min(self._free + 1, spares.nodes)
        short = max(0, kind.nodes - self._free)
        self._free -= kind.nodes - short
        for _ in range(kind.nodes):
            heapq.heappush(self._repairs, now_s + kind.repair_s)
        if not short:
            return spares.swap_s
        if spares.replace_s is not None:
            return max(spares.swap_s, spares.replace_s)
        repaired_s = [heapq.heappop(self._repairs) for _ in range(short)][-1]
        return max(0.0, repaired_s - now_s) + spares.swap_s

    def lose_replica(self, back_s: float) -> bool:
        """Takes one replica out until `back_s`; returns whether enough others go on."""
        elastic = self._elastic
        if elastic is None or elastic.replicas - len(self._returns) - 1 < elastic.least_replicas:
            return False
        insort(self._returns, back_s)
        return True

    def stop(self, ready_s: float) -> float:
        """Notes that the whole run stops and that nodes stand in the place of the failed ones from `ready_s` on.

        Returns when no more nodes are missing than the run can do without. Failures while it waits change nothing for
        those that were missing before.
        """
        insort(self._returns, ready_s)
        spared = 0 if self._elastic is None else self._elastic.replicas - self._elastic.least_replicas
        return self._returns[max(0, len(self._returns) - 1 - spared)]

    def start(self, now_s: float) -> None:
        """Ends the absence of all that are back, because the whole run starts again."""
        del self._returns[: bisect_right(self._returns, now_s)]

    def all_return(self) -> None:
        """Ends the absence of all replicas, because planned work brings them back."""
        self._returns.clear()

    @property
    def next_return_s(self) -> float:
        """Returns the time at which the next missing replica is back; infinite if none is missing."""
        return self._returns[0] if self._returns else inf

    def grow(self) -> None:
        """Takes back the replica that returns first."""
        del self._returns[0]

    @property
    def factor(self) -> float:
        """Returns the time of a step without the missing replicas over that with all."""
        if self._elastic is None or not self._returns:
            return 1.0
        return self._elastic.factor(self._elastic.replicas - len(self._returns))
