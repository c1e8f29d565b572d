"""What would take minutes, or leave 64 bits, is refused before work begins, with the number and the limit."""

from dataclasses import replace

import pytest

from forerun.answers.analysis.predict import predict
from forerun.common.errors import ForerunError, ImpossiblePlan
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.constraints import check_plan, refuse
from forerun.describe.plan.plan import Plan

MODEL = load_model("gpt2-small")
H100 = load_cluster("h100-sxm")


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (Plan(seq_len=512, dp_shard=10**11), "100,000,000,000 GPUs; at most 16,777,216"),
        (Plan(seq_len=10**12), "1,000,000,000,000 tokens in a sequence; at most 268,435,456"),
        (Plan(seq_len=512, micro_batch=10**13), "tokens in a micro batch; at most 4,294,967,296"),
        (Plan(seq_len=512, n_microbatches=9007199254740993), "9,007,199,254,740,992 micro batches; at most 20,000"),
        (Plan(seq_len=512, n_microbatches=20_000 - 1, dp_shard=1), ""),
        (
            Plan(seq_len=512, dp_replicate=2, ddp_bucket_mib=1e-7),
            "buckets of gradients (ddp_bucket_mib 1e-07); at most 20,000",
        ),
        (Plan(seq_len=512, dp_replicate=2, ddp_bucket_mib=25.0), ""),
        (Plan(seq_len=512, dp_replicate=2, ddp_bucket_mib=0.0), ""),
    ],
)
def test_a_plan_that_is_too_large_is_refused_with_the_number_and_the_limit(plan, said):
    refusal = refuse(MODEL, plan, H100)
    assert (refusal is None) == (said == "")
    assert refusal is None or said in refusal.reason


def test_a_deep_model_has_fewer_micro_batches():
    deep = replace(MODEL, n_layers=1000)
    check_plan(deep, Plan(seq_len=512, n_microbatches=100), H100)
    with pytest.raises(ImpossiblePlan, match=r"501,000 passes of layers \(1000 and two ends, 500 micro batches\)"):
        check_plan(deep, Plan(seq_len=512, n_microbatches=500), H100)


def test_a_model_that_is_too_large_is_refused():
    with pytest.raises(ForerunError, match=r"100,000,000 layers; at most 1,024"):
        replace(MODEL, n_layers=10**8)
    with pytest.raises(ImpossiblePlan, match=r"parameters; at most 1e\+15 are simulated"):
        check_plan(replace(MODEL, hidden=10**8, ffn_hidden=10**9), Plan(seq_len=512), H100)


def test_a_time_that_leaves_64_bits_is_refused():
    slow = replace(H100, device=replace(H100.device, peak_flops=dict.fromkeys(H100.device.peak_flops, 1.0)))
    with pytest.raises(ForerunError, match=r"takes .* s on h100-sxm; at most 4e\+06 s are simulated"):
        predict(MODEL, Plan(seq_len=512), slow)


def test_every_limit_is_above_the_largest_published_run():
    largest = load_model("llama-3.1-405b")
    check_plan(largest, Plan(seq_len=131072, tp=8, cp=16, pp=16, dp_shard=8, n_microbatches=2048), H100)
