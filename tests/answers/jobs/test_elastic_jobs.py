"""Jobs whose numbers of GPUs change: goodput by known answers, shares against all others, and whole schedules."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.answers.jobs.choosing import NONE, Offers, best_options
from forerun.answers.jobs.contention import SharedNetwork
from forerun.answers.jobs.description import cluster_of
from forerun.answers.jobs.elastic import ELASTIC, efficiency, step_s
from forerun.answers.jobs.elastic_rounds import ROUND_S, share_out
from forerun.answers.jobs.failures import NodeFailures
from forerun.answers.jobs.job import Job, Scaling, Traffic
from forerun.answers.jobs.outcome import PolicyOutcome, in_use
from forerun.answers.jobs.placement import Shape
from forerun.answers.jobs.simulation import Terms
from forerun.common.errors import ForerunError

SHAPE = Shape(1, 2, 4)
scalings = st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=4, unique=True).flatmap(
    lambda sizes: st.lists(st.floats(0.2, 3.0), min_size=len(sizes), max_size=len(sizes)).map(
        lambda speeds: Scaling(tuple(sorted(sizes)), tuple(speeds))
    )
)
jobs_of = st.lists(
    st.tuples(st.integers(0, 400), st.integers(1, 900), st.one_of(st.none(), scalings)), min_size=1, max_size=8
).map(
    lambda rows: [
        Job(str(i), 2 if scaling is None else scaling.sizes[0], submit, duration, scaling=scaling)
        for i, (submit, duration, scaling) in enumerate(rows)
    ]
)


def _speed(scaling, gpus):
    return scaling.speeds[scaling.sizes.index(gpus)]


def test_goodput_is_what_pollux_defines():
    assert efficiency(128, 128, 1000) == 1.0
    assert efficiency(1000, 100, 900) == pytest.approx(1000 / 1900)
    assert step_s(64, 8, 0.01, 0.2, 1.0) == pytest.approx(0.08 + 0.2)
    assert step_s(64, 8, 0.01, 0.2, 50.0) == pytest.approx(0.2, rel=1e-2)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=4), min_size=1, max_size=4),
    st.integers(1, 12),
)
def test_no_sizes_are_better_by_more_than_one_step(values, total):
    begin = np.cumsum([0, *map(len, values)])
    gpus = np.array([2**i for each in values for i in range(len(each))])
    worth = np.array([one for each in values for one in each])
    found = best_options(Offers(begin, np.zeros_like(gpus), gpus, worth), 0.0, np.array([total]))
    assert gpus[found[found != NONE]].sum() <= total
    own = [[(0, 0.0), *zip(gpus[i:j], worth[i:j], strict=True)] for i, j in itertools.pairwise(begin)]
    best = max(
        sum(one[1] for one in chosen) for chosen in itertools.product(*own) if sum(one[0] for one in chosen) <= total
    )
    reached = worth[found[found != NONE]].sum()
    assert best - max(max(each) for each in values) <= reached + 1e-9 <= best + 2e-9


@pytest.mark.parametrize("policy", list(ELASTIC))
@settings(max_examples=30, deadline=None)
@given(jobs=jobs_of, restart_s=st.sampled_from([0.0, 30.0]))
def test_every_job_gets_its_work_done_on_gpus_that_exist(policy, jobs, restart_s):
    done = share_out(jobs, SHAPE, policy, Terms(resume_s=restart_s))
    assert {one.job.name for one in done} == {job.name for job in jobs}
    assert max(in_use(done)[1]) <= SHAPE.total
    for one in done:
        scaling = one.job.scaling or Scaling((one.job.gpus,), (1.0,))
        restarts, work_s = 0, 0.0
        for i, (begin_s, end_s, gpus) in enumerate(one.periods):
            work_s += _speed(scaling, gpus) * max(0.0, end_s - begin_s - (restart_s if i else 0.0))
            restarts += bool(i)
        assert work_s == pytest.approx(one.job.duration_s, rel=1e-6, abs=1e-6)
        assert one.start_s >= one.job.submit_s
        for (_, end_s), (begin_s, _) in itertools.pairwise(one.ran):
            assert end_s <= begin_s
    outcome = PolicyOutcome(policy, tuple(done), SHAPE.total)
    assert 0 < outcome.utilisation <= 1 + 1e-9
    assert 0 < outcome.goodput <= 1 + 1e-9


@pytest.mark.parametrize("policy", list(ELASTIC))
def test_a_job_alone_runs_where_its_goodput_is_largest(policy):
    job = Job("a", 1, 0, 800.0, scaling=Scaling((1, 2, 4, 8), (1.0, 1.9, 3.4, 3.0)))
    (done,) = share_out([job], SHAPE, policy)
    assert done.held == (4,)
    assert done.end_s == pytest.approx(800 / 3.4)


def test_pollux_gives_equal_jobs_equal_parts_and_the_rest_of_one_that_ended():
    scaling = Scaling((1, 2, 4, 8), (1.0, 1.9, 3.4, 6.0))
    jobs = [Job("a", 1, 0, 3400.0, scaling=scaling), Job("b", 1, 0, 6800.0, scaling=scaling)]
    done = {one.job.name: one for one in share_out(jobs, SHAPE, "pollux", Terms(resume_s=30.0))}
    assert done["a"].held == (4,)
    assert done["a"].end_s == 1000
    assert done["b"].held == (4, 8)
    moved_s = ROUND_S * np.ceil(1000 / ROUND_S)
    assert done["b"].end_s == pytest.approx(moved_s + 30 + (6800 - 3.4 * moved_s) / 6.0)


def test_elastic_jobs_of_a_file_beside_a_queue():
    described = {
        "nodes": 2,
        "gpus_per_node": 4,
        "policies": ["fifo", "pollux"],
        "jobs": [
            {"name": "a", "gpus": 8, "duration_s": 3600, "elastic": {"goodput": {2: 50, 4: 90, 8: 120}}},
            {"name": "b", "gpus": 4, "duration_s": 3600, "elastic": {"goodput": {2: 50, 4: 90, 8: 120}}},
        ],
    }
    request = cluster_of(described, "file")
    means = {name: PolicyOutcome(name, tuple(request.schedule(name)), 8).mean_jct_s for name in request.policies}
    assert means["pollux"] < 0.9 * means["fifo"]
    pollux_model = {
        "example_s": 0.01,
        "sync_s": {1: 0, 8: 0.2},
        "batch": 128,
        "largest_batch": 1024,
        "noise_scale": 1e3,
    }
    described["jobs"][0]["elastic"] = pollux_model
    (job, _) = cluster_of(described, "file").jobs
    goodputs = {
        gpus: max(m / (m / gpus * 0.01 + sync) * 1128 / (1000 + m) for m in (128, 256, 512, 1024))
        for gpus, sync in ((1, 0.0), (8, 0.2))
    }
    assert job.scaling.sizes == (1, 8)
    assert job.scaling.speeds == pytest.approx((goodputs[1] / goodputs[8], 1.0))


def test_a_planned_job_runs_on_no_size_whose_memory_is_too_small():
    plan = {"model": "llama-3.1-8b", "cluster": "h100-sxm", "steps": 10, "global_batch": 16}
    plan["fields"] = {"seq_len": 4096, "dp_shard": -1, "activation_checkpointing": "full"}
    job = {"name": "a", "gpus": 8, "plan": plan, "elastic": {"sizes": [1, 4, 16]}}
    (read,) = cluster_of({"nodes": 2, "gpus_per_node": 8, "jobs": [job]}, "file").jobs
    assert read.scaling.sizes == (4, 8, 16)  # the state of 8 billion parameters needs more than one GPU
    assert read.scaling.speeds == tuple(sorted(read.scaling.speeds))


@pytest.mark.parametrize(
    ("elastic", "message"),
    [
        ({"goodput": {4: 50}}, "job a: elastic: has no entry for the 8 GPUs"),
        ({"sizes": [4]}, "sizes are for a job with a plan"),
        ({"sync_s": {8: 0.1}}, "give goodput by number of GPUs, or example_s"),
        ({"goodput": {0: 50}}, "goodput"),
    ],
)
def test_mistakes_are_one_line(elastic, message):
    jobs = [{"name": "a", "gpus": 8, "duration_s": 60, "elastic": elastic}]
    with pytest.raises(ForerunError, match=message) as error:
        cluster_of({"nodes": 1, "jobs": jobs}, "file")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("policy", list(ELASTIC))
@settings(max_examples=30, deadline=None)
@given(jobs=jobs_of, restart_s=st.sampled_from([0.0, 30.0]))
def test_elastic_jobs_go_on_from_their_checkpoints_where_nodes_fail(policy, jobs, restart_s):
    failing = NodeFailures(per_1000_node_days=3e4, repair_s=400.0, checkpoint_s=50.0, seed=3)
    done = share_out(jobs, SHAPE, policy, Terms(resume_s=restart_s, failures=failing))
    assert {one.job.name for one in done} == {job.name for job in jobs}
    assert max(in_use(done)[1]) <= SHAPE.total
    for one in done:
        scaling = one.job.scaling or Scaling((one.job.gpus,), (1.0,))
        work_s = sum(
            _speed(scaling, gpus) * max(0.0, end_s - begin_s - (restart_s if i else 0.0))
            for i, (begin_s, end_s, gpus) in enumerate(one.periods)
        )
        lost_s = work_s - one.job.duration_s
        assert -1e-6 < lost_s <= one.failures * failing.checkpoint_s + 1e-6


def test_an_elastic_job_shrinks_while_a_node_is_away():
    """A job on both nodes of four GPUs loses one of them, and ends on the other one before the repair."""
    failing = NodeFailures(per_1000_node_days=1e5, repair_s=600.0, checkpoint_s=100.0, seed=4)
    at_s, next_s = (time_s for time_s, _ in itertools.islice(failing.draw(2), 2))
    job = Job("a", 8, 0, 1643.0, scaling=Scaling((4, 8), (0.5, 1.0)))
    (done,) = share_out([job], Shape(1, 2, 4), "pollux", Terms(resume_s=10.0, failures=failing))
    assert 1600 < at_s < 1643 < next_s
    assert list(done.periods) == [(0.0, at_s, 8), (1680.0, pytest.approx(1680.0 + 10.0 + 43.0 / 0.5), 4)]
    assert (done.failures, done.preemptions) == (1, 0)


def test_elastic_jobs_slow_each_other_on_shared_links():
    """Each of two jobs has a node and a half; both communicate for half of their steps over the node between them."""
    half = Traffic(1.0, 1.0)
    jobs = [Job(name, 6, 0, 120.0, traffic=half) for name in "ab"]
    network = SharedNetwork(1.0, shared_nics=True, shifts=False)
    alone = share_out(jobs, Shape(1, 3, 4), "sia")
    together = share_out(jobs, Shape(1, 3, 4), "sia", Terms(network=network))
    assert [one.end_s for one in alone] == [120.0, 120.0]
    assert [one.end_s for one in together] == pytest.approx([180.0, 180.0])
    shifted = share_out(jobs, Shape(1, 3, 4), "sia", Terms(network=replace(network, shifts=True)))
    assert [one.end_s for one in shifted] == pytest.approx([120.0, 120.0], rel=1e-3)


def test_a_plan_on_every_size_has_a_step_of_its_own():
    plan = {"model": "gpt2-small", "cluster": "h100-sxm", "steps": 100, "global_batch": 64, "fields": {"seq_len": 512}}
    data = {"nodes": 4, "jobs": [{"name": "a", "gpus": 8, "plan": plan, "elastic": {"sizes": [16]}}]}
    scaling = cluster_of(data, "x").jobs[0].scaling
    small, large = scaling.steps
    assert scaling.sizes == (8, 16)
    assert (small.exchanges[0].size, large.exchanges[0].size) == (8, 16)
    assert large.network_s > 0
