"""Schedules against those of Tiresias' simulator, queueing theory, and properties that hold for every policy."""

from __future__ import annotations

import csv
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.answers.jobs import policies
from forerun.answers.jobs.description import cluster_of
from forerun.answers.jobs.failures import FailingNodes, NodeFailures
from forerun.answers.jobs.job import Job
from forerun.answers.jobs.outcome import PolicyOutcome, in_use
from forerun.answers.jobs.placement import Shape
from forerun.answers.jobs.placers import PLACERS
from forerun.answers.jobs.policies import POLICIES, Queue, policy
from forerun.answers.jobs.schedule import schedule
from forerun.answers.jobs.simulation import Terms
from forerun.common.errors import ForerunError, UnknownName
from forerun.interfaces.cli.main import run

GOLDEN = Path(__file__).parents[4] / "shared" / "golden_sched" / "tiresias"
OURS = {
    "fifo": "fifo",
    "fjf": "first-fit",
    "sjf": "smallest",
    "shortest": "srtf",
    "shortest-gpu": "srsf",
    "dlas-gpu": "las",
    "lpjf": "every-second",
}
SCHEDULES = sorted(path.name for path in (GOLDEN / "outputs").glob("*.csv")) if GOLDEN.is_dir() else []


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.skipif(not SCHEDULES, reason="the schedules of Tiresias' simulator are not here (../shared/golden_sched)")
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_job_starts_and_ends_as_in_tiresias(name):
    trace, cluster, scheme, rule = name.split(".")[:4]
    trace_file = next(path for path in (GOLDEN / "inputs").glob("*.csv") if path.stem in (trace, f"{trace}_job"))
    jobs = [
        Job(row["job_id"], int(row["num_gpu"]), int(row["submit_time"]), int(row["duration"]))
        for row in rows_of(trace_file)
    ]
    spec = rows_of(GOLDEN / "inputs" / f"{cluster}.csv")[0]
    shape = Shape(int(spec["num_switch"]), int(spec["num_node_p_switch"]), int(spec["num_gpu_p_node"]))
    placement = "packed" if scheme == "yarn" and rule != "dlas-gpu" else "count"
    found = {job.job.name: (job.start_s, job.end_s) for job in schedule(jobs, shape, OURS[rule], placement)}
    golden = rows_of(GOLDEN / "outputs" / name)
    assert {row["job_id"]: (int(row["start_time"]), int(row["end_time"])) for row in golden} == found


def one_gpu_jobs(number: int, gaps: np.ndarray, durations: np.ndarray) -> list[Job]:
    return [
        Job(str(i), 1, submit, duration)
        for i, (submit, duration) in enumerate(zip(np.cumsum(gaps).tolist(), durations.tolist(), strict=True))
    ]


@pytest.mark.parametrize(
    ("servers", "rate", "mean_wait"), [(1, 0.5, 1.0), (2, 1.5, 1.285714), (4, 3.2, 0.745541), (16, 14.4, 0.369590)]
)
def test_waiting_times_are_those_of_m_m_c(servers, rate, mean_wait):
    """Erlang C with a mean service of 1 s; standard errors from 20 parts of the run."""
    random, number = np.random.default_rng(servers), 40_000
    jobs = one_gpu_jobs(number, random.exponential(1 / rate, number), random.exponential(1.0, number))
    waits = np.array(
        [job.waited_s for job in sorted(schedule(jobs, Shape(1, 1, servers)), key=lambda one: one.job.submit_s)]
    )
    parts = waits.reshape(20, -1).mean(axis=1)
    assert abs(waits.mean() - mean_wait) < 3.0 * parts.std(ddof=1) / 20**0.5


