"""Finds the orders of mesh axes that place the groups of a mesh differently."""

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
    """Returns every order of the mesh axes, the usual one first."""
    orders = ["-".join(order) for order in permutations(MESH_AXES)]
    return (DEFAULT_ORDER, *(order for order in orders if order != DEFAULT_ORDER))


@dataclass(frozen=True, slots=True)
class Placed:
    """An order of a mesh with the places of its groups; None if the order can't place expert parallelism."""

    order: str
    groups: Groups | None

    def places(self, on_network: bool) -> tuple[object, ...]:
        """Returns the key that two orders share if they run in the same time: nodes and ranks per node of all groups;
        on a network, where every rank has its place, the ranks themselves."""
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
        """Returns the orders that place the groups of `mesh` differently, the first of each kind, and the number of
        other orders."""
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
        """Returns the axes that decide where groups lie, in their order.

        An axis of one rank has no effect; if all degrees are powers of two, neither has an axis outside a node.
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
        """Returns the places of the groups of `mesh`."""
        try:
            return Placed(mesh.mesh_order, groups_of(mesh, self._node_size))
        except ImpossiblePlan:
            return Placed(mesh.mesh_order, None)

    def preferred(self, mesh: Plan) -> str:
        """Returns the tried order that places groups like the order of `mesh`; its own order where none does."""
        places = self.placed(mesh).places(self._on_network)
        found, _ = self.of(mesh)
        return next((each.order for each in found if each.places(self._on_network) == places), mesh.mesh_order)
