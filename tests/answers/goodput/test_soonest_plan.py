"""The plan with which a run trains soonest: the bound holds for every run, and the answer is that of trying all."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.answers.goodput.best_plans import FoundPlan, PlansOfRun
from forerun.answers.goodput.request import (
    CheckpointLevel,
    Elastic,
    FailureKind,
    Lemons,
    Maintenance,
    Phase,
    Recovery,
    RunRequest,
    Slowdown,
    Spares,
)
from forerun.answers.goodput.soonest_plan import soonest_plans, undisturbed
from forerun.answers.goodput.study import study_run, time_to_train
from forerun.answers.goodput.walk import walk
from forerun.answers.search.search import search
from forerun.common.errors import ForerunError
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan
from forerun.interfaces.cli.main import run as run_command

HOUR_S = 3600.0
scopes = st.sampled_from(["process", "node", "domain"])
kinds = st.builds(
    FailureKind,
    st.sampled_from(["a", "b"]),
    st.floats(0.0, 1.0 / HOUR_S),
    st.integers(1, 8),
    st.sampled_from([0.7, 1.0, 1.5]),
    scopes,
    st.integers(0, 3),
    st.floats(0.0, 12 * HOUR_S),
    st.floats(0.0, 1.0),
    st.sampled_from([0.0, HOUR_S]),
)
levels = st.builds(
    CheckpointLevel,
    st.just("level"),
    st.just(1),
    st.floats(0.0, 300.0),
    st.floats(0.0, 2000.0),
    st.floats(0.0, 300.0),
    scopes,
    st.floats(0.0, 0.5),
)
seconds = st.floats(0.0, 600.0)
requests = st.builds(
    RunRequest,
    name=st.just("run"),
    gpus=st.just(64),
    nodes=st.just(8),
    phases=st.tuples(st.builds(Phase, st.integers(1, 5_000), st.floats(1.0, 60.0), st.just(1.0))),
    save_every_s=st.floats(60.0, 4 * HOUR_S),
    levels=st.lists(levels, max_size=2).map(
        lambda own: tuple(replace(each, every=1 + i) for i, each in enumerate(own))
    ),
    recovery=st.builds(Recovery, seconds, seconds, seconds, seconds, seconds, seconds),
    failures=st.lists(kinds, max_size=2, unique_by=lambda kind: kind.name).map(tuple),
    lemons=st.one_of(st.none(), st.just(Lemons(1.0, 1e-4, 2))),
    slowdowns=st.one_of(st.just(()), st.just((Slowdown("hot", 1e-4, 1.5, HOUR_S),))),
    spares=st.one_of(st.none(), st.builds(Spares, st.integers(0, 2), seconds, st.one_of(st.none(), seconds))),
    elastic=st.one_of(st.none(), st.builds(Elastic, st.just(4), st.integers(1, 3), seconds, shards=st.booleans())),
    maintenance=st.one_of(st.none(), st.builds(Maintenance, st.floats(HOUR_S, 20 * HOUR_S), seconds)),
    wall_s=st.floats(HOUR_S, 200 * HOUR_S),
)


@settings(max_examples=150, deadline=None)
@given(requests, st.integers(0, 3), st.floats(0.5, 1.0))
def test_no_run_is_ahead_of_the_undisturbed_one(request_, seed, faster):
    """Also where its step is faster: the bound is about all plans with the same or a slower step."""
    own = walk(request_, seed)
    ahead = walk(undisturbed(request_, faster * request_.phases[0].step_s, frozenset({"hot"})), seed)
    assert (ahead.finished, ahead.steps) >= (own.finished, own.steps)
    assert ahead.wall_s <= own.wall_s * (1 + 1e-9)


class Stated(PlansOfRun):
    """Plans with stated steps and seconds of a save; the search is a look at the list."""

    def __init__(self, plans: list[tuple[float, float]], refused: int | None = None) -> None:
        self.plans = sorted(plans)
        self.refused = refused
        self.asked: list[float] = []

    by_the_clock = False
    plan_slows = frozenset()

    def _found(self) -> list[FoundPlan]:
        return [FoundPlan(i, step_s, Plan(seq_len=i, micro_batch=i)) for i, (step_s, _) in enumerate(self.plans, 1)]

    def fastest(self, number: int) -> list[FoundPlan]:
        return self._found()[:number]

    def within(self, step_s: float) -> list[FoundPlan]:
        self.asked.append(step_s)
        return [each for each in self._found() if each.step_s <= step_s]

    def run(self, found: FoundPlan) -> RunRequest:
        if found.place == self.refused:
            raise ForerunError("it has no replicas")
        return stated(*self.plans[found.place - 1], str(found.place))


def stated(step_s: float, save_s: float, name: str = "run") -> RunRequest:
    return RunRequest(
        name, 64, 8, (Phase(3_000, step_s, 1.0),), 600.0, (CheckpointLevel("disk", 1, save_s, 0.0, save_s, "node"),),
        Recovery(30.0, 600.0, 300.0, 5.0, 60.0), (FailureKind("node", 1.0 / (5 * HOUR_S)),),
    )  # fmt: skip


study = partial(study_run, runs=5, workers=1, gains=False)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.floats(10.0, 14.0), st.floats(0.0, 150.0)), min_size=1, max_size=30))
def test_the_best_of_all_plans_is_found_without_simulating_all(drawn):
    plans = Stated(drawn)
    found = soonest_plans(plans, study)
    every = [study(stated(*plan)) for plan in plans.plans]
    assert time_to_train(found.studies[0], False) == min(time_to_train(each, False) for each in every)
    assert len(found.studies) <= len(drawn)
    (slowest_s,) = plans.asked
    assert all(each.request.phases[0].step_s <= max(slowest_s, plans.plans[:4][-1][0]) for each in found.studies)


def test_a_slower_step_wins_where_its_saves_are_faster():
    """Ten minutes of steps and a save of two minutes take 720 s; with a step 5 % slower and no save they take 630 s."""
    plans = Stated([(10.0, 120.0), (10.1, 120.0), (10.2, 120.0), (10.3, 120.0), (10.5, 0.0), (13.0, 0.0)], refused=2)
    found = soonest_plans(plans, study)
    assert found.studies[0].request.name == "5"
    assert len(found.studies) == 4, "the second one can't run, and the last one can't win"
    assert "Of all plans that fit, 5 finishes the run soonest. Forerun simulated 4 plans" in found.proof
    assert "1 faster plans cannot run what the file describes: it has no replicas." in found.proof
    with pytest.raises(ForerunError, match="no plan can run what the file describes: it has no replicas"):
        soonest_plans(Stated([(10.0, 1.0)], refused=1), study)


def test_a_search_finds_all_plans_within_a_time():
    place = (load_model("llama-3.2-1b"), load_cluster("h100-sxm"), 8, 2048, 64)
    fixed = {"stack": "torchtitan", "pp": 1, "tp": 1}
    every = search(*place, fixed=fixed, exhaustive=True, workers=1).ranked
    limit_s = every[len(every) // 2].step_time_s
    within = [each.step_time_s for each in every if each.step_time_s <= limit_s]
    found = search(*place, fixed=fixed, keep=1, within_s=limit_s, workers=1).ranked
    assert [each.step_time_s for each in found][: len(within)] == within
    with pytest.raises(ForerunError, match="within_s is about the time of a step"):
        search(*place, objective="memory", within_s=1.0)


def test_the_command_names_the_best_plan_of_all(tmp_path, capsys):
    path = tmp_path / "run.json"
    fields = {"seq_len": 2048, "tp": 1, "pp": 1, "compile": True, "stack": "torchtitan"}
    plan = {"model": "llama-3.2-1b", "cluster": "h100-sxm", "global_batch": 64, "fields": fields}
    path.write_text(json.dumps({"gpus": 8, "tokens": "1B", "plan": plan}))
    command = ["run", str(path), "--runs", "3", "--best-plan", "--plans", "2", "--no-gains", "--json"]
    assert run_command(command) == 0
    record = json.loads(capsys.readouterr().out)
    assert len(record["alternatives"]) == 3
    assert record["alternatives"][0]["name"] in record["notes"][-1]
    assert "finishes the run soonest" in record["notes"][-1]
    copies = plan | {"fields": fields | {"dp_replicate": 8, "dp_shard": 1, "zero_stage": 0}}
    for key, value in (("schedule", [{"share": 1.0}]), ("plan", copies | {"compress_gradients": "int8"})):
        path.write_text(json.dumps({"gpus": 8, "tokens": "1B", "plan": plan} | {key: value}))
        assert run_command(["run", str(path), "--best-plan"]) == 2
        assert f"{key}: " in capsys.readouterr().err


def test_plans_of_a_run_by_the_clock_are_compared_by_tokens():
    best, other = (
        study_run(replace(stated(step_s, 0.0), wall_s=HOUR_S), 2, workers=1, gains=False) for step_s in (10.0, 11.0)
    )
    assert time_to_train(best, True) < time_to_train(other, True)
    assert time_to_train(best, False) < time_to_train(other, False), "neither ends, and both take an hour"