@pytest.mark.parametrize(("variance", "mean_wait"), [(0.0, 2.0), (4.0, 10.0)])
def test_waiting_times_are_those_of_m_g_1(variance, mean_wait):
    """Pollaczek and Khinchine at a load of 0.8."""
    random, number = np.random.default_rng(5), 60_000
    service = np.ones(number)
    if variance:
        service = random.gamma(1.0 / variance, variance, number)
    jobs = one_gpu_jobs(number, random.exponential(1 / 0.8, number), service)
    waits = np.array([job.waited_s for job in schedule(jobs, Shape(1, 1, 1))])
    parts = waits.reshape(12, -1).mean(axis=1)
    assert abs(waits.mean() - mean_wait) < 3.0 * parts.std(ddof=1) / 12**0.5


SHAPE = Shape(2, 2, 4)
job_lists = st.lists(
    st.tuples(st.integers(1, 8), st.integers(0, 60), st.integers(1, 40), st.sampled_from("ab"), st.integers(0, 3)),
    min_size=1,
    max_size=25,
).map(lambda rows: [Job(str(i), *row) for i, row in enumerate(rows)])


@pytest.mark.parametrize("placement", list(PLACERS))
@pytest.mark.parametrize("name", list(POLICIES))
@settings(max_examples=15, deadline=None)
@given(jobs=job_lists)
def test_every_policy_runs_every_job_on_gpus_that_exist(name, placement, jobs):
    done = schedule(jobs, SHAPE, name, placement)
    assert {one.job.name for one in done} == {job.name for job in jobs}
    assert max(in_use(done)[1]) <= SHAPE.total
    for one in done:
        assert sum(end - begin for begin, end in one.ran) == pytest.approx(one.job.duration_s)
        assert one.start_s >= one.job.submit_s
        assert one.jct_s >= one.job.duration_s
    outcome = PolicyOutcome(name, tuple(done), SHAPE.total)
    assert outcome.makespan_s >= max(job.duration_s for job in jobs)
    assert 0 < outcome.utilisation <= 1 + 1e-9
    assert 0 < outcome.fairness <= 1 + 1e-9
    if isinstance(policy(name), Queue):
        assert outcome.preemptions == 0
    times, used = in_use(done)
    held = sum(gpus * (end - begin) for gpus, begin, end in zip(used, times, times[1:], strict=False))
    assert held == pytest.approx(sum(job.gpus * job.duration_s for job in jobs))  # Little's law, in GPU-seconds
    assert 0 <= outcome.fragmentation <= 1 - outcome.utilisation + 1e-9
    there = [[job.job.submit_s for job in done], [job.end_s for job in done]]
    for one, ratio in zip(done, outcome.finish_time_ratios, strict=True):
        number_s = sum(
            max(0, min(one.end_s, end) - max(one.job.submit_s, begin)) for begin, end in zip(*there, strict=True)
        )
        alone_s = one.job.duration_s * max(1, one.job.gpus * number_s / one.jct_s / SHAPE.total)
        assert ratio == pytest.approx(one.jct_s / alone_s)


@settings(max_examples=60, deadline=None)
@given(jobs=job_lists)
def test_backfill_delays_no_reservation(jobs):
    starts = {
        name: {one.job.name: one.start_s for one in schedule(jobs, SHAPE, name)}
        for name in ("fifo", "easy", "conservative")
    }
    ordered = sorted(jobs, key=lambda job: job.submit_s)
    assert starts["easy"][ordered[0].name] == ordered[0].submit_s
    assert all(starts["conservative"][job.name] <= starts["fifo"][job.name] for job in jobs)
    fifo = [starts["fifo"][job.name] for job in ordered]
    assert fifo == sorted(fifo)


def test_easy_starts_what_does_not_delay_the_first_that_waits():
    jobs = [Job("runs", 3, 0, 10), Job("waits", 4, 1, 5), Job("short", 1, 2, 8), Job("long", 1, 2, 9)]
    starts = {one.job.name: one.start_s for one in schedule(jobs, Shape(1, 1, 4), "easy")}
    assert starts == {"runs": 0, "short": 2, "waits": 10, "long": 15}


