"""The logical rings that ASTRA-sim makes for dimensions, and for groups when they are first used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from forerun.astrasim.astra.lower import LoweredTrace
from forerun.astrasim.astra.replay import Replay
from forerun.astrasim.astra.system import System
from forerun.astrasim.chakra.trace import CommGroups, RankTrace
from forerun.astrasim.messages.slots import COLLECTIVE
from forerun.core.network.network_file import Network
from forerun.core.program.types import I64

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
    uses: dict[int, list[tuple[int, int]]] = {}
    for rank, actor in enumerate(replay.actor_of_rank):
        if actor not in uses:
            uses[actor] = _first_uses(replay.traces[actor], replay.run.result.start_ns[replay.rows(actor)])
        for group, start in uses[actor]:
            members = groups.get(traces[rank].group_names[group], ())
            if rank in members and len(members) < len(traces):
                found.append(GroupRing(start, rank, len(members), members.index(rank)))
    return sorted(found, key=lambda ring: (ring.start_ns, ring.rank))


def _first_uses(lowered: LoweredTrace, start_ns: I64) -> list[tuple[int, int]]:
    """Returns each group with the time of its first collective of a kind, in the order of their nodes."""
    trace = lowered.trace
    is_in_group = (lowered.action == COLLECTIVE) & (trace.group[lowered.row] >= 0)
    is_in_group &= ~np.isin(lowered.row, list(trace.involved_dims or ()))
    row = lowered.row[is_in_group]
    use = np.stack([trace.group[row], trace.comm_type[row]], axis=1)
    _, example, number = np.unique(use, axis=0, return_index=True, return_inverse=True)
    first_ns = np.full(len(example), np.iinfo(np.int64).max)
    np.minimum.at(first_ns, number.reshape(-1), start_ns[is_in_group])
    order = np.argsort(example)
    return list(zip(use[example[order], 0].tolist(), first_ns[order].tolist(), strict=True))
