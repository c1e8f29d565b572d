"""Jobs on unlike GPUs against the schedules of Gavel's simulator, another solver, and properties of every policy."""

from __future__ import annotations

import csv
import itertools
import json
import re
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from forerun.answers.jobs.failures import NodeFailures
from forerun.answers.jobs.interior_point import Rows, Vector, maximised
from forerun.answers.jobs.outcome import in_use
from forerun.answers.jobs.rounds import in_rounds
from forerun.answers.jobs.share_policies import SHARES, shares
from forerun.answers.jobs.shares import Demand
from forerun.answers.jobs.units import rounded
from forerun.answers.jobs.unlike_description import unlike_cluster_of
from forerun.answers.jobs.unlike_gpus import SteppedJob
from forerun.answers.jobs.unlike_nodes import NodesOfKinds
from forerun.common.errors import ForerunError, UnknownName
from forerun.interfaces.cli.main import run

GOLDEN = Path(__file__).parents[4] / "shared" / "golden_sched" / "gavel"
golden = pytest.mark.skipif(
    not GOLDEN.is_dir(), reason="the schedules of Gavel's simulator are not here (../shared/golden_sched)"
)
EXACT, TIED = (5e-3, 5e-3), (0.04, 0.02)
"""relative tolerances of mean completion time and makespan. Where all jobs may get equal shares, the reference starts
them in the order of its solver's rounding errors, Forerun in the order of arrival"""
_ORDERS = 24


def rows_of(matrix: Vector) -> Rows:
    """Returns the entries of a matrix."""
    row, column = np.nonzero(matrix)
    return Rows(row, column, matrix[row, column], (matrix.shape[0], matrix.shape[1]))


def reference(policy: str) -> dict[str, float]:
    """The completion time of each job."""
    (text,) = (path.read_text() for path in (GOLDEN / "outputs").glob(f"small_test.{policy}.4-0-0.txt"))
    return {job: float(time_s) for job, time_s in re.findall(r"^Job (\d+): ([\d.]+)$", text, re.MULTILINE)}


def jobs_of_the_reference() -> list[SteppedJob]:
    """The jobs with the rates that its log of fifo tells: each job ends in the round in which it starts."""
    log = (GOLDEN / "outputs" / "small_test.fifo.4-0-0.txt.full").read_text()
    begins_s = {job: float(at) for at, job in re.findall(r"\[([\d.]+)\] \[Micro-task scheduled\]\tJob ID: (\d+)", log)}
    ends_s = reference("fifo")
    with (GOLDEN / "inputs" / "small_test.trace").open() as file:
        rows = list(csv.reader(file, delimiter="\t"))
    return [
        SteppedJob(str(i), int(row[6]), 0.0, int(row[5]), (int(row[5]) / (ends_s[str(i)] - begins_s[str(i)]),))
        for i, row in enumerate(rows)
    ]


@golden
@pytest.mark.parametrize(
    ("policy", "tolerances"),
    [
        *((name, EXACT) for name in ("fifo", "isolated", "max_min_fairness", "min_total_duration")),
        *((name, TIED) for name in ("finish_time_fairness", "max_sum_throughput_perf")),
    ],
)
def test_completion_times_are_those_of_gavel(policy, tolerances):
    expected = reference(policy)
    found = {job.job.name: job.jct_s for job in in_rounds(jobs_of_the_reference(), [4], policy.replace("_", "-"))}
    assert np.mean(list(found.values())) == pytest.approx(np.mean(list(expected.values())), rel=tolerances[0])
    assert max(found.values()) == pytest.approx(max(expected.values()), rel=tolerances[1])
    if tolerances == EXACT:
        assert found == pytest.approx(expected, rel=1e-3)


@golden
@pytest.mark.parametrize("policy", ["finish_time_fairness", "max_sum_throughput_perf"])
def test_where_jobs_tie_gavel_is_among_the_orders_in_which_they_may_start(policy):
    means, makespans = [], []
    for seed in range(_ORDERS):
        jobs = jobs_of_the_reference()
        Random(seed).shuffle(jobs)
        times = [job.jct_s for job in in_rounds(jobs, [4], policy.replace("_", "-"))]
        means.append(np.mean(times))
        makespans.append(max(times))
    expected = list(reference(policy).values())
    assert min(means) < np.mean(expected) < max(means)
    assert min(makespans) <= max(expected) <= max(makespans)


