"""Max-min fairness by water filling: known answers, another solver job by job."""

import numpy as np
import pytest
from scipy.optimize import linprog

from forerun.answers.jobs.packing import gaining_pairs
from forerun.answers.jobs.share_policies import shares
from forerun.answers.jobs.shares import Demand, Group
from forerun.answers.jobs.unlike_description import unlike_cluster_of
from forerun.common.errors import ForerunError


def demand(rates, workers, **others):
    """Jobs on one GPU each unless said otherwise."""
    n = len(rates)
    given = {
        "names": range(n),
        "rates": np.array(rates, float),
        "gpus": np.ones(n),
        "weights": np.ones(n),
        "steps_left": np.full(n, 1e4),
        "waited_s": np.zeros(n),
        "workers": np.array(workers, float),
    }
    return Demand(**{**given, **others})


def progress(asked, found):
    """What each job does against all GPUs in turn, times its GPUs over its weight."""
    in_turn = asked.rates @ asked.workers / asked.workers.sum()
    return (asked.rates * found).sum(axis=1) * asked.gpus / (asked.weights * in_turn)


def filled_by_another_solver(asked):
    """The level of each job, found by raising all and then each alone, with a simplex solver."""
    jobs, kinds = asked.rates.shape
    in_turn = asked.rates @ asked.workers / asked.workers.sum()
    gain = asked.rates * (asked.gpus / (asked.weights * in_turn))[:, None]
    each = [np.kron(np.eye(jobs)[i], gain[i]) for i in range(jobs)]
    rows = [np.kron(np.eye(jobs)[i], np.ones(kinds)) for i in range(jobs)]
    rows += [np.kron(asked.gpus, np.eye(kinds)[k]) for k in range(kinds)]
    limits = [*np.ones(jobs), *asked.workers]
    level, rises = np.zeros(jobs), set(range(jobs))
    while rises:
        a = [[*row, 0.0] for row in rows] + [[*-each[i], float(i in rises)] for i in range(jobs)]
        b = [*limits, *(0.0 if i in rises else -level[i] * (1 - 1e-9) for i in range(jobs))]
        top = -linprog([*np.zeros(jobs * kinds), -1.0], a, b, method="highs").fun
        floors = [-(top if i in rises else level[i]) * (1 - 1e-7) for i in range(jobs)]
        stuck = set()
        for i in rises:
            best = -linprog(-each[i], [*rows, *(-row for row in each)], [*limits, *floors], method="highs").fun
            if best < top * (1 + 1e-4):
                stuck.add(i)
        assert stuck
        level[sorted(stuck)] = top
        rises -= stuck
    return level


def test_a_job_that_can_use_no_more_leaves_the_rest_to_the_others():
    # Three jobs on four GPUs of a kind: a job of one GPU can use one only, however much is left.
    asked = demand([[1.0]] * 3, [4], gpus=np.array([1.0, 2.0, 2.0]))
    found = shares("max-min-fairness-water-filling-perf").of(asked)
    assert found.ravel() == pytest.approx([1.0, 0.75, 0.75], abs=1e-5)


def test_weights_share_what_saturated_jobs_leave():
    asked = demand([[1.0]] * 3, [2], weights=np.array([10.0, 1.0, 3.0]))
    found = shares("max-min-fairness-water-filling-perf").of(asked)
    assert found.ravel() == pytest.approx([1.0, 0.25, 0.75], abs=1e-5)


def test_a_job_that_runs_on_one_kind_only_does_not_hold_up_the_others():
    # Job 0 runs on the single a, which it has for itself; plain fairness stops where it stops.
    asked = demand([[1.0, 0.0], [1.0, 1.0], [1.0, 1.0]], [1, 4], weights=np.array([4.0, 1.0, 1.0]))
    filled = progress(asked, shares("max-min-fairness-water-filling-perf").of(asked))
    assert filled == pytest.approx([1.25, 1.0, 1.0], rel=1e-5)


@pytest.mark.parametrize("seed", range(8))
def test_every_level_is_that_of_another_solver(seed):
    random = np.random.default_rng(seed)
    n = int(random.integers(2, 9))
    asked = demand(
        random.uniform(1.0, 20.0, (n, 3)) * random.integers(0, 2, (n, 3)) + np.array([0.0, 0.0, 1.0]),
        [2, 3, 4],
        gpus=random.integers(1, 4, n).astype(float),
        weights=random.choice([1.0, 2.0, 5.0], n),
    )
    found = shares("max-min-fairness-water-filling-perf").of(asked)
    assert progress(asked, found) == pytest.approx(filled_by_another_solver(asked), rel=3e-4)
    assert (found.sum(axis=1) <= 1 + 1e-7).all()
    assert (asked.gpus @ found <= asked.workers + 1e-6).all()


