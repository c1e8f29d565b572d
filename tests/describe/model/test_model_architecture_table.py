"""Architecture tables: what the short form means, and the table beside the published measurements."""

import csv
from pathlib import Path
from typing import Any

import pytest

from forerun.common.errors import ForerunError
from forerun.describe.model.architecture_table import load_architectures, sized_for, spec_from_architecture
from forerun.describe.model.layer_parameters import layer_parameters
from forerun.describe.model.parameters import parameter_count

VALIDATION = Path(__file__).parents[3].parent / "shared" / "validation"
GPT: dict[str, Any] = {
    "n_layers": 2,
    "hidden": 64,
    "n_heads": 4,
    "n_kv_heads": 4,
    "ffn_hidden": 256,
    "vocab": 1000,
    "mlp": "gelu",
    "norm": "layernorm",
    "bias": True,
    "tied_embeddings": True,
    "pos_emb": "learned",
    "provenance": "made up",
}
LLAMA = GPT | {"mlp": "swiglu", "norm": "rmsnorm", "bias": False, "tied_embeddings": False, "pos_emb": "rope"}
MOE = {"n_experts": 8, "top_k": 2, "expert_ffn": 32}

needs_table = pytest.mark.skipif(
    not VALIDATION.is_dir(), reason="the published measurements are not beside the project"
)


@needs_table
def test_every_entry_of_the_published_table_loads() -> None:
    specs = load_architectures(VALIDATION / "models.yaml")
    assert len(specs) > 100
    assert all(spec.name == name for name, spec in specs.items())
    assert parameter_count(specs["Llama-3.1-8B"]) == 8_030_261_248


@needs_table
def test_counts_are_those_that_sources_report() -> None:
    specs = load_architectures(VALIDATION / "models.yaml")
    with (VALIDATION / "measurements.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["n_params_source"]]
    assert rows
    for row in rows:
        spec = sized_for(specs[row["model"]], int(row["seq_len"]))
        assert parameter_count(spec) == int(row["n_params_source"]), row["id"]


def test_bias_of_a_plain_stack_is_everywhere_but_on_the_head() -> None:
    spec = spec_from_architecture("x", GPT)
    assert (spec.qkv_bias, spec.out_bias, spec.mlp_bias, spec.norm_bias, spec.head_bias) == (True,) * 4 + (False,)
    assert sum(layer_parameters(spec, 0).values()) == 12 * 64 * 64 + 13 * 64


def test_bias_of_a_gated_stack_is_on_attention_only() -> None:
    spec = spec_from_architecture("x", LLAMA | {"bias": True})
    assert (spec.qkv_bias, spec.out_bias, spec.mlp_bias, spec.norm_bias) == (True, True, False, False)


def test_bias_may_leave_attention_out() -> None:
    spec = spec_from_architecture("x", GPT | {"bias": "mlp+layernorm only", "pos_emb": "sincos(no params)"})
    assert (spec.qkv_bias, spec.out_bias, spec.mlp_bias, spec.norm_bias) == (False, False, True, True)
    assert spec.position == "sinusoidal"


def test_alibi_brings_a_norm_after_the_embedding() -> None:
    assert spec_from_architecture("x", GPT | {"pos_emb": "alibi"}).embedding_norm
    assert not spec_from_architecture("x", GPT | {"pos_emb": ""}).embedding_norm


def test_a_table_of_unstated_length_takes_the_sequences() -> None:
    spec = spec_from_architecture("x", GPT)
    assert parameter_count(sized_for(spec, 128)) - parameter_count(spec) == 128 * 64
    stated = spec_from_architecture("x", GPT | {"max_positions": 32})
    assert sized_for(stated, 128) == stated
    rotary = spec_from_architecture("x", LLAMA)
    assert sized_for(rotary, 128) == rotary


def test_a_stack_without_attention_has_no_norms_in_its_blocks() -> None:
    spec = spec_from_architecture("x", GPT | {"attention": "none", "n_heads": 0, "n_kv_heads": 0, "pos_emb": "none"})
    assert spec.n_heads == 0
    assert set(layer_parameters(spec, 0)) == {"mlp"}


@pytest.mark.parametrize(
    ("extra", "dense", "shared"),
    [
        ({"n_shared": 0, "moe_layers": "all"}, 0, 0),
        ({}, 0, 0),
        ({"n_shared": 2, "dense_layers": 1}, 1, 64),
        ({"shared_ffn": 48, "moe_layers": 1}, 1, 48),
    ],
)
def test_experts(extra: dict[str, Any], dense: int, shared: int) -> None:
    moe = spec_from_architecture("x", LLAMA | {"moe": MOE | extra}).moe
    assert moe is not None
    assert (moe.n_dense_layers, moe.shared_ffn, moe.capacity_factor) == (dense, shared, None)


def test_experts_padded_to_capacity() -> None:
    row = LLAMA | {"moe": MOE | {"capacity_factor": 1, "pad_to_capacity": True}}
    moe = spec_from_architecture("x", row).moe
    assert moe is not None
    assert moe.capacity_factor == 1.0


def test_latent_attention() -> None:
    mla = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_dim": 8, "qk_rope_dim": 4, "v_head_dim": 8}
    spec = spec_from_architecture("x", LLAMA | {"mla": mla})
    assert spec.mla is not None
    assert spec.mla.q_lora_rank == 24


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"n_layer": 2}, "n_layer"),
        ({"n_layers": None}, "missing key 'n_layers'"),
        ({"vocab": "big"}, "vocab"),
        ({"pos_emb": "spiral"}, "spiral"),
        ({"bias": "some"}, "bias"),
        ({"bias": 3}, "bias"),
        ({"attention": "linear"}, "attention"),
        ({"n_heads": 0}, "n_heads"),
        ({"moe": MOE | {"pad_to_capacity": True}}, "capacity_factor"),
        ({"moe": MOE | {"dense_layers": 1, "moe_layers": "all"}}, "dense_layers and moe_layers"),
        ({"moe": MOE | {"gates": 1}}, "gates"),
        ({"mla": {"kv_lora_rank": 16}}, "qk_nope_dim"),
    ],
)
def test_bad_entries_name_entry_and_key(changes: dict[str, Any], part: str) -> None:
    with pytest.raises(ForerunError) as error:
        spec_from_architecture("thing", GPT | changes)
    assert "thing" in str(error.value)
    assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_a_table_that_is_not_there_or_holds_no_entries_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ForerunError, match="No such file"):
        load_architectures(tmp_path / "models.yaml")
    (tmp_path / "models.yaml").write_text("thing: 3\n")
    with pytest.raises(ForerunError, match="thing must be a mapping"):
        load_architectures(tmp_path / "models.yaml")
