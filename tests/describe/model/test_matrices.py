"""Matrices of a model: together with vectors they are all its parameters."""

import pytest

from forerun.describe.model.catalog import load_any, load_model, model_names
from forerun.describe.model.inputs import with_inputs
from forerun.describe.model.layers_by_hand import layers_from
from forerun.describe.model.matrices import matrices
from forerun.describe.model.parameters import encoder_parameter_count, parameter_count


@pytest.mark.parametrize("name", model_names())
def test_what_is_no_matrix_is_norms_and_biases(name):
    spec = load_model(name)
    vectors = parameter_count(spec) - sum(count * n * m for (n, m), count in matrices(spec).items())
    assert 0 < vectors < 0.01 * parameter_count(spec)


@pytest.mark.parametrize("name", ["llava-1.5-7b", "qwen2.5-vl-7b", "qwen3-vl-8b", "smolvlm-2.2b"])
def test_a_tower_has_matrices_too_and_none_that_are_trained_once_it_is_frozen(name):
    plain, images = load_model(name), with_inputs(load_model(name), 1)
    tower = matrices(images) - matrices(plain)
    vectors = encoder_parameter_count(images.encoder) - sum(count * n * m for (n, m), count in tower.items())
    assert 0 < vectors < 0.01 * encoder_parameter_count(images.encoder)
    projector = matrices(with_inputs(plain, 1, frozen=True)) - matrices(plain)
    assert sum(projector.values()) == len(images.encoder.projector) * images.encoder.projectors


def test_a_model_without_biases_has_norms_beside_its_matrices():
    spec = load_model("llama-3.1-8b")
    vectors = parameter_count(spec) - sum(count * n * m for (n, m), count in matrices(spec).items())
    assert vectors == (2 * spec.n_layers + 1) * spec.hidden
    assert matrices(spec)[6144, 4096] == spec.n_layers  # queries, keys and values


def test_convolutions_are_viewed_with_their_channels_as_rows():
    found = matrices(load_any("resnet50"))
    assert found[64, 3 * 7 * 7] == 1
    assert found[512, 512 * 3 * 3] == 3
    assert found[1000, 2048] == 1


def test_layers_by_hand_of_every_type():
    model = layers_from(
        [
            {"layer_id": 0, "layer_type": "embedding", "input_shape": [8], "output_shape": [8, 16],
             "num_parameters": 1600},
            {"layer_id": 1, "layer_type": "norm"},
            {"layer_id": 2, "layer_type": "attention"},
            {"layer_id": 3, "layer_type": "linear", "output_shape": [8, 32]},
            {"layer_id": 4, "layer_type": "custom", "output_shape": [8, 32], "num_parameters": 99},
        ],
        "net.yaml",
        sample="sequence",
    )  # fmt: skip
    assert dict(matrices(model)) == {(16, 100): 1, (48, 16): 1, (16, 16): 1, (32, 16): 1}
