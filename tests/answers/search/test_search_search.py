"""The search finds what trying everything finds, and accounts for every configuration."""

from dataclasses import replace

import pytest

from forerun.answers.analysis.predict import predict
from forerun.answers.analysis.prediction import Prediction
from forerun.answers.search.executor import Question, Refused, executor_of
from forerun.answers.search.result import REFUSED_RULE
from forerun.answers.search.search import search
from forerun.answers.search.space import Tally, make_space
from forerun.common.errors import ForerunError, ImpossiblePlan
from forerun.common.units import GIB
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.cluster.memory_limit import limited
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan

TINY = replace(load_model("gpt2-small"), n_layers=4, vocab=1024, name="tiny")
CLUSTER = load_cluster("h100-sxm")
QUESTION = {"n_gpus": 8, "seq_len": 512, "global_batch": 32}
FEW = {"pp": [1, 2], "cp": 1, "activation_checkpointing": ["none", "full"]}


def made_up_time(plan: Plan) -> float:
    """Any fixed function of a plan, with ties."""
    return 1.0 + (plan.tp * 7 + plan.pp * 3 + plan.micro_batch * 5 + plan.zero_stage) % 11


def made_up(model, plan, cluster) -> Prediction:
    time_s = made_up_time(plan)
    memory_gib = 40.0 + plan.micro_batch
    return Prediction(
        model=model.name,
        cluster=cluster.name,
        plan=plan,
        n_gpus=plan.world_size,
        step_time_s=time_s,
        step_time_low_s=0.9 * time_s,
        step_time_high_s=1.2 * time_s,
        tokens_per_s_per_gpu=plan.tokens_per_step / plan.world_size / time_s,
        mfu=0.4,
        hfu=0.4,
        peak_allocated_gib=memory_gib,
        peak_reserved_gib=memory_gib,
        peak_reserved_low_gib=memory_gib,
        peak_reserved_high_gib=1.1 * memory_gib,
        device_gib=memory_gib + 2,
        memory_limit_gib=cluster.device.memory_bytes / GIB,
        fits=plan.tp != 4,
        fit_in_doubt=False,
        warnings=(),
        memory_by_category_gib={"activation": 30.0, "parameter": memory_gib - 30},
        peak_rank_class="every rank",
        peak_owner="somewhere",
        exposed_comm_s=0.0,
        bubble_s=0.0,
        breakdown={"matmul": time_s},
        bottleneck="matmul",
        dollars_per_billion_tokens=None,
        coverage=1.0,
        explain=(),
    )


def picky(model, plan, cluster) -> Prediction:
    if plan.micro_batch > 1:
        raise ImpossiblePlan("one at a time")
    return made_up(model, plan, cluster)


def everything(fixed):
    return list(make_space(TINY, CLUSTER, *QUESTION.values(), fixed).plans(Tally()))


@pytest.mark.parametrize("workers", [1, 2])
def test_it_finds_what_trying_everything_finds(workers):
    plans = everything(FEW)
    assert len(plans) > 64  # enough for several processes
    result = search(TINY, CLUSTER, **QUESTION, fixed=FEW, predictor=made_up, workers=workers)
    fitting = [plan for plan in plans if plan.tp != 4]
    expected = sorted(fitting, key=made_up_time)  # stable: ties stay in the order of the space
    assert [prediction.plan for prediction in result.ranked] == expected
    assert result.best is not None
    assert result.best.step_time_s == min(map(made_up_time, fitting))
    assert {each.plan for each in result.too_large} == {plan for plan in plans if plan.tp == 4}


def test_every_configuration_is_counted_once():
    result = search(TINY, CLUSTER, **QUESTION, predictor=picky, workers=1)
    counts = result.counts
    assert counts["considered"] == counts["impossible"] + counts["out_of_memory"] + counts["skipped"] + counts["ok"]
    assert result.impossible[REFUSED_RULE] > 0
    assert result.impossible_examples[REFUSED_RULE] == "one at a time"
    assert sum(result.out_of_memory.values()) == counts["out_of_memory"]
    rows = result.to_rows()
    assert len(rows) == counts["considered"] - counts["impossible"]
    assert [row["rank"] for row in rows if row["status"] == "ok"] == list(range(1, counts["ok"] + 1))
    assert len(result.to_dataframe()) == len(rows)


def test_columns_hold_every_possible_plan_and_the_proof_counts_them():
    result = search(TINY, CLUSTER, **QUESTION, fixed=FEW, predictor=made_up, workers=1)
    columns, rows = result.columns(), result.to_rows()
    assert {len(column) for column in columns.values()} == {len(rows)}
    for name in ("status", "tp", "zero_stage", "activation_checkpointing"):
        assert columns[name].tolist() == [row[name] for row in rows]
    assert "prefetch" not in columns  # the same in all plans
    assert columns["needs_gib"].tolist() == [row["peak_reserved_gib"] for row in rows]
    assert columns["objective"].tolist() == [row["step_time_s"] for row in rows]
    assert result.proof == f"first 10 places proved after {len(rows)} of {len(rows)} simulated"


