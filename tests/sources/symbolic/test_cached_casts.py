"""TransformerEngine casts weights to fp8 for the first micro batch of a step, and keeps them."""

from dataclasses import replace

import pytest

from forerun.core.program.kinds import OpKind
from forerun.core.program.types import Category
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan
from forerun.sources.symbolic.build import build

MODEL = replace(load_model("llama-3-8b"), n_layers=4)
CLUSTER = load_cluster("h100-sxm")
KV = MODEL.n_kv_heads * MODEL.head_dim
MATRICES = MODEL.n_layers * MODEL.hidden * (2 * MODEL.hidden + 2 * KV + 3 * MODEL.ffn_hidden)
"""elements that products of layers read"""
PLAN = Plan(
    seq_len=2048, n_microbatches=8, dp_shard=8, zero_stage=1, precision="fp8", fp8_recipe="delayed", stack="nemo"
)


def weight_traffic(stack: str, **other: object) -> float:
    """Bytes that casts of a step read and write for weights alone, found as what a wider batch does not change."""
    one, two = (
        sum(
            float(program.ops.bytes_read[op] + program.ops.bytes_written[op])
            for step in program.rank_classes[0].block
            for op in program.blocks[step].op
            if program.ops.kind[op] == OpKind.MEMORY and program.ops.name[op].endswith(".cast")
        )
        for program in (
            build(MODEL, replace(PLAN, stack=stack, micro_batch=size, **other), CLUSTER)  # type: ignore[arg-type]
            for size in (1, 2)
        )
    )
    return 2 * one - two


@pytest.mark.parametrize("stack", ["nemo", "megatron-core"])
def test_weights_are_cast_once_a_step(stack: str) -> None:
    assert weight_traffic(stack) == pytest.approx(4 * MATRICES, rel=0.01)  # read 2 bytes, write both layouts
    assert weight_traffic(stack, n_microbatches=2) == pytest.approx(4 * MATRICES, rel=0.01)
    sharded = dict(zero_stage=3, n_microbatches=1)
    assert weight_traffic(stack, **sharded) == pytest.approx(4 * MATRICES, rel=0.01), "weights are gathered anew"


def test_kept_casts_stand_beside_the_weights_or_in_their_place() -> None:
    def parameters(stack: str, precision: str) -> int:
        plan = replace(PLAN, stack=stack, precision=precision, fp8_recipe="none" if precision == "bf16" else "delayed")
        return int(build(MODEL, plan, CLUSTER).rank_classes[0].resident_bytes[Category.PARAMETER])

    more = parameters("megatron-core", "fp8") - parameters("megatron-core", "bf16")
    assert more == pytest.approx(2 * MATRICES, rel=0.01)
    assert parameters("nemo", "fp8") == parameters("nemo", "bf16")
