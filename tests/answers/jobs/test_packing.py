"""Two jobs on the same GPUs: known schedules, shares against another solver, and properties of every packing policy."""

from __future__ import annotations

import itertools
import json
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from forerun.answers.jobs.failures import NodeFailures
from forerun.answers.jobs.outcome import PolicyOutcome, in_use
from forerun.answers.jobs.packing import PACKING, gaining_pairs
from forerun.answers.jobs.rounds import in_rounds
from forerun.answers.jobs.share_policies import shares
from forerun.answers.jobs.shares import Demand
from forerun.answers.jobs.unlike_description import unlike_cluster_of
from forerun.answers.jobs.unlike_gpus import Beside, SteppedJob, read_rates
from forerun.answers.jobs.unlike_nodes import NodesOfKinds
from forerun.common.errors import ForerunError
from forerun.interfaces.cli.main import run

UNPACKED = {
    "fifo-packed": "fifo-perf",
    "max-min-fairness-packed": "max-min-fairness-perf",
    "finish-time-fairness-packed": "finish-time-fairness-perf",
    "min-total-duration-packed": "min-total-duration-perf",
    "max-sum-throughput-packed": "max-sum-throughput-perf",
}


def one_gpu_job(name: str, steps: int, rate: float = 10.0, submit_s: float = 0.0) -> SteppedJob:
    return SteppedJob(name, 1, submit_s, steps, (rate,), type=name)


def together(**rates: tuple[float, float]) -> Beside:
    """The rates of pairs of jobs whose names have one letter, on one kind of GPU, in either order."""
    found: Beside = {}
    for (one, other), (first, second) in rates.items():
        both = np.array([[first], [second]])
        found |= {(one, other, 1): both, (other, one, 1): both[::-1]}
    return found


@pytest.mark.parametrize("policy", PACKING)
def test_two_jobs_that_gain_share_the_only_gpu(policy):
    """Each makes 8 of 10 steps a second: 2,880 of 3,600 in the first round, and the rest in 90 s."""
    jobs = [one_gpu_job("a", 3600), one_gpu_job("b", 3600)]
    found = in_rounds(jobs, [1], policy, beside=together(ab=(8.0, 8.0)))
    assert [(job.ran, job.held, job.preemptions) for job in found] == [(((0.0, 450.0),), (0.5,), 0)] * 2
    outcome = PolicyOutcome(policy, tuple(found), 1)
    assert outcome.utilisation == pytest.approx(1.0)
    assert outcome.goodput == pytest.approx(720 / 450)


def test_both_jobs_of_a_pair_end_their_round_with_the_slower_one():
    """The first needs 100 s of the pair's 360 s, and its end is theirs; the second one goes on alone at 10 a second."""
    jobs = [one_gpu_job("a", 800), one_gpu_job("b", 9900)]
    first, second = in_rounds(jobs, [1], "fifo-packed", beside=together(ab=(8.0, 7.5)))
    assert (first.ran, first.held) == (((0.0, 360.0),), (0.5,))
    assert second.ran == ((0.0, 360.0), (360.0, 360.0 + 7200 / 10))
    assert second.held == (0.5, 1)
    assert second.preemptions == 0
    assert second.held_gpu_s == pytest.approx(180.0 + 720.0)


def test_first_in_first_out_packs_where_it_is_worth_it_and_lets_nobody_overtake():
    jobs = [one_gpu_job(name, 3600) for name in "abc"]
    starts = {
        gain: {job.job.name: job.start_s for job in in_rounds(jobs, [1], "fifo-packed", beside=beside)}
        for gain, beside in {
            "b joins a": together(ab=(8.0, 8.0), ac=(9.0, 9.0)),
            "b gains too little": together(ab=(7.0, 7.0), ac=(9.0, 9.0), bc=(9.0, 9.0)),
        }.items()
    }
    assert starts == {
        "b joins a": {"a": 0.0, "b": 0.0, "c": 450.0},
        "b gains too little": {"a": 0.0, "b": 360.0, "c": 360.0},
    }


def test_gandiva_draws_pairs_and_parts_those_that_lose():
    def asked(names: list[int], losing: tuple[int, int] | None = None) -> Demand:
        number = len(names)
        rates = {(one, other): np.full((2, 1), 8.0) for one in range(6) for other in range(6) if one != other}
        if losing is not None:
            rates[losing] = np.full((2, 1), 4.0)
        ones = np.ones(number)
        return Demand(names, np.full((number, 1), 10.0), ones, ones, ones, ones, np.array([2.0]), names, rates)

    random, policy = Random(0), shares("gandiva")
    first = random.sample([*range(4)], 2)
    last = random.sample([job for job in range(4) if job not in first], 2)
    drawn = sorted(sorted(pair) for pair in (first, last))
    assert policy.pairs(asked([*range(4)])).jobs.tolist() == drawn, "two draws of those that are left"
    assert policy.pairs(asked([*range(4)])).jobs.tolist() == drawn, "they stay together"
    again = policy.pairs(asked([*range(6)], tuple(drawn[0]))).jobs.tolist()
    assert drawn[1] in again
    assert {job for pair in again for job in pair} == {*range(6)}, "two new ones, and those that lost, are drawn"
    assert not len(policy.pairs(asked([0, 1])).jobs), "two jobs find GPUs of their own"