@settings(max_examples=40, deadline=None)
@given(jobs=job_lists)
def test_a_job_of_the_lowest_priority_changes_no_other(jobs):
    raised = [Job(job.name, job.gpus, job.submit_s, job.duration_s, "", job.priority + 1) for job in jobs]
    alone = {one.job.name: one.end_s for one in schedule(raised, SHAPE, "priority")}
    beside = {one.job.name: one.end_s for one in schedule([*raised, Job("low", 2, 0, 30)], SHAPE, "priority")}
    assert {name: beside[name] for name in alone} == alone


@settings(max_examples=40, deadline=None)
@given(durations=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 30)), min_size=1, max_size=20))
def test_no_policy_beats_the_shortest_remaining_time_on_one_gpu(durations):
    jobs = [Job(str(i), 1, submit, duration) for i, (submit, duration) in enumerate(durations)]
    mean = {
        name: np.mean([one.jct_s for one in schedule(jobs, Shape(1, 1, 1), name)])
        for name in POLICIES
        if name != "every-second"
    }
    assert all(mean["srtf"] <= other + 1e-9 for other in mean.values())


def test_the_group_that_used_least_goes_first():
    jobs = [Job(f"a{i}", 4, 0, 10, "a") for i in range(3)] + [Job("b0", 4, 1, 10, "b")]
    starts = {one.job.name: one.start_s for one in schedule(jobs, Shape(1, 1, 4), "fair-share")}
    assert starts == {"a0": 0, "b0": 10, "a1": 20, "a2": 30}


def test_a_preempted_job_loses_what_a_restart_costs():
    jobs = [Job("long", 4, 0, 100), Job("short", 4, 10, 10)]
    free, paid = (
        {one.job.name: one.end_s for one in schedule(jobs, Shape(1, 1, 4), "srtf", terms=Terms(resume_s=cost))}
        for cost in (0, 5)
    )
    assert free == {"short": 20, "long": 110}
    assert paid == {"short": 20, "long": 115}


def test_a_job_displaces_the_last_ones_and_the_others_stay_on_their_nodes():
    jobs = [
        Job("first", 4, 0, 100, priority=2),
        Job("second", 4, 0, 100, priority=1),
        Job("third", 4, 0, 100, priority=0),
        Job("urgent", 8, 10, 20, priority=3),
        Job("too wide", 12, 10, 5, priority=2),
    ]
    done = {one.job.name: one for one in schedule(jobs, Shape(1, 3, 4), "priority", "packed")}
    assert done["first"].ran == ((0, 100),)
    assert done["urgent"].ran == ((10, 30),)
    assert done["too wide"].ran == ((100, 105),)
    assert done["second"].ran == done["third"].ran == ((0, 10), (30, 100), (105, 125))


def test_packed_jobs_stay_on_a_node_where_they_fit():
    jobs = [Job("three", 3, 0, 10), Job("two", 2, 0, 10), Job("six", 6, 0, 10)]
    ends = {one.job.name: one.end_s for one in schedule(jobs, Shape(1, 2, 4), "first-fit", "packed")}
    assert ends == {"three": 10, "two": 10, "six": 20}
    spread = {one.job.name: one.end_s for one in schedule(jobs[:2], Shape(1, 2, 4), "fifo", "spread")}
    assert spread == {"three": 10, "two": 10}


def test_mistakes_are_one_line():
    with pytest.raises(UnknownName, match="did you mean fifo"):
        schedule([Job("a", 1, 0, 1)], SHAPE, "fifoo")
    with pytest.raises(UnknownName, match="did you mean packed"):
        schedule([Job("a", 1, 0, 1)], SHAPE, "fifo", "pack")
    with pytest.raises(ForerunError, match="job a: 9 GPUs have no place on 16 under packed"):
        schedule([Job("a", 9, 0, 1)], SHAPE, "fifo", "packed")


FAILING = NodeFailures(per_1000_node_days=2e5, repair_s=50.0, checkpoint_s=10.0, seed=3)


