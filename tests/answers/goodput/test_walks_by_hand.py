"""Single runs with failures at stated times: where each second goes is computed by hand beside each test."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from math import inf, log
from random import Random

import numpy as np
import pytest

from forerun.answers.goodput import walk as walks
from forerun.answers.goodput.arrivals import Failure, Slow, failures, slow_periods
from forerun.answers.goodput.outcome import Event, Spent
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
from forerun.answers.goodput.saves import Saves
from forerun.answers.goodput.walk import walk

MEMORY = CheckpointLevel("memory", 1, 5.0, 20.0, 7.0, "process")
DISK = CheckpointLevel("disk", 2, 10.0, 100.0, 30.0, "domain")
CRASH, NODE = FailureKind("crash", 0.0, scope="process", hang_share=0.5), FailureKind("node", 0.0, hang_share=0.5)
RUN = RunRequest(
    "run", 64, 8, (Phase(100, 10.0, 1.0), Phase(50, 20.0, 3.0)), 200.0, (MEMORY, DISK),
    Recovery(3.0, 50.0, 11.0, 13.0, 17.0, 2.0),
)  # fmt: skip
PLAIN = replace(RUN, phases=(Phase(100, 10.0, 1.0),), save_every_s=inf, levels=(), recovery=Recovery(3, 50, 11, 13, 17))


@pytest.fixture
def met(monkeypatch):
    """Walks a request through stated failures (time, kind, luck) and slow periods (begin, end, factor).

    The first failure shows `silent_s` after it happened.
    """

    def walked(request, *failing, slow=(), silent_s=0.0):
        happening = [
            Failure(at_s, at_s if number else at_s - silent_s, kind, luck)
            for number, (at_s, kind, luck) in enumerate(failing)
        ]
        monkeypatch.setattr(walks, "failures", lambda *_: iter(happening))
        monkeypatch.setattr(walks, "slow_periods", lambda *_: iter([Slow(*one) for one in slow]))
        found = walk(request, record=True)
        assert found.productive_s + sum(found.spent_s.values()) == pytest.approx(found.wall_s)
        return found

    return walked


def test_each_failure_goes_back_to_the_last_checkpoint_that_it_leaves(met):
    """Saves take 5 s, every second one 10 s. They begin at 219, 424 and 634 s, at the steps 20, 40 and 60.

    The crash at 700 s, in step 66.1, finds step 60 in memory, and training goes on at 751 s. The save of step 80
    begins at 951 s and would be on disk at 1,061 s. The node at 1,000 s, in step 83.9, takes the memory with it and
    leaves step 40. After it there are eight more saves, the last one after the last step.
    """
    found = met(RUN, (700.0, CRASH, 0.5), (1_000.0, NODE, 0.49))
    assert found.spent_s == {
        Spent.START: 2.0 + 17.0,
        Spent.SAVE: 6 * 5.0 + 6 * 10.0,
        Spent.DETECT: 3.0 + 50.0,
        Spent.RESTART: 2 * (11.0 + 13.0 + 17.0),
        Spent.RESTORE: 7.0 + 30.0,
        Spent.WASTED: pytest.approx(61.0 + 439.0),
    }
    assert (found.wall_s, found.productive_s, found.tokens) == (pytest.approx(2_781.0), 2_000.0, 250.0)
    assert found.lost_tokens == pytest.approx(6.1 + 43.9)
    assert (found.failures, found.longest_stop_s) == ({"crash": 1, "node": 1}, 121.0)
    assert found.events == (
        Event(700.0, 751.0, "failure", "crash"),
        Event(1_000.0, pytest.approx(1_121.0), "failure", "node"),
    )
    assert (found.finished, found.steps) == (True, 150)


def test_a_failure_without_a_checkpoint_begins_anew(met):
    found = met(RUN, (238.0, NODE, 0.9))  # the first save, at 219 s, is in memory alone, complete at 244 s
    assert (found.spent_s[Spent.WASTED], Spent.RESTORE in found.spent_s) == (214.0, False)
    early, late = (met(RUN, (at_s, CRASH, 0.9)).spent_s for at_s in (243.0, 244.0))
    assert (early[Spent.WASTED], early.get(Spent.RESTORE)) == (219.0, None)
    assert (late[Spent.WASTED], late[Spent.RESTORE]) == (20.0, 7.0)


def test_a_failure_in_a_save_or_in_a_recovery_begins_the_recovery_again(met):
    """At 222 s the first save is cut short after 3 s. Its recovery would end at 266 s; the next crash is at 250 s."""
    found = met(RUN, (222.0, CRASH, 0.9), (250.0, NODE, 0.1))
    assert found.spent_s[Spent.WASTED] == 200.0
    assert found.spent_s[Spent.DETECT] == 3.0 + 50.0
    assert found.spent_s[Spent.RESTART] == (24.0 + 1.0) + (24.0 + 17.0)
    assert found.spent_s[Spent.SAVE] == 3.0 + 5 * 5.0 + 5 * 10.0
    assert found.events == (Event(222.0, 341.0, "failure", "crash, node"),)
    assert found.longest_stop_s == 119.0


def test_a_failure_at_the_start_or_in_the_second_of_a_recoverys_end(met):
    begun = met(PLAIN, (5.0, NODE, 0.9))
    assert begun.spent_s == {Spent.START: 5.0, Spent.DETECT: 3.0, Spent.RESTART: 41.0}
    # the recovery ends at 5 + 44 s: a failure then finds it complete, and nothing trained since
    both = met(PLAIN, (5.0, NODE, 0.9), (49.0, NODE, 0.9))
    assert both.spent_s == {Spent.START: 5.0, Spent.DETECT: 6.0, Spent.RESTART: 82.0}
    assert [event.start_s for event in both.events] == [5.0, 49.0]


def test_a_failure_before_the_first_step_takes_the_start_again(met):
    """The start takes 100 + 17 s; a failure at 60 s lets it begin again, one at 300 s asks for a restart."""
    slow = replace(PLAIN, recovery=Recovery(3, 50, 11, 13, 17, 100))
    assert met(slow, (60.0, NODE, 0.9)).spent_s == {Spent.START: 60.0, Spent.DETECT: 3.0, Spent.RESTART: 117.0}
    twice = met(slow, (60.0, NODE, 0.9), (300.0, NODE, 0.9))
    assert twice.spent_s[Spent.RESTART] == 117.0 + 41.0
    again = met(slow, (60.0, NODE, 0.9), (100.0, NODE, 0.9))
    assert again.spent_s[Spent.RESTART] == (100.0 - 63.0) + 117.0


def test_silent_corruption_leaves_what_began_before_it(met):
    """At 700 s corruption shows that is 277 s old: the save that began at 424 s has it, that of 219 s has not.

    The checkpoint of step 20 lies in memory; corruption that is 275 s old leaves that of step 40 on either level.
    """
    older, younger = (met(RUN, (700.0, CRASH, 0.9), silent_s=silent_s) for silent_s in (277.0, 275.0))
    assert (older.spent_s[Spent.WASTED], older.spent_s[Spent.RESTORE]) == (pytest.approx(461.0), 7.0)
    assert (younger.spent_s[Spent.WASTED], younger.spent_s[Spent.RESTORE]) == (pytest.approx(261.0), 7.0)


@pytest.mark.parametrize(
    ("wall_s", "steps", "spent"),
    [
        (113.0, 9, {Spent.WASTED: 4.0}),  # step 9.4 is not kept
        (221.0, 20, {Spent.SAVE: 2.0}),
        (10.0, 0, {}),
        (429.0, 40, {Spent.SAVE: 10.0}),
    ],
)
def test_the_clock_ends_a_run(met, wall_s, steps, spent):
    found = met(replace(RUN, wall_s=wall_s))
    start_s = min(19.0, wall_s)
    assert found.spent_s == {Spent.START: start_s} | {what: pytest.approx(spent_s) for what, spent_s in spent.items()}
    assert (found.wall_s, found.steps, found.tokens, found.finished) == (wall_s, steps, steps, False)


def test_the_clock_ends_a_recovery(met):
    found = met(replace(PLAIN, wall_s=100.0), (90.0, NODE, 0.9))
    assert found.spent_s == {Spent.START: 17.0, Spent.WASTED: 73.0, Spent.DETECT: 3.0, Spent.RESTART: 7.0}
    assert met(replace(PLAIN, wall_s=90.0), (90.0, NODE, 0.9)).failures == {}


def test_the_slowest_of_slow_periods_sets_the_pace(met):
    """Steps begin at 17 s. From 100 s they take twice, from 150 to 200 s three times as long; at 300 s all is over.

    83 + 50 / 2 + 50 / 3 + 100 / 2 = 174.67 s of work are done by then, of which 825.33 s are left.
    """
    found = met(PLAIN, slow=((100.0, 300.0, 2.0), (150.0, 200.0, 3.0)))
    assert found.spent_s == {Spent.START: 17.0, Spent.SLOW: pytest.approx(200.0 - 25 - 50 / 3 - 50)}
    assert found.events == (
        Event(100.0, 300.0, "slow", "steps take 2 times as long"),
        Event(150.0, 200.0, "slow", "steps take 3 times as long"),
    )


def test_steps_are_slow_while_checkpoints_are_persisted(met):
    """Both saves begin after 5 steps: the first level drags for 20 s of wall time, the second one for 60 s.

    40 s more of work are due by then: 20 s at 1.75 and 40 s at 1.25 of the usual time make 11.43 + 32 s. A drag that
    is over when the next save begins changes nothing.
    """
    levels = (replace(MEMORY, drag=0.5), replace(DISK, every=1, blocking_s=0.0, persist_s=60.0, drag=0.25))
    run = replace(
        PLAIN, phases=(Phase(15, 10.0, 1.0),), levels=levels, save_every_s=50.0, recovery=Recovery(*[0.0] * 5)
    )
    found = met(run)
    behind_s = 20.0 / 1.75 + 40.0 / 1.25
    # the second save begins 60 + (50 - 43.43) s after the first; the one at the end of the run drags nothing
    each_s = 60.0 - behind_s
    assert found.spent_s == {Spent.SAVE: 15.0, Spent.SLOW: pytest.approx(2 * each_s)}
    assert found.wall_s == pytest.approx(150.0 + 15.0 + 2 * each_s)


def test_a_save_that_is_not_complete_holds_up_the_next_one_of_its_level(met):
    """Saves begin every 200 s, and those on disk take 450 s: each further one waits 50 s less the saves in between."""
    run = replace(RUN, phases=(Phase(100, 10.0, 1.0),), levels=(MEMORY, replace(DISK, persist_s=450.0)))
    found = met(run)
    # memory at step 20, both at 40, memory at 60 (5 s); at 80 the disk is busy for 450 - 200 - 5 - 200 s; 100: memory
    assert found.spent_s == {Spent.START: 19.0, Spent.SAVE: 3 * 5.0 + 10.0 + (45.0 + 10.0)}


def test_replicas_leave_and_come_back(met):
    """At 121 s the run is in step 10.4 of 4 replicas. Their node is back 3 + 24 s later, when the others train again.

    So they wait 10 s, train for 17 s at 4 / 3 of the time of a step, and then wait 7 s for the replica that is back.
    """
    elastic = replace(PLAIN, elastic=Elastic(4, 3, 7.0))
    found = met(elastic, (121.0, NODE, 0.9))
    assert found.spent_s == {
        Spent.START: 17.0,
        Spent.DETECT: 3.0,
        Spent.WASTED: pytest.approx(4.0),
        Spent.RESIZE: 14.0,
        Spent.FEWER: pytest.approx(17.0 / 4),
    }
    assert found.events == (
        Event(121.0, 131.0, "failure", "node"),
        Event(148.0, 155.0, "resize", "a replica is back"),
    )
    assert found.longest_stop_s == 10.0


def test_replicas_that_hold_parts_of_the_state_load_a_checkpoint(met):
    """Those that are left go back to the checkpoint on disk, written from 424 s to 434 s."""
    whole = replace(RUN, elastic=Elastic(4, 3, 7.0))
    parts = replace(RUN, elastic=Elastic(4, 3, 7.0, shards=True))
    (one, other) = (met(run, (621.0, NODE, 0.9)).spent_s for run in (whole, parts))
    assert Spent.RESTORE not in one
    assert one[Spent.WASTED] < 10.0
    assert other[Spent.RESTORE] == DISK.load_s
    assert other[Spent.WASTED] == pytest.approx(621.0 - (19.0 + 200.0 + 5.0 + 200.0 + 10.0))
    assert (other[Spent.DETECT], other[Spent.RESIZE]) == (one[Spent.DETECT], one[Spent.RESIZE])
    assert Spent.RESTART not in other


def test_a_slow_period_of_fewer_replicas_counts_as_both(met):
    """17 s with 3 of 4 replicas of which each step takes twice as long: 8 / 3 of the time of a step."""
    found = met(replace(PLAIN, elastic=Elastic(4, 3, 7.0)), (121.0, NODE, 0.9), slow=((131.0, 148.0, 2.0),))
    steps_s = 17.0 / (8 / 3)
    assert found.spent_s[Spent.FEWER] == pytest.approx(steps_s / 3)
    assert found.spent_s[Spent.SLOW] == pytest.approx(17.0 - steps_s * 4 / 3)


def test_too_few_replicas_start_all_of_them_again(met):
    found = met(replace(PLAIN, elastic=Elastic(4, 3, 7.0)), (121.0, NODE, 0.9), (141.0, NODE, 0.9))
    # 104 s, 10 s to shrink, 10 s of three replicas; then a whole restart with all four
    assert found.spent_s == {
        Spent.START: 17.0, Spent.DETECT: 6.0, Spent.RESIZE: 7.0, Spent.RESTART: 41.0,
        Spent.WASTED: pytest.approx(4.0 + 100.0 + 7.5), Spent.FEWER: pytest.approx(2.5),
    }  # fmt: skip


def test_silent_corruption_restarts_replicas_too(met):
    found = met(replace(PLAIN, elastic=Elastic(4, 3, 7.0)), (121.0, NODE, 0.9), silent_s=1.0)
    assert (found.spent_s[Spent.RESTART], Spent.RESIZE in found.spent_s) == (41.0, False)


def test_a_failure_while_a_replica_comes_back(met):
    found = met(replace(PLAIN, elastic=Elastic(4, 2, 7.0)), (121.0, NODE, 0.9), (150.0, NODE, 0.9))
    # the second one leaves 3 of 4 at work from 160 s to 177 s
    assert found.spent_s[Spent.RESIZE] == 7.0 + 2.0 + 7.0 + 7.0
    assert found.spent_s[Spent.FEWER] == pytest.approx(17.0 / 4 * 2)
    assert [(event.what, event.start_s, event.end_s) for event in found.events] == [
        ("failure", 121.0, 131.0),
        ("resize", 148.0, 150.0),
        ("failure", 150.0, 160.0),
        ("resize", 177.0, 184.0),
    ]


def test_spares_are_swapped_in(met):
    spares = replace(PLAIN, spares=Spares(1, 40.0, 900.0))
    found = met(spares, (127.0, NODE, 0.9), (327.0, NODE, 0.9), (327.0 + 944.0, NODE, 0.9))
    assert found.spent_s[Spent.REPLACE] == 40.0 + 900.0 + 900.0


def test_a_crash_does_not_end_the_wait_for_a_node(met):
    """The run starts at 17 s. The node that fails at 105 s is back 500 s after that shows; the crash begins the rest
    of the recovery again."""
    request = replace(PLAIN, spares=Spares(0, 0.0))
    node, crash = replace(NODE, repair_s=500.0), replace(CRASH, nodes=0)
    found = met(request, (105.0, node, 0.5), (200.0, crash, 0.5))
    assert found.spent_s == {
        Spent.START: 17.0,
        Spent.DETECT: 3.0 + 3.0,
        Spent.REPLACE: (200.0 - 108.0) + (608.0 - 203.0),
        Spent.RESTART: 11.0 + 13.0 + 17.0,
        Spent.WASTED: pytest.approx(105.0 - 17.0),
    }
    assert found.wall_s == pytest.approx(608.0 + 41.0 + 1_000.0)


def test_a_run_with_too_few_replicas_starts_when_enough_are_back(met):
    """The replica that fails at 105 s is back at 632 s, the one that fails at 200 s at 703 s. The run can do without
    one of them: it starts again at 632 s, though a crash comes in between, and makes steps alone until 703 s."""
    request = replace(PLAIN, spares=Spares(0, 0.0), elastic=Elastic(2, 1, 5.0))
    node, crash = replace(NODE, repair_s=500.0), replace(CRASH, nodes=0)
    found = met(request, (105.0, node, 0.5), (200.0, node, 0.5), (300.0, crash, 0.5))
    assert found.spent_s[Spent.REPLACE] == (300.0 - 203.0) + (632.0 - 303.0)
    assert found.spent_s[Spent.RESIZE] == 5.0 + 5.0
    assert found.spent_s[Spent.RESTART] == 11.0 + 13.0 + 17.0
    alone_s = (703.0 - 632.0 - 41.0) / 2.0
    assert found.spent_s[Spent.FEWER] == pytest.approx((200.0 - 113.0) / 2.0 + alone_s)


def test_maintenance_saves_and_loads(met):
    """The stop is due at 500 s, in step 46.6: both levels save step 46 in 110 s, and the stop lasts 60 s.

    The run then starts in 24 + 17 s and loads in 30 s.
    """
    stopped = replace(RUN, maintenance=Maintenance(500.0, 60.0))
    found = met(replace(stopped, wall_s=760.0))
    assert found.spent_s == {
        Spent.START: 19.0, Spent.SAVE: 15.0, Spent.MAINTENANCE: 110.0 + 60.0 + 41.0 + 30.0,
        Spent.WASTED: pytest.approx(6.0 + 9.0),
    }  # fmt: skip
    assert found.events == (Event(500.0, 741.0, "maintenance", "planned"),)
    assert found.steps == 47
    # a failure leaves the checkpoint of the maintenance: 19 s are lost, 74 s go by, and 66 s are left for 6 steps
    failed = met(replace(stopped, wall_s=900.0), (760.0, NODE, 0.9))
    assert failed.spent_s[Spent.WASTED] == pytest.approx(6.0 + 19.0 + 6.0)
    assert (failed.spent_s[Spent.RESTORE], failed.steps) == (30.0, 46 + 6)


def test_saves_are_counted_anew_after_maintenance(met):
    """Before the stop at 600 s there are five saves, so that the sixth would be on disk; after it the first is not."""
    found = met(replace(RUN, save_every_s=100.0, maintenance=Maintenance(600.0, 60.0), wall_s=1_000.0))
    assert found.spent_s[Spent.SAVE] == (5 + 10 + 5 + 10 + 5) + 5


def test_maintenance_of_a_run_without_checkpoints_begins_anew(met):
    found = met(replace(PLAIN, maintenance=Maintenance(300.0, 60.0), wall_s=500.0))
    assert found.spent_s == {Spent.START: 17.0, Spent.MAINTENANCE: 101.0, Spent.WASTED: pytest.approx(283.0 + 9.0)}
    assert found.steps == 9


def test_a_failure_in_maintenance_is_recovered_from(met):
    run = replace(RUN, maintenance=Maintenance(300.0, 60.0), wall_s=590.0)
    saving = met(run, (350.0, CRASH, 0.9))
    assert saving.spent_s[Spent.MAINTENANCE] == 50.0
    assert saving.events == (Event(350.0, 401.0, "failure", "crash"),)
    down = met(run, (420.0, NODE, 0.9))
    assert down.spent_s[Spent.MAINTENANCE] == 120.0
    assert down.spent_s[Spent.RESTORE] == 30.0
    assert [event.what for event in down.events] == ["failure", "maintenance"]


@pytest.mark.parametrize("silent_s", [0.0, 1_500.0])
def test_periods_at_once_meet_failures_as_periods_one_by_one(met, monkeypatch, silent_s):
    run = replace(RUN, phases=(Phase(3_000, 10.0, 1.0),), wall_s=25_000.0)
    failing = (7_013.0, CRASH, 0.9), (7_090.0, CRASH, 0.9), (9_999.0, NODE, 0.1), (20_000.0, CRASH, 0.3)

    def walked():
        return met(run, *failing, slow=((2_000.0, 2_500.0, 1.5),), silent_s=silent_s)

    taken = []
    skip = walks._Walk._skip
    monkeypatch.setattr(walks._Walk, "_skip", lambda *all_: taken.append(skip(*all_)) or taken[-1])
    quick = walked()
    assert any(taken)
    monkeypatch.setattr(walks._Walk, "_skip", lambda *_: False)
    single = walked()
    assert quick.spent_s == {what: pytest.approx(value) for what, value in single.spent_s.items()}
    assert (quick.steps, quick.lost_tokens) == (single.steps, pytest.approx(single.lost_tokens))
    assert [event.detail for event in quick.events] == [event.detail for event in single.events]


def test_the_first_run_of_the_first_seed_is_walked_unless_told_otherwise():
    run = replace(RUN, failures=(replace(CRASH, rate_per_s=1e-3),))
    assert walk(run) == walk(run, 0, 0)
    assert len({walk(run, seed, number).wall_s for seed in (0, 1) for number in (0, 1)}) == 4
    assert (walk(run).events, bool(walk(run, record=True).events)) == ((), True)


# -- what is saved -----------------------------------------------------------------------------------------------------


def test_saves_are_a_list_of_checkpoints():
    """The same is kept in a plain list, one entry for each checkpoint."""
    random = Random(1)
    for _ in range(200):
        saves, plain = Saves(), list[tuple[float, ...]]()
        now_s, step, since_s, single = 0.0, 0.0, 0.0, False
        for _ in range(12):
            gap_s, gap, late_s = random.randint(1, 9), random.randint(1, 5), random.randint(0, 30)
            what = random.choice(["add", "add", "repeat", "forget"])
            if what == "repeat" and single:
                times, period_s, period = random.randint(1, 4), now_s + gap_s - since_s, 100.0
                saves.repeat(since_s, period_s, period, times)
                moved = [(n * period_s, n * period_s, n * period) for n in range(1, times + 1)]
                latest = [one for one in plain if one[0] > since_s]
                plain += [tuple(a + b for a, b in zip(one, by, strict=True)) for by in moved for one in latest]
                now_s, step, single = now_s + times * period_s, step + times * period, False
            elif what == "forget":
                step, single = float(random.randint(0, int(step))), False
                saves.forget_after(step)
                plain = [one for one in plain if one[2] <= step]
            else:
                now_s, step, single = now_s + gap_s, step + gap, True
                saves.add(now_s, now_s + late_s, step)
                plain.append((now_s, now_s + late_s, step))
            since_s = since_s if single else now_s
            for at_s, before_s in ((now_s, now_s), (now_s - gap_s, now_s), (now_s + late_s, now_s - 3 * gap_s)):
                kept = [saved for begun_s, done_s, saved in plain if done_s <= at_s and begun_s <= before_s]
                assert saves.latest(at_s, before_s) == max(kept, default=None)
        saves.clear()
        assert saves.latest(inf, inf) is None


# -- what happens when -------------------------------------------------------------------------------------------------


def test_silent_failures_show_after_an_exponential_time():
    loud = FailureKind("corruption", 1 / 1_000.0)
    silent = replace(loud, found_after_s=5_000.0)
    first = list(islice(failures(replace(PLAIN, failures=(loud,)), 3, 1), 4_000))
    shown = list(islice(failures(replace(PLAIN, failures=(silent,)), 3, 1), 3_000))
    assert [one.at_s for one in shown] == sorted(one.at_s for one in shown)
    assert {one.since_s for one in shown} <= {one.at_s for one in first}
    for one in shown:
        assert one.at_s - one.since_s == pytest.approx(-5_000.0 * log(1.0 - one.luck))
    late = [one.at_s - one.since_s for one in sorted(shown, key=lambda one: one.since_s)[:2_000]]
    assert np.mean(late) == pytest.approx(5_000.0, rel=0.1)
    assert all(one.at_s == one.since_s for one in first)


def test_poisson_failures_have_the_stated_rate_and_even_luck():
    found = list(islice(failures(replace(PLAIN, failures=(FailureKind("a", 1 / 50.0),)), 1, 0), 4_000))
    assert found[-1].at_s / len(found) == pytest.approx(50.0, rel=0.05)
    assert np.mean([one.luck for one in found]) == pytest.approx(0.5, abs=0.02)
    assert list(failures(replace(PLAIN, failures=(FailureKind("a", 0.0),)), 1, 0)) == []


def test_components_of_which_one_fails_are_renewed_one_by_one():
    """With a shape of 50 all lifetimes are about 1,000 s, so ten components fail together every 1,000 s."""
    kind = FailureKind("disk", 10 / 1_000.0, components=10, shape=50.0)
    times = [one.at_s for one in islice(failures(replace(PLAIN, failures=(kind,)), 1, 0), 20)]
    assert times == [pytest.approx(1_000.0, rel=0.2)] * 10 + [pytest.approx(2_000.0, rel=0.2)] * 10
    assert np.mean(times[:10]) == pytest.approx(1_000.0, rel=0.02)


def test_lemons_fail_at_their_rate_until_each_is_evicted():
    like = FailureKind("node", 1e-30, nodes=3, repair_s=70.0)

    def of(number, times):
        run = replace(PLAIN, failures=(like,), lemons=Lemons(4.0, 1 / 500.0, times))
        return [one for one in islice(failures(run, 0, number), 60) if one.kind.name == "lemon node"]

    counts = [len(of(number, 3)) for number in range(60)]
    assert {count % 3 for count in counts} == {0}
    assert np.mean(counts) == pytest.approx(12.0, abs=2.0)
    (kind,) = {one.kind for one in of(1, 3)}
    assert (kind.scope, kind.nodes, kind.repair_s, kind.hang_share) == ("node", 3, 70.0, 0.0)
    # n lemons that leave at their first failure are gone after 500 (1 + 1/2 + ... + 1/n) s on average
    runs = [of(number, 1) for number in range(300)]
    ends = [(one[-1].at_s, 500.0 * sum(1 / n for n in range(1, len(one) + 1))) for one in runs if one]
    assert np.mean([end for end, _ in ends]) == pytest.approx(np.mean([mean for _, mean in ends]), rel=0.12)


def test_slow_periods_begin_at_their_rate_and_last_as_long_as_stated():
    slowdowns = (Slowdown("nic", 1 / 300.0, 1.5, 40.0), Slowdown("gpu", 1 / 900.0, 2.5, 400.0))
    found = list(islice(slow_periods((*slowdowns, Slowdown("never", 0.0, 9.0, 1.0)), 2, 0), 4_000))
    assert [one.at_s for one in found] == sorted(one.at_s for one in found)
    for factor, share, mean_s in ((1.5, 0.75, 40.0), (2.5, 0.25, 400.0)):
        own = [one for one in found if one.factor == factor]
        assert len(own) / len(found) == pytest.approx(share, abs=0.03)
        assert np.mean([one.end_s - one.at_s for one in own]) == pytest.approx(mean_s, rel=0.1)
    assert found[-1].at_s / len(found) == pytest.approx(225.0, rel=0.06)
