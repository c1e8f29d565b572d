"""The history of a run is of the iterations that were simulated."""

from __future__ import annotations

from dataclasses import replace

from forerun.answers.analysis.setup import Setup
from forerun.answers.experiment.conditions import Conditions
from forerun.answers.experiment.handlers import EventHandler
from forerun.answers.experiment.request import Disturbance, Request
from forerun.answers.experiment.run import run
from forerun.answers.experiment.run_history import run_history
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan

SETUP = Setup(load_model("gpt2-small"), Plan(256, dp_shard=8), load_cluster("h100-sxm"))
ROUGH = Disturbance(seed=3, compute_jitter=0.1, network_jitter=0.2, warmup_iterations=2, warmup_slowdown=1.5)


def test_iterations_follow_each_other_and_take_as_long_as_in_the_run() -> None:
    result = run(Request("rough", SETUP, num_iterations=6, seq_len_schedule=((3, 128),), disturbance=ROUGH))
    history = run_history(result)
    assert history.note == ""
    assert len({iteration.timeline.end_of_step_ps for iteration in history.iterations}) == 6
    for iteration, entry in zip(history.iterations, result.iterations, strict=True):
        assert iteration.start_ps == round(entry.start_s * 1e12)
        assert iteration.timeline.end_of_step_ps == round(entry.step_time_s * 1e12)


def test_equal_iterations_are_all_there_as_far_as_the_history_goes() -> None:
    result = run(Request("even", SETUP, num_iterations=50))
    assert len(result.iterations) == 1
    nodes = len(result.simulation.flat)
    history = run_history(result, most_nodes=3 * nodes)
    assert history.note == "the history has the first 3 of 50 iterations"
    step_ps = result.simulation.timeline.end_of_step_ps
    assert [iteration.start_ps for iteration in history.iterations] == [0, step_ps, 2 * step_ps]
    assert len(run_history(result, most_nodes=1).iterations) == 1


def test_it_ends_where_a_handler_changed_the_conditions() -> None:
    class Slow(EventHandler):
        def on_iteration_start(self, iteration: int, conditions: Conditions) -> Conditions:
            return conditions.slow(2, 1.5) if iteration >= 4 else conditions

    request = Request("handled", SETUP, num_iterations=9, handlers=(Slow(),))
    assert len(run_history(run(request)).iterations) == 4
    assert len(run_history(run(replace(request, handlers=()))).iterations) == 9
