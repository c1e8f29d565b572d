"""Replays execution traces and returns the statistics that ASTRA-sim would print for every rank."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from forerun.astrasim.astra.collectives import CollectiveTables
from forerun.astrasim.astra.fabric import fabric_of
from forerun.astrasim.astra.fold_blocks import fold_blocks
from forerun.astrasim.astra.fold_histories import run_histories
from forerun.astrasim.astra.fold_ranks import CollectiveTimes, Folded, fold_classes, fold_collectives
from forerun.astrasim.astra.lower import IssueOrder, LoweredProgram, LoweredTrace, lower_program
from forerun.astrasim.astra.queueless_rings import with_closed_forms
from forerun.astrasim.astra.ranks import LoweredRanks, lower_ranks
from forerun.astrasim.astra.remote_memory import NO_EXPANSION, RemoteMemory
from forerun.astrasim.astra.run import Deadlock, SlotRun, UnequalCalls, run_program
from forerun.astrasim.astra.statistics import Observer, RankStatistics
from forerun.astrasim.astra.system import System
from forerun.astrasim.chakra.trace import CommGroups, RankTrace, TracesByClass
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

    traces: tuple[LoweredTrace, ...]
    """of each simulated rank"""
    first: I64
    """(simulated ranks + 1,) first node of each simulated rank in the result of `run`"""
    run: SlotRun
    actor_of_rank: tuple[int, ...]
    """the simulated rank that stands for each rank"""
    system: System

    @property
    def wall_ns(self) -> int:
        """Returns the time at which the last rank finishes."""
        return int(self.finish_ns.max())

    @property
    def finish_ns(self) -> I64:
        """Returns the time at which each rank finishes."""
        finish_ns: I64 = self.run.result.finish_ns[np.array(self.actor_of_rank)]
        return finish_ns

    @cached_property
    def statistics(self) -> tuple[RankStatistics, ...]:
        """Returns the statistics of each rank."""
        of_actor = [self._statistics(actor) for actor in range(len(self.traces))]
        return tuple(of_actor[actor] for actor in self.actor_of_rank)

    def statistics_of(self, rank: int) -> RankStatistics:
        """Returns the statistics of one rank, without those of others."""
        return self._statistics(self.actor_of_rank[rank])

    @cached_property
    def peak_memory_bytes(self) -> I64:
        """Returns the peak of local memory of each rank."""
        peaks = [self._observer(actor).peak_memory(*self._times(actor)).n_bytes for actor in range(len(self.traces))]
        of_rank: I64 = np.array(peaks, np.int64)[np.array(self.actor_of_rank)]
        return of_rank

    def rows(self, actor: int) -> slice:
        """Returns the rows of a simulated rank's nodes in the result of `run`."""
        return slice(int(self.first[actor]), int(self.first[actor + 1]))

    @cached_property
    def _observers(self) -> dict[int, Observer]:
        distinct = {id(trace): trace for trace in self.traces}
        return {key: Observer(trace, self.system) for key, trace in distinct.items()}

    def _observer(self, actor: int) -> Observer:
        return self._observers[id(self.traces[actor])]

    def _times(self, actor: int) -> tuple[I64, I64, I64]:
        rows, result = self.rows(actor), self.run.result
        return result.start_ns[rows], result.end_ns[rows], result.done_order[rows]

    def _statistics(self, actor: int) -> RankStatistics:
        return self._observer(actor).statistics(*self._times(actor), int(self.run.result.finish_ns[actor]))


def replay(
    traces: Sequence[RankTrace] | TracesByClass,
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
    lowered = lower_ranks(traces, machine.system, machine.memory, order)
    times = times or CollectiveTimes(machine.system, machine.network)
    if fold and machine.folds:
        found = _fold(lowered, comm_groups, machine, order, times)
        if found is not None:
            return found
    dims = [dim.n_npus for dim in machine.network.dims]
    tables = CollectiveTables(
        machine.system,
        dims,
        machine.n_queues,
        machine.injection_scale,
        own_group_algorithms=machine.own_group_algorithms,
    )
    program = lower_program(list(lowered), range(n_ranks), lowered.group_names, comm_groups, tables, order)
    program, run = _run(program, tables, machine, fold)
    return _replay(program.traces, program.nodes.first, run, np.arange(n_ranks), machine.system)


def _fold(
    lowered: LoweredRanks, comm_groups: CommGroups, machine: Machine, order: IssueOrder, times: CollectiveTimes
) -> Replay | None:
    """Replays with fewer ranks or known collectives; returns None if the ranks are not provably alike."""
    found = _of_folded(fold_classes(lowered, comm_groups, times, order), machine)
    if found is not None:
        return found
    histories = run_histories(lowered, comm_groups, machine.system, machine.network, order)
    if histories is not None:
        n = len(histories.run.result.finish_ns)
        first = len(lowered.of_class[0]) * np.arange(n + 1)
        return _replay(lowered.of_class * n, first, histories.run, histories.of_rank, machine.system)
    found = _of_folded(fold_blocks(lowered, comm_groups, times, order), machine)
    if found is not None:
        return found
    return _of_folded(fold_collectives(lowered, comm_groups, times, order), machine)


def _of_folded(folded: Folded | None, machine: Machine) -> Replay | None:
    """Returns the replay of a folded program. Returns None if there is none, or if its run does not confirm its
    assumptions.
    """
    if folded is None:
        return None
    with suppress(Deadlock):  # the run of every rank says more about who waits for what
        program, run = _run(folded.program, folded.tables, machine, actors_are_ranks=False)
        if folded.holds(run.result):
            return _replay(program.traces, program.nodes.first, run, folded.actor_of_rank, machine.system)
    return None


def _run(
    program: LoweredProgram,
    tables: CollectiveTables,
    machine: Machine,
    closed: bool = True,
    actors_are_ranks: bool = True,
) -> tuple[LoweredProgram, SlotRun]:
    """Runs a program, with collectives in closed form where no message waits for another and `closed` allows it."""
    fabric = fabric_of(machine.network, machine.aware)
    if closed and not machine.aware:
        known = with_closed_forms(program, tables, machine.network)
        with suppress(UnequalCalls):
            return known, run_program(known, tables, fabric, actors_are_ranks)
    return program, run_program(program, tables, fabric, actors_are_ranks)


def _replay(traces: tuple[LoweredTrace, ...], first: I64, run: SlotRun, actor_of_rank: I64, system: System) -> Replay:
    return Replay(traces, first, run, tuple(actor_of_rank.tolist()), system)