def test_what_does_not_fit_says_why():
    result = search(TINY, CLUSTER, **QUESTION, fixed={"tp": 4, "micro_batch": 1}, predictor=made_up, workers=1)
    assert result.best is None
    limit = CLUSTER.device.memory_bytes / GIB
    assert result.too_large[0].reason == (
        f"needs 41.0 of {limit:.1f} GiB beside CUDA and NCCL on every rank; the largest part is activation with 30.0"
    )
    assert result.out_of_memory == {"activation": len(result.too_large)}


def test_a_plan_of_which_the_states_alone_are_too_large_is_not_simulated():
    model = load_model("llama-3.1-70b")
    result = search(model, CLUSTER, 8, 4096, 8, fixed={"pp": 1}, predictor=made_up, workers=1, memory_limit_gib=40)
    assert result.best is None
    assert all(each.prediction is None for each in result.too_large)
    assert all("needs at least" in each.reason and "of 40.0 GiB" in each.reason for each in result.too_large)


def test_a_plan_that_does_not_fit_is_not_run_and_needs_what_its_prediction_says():
    fixed = {"pp": [1, 2], "cp": 1, "stack": "torchtitan"}
    result = search(TINY, CLUSTER, 8, 512, 256, fixed=fixed, workers=1, memory_limit_gib=2.6, keep=3)
    outcome, small = result.outcome, limited(CLUSTER, 2.6)
    assert len(outcome.unfit) >= 2
    assert result.simulated == len(outcome.unfit) + len(outcome.predictions)
    rows = {each.plan: each for each in result.too_large}
    for row, needed in outcome.unfit.items():
        assert row not in outcome.predictions
        predicted = predict(TINY, needed.plan, small)
        assert not predicted.fits
        for name in ("peak_allocated_gib", "peak_reserved_gib", "memory_by_category_gib", "peak_rank_class"):
            assert getattr(needed, name) == getattr(predicted, name)
        assert 0 < outcome.least_s()[row] <= predicted.step_time_s
        shown = rows[needed.plan]
        assert (shown.prediction, shown.needs_gib) == (None, predicted.peak_reserved_gib)
        assert shown.reason.startswith(f"needs {predicted.peak_reserved_gib:.1f} of 2.6 GiB")
    assert not search(TINY, CLUSTER, 8, 512, 256, fixed=fixed, workers=1, objective="memory").outcome.least_s()
    large = [row for row in result.to_rows() if row["status"] == "out_of_memory" and row["peak_reserved_gib"]]
    assert len(large) == len(outcome.unfit)
    assert all(row["step_time_s"] is None for row in large)


@pytest.mark.parametrize(
    "objective", ["time", pytest.param("memory", marks=pytest.mark.long), pytest.param("cost", marks=pytest.mark.long)]
)
def test_skipping_by_bounds_changes_no_place(objective):
    question = {"n_gpus": 8, "seq_len": 512, "global_batch": 128, "objective": objective, "keep": 5, "workers": 1}
    fixed = {**FEW, "reshard_after_forward": "always"}
    quick = search(TINY, CLUSTER, **question, fixed=fixed)
    full = search(TINY, CLUSTER, **question, fixed=fixed, exhaustive=True)
    assert [prediction.plan for prediction in quick.top(5)] == [prediction.plan for prediction in full.top(5)]
    assert quick.counts["considered"] == full.counts["considered"]
    assert full.counts["skipped"] == 0
    if objective == "time":
        assert quick.counts["skipped"] > 0


def test_a_memory_limit_is_of_a_gpu():
    tight = search(TINY, CLUSTER, **QUESTION, fixed=FEW, predictor=made_up, memory_limit_gib=10, workers=1)
    assert tight.memory_limit_gib == pytest.approx(10)
    with pytest.raises(ForerunError, match="memory limit of 200 GiB"):
        search(TINY, CLUSTER, **QUESTION, memory_limit_gib=200)


def test_the_size_that_a_gpu_is_sold_with_means_all_of_it():
    cluster = load_cluster("h100-sxm")
    assert limited(cluster, 80) == cluster


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "speed"}, "objective must be one of time, tokens, cost, memory"),
        ({"keep": 0}, "keep must be at least 1"),
        ({"workers": 0}, "workers must be at least 1"),
        ({"fixed": {"tp": 3}}, "do not divide 8 GPUs"),
        ({"fixed": {"ep": 2, "dp_shard": -1}}, "none of the .* plans is possible: experts do not split over ep"),
    ],
)
def test_a_bad_question_is_named(options, message):
    with pytest.raises(ForerunError, match=message):
        search(TINY, CLUSTER, **QUESTION, predictor=made_up, **options)


def test_cost_needs_a_price():
    with pytest.raises(ForerunError, match="has no price_per_gpu_hour"):
        search(TINY, replace(CLUSTER, price_per_gpu_hour=None), **QUESTION, objective="cost")


def test_progress_ends_at_the_end():
    seen = []
    search(
        TINY,
        CLUSTER,
        **QUESTION,
        fixed=FEW,
        predictor=made_up,
        workers=1,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen[-1][0] == seen[-1][1] == len(everything(FEW))
    assert seen == sorted(seen)


def test_answers_come_in_order_from_processes():
    plans = everything(FEW)
    with executor_of(Question(picky, TINY, CLUSTER), "local", 2, None) as executor:
        answers = list(executor.run(plans))
    for plan, answer in zip(plans, answers, strict=True):
        if plan.micro_batch > 1:
            assert answer == Refused("one at a time")
        else:
            assert answer.plan == plan
