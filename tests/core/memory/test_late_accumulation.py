"""Half-precision gradients that wait for the end of the backward pass."""

from __future__ import annotations

from dataclasses import replace

from forerun.core.memory.profile import profile
from forerun.core.program.types import Category
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan
from forerun.describe.stacks.catalog import load_stack
from forerun.sources.symbolic.build import build

MODEL = replace(load_model("llama-3.1-8b"), n_layers=16)
LAYER = MODEL.hidden * (2 * MODEL.hidden + 2 * MODEL.n_kv_heads * MODEL.head_dim + 3 * MODEL.ffn_hidden)
CLUSTER = load_cluster("a100-80gb-sxm")


def peak(late: bool, **fields: str) -> int:
    plan = Plan(
        seq_len=512, dp_shard=8, zero_stage=1, n_microbatches=2, stack="megatron-deepspeed",
        activation_checkpointing="full", **fields,
    )  # fmt: skip
    return profile(build(MODEL, plan, CLUSTER, replace(load_stack(plan.stack), late_accumulation=late)))[0].peak_bytes


def test_gradients_of_all_layers_are_there_at_the_end_of_backward() -> None:
    waiting = peak(late=True) - peak(late=False)
    assert 0.8 * 2 * 16 * LAYER < waiting < 1.2 * 2 * (16 * LAYER + 2 * MODEL.hidden * MODEL.vocab)


def test_a_buffer_of_the_same_dtype_takes_them_at_once() -> None:
    assert peak(late=True, accumulate_dtype="bf16") == peak(late=False, accumulate_dtype="bf16")


def test_nothing_is_left_behind() -> None:
    plan = Plan(seq_len=512, dp_shard=8, zero_stage=1, n_microbatches=2, stack="megatron-deepspeed")
    built = build(MODEL, plan, CLUSTER)
    net = 0
    for number in built.rank_classes[0].block.tolist():
        block = built.blocks[number]
        mine = block.tensor_category == Category.UNSHARDED
        net += int(block.tensor_bytes[mine & (block.tensor_free < 0)].sum())
        net -= int(block.tensor_bytes[mine & (block.tensor_alloc < 0)].sum())
    assert net == 0
