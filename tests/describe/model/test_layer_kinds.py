"""Files of Gemma 4 and MiMo-V2-Flash in both of their forms, and what their layers' own widths mean."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from forerun.common.errors import ForerunError
from forerun.describe.model.catalog import load_model
from forerun.describe.model.fields import Fields
from forerun.describe.model.huggingface import spec_from_config
from forerun.describe.model.layer_parameters import kind_parameters
from forerun.describe.model.parameters import (
    compute_parameter_count,
    model_flops_per_token,
    outer_parameters,
    parameter_count,
)
from forerun.describe.model.spec import ModelSpec

GEMMA = {
    "model_type": "gemma4_text",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 2,
}
MIMO = {
    "model_type": "mimo_v2_flash",
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 512,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 7,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 48,
    "v_head_dim": 32,
    "num_experts_per_tok": 2,
    "n_routed_experts": 8,
}


def spec_of(content: dict[str, Any], **changes: Any) -> ModelSpec:
    return spec_from_config(Fields(content | changes, "config.json"), "x")


def test_layers_of_gemma_4_without_a_window_have_wide_heads_and_one_projection() -> None:
    spec = spec_of(GEMMA)
    assert [spec.layer(number).head_dim for number in range(6)] == [256] * 5 + [512]
    last = spec.layer(5)
    assert (last.sliding_window, last.equal_kv, last.n_kv_heads) == (None, True, 2)
    assert kind_parameters(last)["attention"] == 256 * (8 + 2) * 512 + 8 * 512 * 256
    assert kind_parameters(spec.layer(0))["attention"] == 256 * (8 + 4 + 4) * 256 + 8 * 256 * 256


def test_newer_files_state_single_layers() -> None:
    stated = {"05": {"head_dim": 512, "num_key_value_heads": 2}}
    assert spec_of(GEMMA, per_layer_config=stated) == spec_of(GEMMA)
    wide = spec_of(GEMMA, per_layer_config={"05": {"head_dim": 1024}})
    assert wide.layer(5).head_dim == 1024
    for wrong in ({"x": {}}, {"5": 3}, {"5": {"heads": 3}}):
        with pytest.raises(ForerunError, match=r"config\.json") as error:
            spec_of(GEMMA, per_layer_config=wrong)
        assert "\n" not in str(error.value)


def test_inputs_of_each_layers_own_are_a_table_and_three_products() -> None:
    with_inputs, without = spec_of(GEMMA), spec_of(GEMMA, hidden_size_per_layer_input=0)
    outer = outer_parameters(with_inputs)
    assert outer["layer_input_table"] == 262144 * 6 * 256
    assert outer["layer_input_projection"] == 256 * 6 * 256 + 256
    more = compute_parameter_count(with_inputs) - compute_parameter_count(without)
    assert more == 6 * (2 * 256 * 256 + 256) + 256 * 6 * 256 + 256
    assert parameter_count(with_inputs) - parameter_count(without) == more + 262144 * 6 * 256


def test_experts_of_gemma_4_are_beside_the_dense_feed_forward() -> None:
    sizes = {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64}
    spec = spec_of(GEMMA, enable_moe_block=True, **sizes)
    assert spec.moe is not None
    assert (spec.moe.shared_ffn, spec.moe.n_experts, spec.other_parameters) == (512, 8, 4 * 256 + 8)
    with pytest.raises(ForerunError, match="needs num_experts, top_k_experts, moe_intermediate_size"):
        spec_of(GEMMA, enable_moe_block=True)
    assert spec_of(GEMMA, **sizes).moe is None


def test_the_last_layers_of_gemma_4_reuse_keys_and_values() -> None:
    spec = spec_of(GEMMA, num_hidden_layers=12, num_kv_shared_layers=4, use_double_wide_mlp=True)
    assert [spec.layer(number).shared_kv for number in range(12)] == [False] * 8 + [True] * 4
    assert [spec.layer(number).ffn_hidden for number in (7, 8)] == [512, 1024]


def test_both_forms_of_mimo_are_one_model() -> None:
    hub = {
        "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, 1],
        "moe_layer_freq": [0, 1, 1, 1, 1, 1, 1],
        "sliding_window_size": 128,
        "swa_num_key_value_heads": 4,
        "swa_v_head_dim": 32,
        "add_swa_attention_sink_bias": True,
    }
    newer = spec_of(MIMO, mlp_layer_types=["dense", *["sparse"] * 6])
    assert replace(spec_of(MIMO, **hub), notes=()) == replace(newer, notes=())
    assert [newer.layer(number).sliding_window for number in (0, 1, 5)] == [None, 129, None]
    assert newer.layer(0).moe is None
    with pytest.raises(ForerunError, match="moe_layer_freq has dense layers behind sparse ones"):
        spec_of(MIMO, moe_layer_freq=[0, 1, 0, 1, 1, 1, 1])
    with pytest.raises(ForerunError, match="swa_head_dim"):
        spec_of(MIMO, swa_head_dim=64)


def test_values_narrower_than_keys_make_narrower_projections_and_fewer_flops() -> None:
    spec = spec_of(MIMO)
    assert kind_parameters(spec.layer(0))["attention"] == 128 * (8 * 48 + 2 * 48 + 2 * 32) + 8 * 32 * 128
    llama = load_model("llama-3.2-1b")
    narrow = replace(llama, v_head_dim=llama.head_dim // 2)
    attention = [model_flops_per_token(one, 8192) - 6.0 * compute_parameter_count(one) for one in (llama, narrow)]
    assert attention[1] / attention[0] == pytest.approx(0.75)


GEMMA_3N = {
    "model_type": "gemma3n_text",
    "vocab_size": 500,
    "hidden_size": 256,
    "num_hidden_layers": 12,
    "num_kv_shared_layers": 2,
}


def test_gemma_3n_shares_keys_and_has_sparse_gates_in_its_first_layers() -> None:
    spec = spec_of(GEMMA_3N, intermediate_size=512)
    assert [spec.layer(number).sparse_gate for number in range(12)] == [True] * 10 + [False] * 2
    assert [spec.kv_source(number) for number in (9, 10, 11)] == [9, 8, 8]
    widths = [512] * 6 + [1024] * 6
    uneven = spec_of(GEMMA_3N, intermediate_size=widths)
    assert [uneven.layer(number).ffn_hidden for number in range(12)] == widths
    assert spec_of(GEMMA_3N, intermediate_size=[512] * 12) == spec


@pytest.mark.parametrize(
    ("wrong", "part"),
    [
        ({"intermediate_size": [512] * 3}, "intermediate_size has 3 entries for 12 layers"),
        ({"intermediate_size": ["wide"] * 12}, "intermediate_size must be a whole number"),
        ({"intermediate_size": 512, "activation_sparsity_pattern": [0.5]}, "has 1 entries for 12 layers"),
        ({"intermediate_size": 512, "altup_num_inputs": 1}, "altup_num_inputs must be at least 2"),
        ({"intermediate_size": 512, "num_kv_shared_layers": 12}, "num_kv_shared_layers"),
    ],
)
def test_files_of_gemma_3n_that_mean_nothing_are_refused_in_one_line(wrong: dict[str, Any], part: str) -> None:
    with pytest.raises(ForerunError, match=part) as error:
        spec_of(GEMMA_3N, **wrong)
    assert "\n" not in str(error.value)


LONGCAT = {
    "model_type": "longcat_flash",
    "vocab_size": 1000,
    "hidden_size": 256,
    "num_layers": 3,
    "num_attention_heads": 4,
    "ffn_hidden_size": 512,
    "expert_ffn_hidden_size": 64,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "moe_topk": 4,
    "zero_expert_num": 8,
}


def test_a_layer_of_longcat_has_two_attentions_and_two_feed_forwards_beside_its_experts() -> None:
    spec = spec_of(LONGCAT)
    layer, half = kind_parameters(spec.layer(0)), kind_parameters(replace(spec.layer(0), shortcut=False, moe=None))
    assert (spec.n_layers, spec.moe.mean_reached, spec.moe.shared_ffn) == (3, 2.0, 0)  # type: ignore[union-attr]
    assert layer == {part: 2 * count for part, count in half.items()} | {
        "router": 16 * (256 + 1),
        "experts": 8 * 3 * 256 * 64,
    }
    assert spec_of(LONGCAT, num_hidden_layers=6) == spec
    with pytest.raises(ForerunError, match="num_hidden_layers 7 is not supported, only 3 or 6"):
        spec_of(LONGCAT, num_hidden_layers=7)
    with pytest.raises(ForerunError, match="shortcut needs n_heads and ffn_hidden"):
        replace(spec, ffn_hidden=0)
