"""Encoders: what samples have for them, their parameters and FLOPs, and files that state them."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from forerun.common.errors import ForerunError
from forerun.describe.model.catalog import load_model
from forerun.describe.model.encoder import EncoderSpec
from forerun.describe.model.fields import Fields
from forerun.describe.model.huggingface import spec_from_config
from forerun.describe.model.inputs import unused_encoder, with_inputs
from forerun.describe.model.parameters import encoder_parameter_count, model_flops_per_token, parameter_count
from forerun.describe.model.spec_file import load_spec_file, spec_mapping

ENCODERS = ("t5-large", "bart-large", "whisper-large-v3", "llava-1.5-7b", "qwen2.5-vl-7b", "qwen3-vl-8b")


@pytest.mark.parametrize("name", ENCODERS)
def test_a_model_with_an_encoder_is_read_as_it_was_written(name: str, tmp_path: Path) -> None:
    spec, path = load_model(name), tmp_path / f"{name}.yaml"
    path.write_text(yaml.safe_dump(spec_mapping(spec)))
    assert load_spec_file(path) == spec


def test_a_tower_counts_once_samples_have_images() -> None:
    spec = load_model("qwen2.5-vl-7b")
    assert spec.encoder is not None
    assert spec.runs is None
    with_two = with_inputs(spec, 2)
    assert parameter_count(with_two) - parameter_count(spec) == encoder_parameter_count(spec.encoder) == 676_550_144
    assert unused_encoder(spec) == (
        "qwen2.5-vl-7b: the language model alone; --images N trains it with its tower on N images a sequence",
    )
    assert not unused_encoder(with_two)
    assert not unused_encoder(load_model("t5-large"))


def test_images_of_another_size_keep_the_class_token() -> None:
    spec = with_inputs(load_model("llava-1.5-7b"), 3, tokens=100)
    assert spec.encoder is not None
    assert (spec.encoder.tokens, spec.encoder.out_tokens) == (101, 300)
    assert with_inputs(load_model("qwen2.5-vl-7b"), 2).encoder.out_tokens == 2 * (896 // 14) ** 2 // 4  # type: ignore[union-attr]


def test_flops_of_an_encoder_follow_from_its_products() -> None:
    """T5: 24 encoder layers of 12 h^2 on source tokens, 24 decoder layers of 16 h^2 of which 2 h^2 read the source."""
    spec, hidden, layers, seq, source = load_model("t5-large"), 1024, 24, 256, 512
    spec = with_inputs(spec, tokens=source)
    matrices = layers * hidden**2
    vocab, norms = 32128 * hidden, layers * hidden
    decoder = (14 * matrices + 3 * norms + hidden + vocab) * seq
    encoder = (12 * matrices + 2 * norms) * source
    pairs = layers * hidden * (source * source + seq * (seq + source))
    expected = 6 * (decoder + encoder + 2 * matrices * source) + 12 * pairs
    assert model_flops_per_token(spec, seq) * seq == pytest.approx(expected, rel=1e-12)


def test_a_frozen_tower_costs_a_third() -> None:
    plain, seq = load_model("qwen3-vl-8b"), 4096
    images = [with_inputs(plain, 2), with_inputs(plain, 2, frozen=True)]
    alone, trained, frozen = (model_flops_per_token(one, seq) for one in (plain, *images))
    encoder = plain.encoder
    assert encoder is not None
    projector = sum(n * m for n, m in encoder.projector) * encoder.projectors
    own = 6.0 * projector * with_inputs(plain, 2).encoder.out_tokens / seq  # type: ignore[union-attr]
    assert frozen - alone - own == pytest.approx((trained - alone - own) / 3)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("llama-3-8b", {"inputs": 1}, "model llama-3-8b has neither a tower nor an encoder"),
        ("t5-large", {"inputs": 2}, "model t5-large encodes one text for each sample, not images"),
        ("llava-1.5-7b", {"tokens": 100}, "model llava-1.5-7b has no images to encode; state a number of images too"),
        ("llava-1.5-7b", {"frozen": True}, "model llava-1.5-7b has no images to encode; state a number of images too"),
    ],
)
def test_inputs_that_a_model_does_not_take_are_refused(name: str, given: dict[str, int], message: str) -> None:
    with pytest.raises(ForerunError) as error:
        with_inputs(load_model(name), **given)  # type: ignore[arg-type]
    assert str(error.value) == message


def test_an_encoder_has_sizes_that_fit() -> None:
    stack = (
        load_model("bert-large")
        if "bert-large" in ENCODERS
        else replace(load_model("t5-large"), encoder=None, cross_attention="none")
    )
    for wrong, words in (
        ({"tokens": 0}, "tokens must be at least 1"),
        ({"tokens": 5, "extra_tokens": 2, "merge": 4}, "leave none of which 4 make one"),
        ({"tokens": 5, "reads": "text"}, "needs joins: attention"),
        ({"tokens": 5, "inputs": -1}, "inputs must be at least 0"),
    ):
        with pytest.raises(ForerunError, match=words):
            EncoderSpec(stack, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ForerunError, match="need an encoder with joins: attention"):
        replace(stack, cross_attention="behind")


def test_the_file_that_qwen_itself_ships_has_the_keys_of_both_models_side_by_side() -> None:
    config = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl",
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False, "hidden_act": "silu",
        "image_token_id": 151655, "vision_token_id": 151654, "vision_end_token_id": 151653,
        "vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "in_chans": 3,
                          "out_hidden_size": 3584, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]},
    }  # fmt: skip
    spec = spec_from_config(Fields(config, "config.json"), "qwen2.5-vl-7b")
    assert spec == replace(load_model("qwen2.5-vl-7b"), name=spec.name)
    assert not spec.notes


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("stem", [[12 * 10**12, 32]], "stem must be a list of pairs of whole numbers from 1 to 1,000,000,000, got"),
        ("tokens", 0, "encoder: tokens must be at least 1, got 0"),
        ("reads", "smells", "reads 'smells' is not known; known: text, images, sounds"),
        ("stack", None, "stack is missing: the encoder's layers, with the keys of a model"),
    ],
)
def test_a_file_with_a_wrong_encoder_is_refused(key: str, value: object, words: str, tmp_path: Path) -> None:
    mapping, path = spec_mapping(load_model("whisper-large-v3")), tmp_path / "whisper.yaml"
    mapping["encoder"] = dict(mapping["encoder"]) | {key: value}  # type: ignore[call-overload]
    path.write_text(yaml.safe_dump(mapping))
    with pytest.raises(ForerunError) as error:
        load_spec_file(path)
    assert words in str(error.value)


def test_layers_that_a_file_repeats_too_often_are_refused_at_once(tmp_path: Path) -> None:
    mapping, path = spec_mapping(load_model("t5-large")), tmp_path / "t5.yaml"
    path.write_text(yaml.safe_dump(mapping | {"layers": [{"times": 10**9, "sliding_window": 32}]}))
    with pytest.raises(ForerunError, match="in layers, entry 0: times is 1,000,000,000; at most 1,024 layers are"):
        load_spec_file(path)


def test_sides_of_a_patch_are_whole_numbers() -> None:
    vision = {"model_type": "internvl_vision", "patch_size": [{"a": 14}, 14]}
    config = {"model_type": "internvl", "vision_config": vision, "text_config": {
        "model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 100,
    }}  # fmt: skip
    with pytest.raises(ForerunError, match="in vision_config: patch_size must be a list of whole numbers from 1 on"):
        spec_from_config(Fields(config, "config.json"), "internvl")


def test_a_tower_that_is_not_known_is_left_out_and_said() -> None:
    text = {"hidden_size": 2048, "num_hidden_layers": 30, "vocab_size": 262400, "intermediate_size": 8192}
    config = {"model_type": "gemma3n", "vision_config": {"model_type": "gemma3n_vision"}, "text_config": text}
    spec = spec_from_config(Fields(config, "config.json"), "gemma3n")
    assert spec.encoder is None
    assert spec.notes[0] == "config.json: the language model of gemma3n alone; left out: vision_config"