@pytest.mark.parametrize("name", list(POLICIES))
@settings(max_examples=10, deadline=None)
@given(jobs=job_lists)
def test_jobs_whose_nodes_fail_go_on_from_their_checkpoints(name, jobs):
    done = schedule(jobs, SHAPE, name, "packed", Terms(failures=FAILING))
    assert {one.job.name for one in done} == {job.name for job in jobs}
    assert max(in_use(done)[1]) <= SHAPE.total
    for one in done:
        lost_s = one.ran_s - one.job.duration_s
        assert -1e-6 < lost_s <= one.failures * FAILING.checkpoint_s + 1e-6


def test_a_failed_node_stops_its_job_and_is_away_until_it_is_repaired():
    """Two nodes; the first failure finds the job after more than one checkpoint, and the other node takes it over."""
    rare = NodeFailures(per_1000_node_days=1e6, repair_s=1e4, checkpoint_s=10.0)
    (at_s, node), (next_s, _) = itertools.islice(rare.draw(2), 2)
    jobs = [Job("a", 2, 0, at_s + 5.0), Job("b", 4, 0, at_s + 5.0)]
    done = {one.job.name: one for one in schedule(jobs, Shape(1, 2, 4), "first-fit", "packed", Terms(failures=rare))}
    hit = done["ab"[node]]
    assert hit.ran[0] == (0.0, at_s)
    assert hit.failures >= 1
    assert PolicyOutcome("first-fit", tuple(done.values()), 8).goodput < 1.0
    assert next_s > at_s
    with pytest.raises(ForerunError, match="choose placement packed, nearest, rails or spread"):
        schedule(jobs, Shape(1, 2, 4), "fifo", terms=Terms(failures=rare))


def test_a_group_never_has_more_than_its_quota():
    jobs = [Job(f"a{i}", 2, 0, 10, "a") for i in range(3)] + [Job("b0", 2, 5, 10, "b")]
    done = schedule(jobs, Shape(1, 1, 8), "fair-share", terms=Terms(quotas={"a": 4}))
    assert {one.job.name: one.start_s for one in done} == {"a0": 0, "a1": 0, "a2": 10, "b0": 5}
    with pytest.raises(ForerunError, match="more than the quota of group a"):
        schedule([Job("wide", 6, 0, 1, "a")], Shape(1, 1, 8), "fair-share", terms=Terms(quotas={"a": 4}))


def test_gittins_runs_the_job_that_is_likeliest_to_end():
    """Of ten jobs nine take 1 s and one takes 100 s: who has run for more than 1 s is the long one, and waits."""
    jobs = [Job("long", 1, 0, 100)] + [Job(f"short {i}", 1, 5 + i, 1) for i in range(9)]
    done = {one.job.name: one for one in schedule(jobs, Shape(1, 1, 1), "gittins")}
    assert done["long"].ran[0] == (0, 5)
    assert all(done[f"short {i}"].ran == ((5 + i, 6 + i),) for i in range(9))
    assert done["long"].end_s == 109
    assert {name: one.preemptions for name, one in done.items() if one.preemptions} == {"long": 1}


@pytest.mark.parametrize("seed", range(3))
def test_gittins_is_no_worse_than_first_in_first_out_where_long_jobs_are_rare(seed):
    random, number = np.random.default_rng(seed), 2_000
    service = np.where(random.random(number) < 0.9, 1.0, 20.0)
    jobs = one_gpu_jobs(number, random.exponential(2.9 / 0.8, number), service)
    mean = {name: np.mean([one.jct_s for one in schedule(jobs, Shape(1, 1, 1), name)]) for name in ("fifo", "gittins")}
    assert mean["gittins"] < 0.6 * mean["fifo"]


