"""Communication groups: the ranks of the hierarchy that a mesh axis connects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import gcd, prod


@dataclass(frozen=True, slots=True)
class CommGroup:
    """A set of ranks that communicate, described by how it lies on the nodes.

    The pair (nodes, ranks_per_node) decides the cost of a collective over the links of a cluster; the size alone does
    not. On a topology the ranks themselves decide it: the first group is 0, inner, 2 inner, ...
    """

    axis: str
    size: int
    nodes: int
    ranks_per_node: int
    inner: int = 1
    """distance between its members, in ranks"""
    borders: int = 0
    """for transfers between pipeline stages, the number of borders between stages, including the border from the last
    stage to the first where the schedule is circular; 0 for other groups"""
    runs: tuple[tuple[int, int], ...] = ()
    """(size, spacing) of the parts of an unevenly spaced group, from the inside out; every combination of their members
    is a member. Empty where `inner` is enough"""

    @staticmethod
    def on_mesh(axis: str, size: int, inner: int, node_size: int) -> CommGroup:
        """Makes a group of `size` ranks spaced `inner` ranks apart, on nodes of `node_size` ranks.

        `inner` is the product of the mesh axes inside this one.
        """
        ranks_per_node = max(1, min(size, node_size // inner if inner <= node_size else 1))
        while size % ranks_per_node:
            ranks_per_node -= 1
        return CommGroup(axis, size, size // ranks_per_node, ranks_per_node, inner)

    @staticmethod
    def on_runs(axis: str, runs: Sequence[tuple[int, int]], node_size: int) -> CommGroup:
        """Makes the group of all combinations of the members of `runs`, one or more (size, spacing), inner first."""
        parts = [CommGroup.on_mesh(axis, size, inner, node_size) for size, inner in runs]
        if len(parts) == 1:
            return parts[0]
        nodes, per_node = prod(part.nodes for part in parts), prod(part.ranks_per_node for part in parts)
        return CommGroup(axis, nodes * per_node, nodes, per_node, runs[0][1], runs=tuple(runs))

    @staticmethod
    def of_ranks(axis: str, ranks: Sequence[int], node_size: int, borders: int = 0) -> CommGroup:
        """Makes the group of these global `ranks` (distinct, in rising order), on nodes of `node_size` ranks.

        Evenly spaced ranks are `on_mesh`. Others are counted node by node; where nodes have different numbers of them,
        the smallest number counts, because that node drives the fewest links.
        """
        steps = {b - a for a, b in pairwise(ranks)}
        inner = gcd(*steps) if steps else 1
        size = len(ranks)
        if len(steps) <= 1 and (size != 2 or borders == 0):
            whole = CommGroup.on_mesh(axis, size, inner, node_size)
            crosses = size > 1 and ranks[0] // max(1, node_size) != ranks[-1] // max(1, node_size)
            if whole.nodes > 1 or not crosses:
                return replace(whole, borders=borders)
        counts = Counter(rank // max(1, node_size) for rank in ranks)
        per_node = min(counts.values(), default=1)
        while size % per_node:
            per_node -= 1
        return CommGroup(axis, size, max(1, size // per_node), per_node, inner, borders)
