"""Replays execution traces and returns the statistics that ASTRA-sim would print for every rank."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

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
)
from forerun.astrasim.astra.queueless_rings import with_closed_forms
from forerun.astrasim.astra.remote_memory import NO_EXPANSION, RemoteMemory
from forerun.astrasim.astra.run import Deadlock, SlotRun, UnequalCalls, run_program
from forerun.astrasim.astra.statistics import RankStatistics, rank_statistics
from forerun.astrasim.astra.system import System
from forerun.astrasim.chakra.trace import CommGroups, RankTrace, same_columns
from forerun.common.errors import ForerunError
from forerun.core.network.network_file import Network
from forerun.core.program.types import I64


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine on which traces are replayed."""

    system: System
    network: Network
    memory: RemoteMemory = NO_EXPANSION
    aware: bool = False
    """whether the network is congestion-aware, so that links are queues"""
    n_queues: int = 1
    """queues of each dimension"""
    injection_scale: float = 1.0
    own_group_algorithms: bool = False
    """whether groups smaller than the system run the algorithm of the system file (`Release.group_algorithm`)"""

    @property
    def folds(self) -> bool:
        """Returns whether ranks that are alike may be simulated once, as groups run rings over closed forms."""
        rings = not self.own_group_algorithms or self.system.groups_run_rings
        plain = not self.aware and self.n_queues == 1 and self.injection_scale == 1.0
        return plain and rings and not self.system.has_custom


@dataclass(frozen=True)
class Replay:
    """The result of a replay."""

    statistics: tuple[RankStatistics, ...]
    """statistics of each rank"""
    program: LoweredProgram
    run: SlotRun
    actor_of_rank: tuple[int, ...]
    """the simulated rank that stands for each rank"""

    @property
    def wall_ns(self) -> int:
        """Returns the time at which the last rank finishes."""
        return max(rank.wall_cycles_finished for rank in self.statistics)


def replay(
    traces: Sequence[RankTrace],
    comm_groups: CommGroups,
    machine: Machine,
    order: IssueOrder = "ascending",
    fold: bool = True,
    times: CollectiveTimes | None = None,
) -> Replay:
    """Replays the trace of every rank. With `fold`, ranks that are provably alike are simulated once, and
    rings in closed form.

    `times` caches the times of collectives between replays on the same system and network.

    Raises ForerunError if the numbers of traces and of the network's ranks differ, a node can't be simulated, or ranks
    wait for each other for ever.
    """
    n_ranks = machine.network.n_npus
    if len(traces) != n_ranks:
        raise ForerunError(f"the network has {n_ranks} ranks, but there are traces of {len(traces)}")
    lowered = _lower(traces, machine, order)
    times = times or CollectiveTimes(machine.system, machine.network)
    if fold and machine.folds:
        for folding in (fold_classes, fold_blocks, fold_collectives):
            folded = folding(lowered, comm_groups, times, order)
            if folded is None:
                continue
            with suppress(Deadlock):  # the run of every rank says more about who waits for what
                program, run = _run(folded.program, folded.tables, machine)
                if folded.holds(run.result):
                    return _replay(program, run, folded.actor_of_rank, machine.system)
    dims = [dim.n_npus for dim in machine.network.dims]
    tables = CollectiveTables(
        machine.system,
        dims,
        machine.n_queues,
        machine.injection_scale,
        own_group_algorithms=machine.own_group_algorithms,
    )
    groups = [trace.group_names for trace in traces]
    program = lower_program(lowered, range(n_ranks), groups, comm_groups, tables, order)
    program, run = _run(program, tables, machine, fold)
    return _replay(program, run, np.arange(n_ranks), machine.system)


def _run(
    program: LoweredProgram, tables: CollectiveTables, machine: Machine, closed: bool = True
) -> tuple[LoweredProgram, SlotRun]:
    """Runs a program, with collectives in closed form where no message waits for another and `closed` allows it."""
    fabric = fabric_of(machine.network, machine.aware)
    if closed and not machine.aware:
        known = with_closed_forms(program, tables, machine.network)
        with suppress(UnequalCalls):
            return known, run_program(known, tables, fabric)
    return program, run_program(program, tables, fabric)


def _replay(program: LoweredProgram, run: SlotRun, actor_of_rank: I64, system: System) -> Replay:
    first, result, of_actor = program.nodes.first, run.result, []
    for actor, trace in enumerate(program.traces):
        rows = slice(first[actor], first[actor + 1])
        start_ns, end_ns, done_order = result.start_ns[rows], result.end_ns[rows], result.done_order[rows]
        of_actor.append(rank_statistics(trace, system, start_ns, end_ns, done_order, int(result.finish_ns[actor])))
    actors = tuple(actor_of_rank.tolist())
    return Replay(tuple(of_actor[actor] for actor in actors), program, run, actors)


def _lower(traces: Sequence[RankTrace], machine: Machine, order: IssueOrder) -> list[LoweredTrace]:
    """Lowers every trace; traces with equal columns share the result."""
    done: list[LoweredTrace] = []
    lowered = []
    for rank, trace in enumerate(traces):
        found = next((one for one in done if same_columns(trace, one.trace, one.row)), None)
        if found is None:
            found = lower_trace(trace, machine.system, machine.memory, f"rank {rank}")
            done.append(found)
        lowered.append(found if found.trace is trace else replace(found, trace=trace))
    return [in_hashed_order(one) for one in lowered] if order == "march-2025" else lowered
