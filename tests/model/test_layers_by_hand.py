"""Layers written by hand: what is left out is derived, what contradicts is refused by its key."""

import random

import pytest

from forerun.errors import ForerunError
from forerun.model.convolutional import load_convolutional
from forerun.model.layered import MB
from forerun.model.layers_by_hand import layers_from

CONV = {
    "layer_id": "conv1",
    "layer_type": "conv2d",
    "input_shape": [3, 224, 224],
    "output_shape": [64, 112, 112],
    "num_parameters": 9408,
    "forward_flops": 236_027_904,
    "backward_flops": 472_055_808,
    "activation_memory_mb": 1.605632,
    "gradient_memory_mb": 0.037632,
}
"""every key of a layer"""


def one(**changes):
    entry = {key: value for key, value in {**CONV, **changes}.items() if value is not None}
    return layers_from([entry], "net.yaml: layers").layers[0]


def test_a_layer_with_every_key():
    layer = one()
    assert (layer.kernel, layer.groups, layer.num_parameters) == ((7, 7), 1, 9408)
    assert layer.forward_flops == CONV["forward_flops"]
    assert layer.activation_bytes() == 1.605632 * MB


def test_what_is_left_out_follows_from_type_and_shapes():
    model = layers_from(
        [
            {"layer_id": "c", "layer_type": "conv2d", "input_shape": [3, 32, 32], "output_shape": [16, 32, 32],
             "kernel_size": 3},
            {"layer_id": "n", "layer_type": "norm"},
            {"layer_id": "a", "layer_type": "activation"},
            {"layer_id": "d", "layer_type": "conv2d", "output_shape": [16, 32, 32], "kernel_size": [1, 3], "groups": 16,
             "bias": False},
            {"layer_id": "s", "layer_type": "add", "reads": ["a", "d"]},
            {"layer_id": "p", "layer_type": "pool", "output_shape": [16, 1, 1]},
            {"layer_id": "f", "layer_type": "linear", "output_shape": [10]},
        ],
        "net.yaml",
    )  # fmt: skip
    assert [layer.num_parameters for layer in model.layers] == [3 * 16 * 9 + 16, 32, 0, 16 * 3, 0, 0, 170]
    assert [layer.output_shape for layer in model.layers][-2:] == [(16, 1, 1), (10,)]
    assert not model.layers[5].maximum
    assert model.layers[1].buffer_bytes == 16 * 8 + 8


def test_layers_of_sequences():
    model = layers_from(
        [
            {"layer_id": "e", "layer_type": "embedding", "input_shape": [128], "output_shape": [128, 256],
             "num_parameters": 1000 * 256},
            {"layer_id": "n", "layer_type": "norm"},
            {"layer_id": "a", "layer_type": "attention", "num_heads": 8, "causal": True},
            {"layer_id": "u", "layer_type": "linear", "output_shape": [128, 1024], "bias": False},
            {"layer_id": "g", "layer_type": "activation", "function": "gelu"},
        ],
        "net.yaml",
        sample="sequence",
    )  # fmt: skip
    attention, linear = model.layers[2:4]
    assert attention.num_parameters == 4 * 256 * 256 + 4 * 256
    assert attention.forward_flops == 2 * 4 * 128 * 256 * 256 + 4 * 128 * 128 * 256 / 2
    assert attention.heads == 8
    assert linear.forward_flops == 2 * 128 * 256 * 1024
    assert model.layers[4].saves_input
    assert model.sample == "sequence"


def test_the_kernel_follows_from_parameters_or_flops():
    assert one(num_parameters=9408 + 64, gradient_memory_mb=None).parameters == (9408, 64)
    assert one(num_parameters=None, kernel_size=None, gradient_memory_mb=None).kernel == (7, 7)


def test_a_custom_layer_is_what_it_states():
    entry = {"layer_id": "x", "layer_type": "custom", "input_shape": [64, 7, 7], "output_shape": [64, 7, 7],
             "num_parameters": 100, "forward_flops": 12345.0, "backward_flops": 30000.0,
             "activation_memory_mb": 0.5}  # fmt: skip
    layer = layers_from([entry], "net.yaml").layers[0]
    assert layer.forward_flops == 12345
    assert layer.backward_flops == 30000
    assert sum(kernel.flops for kernel in layer.forward(7)) == 7 * 12345
    assert layer.activation_bytes() == 0.5 * MB
    idle = layers_from([{**entry, "forward_flops": 0, "backward_flops": 0}], "net.yaml").layers[0]
    assert idle.forward_flops == idle.backward_flops == 0


def test_a_list_can_say_all_that_a_preset_has():
    preset = load_convolutional("resnet18")
    entries = [
        {
            "layer_id": layer.layer_id,
            "layer_type": layer.layer_type,
            "input_shape": list(layer.input_shape),
            "output_shape": list(layer.output_shape),
            "num_parameters": layer.num_parameters,
            "forward_flops": layer.forward_flops,
            "reads": list(layer.reads),
            "unit": layer.unit,
        }
        for layer in preset.layers
    ]
    model = layers_from(entries, "net.yaml", "resnet18")
    assert model.parameter_count == preset.parameter_count
    assert model.forward_flops == preset.forward_flops
    assert model.units == preset.units
    assert model.kept_of() == preset.kept_of()


