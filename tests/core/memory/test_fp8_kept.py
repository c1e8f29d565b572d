"""What products in fp8 keep of their inputs, and checkpointing by operation of them and of attention, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forerun.core.memory.profile import profile
from forerun.core.program.types import Phase
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan
from forerun.sources.symbolic.build import build

LLAMA, MIXTRAL = load_model("llama-3.1-8b"), load_model("mixtral-8x7b")
CLUSTER, BLACKWELL = load_cluster("h100-sxm"), load_cluster("b200")
TOKENS = 8192


def activations_of_a_layer(model, stack: str, cluster=CLUSTER, **fields) -> float:
    """Bytes that a layer keeps of a token of the micro batch."""
    plan = Plan(seq_len=TOKENS, stack=stack, zero_stage=0, optimizer="sgd", **fields)
    few, more = (
        profile(build(replace(model, n_layers=layers), plan, cluster))[0].by_category["activation"] for layers in (2, 4)
    )
    return (more - few) / 2 / TOKENS


@pytest.mark.parametrize("stack", ["megatron-core", "nemo"])
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (4, True)])
def test_transformer_engine_keeps_casts_in_place_of_inputs(stack: str, tp: int, sequence_parallel: bool) -> None:
    fields = {"tp": tp, "sequence_parallel": sequence_parallel}
    saved = activations_of_a_layer(LLAMA, stack, **fields) - activations_of_a_layer(
        LLAMA, stack, precision="fp8", fp8_recipe="delayed", **fields
    )
    # the inputs of qkv, up and down in one byte instead of two; the output of attention is kept as it is, and cast
    outputs = LLAMA.n_heads * LLAMA.head_dim
    assert saved == pytest.approx((2 * LLAMA.hidden + LLAMA.ffn_hidden - outputs) / tp, rel=1e-3)


def test_torchao_keeps_inputs_as_they_are() -> None:
    wide = activations_of_a_layer(LLAMA, "torchtitan")
    assert activations_of_a_layer(LLAMA, "torchtitan", precision="fp8", fp8_recipe="tensorwise") == wide


def test_a_router_keeps_what_its_experts_cast() -> None:
    fp8 = {"precision": "fp8", "fp8_recipe": "delayed"}
    saved = activations_of_a_layer(MIXTRAL, "megatron-core") - activations_of_a_layer(MIXTRAL, "megatron-core", **fp8)
    chosen, hidden = MIXTRAL.moe.top_k, MIXTRAL.hidden
    expected = hidden + chosen * (hidden + MIXTRAL.moe.expert_ffn) - MIXTRAL.n_heads * MIXTRAL.head_dim
    assert saved == pytest.approx(expected, rel=1e-3)


SELECTIVE = {"activation_checkpointing": "selective", "selective_policy": "op"}


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_policy_that_keeps_absolute_values_keeps_every_operand_of_eager_casts(recipe: str) -> None:
    fp8 = {"precision": "fp8", "fp8_recipe": recipe}
    kept = activations_of_a_layer(LLAMA, "torchtitan-2024", **SELECTIVE, **fp8)
    wide = activations_of_a_layer(LLAMA, "torchtitan-2024", **SELECTIVE)
    attended, keys = LLAMA.n_heads * LLAMA.head_dim, LLAMA.n_kv_heads * LLAMA.head_dim
    inputs = 5 * LLAMA.hidden + attended + LLAMA.ffn_hidden  # q, k, v, gate and up; out; down
    weights = LLAMA.hidden * (2 * attended + 2 * keys + 3 * LLAMA.ffn_hidden)
    assert kept - wide == pytest.approx(2 * (inputs + weights / TOKENS), rel=1e-6)
    assert activations_of_a_layer(LLAMA, "torchtitan-2024", **fp8) == activations_of_a_layer(LLAMA, "torchtitan-2024")


def test_compiled_casts_and_a_policy_of_today_keep_no_absolute_values() -> None:
    fp8 = {"precision": "fp8", "fp8_recipe": "tensorwise"}
    for stack, compiled in (("torchtitan-2024", True), ("torchtitan", False)):
        fields = {"compile": compiled, **SELECTIVE}
        assert activations_of_a_layer(LLAMA, stack, **fields, **fp8) == activations_of_a_layer(LLAMA, stack, **fields)


@pytest.mark.parametrize(("stack", "again"), [("torchtitan-2025-08", True), ("torchtitan", False)])
def test_attention_on_blackwell_runs_again_under_a_policy_that_does_not_know_cudnn(stack: str, again: bool) -> None:
    saved = activations_of_a_layer(LLAMA, stack, **SELECTIVE) - activations_of_a_layer(
        LLAMA, stack, BLACKWELL, **SELECTIVE
    )
    output = LLAMA.n_heads * (LLAMA.head_dim * 2 + 4)  # and the log-sum-exp of every query
    assert saved == (output if again else 0)
    ops = build(LLAMA, Plan(seq_len=TOKENS, stack=stack, **SELECTIVE), BLACKWELL)
    runs = {block.name: block for block in ops.blocks}["layer.backward"]
    kernels = [ops.ops.name[op] for op, phase in zip(runs.op, runs.phase, strict=True) if phase == Phase.RECOMPUTE]
    assert ("attention.kernel" in kernels) == again
