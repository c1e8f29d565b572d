"""Folding by blocks: one block of ranks stands for all, if ranks one block apart see the same distances.

A ring through a part of a larger ring has one hop that is longer than the others, so its ranks differ. But shifting
every rank by the length of a block maps groups to groups and keeps distances. So one block is simulated, with the
groups inside it message by message. A group across blocks joins equal ranks, so its collectives take a known time.
"""

from __future__ import annotations

import numpy as np

from forerun.astrasim.astra.collectives import CollectiveTables
from forerun.astrasim.astra.fold_ranks import CollectiveTimes, Folded, Signature, ring_signature, with_times
from forerun.astrasim.astra.lower import IssueOrder, lower_program
from forerun.astrasim.astra.ranks import LoweredRanks, groups_of_all
from forerun.astrasim.astra.symmetry import distances
from forerun.astrasim.chakra.trace import CommGroups
from forerun.astrasim.messages.slots import COLLECTIVE
from forerun.common.arrays import positions
from forerun.core.network.network_file import Network
from forerun.core.program.types import I64


def fold_blocks(
    lowered: LoweredRanks, comm_groups: CommGroups, times: CollectiveTimes, order: IssueOrder
) -> Folded | None:
    """Returns the program of the first block of ranks; None if ranks one block apart differ or exchange messages."""
    first = lowered[0]
    if order == "march-2025" or len(lowered.of_class) > 1 or first.has_messages or first.trace.involved_dims:
        return None
    used = np.unique(first.trace.group[first.row[first.action == COLLECTIVE]]).tolist()
    members = {g: _members(groups_of_all(lowered, comm_groups, g)) for g in used}
    rings: dict[int, Signature | None] = {}
    for g, table in members.items():
        if table is None or table.shape[1] == len(lowered):
            return None
        rings[g] = ring_signature([tuple(group) for group in np.unique(table, axis=0).tolist()], times.network)
    tables_of = {g: table for g, table in members.items() if table is not None}
    block, inside = _block(tables_of, {g for g, ring in rings.items() if ring is None})
    n_ranks = len(lowered)
    if block == n_ranks or n_ranks % block or not all(_repeats(tables_of[g], block, times.network) for g in inside):
        return None
    leaders = np.arange(block)
    signatures = {
        (actor, g): ring for g, ring in rings.items() if g not in inside and ring is not None for actor in range(block)
    }
    tables = CollectiveTables(times.system, [dim.n_npus for dim in times.network.dims])
    of_block = [lowered[rank] for rank in range(block)]
    groups = [one.trace.group_names for one in of_block]
    program = lower_program(of_block, leaders.tolist(), groups, comm_groups, tables, order)
    timed = with_times(program, tables, leaders, signatures, times)
    return None if timed is None else Folded(timed, tables, np.arange(n_ranks) % block)


def _members(groups: I64 | None) -> I64 | None:
    """Returns the members of each rank's group, (ranks, size)."""
    return None if groups is None else groups[positions(groups.reshape(-1)) // groups.shape[1]]


def _block(members: dict[int, I64], inside: set[int]) -> tuple[int, set[int]]:
    """Returns the length of the first block of ranks and the groups that lie inside a block.

    The block contains all groups `inside` of its ranks, and every group that joins ranks which are not a whole number
    of blocks apart.
    """
    block = 1
    while True:
        reached = 1 + max((int(members[g][:block].max()) for g in inside), default=0)
        if reached > block:
            block = reached
            continue
        more = {g for g, table in members.items() if g not in inside and (table % block != table[:, :1] % block).any()}
        if not more:
            return block, inside
        inside = inside | more


def _repeats(members: I64, block: int, network: Network) -> bool:
    """Returns whether the groups of every block are those of the first one, shifted, with the same hops in both
    directions."""
    first = members[:block]
    shift = np.arange(0, len(members), block)
    if not np.array_equal(members, (shift[:, None, None] + first[None]).reshape(members.shape)):
        return False
    for step in (-1, 1):
        seen = distances(network, members.reshape(-1), np.roll(members, step, axis=1).reshape(-1))
        by_block = seen.reshape(len(shift), -1)
        if (by_block != by_block[0]).any():
            return False
    return True
