"""Fat trees: three layers of equal switches, as in a folded Clos network."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from forerun.core.network.topology.base import Links, Topology
from forerun.core.program.types import I32

Integers = npt.NDArray[np.integer]
_SMALLEST_RADIX = 4


@dataclass(frozen=True)
class FatTree(Topology):
    """A k-ary fat tree of switches with `radix` (k) ports, after Al-Fares et al. (SIGCOMM 2008).

    A pod has k/2 edge switches with k/2 NPUs each and k/2 aggregation switches; (k/2)**2 core switches join the pods.
    The default radix is the smallest even one whose k**3/4 places hold the `n` NPUs; the last pod may be partly filled,
    and a single pod has no core. Oversubscription leaves out uplinks: an edge switch has k/2 / `edge_oversubscription`
    of them, an aggregation switch k/2 / `oversubscription`.

    Routing is by destination ("d mod k"): the way up is chosen by the number of the NPU that a message goes to.
    Switches are numbered edge, aggregation, core; those of a layer pod by pod.
    """

    between_nodes: ClassVar[str] = "three layers of switches that don't block; more hops the farther away"

    n: int
    radix: int | None = field(default=None, kw_only=True)
    oversubscription: int = field(default=1, kw_only=True)
    edge_oversubscription: int = field(default=1, kw_only=True)

    def check_options(self) -> None:
        if self.radix is not None and self.radix % 2:
            raise self.error(f"radix is {self.radix}, it has to be an even number of ports")
        if self.n > self._half**3 * 2:
            raise self.error(f"switches of {self.radix} ports join at most {self._half**3 * 2:,} NPUs")
        for ratio in (self.oversubscription, self.edge_oversubscription):
            if self._half % ratio:
                raise self.error(f"oversubscription {ratio} does not divide the {self._half} uplinks of a switch")

    @cached_property
    def _half(self) -> int:
        if self.radix is not None:
            return self.radix // 2
        half = _SMALLEST_RADIX // 2
        while 2 * half**3 < self.n:
            half += 1
        return half

    @property
    def n_npus(self) -> int:
        return self.n

    @property
    def n_devices(self) -> int:
        return self._first_core + self._n_cores

    @property
    def _n_edges(self) -> int:
        return -(-self.n // self._half)

    @property
    def _n_pods(self) -> int:
        return -(-self._n_edges // self._half)

    @property
    def _pod_aggregations(self) -> int:
        return self._half // self.edge_oversubscription

    @property
    def _uplinks(self) -> int:
        """Returns core switches above an aggregation switch."""
        return self._half // self.oversubscription

    @property
    def _first_aggregation(self) -> int:
        return self.n + self._n_edges

    @property
    def _first_core(self) -> int:
        return self._first_aggregation + self._n_pods * self._pod_aggregations

    @property
    def _n_cores(self) -> int:
        return self._pod_aggregations * self._uplinks if self._n_pods > 1 else 0

    def links(self) -> Links:
        npu = np.arange(self.n)
        edge, number = _pairs(self._n_edges, self._pod_aggregations)
        edge_up = self._aggregation(edge // self._half, number)
        aggregation, port = _pairs(self._n_pods * self._pod_aggregations, self._uplinks if self._n_cores else 0)
        core = self._first_core + aggregation % self._pod_aggregations * self._uplinks + port
        return self.both_ways(
            (npu, self.n + npu // self._half),
            (self.n + edge, edge_up),
            (self._first_aggregation + aggregation, core),
        )

    def _aggregation(self, pod: Integers, number: Integers) -> Integers:
        return self._first_aggregation + pod * self._pod_aggregations + number

    def next_device(self, at: I32, to: I32) -> I32:
        """Goes up until the NPU is below, then down; up by the digits of the NPU's number."""
        half, goal = self._half, to.astype(np.int64)
        goal_edge, goal_pod = goal // half, goal // half**2
        number, port = goal % self._pod_aggregations, goal // self._pod_aggregations % self._uplinks
        edge, aggregation = at - self.n, at - self._first_aggregation
        from_edge = np.where(edge == goal_edge, goal, self._aggregation(edge // half, number))
        over = aggregation % self._pod_aggregations
        up = self._first_core + over * self._uplinks + port
        from_aggregation = np.where(aggregation // self._pod_aggregations == goal_pod, self.n + goal_edge, up)
        from_core = self._aggregation(goal_pod, (at - self._first_core) // self._uplinks)
        layer = [at < self.n, at < self._first_aggregation, at < self._first_core]
        return np.select(layer, [self.n + at // half, from_edge, from_aggregation], from_core).astype(np.int32)


def _pairs(n: int, m: int) -> tuple[Integers, Integers]:
    """Returns all pairs of one of `n` and one of `m`."""
    return np.repeat(np.arange(n), m), np.tile(np.arange(m), n)
