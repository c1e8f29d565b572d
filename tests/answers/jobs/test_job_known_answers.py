"""Schedules, shares, placements and figures that follow by hand."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from forerun.answers.jobs.description import cluster_of
from forerun.answers.jobs.elastic_rounds import share_out
from forerun.answers.jobs.failures import NodeFailures
from forerun.answers.jobs.job import Job, Scaling, Scheduled
from forerun.answers.jobs.outcome import GroupOutcome, PolicyOutcome, in_use
from forerun.answers.jobs.placement import Shape
from forerun.answers.jobs.placers import placer
from forerun.answers.jobs.rounds import in_rounds
from forerun.answers.jobs.schedule import schedule
from forerun.answers.jobs.share_policies import shares
from forerun.answers.jobs.shares import Demand
from forerun.answers.jobs.simulation import Terms
from forerun.answers.jobs.trace_file import read_jobs
from forerun.answers.jobs.unlike_description import unlike_cluster_of
from forerun.answers.jobs.unlike_gpus import SteppedJob, read_rates, read_stepped_jobs
from forerun.common.errors import ForerunError


def ran(jobs, gpus, policy, **terms):
    found = schedule(jobs, Shape(1, 1, gpus), policy, terms=Terms(**terms))
    return {one.job.name: one.ran for one in found}


def starts(jobs, gpus, policy):
    return {one.job.name: one.start_s for one in schedule(jobs, Shape(1, 1, gpus), policy)}


def test_a_file_has_the_defaults_that_the_page_names():
    request = cluster_of({"nodes": 3, "jobs": [{"name": "a", "gpus": 2, "duration_s": 5}]}, "file")
    assert (request.name, request.gpus, request.policies) == ("cluster", 24, ("fifo", "easy", "srtf"))
    assert (request.shape, request.placement) == (Shape(1, 3, 8), "packed")
    assert (request.terms.resume_s, request.terms.failures, dict(request.terms.quotas)) == (0, None, {})
    assert request.jobs == (Job("a", 2, 0, 5),)
    assert request.cluster_words == "24 GPUs in 3 nodes"


@pytest.mark.parametrize("kinds", [{"nodes": 3}, {"gpu_kinds": {"fast": 4}}])
def test_a_file_names_a_policy_or_leaves_them_out(kinds):
    job = {"name": "a", "gpus": 2} | (
        {"duration_s": 5} if "nodes" in kinds else {"steps": 5, "steps_per_s": {"fast": 1}}
    )
    read = cluster_of if "nodes" in kinds else unlike_cluster_of
    assert read({**kinds, "jobs": [job]}, "file", Path()).policies
    with pytest.raises(ForerunError, match=r"file: policies: .* at least 1 item"):
        read({**kinds, "policies": [], "jobs": [job]}, "file", Path())


def test_drawn_jobs_have_the_rate_the_median_and_the_weights_of_the_file():
    drawn = {"number": 4000, "per_hour": 60, "median_s": 500, "gpus": {1: 3, 8: 1}}
    jobs = cluster_of({"nodes": 3, "drawn": drawn}, "file").jobs
    assert jobs[-1].submit_s == pytest.approx(60 * 4000, rel=0.05)
    assert np.median([job.duration_s for job in jobs]) == pytest.approx(500, rel=0.1)
    assert np.std(np.log([job.duration_s for job in jobs])) == pytest.approx(1.5, rel=0.05)
    assert np.mean([job.gpus == 1 for job in jobs]) == pytest.approx(0.75, abs=0.03)
    assert cluster_of({"nodes": 3, "drawn": {**drawn, "seed": 0}}, "file").jobs == jobs
    assert cluster_of({"nodes": 3, "drawn": {**drawn, "seed": 1}}, "file").jobs != jobs


def test_a_job_of_a_file_with_a_step_has_its_traffic():
    job = {"name": "a", "gpus": 2, "duration_s": 50, "step_s": 2, "network_share": 0.25}
    (found,) = cluster_of({"nodes": 1, "jobs": [job]}, "file").jobs
    assert (found.traffic.compute_s, found.traffic.network_s) == (1.5, 0.5)


def test_failures_come_with_the_rate_from_the_start():
    def times_s(rate, nodes):
        return [at_s for at_s, _ in itertools.islice(NodeFailures(rate, 1, 1).draw(nodes), 2000)]

    assert times_s(1, 5)[0] == pytest.approx(10 * times_s(10, 5)[0])
    assert times_s(1, 5)[0] == pytest.approx(2 * times_s(1, 10)[0])
    assert times_s(4, 5)[-1] == pytest.approx(1000 * 86_400 / (4 * 5) * 2000, rel=0.1)
    assert {node for _, node in itertools.islice(NodeFailures(1, 1, 1).draw(3), 100)} == {0, 1, 2}
    assert times_s(1, 5) == [at_s for at_s, _ in itertools.islice(NodeFailures(1, 1, 1, seed=0).draw(5), 2000)]


@pytest.mark.parametrize(("done_s", "kept_s"), [(0, 0), (9.5, 0), (10, 10), (29.9, 20)])
def test_what_a_failure_leaves_is_the_last_checkpoint(done_s, kept_s):
    assert NodeFailures(1, 1, checkpoint_s=10).kept_s(done_s) == kept_s


def test_least_attained_service_sinks_at_3250_and_7200_gpu_seconds():
    jobs = [Job("a", 1, 0, 10_000), Job("b", 1, 100, 5_000)]
    assert ran(jobs, 1, "las") == {
        "a": ((0, 3250), (6500, 10_450), (12_200, 15_000)),
        "b": ((3250, 6500), (10_450, 12_200)),
    }


def test_easy_counts_what_is_spare_beside_the_reservation():
    jobs = [Job("runs", 5, 0, 10), Job("head", 6, 1, 20), Job("wide", 2, 2, 100), Job("long", 1, 2, 100)]
    jobs.append(Job("short", 1, 3, 7))
    found = starts(jobs, 8, "easy")
    assert found == {"runs": 0, "head": 10, "wide": 2, "short": 3, "long": 30}


def test_conservative_backfill_reserves_for_every_job():
    jobs = [
        Job("runs", 3, 0, 10),
        Job("all", 4, 1, 5),
        Job("fits", 1, 1, 9),
        Job("long", 1, 1, 20),
        Job("two", 2, 1, 3),
        Job("last", 2, 2, 5),
        Job("one", 1, 3, 3),
    ]
    found = starts(jobs, 4, "conservative")
    assert found == {"runs": 0, "fits": 1, "all": 10, "long": 15, "two": 15, "one": 15, "last": 18}


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("fifo", [0, 10, 14, 14]),
        ("first-fit", [0, 10, 5, 14]),
        ("sjf", [0, 14, 5, 10]),
        ("fewest-gpus-first", [0, 14, 5, 10]),
        ("every-second", [0, 10, 14, 17]),
    ],
)
def test_queues_start_jobs_in_their_order(policy, expected):
    """Four GPUs: one job has three of them until 10, and three come at 5."""
    jobs = [Job("a", 3, 0, 10), Job("b", 4, 5, 4), Job("c", 1, 5, 3), Job("d", 2, 5, 4)]
    if policy in ("sjf", "fewest-gpus-first"):
        jobs[1] = Job("b", 4, 5, 9)
    found = starts(jobs, 4, policy)
    assert [found[name] for name in "abcd"] == expected


@pytest.mark.parametrize(
    ("policy", "first"),
    [("smallest", "narrow"), ("srtf", "short"), ("srsf", "narrow"), ("priority", "urgent")],
)
def test_rankings_stop_what_runs_for_who_goes_first(policy, first):
    jobs = [
        Job("runs", 4, 0, 100, priority=1),
        Job("short", 4, 10, 5),
        Job("narrow", 1, 10, 19),
        Job("urgent", 3, 10, 40, priority=2),
    ]
    found = ran(jobs, 4, policy)
    assert found[first][0][0] == 10
    assert found["runs"][0] == (0, 10)
    assert len(found["runs"]) == 2
    assert sum(end - begin for begin, end in found["runs"]) == 100


def test_packed_jobs_take_the_first_node_with_room_and_whole_nodes_of_one_switch():
    place = placer("packed", Shape(2, 2, 4))
    assert place.place(3) == ((0, 3),)
    assert place.place(2) == ((1, 2),)
    assert place.place(6) == ((2, 4), (3, 2))
    assert place.place(1) == ((0, 1),)
    assert place.place(3) is None
    assert place.free == 4
    place.release(((0, 3),), 3)
    assert place.place(3) == ((0, 3),)
    assert place.place(2) == ((1, 2),)
    assert place.place(2) == ((3, 2),)
    assert place.place(1) is None
    assert (place.could_ever(8), place.could_ever(9)) == (True, False)


def test_a_spread_job_takes_the_emptiest_nodes_of_all_switches():
    place = placer("spread", Shape(2, 2, 4))
    assert place.place(3) == ((0, 3),)
    assert place.place(9) == ((1, 4), (2, 4), (3, 1))
    assert place.place(4) == ((3, 3), (0, 1))
    assert place.place(1) is None
    assert (place.could_ever(16), place.could_ever(17)) == (True, False)


def test_figures_of_an_outcome():
    jobs = (
        Scheduled(Job("a", 2, 0, 10, "x"), 0, 10, 0, ((0, 10),)),
        Scheduled(Job("b", 4, 2, 10, "y"), 4, 22, 2, ((4, 6), (8, 10), (12, 22)), failures=1),
        Scheduled(Job("c", 2, 2, 5, "y"), 10, 27, 0, ((10, 27),)),
    )
    found = PolicyOutcome("p", jobs, 8)
    assert found.mean_jct_s == pytest.approx((10 + 20 + 25) / 3)
    assert (found.jct_s(0.5), found.jct_s(1.0)) == (20, 25)
    assert found.mean_wait_s == pytest.approx((0 + 6 + 8) / 3)
    assert (found.makespan_s, found.preemptions, found.failures) == (27, 2, 1)
    held = 20 + 56 + 34
    assert found.utilisation == pytest.approx(held / (8 * 27))
    assert found.goodput == pytest.approx((20 + 40 + 10) / held)
    assert found.fairness == pytest.approx((1 + 2 + 5) ** 2 / (3 * (1 + 4 + 25)))
    assert found.finish_time_ratios == pytest.approx((1, 20 / (10 * 4 * 2.4 / 8), 5)), "2.6, 2.4 and 2.12 jobs contend"
    assert found.finish_time_ratio(0.5) == pytest.approx(20 / 12)
    free_while_one_waits = 2 * 6 + 2 * 2 + 2 * 6 + 2 * 2 + 2 * 6
    assert found.fragmentation == pytest.approx(free_while_one_waits / (8 * 27))
    groups = found.by_group()
    assert list(groups) == ["x", "y"]
    assert groups["x"] == GroupOutcome(1, 10, 0, 20, 1, pytest.approx(1))
    assert groups["y"] == GroupOutcome(2, 22.5, 7, 90, pytest.approx(50 / 90), pytest.approx((5 + 5 / 3) / 2))
    times, used = in_use(jobs)
    assert dict(zip(times, used, strict=True)) == {0: 2, 4: 6, 6: 2, 8: 6, 10: 2, 12: 6, 22: 2, 27: 0}


def test_a_job_that_had_other_gpus_needs_those_of_its_cheapest_size():
    job = Job("a", 4, 0, 100, scaling=Scaling((1, 4, 8), (0.5, 1.0, 1.5)))
    found = Scheduled(job, 0, 90, 0, ((0, 50), (50, 90)), held=(4, 8))
    assert (found.held_gpu_s, found.needed_gpu_s) == (4 * 50 + 8 * 40, 100 * 2)
    assert Scheduled(job, 0, 100, 0, ((0, 100),)).needed_gpu_s == 400


@pytest.mark.parametrize("policy", ["pollux", "sia"])
@pytest.mark.parametrize("restart_s", [0, 5])
def test_an_elastic_job_that_loses_its_gpus_is_counted_and_pays_the_restart(policy, restart_s):
    """The small job gains more for each GPU. GPUs are shared out at whole minutes."""
    big = Job("big", 4, 0, 1000, scaling=Scaling((4,), (1.0,)))
    small = Job("small", 1, 10, 30, scaling=Scaling((1,), (1.0,)))
    found = {one.job.name: one for one in share_out([big, small], Shape(1, 1, 4), policy, Terms(resume_s=restart_s))}
    assert found["small"].ran == ((60, 90),)
    assert found["big"].ran == ((0, 60), (120, 120 + restart_s + 940))
    assert found["big"].held == (4, 4)
    assert (found["big"].preemptions, found["small"].preemptions) == (1, 0)


def test_an_elastic_job_that_only_moves_is_not_stopped():
    """It has all four GPUs until the other one comes, and again after that one has ended at 120."""
    wide = Job("wide", 4, 0, 400, scaling=Scaling((2, 4), (0.5, 1.0)))
    other = Job("other", 2, 30, 60, scaling=Scaling((2,), (1.0,)))
    found = {one.job.name: one for one in share_out([wide, other], Shape(1, 1, 4), "pollux")}
    assert found["other"].ran == ((60, 120),)
    assert found["wide"].held == (4, 2, 4)
    assert found["wide"].ran == ((0, 60), (60, 120), (120, 120 + 400 - 60 - 30))
    assert found["wide"].preemptions == 0


def demand(**given):
    usual = {
        "names": [0, 1],
        "rates": np.ones((2, 1)),
        "gpus": np.ones(2),
        "weights": np.ones(2),
        "steps_left": np.array([100.0, 300.0]),
        "waited_s": np.zeros(2),
        "workers": np.ones(1),
    }
    return Demand(**{**usual, **given})


@pytest.mark.parametrize(
    ("policy", "given", "expected"),
    [
        ("isolated", {}, [[0.5], [0.5]]),
        ("isolated", {"workers": np.array([8.0])}, [[1], [1]]),
        ("isolated", {"workers": np.array([1.0, 3.0]), "gpus": np.array([1.0, 8.0])}, [[0.25, 0.75], [1 / 16, 3 / 16]]),
        ("max-min-fairness-perf", {}, [[0.5], [0.5]]),
        ("max-min-fairness-perf", {"weights": np.array([1.0, 3.0])}, [[0.25], [0.75]]),
        ("max-min-fairness-perf", {"gpus": np.array([1.0, 2.0]), "workers": np.array([2.0])}, [[1], [0.5]]),
        ("max-min-fairness", {"rates": np.array([[1.0], [9.0]])}, [[0.5], [0.5]]),
        ("min-total-duration-perf", {}, [[0.25], [0.75]]),
        ("min-total-duration-perf", {"rates": np.array([[1.0], [3.0]])}, [[0.5], [0.5]]),
        ("finish-time-fairness-perf", {}, [[0.5], [0.5]]),
        (
            "finish-time-fairness-perf",
            {"steps_left": np.array([100.0, 100.0]), "waited_s": np.array([0.0, 100.0])},
            [[(3 - 5**0.5) / 2], [(5**0.5 - 1) / 2]],
        ),
        ("max-sum-throughput-perf", {"rates": np.array([[1.0], [3.0]])}, [[0], [1]]),
        ("fifo-perf", {}, [[1], [0]]),
        ("fifo-perf", {"rates": np.array([[2.0, 1.0], [2.0, 1.0]]), "workers": np.ones(2)}, [[1, 0], [0, 1]]),
        ("fifo-perf", {"rates": np.array([[1.0, 2.0], [0.0, 1.0]]), "workers": np.ones(2)}, [[0, 1], [0, 0]]),
    ],
)
def test_shares_of_two_jobs(policy, given, expected):
    assert shares(policy).of(demand(**given)) == pytest.approx(np.array(expected, float), abs=1e-4)


def test_jobs_of_equal_shares_take_rounds_in_turn():
    """One GPU; a round lasts 360 s, and 720 steps are two of them."""
    jobs = [SteppedJob("a", 1, 0.0, 720, (1.0,)), SteppedJob("b", 1, 0.0, 720, (1.0,))]
    found = {one.job.name: one for one in in_rounds(jobs, [1], "max-min-fairness-perf")}
    assert found["a"].ran == ((0, 360), (720, 1080))
    assert found["b"].ran == ((360, 720), (1080, 1440))
    assert (found["a"].preemptions, found["b"].preemptions) == (1, 1)
    assert found["a"].job.duration_s == 720


def test_a_job_of_three_times_the_weight_gets_three_of_four_rounds():
    jobs = [SteppedJob("a", 1, 0.0, 7200, (2.0,)), SteppedJob("b", 1, 0.0, 7200, (2.0,), weight=3.0)]
    found = {one.job.name: one for one in in_rounds(jobs, [1], "max-min-fairness-perf")}
    assert found["b"].end_s == pytest.approx(3600 / 0.75, abs=360)
    assert found["a"].end_s == 7200
    early = sum(min(end_s, 2880) - begin_s for begin_s, end_s in found["b"].ran if begin_s < 2880)
    assert early == 6 * 360


def test_policies_that_do_not_know_rates_fill_kinds_in_a_drawn_order():
    """Alone with two GPUs a job takes turns between the slow and the fast one."""
    (found,) = in_rounds([SteppedJob("a", 1, 0.0, 20_000, (1.0, 4.0))], [1, 1], "isolated")
    assert 6_000 < found.end_s < 14_000
    (knows,) = in_rounds([SteppedJob("a", 1, 0.0, 20_000, (1.0, 4.0))], [1, 1], "fifo-perf")
    assert knows.end_s == 5_000


def test_a_round_ends_with_the_last_of_its_jobs():
    jobs = [SteppedJob("short", 1, 0.0, 100, (1.0,)), SteppedJob("long", 1, 0.0, 500, (1.0,))]
    found = {one.job.name: one for one in in_rounds(jobs, [2], "fifo-perf")}
    assert found["short"].ran == ((0, 100),)
    assert found["long"].ran == ((0, 500),)
    late = in_rounds([*jobs, SteppedJob("late", 2, 150.0, 10, (1.0,))], [2], "fifo-perf")
    assert {one.job.name: one.ran for one in late}["late"] == ((500, 510),)


def written(folder, text, name="jobs.csv"):
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "text",
    [
        "job_id,num_gpu,submit_time,duration\na,2,100,50\nb,1,90,7\nc,0,95,7\nd,1,95,0\n",
        "name,gpus,submit_s,duration_s\na,2,100,50\nb,1,90,7\nc,0,95,7\nd,1,95,0\n",
        "name,gpu_num,creation_time,scheduled_time,deletion_time\na,2,100,110,160\nb,1,90,90,97\nc,0,95,1,8\nd,1,95,1,1\n",
        "id,gpus,time,start_time,end_time\na,2,100,110,160\nb,1,90,90,97\nc,0,95,1,8\nd,1,95,,8\n",
        "jobid,num_gpus,submitted_time,runtime\na,2,2024-05-01 00:01:40,50\nb,1,2024-05-01T02:01:30+02:00,7\n"
        "c,0,2024-05-01,7\nd,1,2024-05-01,0\n",
    ],
)
def test_traces_of_jobs_in_the_columns_of_many_clusters(text, tmp_path):
    found = read_jobs(written(tmp_path, text))
    assert found.jobs == (Job("b", 1, 0, 7), Job("a", 2, 10, 50))
    assert found.left_out == 2


def test_a_trace_may_have_groups_and_priorities_and_lack_names(tmp_path):
    text = "num_gpu,submit_time,duration,vc,priority\n1,5,10,x,3\n2,6,10,,\n"
    assert read_jobs(written(tmp_path, text)).jobs == (Job("job 0", 1, 0, 10, "x", 3), Job("job 1", 2, 1, 10))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("name,submit_time,duration\na,1,2\n", "no column for gpus"),
        ("gpus,duration\n1,2\n", "no column for submit"),
        ("gpus,time,start_time\n1,2,3\n", "no column for the duration"),
        ("gpus,time,duration\n0,2,3\n", "no job has a GPU"),
        ("gpus,time,duration\nx,2,3\n", "line 2: gpus: expected a number, got 'x'"),
        ("gpus,time,duration\n1,2,1e16\n", "line 2: duration: expected a number"),
        ("gpus,time,duration\n1,soon,3\n", "line 2: expected seconds or a date and time, got 'soon'"),
    ],
)
def test_a_trace_that_makes_no_sense_is_one_line(text, problem, tmp_path):
    with pytest.raises(ForerunError, match=problem):
        read_jobs(written(tmp_path, text))


RATES = {"fast": {"('small', 1)": {"null": 4.0}, "('big', 2)": {"null": 0.0}}, "slow": {"('big', 2)": {"null": 3}}}


def gavel(kind="small", steps=10, gpus=1, weight=1.0, arrival=0.0):
    return "\t".join(map(str, (kind, "x", "x", "x", "x", steps, gpus, weight, "x", arrival))) + "\n"


def test_a_trace_and_rates_of_gavel(tmp_path):
    rates, _ = read_rates(written(tmp_path, json.dumps(RATES), "rates.json"), ["slow", "fast"])
    text = gavel("big", 20, 2, 2.5, 30.0) + "\n" + gavel()
    assert read_stepped_jobs(written(tmp_path, text), ["slow", "fast"], rates) == (
        SteppedJob("1", 1, 0.0, 10, (0.0, 4.0), 1.0, "small", "small"),
        SteppedJob("0", 2, 30.0, 20, (3.0, 0.0), 2.5, "big", "big"),
    )
    with pytest.raises(ForerunError, match="line 1: no throughput of big on 2 GPUs"):
        read_stepped_jobs(written(tmp_path, gavel("big", gpus=2)), ["fast"], rates)
    with pytest.raises(ForerunError, match="no throughputs of GPU kind new"):
        read_rates(tmp_path / "rates.json", ["new"])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (gavel(steps=0), "should be positive"),
        (gavel(gpus=0), "should be positive"),
        (gavel(weight=0), "should be positive"),
        (gavel(arrival=-1), "at least 0"),
        (gavel(arrival="inf"), "at least 0"),
        (gavel(steps="many"), "should be numbers"),
        ("a\tb\n", "expected 10 columns between tabs, got 2"),
        ("\n", "has no jobs"),
    ],
)
def test_a_trace_of_gavel_that_makes_no_sense_is_one_line(text, problem, tmp_path):
    with pytest.raises(ForerunError, match=problem):
        read_stepped_jobs(written(tmp_path, text), ["fast"], {"fast": {("small", 1): 4.0}})


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ({"small": {"null": 1}}, "expected \\('job type', GPUs\\), got 'small'"),
        ({"('small', 1, 2)": {"null": 1}}, "expected \\('job type', GPUs\\)"),
        ({"(1, 1)": {"null": 1}}, "expected \\('job type', GPUs\\)"),
        ({"('small', 'x')": {"null": 1}}, "expected \\('job type', GPUs\\)"),
        ({"('small', 1)": {"null": -1}}, "null should be the steps a second"),
        ({"('small', 1)": {}}, "null should be the steps a second"),
        ({"('small', 1)": 1}, "null should be the steps a second"),
    ],
)
def test_rates_that_make_no_sense_are_one_line(rows, problem, tmp_path):
    with pytest.raises(ForerunError, match=problem):
        read_rates(written(tmp_path, json.dumps({"fast": rows})), ["fast"])