stepped_jobs = st.lists(
    st.builds(
        lambda gpus, submit_s, steps, rates: (gpus, float(submit_s), steps, rates),
        st.integers(1, 4),
        st.integers(0, 5_000),
        st.integers(1, 50_000),
        st.tuples(st.floats(1.0, 50.0), st.one_of(st.just(0.0), st.floats(1.0, 20.0))),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=25, deadline=None)
@given(stepped_jobs, st.sampled_from(list(SHARES)))
def test_every_policy_runs_all_jobs_on_gpus_that_exist(drawn, policy):
    workers = (4, 8)
    jobs = [SteppedJob(str(i), *each) for i, each in enumerate(drawn)]
    found = in_rounds(jobs, workers, policy)
    assert sorted(job.job.name for job in found) == sorted(job.name for job in jobs)
    by_name = {job.name: job for job in jobs}
    for job in found:
        own = by_name[job.job.name]
        ran_s = sum(end_s - begin_s for begin_s, end_s in job.ran)
        assert own.submit_s <= job.start_s <= job.end_s
        assert own.steps / max(own.rates) <= ran_s * (1 + 1e-9) + 1e-6
        for (_, end_s), (begin_s, _) in zip(job.ran, job.ran[1:], strict=False):
            assert end_s <= begin_s
    for kind, number in enumerate(workers):
        changes = sorted(
            change
            for job in found
            for (begin_s, end_s, gpus), own in zip(job.periods, job.kinds, strict=True)
            if own == kind
            for change in ((begin_s, 1, gpus), (end_s, 0, -gpus))
        )
        assert np.cumsum([gpus for *_, gpus in changes]).max(initial=0) <= number
        assert all(by_name[job.job.name].rates[own] > 0 for job in found for own in job.kinds)


def demand(random: np.random.Generator, jobs: int) -> Demand:
    return Demand(
        names=range(jobs),
        rates=random.uniform(1.0, 20.0, (jobs, 3)),
        gpus=random.integers(1, 5, jobs).astype(float),
        weights=random.uniform(1.0, 3.0, jobs),
        steps_left=random.uniform(1e3, 1e5, jobs),
        waited_s=random.uniform(0.0, 1e3, jobs),
        workers=np.array([4.0, 6.0, 8.0]),
    )


def best_least(asked: Demand, per_share: np.ndarray) -> float:
    """The largest least sum of per_share x share, from another solver."""
    jobs, kinds = per_share.shape
    rows = [[*np.kron(np.eye(jobs)[i], -per_share[i]), 1.0] for i in range(jobs)]
    rows += [[*np.kron(np.eye(jobs)[i], np.ones(kinds)), 0.0] for i in range(jobs)]
    rows += [[*np.kron(asked.gpus, np.eye(kinds)[k]), 0.0] for k in range(kinds)]
    limits = [*np.zeros(jobs), *np.ones(jobs), *asked.workers]
    return -linprog([0.0] * (jobs * kinds) + [-1.0], rows, limits).fun


@pytest.mark.parametrize("seed", range(5))
def test_shares_are_as_good_as_another_solver_finds(seed):
    asked = demand(np.random.default_rng(seed), 12)
    per_share = asked.rates * (asked.gpus / (asked.weights * (asked.rates @ asked.workers / 18.0)))[:, None]
    fair = shares("max-min-fairness-perf").of(asked)
    assert (per_share * fair).sum(axis=1).min() == pytest.approx(best_least(asked, per_share), rel=1e-6)
    per_share = asked.rates / asked.steps_left[:, None]
    early = shares("min-total-duration-perf").of(asked)
    assert (per_share * early).sum(axis=1).min() == pytest.approx(best_least(asked, per_share), rel=1e-6)
    for each in (fair, early):
        assert (each.sum(axis=1) <= 1 + 1e-7).all()
        assert (asked.gpus @ each <= asked.workers + 1e-6).all()


@pytest.mark.parametrize("seed", range(3))
def test_no_shares_have_a_smaller_largest_ratio_of_finish_times(seed):
    asked = demand(np.random.default_rng(seed), 6)
    found = shares("finish-time-fairness-perf").of(asked)
    part = asked.workers / (6 * asked.gpus[:, None])
    alone_s = asked.steps_left / (asked.rates * part / np.maximum(part.sum(axis=1), 1.0)[:, None]).sum(axis=1)
    ends_s = asked.waited_s + asked.steps_left / (asked.rates * found).sum(axis=1)
    ratio = (ends_s / alone_s).max()
    needed = asked.steps_left / (ratio * (1 - 1e-4) * alone_s - asked.waited_s)
    assert best_least(asked, asked.rates / needed[:, None]) < 1.0


def test_equal_jobs_get_equal_shares_of_many_optimal_ones():
    asked = Demand(range(4), np.ones((4, 2)), np.ones(4), np.ones(4), np.ones(4), np.zeros(4), np.array([1.0, 1.0]))
    for name in SHARES:
        if "fifo" not in name:
            assert shares(name).of(asked) == pytest.approx(np.full((4, 2), 0.25), abs=1e-6)


def test_a_program_without_a_solution_is_refused():
    with pytest.raises(ForerunError, match="no solution"):
        maximised(np.ones(1), rows_of(np.array([[1.0], [-1.0]])), np.array([0.0, -1.0]))


def test_a_solution_on_the_border_is_one():
    """The last step makes some of its variables 0, from which there is no way on."""
    asked = Demand(
        names=range(2),
        rates=np.array([[1.0, 0.0], [1.0, 0.0]]),
        gpus=np.array([4.0, 4.0]),
        weights=np.ones(2),
        steps_left=np.ones(2),
        waited_s=np.zeros(2),
        workers=np.array([4.0, 8.0]),
    )
    assert shares("max-sum-throughput-perf").of(asked)[:, 0] == pytest.approx([0.5, 0.5], abs=1e-6)


def test_a_new_job_runs_once_shares_are_asked_for_anew():
    """They are at 720 s, the first time since the start, and then not before 2,640 s, in the round from 2,880 s on."""
    jobs = [
        SteppedJob(name, 4, submit_s, 40_000, (10.0,)) for name, submit_s in (("a", 0.0), ("b", 400.0), ("c", 800.0))
    ]
    starts_s = {done.job.name: done.start_s for done in in_rounds(jobs, [12], "isolated")}
    assert starts_s == {"a": 0.0, "b": 720.0, "c": 2_880.0}


def test_shares_of_equal_jobs_tie_and_small_ones_keep_their_order():
    shares = np.array([0.3333333333, 0.3333333334, 3.14e-10, 3.12e-10, 8e-12, 0.0])
    assert rounded(shares) == pytest.approx([0.333333, 0.333333, 3.1e-10, 3.1e-10, 8e-12, 0.0], rel=1e-9, abs=0)


def test_rows_without_their_zeros_are_the_matrix():
    random = np.random.default_rng(1)
    whole = random.uniform(-1.0, 1.0, (5, 7)) * (random.random((5, 7)) < 0.4)
    rows, x, y = rows_of(whole), random.random(7), random.random(5)
    both = Rows.stacked([rows, rows_of(whole[:2])], 8)
    assert rows.times(x) == pytest.approx(whole @ x)
    assert rows.columns_times(y) == pytest.approx(whole.T @ y)
    assert rows.gram(x) == pytest.approx(whole @ np.diag(x) @ whole.T)
    assert rows.largest == pytest.approx(np.abs(whole).max(axis=1))
    assert both.scaled(np.full(7, 2.0)).times(np.ones(8)) == pytest.approx(
        2 * np.concatenate([whole, whole[:2]]).sum(axis=1)
    )


TABLE = {
    "v100": {"('LM', 1)": {"null": 10.0}, "('LM', 2)": {"null": 18.0}},
    "k80": {"('LM', 1)": {"null": 2.0}, "('LM', 2)": {"null": 0.0}},
}
LINE = "LM\tpython main.py\tfolder\t--steps\t1\t{steps}\t{gpus}\t1\t-1.000000\t{arrival}\n"


def write_files(folder: Path, **changes: str) -> Path:
    texts = {
        "rates.json": json.dumps(TABLE),
        "jobs.trace": LINE.format(steps=3600, gpus=1, arrival=0) + LINE.format(steps=1800, gpus=2, arrival=10),
        "c.yaml": "gpu_kinds: {v100: 2, k80: 1}\ntrace: jobs.trace\nthroughputs: rates.json\npolicies: [fifo-perf]\n",
    } | {name.replace("_", "."): text for name, text in changes.items()}
    for name, text in texts.items():
        (folder / name).write_text(text)
    return folder / "c.yaml"


def test_a_file_of_unlike_gpus_is_scheduled_and_written(tmp_path, capsys):
    """The first job has 3,600 steps at 10 a second; the second one needs both fast GPUs from 360 s on."""
    file, table = write_files(tmp_path), tmp_path / "jobs.csv"
    page = tmp_path / "page.html"
    assert run(["cluster", str(file), "--json", "--csv", str(table), "--report", str(page)]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["gpus"] == 3
    assert record["policies"][0]["makespan_s"] == pytest.approx(460.0)
    assert "2 v100 + 1 k80" in page.read_text()
    assert run(["cluster", str(file), "--policy", "max-min-fairness-perf,isolated"]) == 0
    assert "isolated" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "arguments", "words"),
    [
        ({"rates_json": "{"}, [], "not JSON"),
        ({"rates_json": "{}"}, [], "no throughputs of GPU kind v100"),
        ({"rates_json": '{"v100": {"LM": {}}, "k80": {}}'}, [], "expected ('job type', GPUs)"),
        ({"jobs_trace": "LM\t1\n"}, [], "line 1: expected 10 columns"),
        ({"jobs_trace": LINE.format(steps=1, gpus=8, arrival=0)}, [], "no throughput of LM on 8 GPUs"),
        ({"jobs_trace": LINE.format(steps=0, gpus=1, arrival=0)}, [], "should be positive"),
        ({"c_yaml": "gpu_kinds: {v100: 2}\n"}, [], "give either trace"),
        ({"c_yaml": "gpu_kinds: {v100: 2}\ntrace: jobs.trace\n"}, [], "trace needs throughputs"),
        ({}, ["--policy", "srtf"], "unknown policy for unlike GPUs 'srtf'"),
        ({}, ["--nodes", "2"], "--nodes: the cluster has several kinds of GPUs"),
    ],
)
def test_what_is_wrong_is_one_line(changes, arguments, words, tmp_path, capsys):
    assert run(["cluster", str(write_files(tmp_path, **changes)), *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_policy_that_nobody_knows_is_named_when_the_file_is_read():
    described = {"gpu_kinds": {"v100": 2}, "jobs": [], "policies": ["fifo-perff"]}
    with pytest.raises(UnknownName, match="did you mean fifo-perf"):
        unlike_cluster_of(described, "file")


def test_a_plan_tells_the_rates_on_each_kind_on_which_it_fits():
    plan = {"model": "llama-3.2-1b", "steps": 1000, "global_batch": 32, "fields": {"seq_len": 2048}}
    described = {
        "gpu_kinds": {"h100": 16, "a100": 16},
        "clusters": {"h100": "h100-sxm", "a100": "a100-80gb-sxm"},
        "jobs": [{"name": "a", "gpus": 8, "plan": plan}, {"name": "b", "gpus": 8, "plan": plan}],
    }
    first, second = unlike_cluster_of(described, "file").jobs
    assert first.rates == second.rates
    assert 1.5 < first.rates[0] / first.rates[1] < 3.5
    assert first.steps == 1000
    with pytest.raises(ForerunError, match="job a: clusters has no entry for GPU kind a100"):
        unlike_cluster_of({**described, "clusters": {"h100": "h100-sxm"}}, "file")
    large = {**plan, "model": "llama-3.1-70b", "fields": {"seq_len": 2048, "dp_replicate": 8, "zero_stage": 0}}
    jobs = [{"name": "a", "gpus": 8, "plan": large}]
    with pytest.raises(ForerunError, match="job a: the plan fits on no kind of GPU: needs"):
        unlike_cluster_of({**described, "jobs": jobs}, "file")
    with pytest.raises(ForerunError, match="job a: give steps and steps_per_s by GPU kind, or a plan"):
        unlike_cluster_of({**described, "jobs": [{"name": "a", "gpus": 8}]}, "file")


FAILING = NodeFailures(per_1000_node_days=2e4, repair_s=900.0, checkpoint_s=200.0, seed=1)


@settings(max_examples=25, deadline=None)
@given(stepped_jobs, st.sampled_from(list(SHARES)), st.sampled_from(["packed", "spread", "nearest"]))
def test_jobs_on_nodes_that_fail_go_on_from_their_checkpoints(drawn, policy, placement):
    jobs = [SteppedJob(str(i), *each) for i, each in enumerate(drawn)]
    found = in_rounds(jobs, (4, 8), policy, NodesOfKinds(4, placement, FAILING))
    assert sorted(job.job.name for job in found) == sorted(job.name for job in jobs)
    by_name = {job.name: job for job in jobs}
    for job in found:
        own = by_name[job.job.name]
        fastest, slowest = max(own.rates), min(rate for rate in own.rates if rate)
        lost_s = job.failures * (FAILING.checkpoint_s + 1 / slowest)
        assert own.steps / fastest <= job.ran_s * (1 + 1e-9) + 1e-6
        assert job.ran_s <= own.steps / slowest + lost_s + 1e-6
    assert max(in_use(found)[1]) <= 12


def test_a_failed_node_takes_the_round_of_its_job_and_the_job_goes_on_elsewhere():
    """Two nodes of four GPUs; a job has 1,600 s of work at its last checkpoint when its node fails at 1,641 s."""
    failing = NodeFailures(per_1000_node_days=1e5, repair_s=600.0, checkpoint_s=200.0, seed=4)
    (at_s, _), (next_s, _) = itertools.islice(failing.draw(2), 2)
    jobs = [SteppedJob(name, 4, 0.0, 20_000, (10.0,)) for name in "ab"]
    found = in_rounds(jobs, [8], "isolated", NodesOfKinds(4, "packed", failing))
    (hit,) = [job for job in found if job.failures]
    (other,) = [job for job in found if not job.failures]
    assert 1640 < at_s < 1642 < 3000 < next_s
    assert hit.ran == ((0.0, at_s), (1800.0, 2160.0), (2360.0, 2400.0)), "it is behind, and its node away until 2,241 s"
    assert other.ran == ((0.0, 1800.0), (2160.0, 2360.0))
    assert (hit.failures, hit.preemptions, other.preemptions) == (1, 1, 1)


def test_jobs_that_find_no_node_wait_for_the_repair():
    failing = NodeFailures(per_1000_node_days=1e5, repair_s=600.0, checkpoint_s=200.0, seed=4)
    at_s = next(time_s for time_s, _ in failing.draw(1))
    (done,) = in_rounds([SteppedJob("a", 4, 0.0, 40_000, (10.0,))], [4], "isolated", NodesOfKinds(4, "packed", failing))
    assert done.failures >= 1
    assert done.ran[0][1] == pytest.approx(at_s)
    assert done.ran[1][0] == pytest.approx(at_s + 600.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"placement": "near"}, "x: unknown placement 'near'"),
        ({"placement": "packed"}, "x: gpu_kinds: 2 v100 do not fill whole nodes; say gpus_per_node, which is 8"),
        ({"failures": {"per_1000_node_days": 5}}, "x: failures: this needs to know the nodes of each job"),
    ],
)
def test_nodes_that_make_no_sense_are_one_line(changes, words):
    described = {"gpu_kinds": {"v100": 2}, "jobs": [{"name": "a", "gpus": 1, "steps": 9, "steps_per_s": {"v100": 1}}]}
    with pytest.raises(ForerunError) as error:
        unlike_cluster_of({**described, **changes}, "x")
    assert str(error.value).startswith(words)


