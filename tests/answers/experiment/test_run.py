"""Runs: iterations one by one where they differ, folded where they don't, and what they sum to."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from small_requests import MODEL, instant, request, setup

from forerun.answers.analysis.setup import RankKind
from forerun.answers.analysis.simulate_setup import simulate_setup
from forerun.answers.experiment.records import run_record
from forerun.answers.experiment.request import Prices
from forerun.answers.experiment.result import CAUSES, Iteration, percentile_s
from forerun.answers.experiment.run import run
from forerun.common.errors import ForerunError
from forerun.describe.model.catalog import load_any

WILD = {
    "seed": 3,
    "compute_jitter": 0.05,
    "network_jitter": 0.1,
    "straggler_probability": 0.05,
    "straggler_slowdown": 1.4,
    "slow_ranks": {2: 1.02},
    "warmup_iterations": 4,
    "warmup_slowdown": 2.0,
}
UNDISTURBED_S = simulate_setup(setup()).prediction.step_time_s


def text_of(result: Any) -> str:
    return json.dumps(run_record(result))


def test_equal_iterations_are_one() -> None:
    result = run(request(n=10**6))
    (only,) = result.iterations
    assert (only.first, only.repeats, only.start_s, only.slowest_rank) == (0, 10**6, 0.0, -1)
    assert only.step_time_s == UNDISTURBED_S == result.p50_s == result.p99_s == pytest.approx(result.mean_s, rel=1e-12)
    assert result.total_s == pytest.approx(10**6 * UNDISTURBED_S, rel=1e-12)
    assert only.breakdown_s["waiting"] == 0.0
    assert result.notes == ()


def test_iterations_follow_each_other_and_sum_to_the_run() -> None:
    result = run(request(n=60, disturbance=WILD, batch_schedule=((20, 4), (40, 16))))
    now, number = 0.0, 0
    for each in result.iterations:
        assert each.first == number
        assert each.start_s == pytest.approx(now, rel=1e-12)
        assert sum(each.breakdown_s.values()) == pytest.approx(each.step_time_s, rel=1e-9)
        assert set(each.breakdown_s) == set(CAUSES)
        assert min(each.breakdown_s.values()) >= 0
        now, number = now + each.repeats * each.step_time_s, number + each.repeats
    assert number == 60
    assert result.total_s == pytest.approx(now, rel=1e-12)
    assert result.samples_per_s == pytest.approx(8 * 20 * (8 + 4 + 16) / now)
    assert result.tokens_per_s == pytest.approx(512 * result.samples_per_s)
    assert sum(result.breakdown_s.values()) == pytest.approx(result.mean_s, rel=1e-9)


def test_the_same_seed_gives_the_same_bytes() -> None:
    first, second = (run(request(n=40, disturbance=WILD)) for _ in range(2))
    assert text_of(first) == text_of(second)
    assert text_of(run(request(n=40, disturbance=WILD | {"seed": 4}))) != text_of(first)


def test_a_longer_run_begins_as_a_shorter_one() -> None:
    short, long = (run(request(n=n, disturbance=WILD)) for n in (10, 30))
    assert long.iterations[: len(short.iterations)] == short.iterations


@pytest.mark.parametrize("slow", [1.1, 1.5])
@pytest.mark.parametrize(
    "plan", [{}, {"dp_replicate": 1, "dp_shard": 8, "zero_stage": 3}, {"tp": 4, "dp_replicate": 2}], ids=str
)
def test_a_slower_gpu_slows_a_synchronous_step_exactly_to_its_own_time(plan: dict[str, int], slow: float) -> None:
    base = setup(**plan)
    one = run(request(base, disturbance={"slow_ranks": {5: slow}}))
    every = run(request(base, disturbance={"slow_ranks": dict.fromkeys(range(8), slow)}))
    assert one.mean_s == every.mean_s > run(request(base)).mean_s
    assert (one.iterations[0].slowest_rank, every.iterations[0].slowest_rank) == (5, -1)
    assert one.breakdown_s["waiting"] == pytest.approx(one.mean_s - run(request(base)).mean_s, rel=1e-9)
    assert every.breakdown_s["waiting"] == 0.0


def test_kernels_of_a_slow_gpu_take_its_own_time_where_nothing_else_does() -> None:
    base = dataclasses.replace(setup(micro_batch=64, cuda_graphs=True), cluster=instant())
    sound = run(request(base))
    slow = run(request(base, disturbance={"slow_ranks": {0: 1.1}}))
    assert slow.mean_s - sound.mean_s == pytest.approx(0.1 * sound.breakdown_s["compute"], rel=0.01)


def test_a_slow_kind_of_gpu_waits_as_a_slow_rank_does() -> None:
    kind = run(request(dataclasses.replace(setup(), kinds=(RankKind("slow", 2, slowdown=1.2),))))
    rank = run(request(disturbance={"slow_ranks": {7: 1.2}}))
    assert kind.mean_s == pytest.approx(rank.mean_s, rel=1e-6)
    assert kind.breakdown_s["waiting"] == pytest.approx(rank.breakdown_s["waiting"], rel=1e-4)
    assert kind.iterations[0].slowest_rank in (6, 7)


def test_a_slow_stage_of_a_pipeline_is_to_blame() -> None:
    base = setup(pp=2, dp_replicate=4, n_microbatches=4)
    result = run(request(base, disturbance={"slow_ranks": {5: 1.6}}))
    assert result.iterations[0].slowest_rank == 5
    assert result.breakdown_s["waiting"] > 0


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_more_jitter_is_never_faster(seed: int) -> None:
    base = setup(dp_replicate=32)
    means = [
        run(request(base, n=30, disturbance={"seed": seed, "compute_jitter": jitter})).mean_s
        for jitter in (0.0, 0.01, 0.03, 0.1, 0.3)
    ]
    assert means == sorted(means)
    assert means[0] < means[1]


def test_warm_up_falls_to_the_undisturbed_step() -> None:
    result = run(request(n=10, disturbance={"warmup_iterations": 4, "warmup_slowdown": 2.0}))
    times = [each.step_time_s for each in result.iterations]
    assert times == sorted(times, reverse=True)
    assert [each.repeats for each in result.iterations] == [1, 1, 1, 1, 6]
    assert times[-1] == UNDISTURBED_S
    assert [each.note for each in result.iterations] == ["warm-up"] * 4 + [""]
    assert all(each.breakdown_s["waiting"] == 0 for each in result.iterations)


def test_schedules_change_batch_and_sequence() -> None:
    result = run(request(n=9, batch_schedule=((3, 16),), seq_len_schedule=((3, 256), (6, 128))))
    assert [(each.first, each.repeats, each.samples, each.seq_len, each.note) for each in result.iterations] == [
        (0, 3, 64, 512, ""),
        (3, 3, 128, 256, "batch 16; sequence 256"),
        (6, 3, 128, 128, "batch 16; sequence 128"),
    ]
    alone = simulate_setup(setup(micro_batch=16, seq_len=256)).prediction
    assert result.iterations[1].step_time_s == alone.step_time_s
    tokens = 3 * (64 * 512 + 128 * 256 + 128 * 128)
    assert result.tokens_per_s == pytest.approx(tokens / result.total_s)


@pytest.mark.parametrize("sample", ["image", "sequence"])
def test_models_given_layer_by_layer_have_no_tokens(sample: str) -> None:
    layered = dataclasses.replace(setup(seq_len=1, stack="pytorch-vision"), model=load_any("resnet18"))
    result = run(request(layered, sample=sample))
    assert result.tokens_per_s is None
    assert result.bill.dollars_per_billion_tokens is None
    assert result.bill.dollars_per_million_samples is not None


def test_the_bill_is_of_the_whole_run() -> None:
    result = run(request(n=1000))
    assert result.bill.gpu_hours == pytest.approx(8 * result.total_s / 3600)
    assert result.bill.dollars == pytest.approx(1.79 * result.bill.gpu_hours)
    waiting = run(request(n=1000, disturbance={"slow_ranks": {0: 2.0}}))
    assert waiting.bill.energy_kwh > result.bill.energy_kwh


def test_gpus_that_wait_draw_what_idle_ones_draw() -> None:
    def mean_power_kw(idle_power: float, slow: float) -> float:
        prices = Prices(idle_power=idle_power)
        result = run(request(prices=prices, disturbance={"slow_ranks": {0: slow}}))
        return result.bill.energy_kwh / (result.total_s / 3600)

    assert mean_power_kw(1.0, 1.0) == pytest.approx(mean_power_kw(1.0, 5.0)) == pytest.approx(8 * 0.4)
    assert 0.3 * mean_power_kw(1.0, 1.0) < mean_power_kw(0.3, 5.0) < mean_power_kw(0.3, 1.0) < mean_power_kw(1.0, 1.0)


def test_a_run_too_long_for_each_iteration_is_sampled_and_says_so() -> None:
    every = run(request(n=4000, disturbance={"compute_jitter": 0.1}))
    sampled = run(request(n=4000, disturbance={"compute_jitter": 0.1}), most=500)
    assert len(every.iterations) == 4000
    assert [each.repeats for each in sampled.iterations] == [8] * 500
    assert [each.step_time_s for each in sampled.iterations] == [each.step_time_s for each in every.iterations[::8]]
    assert sampled.mean_s == pytest.approx(every.mean_s, rel=0.01)
    assert every.notes == ()
    assert sampled.notes == (
        "one of every 8 different iterations is simulated, with the random numbers of seed 0, and represents the"
        " others",
    )


def test_replicated_pipelines_say_that_times_are_bounds() -> None:
    pipeline = setup(pp=2, dp_replicate=4, n_microbatches=4)
    (note,) = run(request(pipeline, disturbance={"compute_jitter": 0.1})).notes
    assert "upper bounds" in note
    assert run(request(pipeline, disturbance={"slow_ranks": {1: 2.0}})).notes == ()
    assert run(request(setup(pp=2, dp_replicate=1), disturbance={"compute_jitter": 0.1})).notes == ()


def test_samples_keep_to_warm_up_and_schedules() -> None:
    disturbance = {"compute_jitter": 0.1, "warmup_iterations": 5, "warmup_slowdown": 2.0}
    result = run(request(n=100, disturbance=disturbance, batch_schedule=((50, 16),)), most=10)
    firsts = [(each.first, each.repeats) for each in result.iterations]
    assert firsts == [
        (0, 5),
        (5, 10),
        (15, 10),
        (25, 10),
        (35, 10),
        (45, 5),
        *((first, 10) for first in range(50, 100, 10)),
    ]


def test_percentiles_are_times_of_iterations() -> None:
    def one(time_s: float, repeats: int) -> Iteration:
        return Iteration(0, repeats, 0.0, time_s, 1, 1, {}, -1)

    iterations = [one(3.0, 1), one(1.0, 98), one(2.0, 1)]
    assert [percentile_s(iterations, percent) for percent in (1, 50, 98, 99, 100)] == [1.0, 1.0, 1.0, 2.0, 3.0]
    assert percentile_s([one(5.0, 1)], 99) == 5.0


def test_progress_reaches_the_end() -> None:
    seen: list[tuple[int, int]] = []
    run(request(n=7, disturbance={"compute_jitter": 0.1}), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(n, 7) for n in range(1, 8)]


def test_tables_of_a_run() -> None:
    result = run(request(n=5, disturbance=WILD))
    frame = result.to_dataframe()
    assert list(frame["first"]) == [0, 1, 2, 3, 4]
    assert (frame[[f"{cause}_s" for cause in CAUSES]].sum(axis=1) - frame["step_time_s"]).abs().max() < 1e-12
    summary = result.summary()
    assert (summary["model"], summary["n_gpus"], summary["num_iterations"]) == (MODEL.name, 8, 5)
    assert summary["step_mean_s"] == result.mean_s
    assert summary["waiting_s"] == result.breakdown_s["waiting"]
    assert summary["dollars"] == result.bill.dollars


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"n": 0}, "small: num_iterations must be at least 1, got 0"),
        ({"batch_schedule": ((5, 4), (5, 8))}, "iterations of the batch schedule must rise"),
        ({"seq_len_schedule": ((-1, 4),)}, "iterations of the sequence length schedule must rise"),
        ({"batch_schedule": ((0, 0),)}, "micro_batch must be a whole number of at least 1"),
        ({"disturbance": {"slow_ranks": {9: 2.0}}}, "slow_ranks: there is no rank 9"),
    ],
)
def test_requests_that_cannot_run(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ForerunError, match=message):
        run(request(**wrong))