WRONG = {
    "no list": ({"a": 1}, "net.yaml: must be a list of layers"),
    "empty": ([], "net.yaml: must be a list of layers"),
    "no mapping": ([3], "net.yaml, layer 0: must be keys and values, got int"),
    "twice": ([CONV, {**CONV, "input_shape": None, "layer_type": "norm"}], "layer 1 .conv1.*(num_parameters|output)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_list_of_layers_is_refused(case):
    entries, message = WRONG[case]
    with pytest.raises(ForerunError, match=message):
        layers_from(entries, "net.yaml")


CONTRADICTIONS = [
    ({"forward_flops": 118_013_952}, r"layer 0 \(conv1\): forward_flops is 1.18014e\+08.*a multiply-add counts as 2"),
    ({"backward_flops": 1}, r"backward_flops is 1, conv2d of these shapes has 4.72056e\+08 for a sample"),
    ({"kernel_size": 5}, r"num_parameters is 9408, conv2d of these shapes has 48\d\d"),
    ({"num_parameters": 9000}, r"num_parameters fits no square kernel \(46.88 taps a pair of channels\)"),
    ({"num_parameters": None, "forward_flops": 1e8}, "forward_flops fits no square kernel"),
    ({"num_parameters": None, "forward_flops": None}, "kernel_size is missing"),
    ({"kernel_size": "3"}, "kernel_size must be a whole number"),
    ({"kernel_size": [3, 0]}, "kernel_size must be a whole number or two"),
    ({"gradient_memory_mb": 5}, r"gradient_memory_mb is 5, 9408 parameters make 0.018816 MB in 16 bit and 0.037632"),
    ({"activation_memory_mb": -1}, "activation_memory_mb must be positive"),
    ({"input_shape": [32, 3, 224, 224]}, r"input_shape of a conv2d is .*; leave out the batch"),
    ({"input_shape": []}, "input_shape must be a list of whole numbers above 0"),
    ({"input_shape": [3, 0, 224]}, "input_shape must be a list of whole numbers above 0"),
    ({"output_shape": "64"}, "output_shape must be a list"),
    ({"output_shape": None}, "output_shape is missing"),
    ({"layer_type": "conv"}, "layer_type 'conv' is not known; known: conv2d, linear"),
    ({"layer_id": 4}, "layer_id must be a text"),
    ({"layer_id": "input"}, "layer_id must be a name of its own"),
    ({"groups": 2}, "groups 2 divides not both 3 and 64 channels"),
    ({"reads": ["elsewhere"]}, "reads names 'elsewhere', which is no layer before it"),
    ({"reads": [1]}, "reads must be a list of layer_ids"),
    ({"strides": 2}, "unknown key 'strides'"),
    ({"num_parameters": 1.5}, "num_parameters must be a whole number"),
    ({"forward_flops": float("nan")}, "forward_flops must be positive"),
    ({"forward_flops": 1e30}, r"forward_flops must be at most 1e\+15"),
]


@pytest.mark.parametrize(("changes", "message"), CONTRADICTIONS, ids=[next(iter(c)) for c, _ in CONTRADICTIONS])
def test_what_contradicts_is_refused_by_its_key(changes, message):
    with pytest.raises(ForerunError, match=message) as refused:
        one(**changes)
    assert str(refused.value).startswith("net.yaml: layers, layer 0")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"layer_type": "add", "input_shape": [4]}, "reads of an add names the two or more layers"),
        ({"layer_type": "attention", "input_shape": [4]}, r"input_shape of attention is \[sequence, width\]"),
        ({"layer_type": "attention", "input_shape": [4, 96], "num_heads": 5}, "num_heads 5 does not divide"),
        ({"layer_type": "embedding", "input_shape": [4], "output_shape": [4, 8]}, "num_parameters of an embedding"),
        ({"layer_type": "linear", "input_shape": [5], "output_shape": [3, 2]}, "output_shape .* has 3 rows"),
        ({"layer_type": "activation", "input_shape": [5], "function": "elu"}, "function 'elu' is not known"),
        ({"layer_type": "pool", "input_shape": [5, 2, 2], "output_shape": [5, 1, 1], "mode": "min"}, "mode 'min'"),
    ],
)
def test_every_type_has_its_own_keys(entry, message):
    with pytest.raises(ForerunError, match=message):
        layers_from([{"layer_id": "x", **entry}], "net.yaml")


def refusal(entry):
    """Why an entry is refused; None for one that makes a layer."""
    try:
        layers_from([entry], "net.yaml: layers")
    except ForerunError as error:
        return str(error)
    return None


def test_every_malformed_entry_is_one_clear_line():
    """Random values under random keys: either a model, or one line that names place and key."""
    random.seed(5)
    values = [None, True, -1, 0, 3, 1.5, "", "x", [], [1], [0], [2, 2, 2], [[1]], {}, {"a": 1}, 10**18, float("inf")]
    keys = [*CONV, "kernel_size", "groups", "bias", "reads", "unit", "num_heads", "function", "mode", "causal"]
    refused = 0
    for _ in range(500):
        entry = dict(CONV)
        for key in random.sample(keys, 2):
            entry[key] = random.choice(values)
        error = refusal(entry)
        if error is not None:
            refused += 1
            assert error.startswith("net.yaml: layers, layer 0")
            assert "\n" not in error
            assert any(key in error for key in keys)
    assert refused > 400
