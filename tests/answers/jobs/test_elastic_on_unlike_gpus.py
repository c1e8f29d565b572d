"""Elastic jobs on several kinds of GPUs: choices against an exact solver, known answers, whole schedules."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from forerun.answers.jobs.choosing import NONE, Offers, best_options
from forerun.answers.jobs.elastic_rounds import share_out, share_out_kinds
from forerun.answers.jobs.failures import NodeFailures
from forerun.answers.jobs.job import Job, Scaling
from forerun.answers.jobs.placement import Shape
from forerun.answers.jobs.simulation import Terms
from forerun.answers.jobs.unlike_description import unlike_cluster_of
from forerun.answers.jobs.unlike_gpus import SteppedJob
from forerun.common.errors import ForerunError

SHAPES = (Shape(1, 2, 4), Shape(1, 1, 8))


def drawn(random, jobs, kinds, gpus_per_job):
    """Goodputs on 1, 2, 4 ... GPUs of most kinds, normalised as Sia does, and GPUs of each kind."""
    begin, kind, gpus, worth = [0], [], [], []
    for _ in range(jobs):
        base, power, top = np.sort(random.uniform(1, 6, kinds)), random.uniform(0.6, 0.95), random.integers(1, 6)
        speeds = []
        for k in range(kinds):
            if k and random.random() < 0.15:
                continue
            for size in 2 ** np.arange(top + 1):
                kind.append(k)
                gpus.append(size)
                speeds.append(base[k] * size**power)
        worth += list(-1 / np.sqrt(np.array(speeds) / min(speeds)))
        begin.append(len(kind))
    free = np.maximum(1, jobs * gpus_per_job / kinds * random.uniform(0.5, 1.5, kinds)).astype(np.int64)
    return Offers(np.array(begin), np.array(kind), np.array(gpus), np.array(worth)), free


def best_sum(offers, without, free):
    """The best sum of worths, by an exact solver of integer programs, as Sia's own code finds it."""
    jobs, options = len(offers.begin) - 1, len(offers.gpus)
    rows = np.zeros((jobs + len(free), options))
    rows[np.repeat(np.arange(jobs), np.diff(offers.begin)), np.arange(options)] = 1
    rows[jobs + offers.kind, np.arange(options)] = offers.gpus
    limits = LinearConstraint(rows, ub=np.concatenate([np.ones(jobs), free]))
    found = milp(without - offers.worth, constraints=limits, integrality=np.ones(options), bounds=Bounds(0, 1))
    return jobs * without - found.fun


@pytest.mark.parametrize("kinds", [2, 3, 4])
@pytest.mark.parametrize("jobs", [4, 25, 100])
@pytest.mark.parametrize("gpus_per_job", [0.3, 1, 4])
def test_choices_are_the_best_but_for_a_job_or_two(kinds, jobs, gpus_per_job):
    offers, free = drawn(np.random.default_rng(kinds * jobs), jobs, kinds, gpus_per_job)
    chosen = best_options(offers, -1.1, free)
    taken = chosen[chosen != NONE]
    assert (np.bincount(offers.kind[taken], offers.gpus[taken], kinds) <= free).all()
    assert ((offers.begin[:-1] <= chosen) & (chosen < offers.begin[1:]) | (chosen == NONE)).all()
    reached = offers.worth[taken].sum() - 1.1 * (jobs - len(taken))
    best = best_sum(offers, -1.1, free)
    assert best - 0.25 * kinds <= reached <= best + 1e-6
    assert reached >= best - 0.03 * abs(best) or jobs < 25


def test_where_all_gpus_suffice_each_job_has_its_best():
    offers, _ = drawn(np.random.default_rng(1), 10, 3, 1)
    chosen = best_options(offers, -1.1, np.array([1000, 1000, 1000]))
    for i, (first, end) in enumerate(itertools.pairwise(offers.begin)):
        assert offers.worth[chosen[i]] == offers.worth[first:end].max()