@pytest.mark.parametrize("seed", range(4))
def test_nobody_has_less_than_the_least_of_plain_fairness(seed):
    random = np.random.default_rng(seed)
    asked = demand(random.uniform(1.0, 20.0, (30, 3)), [4, 6, 8], gpus=random.integers(1, 5, 30).astype(float))
    plain = progress(asked, shares("max-min-fairness-perf").of(asked))
    filled = progress(asked, shares("max-min-fairness-water-filling-perf").of(asked))
    assert filled.min() == pytest.approx(plain.min(), rel=1e-5)
    assert (np.sort(filled) >= np.sort(plain)[0] * (1 - 1e-5)).all()


def test_without_rates_all_kinds_are_alike():
    asked = demand([[1.0, 9.0], [9.0, 1.0]], [1, 1])
    found = shares("max-min-fairness-water-filling").of(asked)
    assert found.sum(axis=1) == pytest.approx([1.0, 1.0], abs=1e-5)
    assert found == pytest.approx(np.full((2, 2), 0.5), abs=1e-4)


def test_pairs_rise_too():
    beside = {(0, 0): np.full((2, 1), 0.8)}
    asked = demand([[1.0]] * 3, [1], types=(0, 0, 0), beside=beside)
    policy = shares("max-min-fairness-water-filling-packed")
    pairs = policy.pairs(asked)
    assert len(pairs.jobs) == len(gaining_pairs(asked).jobs) == 3
    found = policy.of(demand([[1.0]] * 3, [1], types=(0, 0, 0), beside=beside, pairs=pairs))
    assert found[3:].ravel() == pytest.approx([1 / 3] * 3, abs=1e-4)
    assert found[:3].max() < 1e-4


BY_GROUP = "max-min-fairness-water-filling-by-group-perf"


def test_groups_get_parts_by_their_weights_however_many_jobs_they_have():
    asked = demand([[1.0]] * 5, [1], groups=[Group(), Group(3.0)], group_of=[0, 0, 0, 0, 1])
    assert shares(BY_GROUP).of(asked).ravel() == pytest.approx([1 / 16] * 4 + [3 / 4], abs=1e-5)


def test_a_saturated_job_leaves_what_is_due_to_it_to_its_own_group():
    # Groups are due two GPUs each; job 0 is due 5/3 of them and can use one, which leaves one for job 1.
    weights = np.array([5.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    asked = demand([[1.0]] * 6, [4], weights=weights, groups=[Group(), Group()], group_of=[0, 0, 1, 1, 1, 1])
    assert shares(BY_GROUP).of(asked).ravel() == pytest.approx([1.0, 1.0, 0.5, 0.5, 0.5, 0.5], abs=1e-5)


def test_a_group_in_order_gives_its_part_to_the_jobs_that_came_first():
    asked = demand([[1.0]] * 6, [3], groups=[Group(in_order=True), Group()], group_of=[0, 0, 0, 1, 1, 1])
    assert shares(BY_GROUP).of(asked).ravel() == pytest.approx([1.0, 0.5, 0.0, 0.5, 0.5, 0.5], abs=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_groups_of_one_job_each_are_plain_water_filling(seed):
    random = np.random.default_rng(seed)
    weights = random.choice([1.0, 2.0, 5.0], 7)
    rates = random.uniform(1.0, 20.0, (7, 3))
    plain = demand(rates, [2, 3, 4], gpus=random.integers(1, 4, 7).astype(float), weights=weights)
    grouped = demand(rates, [2, 3, 4], gpus=plain.gpus, groups=[Group(each) for each in weights], group_of=range(7))
    found = [
        progress(plain, shares(name).of(each))
        for name, each in (("max-min-fairness-water-filling-perf", plain), (BY_GROUP, grouped))
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_a_file_says_what_groups_are_due():
    """Four jobs of one group and one of another share a GPU; the lone one, due three quarters, ends after 4/3 hours."""
    jobs = [
        {"name": str(i), "gpus": 1, "steps": 36_000, "steps_per_s": {"v100": 10}, "group": "many"} for i in range(4)
    ]
    jobs = [*({**job, "group": "many"} for job in jobs), {**jobs[0], "name": "lone", "group": "one"}]
    data = {"gpu_kinds": {"v100": 1}, "jobs": jobs, "groups": {"one": {"weight": 3}}, "policies": [BY_GROUP]}
    done = {each.job.name: each for each in unlike_cluster_of(data, "file").schedule(BY_GROUP)}
    assert done["lone"].end_s == pytest.approx(4800, abs=720)
    with pytest.raises(ForerunError, match="file: groups: no job is of group two; known: many, one"):
        unlike_cluster_of({**data, "groups": {"two": {}}}, "file")
