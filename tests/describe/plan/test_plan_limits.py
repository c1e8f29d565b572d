"""Where plans begin to be impossible: the last one that runs beside the first one that does not."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from forerun.common.errors import ForerunError, ImpossiblePlan
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_any, load_model
from forerun.describe.plan.complete import complete_plan
from forerun.describe.plan.constraints import refuse
from forerun.describe.plan.fields import plan_fields
from forerun.describe.plan.plan import Plan
from forerun.describe.plan.training_loop import TrainingLoop

H100 = load_cluster("h100-sxm")
DENSE = load_model("llama-3.1-8b")  # 32 layers, 32 heads, 8 key-value heads, width 14336
MIXTRAL = load_model("mixtral-8x7b")  # 8 experts
SHARED = replace(MIXTRAL, moe=replace(MIXTRAL.moe, shared_ffn=1000, n_dense_layers=0), ffn_hidden=14337)
RESNET = load_any("resnet50")
APART = "cp-pp-tp-dp_shard-dp_replicate"


def reason(model, **given):
    found = refuse(model, Plan(**{"seq_len": 8192, **given}), H100)
    return "" if found is None else found.reason


@pytest.mark.parametrize(
    ("model", "runs", "fails", "why"),
    [
        (replace(DENSE, ffn_hidden=14338), {"tp": 2}, {"tp": 4}, "ffn_hidden 14338 is not divisible by tp 4"),
        (SHARED, {"tp": 8}, {"tp": 16}, "the shared experts' width 1000 is not divisible by tp 16"),
        (
            replace(SHARED, moe=replace(SHARED.moe, n_dense_layers=1)),
            {},
            {"tp": 2},
            "ffn_hidden 14337 is not divisible",
        ),
        (replace(DENSE, n_heads=0), {"tp": 7, "sequence_parallel": False}, {"tp": 3}, "ffn_hidden 14336"),
        (DENSE, {"async_tp": True, "tp": 2}, {"async_tp": True}, "got True and 1"),
        (load_model("gpt2-small"), {"seq_len": 1024}, {"seq_len": 1025}, "1025 is longer than the 1024 learned"),
        (DENSE, {"cp": 2, "seq_len": 8196}, {"cp": 2, "seq_len": 8198}, "2 x cp 2 (cp_load_balance head_tail"),
        (
            DENSE,
            {"cp": 2, "seq_len": 8198, "cp_load_balance": "striped"},
            {"cp": 2, "seq_len": 8199, "cp_load_balance": "striped"},
            "seq_len 8199 is not divisible by cp 2",
        ),
        (replace(DENSE, causal=False), {"cp": 2, "seq_len": 8198}, {"cp": 2, "seq_len": 8199}, "divisible by cp 2"),
        (
            DENSE,
            {"cp": 2, "seq_len": 8198, "cp_method": "ulysses"},
            {"cp": 2, "tp": 2, "seq_len": 8198, "cp_method": "ulysses"},
            "seq_len 8198 is not divisible by cp 2 x tp 2 (sequence_parallel)",
        ),
        (
            DENSE,
            {"cp": 4, "tp": 8, "cp_method": "ulysses"},
            {"cp": 8, "tp": 8, "cp_method": "ulysses"},
            "32 attention heads are not divisible by cp 8 x tp 8",
        ),
        (
            DENSE,
            {"attention": "naive"},
            {"attention": "naive", "cp": 2},
            "cp 2 needs a flash attention kernel, not naive",
        ),
        (
            MIXTRAL,
            {"dp_shard": 2, "cp": 2, "ep": 4},
            {"dp_shard": 2, "cp": 2, "ep": 8},
            "ep 8 does not divide tp 1 x cp 2 x dp_shard 2",
        ),
        (
            MIXTRAL,
            {"dp_shard": 4, "cp": 2, "tp": 2, "ep": 2, "mesh_order": APART},
            {"dp_shard": 6, "cp": 6, "tp": 2, "pp": 2, "ep": 4, "mesh_order": APART, "seq_len": 12288},
            "ep 4 can't be cut out of tp 2 x cp 6 x dp_shard 6 in mesh_order cp-pp-tp-dp_shard",
        ),
        (
            MIXTRAL,
            {"dp_shard": 6, "cp": 6, "ep": 4, "mesh_order": APART, "seq_len": 12288},
            {"dp_shard": 6, "cp": 6, "tp": 4, "pp": 2, "ep": 4, "mesh_order": APART, "seq_len": 12288},
            "ep 4 can't be cut",
        ),
        (DENSE, {"pp": 32}, {"pp": 33}, "32 layers are fewer than the 33 stages of pp 33"),
        (DENSE, {"pp": 34, "balance_ends": True}, {"pp": 35, "balance_ends": True}, "fewer than the 35 stages"),
        (DENSE, {"layers_per_stage": (32,)}, {"layers_per_stage": (31,)}, "layers_per_stage sums to 31"),
        (
            DENSE,
            {"pp": 3, "layers_per_stage": (0, 32, 0)},
            {"pp": 3, "layers_per_stage": (33, -1, 0)},
            "only the first and the last stage may be without layers",
        ),
        (
            DENSE,
            {"pp": 2, "pp_schedule": "DualPipeV", "virtual_stages": 2, "n_microbatches": 4},
            {"pp": 2, "pp_schedule": "DualPipeV", "virtual_stages": 2, "n_microbatches": 3},
            "DualPipeV needs at least 2 x pp 2 micro batches, got 3",
        ),
        (
            DENSE,
            {"pp": 2, "pp_schedule": "ZBV", "virtual_stages": 2},
            {"pp": 2, "pp_schedule": "ZBV", "virtual_stages": 3},
            "schedule ZBV has 2 virtual_stages a rank, got 3",
        ),
        (
            DENSE,
            {"pp": 2, "pp_schedule": "Interleaved1F1B", "virtual_stages": 2, "n_microbatches": 2},
            {"pp": 2, "pp_schedule": "Interleaved1F1B", "virtual_stages": 2, "n_microbatches": 3},
            "3 micro batches are not divisible by pp 2",
        ),
        (DENSE, {"pp_schedule": "ZBV"}, {"virtual_stages": 2}, "virtual_stages 2 needs pp above 1"),
        (DENSE, {"autocast": True}, {"autocast": True, "precision": "fp32"}, "not fp32 to fp32"),
        (
            DENSE,
            {"autocast": True, "precision": "fp16"},
            {"autocast": True, "master_dtype": "bf16"},
            "not bf16 to bf16",
        ),
        (
            DENSE,
            {"precision": "fp8", "fp8_all_gather": True},
            {"fp8_all_gather": True},
            "fp8_all_gather needs precision fp8 or mxfp8, not bf16",
        ),
        (RESNET, {"seq_len": 1, "dp_shard": 8}, {"seq_len": 2}, "seq_len 2: ResNet-50 takes whole samples"),
        *[(RESNET, {"seq_len": 1}, {"seq_len": 1, axis: 2}, f"{axis} 2 needs a") for axis in ("tp", "cp", "pp", "ep")],
        (RESNET, {"seq_len": 1}, {"seq_len": 1, "virtual_stages": 2}, "virtual_stages and layers_per_stage need a"),
        (
            RESNET,
            {"seq_len": 1},
            {"seq_len": 1, "layers_per_stage": (9,)},
            "virtual_stages and layers_per_stage need a",
        ),
        (RESNET, {"seq_len": 1, "precision": "fp16"}, {"seq_len": 1, "precision": "fp8"}, "precision fp8 needs a"),
        *[
            (
                RESNET,
                {"seq_len": 1, "activation_checkpointing": "selective", "selective_policy": policy},
                {"seq_len": 1, "activation_checkpointing": "selective", "selective_policy": "mlp"},
                "selective_policy mlp needs a transformer",
            )
            for policy in ("op", "params")
        ],
        (
            RESNET,
            {"seq_len": 1, "activation_checkpointing": "full", "selective_policy": "mlp"},
            {"seq_len": 1, "offload": "params", "zero_stage": 1},
            "offload params needs zero_stage 3 (parameters gathered when used), got 1",
        ),
    ],
)
def test_one_plan_runs_and_the_next_does_not(model, runs, fails, why):
    assert reason(model, **runs) == ""
    assert why.replace("ResNet-50", model.name) in reason(model, **fails)


def test_a_cluster_has_room_for_its_gpus_and_no_more():
    one = replace(H100, links=H100.links[:1])
    assert refuse(DENSE, Plan(4096, dp_shard=8), one) is None
    assert refuse(DENSE, Plan(4096, dp_shard=9), one).reason == "the plan takes 9 GPUs, cluster h100-sxm has at most 8"


# -- fields of a plan --------------------------------------------------------------------------------------------------


def test_a_plan_that_states_least_is_one_gpu_of_a_plain_run():
    plan = Plan(8)
    ones = {"micro_batch", "n_microbatches", "dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp", "prefetch"}
    ones |= {"virtual_stages", "checkpoint_every", "loss_chunks", "expert_imbalance"}
    numbers = {
        one.name
        for one in fields(Plan)
        if not isinstance(getattr(plan, one.name), bool) and getattr(plan, one.name) == 1
    }
    assert numbers == ones
    flags = {one.name for one in fields(Plan) if getattr(plan, one.name) is True}
    assert flags == {"overlap_grad_reduce", "loss_parallel", "compile_model", "compile_loss", "sequence_parallel"}
    assert (plan.zero_stage, plan.shard_min_mib, plan.ddp_bucket_mib, plan.activation_offload) == (3, 0, 0, 0)
    assert plan.describe() == "one GPU"


@pytest.mark.parametrize(
    ("degrees", "words"),
    [
        (dict(dp_shard=64), "FSDP=64"),
        (dict(dp_shard=4, dp_replicate=2, cp=3, tp=2, pp=5, ep=4), "HSDP=2x4 cp=3 tp=2 pp=5 ep=4"),
        (dict(dp_replicate=8), "DDP=8"),
        (dict(dp_shard=8, dp_replicate=2, zero_stage=0, ep=8), "DDP=16 ep=8"),  # experts lie among ranks of dp_shard
        (dict(dp_shard=16, zero_stage=1, tp=4), "ZeRO-1=16 tp=4"),
        (dict(dp_shard=16, dp_replicate=2, zero_stage=2, stack="deepspeed"), "ZeRO-2=2x16"),
        (dict(cp=8), "FSDP cp=8"),  # the ranks of cp share the state
        (dict(tp=8, pp=2), "tp=8 pp=2"),
    ],
)
def test_words_for_a_plan_name_its_data_parallelism_as_torchtitan_does(degrees, words):
    assert Plan(8, **degrees).describe() == words


@pytest.mark.parametrize(
    ("name", "ends", "outside"),
    [
        ("prefetch", (0, 10**6), -1),
        ("ddp_bucket_mib", (0, 1_000_000), 1_000_001),
        ("shard_min_mib", (0, 10**9), -0.5),
        ("expert_imbalance", (1, 100), 0.99),
        ("activation_offload", (0, 1), 1.01),
        ("activation_offload", (0.5,), -0.01),
        *[
            (name, (1, 2), 0)
            for name in ("seq_len", "micro_batch", "n_microbatches", "virtual_stages", "checkpoint_every")
        ],
        *[(name, (1, 2), 0) for name in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")],
    ],
)
def test_the_ends_of_a_field(name, ends, outside):
    for value in ends:
        Plan(**{"seq_len": 8, name: value})
    with pytest.raises(ForerunError, match=f"plan: {name} must be "):
        Plan(**{"seq_len": 8, name: outside})


def test_numbers_that_follow_from_a_plan():
    plan = Plan(8, micro_batch=2, n_microbatches=3, dp_replicate=5, dp_shard=7, cp=11, tp=13, pp=17, virtual_stages=19)
    assert plan.world_size == 5 * 7 * 11 * 13 * 17
    assert (plan.dp, plan.fsdp, plan.n_stages) == (35, 77, 17 * 19)
    assert (plan.global_batch, plan.tokens_per_step) == (2 * 3 * 35, 2 * 3 * 35 * 8)


def test_a_pipeline_gets_the_micro_batches_of_its_stack():
    """torchtitan cuts the batch of a pipeline into so many micro batches that its file says for each stage."""
    found = complete_plan({"seq_len": 8, "pp": 4, "stack": "torchtitan"}, 8, 64)
    local = 64 // 2
    assert (found.micro_batch * found.n_microbatches, found.n_microbatches % 4) == (local, 0)
    assert (
        complete_plan({"seq_len": 8, "pp": 4, "micro_batch": 1, "stack": "torchtitan"}, 8, 64).n_microbatches == local
    )
    assert complete_plan({"seq_len": 8, "stack": "torchtitan"}, 8, 64).micro_batch == 1
    odd = complete_plan({"seq_len": 8, "pp": 4, "stack": "torchtitan"}, 8, 2 * 7)
    assert (odd.micro_batch, odd.n_microbatches) == (1, 7)


def test_completing_a_plan_names_what_is_wrong():
    assert complete_plan({"seq_len": 8}, 1, 1).world_size == 1
    with pytest.raises(ForerunError, match="global_batch must be at least 1, got 0"):
        complete_plan({"seq_len": 8}, 8, 0)
    with pytest.raises(ImpossiblePlan, match="one rank = 1 GPUs, not 8"):
        complete_plan({"seq_len": 8, "dp_shard": 1}, 8)
    with pytest.raises(ForerunError, match="unknown key 'zzzz'; known: seq_len"):
        plan_fields({"zzzz": 1}, "here")


def test_a_loop_that_states_nothing_has_no_periodic_work():
    plain = TrainingLoop()
    assert {
        name for name in ("checkpoint", "gc", "profile", "metrics", "memory_snapshot") if getattr(plain, name)
    } == set()
    assert plain.settings() == {}
    assert TrainingLoop(profile=3, profiler_active=3)
    assert TrainingLoop(profiler_active=9).profiler_active == 9


@pytest.mark.parametrize(
    ("given", "optimizer"),
    [({}, "foreach"), ({"compile": True}, "fused"), ({"compile": True, "compile_loss": False}, "foreach")],
)
def test_a_graph_of_the_whole_step_fuses_the_optimizer(given, optimizer):
    assert Plan(8, stack="simple-fsdp", **given).optimizer_impl == optimizer
    assert Plan(8, stack="simple-fsdp", optimizer_impl="fused").optimizer_impl == "fused"


def test_zero_2_of_fsdp_is_zero_3_that_keeps_what_it_gathered():
    plan = Plan(8, dp_shard=2, zero_stage=2)
    assert (plan.zero_stage, plan.reshard_after_forward) == (3, "never")
    asked = Plan(8, dp_shard=2, zero_stage=2, reshard_after_forward="always")
    assert (asked.zero_stage, asked.reshard_after_forward) == (3, "always")
    assert Plan(8, dp_shard=2, zero_stage=2, stack="deepspeed").zero_stage == 2
