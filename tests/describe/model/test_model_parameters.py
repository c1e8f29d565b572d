"""Parameter counts: against published counts, as sums of their parts, and the FLOPs that follow."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.describe.model.catalog import load_model
from forerun.describe.model.layer_parameters import layer_parameters
from forerun.describe.model.parameters import (
    active_parameter_count,
    compute_parameter_count,
    model_flops_per_token,
    outer_parameters,
    parameter_count,
)
from forerun.describe.model.spec import MLASpec, ModelSpec, MoESpec

PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mistral-7b-v0.1": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200,
    "gpt2-small": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "bert-base": 109_482_240,
    "bert-large": 335_141_888,
    "mpt-7b": 6_658_859_008,
    "mpt-70b": 64_862_437_376,
}
ACTIVE_BILLION = {
    "mixtral-8x7b": 12.9,
    "mixtral-8x22b": 39,
    "deepseek-v2": 21,
    "deepseek-v3": 37,
    "qwen3-30b-a3b": 3.3,
    "qwen3-235b-a22b": 22,
}
"""as the families' papers and model cards print them, some cut and some rounded"""
MEGATRON = ["1.7b", "3.6b", "7.5b", "18.4b", "39.1b", "76.1b", "145.6b", "310.1b", "529.6b", "1t"]


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    """Small models of every kind of part."""
    kv_heads, group, layers = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 6))
    flags = {
        name: draw(st.booleans())
        for name in (
            *("tied_embeddings", "qkv_bias", "out_bias", "mlp_bias", "norm_bias", "head_bias", "qk_norm"),
            *("embedding_norm", "final_norm", "block_norms", "pooler", "head_transform"),
        )
    }
    experts = draw(st.integers(1, 6))
    moe = MoESpec(
        experts,
        draw(st.integers(1, experts)),
        draw(st.integers(1, 32)),
        draw(st.integers(0, 32)),
        draw(st.integers(0, layers)),
        draw(st.booleans()),
        draw(st.booleans()),
    )
    mla = MLASpec(*(draw(st.integers(1, 16)) for _ in range(4)), draw(st.none() | st.integers(1, 16)))
    return ModelSpec(
        name="drawn",
        n_layers=layers,
        hidden=draw(st.integers(1, 64)),
        n_heads=kv_heads * group,
        n_kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 16)),
        ffn_hidden=draw(st.integers(1, 128)),
        vocab=draw(st.integers(1, 500)),
        mlp=draw(st.sampled_from(["swiglu", "geglu", "gelu", "relu"])),
        norm=draw(st.sampled_from(["rmsnorm", "layernorm"])),
        position=draw(st.sampled_from(["rope", "learned", "alibi", "none"])),
        max_positions=draw(st.integers(0, 64)),
        token_types=draw(st.integers(0, 2)),
        moe=draw(st.sampled_from([None, moe])),
        mla=draw(st.sampled_from([None, mla])),
        **flags,
    )


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_counts_are_the_published_ones_to_the_unit(name: str, count: int) -> None:
    assert parameter_count(load_model(name)) == count


@pytest.mark.parametrize("size", MEGATRON)
def test_megatron_counts_follow_the_papers_equation(size: str) -> None:
    """arXiv 2104.04473, equation 2, leaves out the last norm (2 h)."""
    spec = load_model(f"megatron-{size}")
    layers, h = spec.n_layers, spec.hidden
    equation = 12 * layers * h * h + 13 * layers * h + (spec.vocab + spec.max_positions) * h
    assert parameter_count(spec) == equation + 2 * h


@pytest.mark.parametrize(("name", "billion"), ACTIVE_BILLION.items())
def test_active_counts_are_those_the_families_name(name: str, billion: float) -> None:
    assert active_parameter_count(load_model(name)) / 1e9 == pytest.approx(billion, rel=0.02)


def test_a_dense_model_is_active_as_a_whole() -> None:
    spec = load_model("llama-2-7b")
    assert active_parameter_count(spec) == parameter_count(spec)


def test_parts_of_a_layer_are_those_one_counts_by_hand() -> None:
    """Qwen3-30B-A3B: 32 query and 4 key/value heads of 128 at width 2048; 128 experts of width 768."""
    assert layer_parameters(load_model("qwen3-30b-a3b"), 0) == {
        "attention": 2 * 2048 * 32 * 128 + 2 * 2048 * 4 * 128,
        "norm": 2 * 2048 + 2 * 128,
        "router": 128 * 2048,
        "experts": 128 * 3 * 2048 * 768,
    }


def test_first_layers_of_deepseek_are_dense() -> None:
    spec = load_model("deepseek-v3")
    assert "mlp" in layer_parameters(spec, 2)
    assert set(layer_parameters(spec, 3)) == {"attention", "norm", "router", "experts", "shared_experts"}


def test_a_stack_without_attention_has_none_to_count() -> None:
    spec = ModelSpec("mlp", 4, 8, 0, 0, 0, 32, 100, mlp="gelu", norm="layernorm", position="none", block_norms=False)
    assert layer_parameters(spec, 0) == {"mlp": 2 * 8 * 32}
    assert outer_parameters(spec) == {"embedding": 800, "final_norm": 8, "head": 800}
    assert model_flops_per_token(spec, 1000) == 6 * (4 * 2 * 8 * 32 + 8 + 800)


def test_model_flops_of_llama_are_those_of_palms_formula() -> None:
    """6 (8,030,261,248 - 128256 x 4096) + 12 x 32 x 4096 x 8192."""
    assert model_flops_per_token(load_model("llama-3.1-8b"), 8192) == 57_914_449_920


def test_model_flops_of_latent_attention_take_the_mean_width() -> None:
    spec = load_model("deepseek-v3")
    attention = model_flops_per_token(spec, 4096) - 6 * compute_parameter_count(spec)
    assert attention == 12 * 61 * 128 * (192 + 128) / 2 * 4096


def test_a_tied_head_computes_though_it_holds_nothing() -> None:
    spec = load_model("gpt2-small")
    assert compute_parameter_count(spec) == parameter_count(spec) - 1024 * 768


@given(specs())
def test_the_total_is_the_sum_of_all_parts(spec: ModelSpec) -> None:
    layers = sum(sum(layer_parameters(spec, layer).values()) for layer in range(spec.n_layers))
    assert parameter_count(spec) == layers + sum(outer_parameters(spec).values())


@given(specs())
def test_a_layer_more_adds_just_that_layer(spec: ModelSpec) -> None:
    more = replace(spec, n_layers=spec.n_layers + 1)
    assert parameter_count(more) - parameter_count(spec) == sum(layer_parameters(more, spec.n_layers).values()) > 0


@given(specs(), st.integers(1, 10_000))
def test_active_parameters_and_flops_stay_in_bounds(spec: ModelSpec, seq_len: int) -> None:
    assert 0 < active_parameter_count(spec) <= parameter_count(spec)
    assert model_flops_per_token(spec, seq_len + 1) > model_flops_per_token(spec, seq_len) > 0
