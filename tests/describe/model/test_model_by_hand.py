"""A small model counted by hand, what a model may not be, and how values of a file are read."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from forerun.common.errors import ForerunError
from forerun.describe.model.convolutional import read_convolutional
from forerun.describe.model.fields import Fields, exponent_number
from forerun.describe.model.layer_parameters import layer_parameters
from forerun.describe.model.matrices import matrices
from forerun.describe.model.parameters import (
    active_parameter_count,
    compute_parameter_count,
    model_flops_per_token,
    outer_parameters,
    parameter_count,
)
from forerun.describe.model.spec import MLASpec, ModelSpec, MoESpec

# Widths that are different primes times powers of ten, so that no two counts are equal by chance.
SMALL = ModelSpec("small", n_layers=3, hidden=20, n_heads=4, n_kv_heads=2, head_dim=3, ffn_hidden=70, vocab=110)
EXPERTS = replace(SMALL, moe=MoESpec(8, 2, 13, shared_ffn=17, n_dense_layers=1, shared_gate=True, router_bias=True))
LATENT = replace(SMALL, n_kv_heads=4, mla=MLASpec(kv_lora_rank=11, qk_nope_dim=5, qk_rope_dim=2, v_head_dim=3))
BERT = replace(
    SMALL,
    mlp="gelu",
    norm="layernorm",
    norm_bias=True,
    position="learned",
    max_positions=32,
    tied_embeddings=True,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    head_bias=True,
    embedding_norm=True,
    final_norm=False,
    token_types=2,
    pooler=True,
    pooler_classes=2,
    head_transform=True,
    qk_norm=True,
)


TRUE_BY_DEFAULT = ("causal", "key_bias", "block_norms", "final_norm", "norm_weight", "head_transform_bias")


def test_a_model_that_states_least_is_a_llama() -> None:
    flags = {one.name for one in fields(ModelSpec) if isinstance(getattr(SMALL, one.name), bool)}
    assert {name for name in flags if getattr(SMALL, name)} == {*TRUE_BY_DEFAULT}
    assert (SMALL.mlp, SMALL.norm, SMALL.position) == ("swiglu", "rmsnorm", "rope")
    assert (SMALL.max_positions, SMALL.token_types, SMALL.pooler_classes) == (0, 0, 0)
    assert (SMALL.sliding_window, SMALL.moe, SMALL.mla) == (None, None, None)
    assert MoESpec(8, 2, 13) == MoESpec(8, 2, 13, 0, 0, False, False, 1, 1, None)


def test_a_plain_models_matrices_and_parameters() -> None:
    assert matrices(SMALL) == {(110, 20): 2, (24, 20): 3, (20, 12): 3, (70, 20): 6, (20, 70): 3}
    layer = {"attention": 24 * 20 + 12 * 20, "norm": 40, "mlp": 3 * 70 * 20}
    assert layer_parameters(SMALL, 0) == layer_parameters(SMALL, 2) == layer
    assert outer_parameters(SMALL) == {"embedding": 2200, "final_norm": 20, "head": 2200}
    assert parameter_count(SMALL) == active_parameter_count(SMALL) == 4420 + 3 * 4960
    assert compute_parameter_count(SMALL) == 2220 + 3 * 4960
    assert model_flops_per_token(SMALL, 7) == 6 * (2220 + 3 * 4960) + 12 * 3 * 12 * 7


def test_experts_follow_the_dense_layers() -> None:
    assert [EXPERTS.is_moe_layer(layer) for layer in range(3)] == [False, True, True]
    assert matrices(EXPERTS) == {
        (110, 20): 2,
        (24, 20): 3,
        (20, 12): 3,
        (70, 20): 2,
        (20, 70): 1,
        (8, 20): 2,
        (1, 20): 2,
        (13, 20): 2 * 8 * 2,
        (20, 13): 2 * 8,
        (17, 20): 2 * 2,
        (20, 17): 2,
    }
    assert layer_parameters(EXPERTS, 0) == layer_parameters(SMALL, 0)
    assert layer_parameters(EXPERTS, 1) == {
        "attention": 720,
        "norm": 40,
        "router": 8 * 21,
        "experts": 8 * 3 * 13 * 20,
        "shared_experts": 3 * 17 * 20 + 20,
    }
    whole = 4420 + 4960 + 2 * (760 + 168 + 6240 + 1040)
    assert parameter_count(EXPERTS) == whole
    assert active_parameter_count(EXPERTS) == whole - 2 * 6 * 780
    all_layers = replace(EXPERTS, moe=replace(EXPERTS.moe, n_dense_layers=0, shared_ffn=0, shared_gate=False))
    assert parameter_count(all_layers) == 4420 + 3 * (760 + 168 + 6240)


def test_latent_attention_goes_through_its_ranks() -> None:
    found = matrices(LATENT)
    assert found[28, 20] == found[13, 20] == found[32, 11] == found[20, 12] == 3
    parts = layer_parameters(LATENT, 0)
    assert parts["attention"] == 28 * 20 + 13 * 20 + 32 * 11 + 12 * 20
    assert parts["norm"] == 40 + 11
    ranked = replace(LATENT, mla=replace(LATENT.mla, q_lora_rank=9), qkv_bias=True, out_bias=True)
    assert matrices(ranked)[9, 20] == matrices(ranked)[28, 9] == 3
    parts = layer_parameters(ranked, 0)
    assert parts["attention"] == (20 * 9 + 9) + 9 * 28 + (20 * 13 + 13) + 32 * 11 + (12 * 20 + 20)
    assert parts["norm"] == 40 + 11 + 9
    assert model_flops_per_token(LATENT, 7) == 6 * compute_parameter_count(LATENT) + 12 * 3 * (4 * 10 / 2) * 7


def test_an_encoder_has_biases_tables_and_a_pooler() -> None:
    assert outer_parameters(BERT) == {
        "embedding": 2200,
        "position_embedding": 640,
        "token_type_embedding": 40,
        "embedding_norm": 40,
        "pooler": 420 + 2 * 21,
        "head_transform": 420 + 40,
        "head": 110,
    }
    assert layer_parameters(BERT, 1) == {
        "attention": 24 * 20 + 24 + 12 * 20 + 20,
        "norm": 2 * 40 + 2 * 6,
        "mlp": 70 * 20 + 70 + 70 * 20 + 20,
    }
    assert compute_parameter_count(BERT) == parameter_count(BERT) - 2200 - 640 - 40 + 2200
    outside = {(110, 20): 1, (32, 20): 1, (2, 20): 2, (20, 20): 2}
    assert matrices(BERT) == {**outside, (24, 20): 3, (20, 12): 3, (70, 20): 3, (20, 70): 3}


def test_a_stack_without_attention_has_one_norm_a_layer() -> None:
    bare = replace(SMALL, n_heads=0, n_kv_heads=0, head_dim=0)
    assert layer_parameters(bare, 0) == {"norm": 20, "mlp": 4200}
    assert layer_parameters(replace(bare, block_norms=False), 0) == {"mlp": 4200}
    assert matrices(bare) == {(110, 20): 2, (70, 20): 6, (20, 70): 3}


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [
        *[({name: 1}, {name: 0}, f"{name} must be at least 1, got 0") for name in ("n_layers", "vocab")],
        ({"ffn_hidden": 0}, {"ffn_hidden": -1}, "ffn_hidden must be at least 0, got -1"),
        ({"n_heads": 0, "head_dim": 0}, {"n_heads": 4, "head_dim": 0}, "n_heads 4 needs a positive head_dim"),
        ({"head_dim": 1}, {"n_heads": -1}, "n_heads -1 needs a positive head_dim"),
        ({"n_kv_heads": 1}, {"n_kv_heads": 0}, "n_heads 4 is not a multiple of n_kv_heads 0"),
        ({"n_kv_heads": 4}, {"n_kv_heads": 3}, "n_heads 4 is not a multiple of n_kv_heads 3"),
        ({"pooler": True, "pooler_classes": 2}, {"pooler_classes": 2}, "pooler_classes 2 needs pooler: true"),
        ({"max_positions": 0}, {"max_positions": -1}, "max_positions must be at least 0, got -1"),
        ({"token_types": 0}, {"token_types": -1}, "token_types must be at least 0, got -1"),
        ({"sliding_window": 1}, {"sliding_window": 0}, "sliding_window must be at least 1, got 0"),
        (
            {"moe": MoESpec(2, 2, 1, n_dense_layers=3)},
            {"moe": MoESpec(2, 2, 1, n_dense_layers=4)},
            "exceeds n_layers 3",
        ),
    ],
)
def test_the_ends_of_what_a_model_may_be(good: dict[str, object], bad: dict[str, object], message: str) -> None:
    replace(SMALL, **good)  # type: ignore[arg-type]
    with pytest.raises(ForerunError, match=message):
        replace(SMALL, **bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "bad",
    [
        *[{"n_experts": 0, "top_k": 0}, {"expert_ffn": 0}, {"shared_ffn": -1}, {"n_dense_layers": -1}],
        *[{"top_k": 0}, {"top_k": 9}, {"capacity_factor": 0.0}, {"capacity_factor": -1.0}],
    ],
)
def test_experts_that_cannot_be_are_refused(bad: dict[str, object]) -> None:
    MoESpec(1, 1, 1, capacity_factor=0.1)
    MoESpec(8, 8, 1)
    with pytest.raises(ForerunError, match=r"^moe: "):
        replace(EXPERTS.moe, **bad)  # type: ignore[type-var,arg-type]


@pytest.mark.parametrize("name", ["kv_lora_rank", "qk_nope_dim", "qk_rope_dim", "v_head_dim"])
def test_ranks_and_widths_of_latent_attention_are_at_least_one(name: str) -> None:
    assert replace(LATENT.mla, **{name: 1})  # type: ignore[type-var]
    with pytest.raises(ForerunError, match=r"^mla: every width"):
        replace(LATENT.mla, **{name: 0})  # type: ignore[type-var]


# -- values of files ---------------------------------------------------------------------------------------------------


def of(**values: object) -> Fields:
    return Fields(values, "here")


def test_whole_numbers_have_ends_and_may_have_exponents() -> None:
    given = of(least=1, most=10**9, exponent="2e3", zero=0)
    assert [given.integer(name) for name in ("least", "most", "exponent")] == [1, 10**9, 2000]
    assert (given.integer("none", 5), given.integer("zero", least=0)) == (5, 0)
    for values, message in (
        ({"a": 0}, "here: a must be at least 1, got 0"),
        ({"a": 10**9 + 1}, "here: a must be at most 1000000000, got 1000000001"),
        ({"a": True}, "here: a must be a whole number, got true (bool)"),
        ({"a": "1.5e0"}, 'here: a must be a whole number, got "1.5e0" (str)'),
        ({"a": "x" * 80}, f'here: a must be a whole number, got "{"x" * 59}... (str)'),
        ({"a": "x" * 58}, f'here: a must be a whole number, got "{"x" * 58}" (str)'),
        ({}, "here: missing key 'a' (a whole number)"),
    ):
        with pytest.raises(ForerunError) as caught:
            of(**values).integer("a")
        assert str(caught.value) == message


def test_a_missing_key_names_the_one_that_is_nearly_it() -> None:
    with pytest.raises(ForerunError, match=r"missing key 'hidden_size' \(a whole number\); found 'hiden_size' instead"):
        of(hiden_size=3).integer("hidden_size")
    with pytest.raises(ForerunError, match=r"missing key 'hidden_size' \(a whole number\)$"):
        of(hidden=3).integer("hidden_size")


def test_numbers_flags_texts_and_lists() -> None:
    given = of(number=0.5, exponent="1e3", flag=True, text="a", listed=(1, 2), null=None, nested={"a": 1})
    assert (given.number("number"), given.number("exponent"), given.number("none")) == (0.5, 1000.0, None)
    assert (given.flag("flag"), given.flag("none"), given.flag("none", True)) == (True, False, True)
    assert (given.text("text"), given.text("none", "b"), given.text("text", choices=["a"])) == ("a", "b", "a")
    assert (given.items("listed"), given.items("none")) == ([1, 2], [])
    assert (given.mapping("nested"), given.mapping("none")) == ({"a": 1}, {})
    assert (given.stated("null"), given.present("null"), given.present("none")) == (False, True, False)
    assert given.section("none") is None
    for call, message in (
        (lambda: of(a=0).number("a"), "a must be positive, got 0"),
        (lambda: of(a=True).number("a"), r"a must be a number, got true \(bool\)"),
        (lambda: of(a=float("inf")).number("a"), "a must be positive, got inf"),
        (lambda: of(a=1).flag("a"), r"a must be true or false, got 1 \(int\)"),
        (lambda: of(a=1).text("a"), r"a must be a text, got 1 \(int\)"),
        (lambda: of(a="c").text("a", choices=["a", "b"]), "a 'c' is not known; known: a, b"),
        (lambda: of().text("a"), r"missing key 'a' \(a text\)"),
        (lambda: of(a=1).items("a"), r"a must be a list, got 1 \(int\)"),
        (lambda: of(a=1).section("a"), r"a must be a mapping, got 1 \(int\)"),
    ):
        with pytest.raises(ForerunError, match=message):
            call()


def test_types_of_keys_that_take_several() -> None:
    given = of(text="a", whole=3, flag=True, listed=[], zero=0, zero_text="0e1", one=1)
    assert [name for name in given.names() if given.is_text(name)] == ["text", "zero_text"]
    assert [name for name in given.names() if given.is_whole(name)] == ["whole", "zero", "one"]
    assert [name for name in given.names() if given.is_list(name)] == ["listed"]
    assert [name for name in given.names() if given.is_zero(name)] == ["zero", "zero_text"]
    assert exponent_number("1.5E-3") == 0.0015
    assert exponent_number("1e1000") == "1e1000"


def test_keys_that_must_agree_or_are_not_known() -> None:
    of(a=1).expect("a", 1, 2)
    of().expect("a", 1)
    with pytest.raises(ForerunError, match="a true is not supported, only 1 or 2"):
        of(a=True).expect("a", 1, 2)
    assert of(b=1).first_of("a", "b") == "b"
    assert of(a=1, b=1).first_of("a", "b") == of().first_of("a", "b") == "a"
    with pytest.raises(ForerunError, match="a and b mean the same and differ"):
        of(a=1, b=2).first_of("a", "b")
    given = of(color=1, shape=2)
    given.integer("color")
    given.finish(ignored=["shape"])
    with pytest.raises(ForerunError, match="unknown key 'shape'; known: color"):
        given.finish()
    with pytest.raises(ForerunError, match="unknown key 'shape'; did you mean shapes"):
        given.finish(ignored=["shapes"])


# -- convolutional networks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "depths", [[2, 2, 2], [2, 2, 2, 2, 2], [2, 2, 2, 0], [2, 2, 2, 1000], [2, 2, True, 2], [2, 2, 2.5, 2], []]
)
def test_a_residual_network_has_four_stages_of_blocks(depths: list[object]) -> None:
    assert read_convolutional(of(blocks="basic", depths=[1, 2, 3, 999])).depths == (1, 2, 3, 999)
    with pytest.raises(ForerunError, match="here: depths must be 4 whole numbers from 1 to 999, got"):
        read_convolutional(of(blocks="basic", depths=depths))


def test_a_convolutional_network_that_states_least_sees_images_of_224() -> None:
    net = read_convolutional(of(blocks="bottleneck", depths=[3, 4, 6, 3]))
    assert (net.classes, net.image, net.groups) == (1000, 224, 1)
    assert [read_convolutional(of(blocks="basic", depths=[1] * 4, image=size)).image for size in (32, 4096)] == [
        32,
        4096,
    ]
    for size in (31, 4097):
        with pytest.raises(ForerunError, match="image must be at"):
            read_convolutional(of(blocks="basic", depths=[1] * 4, image=size))
    with pytest.raises(ForerunError, match="depths must be 5 whole numbers"):
        read_convolutional(of(blocks="plain", depths=[1] * 4))