def demand(seed: int, jobs: int = 8) -> Demand:
    """Jobs of four types on one or two GPUs, which do 0.5 to 1.5 times as much beside each other as in turn."""
    random = np.random.default_rng(seed)
    types, gpus = random.integers(0, 4, jobs), np.array([1.0, 1.0, 2.0, 2.0])
    rates = random.uniform(1.0, 20.0, (4, 3))
    return Demand(
        names=range(jobs),
        rates=rates[types],
        gpus=gpus[types],
        weights=random.uniform(1.0, 3.0, jobs),
        steps_left=random.uniform(1e3, 1e5, jobs),
        waited_s=random.uniform(0.0, 1e3, jobs),
        workers=np.array([2.0, 1.0, 2.0]),
        types=types.tolist(),
        beside={
            (one, other): rates[[one, other]] * random.uniform(0.25, 0.75, (2, 3))
            for one, other in itertools.product(range(4), repeat=2)
            if gpus[one] == gpus[other]
        },
    )


def best_least(asked: Demand, worth: np.ndarray) -> float:
    """The largest least progress of all jobs by another solver, with every pair of jobs that need as many GPUs."""
    jobs, kinds = asked.rates.shape
    both = [each for each in itertools.combinations(range(jobs), 2) if asked.gpus[each[0]] == asked.gpus[each[1]]]
    units = [(job,) for job in range(jobs)] + both
    rows = []
    for job in range(jobs):
        row = []
        for unit in units:
            alone = asked.rates[job] if len(unit) == 1 else None
            if job in unit:
                row += list(-worth[job] * (asked.together(*unit)[unit.index(job)] if alone is None else alone))
            else:
                row += [0.0] * kinds
        rows.append([*row, 1.0])
    rows += [[*np.repeat([float(job in unit) for unit in units], kinds), 0.0] for job in range(jobs)]
    rows += [[*np.kron([asked.gpus[unit[0]] for unit in units], np.eye(kinds)[kind]), 0.0] for kind in range(kinds)]
    limits = [*np.zeros(jobs), *np.ones(jobs), *asked.workers]
    return -linprog([0.0] * (len(units) * kinds) + [-1.0], rows, limits).fun


@pytest.mark.parametrize("seed", range(4))
def test_shares_with_the_pairs_that_gain_are_as_good_as_with_all_pairs(seed):
    asked = demand(seed)
    pairs = gaining_pairs(asked)
    assert len(pairs.jobs)
    chosen = Demand(**{**vars(asked), "pairs": pairs})
    for policy, worth in (
        ("max-min-fairness-packed", asked.gpus / (asked.weights * (asked.rates @ asked.workers / 5.0))),
        ("min-total-duration-packed", 1.0 / asked.steps_left),
    ):
        found = shares(policy).of(chosen)
        done = (asked.rates * found[:8]).sum(axis=1)
        for pair, rates, own in zip(pairs.jobs, pairs.rates, found[8:], strict=True):
            done[pair] += (rates * own).sum(axis=1)
        assert (done * worth).min() == pytest.approx(best_least(asked, worth), rel=1e-6)
        gpus = np.concatenate([asked.gpus, asked.gpus[pairs.jobs[:, 0]]])
        assert (gpus @ found <= asked.workers + 1e-6).all()


stepped = st.lists(
    st.tuples(st.integers(1, 2), st.integers(0, 3_000), st.integers(1, 30_000), st.integers(0, 2)),
    min_size=1,
    max_size=7,
)
RATES = np.array([[10.0, 4.0], [20.0, 0.0], [5.0, 5.0]])


def drawn_jobs(drawn: list[tuple[int, int, int, int]]) -> list[SteppedJob]:
    return [
        SteppedJob(str(i), gpus, float(submit_s), steps, tuple(RATES[kind]), type=str(kind))
        for i, (gpus, submit_s, steps, kind) in enumerate(drawn)
    ]


def table(seed: int) -> Beside:
    random = np.random.default_rng(seed)
    return {
        (str(one), str(other), gpus): RATES[[one, other]] * random.uniform(0.0, 1.0, (2, 2))
        for one, other, gpus in itertools.product(range(3), range(3), (1, 2))
    }


