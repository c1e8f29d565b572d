"""Figures of studies, the pool of nodes, changes and intervals that are tried, by hand; nothing is simulated here."""

from __future__ import annotations

from dataclasses import replace
from math import inf, sqrt
from types import SimpleNamespace

import pytest

from forerun.answers.analysis.setup import Setup
from forerun.answers.goodput import planned as planned_steps
from forerun.answers.goodput import study as studies
from forerun.answers.goodput import walks
from forerun.answers.goodput.formulas import daly_interval_s, first_order_ettr, poisson_efficiency, young_interval_s
from forerun.answers.goodput.outcome import Outcome, Spent
from forerun.answers.goodput.planned import PlannedStep
from forerun.answers.goodput.pool import Pool
from forerun.answers.goodput.request import (
    CheckpointLevel,
    Elastic,
    FailureKind,
    Lemons,
    Phase,
    Recovery,
    RunRequest,
    Slowdown,
    Spares,
)
from forerun.answers.goodput.study import Gain, Quantiles, RunStudy, by_time_to_train, changes
from forerun.answers.goodput.walks import Walks
from forerun.common.errors import ForerunError
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan

LEVEL = CheckpointLevel("checkpoint", 1, 50.0, 30.0, 20.0, "domain")
FAILURE = FailureKind("gpu", 0.001, nodes=2, repair_s=100.0)
RUN = RunRequest(
    "run", 16, 2, (Phase(100, 2.0, 10.0), Phase(50, 4.0, 10.0)), 800.0, (LEVEL,), Recovery(1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
)


def outcome(wall_s=1000.0, productive_s=800.0, finished=True, failures=None, steps=100, tokens=1e6, **spent):
    of = {Spent[name]: seconds for name, seconds in spent.items()}
    return Outcome(wall_s, productive_s, of, steps, tokens, finished, failures or {}, 0.0, 0.0)


def test_a_run_counts_its_steps_its_time_and_its_failures():
    assert (RUN.steps, RUN.ideal_s, RUN.failures_per_s) == (150, 400.0, 0.0)
    lemons = replace(RUN, failures=(FAILURE, replace(FAILURE, rate_per_s=0.002)), lemons=Lemons(3.0, 0.01, 2))
    assert lemons.failures_per_s == pytest.approx(0.033)


def test_shares_of_an_outcome():
    one = outcome(SLOW=100.0, FEWER=50.0, SAVE=50.0, failures={"gpu": 2, "nic": 3})
    assert (one.goodput, one.ettr, one.interruptions) == (0.8, 0.95, 5)
    none = outcome(wall_s=0.0, productive_s=0.0)
    assert (none.goodput, none.ettr) == (1.0, 1.0)


def test_figures_of_a_study():
    found = RunStudy(
        replace(RUN, dollars_per_gpu_hour=2.0, gpu_power_w=700.0, spares=Spares(1, 0.0)),
        0,
        (
            outcome(1000.0, 900.0, failures={"gpu": 3}, SAVE=100.0),
            outcome(2000.0, 1000.0, finished=False, failures={"gpu": 1, "nic": 2}, WASTED=800.0, SAVE=200.0),
            outcome(3000.0, 2400.0, tokens=4e6, WASTED=600.0),
            outcome(2000.0, 2000.0, tokens=2e6),
        ),
    )
    assert found.finished == 0.75
    assert found.mttf_s == pytest.approx(8000 / 6)
    assert found.badput == pytest.approx({Spent.WASTED: (0.4 + 0.2) / 4, Spent.SAVE: (0.1 + 0.1) / 4})
    assert list(found.badput) == [Spent.WASTED, Spent.SAVE]
    assert found.failures == {"gpu": 1.0, "nic": 0.5}
    assert found.wall_s == Quantiles(pytest.approx(1150), 2000, pytest.approx(2850), 2000)
    assert found.goodput.mean == pytest.approx((0.9 + 0.5 + 0.8 + 1.0) / 4)
    assert (found.tokens.mean, found.interruptions.mean) == (2e6, 1.5)
    assert found.dollars == pytest.approx(2.0 * 24 * 2000 / 3600)
    assert found.energy_mwh == pytest.approx(700 * 16 * 2000 / 3600 / 1e6)
    assert RunStudy(RUN, 0, (outcome(),)).mttf_s == inf
    assert (RunStudy(RUN, 0, (outcome(),)).dollars, RunStudy(RUN, 0, (outcome(),)).energy_mwh) == (None, None)


def test_alternatives_are_ranked_by_who_finishes_and_when():
    slow, fast = RunStudy(RUN, 0, (outcome(900.0),)), RunStudy(RUN, 0, (outcome(500.0),))
    never = RunStudy(RUN, 0, (outcome(100.0, finished=False),))
    assert by_time_to_train([never, slow, fast]) == [fast, slow, never]
    clock = replace(RUN, by_the_clock=True)
    few, many = (RunStudy(clock, 0, (outcome(tokens=tokens),)) for tokens in (1e6, 2e6))
    assert by_time_to_train([few, many]) == [many, few]


def test_what_a_change_gains_is_the_mean_of_pairs():
    before = [outcome(1000.0, 700.0), outcome(2000.0, 900.0)]
    after = [outcome(900.0, 720.0), outcome(1500.0, 1200.0)]
    assert studies._gain("x", before, after) == Gain("x", 0.8, 300.0)
    after[1] = replace(after[1], finished=False)
    assert studies._gain("x", before, after) == Gain("x", 0.8, 160.0)


def test_changes_halve_what_they_name():
    full = replace(
        RUN, failures=(FAILURE,), spares=Spares(1, 7.0, 8.0), slowdowns=(Slowdown("slow", 0.1, 1.5, 9.0),), nodes=150
    )
    found = dict(changes(full))
    assert found["failures half as often"].failures == (replace(FAILURE, rate_per_s=0.0005),)
    assert found["restarts twice as fast"].recovery == Recovery(1.0, 2.0, 1.5, 2.0, 2.5, 6.0)
    assert found["failures detected in half the time"].recovery == Recovery(0.5, 1.0, 3.0, 4.0, 5.0, 6.0)
    assert found["saves twice as fast"].levels == (replace(LEVEL, blocking_s=25.0, persist_s=15.0),)
    assert found["loads twice as fast"].levels == (replace(LEVEL, load_s=10.0),)
    assert found["saves twice as often"].save_every_s == 400.0
    assert found["2 more spare nodes"].spares == Spares(3, 7.0, 8.0)
    assert found["no slow nodes or links"].slowdowns == ()
    assert len(found) == 8
    assert changes(RUN) == []
    assert [name for name, _ in changes(replace(RUN, spares=Spares(0, 1.0)))] == ["1 more spare nodes"]
    assert len(changes(replace(RUN, failures=(FAILURE,), levels=()))) == 3


class Known:
    """Walks whose goodput depends on the interval alone."""

    def __init__(self, best_s):
        self.best_s, self.tried = best_s, []

    def run(self, tasks):
        self.tried += list(dict.fromkeys(request.save_every_s for request, _, _ in tasks))
        for request, _, number in tasks:
            away = abs(request.save_every_s - self.best_s) / 1e6
            yield outcome(1.0, 1.0 - away + (0.01 if number else -0.01))


def test_the_search_of_an_interval_tries_nine_on_a_logarithmic_scale_twice():
    walks = Known(800.0 * 8**0.5)
    found, rows = studies._best_interval(replace(RUN, failures=(FAILURE,), searches_interval=True), 0, 2, walks)
    first = [800.0 * 8.0 ** (k / 4 - 1) for k in range(9)]
    assert walks.tried[:9] == pytest.approx(first)
    best = 800.0 * 8**0.5
    near = [best * 8.0 ** (0.25 * (k / 4 - 1)) for k in range(9)]
    young, daly = young_interval_s(50.0, 1000.0), daly_interval_s(50.0, 1000.0)
    assert walks.tried[9:] == pytest.approx([*(each for k, each in enumerate(near) if k not in (0, 4, 8)), young, daly])
    assert (found.save_every_s, found.searches_interval) == (pytest.approx(best), False)
    assert [(row.name, row.save_every_s) for row in rows] == [
        ("best", pytest.approx(best)),
        ("Young", young),
        ("Daly", daly),
    ]
    assert rows[0].goodput == pytest.approx(1.0)
    assert rows[1].goodput == pytest.approx(1.0 - (best - young) / 1e6)


def test_no_interval_is_shorter_than_a_step():
    walks = Known(0.0)
    short = replace(RUN, save_every_s=1.0, failures=(FAILURE,), searches_interval=True)
    found, _ = studies._best_interval(short, 0, 1, walks)
    assert min(walks.tried) == 2.0
    assert found.save_every_s == 2.0


def test_a_study_has_a_hundred_runs_and_says_how_far_it_is():
    told = []
    found = studies.study_run(RUN, workers=1, progress=lambda done, of: told.append((done, of)))
    assert (len(found.outcomes), found.seed, found.gains) == (100, 0, ())
    assert told == [(done, 100) for done in range(1, 101)]
    told.clear()
    failing = replace(RUN, failures=(replace(FAILURE, rate_per_s=1e-4),))
    both = studies.study_run(failing, 2, workers=1, progress=lambda done, of: told.append((done, of)))
    assert told == [(done, 14) for done in range(1, 15)]  # the run itself and six changes of it, twice each
    saved = [gain.saved_s for gain in both.gains]
    assert (len(saved), saved) == (6, sorted(saved, reverse=True))
    with pytest.raises(ForerunError, match="runs must be at least 1, got 0"):
        studies.study_run(RUN, 0)


def test_five_million_events_are_the_most_to_be_simulated():
    """RUN takes 400 s; where nothing goes on, a run is counted as long as ten times that at most."""
    busy = replace(RUN, failures=(replace(FAILURE, rate_per_s=5.0),), slowdowns=(Slowdown("slow", 7.5, 1.5, 9.0),))
    studies._check_work(busy, 1000)
    with pytest.raises(ForerunError, match="1,001 runs with 5,000 failures and slow periods each are too many"):
        studies._check_work(busy, 1001)
    studies._check_work(replace(busy, wall_s=40.0), 10_000)
    studies._check_work(replace(busy, wall_s=1e9), 100)
    with pytest.raises(ForerunError, match="too many"):
        studies._check_work(replace(busy, wall_s=1e9), 101)


def test_an_executor_is_local_or_ray():
    with pytest.raises(ForerunError, match="executor must be local or ray, got 'mars'"):
        Walks(1, executor="mars")
    with pytest.raises(ForerunError, match="Ray address auto needs executor ray, but the executor is local"):
        Walks(1, ray_address="auto")


def test_a_stored_outcome_is_that_of_its_run_its_seed_and_its_number(tmp_path, monkeypatch):
    walked = []
    monkeypatch.setattr(walks, "walk", lambda request, seed, run: walked.append(run) or outcome(100.0 * seed + run))
    other = replace(RUN, save_every_s=7.0)
    tasks = [(RUN, 1, 0), (RUN, 1, 1), (RUN, 2, 1), (other, 1, 1)]
    for expected in ([0, 1, 1, 1], []):
        walked.clear()
        with Walks(1, tmp_path / "runs.sqlite") as stored:
            assert [one.wall_s for one in stored.run(tasks)] == [100.0, 101.0, 201.0, 101.0]
        assert walked == expected
    with Walks(1, tmp_path / "runs.sqlite") as stored:
        assert [one.wall_s for one in stored.run([(RUN, 2, 0), (RUN, 1, 1)])] == [200.0, 101.0]
    assert walked == [0]


def test_without_spares_there_is_always_another_node():
    pool = Pool(RUN)
    assert [pool.replace_s(FAILURE, now_s) for now_s in (0.0, 0.0, 5.0)] == [0.0, 0.0, 0.0]


def test_spares_stand_in_until_none_is_left_and_come_back_when_repaired():
    pool = Pool(replace(RUN, spares=Spares(3, 7.0)))
    assert pool.replace_s(replace(FAILURE, nodes=0), 0.0) == 0.0
    assert pool.replace_s(FAILURE, 0.0) == 7.0  # two of three; repaired at 100
    assert pool.replace_s(FAILURE, 40.0) == 60.0 + 7.0  # one spare, and one that is repaired at 100
    assert pool.replace_s(FAILURE, 100.0) == 40.0 + 7.0  # the other of 100, and one of 140
    assert pool.replace_s(replace(FAILURE, nodes=1), 140.0) == 7.0  # the other of 140


def test_a_node_is_a_spare_again_in_the_second_of_its_repair():
    pool = Pool(replace(RUN, spares=Spares(1, 7.0)))
    one = replace(FAILURE, nodes=1)
    assert [pool.replace_s(one, now_s) for now_s in (0.0, 100.0, 199.0, 400.0)] == [7.0, 7.0, 1.0 + 7.0, 7.0]
    other = Pool(replace(RUN, spares=Spares(1, 7.0, 50.0)))
    assert [other.replace_s(one, now_s) for now_s in (0.0, 1.0)] == [7.0, 50.0]
    slow = Pool(replace(RUN, spares=Spares(0, 70.0, 50.0)))
    assert slow.replace_s(one, 0.0) == 70.0


def test_replicas_that_go_on_are_as_many_as_are_needed():
    pool = Pool(replace(RUN, elastic=Elastic(4, 2, 10.0)))
    assert (pool.factor, pool.next_return_s) == (1.0, inf)
    assert [pool.lose_replica(back_s) for back_s in (50.0, 30.0, 20.0)] == [True, True, False]
    assert (pool.factor, pool.next_return_s) == (4 / 2, 30.0)
    pool.grow()
    assert (pool.factor, pool.next_return_s) == (4 / 3, 50.0)
    pool.all_return()
    assert (pool.factor, pool.next_return_s) == (1.0, inf)
    assert not Pool(RUN).lose_replica(1.0)
    assert Elastic(4, 2, 10.0, (3.0, 2.0, 1.5, 1.0)).factor(3) == 1.5


@pytest.mark.parametrize("replicas", [1, 3])
def test_fewer_replicas_take_the_rounds_of_the_others(replicas, monkeypatch):
    asked = []

    def over(self, setup):
        asked.append((setup.plan.dp_replicate, setup.plan.n_microbatches))
        return 9.0

    @property
    def own(self):
        return replicas

    monkeypatch.setattr(PlannedStep, "_over", over)
    monkeypatch.setattr(PlannedStep, "replicas", own)

    plan = Plan(1024, dp_replicate=replicas, n_microbatches=5)
    step = PlannedStep(Setup(load_model("gpt2-small"), plan, load_cluster("h100-sxm")), None, None)
    assert step.replica_factors(replicas) == (*[9.0] * (replicas - 1), 1.0)
    assert asked == [(1, 15), (2, 8)][: replicas - 1]
    assert step.replica_factors(replicas + 1) == ()


def planned(outer=None, checkpoint=None, **fields):
    prediction = SimpleNamespace(step_time_s=2.0, fits=True, loop=SimpleNamespace(checkpoint=checkpoint))
    plan = Plan(1024, n_microbatches=5, micro_batch=3, **fields)
    return PlannedStep(Setup(load_model("gpt2-small"), plan, load_cluster("h100-sxm")), prediction, outer)


def test_a_step_with_and_without_outer_steps():
    alone = planned(dp_replicate=2, dp_shard=2)
    assert (alone.replicas, alone.step_s, alone.fits, alone.tokens) == (2, 2.0, True, 2 * 2 * 15 * 1024)
    outer = planned(SimpleNamespace(replicas=4, mean_step_s=2.5, fits=False), dp_shard=2)
    assert (outer.replicas, outer.step_s, outer.fits, outer.tokens) == (4, 2.5, False, 4 * 2 * 15 * 1024)
    assert outer.replica_factors(4) == (4.0, 2.0, 4 / 3, 1.0)
    assert outer.replica_factors(3) == ()
    assert planned(SimpleNamespace(replicas=65)).replica_factors(65) == ()
    assert len(planned(SimpleNamespace(replicas=64)).replica_factors(64)) == 64


def test_a_changed_step_is_that_of_the_changed_setup(monkeypatch):
    asked = []

    def over(self, changed):
        asked.append(changed)
        return 1.25

    monkeypatch.setattr(PlannedStep, "_over", over)
    step = planned(checkpoint=SimpleNamespace(rank_gib=10.0), tp=2, dp_shard=4)
    assert (step.slow_factor(1.5, 3.0), step.slow_factor(1.0, 2.0)) == (1.25, 1.25)
    assert [(kind.n_gpus, kind.slowdown) for kind in asked[0].kinds] == [(2, 1.5)]
    assert (asked[0].slow_links, asked[1].kinds, asked[1].slow_links) == (3.0, (), 2.0)

    inner, outer = step.setup.cluster.links
    pods = replace(step.setup.cluster, links=(inner, replace(outer, size=4), replace(outer, bytes_per_s=25e9)))
    step = replace(step, setup=replace(step.setup, cluster=pods))
    outermost = 25e9
    assert step.drag(10 * 2**30 / outermost / 0.25) == 0.25
    assert asked[2].cluster.links[-1].bytes_per_s == pytest.approx(0.75 * outermost)
    step.drag(1e-6)
    assert asked[3].cluster.links[-1].bytes_per_s == pytest.approx(0.01 * outermost)
    assert (step.drag(0.0), planned().drag(10.0), len(asked)) == (0.0, 0.0, 4)


def test_a_change_never_makes_a_step_shorter(monkeypatch):
    for step_s, factor in ((1.0, 1.0), (5.0, 2.5)):
        found = SimpleNamespace(prediction=SimpleNamespace(step_time_s=step_s))
        monkeypatch.setattr(planned_steps, "simulate_setup", lambda setup, folded, found=found: found)
        assert planned()._over(None) == factor


def test_what_is_not_said_of_a_run_changes_nothing():
    kind = FailureKind("gpu", 0.001)
    assert kind == FailureKind("gpu", 0.001, 1, 1.0, "node", 1, 86_400.0, 0.0, 0.0)
    assert (LEVEL.drag, replace(RUN.recovery, start_s=0.0)) == (0.0, Recovery(1.0, 2.0, 3.0, 4.0, 5.0))
    assert Spares(1, 2.0).replace_s is None
    assert [Elastic(4, 1, 0.0).factor(n) for n in (1, 2, 4)] == [4.0, 2.0, 1.0]
    assert Elastic(3, 1, 0.0, (5.0, 2.0, 1.0)).factor(2) == 2.0
    unsaid = (RUN.failures, RUN.lemons, RUN.slowdowns, RUN.spares, RUN.elastic, RUN.maintenance, RUN.wall_s, RUN.notes)
    assert unsaid == ((), None, (), None, None, None, None, ())
    assert (RUN.searches_interval, RUN.by_the_clock, RUN.dollars_per_gpu_hour, RUN.gpu_power_w) == (
        False,
        False,
        None,
        None,
    )


def test_closed_forms():
    assert young_interval_s(50.0, 1000.0) == sqrt(100_000)
    assert daly_interval_s(50.0, 1000.0) == pytest.approx(sqrt(1e5) * (1 + sqrt(0.025) / 3 + 0.025 / 9) - 50)
    assert daly_interval_s(2000.0, 1000.0) == 1000.0
    assert poisson_efficiency(90.0, 10.0, 5.0, inf) == 0.9
    assert first_order_ettr(100.0, 10.0, 50.0, 1000.0) == pytest.approx(0.9 / 1.1)
