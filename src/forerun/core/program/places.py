"""Finds the global ranks of each role: shifted copies of a few ranks that together are all ranks."""

from __future__ import annotations

from collections.abc import Sequence


def tiles_of(members: Sequence[int], world_size: int) -> list[tuple[int, ...]]:
    """Returns shifted copies of `members` that share no rank, from rank 0 upwards. Ranks that fit none are left out.

    Every axis of a mesh, and every product of axes, fills its world with such copies.
    """
    start, reach = min(members), max(members) - min(members)
    offsets = [rank - start for rank in members]
    taken = bytearray(world_size)
    tiles = []
    for first in range(world_size - reach):
        if taken[first]:
            continue
        tile = tuple(first + offset for offset in offsets)
        if not any(taken[rank] for rank in tile):
            tiles.append(tile)
            for rank in tile:
                taken[rank] = 1
    return tiles


def role_ranks(own: Sequence[int], world_size: int) -> tuple[tuple[int, ...], ...] | None:
    """Returns the ranks of each role, where copies of `own`, one rank of each role, fill the world exactly; else None.

    Ranks at the same position in their roles form one pipeline.
    """
    tiles = tiles_of(own, world_size)
    if len(tiles) * len(own) != world_size:
        return None
    return tuple(zip(*tiles, strict=True))
