"""config.json files: every family gives the published count, and a bad file gives one line that names the cause."""

import json
from pathlib import Path
from typing import Any

import pytest

from forerun.common.errors import ForerunError
from forerun.describe.model.catalog import load_model
from forerun.describe.model.fields import Fields
from forerun.describe.model.huggingface import load_huggingface, spec_from_config
from forerun.describe.model.parameters import parameter_count
from forerun.describe.model.spec import ModelSpec

CONFIGS = Path(__file__).parent / "configs"
EXAMPLE = Path(__file__).parents[3] / "examples" / "llama-3.1-8b"
COUNTS = {
    "bert-base-uncased": 109_514_298,
    "bloom-560m": 559_214_592,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200,
    "gemma-2b": 2_506_172_416,
    "gpt2": 124_439_808,
    "llama-2-7b": 6_738_415_616,
    "mistral-7b-v0.1": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mpt-7b": 6_649_286_656,
    "opt-125m": 125_239_296,
    "phi-3-mini": 3_821_079_552,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-8b": 8_190_735_360,
}
PRESETS_WITH_A_CONFIG = [
    *("deepseek-v2-lite", "deepseek-v3", "llama-2-7b", "mistral-7b-v0.1", "mixtral-8x7b"),
    *("qwen2.5-7b", "qwen3-30b-a3b", "qwen3-8b"),
]


def config_of(name: str) -> dict[str, Any]:
    return json.loads((CONFIGS / f"{name}.json").read_text())


def spec_of(config: dict[str, Any]) -> ModelSpec:
    return spec_from_config(Fields(config, "x/config.json"), "x")


def refused(config: dict[str, Any], *parts: str) -> None:
    """The configuration is refused in one line that has all of `parts` and the place."""
    with pytest.raises(ForerunError) as error:
        spec_of(config)
    message = str(error.value)
    assert "\n" not in message
    for part in ("x/config.json", *parts):
        assert part in message


@pytest.mark.parametrize(("name", "count"), COUNTS.items())
def test_count_of_the_published_checkpoint(name: str, count: int) -> None:
    assert parameter_count(load_huggingface(CONFIGS / f"{name}.json")) == count


@pytest.mark.parametrize("name", PRESETS_WITH_A_CONFIG)
def test_file_and_preset_are_the_same_model(name: str) -> None:
    assert load_huggingface(CONFIGS / f"{name}.json") == load_model(name)


def test_example_is_the_preset_whether_file_or_folder() -> None:
    assert load_model(EXAMPLE) == load_model(EXAMPLE / "config.json") == load_model("llama-3.1-8b")


def test_bert_for_pretraining_has_pooler_and_both_heads() -> None:
    config = config_of("bert-base-uncased") | {"architectures": ["BertForPreTraining"]}
    assert parameter_count(spec_of(config)) == 110_106_428


def test_mpt_with_a_position_table_and_biases_is_llm_foundrys() -> None:
    config = config_of("mpt-7b") | {"no_bias": False, "vocab_size": 50368}
    config["attn_config"]["alibi"] = False
    assert parameter_count(spec_of(config)) == parameter_count(load_model("mpt-7b"))


def test_grouped_mpt_shares_keys_and_values() -> None:
    config = config_of("mpt-7b")
    config["attn_config"] |= {"attn_type": "grouped_query_attention", "kv_n_heads": 8}
    assert spec_of(config).n_kv_heads == 8


def test_llama_biases_count() -> None:
    plain, biased = config_of("llama-2-7b"), config_of("llama-2-7b") | {"attention_bias": True, "mlp_bias": True}
    extra = 32 * (4 * 4096 + 2 * 11008 + 4096)
    assert parameter_count(spec_of(biased)) == parameter_count(spec_of(plain)) + extra


def test_deepseek_without_experts_is_dense() -> None:
    config = config_of("deepseek-v2-lite") | {"n_routed_experts": None}
    assert spec_of(config).moe is None


