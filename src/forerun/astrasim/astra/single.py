"""A single collective of all ranks, or of all groups of a kind at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forerun.astrasim.astra.collectives import CollectiveTables
from forerun.astrasim.astra.custom import Algorithm
from forerun.astrasim.astra.fabric import fabric_of
from forerun.astrasim.astra.limits import MOST_RANKS, check_times, check_work
from forerun.astrasim.astra.lower import LoweredProgram, empty_matches
from forerun.astrasim.astra.run import SlotRun, run_program
from forerun.astrasim.astra.symmetry import is_symmetric
from forerun.astrasim.astra.system import System
from forerun.astrasim.chakra.trace import CommType
from forerun.astrasim.messages.ready import SLOT_COMM
from forerun.astrasim.messages.slots import COLLECTIVE, Nodes
from forerun.common.errors import ForerunError
from forerun.core.network.network_file import Network
from forerun.core.program.types import I64


def chain_of(calls: Sequence[Sequence[int]], ranks: Sequence[int], tables: CollectiveTables) -> LoweredProgram:
    """A program in which actor i, rank `ranks[i]`, makes the calls `calls[i]` one after the other."""
    counts = np.array([len(chain) for chain in calls], np.int64)
    n, first = int(counts.sum()), np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    target = np.array([call for chain in calls for call in chain], np.int32)
    position = [tables.position(call, rank) for chain, rank in zip(calls, ranks, strict=True) for call in chain]
    is_root, is_last = np.zeros(n, bool), np.zeros(n, bool)
    is_root[first[:-1][counts > 0]] = True
    is_last[first[1:][counts > 0] - 1] = True
    nothing = np.zeros(n, np.int64)
    nodes = Nodes(
        first=first,
        action=np.full(n, COLLECTIVE, np.int8),
        slot=np.full(n, SLOT_COMM, np.int8),
        duration_ns=nothing,
        tail_ns=nothing,
        target=target,
        position=np.array(position, np.int32),
        size=nothing,
        n_pred=(~is_root).astype(np.int32),
        child_ptr=np.concatenate([[0], np.cumsum(~is_last)]).astype(np.int64),
        child=(np.flatnonzero(~is_last) + 1).astype(np.int32),
        root=np.flatnonzero(is_root).astype(np.int64),
        root_ptr=np.concatenate([[0], np.cumsum(counts > 0)]).astype(np.int64),
    )
    return LoweredProgram(nodes, empty_matches(()), np.zeros(0, np.int64), (), ())


def collective_times(
    network: Network,
    system: System,
    kind: CommType,
    size: int,
    groups: Sequence[tuple[int, ...]] = (),
    aware: bool = False,
    algorithm: Algorithm | None = None,
    mirror: bool = True,
) -> tuple[I64, SlotRun]:
    """When each rank ends a collective that all begin at 0, in ns (n_npus,).

    `size` is the full local buffer, for an all-gather the local shard. With `groups`, each runs a collective of its
    own at the same time; ranks in none of them end at 0. Where all ranks are alike, one is simulated, unless `mirror`
    is off. An `algorithm` takes the place of the system's.

    Raises:
        ForerunError: it can't be simulated, or would take too long.
    """
    if network.n_npus > MOST_RANKS:
        raise ForerunError(f"{network.n_npus:,} ranks are more than the {MOST_RANKS:,} that are simulated")
    algorithms = {} if algorithm is None else {kind: algorithm}
    tables = CollectiveTables(system, [dim.n_npus for dim in network.dims], algorithms=algorithms)
    everyone = groups or [tuple(range(network.n_npus))]
    if min(len(group) for group in everyone) < 2:
        raise ForerunError("a collective needs at least two ranks in every group")
    names = [str(k) for k in range(len(groups))] or [""]
    call_of: dict[int, int] = {}
    for name, group in zip(names, everyone, strict=True):
        call = tables.call(kind, size, tables.communicator(name, tuple(group)))
        call_of.update(dict.fromkeys(group, call))
    phases = tables.phases_of(call_of[everyone[0][0]])
    mirrored = mirror and not aware and is_symmetric(network, phases, groups)
    ranks = [everyone[0][0]] if mirrored else list(range(network.n_npus))
    check_work({call_of[everyone[0][0]]: len(ranks)}, tables, len(ranks))
    check_times(network, tables, call_of[everyone[0][0]], len(ranks), aware)
    program = chain_of([[call_of[rank]] if rank in call_of else [] for rank in ranks], ranks, tables)
    run = run_program(program, tables, fabric_of(network, aware, ranks if mirrored else ()))
    ends = np.zeros(network.n_npus, np.int64)
    ends[sorted(call_of)] = run.result.end_ns
    return ends, run