def test_a_file_says_the_nodes_of_unlike_gpus():
    described = {
        "gpu_kinds": {"v100": 8},
        "gpus_per_node": 4,
        "placement": "nearest",
        "failures": {"per_1000_node_days": 5},
        "jobs": [{"name": "a", "gpus": 1, "steps": 9, "steps_per_s": {"v100": 1}}],
    }
    request = unlike_cluster_of(described, "x")
    assert request.nodes == NodesOfKinds(4, "nearest", NodeFailures(5, 86_400.0, 3_600.0, 0))
    assert request.placement == "nearest, in rounds"
    assert [job.end_s for job in request.schedule("isolated")] == [9.0]


SHARED = {
    "gpu_kinds": {"v100": 12, "k80": 8},
    "gpus_per_node": 4,
    "placement": "packed",
    "network": {"shared_nics": True},
    "jobs": [
        {"name": name, "gpus": 6, "steps": 3600, "steps_per_s": {"v100": 10}, "network_share": 0.5} for name in "ab"
    ],
}


def ends_of(**changes) -> dict[str, float]:
    request = unlike_cluster_of({**SHARED, **changes}, "x")
    return {job.job.name: job.end_s for job in request.schedule("fifo-perf")}


def test_jobs_on_the_same_links_slow_each_other_for_a_round():
    """Both use the link of the second node for half of their steps, so that each goes on at 2/3: 540 s and not 360."""
    assert ends_of() == {"a": pytest.approx(540.0), "b": pytest.approx(540.0)}
    assert ends_of(network={"shared_nics": True, "shifts": True}) == pytest.approx({"a": 360.0, "b": 360.0}, rel=1e-2)
    assert ends_of(network={}) == {"a": 360.0, "b": 360.0}, "each GPU has a link of its own"
    apart = [{**job, "steps_per_s": {kind: 10}} for job, kind in zip(SHARED["jobs"], ("v100", "k80"), strict=True)]
    assert ends_of(jobs=apart) == {"a": 360.0, "b": 360.0}, "kinds have links of their own"
    alone = SHARED["jobs"][:1]
    assert ends_of(jobs=alone) == {"a": 360.0}
    shorter = [alone[0], {**SHARED["jobs"][1], "steps": 600}]
    assert ends_of(jobs=shorter) == {"a": pytest.approx(360.0 + 120.0, abs=0.1), "b": pytest.approx(90.0)}, (
        "the pace of a round is that of its beginning"
    )


