"""Layers written by hand: what is left out is derived, what is stated goes first, what makes no sense is refused."""

import random

import pytest

from forerun.common.errors import ForerunError
from forerun.describe.model.convolutional import load_convolutional
from forerun.describe.model.layered import MB
from forerun.describe.model.layers_by_hand import layers_from

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


def test_shapes_may_be_tuples_or_the_text_of_tuples():
    shapes = {"input_shape": "(3, 224, 224)", "output_shape": (64, 112, 112)}
    assert one(**shapes) == one()
    assert one(layer_type="linear", input_shape="(16,)", output_shape="( 4 )").output_shape == (4,)
    with pytest.raises(ForerunError, match="input_shape must be a list"):
        one(input_shape="3, 224, 224")


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


def stated(**changes):
    """The one layer of a model, and its notes."""
    entry = {key: value for key, value in {**CONV, **changes}.items() if value is not None}
    model = layers_from([entry], "net.yaml: layers")
    return model.layers[0], model.notes


DIFFERENT = [
    (
        {"forward_flops": 118_013_952},
        "1.18014e+08 as stated, 2.36028e+08 by its shapes (a multiply-add",
    ),
    ({"backward_flops": 1}, "backward_flops is 1 as stated, 4.72056e+08 by its shapes"),
    ({"kernel_size": 5}, "num_parameters is 9408 as stated, 4864 by its shapes"),
    ({"num_parameters": 9000}, "num_parameters is 9000 as stated, 9024 by its shapes"),
    ({"gradient_memory_mb": 5}, "gradient_memory_mb is 5 as stated, 0.037632 by its shapes"),
    ({"activation_memory_mb": 50}, "activation_memory_mb is 50 as stated, 0.301056 by its shapes"),
]


@pytest.mark.parametrize(("changes", "words"), DIFFERENT, ids=[next(iter(c)) for c, _ in DIFFERENT])
def test_what_is_stated_goes_first_and_the_difference_is_told_in_one_line(changes, words):
    layer, (note,) = stated(**changes)
    assert note.startswith("layer conv1 (conv2d): ")
    assert words in note
    assert "\n" not in note
    ((key, value),) = changes.items()
    if key != "kernel_size":
        assert figure(layer, key) == pytest.approx(value, rel=1e-9)
    assert layer.num_parameters == changes.get("num_parameters", 9408)


def figure(layer, key):
    """What a layer has under a key of its entry; gradients in fp32."""
    figures = {
        "num_parameters": layer.num_parameters,
        "forward_flops": layer.forward_flops,
        "backward_flops": layer.backward_flops,
        "activation_memory_mb": layer.activation_bytes() / MB,
        "gradient_memory_mb": layer.gradient_bytes() / MB,
    }
    return figures[key]


def test_figures_that_agree_say_nothing():
    assert stated()[1] == ()
    _, notes = stated(forward_flops=2.36e8, backward_flops="472e6", activation_memory_mb=1.6)
    assert notes == ()
    assert stated(backward_flops=236_027_904)[1] == ()  # the sample has no gradient


def test_a_rounded_size_of_gradients_is_taken_as_stated():
    layer, notes = stated(gradient_memory_mb=0.04)
    assert notes == ()
    assert layer.gradient_bytes() == 40_000
    layer, notes = stated(gradient_memory_mb=0.02)  # in 16 bits
    assert notes == ()
    assert layer.gradient_elements == 10_000
    assert stated(gradient_memory_mb=0)[0].gradient_elements is None  # 0.00 to two digits


TYPES = {
    "conv2d": {"input_shape": [8, 16, 16], "output_shape": [8, 16, 16], "kernel_size": 3},
    "linear": {"input_shape": [64], "output_shape": [32]},
    "attention": {"input_shape": [16, 64]},
    "norm": {"input_shape": [8, 16, 16]},
    "embedding": {"input_shape": [16], "output_shape": [16, 64]},
    "pool": {"input_shape": [8, 16, 16], "output_shape": [8, 8, 8]},
    "activation": {"input_shape": [8, 16, 16]},
    "add": {"input_shape": [8, 16, 16], "reads": [0, "input"]},
    "custom": {"input_shape": [8, 16, 16], "output_shape": [8, 16, 16]},
}


@pytest.mark.parametrize("layer_type", TYPES)
def test_every_type_takes_figures_that_its_shapes_contradict(layer_type):
    figures = {
        "num_parameters": 777,
        "forward_flops": "118e9",
        "backward_flops": "236e9",
        "activation_memory_mb": 50,
        "gradient_memory_mb": 0.04,
    }
    first = {"layer_id": 0, "layer_type": "activation", "input_shape": TYPES[layer_type]["input_shape"]}
    entry = {"layer_id": 1, "layer_type": layer_type.upper(), **TYPES[layer_type], **figures}
    model = layers_from([first, entry], "net.yaml")
    layer = model.layers[1]
    assert (layer.layer_id, layer.layer_type) == ("1", layer_type)
    for key, value in figures.items():
        assert figure(layer, key) == pytest.approx(float(value)), key
    told = [note for note in model.notes if note.startswith(f"layer 1 ({layer_type}): ")]
    assert len(told) == len(model.notes) == 1
    assert ("forward_flops" in told[0]) == (layer_type != "custom")


