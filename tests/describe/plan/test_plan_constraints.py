"""Impossible plans are refused with their reason; possible ones are not."""

from dataclasses import replace

import pytest

from forerun.common.errors import ForerunError, ImpossiblePlan
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.constraints import check_plan
from forerun.describe.plan.plan import Plan

DENSE = load_model("llama-3.1-8b")  # 32 layers, 32 heads, 8 key-value heads, width 14336
MOE = load_model("mixtral-8x7b")  # 8 experts
MLA = load_model("deepseek-v3")
GPT2 = load_model("gpt2-small")  # 1024 learned positions
CLUSTER = load_cluster("h100-sxm")

IMPOSSIBLE = [
    ({"tp": 3}, "32 attention heads are not divisible by tp 3"),
    ({"tp": 64}, "32 attention heads are not divisible by tp 64"),
    ({"pp": 64}, "32 layers are fewer than the 64 stages of pp 64"),
    (
        {"pp": 16, "pp_schedule": "Interleaved1F1B", "virtual_stages": 4, "n_microbatches": 16},
        "fewer than the 64 stages",
    ),
    ({"pp": 2, "layers_per_stage": (16, 15)}, "layers_per_stage sums to 31"),
    ({"pp": 2, "layers_per_stage": (16, 8, 8)}, "lists 3 stages"),
    ({"pp": 4, "layers_per_stage": (16, 0, 8, 8)}, "only the first and the last stage may be without layers"),
    ({"pp": 4, "pp_schedule": "Interleaved1F1B", "n_microbatches": 4}, "needs virtual_stages above 1"),
    (
        {"pp": 4, "pp_schedule": "Interleaved1F1B", "virtual_stages": 2, "n_microbatches": 6},
        "6 micro batches are not divisible by pp 4",
    ),
    ({"pp": 4, "pp_schedule": "ZBV", "n_microbatches": 8}, "ZBV has 2 virtual_stages a rank, got 1"),
    (
        {"pp": 4, "pp_schedule": "DualPipeV", "virtual_stages": 2, "n_microbatches": 4},
        "DualPipeV needs at least 2 x pp 4 micro batches",
    ),
    *(
        ({"pp": pp, "pp_schedule": "DualPipe", "virtual_stages": 2, "n_microbatches": n}, f"schedule DualPipe {reason}")
        for pp, n, reason in (
            (3, 8, "needs an even pp and even micro batches, got 3 and 8"),
            (4, 9, "needs an even pp and even micro batches, got 4 and 9"),
            (4, 6, "needs at least 2 x pp 4 micro batches, got 6"),
        )
    ),
    ({"expert_routing": "loads:1"}, "expert_routing has 1 loads, but llama-3.1-8b has 0 experts"),
    ({"expert_routing": "loads:1:2"}, "expert_routing has 2 loads, but llama-3.1-8b has 0 experts"),
    ({"pp": 4, "virtual_stages": 2, "n_microbatches": 4}, "1F1B has one stage a rank"),
    ({"virtual_stages": 2}, "needs pp above 1"),
    ({"ep": 2, "dp_shard": 2}, "is dense"),
    ({"cp": 8, "seq_len": 8200}, "seq_len 8200 is not divisible by 2 x cp 8"),
    ({"cp": 8, "seq_len": 8200, "cp_method": "allgather"}, "seq_len 8200 is not divisible by 2 x cp 8"),
    ({"tp": 8, "seq_len": 8196}, "seq_len 8196 is not divisible by cp 1 x tp 8"),
    ({"cp": 8, "tp": 8, "cp_method": "ulysses"}, "not divisible by cp 8 x tp 8"),
    ({"cp": 2, "attention": "naive"}, "needs a flash attention kernel"),
    ({"async_tp": True}, "async_tp needs sequence_parallel and tp above 1"),
    ({"async_tp": True, "tp": 2, "sequence_parallel": False}, "async_tp needs sequence_parallel"),
    ({"fp8_recipe": "rowwise"}, "needs precision fp8"),
    ({"precision": "nvfp4"}, "has no nvfp4 matrix unit"),
    ({"precision": "mxfp8"}, "needs the block scaling of Blackwell"),
    ({"offload": "params", "zero_stage": 1}, "offload params needs zero_stage 3"),
]


