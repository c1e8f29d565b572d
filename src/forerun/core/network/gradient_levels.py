"""Gradients that are summed without compression inside nodes and compressed between nodes."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.common.errors import ForerunError
from forerun.core.network.gradient_compression import GradientCompression
from forerun.core.network.patterns import Wires
from forerun.core.network.patterns_collectives import AllGather, Nccl, ReduceScatter
from forerun.core.program.groups import CommGroup
from forerun.core.program.types import F64
from forerun.describe.plan.plan import Plan


@dataclass(frozen=True)
class BetweenNodes(GradientCompression):
    """Ranks of a node reduce-scatter gradients, exchange their parts with other nodes under `method`, and gather."""

    method: GradientCompression
    ranks_per_node: int
    """ranks of a node that share the gradients"""

    @property
    def name(self) -> str:
        """Returns the name of the method, and where it applies."""
        return f"{self.method.name} between nodes"

    @property
    def as_nccl(self) -> bool:
        """Returns that of the method."""
        return self.method.as_nccl

    def check(self, plan: Plan) -> None:
        """Raises ForerunError if the method doesn't go with `plan`, or all its ranks are in one node."""
        self.method.check(plan)
        if plan.dp <= self.ranks_per_node:
            raise ForerunError(f"gradient_compression: all {plan.dp} ranks are in one node; leave @nodes out")

    def wire_share(self, ranks: int) -> float:
        """Returns the bytes between nodes over those of an all-reduce of the same parts."""
        return self.method.wire_share(ranks // self.ranks_per_node)

    def residual_share(self, ranks: int) -> float:
        """Returns the share of the method, for the part of the gradients that a rank exchanges."""
        return self.method.residual_share(ranks // self.ranks_per_node) / self.ranks_per_node

    def seconds(self, size_bytes: F64, group: CommGroup, wires: Wires) -> F64:
        """Returns the time of the reduce-scatter, the exchange and the all-gather, in turn.

        Groups inside one node all-reduce; groups with one rank in each node exchange everything under the method.
        """
        local = group.ranks_per_node
        if group.nodes == 1:
            return Nccl().seconds(size_bytes, group, wires)
        if local == 1:
            return self.method.seconds(size_bytes, group, wires)
        inside = CommGroup(group.axis, local, 1, local, group.inner)
        across = CommGroup(group.axis, group.nodes, group.nodes, 1, group.inner * local)
        part = self.method.seconds(size_bytes / local, across, wires)
        around = [each.nccl_lines(inside, wires).seconds(size_bytes) for each in (ReduceScatter(), AllGather())]
        total: F64 = around[0] + part + around[1]
        return total