def test_mistral_without_the_key_has_the_familys_window() -> None:
    config = config_of("mistral-7b-v0.1")
    assert spec_of(config | {"sliding_window": None}).sliding_window is None
    del config["sliding_window"]
    assert spec_of(config).sliding_window == 4096


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"use_sliding_window": True, "max_window_layers": 0}, 131072),
        ({"use_sliding_window": True, "max_window_layers": 28}, None),
        ({"layer_types": ["full_attention"] * 28}, None),
        ({"use_sliding_window": True, "layer_types": ["sliding_attention"] * 28}, 131072),
    ],
)
def test_window_of_qwen(changes: dict[str, Any], window: int | None) -> None:
    assert spec_of(config_of("qwen2.5-7b") | changes).sliding_window == window


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"layer_types": ["full_attention"] * 27}, ["layer_types", "27", "28"]),
        ({"layer_types": ["full_attention"] * 27 + ["sliding_attention"]}, ["layer_types", "sliding_window"]),
        ({"layer_types": ["linear_attention"] * 28}, ["layer_types", "linear_attention"]),
        ({"layer_types": ["sliding_attention"] * 28}, ["layer_types", "sliding_window"]),
    ],
)
def test_layers_that_differ_are_refused(changes: dict[str, Any], parts: list[str]) -> None:
    refused(config_of("qwen2.5-7b") | changes, *parts)


@pytest.mark.parametrize("name", COUNTS)
def test_key_that_no_one_reads_is_in_the_notes(name: str) -> None:
    (note,) = spec_of(config_of(name) | {"num_memory_slots": 4}).notes
    assert note.startswith("x/config.json: the prediction doesn't use ")
    assert note.endswith("num_memory_slots (not known)")


def test_keys_that_change_training_elsewhere_are_named_once() -> None:
    (note,) = spec_of(config_of("deepseek-v3")).notes
    for key in ("ep_size", "rope_scaling", "num_nextn_predict_layers"):
        assert note.count(key) == 1
    assert "initializer_range" not in note


def test_window_starts_behind_the_first_layers_of_qwen() -> None:
    spec = spec_of(config_of("qwen2.5-7b") | {"use_sliding_window": True, "max_window_layers": 14})
    assert [spec.layer(layer).sliding_window for layer in (0, 13, 14, 27)] == [None, None, 131072, 131072]


@pytest.mark.parametrize(
    ("changes", "sparse"),
    [
        ({"decoder_sparse_step": 2}, [layer % 2 == 1 for layer in range(48)]),
        ({"mlp_only_layers": [5]}, [layer != 5 for layer in range(48)]),
        ({"mlp_only_layers": [0, 1]}, [layer > 1 for layer in range(48)]),
    ],
)
def test_layers_of_qwen_with_experts(changes: dict[str, Any], sparse: list[bool]) -> None:
    spec = spec_of(config_of("qwen3-30b-a3b") | changes)
    assert [spec.is_moe_layer(layer) for layer in range(48)] == sparse


def test_misspelt_key_gets_a_hint() -> None:
    refused(
        config_of("llama-2-7b") | {"num_key_value_head": 8}, "num_key_value_head'", "did you mean num_key_value_heads?"
    )


def test_missing_key_is_named_with_its_misspelling() -> None:
    config = config_of("llama-2-7b")
    config["hidden_sizes"] = config.pop("hidden_size")
    refused(config, "missing key 'hidden_size'", "'hidden_sizes'")


@pytest.mark.parametrize("name", COUNTS)
def test_vocabulary_has_no_default_in_any_family(name: str) -> None:
    config = config_of(name)
    del config["vocab_size"]
    refused(config, "vocab_size")