def test_flops_that_memory_traffic_hides_are_counted_and_change_no_kernel():
    plain = {"layer_id": "n", "layer_type": "norm", "input_shape": [8, 16, 16]}
    silent = layers_from([plain], "net.yaml").layers[0]
    model = layers_from([{**plain, "forward_flops": 10_000, "backward_flops": 20_000}], "net.yaml")
    layer = model.layers[0]
    assert model.notes == ()
    assert (layer.forward_flops, layer.backward_flops) == (10_000, 20_000)
    assert layer.forward(4) == silent.forward(4)


def test_backward_flops_follow_forward_flops_where_they_are_not_stated():
    layer, _ = stated(forward_flops=2 * CONV["forward_flops"], backward_flops=None)
    assert layer.backward_flops == pytest.approx(2 * CONV["backward_flops"])


def test_stated_backward_flops_are_run_whole_also_by_the_first_layer():
    """Which makes no gradient of the sample; FLOPs that follow from shapes leave that gradient out."""
    entry = {key: CONV[key] for key in ("layer_id", "layer_type", "input_shape", "output_shape", "num_parameters")}
    following = layers_from([{**entry, "forward_flops": "118e9"}], "net.yaml")
    assert following.backward_flops == pytest.approx(118e9)
    for layer_type in ("conv2d", "custom"):
        of_stated = {**entry, "layer_type": layer_type, "forward_flops": "118e9", "backward_flops": "236e9"}
        assert layers_from([of_stated], "net.yaml").backward_flops == pytest.approx(236e9)
    behind = {**of_stated, "layer_id": "next", "input_shape": [64, 112, 112]}
    both = layers_from([of_stated, behind], "net.yaml")
    assert both.backward_flops == pytest.approx(2 * 236e9)
    assert sum(kernel.flops for kernel in both.layers[1].backward(1)) == pytest.approx(118e9)


WRONG = {
    "no list": ({"a": 1}, "net.yaml: must be a list of layers"),
    "empty": ([], "net.yaml: must be a list of layers"),
    "no mapping": ([3], "net.yaml, layer 0: must be keys and values, got int"),
    "twice": ([CONV, {**CONV, "input_shape": None, "layer_type": "norm"}], "layer_id 'conv1' is there twice"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_list_of_layers_is_refused(case):
    entries, message = WRONG[case]
    with pytest.raises(ForerunError, match=message):
        layers_from(entries, "net.yaml")


REFUSED = [
    ({"num_parameters": None, "forward_flops": 1e8}, "forward_flops fits no square kernel"),
    ({"num_parameters": None, "forward_flops": None}, "kernel_size is missing"),
    ({"kernel_size": "3"}, "kernel_size must be a whole number"),
    ({"kernel_size": [3, 0]}, "kernel_size must be a whole number or two"),
    ({"layer_type": "custom", "num_parameters": 0}, "gradient_memory_mb of a layer without parameters"),
    ({"activation_memory_mb": -1}, "activation_memory_mb must be positive"),
    ({"input_shape": [32, 3, 224, 224]}, r"input_shape of a conv2d is .*; leave out the batch"),
    ({"input_shape": []}, "input_shape must be a list of whole numbers above 0"),
    ({"input_shape": [3, 0, 224]}, "input_shape must be a list of whole numbers above 0"),
    ({"output_shape": "64"}, "output_shape must be a list"),
    ({"output_shape": None}, "output_shape is missing"),
    ({"layer_type": "conv"}, "layer_type 'conv' is not known; known: conv2d, linear"),
    ({"layer_id": 4.5}, "layer_id must be a text"),
    ({"layer_id": -1}, "layer_id must be at least 0"),
    ({"layer_id": True}, "layer_id must be a text"),
    ({"layer_id": "input"}, "layer_id must be a name of its own"),
    ({"groups": 2}, "groups 2 divides not both 3 and 64 channels"),
    ({"reads": ["elsewhere"]}, "reads names 'elsewhere', which is not a layer before it"),
    ({"reads": [1.5]}, "reads must be a list of layer_ids"),
    ({"strides": 2}, "unknown key 'strides'"),
    ({"num_parameters": 1.5}, "num_parameters must be a whole number"),
    ({"forward_flops": float("nan")}, "forward_flops must be positive"),
    ({"forward_flops": 1e30}, r"forward_flops must be at most 1e\+15"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[next(iter(c)) for c, _ in REFUSED])
def test_what_makes_no_sense_is_refused_by_its_key(changes, message):
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
