"""What products in fp8 keep of their inputs, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forerun.cluster.catalog import load_cluster
from forerun.memory.profile import profile
from forerun.model.catalog import load_model
from forerun.plan.plan import Plan
from forerun.symbolic.build import build

LLAMA, MIXTRAL = load_model("llama-3.1-8b"), load_model("mixtral-8x7b")
CLUSTER = load_cluster("h100-sxm")
TOKENS = 8192


def activations_of_a_layer(model, stack: str, **fields) -> float:
    """Bytes that a layer keeps of a token of the micro batch."""
    plan = Plan(seq_len=TOKENS, stack=stack, zero_stage=0, optimizer="sgd", **fields)
    few, more = (
        profile(build(replace(model, n_layers=layers), plan, CLUSTER))[0].by_category["activation"] for layers in (2, 4)
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