@pytest.mark.parametrize(
    ("name", "changes", "parts"),
    [
        ("llama-2-7b", {"hidden_size": "4096"}, ["hidden_size", "whole number", '"4096"']),
        ("llama-2-7b", {"hidden_size": 4096.0}, ["hidden_size", "whole number"]),
        ("llama-2-7b", {"num_hidden_layers": True}, ["num_hidden_layers", "whole number"]),
        ("llama-2-7b", {"num_hidden_layers": 0}, ["num_hidden_layers", "at least 1"]),
        ("llama-2-7b", {"vocab_size": 10**12}, ["vocab_size", "at most"]),
        ("llama-2-7b", {"num_attention_heads": 30}, ["head_dim", "30"]),
        ("llama-2-7b", {"num_key_value_heads": 5}, ["n_kv_heads 5"]),
        ("llama-2-7b", {"attention_bias": "yes"}, ["attention_bias", "true or false"]),
        ("llama-2-7b", {"hidden_act": "tanh"}, ["hidden_act", "'tanh'", "silu"]),
        ("llama-2-7b", {"is_encoder_decoder": True}, ["is_encoder_decoder"]),
        ("llama-2-7b", {"pruned_heads": {"0": [1]}}, ["pruned_heads"]),
        ("llama-2-7b", {"architectures": ["LlamaForSequenceClassification"]}, ["LlamaForSequenceClassification"]),
        ("llama-2-7b", {"architectures": "LlamaForCausalLM"}, ["architectures", "a list"]),
        ("llama-2-7b", {"model_type": "perceiver"}, ["model_type", "'perceiver'"]),
        ("mixtral-8x7b", {"num_experts_per_tok": 9}, ["top_k 9 must be at most n_experts 8"]),
        ("deepseek-v3", {"moe_layer_freq": 2}, ["moe_layer_freq"]),
        ("deepseek-v3", {"num_key_value_heads": 8}, ["num_key_value_heads"]),
        ("deepseek-v3", {"kv_lora_rank": -1}, ["kv_lora_rank"]),
        ("gpt2", {"n_embd": 768, "hidden_size": 1024}, ["n_embd and hidden_size"]),
        ("gpt2", {"add_cross_attention": True}, ["add_cross_attention"]),
        ("bert-base-uncased", {"is_decoder": True}, ["is_decoder"]),
        ("bert-base-uncased", {"position_embedding_type": "relative_key"}, ["position_embedding_type"]),
        ("opt-125m", {"word_embed_proj_dim": 512}, ["word_embed_proj_dim"]),
        ("opt-125m", {"do_layer_norm_before": False}, ["do_layer_norm_before"]),
        ("mpt-7b", {"attn_config": {"qk_ln": True}}, ["attn_config", "qk_ln"]),
        ("mpt-7b", {"attn_config": {"alibbi": True}}, ["attn_config", "alibbi", "alibi?"]),
        ("mpt-7b", {"attn_config": "torch"}, ["attn_config", "a mapping"]),
        ("mpt-7b", {"expansion_ratio": 1.0001}, ["expansion_ratio"]),
        ("bloom-560m", {"n_inner": 512}, ["n_inner"]),
        ("phi-3-mini", {"lm_head_bias": True}, ["lm_head_bias"]),
    ],
)
def test_values_that_make_no_known_model_are_refused(name: str, changes: dict[str, Any], parts: list[str]) -> None:
    refused(config_of(name) | changes, *parts)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ('{"model_type": "llama", "hidden_size": 40', "not JSON"),
        ("", "not JSON"),
        ("[1, 2]", "must be a JSON object, got list"),
        ("{}", "missing key 'model_type'"),
        ("[" * 100_000, "not JSON"),
        ('{"hidden_size": ' + "9" * 5000 + "}", "config.json"),
    ],
)
def test_a_file_that_is_no_config_gives_one_line(tmp_path: Path, content: str, part: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ForerunError) as error:
        load_huggingface(tmp_path)
    assert part in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_binary_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(ForerunError, match="not UTF-8 text"):
        load_huggingface(tmp_path)


def test_folder_without_a_config_names_the_file_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(ForerunError) as error:
        load_model(tmp_path)
    assert str(error.value) == f"{tmp_path / 'config.json'}: can't be read: No such file or directory; check the path"
