"""Replay of execution traces: what ASTRA-sim would print, of every rank."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from forerun.astrasim.astra.collectives import CollectiveTables
from forerun.astrasim.astra.fabric import fabric_of
from forerun.astrasim.astra.fold_blocks import fold_blocks
from forerun.astrasim.astra.fold_ranks import CollectiveTimes, fold_classes, fold_collectives
from forerun.astrasim.astra.lower import (
    IssueOrder,
    LoweredProgram,
    LoweredTrace,
    in_hashed_order,
    lower_program,
    lower_trace,
    of_other,
)
from forerun.astrasim.astra.remote_memory import NO_EXPANSION, RemoteMemory
from forerun.astrasim.astra.run import Deadlock, SlotRun, run_program
from forerun.astrasim.astra.statistics import RankStatistics, rank_statistics
from forerun.astrasim.astra.system import System
from forerun.astrasim.chakra.trace import CommGroups, RankTrace, same_columns
from forerun.common.errors import ForerunError
from forerun.core.network.network_file import Network
from forerun.core.program.types import I64


@dataclass(frozen=True, slots=True)
class Machine:
    """What traces are replayed on."""

    system: System
    network: Network
    memory: RemoteMemory = NO_EXPANSION
    aware: bool = False
    """congestion-aware: links are queues"""
    n_queues: int = 1
    """queues of each dimension"""
    injection_scale: float = 1.0


@dataclass(frozen=True)
class Replay:
    statistics: tuple[RankStatistics, ...]
    """of each rank"""
    program: LoweredProgram
    run: SlotRun
    actor_of_rank: tuple[int, ...]
    """which simulated rank stands for each rank"""

    @property
    def wall_ns(self) -> int:
        """When the last rank finished."""
        return max(rank.wall_cycles_finished for rank in self.statistics)


def replay(
    traces: Sequence[RankTrace],
    comm_groups: CommGroups,
    machine: Machine,
    order: IssueOrder = "ascending",
    fold: bool = True,
    times: CollectiveTimes | None = None,
) -> Replay:
    """Replay the trace of every rank. With `fold`, ranks that are provably alike are simulated once.

    `times` keeps what collectives take from one replay on the same system and network to the next.

    Raises:
        ForerunError: the number of traces is not that of the network's ranks, a node can't be simulated, ranks wait for
            each other for ever.
    """
    n_ranks = machine.network.n_npus
    if len(traces) != n_ranks:
        raise ForerunError(f"the network has {n_ranks} ranks, there are traces of {len(traces)}")
    lowered = _lower(traces, machine, order)
    times = times or CollectiveTimes(machine.system, machine.network)
    if fold and not machine.aware and machine.n_queues == 1 and machine.injection_scale == 1.0:
        for folding in (fold_classes, fold_blocks, fold_collectives):
            folded = folding(lowered, comm_groups, times, order)
            if folded is None:
                continue
            with suppress(Deadlock):  # the run of every rank tells better who waits for what
                run = run_program(folded.program, folded.tables, fabric_of(machine.network, aware=False))
                if folded.holds(run.result):
                    return _replay(folded.program, run, folded.actor_of_rank, machine.system)
    dims = [dim.n_npus for dim in machine.network.dims]
    tables = CollectiveTables(machine.system, dims, machine.n_queues, machine.injection_scale)
    groups = [trace.group_names for trace in traces]
    program = lower_program(lowered, range(n_ranks), groups, comm_groups, tables, order)
    run = run_program(program, tables, fabric_of(machine.network, machine.aware))
    return _replay(program, run, np.arange(n_ranks), machine.system)


def _replay(program: LoweredProgram, run: SlotRun, actor_of_rank: I64, system: System) -> Replay:
    of_actor = [statistics_of(program, run, actor, system) for actor in range(len(program.traces))]
    actors = tuple(actor_of_rank.tolist())
    return Replay(tuple(of_actor[actor] for actor in actors), program, run, actors)


def _lower(traces: Sequence[RankTrace], machine: Machine, order: IssueOrder) -> list[LoweredTrace]:
    """Lower every trace; the columns of those that are alike only once."""
    done: list[LoweredTrace] = []
    lowered = []
    for rank, trace in enumerate(traces):
        found = next((one for one in done if same_columns(trace, one.trace, one.row)), None)
        if found is None:
            found = lower_trace(trace, machine.system, machine.memory, f"rank {rank}")
            done.append(found)
        lowered.append(found if found.trace is trace else of_other(found, trace))
    return [in_hashed_order(one) for one in lowered] if order == "march-2025" else lowered


def statistics_of(program: LoweredProgram, run: SlotRun, actor: int, system: System) -> RankStatistics:
    """Statistics of one simulated rank."""
    rows = slice(program.nodes.first[actor], program.nodes.first[actor + 1])
    result = run.result
    return rank_statistics(
        program.traces[actor],
        system,
        result.start_ns[rows],
        result.end_ns[rows],
        result.done_order[rows],
        int(result.finish_ns[actor]),
    )