@pytest.mark.parametrize(
    ("given", "repair_s", "checkpoint_s"),
    [({}, 86_400, 3_600), ({"repair_hours": 2}, 7_200, 3_600), ({"checkpoint_minutes": 30}, 86_400, 1_800)],
)
def test_failures_have_the_units_and_the_defaults_that_the_page_names(given, repair_s, checkpoint_s):
    described = {
        "nodes": 2,
        "jobs": [{"name": "a", "gpus": 8, "duration_s": 60}],
        "failures": {"per_1000_node_days": 6.5, **given},
    }
    request = cluster_of(described, "file")
    assert request.terms.failures == NodeFailures(6.5, repair_s, checkpoint_s, 0)


@pytest.mark.parametrize("name", ["first-fit", "sjf", "fewest-gpus-first", "smallest", "srtf", "srsf", "priority"])
@settings(max_examples=20, deadline=None)
@given(jobs=job_lists)
def test_no_job_waits_while_enough_gpus_are_free(name, jobs):
    done = schedule(jobs, SHAPE, name)
    times, used = in_use(done)
    for time, gpus in zip(times, used, strict=True):
        for one in done:
            runs = any(begin <= time < end for begin, end in one.ran)
            waits = one.job.submit_s <= time < one.end_s and not runs
            assert not waits or one.job.gpus > SHAPE.total - gpus
    assert PolicyOutcome(name, tuple(done), SHAPE.total).fragmentation == 0


@pytest.mark.parametrize("name", list(POLICIES))
@settings(max_examples=10, deadline=None)
@given(jobs=job_lists)
def test_no_schedule_is_shorter_than_its_work_or_its_longest_job(name, jobs):
    outcome = PolicyOutcome(name, tuple(schedule(jobs, SHAPE, name)), SHAPE.total)
    work_s = sum(job.gpus * job.duration_s for job in jobs) / SHAPE.total
    assert outcome.makespan_s >= max(work_s, max(job.duration_s for job in jobs)) - 1e-9


@settings(max_examples=60, deadline=None)
@given(jobs=job_lists)
def test_easy_keeps_the_first_reservation_of_the_job_at_the_head(jobs):
    reserved: dict[str, float] = {}
    plain = policies._reservation

    def noted(head, view):
        at_s, spare = plain(head, view)
        reserved.setdefault(head.job.name, at_s)
        return at_s, spare

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policies, "_reservation", noted)
        starts = {one.job.name: one.start_s for one in schedule(jobs, SHAPE, "easy")}
    assert all(starts[name] <= at_s for name, at_s in reserved.items())


@settings(max_examples=60, deadline=None)
@given(jobs=job_lists)
def test_no_job_starts_later_than_the_reservation_of_its_arrival(jobs):
    reserved: dict[str, float] = {}
    plain = policies.ConservativeBackfill._reserve

    def noted(rule, job, now_s):
        at_s = reserved[job.job.name] = plain(rule, job, now_s)
        assert now_s == job.job.submit_s, "a reservation is made once, on arrival"
        return at_s

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policies.ConservativeBackfill, "_reserve", noted)
        starts = {one.job.name: one.start_s for one in schedule(jobs, SHAPE, "conservative")}
    assert starts == reserved


@pytest.mark.parametrize("placement", ["packed", "spread"])
@settings(max_examples=40, deadline=None)
@given(jobs=job_lists)
def test_no_job_waits_for_gpus_that_jobs_behind_it_hold(placement, jobs):
    """On nodes: whoever waits under a fixed priority finds no place even without all jobs of lower priority."""
    done = schedule(jobs, SHAPE, "priority", placement)
    times, _ = in_use(done)
    for time in times:
        runs = {one.job.name: any(begin <= time < end for begin, end in one.ran) for one in done}
        for one in done:
            if runs[one.job.name] or not one.job.submit_s <= time < one.end_s:
                continue
            before = sum(o.job.gpus for o in done if runs[o.job.name] and o.job.priority >= one.job.priority)
            least = SHAPE.gpus if placement == "packed" else SHAPE.total
            assert before + one.job.gpus > least