def test_switches_of_unlike_gpus_have_links_above():
    """Each node has a switch of its own, whose link carries a quarter of a node's rate; two lanes ask for a half."""
    nearest = {"nodes_per_switch": 1, "placement": "nearest", "jobs": SHARED["jobs"][:1]}
    assert ends_of(network={"oversubscription": 4}, **nearest) == {"a": pytest.approx(540.0)}
    assert ends_of(network={"oversubscription": 2}, **nearest) == {"a": 360.0}
    with pytest.raises(ForerunError, match="job a: no kind of GPU that it runs on has 6"):
        ends_of(**{**nearest, "placement": "packed"})


def test_a_plan_of_unlike_gpus_sends_what_its_groups_send():
    plan = {"model": "llama-3.2-1b", "steps": 1000, "global_batch": 32, "fields": {"seq_len": 2048}}
    described = {
        **SHARED,
        "gpu_kinds": {"h100": 16, "a100": 16},
        "gpus_per_node": 8,
        "clusters": {"h100": "h100-sxm", "a100": "a100-80gb-sxm"},
        "jobs": [{"name": "a", "gpus": 16, "plan": plan}],
    }
    (job,) = unlike_cluster_of(described, "x").jobs
    for traffic, rate in zip(job.traffic, job.rates, strict=True):
        assert traffic.network_s > 0
        assert traffic.compute_s + traffic.network_s == pytest.approx(1 / rate)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"placement": "count"}, "x: network: this needs to know the nodes of each job; choose placement packed"),
        ({"nodes_per_switch": 2}, "x: nodes_per_switch: 2 do not divide the 3 nodes of v100"),
        ({"network": {"topology": "ring:20@1/0ns"}}, "x: unknown key 'network.topology'"),
    ],
)
def test_networks_of_unlike_gpus_that_make_no_sense_are_one_line(changes, words):
    with pytest.raises(ForerunError) as error:
        unlike_cluster_of({**SHARED, **changes}, "x")
    assert str(error.value).startswith(words)
