"""run_history: the iterations of a run node by node, as they were simulated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from forerun.answers.analysis.history import RunIteration
from forerun.answers.analysis.setup import Setup
from forerun.answers.analysis.slowing import times
from forerun.answers.experiment.conditions import Weather
from forerun.answers.experiment.pace import Pace
from forerun.answers.experiment.result import RunResult
from forerun.answers.experiment.run import scheduled
from forerun.common.units import PS_PER_S

_MOST_NODES = 40_000


@dataclass(frozen=True)
class RunHistory:
    """Iterations of a run from its beginning on."""

    iterations: tuple[RunIteration, ...]
    note: str
    """which iterations these are, where they are not all"""


def run_history(result: RunResult, most_nodes: int = _MOST_NODES) -> RunHistory:
    """Returns the nodes of as many whole iterations as have `most_nodes` nodes, at least one.

    Iterations that one stands for are as that one is. The history ends before the first iteration whose conditions a
    handler changed, because handlers are not called again.

    Raises ForerunError as `run` does.
    """
    found: list[RunIteration] = []
    nodes = 0
    for iteration in _simulated(result):
        nodes += len(iteration.flat)
        if found and nodes > most_nodes:
            break
        found.append(iteration)
    total = result.request.num_iterations
    note = "" if len(found) == total else f"the history has the first {len(found):,} of {total:,} iterations"
    return RunHistory(tuple(found), note)


def _simulated(result: RunResult) -> Iterator[RunIteration]:
    request = result.request
    weather = Weather(request.disturbance, request.setup.n_gpus)
    last: tuple[Setup, Pace] | None = None
    now_ps = 0
    for entry in result.iterations:
        setup = scheduled(request, entry.first)
        pace = last[1] if last is not None and last[0] == setup else Pace(setup)
        last = setup, pace
        conditions = weather.at(entry.first)
        simulation = pace.stepper.simulation
        timeline = pace.stepper.timeline(pace.class_factors(conditions), conditions.network, conditions.host)
        step_ps = round(entry.step_time_s * PS_PER_S)
        if timeline.end_of_step_ps != step_ps:
            return
        issue = times(simulation.costs.issue_ps, conditions.host)
        for _ in range(entry.repeats):
            yield RunIteration(now_ps, simulation.program, simulation.flat, timeline, issue)
            now_ps += step_ps