@pytest.mark.parametrize(
    "described",
    [
        {},
        {"nodes": 0},
        {"nodes": "two", "jobs": []},
        {"nodes": 1, "jobs": []},
        {"nodes": 1, "jobs": [{"name": "a"}]},
        {"nodes": 1, "jobs": [{"name": "a", "gpus": -1, "duration_s": 1}]},
        {"nodes": 1, "jobs": [{"name": "a", "gpus": 1, "duration_s": float("nan")}]},
        {"nodes": 1, "jobs": [{"name": "a", "gpus": 1, "duration_s": float("inf")}]},
        {"nodes": 1, "jobs": [{"name": "a", "gpus": 1, "duration_s": 1, "gpu": 1}]},
        {"nodes": 1, "jobs": "a"},
        {"nodes": 1, "drawn": {"number": 5, "per_hour": 1, "median_s": 1, "gpus": {}}},
        {"nodes": 1, "drawn": {"number": 10**9, "per_hour": 1, "median_s": 1, "gpus": {1: 1}}},
        {"nodes": 1, "trace": "nowhere.csv"},
        {"nodes": 1, "policies": ["best"], "jobs": [{"name": "a", "gpus": 1, "duration_s": 1}]},
        {"nodes": 1, "policies": "fifo", "jobs": [{"name": "a", "gpus": 1, "duration_s": 1}]},
        {"nodes": 1, "failures": {"per_1000_node_days": 0}, "jobs": [{"name": "a", "gpus": 1, "duration_s": 1}]},
        {"nodes": 10**12, "jobs": [{"name": "a", "gpus": 1, "duration_s": 1}]},
        {"gpu_kinds": {}},
        {"gpu_kinds": {"a": 1}, "jobs": [{"name": "a", "gpus": 1, "steps": 1, "steps_per_s": {"b": 1}}]},
    ],
)
def test_a_file_that_says_something_wrong_is_one_line(described, tmp_path, capsys):
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(described))
    assert run(["cluster", str(path)]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("error: ")
    assert "\n" not in said


def test_a_node_that_is_away_does_not_fail_again_and_comes_back_in_time():
    failing = FailingNodes(NodeFailures(per_1000_node_days=1e5, repair_s=600.0, checkpoint_s=200.0, seed=4), 2)
    drawn = list(itertools.islice(NodeFailures(1e5, 600.0, 200.0, 4).draw(2), 200))
    back_s = {0: 0.0, 1: 0.0}
    expected = []
    for time_s, node in drawn:
        if time_s >= back_s[node]:
            expected.append((time_s, node))
            back_s[node] = time_s + 600.0
    found = []
    while (failed := failing.fail(drawn[-1][0])) is not None:
        found.append(failed)
        assert failed[1] in failing.away
        assert failing.next_failure_s > failed[0]
        if len(found) % 3 == 0:
            failing.repaired(failed[0])
    assert found == expected
    assert len(found) < len(drawn), "some draws were of nodes that were away"
    assert failing.next_repair_s <= max(back_s.values())
    failing.repaired(max(back_s.values()))
    assert (failing.away, failing.next_repair_s) == ([], math.inf)
    never = FailingNodes(None, 2)
    assert (never.fail(1e9), never.next_failure_s, never.away) == (None, math.inf, [])


def test_jobs_that_sink_at_once_go_on_in_the_order_of_arrival():
    """The first and the third job reach the limit of the first queue together; the second one has not reached it."""
    rule = policies.LeastAttained((100.0, 200.0))
    rule.prepare([Job("first", 1, 0, 500), Job("second", 1, 0, 500), Job("third", 1, 0, 500)])
    now = policies.Now(
        number=np.array([2, 0, 1]),
        gpus=np.ones(3, dtype=np.int64),
        duration_s=np.full(3, 500.0),
        priority=np.zeros(3),
        done_s=np.array([100.0, 100.0, 50.0]),
        runs=np.ones(3, dtype=bool),
    )
    keys = rule.keys(now)
    assert now.number[np.argsort(keys, kind="stable")].tolist() == [1, 0, 2]
