"""Times of ops under factors, and what sharing links adds, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from forerun.answers.analysis.link_sharing import link_notes, shared_ps
from forerun.answers.analysis.loop_time import LoopTime, Stall
from forerun.answers.analysis.slowing import slowed, times
from forerun.core.cost.step_costs import StepCosts
from forerun.core.engine.sharing import LinkDemand
from forerun.core.engine.simulate import Timeline
from forerun.core.program.builder import OpTableBuilder
from forerun.core.program.types import Collective, OpTable


def ops_of_every_kind() -> OpTable:
    ops = OpTableBuilder()
    ops.gemm("product", 1, 1, 1)
    ops.memory("memory", 1, 1)
    ops.collective("gather", Collective.ALL_GATHER, 0, 1)
    ops.p2p("send", 0, 1)
    ops.host_copy("copy", 1)
    ops.delay("idle", 1)
    return ops.build()


def costs_of(durations: list[int], issue: list[int]) -> StepCosts:
    n = len(durations)
    nothing, never = np.zeros(n), np.zeros(n, np.bool_)
    return StepCosts(np.array(durations, np.int64), np.array(issue, np.int64), nothing, nothing, never, nothing)


def test_each_factor_slows_its_own_kind() -> None:
    """Kernels by 2, collectives and transfers by 3, delays and launches by 5; host copies by nothing."""
    costs = costs_of([10, 20, 30, 40, 50, 60], [1, 2, 3, 4, 5, 6])
    found = slowed(costs, ops_of_every_kind(), compute=2.0, network=3.0, host=5.0)
    assert found.duration_ps.tolist() == [20, 40, 90, 120, 50, 300]
    assert found.issue_ps.tolist() == [5, 10, 15, 20, 25, 30]
    only = slowed(costs, ops_of_every_kind(), network=0.5)
    assert only.duration_ps.tolist() == [10, 20, 15, 20, 50, 60]
    assert only.issue_ps.tolist() == costs.issue_ps.tolist()


def test_without_factors_nothing_is_made() -> None:
    costs = costs_of([1] * 6, [0] * 6)
    assert slowed(costs, ops_of_every_kind()) is costs


def test_times_are_rounded_to_whole_picoseconds() -> None:
    assert times(np.array([3, 5, 10], np.int64), 0.3).tolist() == [1, 2, 3]


class _Flat:
    """Two rank classes of two nodes and one, whose ops are 0, 1 and 1."""

    op = np.array([0, 1, 1])
    class_ptr = np.array([0, 2, 3])

    def __len__(self) -> int:
        return 3


def test_sharing_counts_what_ops_that_use_links_take_longer() -> None:
    """Op 0 (10 ps) asks for a link and takes 14; op 1 (5 ps) does not ask, though it takes 25 in the second class."""
    start, end = np.array([0, 0, 0]), np.array([14, 5, 25])
    timeline = Timeline(start_ps=start, end_ps=end, issue_end_ps=np.zeros(3, np.int64), class_end_ps=np.array([14, 25]))
    costs = costs_of([10, 5], [0, 0])
    asking = replace(costs, demand=LinkDemand(np.array([[7], [0]]), np.ones((1, 1), np.bool_)))
    inside = np.array([100, 3], np.int64)
    assert shared_ps(_Flat(), costs, timeline).tolist() == [0, 0]  # type: ignore[arg-type]
    assert shared_ps(_Flat(), asking, timeline).tolist() == [4, 0]  # type: ignore[arg-type]
    assert shared_ps(_Flat(), asking, timeline, inside).tolist() == [107, 3]  # type: ignore[arg-type]


def test_shared_links_are_noted_where_they_cost_time() -> None:
    assert link_notes(0.0) == ()
    (line,) = link_notes(0.0125)
    assert "12.5 ms longer than alone" in line


def test_stalls_spread_over_the_steps_between_them() -> None:
    """A second every 4 steps and 0.2 s every step make a step of 2 s one of 2.45 s."""
    stalls = (Stall("checkpoint", 4, 1.0, beside_s=7.0), Stall("gc", 1, 0.2))
    loop = LoopTime(stalls, 2.0, 100.0, None)
    assert [stall.mean_s for stall in loop.stalls] == [0.25, 0.2]
    assert loop.mean_step_time_s == 2.45
    assert replace(loop, stalls=()).mean_step_time_s == 2.0
