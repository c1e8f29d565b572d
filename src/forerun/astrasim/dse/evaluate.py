"""Simulates a point: generates its traces, replays them and sums up the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from forerun.astrasim.astra.fold_ranks import CollectiveTimes
from forerun.astrasim.astra.lower import IssueOrder
from forerun.astrasim.astra.replay import Machine, Replay, replay
from forerun.astrasim.astra.statistics import RankStatistics
from forerun.astrasim.dse.space import Point
from forerun.astrasim.dse.terms import Terms, terms_of
from forerun.astrasim.dse.workload import Workload, traces_of
from forerun.common.errors import ForerunError


@dataclass(frozen=True, slots=True)
class Figures:
    """A summary of a replay: times of the (first) rank that ends last, and the largest memory of any rank."""

    time_ns: int
    exposed_communication_ns: int
    gpu_time_ns: int
    comm_time_ns: int
    compute_bound_pct: float
    avg_compute_util_pct: float
    avg_mem_util_pct: float
    avg_op_intensity: float
    peak_memory_bytes: int
    """in the trace's bytes"""
    terms: Terms
    rank_0: RankStatistics


@dataclass(frozen=True, slots=True)
class Failed:
    """The reason why a point can't be simulated."""

    reason: str


Outcome: TypeAlias = "Figures | Failed"


@dataclass
class Evaluator:
    """Replays points. Points on the same system share the times of collectives."""

    workloads: Mapping[str, Workload]
    machines: Mapping[str, Machine]
    issue_order: IssueOrder = "ascending"
    _times: dict[str, CollectiveTimes] = field(default_factory=dict)

    def outcome(self, point: Point) -> Outcome:
        """Returns the figures of a point, or why it has none."""
        try:
            return figures_of(self.replay(point), self.workloads[point.workload].axes(point.strategy))
        except ForerunError as error:
            return Failed(str(error))

    def replay(self, point: Point) -> Replay:
        """Replays every rank of a point.

        Raises ForerunError if the workload doesn't allow the strategy, or its replay fails.
        """
        machine = self.machines[point.system]
        traces = traces_of(self.workloads[point.workload].args(point.strategy))
        times = self._times.setdefault(point.system, CollectiveTimes(machine.system, machine.network))
        return replay(traces, traces.groups, machine, self.issue_order, times=times)


def figures_of(result: Replay, axes: Sequence[str]) -> Figures:
    """Sums up a replay on a system with a roofline that tracks memory; `axes` are those with several ranks."""
    ends_last, needs_most = int(result.finish_ns.argmax()), int(result.peak_memory_bytes.argmax())
    last = result.statistics_of(ends_last)
    return Figures(
        last.wall_cycles_finished,
        last.exposed_communication,
        last.gpu_time,
        last.comm_time,
        last.compute_bound_pct or 0.0,
        last.avg_compute_util_pct or 0.0,
        last.avg_mem_util_pct or 0.0,
        last.avg_op_intensity or 0.0,
        int(result.peak_memory_bytes[needs_most]),
        terms_of(result, ends_last, needs_most, axes),
        result.statistics_of(0),
    )
