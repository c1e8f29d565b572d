"""Scaling: known answers, what keeps and what grows, and where it breaks down."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_requests import request as made_in_python
from study_sections import sections

from forerun.answers.experiment.description.read import read_experiment
from forerun.answers.experiment.records import scaling_record
from forerun.answers.experiment.result import CAUSES, Bill, ScalePoint
from forerun.answers.experiment.run import run
from forerun.answers.experiment.scaling import cause_of, plan_at, request_at, scale
from forerun.common.errors import ForerunError
from forerun.common.workers import Workers
from forerun.describe.plan.plan import Plan

pytestmark = pytest.mark.usefixtures("equal_clocks")

IDEAL = {"topology_type": "ideal"}


@pytest.mark.parametrize("training", [{}, {"tp": 2, "gradient_accumulation_steps": 2}, {"pp": 2}], ids=str)
def test_weak_scaling_on_an_ideal_network_is_one(training: dict[str, int]) -> None:
    study = scale(read_experiment(sections(network=IDEAL, **training)), [1, 2, 8, 64])
    assert [point.efficiency for point in study.points] == [1.0] * 4
    assert (study.break_down, study.cause) == (None, "")
    assert (study.best_by_time, study.best_by_efficiency, study.best_by_cost) == (64, 64, 64)


def test_more_shards_on_an_ideal_network_update_less_each() -> None:
    study = scale(read_experiment(sections(network=IDEAL, zero_stage=3)), [1, 2, 8, 64])
    efficiency = [point.efficiency for point in study.points]
    assert efficiency == sorted(efficiency)
    assert efficiency[-1] < 1.01


def test_strong_scaling_meets_amdahls_limit() -> None:
    """Micro batches are divided, what is done once in a step is not: T(n) = serial + parallel / n."""
    request = read_experiment(
        sections(network=IDEAL, num_nodes=1, batch_size_per_gpu=1, gradient_accumulation_steps=256)
    )
    study = scale(request, [1, 2, 4, 16, 64, 256], strong=True)
    times = {point.num_nodes: point.step_time_s for point in study.points}
    parallel = 2 * (times[1] - times[2])
    serial = times[1] - parallel
    assert 0 < serial < parallel
    for point in study.points:
        assert point.step_time_s == pytest.approx(serial + parallel / point.num_nodes, rel=2e-3)
        speed_up = times[1] / point.step_time_s
        share = serial / times[1]
        assert speed_up == pytest.approx(1 / (share + (1 - share) / point.num_nodes), rel=2e-3)
        assert speed_up < 1 / share
        assert point.efficiency == pytest.approx(speed_up / point.num_nodes, rel=1e-9)
    assert study.break_down in (4, 16, 64, 256)
    assert study.best_by_time == 256


def test_weak_scaling_keeps_the_batch_of_a_gpu() -> None:
    study = scale(read_experiment(sections()), [4, 1, 2, 2])
    assert [point.num_nodes for point in study.points] == [1, 2, 4]
    assert [point.n_gpus for point in study.points] == [8, 16, 32]
    assert [point.samples_per_step for point in study.points] == [64, 128, 256]
    assert study.points[1].step_time_s == run(read_experiment(sections())).mean_s
    assert study.points[0].efficiency == 1.0
    for point in study.points:
        assert set(point.breakdown_s) == set(CAUSES)
        assert sum(point.breakdown_s.values()) == pytest.approx(point.step_time_s)
        assert point.samples_per_s == pytest.approx(point.samples_per_step / point.step_time_s)
        assert point.bill.gpu_hours == pytest.approx(10 * point.step_time_s * point.n_gpus / 3600)


def test_strong_scaling_keeps_the_global_batch_and_says_where_it_does_not_split() -> None:
    study = scale(read_experiment(sections()), [1, 2, 3, 16, 32], strong=True)
    assert [point.samples_per_step for point in study.points] == [128, 128, 0, 128, 0]
    assert "global batch of 128 is not a multiple of 24 data-parallel ranks" in study.points[2].error
    assert "global batch of 128 is not a multiple of 256 data-parallel ranks" in study.points[4].error
    assert study.points[2].efficiency == 0.0
    assert study.break_down in (2, 16)
    assert study.cause


@given(st.integers(1, 12), st.integers(1, 12), st.sampled_from([1, 2, 4]), st.integers(1, 64))
def test_strong_plans_keep_the_global_batch_or_refuse(micro: int, accumulated: int, tp: int, replicas: int) -> None:
    plan = Plan(seq_len=8, micro_batch=micro, n_microbatches=accumulated, dp_replicate=4, tp=tp, zero_stage=0)
    try:
        scaled = plan_at(plan, replicas * tp, strong=True)
    except ForerunError:
        assert plan.global_batch % replicas
        return
    assert (scaled.global_batch, scaled.dp, scaled.tp) == (plan.global_batch, replicas, tp)
    assert scaled.micro_batch <= micro


@pytest.mark.parametrize(
    ("before", "n_gpus", "after"),
    [
        ({"dp_replicate": 8, "zero_stage": 0}, 32, (32, 1)),
        ({"dp_shard": 8, "zero_stage": 3}, 32, (1, 32)),
        ({"dp_shard": 8, "dp_replicate": 2, "zero_stage": 3}, 64, (8, 8)),
        ({"dp_shard": 8, "dp_replicate": 2, "zero_stage": 3}, 4, (1, 4)),
        ({"dp_shard": 2, "dp_replicate": 2, "zero_stage": 3}, 8, (4, 2)),
        ({"zero_stage": 3}, 4, (1, 4)),
        ({"zero_stage": 0}, 4, (4, 1)),
        ({"dp_shard": 2, "tp": 4, "zero_stage": 2}, 32, (1, 8)),
    ],
)
def test_the_axis_that_grows(before: dict[str, Any], n_gpus: int, after: tuple[int, int]) -> None:
    plan = plan_at(Plan(seq_len=8, **before), n_gpus, strong=False)
    assert (plan.dp_replicate, plan.dp_shard) == after


def test_plans_that_do_not_divide() -> None:
    with pytest.raises(ForerunError, match="12 GPUs are not a multiple of the 8 GPUs of a replica"):
        plan_at(Plan(seq_len=8, tp=8), 12, strong=False)
    with pytest.raises(ForerunError, match="12 data-parallel ranks are not a multiple of dp_shard 8"):
        plan_at(Plan(seq_len=8, dp_shard=8, dp_replicate=2), 12, strong=False)


def test_scales_that_cannot_run_do_not_end_the_study() -> None:
    study = scale(read_experiment(sections(tp=8, pp=2)), [1, 2, 4])
    assert "8 GPUs are not a multiple of the 16 GPUs of a replica" in study.points[0].error
    assert [bool(point.error) for point in study.points] == [True, False, False]
    assert study.points[1].efficiency == 1.0
    frame = study.to_dataframe()
    assert list(frame["num_nodes"]) == [1, 2, 4]
    assert study.summary()["efficiency"][0] is None


def test_a_topology_grows_with_the_nodes() -> None:
    ring = read_experiment(sections(network={"topology_type": "ring"}))
    at_eight, _ = request_at(ring, 8, strong=False)
    assert at_eight.setup.network is not None
    assert at_eight.setup.network.n_npus == 64
    study = scale(ring, [2, 8])
    assert study.points[1].step_time_s == run(at_eight).mean_s


def test_kinds_of_gpus_scale_in_proportion() -> None:
    mixed = read_experiment(
        sections(hardware={"mixed": [{"gpu_model": "V100", "num_nodes": 1}]}, mixed_precision="fp16")
    )
    at_four, _ = request_at(mixed, 4, strong=False)
    (kind,) = at_four.setup.kinds
    assert (kind.n_gpus, at_four.setup.n_gpus) == (16, 32)
    odd = read_experiment(sections(hardware={"mixed": [{"gpu_model": "V100", "num_gpus": 3}]}, mixed_precision="fp16"))
    study = scale(odd, [1, 2])
    assert "3 of 16 GPUs are v100" in study.points[0].error
    assert study.points[1].error == ""
    uneven = {"mixed": [{"gpu_model": "V100", "num_nodes": 1, "batch_size_per_gpu": 4}]}
    study = scale(read_experiment(sections(hardware=uneven, mixed_precision="fp16")), [2], strong=True)
    assert "which changes the global batch" in study.points[0].error


def test_a_slow_rank_is_slow_where_it_exists() -> None:
    study = scale(read_experiment(sections(hardware={"slow_gpus": {9: 1.5}})), [1, 2])
    assert study.points[0].note == "no slow rank 9 among 8 GPUs"
    assert study.points[0].breakdown_s["waiting"] == 0.0
    assert study.points[1].note == ""
    assert study.points[1].breakdown_s["waiting"] > 0


def test_strong_scaling_keeps_the_batches_of_a_schedule() -> None:
    request = read_experiment(sections(batch_schedule=[[5, 16]]))
    at_four, _ = request_at(request, 4, strong=True)
    assert at_four.setup.plan.micro_batch == 4
    assert at_four.batch_schedule == ((5, 8),)
    assert request_at(request, 4, strong=False)[0].batch_schedule == ((5, 16),)
    odd = read_experiment(sections(batch_schedule=[[5, 9]]))
    assert "global batch of 144 in batch_schedule is not a multiple" in scale(odd, [8], strong=True).points[0].error


def test_a_goal_in_tokens_takes_fewer_iterations_on_more_nodes() -> None:
    data = sections(total_tokens=2**21)
    del data["training"]["num_iterations"]
    request = read_experiment(data)
    assert [request_at(request, n, strong=False)[0].num_iterations for n in (1, 2, 4)] == [64, 32, 16]


def point(num_nodes: int, **seconds: float) -> ScalePoint:
    breakdown = dict.fromkeys(CAUSES, 0.0) | seconds
    bill = Bill(0.0, None, None, None, None, 0.0, None)
    return ScalePoint(num_nodes, num_nodes, sum(seconds.values()), num_nodes, 1.0, 0.0, breakdown, 1.0, True, bill)


def test_the_cause_is_what_grew_most() -> None:
    base = point(1, compute=0.9, host=0.1)
    assert cause_of(base, point(4, compute=0.9, host=0.1, communication=1.0)) == (
        "communication is 50% of the step, and nothing on 1 node"
    )
    assert cause_of(base, point(4, compute=0.9, host=0.4, communication=0.1)) == (
        "host takes 4 times as much GPU time for a sample as on 1 node: 29% of the step, 10% there"
    )


def test_the_break_down_is_the_first_scale_below_the_threshold() -> None:
    slow = read_experiment(sections(hardware={"network_bandwidth_gbps": 1.0}))
    study = scale(slow, [1, 2, 4])
    assert study.break_down == 2
    assert study.cause.startswith("communication")
    assert study.best_by_efficiency == study.best_by_cost == 1


def test_what_does_not_fit_is_not_best() -> None:
    study = scale(read_experiment(sections(hardware={"memory_gb": 1.5}, batch_size_per_gpu=64)), [1, 2])
    assert not any(each.fits for each in study.points)
    assert (study.best_by_time, study.best_by_efficiency, study.best_by_cost) == (None, None, None)


def test_nodes_that_make_no_sense() -> None:
    request = read_experiment(sections())
    for nodes in ([], [0], [-2, 4]):
        with pytest.raises(ForerunError, match="expected numbers of nodes of at least 1"):
            scale(request, nodes)
    study = scale(made_in_python(), [1])
    assert "only an experiment that was read from sections" in study.points[0].error


def test_the_same_study_in_processes_is_the_same_bytes() -> None:
    request = read_experiment(sections(jitter=0.05, stragglers={"probability": 0.01, "slowdown": 1.5}))
    nodes = [1, 2, 3, 4, 6, 8]
    alone, together = (scale(request, nodes, workers=Workers(workers)) for workers in (1, 2))
    assert json.dumps(scaling_record(alone)) == json.dumps(scaling_record(together))
