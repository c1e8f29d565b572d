"""Whole runs against closed forms, and properties that hold for every run."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.answers.goodput.arrivals import Failure, failures
from forerun.answers.goodput.formulas import (
    daly_interval_s,
    first_order_ettr,
    poisson_efficiency,
    young_interval_s,
)
from forerun.answers.goodput.outcome import Spent
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
from forerun.answers.goodput.study import study_run
from forerun.answers.goodput.walk import walk

HOUR_S, DAY_S = 3_600.0, 86_400.0
AT_ONCE = Recovery(0.0, 0.0, 0.0, 0.0, 0.0)
EVERY_HOUR = CheckpointLevel("checkpoint", 1, 60.0, 0.0, 0.0, "domain")
MONTH = RunRequest("month", 64, 8, (Phase(259_200, 10.0, 1e6),), HOUR_S, (EVERY_HOUR,), AT_ONCE)
GOLDEN = (
    (3.093, 60, 10, 30, 0.84252, 0.83737),
    (3.093, 10, 5, 15, 0.92392, 0.92239),
    (7.9, 300, 20, 60, 0.82565, 0.82571),
    (1.8, 300, 5, 33, 0.69180, 0.69554),
    (1.8, 10, 5, 6, 0.90269, 0.90090),
    (0.3, 5, 10, 5, 0.48841, 0.30055),
    (0.3, 5, 3, 5, 0.72056, 0.68306),
)
"""hours between failures, seconds of a save, minutes of a restart and of work between saves; exact and first order"""


@pytest.mark.parametrize(("mttf_h", "save_s", "restart_min", "interval_min", "exact", "first_order"), GOLDEN)
def test_a_run_has_the_efficiency_of_the_exact_formula(mttf_h, save_s, restart_min, interval_min, exact, first_order):
    interval_s, restart_s, mttf_s = interval_min * 60.0, restart_min * 60.0, mttf_h * HOUR_S
    assert poisson_efficiency(interval_s, save_s, restart_s, mttf_s) == pytest.approx(exact, abs=1e-5)
    assert first_order_ettr(interval_s, save_s, restart_s, mttf_s) == pytest.approx(first_order, abs=1e-5)
    run = replace(
        MONTH,
        phases=(Phase(int(1_000 * interval_s / 10.0), 10.0, 1.0),),
        save_every_s=interval_s,
        levels=(replace(EVERY_HOUR, blocking_s=save_s),),
        recovery=replace(AT_ONCE, restart_s=restart_s),
        failures=(FailureKind("any", 1.0 / mttf_s, nodes=0),),
    )
    walls = np.array([walk(run, 7, number).wall_s for number in range(20)])
    found, error = run.ideal_s / walls.mean(), walls.std() / 20**0.5 / walls.mean()
    assert abs(found / exact - 1.0) < 3.0 * error


def test_intervals_of_young_and_daly_meet_where_saves_are_short():
    assert young_interval_s(10.0, 7_200.0) == pytest.approx((2 * 10 * 7_200) ** 0.5)
    assert daly_interval_s(1e-3, DAY_S) == pytest.approx(young_interval_s(1e-3, DAY_S), rel=1e-3)
    assert daly_interval_s(100.0, 40.0) == 40.0


def test_the_best_interval_is_near_dalys():
    run = replace(
        MONTH,
        recovery=replace(AT_ONCE, restart_s=300.0),
        failures=(FailureKind("any", 1.0 / (6 * HOUR_S), nodes=0),),
        searches_interval=True,
    )
    study = study_run(run, runs=16, workers=1, gains=False)
    best, _, daly = study.intervals
    assert best.goodput >= daly.goodput
    assert 0.4 < best.save_every_s / daly.save_every_s < 2.5
    assert study.request.save_every_s == best.save_every_s


def test_nothing_fails_and_only_saves_cost():
    outcome = walk(MONTH)
    assert outcome.finished
    assert outcome.wall_s == pytest.approx(MONTH.ideal_s + 720 * 60.0)
    assert outcome.spent_s == {Spent.SAVE: pytest.approx(720 * 60.0)}


def test_a_run_without_failures_begins_at_nothing():
    begun = replace(MONTH, phases=(Phase(100, 10.0, 7.0),), save_every_s=inf, levels=())
    found = walk(begun, record=True)
    assert (found.wall_s, found.productive_s, found.steps, found.tokens) == (1_000.0, 1_000.0, 100, 700.0)
    assert (found.lost_tokens, found.longest_stop_s, found.failures) == (0.0, 0.0, {})
    assert (found.spent_s, found.events, found.finished) == ({}, (), True)
    started = walk(replace(begun, recovery=Recovery(1.0, 2.0, 4.0, 8.0, 16.0, 32.0)))
    assert (started.wall_s, started.spent_s) == (1_048.0, {Spent.START: 48.0})
    # a save every 300 s: the last one leaves 100 s
    saved = walk(replace(begun, save_every_s=300.0, levels=(replace(EVERY_HOUR, blocking_s=5.0),)))
    assert (saved.wall_s, saved.spent_s) == (1_015.0, {Spent.SAVE: 15.0})


def test_a_run_that_writes_no_checkpoints_takes_its_steps_alone():
    found = walk(replace(MONTH, save_every_s=inf), 0, 0)
    assert (found.wall_s, found.productive_s, found.spent_s) == (MONTH.ideal_s, MONTH.ideal_s, {})


def test_periods_taken_at_once_are_those_taken_one_by_one(monkeypatch):
    run = replace(
        MONTH,
        save_every_s=700.0,
        levels=(
            CheckpointLevel("memory", 1, 2.0, 30.0, 10.0, "process", drag=0.1),
            CheckpointLevel("disk", 4, 20.0, 3_500.0, 100.0, "domain"),
        ),
        failures=(FailureKind("crash", 1 / (9 * HOUR_S), scope="process"), FailureKind("node", 1 / (30 * HOUR_S))),
        slowdowns=(Slowdown("slow", 1 / (50 * HOUR_S), 1.3, 2 * HOUR_S),),
    )
    quick = [walk(run, 3, number) for number in range(5)]
    monkeypatch.setattr("forerun.answers.goodput.walk._Walk._skip", lambda *_: False)
    slow = [walk(run, 3, number) for number in range(5)]
    for one, other in zip(quick, slow, strict=True):
        assert one.wall_s == pytest.approx(other.wall_s, rel=1e-9)
        assert one.failures == other.failures
        assert one.spent_s == {what: pytest.approx(value, rel=1e-6) for what, value in other.spent_s.items()}


def test_a_failure_goes_back_to_the_checkpoint_that_survives_it():
    levels = (
        CheckpointLevel("memory", 1, 0.0, 0.0, 5.0, "process"),
        CheckpointLevel("disk", 10, 0.0, 0.0, 50.0, "domain"),
    )
    run = replace(MONTH, save_every_s=360.0, levels=levels)
    crash, node = (
        walk(replace(run, failures=(FailureKind("any", 1 / (5 * HOUR_S), scope=scope, nodes=0),)), 1)
        for scope in ("process", "node")
    )
    assert 0 < crash.spent_s[Spent.WASTED] < node.spent_s[Spent.WASTED]
    assert crash.spent_s[Spent.WASTED] < 360.0 * crash.interruptions
    assert crash.spent_s[Spent.RESTORE] == pytest.approx(5.0 * crash.interruptions)


def test_a_checkpoint_counts_from_when_it_is_complete():
    late = replace(MONTH, levels=(replace(EVERY_HOUR, persist_s=1_800.0),), failures=(FailureKind("x", 1 / DAY_S),))
    soon = replace(late, levels=(EVERY_HOUR,))
    assert walk(late, 5).spent_s[Spent.WASTED] > walk(soon, 5).spent_s[Spent.WASTED]


def test_a_save_waits_until_the_one_before_is_complete():
    run = replace(MONTH, levels=(replace(EVERY_HOUR, persist_s=5_400.0),))
    saved = walk(run).spent_s[Spent.SAVE]
    assert saved == pytest.approx(720 * 60.0 + 719 * 1_800.0)


def test_silent_corruption_takes_back_what_was_saved_since():
    loud = FailureKind("corruption", 1 / (2 * DAY_S), nodes=0)
    silent = replace(loud, found_after_s=6 * HOUR_S)
    wasted = [walk(replace(MONTH, failures=(kind,)), 2).spent_s[Spent.WASTED] for kind in (loud, silent)]
    number = walk(replace(MONTH, failures=(silent,)), 2).interruptions
    assert wasted[1] > 3 * wasted[0]
    assert wasted[1] / number > 3 * HOUR_S


def test_spares_end_the_wait_for_repairs():
    kind = FailureKind("node", 1 / DAY_S, repair_s=12 * HOUR_S)
    waits = [
        walk(replace(MONTH, failures=(kind,), spares=Spares(nodes, 60.0)), 4).spent_s.get(Spent.REPLACE, 0.0)
        for nodes in (0, 1, 8)
    ]
    number = walk(replace(MONTH, failures=(kind,), spares=Spares(8, 60.0)), 4).interruptions
    assert waits[0] > waits[1] > waits[2]
    assert waits[2] == pytest.approx(60.0 * number)


@pytest.mark.parametrize("elastic", [None, Elastic(8, 7, 30.0)])
def test_more_failures_never_gain_time_where_nodes_are_waited_for(elastic):
    node = FailureKind("node", 0.4 / DAY_S, repair_s=DAY_S)
    request = replace(MONTH, spares=Spares(0, 60.0), elastic=elastic, wall_s=30 * DAY_S)
    found = []
    for mtbf_h in (inf, 100.0, 20.0, 5.0, 1.0):
        crash = FailureKind("crash", 1 / (mtbf_h * HOUR_S), nodes=0, scope="process")
        kinds = (node, crash) if mtbf_h < inf else (node,)
        found.append(np.mean([walk(replace(request, failures=kinds), 1, run).goodput for run in range(8)]))
    assert found == sorted(found, reverse=True)


def test_replicas_go_on_without_the_one_that_failed():
    kind = FailureKind("node", 1 / (0.3 * HOUR_S), nodes=0)
    recovery = Recovery(60.0, 60.0, 540.0, 0.0, 0.0)
    stops = replace(MONTH, phases=(Phase(20_000, 10.0, 1.0),), failures=(kind,), recovery=recovery)
    goes_on = replace(stops, elastic=Elastic(100, 50, 60.0))
    waiting, elastic = (walk(run, 1) for run in (stops, goes_on))
    assert elastic.goodput > waiting.goodput + 0.2
    assert elastic.spent_s[Spent.FEWER] > 0
    assert elastic.spent_s.get(Spent.RESTORE, 0.0) == 0.0


def test_lemons_fail_until_they_are_taken_out():
    kind = FailureKind("node", 1e-12)
    run = replace(MONTH, failures=(kind,), lemons=Lemons(6.0, 1 / (3 * DAY_S), 2))
    counts = [walk(run, 0, number).failures.get("lemon node", 0) for number in range(30)]
    assert np.mean(counts) == pytest.approx(12.0, abs=3.0)


def test_a_weibull_lifetime_has_the_stated_mean():
    kind = FailureKind("node", 100 / (40 * DAY_S), components=100, shape=0.7, nodes=0)
    long = replace(MONTH, phases=(Phase(10**8, 10.0, 1.0),), save_every_s=inf, levels=(), wall_s=4_000 * DAY_S)
    assert walk(replace(long, failures=(kind,)), 1).interruptions == pytest.approx(10_000, rel=0.05)


@pytest.mark.parametrize("shape", [0.7, 1.0, 3.0])
def test_failures_of_many_components_come_in_order(shape):
    kind = FailureKind("node", 100 / (40 * DAY_S), components=100, shape=shape)
    run = replace(MONTH, failures=(kind, replace(kind, name="link", rate_per_s=1 / DAY_S)))
    times = [one.at_s for one in islice(failures(run, 5, 1), 500)]
    assert times == sorted(times)
    assert len(set(times)) == 500


def test_maintenance_stops_at_its_times():
    run = replace(MONTH, maintenance=Maintenance(7 * DAY_S, 6 * HOUR_S))
    assert walk(run).spent_s[Spent.MAINTENANCE] == pytest.approx(4 * (6 * HOUR_S + 60.0))


def test_after_maintenance_all_replicas_train(monkeypatch):
    kind = FailureKind("node", 1e-12, repair_s=10 * DAY_S)
    monkeypatch.setattr(
        "forerun.answers.goodput.walk.failures", lambda *_: iter([Failure(1_000.0, 1_000.0, kind, 0.5)])
    )
    run = replace(
        MONTH, phases=(Phase(2_000, 10.0, 1.0),), save_every_s=inf, levels=(replace(EVERY_HOUR, blocking_s=0.0),),
        failures=(kind,), spares=Spares(0, 0.0), elastic=Elastic(4, 1, 60.0), maintenance=Maintenance(5_000.0, 100.0),
    )  # fmt: skip
    found = walk(run)
    # 100 steps, 60 s to shrink, 295.5 steps with 3 of 4 replicas, 1,605 steps with all; 4 stops of 100 s
    assert found.spent_s[Spent.FEWER] == pytest.approx(295.5 * 10 / 3)
    assert found.spent_s[Spent.MAINTENANCE] == pytest.approx(400.0)
    assert found.wall_s == pytest.approx(5_100 + 16_050 + 300)


def test_slow_periods_lengthen_steps():
    run = replace(MONTH, levels=(), save_every_s=inf, slowdowns=(Slowdown("node", 1 / DAY_S, 2.0, HOUR_S),))
    assert walk(run, 3).spent_s[Spent.SLOW] == pytest.approx(MONTH.ideal_s / 48, rel=0.4)


requests = st.builds(
    lambda mttf_h, every_s, blocking_s, persist_s, scope, nodes, spares, elastic, hang, days: replace(
        MONTH,
        phases=(Phase(4_000, 10.0, 1.0), Phase(3_000, 23.0, 2.0)),
        save_every_s=every_s,
        levels=(CheckpointLevel("c", 1, blocking_s, persist_s, 30.0, "domain", drag=0.05),),
        recovery=Recovery(20.0, 600.0, 100.0, 20.0, 10.0, 5.0),
        failures=(FailureKind("f", 1 / (mttf_h * HOUR_S), scope=scope, nodes=nodes, repair_s=7_000, hang_share=hang),),
        spares=spares,
        elastic=elastic,
        maintenance=Maintenance(DAY_S, HOUR_S),
        slowdowns=(Slowdown("s", 1 / (20 * HOUR_S), 1.2, HOUR_S),),
        wall_s=days * DAY_S,
    ),
    st.floats(0.5, 200.0),
    st.floats(5.0, 20_000.0),
    st.floats(0.0, 300.0),
    st.floats(0.0, 3_000.0),
    st.sampled_from(["process", "node", "domain"]),
    st.integers(0, 3),
    st.one_of(st.none(), st.builds(Spares, st.integers(0, 3), st.just(30.0), st.sampled_from([None, 600.0]))),
    st.one_of(st.none(), st.just(Elastic(8, 6, 15.0))),
    st.floats(0.0, 1.0),
    st.floats(0.01, 8.0),
)


@settings(max_examples=100, deadline=None)
@given(requests, st.integers(0, 1_000))
def test_the_parts_of_any_run_sum_to_its_time(run, seed):
    outcome = walk(run, seed)
    assert outcome == walk(run, seed)
    assert sum(outcome.spent_s.values()) + outcome.productive_s == pytest.approx(outcome.wall_s, rel=1e-9)
    assert min(outcome.spent_s.values(), default=0.0) >= 0.0
    assert outcome.wall_s <= run.wall_s + 1e-6
    assert outcome.finished == (outcome.steps == run.steps)
    assert 0.0 <= outcome.goodput <= outcome.ettr <= 1.0 + 1e-9


def test_the_result_does_not_depend_on_the_number_of_processes():
    run = replace(MONTH, failures=(FailureKind("f", 1 / DAY_S),), phases=(Phase(5_000, 10.0, 1.0),))
    one, two = (study_run(run, 20, 3, workers) for workers in (1, 2))
    assert one.outcomes == two.outcomes
    assert one.gains == two.gains
    assert {gain.change: gain.goodput > one.goodput.mean for gain in one.gains}["failures half as often"]
