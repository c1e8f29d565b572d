"""Orders of mesh axes: which of them place the groups of a mesh differently."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from forerun.common.errors import ImpossiblePlan
from forerun.core.program.groups import CommGroup
from forerun.describe.plan.plan import DEFAULT_ORDER, MESH_AXES, Plan
from forerun.sources.symbolic.mesh import groups_of

Groups = dict[str, CommGroup]


def all_orders() -> tuple[str, ...]:
    """Every order of the mesh axes, the usual one first."""
    orders = ["-".join(order) for order in permutations(MESH_AXES)]
    return (DEFAULT_ORDER, *(order for order in orders if order != DEFAULT_ORDER))


@dataclass(frozen=True, slots=True)
class Placed:
    """An order of a mesh, with where its groups lie; None where expert parallelism can't be cut out of it."""

    order: str
    groups: Groups | None

    def places(self, on_network: bool) -> tuple[object, ...]:
        """What two orders that run the same have in common: nodes and ranks a node of all groups; on a network, where
        every rank has its place, the ranks themselves."""
        if self.groups is None:
            return ()
        if on_network:
            return tuple(self.groups.values())
        return tuple((group.nodes, group.ranks_per_node) for group in self.groups.values())


class Orders:
    """The orders to try on nodes of `node_size` ranks, the preferred one first."""

    def __init__(self, orders: Sequence[str], node_size: int, on_network: bool) -> None:
        self._orders, self._node_size, self._on_network = orders, node_size, on_network

    def of(self, mesh: Plan) -> tuple[list[Placed], int]:
        """The orders that place the groups of `mesh` differently, the first of each kind, and how many others there
        are."""
        first: dict[tuple[object, ...], Placed] = {}
        seen: dict[tuple[str, ...], None] = {}
        for order in self._orders:
            inside = self._inside(mesh, order)
            if inside in seen:
                continue
            seen[inside] = None
            placed = self.placed(replace(mesh, mesh_order=order))
            first.setdefault(placed.places(self._on_network), placed)
        return list(first.values()), len(self._orders) - len(first)

    def _inside(self, mesh: Plan, order: str) -> tuple[str, ...]:
        """The axes that decide where groups lie, in their order.

        Those of one rank lie anywhere; where all degrees are powers of two, so do those that begin outside a node.
        """
        axes = [(axis, getattr(mesh, axis)) for axis in order.split("-")]
        sizes = [degree for _, degree in axes if degree > 1]
        whole = self._on_network or any(size & (size - 1) for size in (*sizes, max(1, self._node_size)))
        out, inner = [], 1
        for axis, degree in axes:
            if degree > 1 and (whole or inner < self._node_size):
                out.append(axis)
            inner *= degree
        return tuple(out)

    def placed(self, mesh: Plan) -> Placed:
        """Where the groups of `mesh` lie."""
        try:
            return Placed(mesh.mesh_order, groups_of(mesh, self._node_size))
        except ImpossiblePlan:
            return Placed(mesh.mesh_order, None)

    def preferred(self, mesh: Plan) -> str:
        """The order of those to try that stands for that of `mesh`: its own where none is the same."""
        places = self.placed(mesh).places(self._on_network)
        found, _ = self.of(mesh)
        return next((each.order for each in found if each.places(self._on_network) == places), mesh.mesh_order)
