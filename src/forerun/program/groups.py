"""Communication groups: which ranks of the hierarchy one mesh axis joins."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CommGroup:
    """A set of ranks that communicate, described by how it lies on the nodes.

    The pair (nodes, ranks_per_node), not the size alone, decides the cost of a collective.
    """

    axis: str
    size: int
    nodes: int
    ranks_per_node: int

    @staticmethod
    def on_mesh(axis: str, size: int, inner: int, node_size: int) -> CommGroup:
        """Group of `size` ranks spaced `inner` ranks apart, on nodes of `node_size` ranks.

        `inner` is the product of the mesh axes inside this one.
        """
        ranks_per_node = max(1, min(size, node_size // inner if inner <= node_size else 1))
        while size % ranks_per_node:
            ranks_per_node -= 1
        return CommGroup(axis, size, size // ranks_per_node, ranks_per_node)