@settings(max_examples=30, deadline=None)
@given(stepped, st.sampled_from(list(PACKING)), st.integers(0, 100), st.booleans())
def test_pairs_never_have_more_gpus_than_there_are_and_all_jobs_end(drawn, policy, seed, failing):
    jobs = drawn_jobs(drawn)
    how = NodesOfKinds(2, "packed", NodeFailures(3e4, 900.0, 200.0, seed) if failing else None)
    found = in_rounds(jobs, (4, 2), policy, how, table(seed))
    assert sorted(job.job.name for job in found) == sorted(job.name for job in jobs)
    assert max(in_use(found)[1]) <= 6
    for job in found:
        own = jobs[int(job.job.name)]
        assert own.submit_s <= job.start_s <= job.end_s
        assert own.steps / max(own.rates) <= job.ran_s * (1 + 1e-9) + 1e-6
        for begin_s, end_s, gpus in job.periods:
            assert begin_s < end_s
            assert gpus in (own.gpus, own.gpus / 2)


@settings(max_examples=25, deadline=None)
@given(stepped, st.sampled_from(list(UNPACKED)))
def test_jobs_that_can_share_no_gpus_run_as_without_packing(drawn, policy):
    jobs = drawn_jobs(drawn)
    nothing = {types: np.zeros((2, 2)) for types in table(0)}
    assert in_rounds(jobs, (2, 2), policy, beside=nothing) == in_rounds(jobs, (2, 2), UNPACKED[policy])


TABLE = {
    "v100": {
        "('LM', 1)": {"null": 10.0, "('LM', 1)": [6.0, 6.0], "('CNN', 1)": [7.0, 2.0], "('CNN', 2)": [1.0, 1.0]},
        "('CNN', 1)": {"null": 4.0, "('LM', 1)": [2.0, 7.0]},
    }
}


def test_rates_of_pairs_are_read_for_jobs_that_need_as_many_gpus(tmp_path):
    file = tmp_path / "rates.json"
    file.write_text(json.dumps(TABLE))
    alone, beside = read_rates(file, ["v100"])
    assert alone == {"v100": {("LM", 1): 10.0, ("CNN", 1): 4.0}}
    assert {types: rates[:, 0].tolist() for types, rates in beside.items()} == {
        ("LM", "LM", 1): [6.0, 6.0],
        ("LM", "CNN", 1): [7.0, 2.0],
        ("CNN", "LM", 1): [2.0, 7.0],
    }
    file.write_text(json.dumps({"v100": {"('LM', 1)": {"null": 10.0, "('LM', 1)": [6.0]}}}))
    with pytest.raises(ForerunError, match=r"give the steps a second of both jobs as two numbers"):
        read_rates(file, ["v100"])


CLUSTER = """gpu_kinds: {v100: 1}
policies: [max-min-fairness-packed, max-min-fairness-perf]
jobs:
  - {name: a, gpus: 1, steps: 36000, steps_per_s: {v100: 10}}
  - {name: b, gpus: 1, steps: 36000, steps_per_s: {v100: 10}}
pairs:
  - {jobs: [a, b], steps_per_s: {v100: [8, 8]}}
"""


def test_a_file_says_which_jobs_can_share_gpus(tmp_path, capsys):
    file = tmp_path / "c.yaml"
    file.write_text(CLUSTER)
    page = tmp_path / "page.html"
    assert run(["cluster", str(file), "--json", "--report", str(page)]) == 0
    packed, apart = json.loads(capsys.readouterr().out)["policies"]
    assert packed["makespan_s"] == pytest.approx(4500.0)
    assert apart["makespan_s"] == pytest.approx(7200.0)
    assert "max-min-fairness-packed" in page.read_text()


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        ({"jobs": ["a", "x"]}, "x: pair a and x: there is no job x"),
        ({"jobs": ["a", "c"]}, "x: pair a and c: jobs that share GPUs need as many; these need 1 and 2"),
        ({"steps_per_s": {"h100": [1, 1]}}, "x: pair a and b: steps_per_s: no GPU kind h100; known: v100"),
    ],
)
def test_a_pair_that_makes_no_sense_is_one_line(pair, words):
    jobs = [
        {"name": name, "gpus": gpus, "steps": 9, "steps_per_s": {"v100": 1}}
        for name, gpus in (("a", 1), ("b", 1), ("c", 2))
    ]
    described = {"gpu_kinds": {"v100": 2}, "jobs": jobs}
    whole = {"jobs": ["a", "b"], "steps_per_s": {"v100": [1, 1]}} | pair
    with pytest.raises(ForerunError) as error:
        unlike_cluster_of({**described, "pairs": [whole]}, "x")
    assert str(error.value).startswith(words)