def test_a_second_kind_that_nobody_can_use_changes_nothing():
    scaling = Scaling((1, 2, 4, 8), (1.0, 1.9, 3.4, 6.0))
    jobs = [Job(str(i), 1, 100.0 * i, 3000.0 + 500.0 * i, scaling=scaling) for i in range(6)]
    alone = share_out(jobs, SHAPES[0], "sia", Terms(resume_s=30.0))
    beside = share_out_kinds(jobs, SHAPES, "sia", Terms(resume_s=30.0))
    mean = [np.mean([one.jct_s for one in done]) for done in (alone, beside)]
    assert mean[1] == pytest.approx(mean[0], rel=0.05)
    assert {one.job.name for one in beside} == {job.name for job in jobs}


def test_the_job_that_gains_most_has_the_fast_gpus():
    """Both run on either kind; the second is six times as fast on the first kind, the first only a little."""
    slight, much = (1.2, 1.0), (6.0, 1.0)
    jobs = [SteppedJob(name, 8, 0.0, 600, rates) for name, rates in (("slight", slight), ("much", much))]
    done = {one.job.name: one for one in share_out_kinds([job.elastic for job in jobs], SHAPES, "sia")}
    assert done["much"].end_s == pytest.approx(100.0)
    assert done["slight"].end_s > 500.0


@pytest.mark.parametrize("heavy", ["a", "b"])
def test_under_sia_a_job_of_more_weight_has_the_fast_gpus(heavy):
    """The jobs are alike, so that only their weights say which of them has the GPUs on which both are twice as fast."""
    kinds = [{"name": name, "gpus": 8, "steps": 600, "steps_per_s": {"fast": 2.0, "slow": 1.0}} for name in "ab"]
    data = {"gpu_kinds": {"fast": 8, "slow": 8}, "policies": ["sia"]}
    jobs = [{**job, "weight": 3.0 if job["name"] == heavy else 1.0} for job in kinds]
    done = {one.job.name: one for one in unlike_cluster_of({**data, "jobs": jobs}, "x").schedule("sia")}
    assert done[heavy].end_s == pytest.approx(300.0)
    assert done["b" if heavy == "a" else "a"].end_s > 400.0


@pytest.mark.parametrize("factor", [0.5, 4.0])
def test_only_ratios_of_weights_count(factor):
    random = np.random.default_rng(4)
    jobs = [
        SteppedJob(str(i), int(random.choice([1, 2, 4])), 50.0 * i, 900, tuple(random.uniform(1, 4, 2)), float(weight))
        for i, weight in enumerate(random.choice([1.0, 2.0], 12))
    ]
    more = [replace(job, weight=factor * job.weight) for job in jobs]
    done = [share_out_kinds([job.elastic for job in each], SHAPES, "sia") for each in (jobs, more)]
    mean = [np.mean([one.jct_s for one in each]) for each in done]
    assert mean[1] == pytest.approx(mean[0], rel=0.03)


def test_a_job_moves_to_the_fast_kind_when_it_is_free_and_pays_for_it():
    jobs = [SteppedJob("short", 8, 0.0, 6000, (6.0, 1.0)), SteppedJob("long", 8, 0.0, 9000, (3.0, 1.0))]
    done = {one.job.name: one for one in share_out_kinds([job.elastic for job in jobs], SHAPES, "sia", Terms(30.0))}
    assert done["short"].ran == ((0.0, pytest.approx(1000.0)),)
    moved_s, end_s = 1020.0, 1020.0 + 30.0 + (9000 - 1020) / 3.0
    assert done["long"].ran == ((0.0, moved_s), (moved_s, pytest.approx(end_s)))
    assert (done["short"].kinds, done["long"].kinds) == ((0,), (1, 0))


sizes = st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=4, unique=True).map(sorted)
rows = st.lists(st.tuples(st.integers(0, 400), st.integers(50, 900), sizes, sizes), min_size=1, max_size=7)