@pytest.mark.parametrize(("fields", "reason"), IMPOSSIBLE)
def test_an_impossible_plan_is_refused_with_the_reason(fields, reason):
    plan = Plan(**{"seq_len": 8192, **fields})
    with pytest.raises(ImpossiblePlan) as error:
        check_plan(DENSE, plan, CLUSTER)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


POSSIBLE = [
    {},
    {"tp": 32},  # more ranks than key-value heads: they are copied
    {"tp": 8, "dp_shard": 8},
    {"tp": 16},  # across nodes: slow, not impossible
    {"tp": 8, "seq_len": 8196, "sequence_parallel": False},
    {"pp": 32, "n_microbatches": 1},
    {"pp": 3, "n_microbatches": 5},
    {"pp": 4, "pp_schedule": "DualPipe", "virtual_stages": 2, "n_microbatches": 8},
    {"pp": 2, "pp_schedule": "DualPipe", "virtual_stages": 2, "n_microbatches": 6},
    {"pp": 4, "layers_per_stage": (0, 16, 16, 0)},
    {"pp": 17, "balance_ends": True, "pp_schedule": "ZBV", "virtual_stages": 2, "n_microbatches": 4},
    {"pp": 4, "pp_schedule": "Interleaved1F1B", "virtual_stages": 8, "n_microbatches": 8},
    {"cp": 4, "tp": 8, "cp_method": "ulysses"},
    {"cp": 8, "seq_len": 8200, "cp_method": "allgather", "cp_load_balance": "none"},
    {"precision": "fp8", "fp8_recipe": "rowwise", "fp8_all_gather": True},
    {"offload": "params"},
    {"zero_stage": 3, "pp": 2, "dp_shard": 4},
]


@pytest.mark.parametrize("fields", POSSIBLE)
def test_a_possible_plan_passes(fields):
    check_plan(DENSE, Plan(**{"seq_len": 8192, **fields}), CLUSTER)


def test_experts_split_over_ranks_that_share_the_data():
    check_plan(MOE, Plan(seq_len=4096, dp_shard=8, ep=8), CLUSTER)
    check_plan(MOE, Plan(seq_len=4096, dp_shard=4, cp=2, ep=8), CLUSTER)
    with pytest.raises(ImpossiblePlan, match="8 experts are not divisible by ep 3"):
        check_plan(MOE, Plan(seq_len=4096, dp_shard=3, ep=3), CLUSTER)
    with pytest.raises(ImpossiblePlan, match="ep 8 does not divide tp 1 x cp 1 x dp_shard 4"):
        check_plan(MOE, Plan(seq_len=4096, dp_shard=4, ep=8), CLUSTER)


def test_key_value_heads_divide_or_are_copied():
    odd = replace(DENSE, n_heads=24, n_kv_heads=6, ffn_hidden=12288)
    check_plan(odd, Plan(seq_len=4096, tp=12, sequence_parallel=False), CLUSTER)
    with pytest.raises(ImpossiblePlan, match="6 key-value heads"):
        check_plan(odd, Plan(seq_len=4096, tp=4), CLUSTER)
    check_plan(MLA, Plan(seq_len=4096, tp=16), CLUSTER)


def test_learned_positions_bound_the_sequence():
    check_plan(GPT2, Plan(seq_len=1024), CLUSTER)
    with pytest.raises(ImpossiblePlan, match="1024 learned positions"):
        check_plan(GPT2, Plan(seq_len=2048), CLUSTER)


def test_a_device_without_the_precision_is_named():
    with pytest.raises(ImpossiblePlan, match=r"v100.* has no bf16 matrix unit; it has: .*fp16"):
        check_plan(DENSE, Plan(seq_len=2048), load_cluster("v100-dgx1"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"precision": "bf17"}, "precision must be one of bf16"),
        ({"attention": "quick"}, "attention must be one of auto"),
        ({"stack": "torchtitann"}, "did you mean torchtitan"),
        ({"zero_stage": 4}, "zero_stage must be one of 0, 1, 2, 3"),
    ],
)
def test_a_value_that_no_plan_can_have_is_refused(fields, message):
    with pytest.raises(ForerunError, match=message):
        check_plan(DENSE, Plan(seq_len=2048, **fields), CLUSTER)
