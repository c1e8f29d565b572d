"""Models given layer by layer on the command line: presets and files, in images."""

import json

import pytest

from forerun.describe.plan.plan import Plan
from forerun.interfaces.api import predict

DDP = ("resnet50", "--cluster", "a100", "--gpus", 8, "--micro-batch", 256, "--zero-stage", 0)
NET = """
name: little
sample: sequence
layers:
  - {layer_id: in, layer_type: linear, input_shape: [128, 64], output_shape: [128, 256]}
  - {layer_id: act, layer_type: activation, function: gelu}
  - {layer_id: out, layer_type: linear, output_shape: [128, 64]}
"""


def test_a_network_is_predicted_in_images(forerun):
    done = forerun("predict", *DDP)
    assert done.returncode == 0, done.stderr
    assert "resnet50 on 8 x a100-80gb-sxm" in done.stdout
    assert "global batch 2048 images, stack pytorch-vision" in done.stdout
    assert "images/s/GPU" in done.stdout
    assert "token" not in done.stdout


def test_the_record_says_what_a_sample_is(forerun):
    record = json.loads(forerun("predict", *DDP, "--json").stdout)
    assert record["sample"] == "image"
    assert record["samples_per_s_per_gpu"] == pytest.approx(256 / record["step_time_s"])
    assert record["tokens_per_s_per_gpu"] is None
    assert record["plan"]["seq_len"] == 1
    plan = Plan(seq_len=1, micro_batch=256, dp_shard=8, zero_stage=0, stack="pytorch-vision")
    assert predict("resnet50", plan, "a100").step_time_s == record["step_time_s"]


def test_a_file_of_layers_is_predicted(forerun, tmp_path):
    (tmp_path / "net.yaml").write_text(NET)
    done = forerun("predict", "net.yaml", "--cluster", "a100", "--gpus", 2)
    assert done.returncode == 0, done.stderr
    assert "little on 2 x a100-80gb-sxm" in done.stdout
    assert "global batch 2 sequences" in done.stdout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (NET.replace("gelu", "elu"), "net.yaml: layers, layer 1 (act): function 'elu' is not known"),
        (NET + "depth: 3\n", "net.yaml: unknown key 'depth'"),
        ("layers: 3\n", "net.yaml: layers must be a list"),
    ],
)
def test_a_wrong_file_is_one_line(forerun, tmp_path, text, message):
    (tmp_path / "net.yaml").write_text(text)
    done = forerun("predict", "net.yaml", "--cluster", "a100")
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("predict", *DDP, "--tp", 2), "tp 2 needs a transformer"),
        (("predict", *DDP, "--seq-len", 128), "seq_len 128: resnet50 takes whole samples"),
        (
            ("plan", "resnet50", "--cluster", "a100", "--gpus", 8, "--global-batch", 8, "--seq-len", 1),
            "resnet50 is a model given layer by layer",
        ),
    ],
)
def test_what_needs_a_transformer_says_so(forerun, arguments, message):
    done = forerun(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_models_lists_them(forerun):
    assert "resnet50 25,557,032" in " ".join(forerun("models").stdout.split())
    rows = {row["name"]: row for row in json.loads(forerun("models", "--json").stdout)["models"]}
    assert rows["vgg16"]["hidden"] is None


def test_figures_that_shapes_contradict_are_told_by_every_command(forerun, tmp_path):
    stated = NET.replace("[128, 256]", "[128, 256], forward_flops: 1e9")
    (tmp_path / "net.yaml").write_text(stated)
    note = "layer in (linear): forward_flops is 1e+09 as stated, 4.1943e+06 by its shapes"
    assert note in forerun("models", "net.yaml").stdout
    assert json.loads(forerun("models", "net.yaml", "--json").stdout)["notes"] == [note]
    predicted = ("predict", "net.yaml", "--cluster", "a100")
    assert json.loads(forerun(*predicted, "--json").stdout)["warnings"] == [note]
    assert note in " ".join(forerun(*predicted).stdout.split())