@settings(max_examples=40, deadline=None)
@given(rows=rows, restart_s=st.sampled_from([0.0, 30.0]), fails=st.booleans())
def test_every_job_gets_its_work_done_on_gpus_that_exist(rows, restart_s, fails):
    jobs = []
    for i, (submit_s, steps, fast, slow) in enumerate(rows):
        scalings = tuple(
            Scaling(tuple(own), tuple(rate * size**0.8 for size in own)) for own, rate in ((fast, 2.0), (slow, 0.7))
        )
        jobs.append(SteppedJob(str(i), fast[0], submit_s, steps, (2.0 * fast[0] ** 0.8, 0.0), scalings=scalings))
    failing = NodeFailures(per_1000_node_days=3e4, repair_s=400.0, checkpoint_s=50.0, seed=3) if fails else None
    done = share_out_kinds([job.elastic for job in jobs], SHAPES, "sia", Terms(restart_s, failing))
    assert {one.job.name for one in done} == {job.name for job in jobs}
    moments = sorted({begin for one in done for begin, _ in one.ran})
    for now in moments:
        held = [0.0, 0.0]
        for one in done:
            for (begin, end, gpus), kind in zip(one.periods, one.kinds, strict=True):
                held[kind] += gpus * (begin <= now < end)
        assert all(each <= shape.total for each, shape in zip(held, SHAPES, strict=True))
    for one in done:
        fastest = max(one.job.scaling.speeds)
        assert one.ran_s >= one.job.duration_s / fastest * (1 - 1e-9)
        assert one.start_s >= one.job.submit_s


FILE = {
    "gpu_kinds": {"v100": 8, "k80": 16},
    "policies": ["fifo-perf", "sia"],
    "jobs": [
        {
            "name": "a",
            "gpus": 2,
            "steps": 40_000,
            "steps_per_s": {"v100": 9.0, "k80": 4.0},
            "elastic": {"v100": {"goodput": {1: 30, 2: 60, 4: 100}}},
        }
    ],
}


def test_a_file_says_how_jobs_scale_on_each_kind():
    (job,) = unlike_cluster_of(FILE, "file").jobs
    scaling = job.elastic.scaling
    assert (scaling.kinds, scaling.sizes) == ((0, 0, 0, 1), (1, 2, 4, 2))
    assert scaling.speeds == pytest.approx((0.5, 1.0, 100 / 60, 4 / 9))
    request = unlike_cluster_of(FILE, "file")
    ends = {name: request.schedule(name)[0].end_s for name in request.policies}
    assert ends["sia"] == pytest.approx(0.6 * ends["fifo-perf"], rel=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"elastic": {"t4": {"goodput": {2: 1}}}}, "job a: elastic: no GPU kind t4; known: v100, k80"),
        ({"elastic": {"k80": {"goodput": {4: 1}}}}, "elastic: k80: has no entry for the 2 GPUs"),
        ({"steps_per_s": {"k80": 4.0}}, "elastic: v100: steps_per_s has no entry for v100"),
    ],
)
def test_mistakes_are_one_line(change, message):
    with pytest.raises(ForerunError, match=message) as error:
        unlike_cluster_of({**FILE, "jobs": [{**FILE["jobs"][0], **change}]}, "file")
    assert "\n" not in str(error.value)


def test_pollux_shares_out_equal_gpus_only():
    with pytest.raises(ForerunError, match="unknown policy for unlike GPUs 'pollux'"):
        unlike_cluster_of({**FILE, "policies": ["pollux"]}, "file")


def test_a_job_that_ran_before_pays_for_its_return():
    """Two jobs take turns of a round on the only GPU; each later turn loses what a restart takes."""
    data = {
        "gpu_kinds": {"v100": 1},
        "policies": ["isolated"],
        "jobs": [{"name": name, "gpus": 1, "steps": 2000, "steps_per_s": {"v100": 1.0}} for name in "ab"],
    }
    free, paid = (unlike_cluster_of({**data, "resume_s": each}, "x").schedule("isolated") for each in (0.0, 60.0))
    assert max(one.end_s for one in free) == pytest.approx(4000, abs=2)
    last = max(paid, key=lambda one: one.end_s)
    assert last.ran_s - 60.0 * (len(last.ran) - 1) == pytest.approx(2000, abs=2)
    alone = unlike_cluster_of({**data, "resume_s": 60.0, "jobs": data["jobs"][:1]}, "x").schedule("isolated")
    assert alone[0].end_s == pytest.approx(2000, abs=2)
