"""The logical rings that ASTRA-sim makes for dimensions, and for groups when they are first used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from forerun.astrasim.astra.replay import Replay
from forerun.astrasim.astra.system import System
from forerun.astrasim.chakra.trace import CommGroups, RankTrace
from forerun.astrasim.messages.slots import COLLECTIVE
from forerun.core.network.network_file import Network

_IN_ORDER = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
"""the order in which ASTRA-sim makes the topologies of the collectives"""
_TREE = "doubleBinaryTree"


@dataclass(frozen=True, slots=True)
class DimensionRing:
    """A logical ring of rank 0 in one dimension."""

    n_ranks: int
    offset: int
    """distance of neighbours in rank numbers"""
    index: int = 0
    """position of the rank in the ring"""


@dataclass(frozen=True, slots=True)
class GroupRing:
    """The ring that a rank makes for a group smaller than the system, once for each kind of collective."""

    start_ns: int
    """when the rank first uses it"""
    rank: int
    n_ranks: int
    index: int
    """position of the rank in the group"""


def rings_of_rank_0(system: System, network: Network) -> Iterator[DimensionRing]:
    """Yields the rings of rank 0 in the order in which ASTRA-sim makes them: by collective, then by dimension."""
    sizes = [dim.n_npus for dim in network.dims]
    for collective in _IN_ORDER:
        custom = getattr(system, f"{collective}_implementation_chakra", ())
        names = custom or getattr(system, f"{collective}_implementation")
        for name, size, offset in zip(names, sizes, network.strides, strict=False):
            if name.startswith("one") and not custom:
                yield DimensionRing(network.n_npus, 1)
                break
            if name != _TREE:
                yield DimensionRing(size, offset)


def rings_of_groups(replay: Replay, traces: Sequence[RankTrace], groups: CommGroups) -> list[GroupRing]:
    """Returns the group rings of all ranks by first use, in the same ns by rank.

    A group of all ranks has no ring of its own.
    """
    found: list[GroupRing] = []
    for rank, actor in enumerate(replay.actor_of_rank):
        lowered, trace = replay.traces[actor], traces[rank]
        node = np.flatnonzero(lowered.action == COLLECTIVE)
        start_ns = replay.run.result.start_ns[replay.rows(actor)][node]
        first: dict[tuple[int, int], int] = {}
        for row, start in zip(lowered.row[node].tolist(), start_ns.tolist(), strict=True):
            if trace.group[row] >= 0 and row not in (trace.involved_dims or {}):
                use = int(trace.group[row]), int(trace.comm_type[row])
                first[use] = min(start, first.get(use, start))
        for (group, _), start in first.items():
            members = groups.get(trace.group_names[group], ())
            if rank in members and len(members) < len(traces):
                found.append(GroupRing(start, rank, len(members), members.index(rank)))
    return sorted(found, key=lambda ring: (ring.start_ns, ring.rank))
