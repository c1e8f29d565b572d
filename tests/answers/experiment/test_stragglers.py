"""Straggler studies: the spread of step times, and what the slowest rank costs."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from small_requests import request
from study_sections import sections

from forerun.answers.experiment.description.read import read_experiment
from forerun.answers.experiment.records import straggler_record
from forerun.answers.experiment.run import run
from forerun.answers.experiment.stragglers import study
from forerun.common.errors import ForerunError
from forerun.common.workers import Workers

JITTER = {"seed": 2, "compute_jitter": 0.05, "straggler_probability": 0.02, "straggler_slowdown": 1.5}


def test_a_study_reads_its_run() -> None:
    asked = request(n=300, disturbance=JITTER)
    found, result = study(asked, sweep=()), run(asked)
    assert (found.mean_s, found.p50_s, found.p99_s) == (result.mean_s, result.p50_s, result.p99_s)
    assert found.steps_s == tuple(each.step_time_s for each in result.iterations for _ in range(each.repeats))
    assert found.mean_s == pytest.approx(np.mean(found.steps_s))
    assert found.p99_s == np.sort(found.steps_s)[296]
    assert found.undisturbed_s < found.p50_s < found.mean_s < found.p99_s
    waiting = sum(each.repeats * each.breakdown_s["waiting"] for each in result.iterations)
    assert found.lost_s == pytest.approx(waiting)
    assert found.lost_share == pytest.approx(waiting / result.total_s)
    assert result.bill.dollars is not None
    assert found.lost_dollars == pytest.approx(result.bill.dollars * found.lost_share)
    counts = Counter(each.slowest_rank for each in result.iterations if each.slowest_rank >= 0)
    assert dict(found.blame) == counts
    assert sum(found.blame_s) == pytest.approx(found.lost_s)
    worst = [each for each in result.iterations if each.slowest_rank == found.blame[0][0]]
    assert found.blame_s[0] == pytest.approx(sum(each.repeats * each.breakdown_s["waiting"] for each in worst))
    assert [count for _, count in found.blame] == sorted(counts.values(), reverse=True)


def test_one_slow_rank_takes_all_the_blame_and_costs_what_it_costs() -> None:
    found = study(request(n=50, disturbance={"slow_ranks": {5: 1.1}}))
    sound = run(request()).mean_s
    assert found.blame == ((5, 50),)
    assert found.lost_share == pytest.approx((found.mean_s - sound) / found.mean_s)
    assert found.lost_s == pytest.approx(50 * (found.mean_s - sound))
    assert found.sweep == ()
    assert found.steps_s == pytest.approx((found.mean_s,) * 50, rel=1e-12)


def test_more_and_slower_stragglers_cost_more() -> None:
    found = study(request(n=400, disturbance={"straggler_probability": 0.02, "straggler_slowdown": 1.4}))
    by = {(each.probability, round(each.slowdown, 6)): each for each in found.sweep}
    assert set(by) == {(p, slow) for p in (0.01, 0.02, 0.04) for slow in (1.2, 1.4, 1.8)}
    for (p, slow), each in by.items():
        for other_p, other_slow in by:
            if p <= other_p and slow <= other_slow:
                assert each.mean_s <= by[other_p, other_slow].mean_s
                assert each.lost_share <= by[other_p, other_slow].lost_share
    assert by[0.02, 1.4].mean_s == found.mean_s


def test_a_sweep_that_is_asked_for() -> None:
    found = study(request(n=20, disturbance={"compute_jitter": 0.01}), sweep=[(0.5, 2.0), (1.0, 2.0)])
    assert [(each.probability, each.slowdown) for each in found.sweep] == [(0.5, 2.0), (1.0, 2.0)]
    assert found.mean_s < found.sweep[0].mean_s


def test_a_slow_kind_of_gpu_is_a_disturbance() -> None:
    data = sections(hardware={"mixed": [{"gpu_model": "V100", "num_gpus": 2}]}, mixed_precision="fp16")
    found = study(read_experiment(data))
    assert found.lost_share > 0.05
    assert found.blame[0][0] in (14, 15)


def test_the_same_seed_gives_the_same_bytes() -> None:
    texts = [
        json.dumps(straggler_record(study(request(n=60, disturbance=JITTER | {"seed": seed}), workers=workers)))
        for seed, workers in ((2, Workers(1)), (2, Workers(2)), (3, Workers(1)))
    ]
    assert texts[0] == texts[1] != texts[2]


def test_times_of_a_very_long_run_are_thinned_out() -> None:
    found = study(request(n=250_000, disturbance={"slow_ranks": {0: 2.0}}))
    assert len(found.steps_s) == 83_334
    assert found.notes == ("times are listed of one iteration in 3",)


def test_without_a_disturbance_there_is_nothing_to_study() -> None:
    with pytest.raises(ForerunError, match=r"nothing disturbs the run; set training\.jitter"):
        study(request())
    with pytest.raises(ForerunError, match="nothing disturbs the run"):
        study(request(disturbance={"straggler_probability": 0.5, "straggler_slowdown": 1.0}))


def test_tables_of_a_study() -> None:
    found = study(request(n=30, disturbance=JITTER))
    assert list(found.to_dataframe()["step_time_s"]) == list(found.steps_s)
    assert found.summary()["slowest_rank"] == found.blame[0][0]
    assert found.summary()["step_p99_s"] == found.p99_s
