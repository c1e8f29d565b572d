"""config.json files of families that transformers does not build as causal models, whose code lies on the hub."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from forerun.common.errors import ForerunError
from forerun.describe.model.catalog import load_model
from forerun.describe.model.families import FAMILIES
from forerun.describe.model.fields import Fields
from forerun.describe.model.huggingface import spec_from_config
from forerun.describe.model.layer_parameters import kind_parameters
from forerun.describe.model.parameters import active_parameter_count, parameter_count
from forerun.describe.model.spec import ModelSpec

HUB: dict[str, dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "hub_code_models.yaml").read_text())


def read(config: dict[str, Any]) -> ModelSpec:
    return spec_from_config(Fields(config, "config.json"), "known")


def changed(name: str, **keys: object) -> ModelSpec:
    return read(HUB[name]["config"] | keys)


@pytest.mark.parametrize("name", HUB)
def test_parameters_are_those_of_the_weights(name: str) -> None:
    spec = read(HUB[name]["config"])
    assert parameter_count(spec) == HUB[name]["total"]
    assert not any("not known" in note for note in spec.notes)


def test_models_that_have_a_preset_or_a_second_file_are_the_same() -> None:
    kimi, glm = load_model("kimi-k2"), load_model("glm-4-9b")
    assert (parameter_count(kimi), active_parameter_count(kimi)) == (
        parameter_count(read(HUB["kimi-k2"]["config"])),
        active_parameter_count(read(HUB["kimi-k2"]["config"])),
    )
    assert kind_parameters(glm.layer(0)) == kind_parameters(read(HUB["glm-4-9b"]["config"]).layer(0))


LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 500,
}
BASE = 4 * (64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 160 + 2 * 64) + 64 + 2 * 500 * 64
"""parameters of a Llama of these sizes: attention, feed-forward, norms, and two tables"""


@pytest.mark.parametrize(
    ("keys", "more"),
    [
        ({"model_type": "xverse"}, 0),
        ({"model_type": "solar"}, 0),
        ({"model_type": "orion"}, 4 * 2 * 64 + 64),
        ({"model_type": "mimo", "attention_bias": True}, 4 * (64 + 2 * 32)),
        ({"model_type": "internlm"}, 4 * (64 + 2 * 32 + 64)),
        (
            {"model_type": "telechat", "n_layer": 4, "n_head": 4, "ffn_hidden_size": 160},
            4 * 2 * 64,
        ),
        (
            {"model_type": "grok-1", "num_experts": 4, "num_selected_experts": 2},
            4 * (3 * 3 * 64 * 160 + 4 * 64 + 2 * 64) - 500 * 64,
        ),
    ],
)
def test_parts_that_a_family_adds_to_llama(keys: dict[str, object], more: int) -> None:
    assert parameter_count(read(LLAMA | keys)) == BASE + more


def test_ling_counts_its_shared_experts_and_biases() -> None:
    plain = changed("ling-mini-2.0", moe_router_enable_expert_bias=False)
    assert parameter_count(plain) == HUB["ling-mini-2.0"]["total"] - 19 * 256
    alone = changed("ling-mini-2.0", num_shared_experts=0)
    assert parameter_count(alone) == HUB["ling-mini-2.0"]["total"] - 19 * 3 * 2048 * 512


def test_jais_is_gpt2_without_positions_and_with_a_third_matrix() -> None:
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 500, "n_inner": 160}
    spec = read(sizes | {"model_type": "jais", "activation_function": "swiglu", "position_embedding_type": "alibi"})
    attention, feed_forward = 4 * 64 * 64 + 4 * 64, 3 * 64 * 160 + 2 * 160 + 64
    assert parameter_count(spec) == 500 * 64 + 2 * (attention + feed_forward + 4 * 64) + 2 * 64


def test_hunyuan_shares_keys_and_values_between_pairs_of_layers() -> None:
    keys = {"num_experts": 4, "moe_topk": 1, "num_shared_expert": 1, "model_type": "hunyuan"}
    apart, pairs = read(LLAMA | keys), read(LLAMA | keys | {"use_cla": True, "cla_share_factor": 2})
    assert [pairs.kv_source(layer) for layer in range(4)] == [0, 0, 2, 2]
    assert parameter_count(apart) - parameter_count(pairs) == 2 * (2 * 64 * 32 + 16)  # projections and a norm of keys


def deci(*blocks: dict[str, Any]) -> dict[str, Any]:
    shape = LLAMA | {"num_hidden_layers": len(blocks), "num_key_value_heads": None}
    return shape | {"model_type": "nemotron-nas", "block_configs": list(blocks), "intermediate_size": None}


def block(group: int | None, times: float | None) -> dict[str, Any]:
    """The halves of a layer with `group` heads for each key head, and a feed-forward of `times`; None: without it."""
    attention = {"no_op": group is None, "n_heads_in_group": group, "replace_with_linear": False}
    return {"attention": attention, "ffn": {"no_op": times is None, "ffn_mult": times, "replace_with_linear": False}}


def test_searched_llamas_have_layers_of_their_own() -> None:
    spec = read(deci(block(2, 6.0), block(None, 3.0), block(4, None)))
    parts = [kind_parameters(spec.layer(layer)) for layer in range(3)]
    assert parts == [
        {"attention": 2 * 64 * 64 + 2 * 64 * 32, "mlp": 3 * 64 * 256, "norm": 2 * 64},
        {"mlp": 3 * 64 * 256, "norm": 64},
        {"attention": 2 * 64 * 64 + 2 * 64 * 16, "norm": 64},
    ]


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (deci(block(2, 6.0)) | {"num_hidden_layers": 2}, "block_configs has 1 entries for 2 layers"),
        (deci({"attention": {"n_heads_in_group": 2}}), "in block_configs 0: attention and ffn must both be there"),
        (deci(block(8, 6.0)), "n_heads_in_group must be at most 4, got 8"),
        (HUB["openelm-270m"]["config"] | {"num_kv_heads": [3]}, "num_kv_heads has 1 entries for 16 layers"),
        (HUB["openelm-270m"]["config"] | {"num_kv_heads": ["a"] * 16}, "num_kv_heads must hold positive numbers alone"),
        (HUB["minimax-m1"]["config"] | {"attn_type_list": [2] * 80}, "attn_type_list must hold the numbers 0 and 1"),
        (HUB["glm-4-9b"]["config"] | {"rmsnorm": False}, "rmsnorm false is not supported"),
    ],
)
def test_wrong_files_are_one_line(config: dict[str, Any], problem: str) -> None:
    with pytest.raises(ForerunError, match=problem) as error:
        read(config)
    assert "\n" not in str(error.value)


def test_every_family_of_the_hub_is_read_by_one_of_these_tests() -> None:
    here = {entry["config"]["model_type"] for entry in HUB.values()}
    small = {"xverse", "solar", "orion", "mimo", "internlm", "telechat", "grok-1", "hunyuan", "nemotron-nas", "jais"}
    same_reader = {"aquila", "skywork", "deci", "minimax_text_01"}
    own = {name for name, known in FAMILIES.items() if known.read.__module__.endswith("huggingface_hub_code")}
    assert own <= here | small | same_reader
