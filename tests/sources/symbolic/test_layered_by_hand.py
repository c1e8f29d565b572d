"""Every kernel and tensor of the units of a small residual network, counted by hand, for 4 images of 64 x 64."""

from __future__ import annotations

import pytest

from forerun.core.program.types import Program
from forerun.describe.model.convolutional import ConvNet
from forerun.describe.plan.plan import Plan
from forerun.sources.symbolic.build import build

from .by_hand import Held, Kernel, held_by, kernels_of, moves
from .cases import CLUSTER

NET = ConvNet("basic", (1, 1, 1, 1), classes=10, image=64).model("small")
"""its second stage goes from 64 channels of 16 x 16 to 128 of 8 x 8, with a convolution in the shortcut"""
IMAGES, CLASSES = 4, 10
B = "layer2.0."
IN, OUT = IMAGES * 64 * 16 * 16, IMAGES * 128 * 8 * 8
"""elements of the block's input and output"""
CONV1, NORM1, RELU1, CONV2, NORM2, SHORT, SHORT_NORM, ADD, RELU = range(11, 20)
"""modules of the block"""
WEIGHTS = {"conv1": 128 * 64 * 9, "conv2": 128 * 128 * 9, "downsample.0": 128 * 64}
MODULES = {"conv1": CONV1, "conv2": CONV2, "downsample.0": SHORT}
INPUTS = {"conv1": IN, "conv2": OUT, "downsample.0": IN}


def program(stack: str, **fields: object) -> Program:
    wanted = {"seq_len": 1, "micro_batch": IMAGES, "zero_stage": 0, "optimizer": "sgd", "precision": "fp16", **fields}
    return build(NET, Plan(stack=stack, **{"master_dtype": "fp16", **wanted}), CLUSTER)  # type: ignore[arg-type]


def conv(name: str, suffix: str = "") -> Kernel:
    """A convolution: two FLOPs for each weight at each place of the output; reads input and weights, writes output."""
    flops = 2 * WEIGHTS[name] * IMAGES * 8 * 8
    return Kernel(B + name + suffix, flops, 2 * (INPUTS[name] + WEIGHTS[name] + OUT), 1, MODULES[name])


def gradients(name: str) -> tuple[Kernel, Kernel]:
    return conv(name, ".dgrad"), conv(name, ".wgrad")


def passes(name: str, times: float, module: int, more: float = 0) -> Kernel:
    """A kernel that reads or writes the output so many times."""
    return moves(B + name, 2 * OUT * times + more, 1, module)


def norm_back(name: str, module: int) -> tuple[Kernel, Kernel]:
    """Reads gradient and input and writes a gradient; the sums for scale and shift read both again."""
    return passes(name + ".dgrad", 3, module), passes(name + ".wgrad", 2, module)


def test_kernels_of_a_block() -> None:
    """A batch norm reads its input twice. The block's input gets a sum of two gradients."""
    eager = program("pytorch-vision")
    assert kernels_of(eager, "layer2.0.forward") == [
        conv("conv1"),
        passes("bn1", 3, NORM1),
        passes("relu1", 2, RELU1),
        conv("conv2"),
        passes("bn2", 3, NORM2),
        conv("downsample.0"),
        passes("downsample.1", 3, SHORT_NORM),
        passes("add", 3, ADD),
        passes("relu", 2, RELU),
    ]
    assert kernels_of(eager, "layer2.0.backward") == [
        passes("relu.dgrad", 3, RELU),
        *norm_back("downsample.1", SHORT_NORM),
        *gradients("downsample.0"),
        *norm_back("bn2", NORM2),
        *gradients("conv2"),
        passes("relu1.dgrad", 3, RELU1),
        *norm_back("bn1", NORM1),
        conv("conv1", ".dgrad"),
        moves("layer1.0.relu.sum", 2 * 3 * IN, 1, CONV1),
        conv("conv1", ".wgrad"),
    ]


def test_tensors_of_a_block() -> None:
    """Kept are inputs of convolutions and norms and outputs of activations; the unit before keeps the block's input."""
    eager, x = program("pytorch-vision"), 2 * OUT
    kept = ("conv1", "conv2", "downsample.0", "relu1", "relu")
    passing = {"bn1": "relu1", "bn2": "add", "downsample.1": "add", "add": "relu"}
    assert held_by(eager, "layer2.0.forward") == sorted(
        [
            *(Held(x, "activation", B + name, "") for name in kept),
            *(Held(x, "temporary", B + name, B + until) for name, until in passing.items()),
        ]
    )
    between = [
        ("relu.dgrad", "bn2.wgrad"),  # the gradient of the sum, which both branches read
        ("relu.dgrad", "relu.dgrad"),
        ("downsample.1.dgrad", "downsample.0.wgrad"),
        ("bn2.dgrad", "conv2.wgrad"),
        ("conv2.dgrad", "relu1.dgrad"),
        ("relu1.dgrad", "bn1.wgrad"),
        ("bn1.dgrad", "conv1.wgrad"),
    ]
    ends = ("relu.dgrad", "relu1.dgrad", "bn1.wgrad", "bn2.wgrad", "downsample.1.wgrad")
    assert held_by(eager, "layer2.0.backward") == sorted(
        [
            *(Held(x, "activation", "", B + until) for until in ends),
            *(Held(x, "temporary", B + since, B + until) for since, until in between),
            *(Held(2 * IN, "temporary", B + name, B + "conv1.wgrad") for name in ("conv1.dgrad", "downsample.0.dgrad")),
            *(Held(2 * size, "unsharded", f"{B}{name}.wgrad", "") for name, size in WEIGHTS.items()),
            *(Held(2 * 2 * 128, "unsharded", f"{B}{name}.wgrad", "") for name in ("bn1", "bn2", "downsample.1")),
        ]
    )


SIGNS = OUT / 8
"""bytes of one bit for each output of an activation"""


def test_norms_take_over_sums_and_activations() -> None:
    """MXNet's norm keeps the sign of its output as a bit. The second norm's sum includes the other branch."""
    fused = program("mxnet-vision")
    assert kernels_of(fused, "layer2.0.forward") == [
        conv("conv1"),
        passes("bn1", 3, NORM1, SIGNS),
        conv("conv2"),
        passes("bn2", 3, NORM2),
        conv("downsample.0"),
        passes("downsample.1", 4, SHORT_NORM, SIGNS),
    ]
    assert kernels_of(fused, "layer2.0.backward") == [
        passes("downsample.1.dgrad", 2, SHORT_NORM, SIGNS),
        passes("downsample.1.dgrad", 4, SHORT_NORM, SIGNS),
        *gradients("downsample.0"),
        *norm_back("bn2", NORM2),
        *gradients("conv2"),
        passes("bn1.dgrad", 2, NORM1, SIGNS),
        passes("bn1.dgrad", 3, NORM1, SIGNS),
        conv("conv1", ".dgrad"),
        moves("layer1.0.relu.sum", 2 * 3 * IN, 1, CONV1),
        conv("conv1", ".wgrad"),
    ]
    x, kept = 2 * OUT, [held for held in held_by(fused, "layer2.0.forward") if not held.until]
    assert kept == sorted(
        [
            Held(2 * IN, "activation", B + "conv1", ""),  # the unit before doesn't keep it
            *(Held(x, "activation", B + name, "") for name in ("conv1", "conv2", "downsample.0", "bn1")),
            *(Held(int(SIGNS), "activation", B + name, "") for name in ("bn1", "downsample.1")),
        ]
    )


def test_autocast_casts_each_weight_at_each_use() -> None:
    """fp32 weights: 4 bytes in and 2 out, and back for the gradient. The images are cast once and kept in both."""
    program_ = program("pytorch-vision", master_dtype="fp32")
    casts = {
        k.name: k.moved for block in ("layer2.0.forward", "layer2.0.backward") for k in kernels_of(program_, block)
    }
    for name, size in WEIGHTS.items():
        assert casts[f"{B}{name}.cast"] == casts[f"{B}{name}.cast.backward"] == 6 * size
    assert "layer2.0.bn1.cast" not in casts
    image = IMAGES * 3 * 64 * 64
    first = kernels_of(program_, "stem.forward")[:2]
    assert first == [moves("input.cast", 6 * image, 1, 0), moves("conv1.cast", 6 * 64 * 3 * 49, 1, 0)]
    held = held_by(program_, "stem.forward")
    assert Held(4 * image, "activation", "input.cast", "") in held
    assert Held(2 * image, "activation", "input.cast", "") in held
    assert Held(2 * 64 * 3 * 49, "unsharded", "conv1.cast", "") in held
    assert Held(4 * 64 * 3 * 49, "unsharded", "conv1.cast.backward", "") in held_by(program_, "stem.backward")


@pytest.mark.parametrize(("precision", "copies"), [("fp16", True), ("fp32", False)])
def test_a_layout_that_matrix_units_do_not_read_is_copied_around_each_convolution(precision: str, copies: bool) -> None:
    """Three kernels read and write all that the convolution moves; fp32 products read either layout."""
    made = program("pytorch-vision-nchw", precision=precision, master_dtype=precision)
    found = [k for k in kernels_of(made, "layer2.0.forward") if k.name.endswith(".layout")]
    expected = [
        moves(f"{B}{name}.layout", 2 * conv(name).moved, 3, MODULES[name])
        for name in ("conv1", "conv2", "downsample.0")
    ]
    assert found == (expected if copies else [])


def test_the_ends_of_a_network() -> None:
    """A pool of 2 x 2, a classifier of 512 x 10 with a bias, and a loss on ten classes; images need no gradient."""
    eager = program("pytorch-vision")
    logits = IMAGES * CLASSES
    assert [(k.name, k.moved, k.launches) for k in kernels_of(eager, "head.forward")] == [
        ("avgpool", 2 * IMAGES * 512 * (4 + 1), 1),
        ("fc", 2 * (IMAGES * 512 + 512 * CLASSES + logits), 1),
        ("loss", 18 * logits, 3),
    ]
    back = kernels_of(eager, "head.backward")
    assert [k.name for k in back] == ["loss.backward", "fc.dgrad", "fc.wgrad", "fc.wgrad", "avgpool.dgrad"]
    assert back[3].moved == 2 * (logits + CLASSES)  # the gradient of the bias
    assert {k.flops for k in back} == {0, 2 * logits * 512}
    assert [k.name for k in kernels_of(eager, "stem.backward")] == [
        *("maxpool.dgrad", "relu.dgrad", "bn1.dgrad", "bn1.wgrad", "conv1.wgrad")
    ]
    held = held_by(eager, "head.forward")
    assert held == sorted(
        [
            Held(2 * logits, "temporary", "fc", "loss"),
            Held(4 * logits, "logits", "loss", ""),
            Held(2 * IMAGES * 512, "activation", "avgpool", ""),
        ]
    )


def test_compiled_norms_read_the_output_again_for_its_sign() -> None:
    compiled = program("pytorch-vision", compile=True)
    norms = [
        kernel for kernel in kernels_of(compiled, "layer2.0.forward") if ".bn" in kernel.name or ".1" in kernel.name
    ]
    assert norms == [passes("bn1", 3, NORM1), passes("bn2", 3, NORM2), passes("downsample.1", 4, SHORT_NORM)]
    back = [kernel for kernel in kernels_of(compiled, "layer2.0.backward") if kernel.flops == 0]
    assert back[:4] == [
        passes("downsample.1.dgrad", 3, SHORT_NORM),
        passes("downsample.1.dgrad", 5, SHORT_NORM),
        *norm_back("bn2", NORM2),
    ]
    assert back[4:6] == [passes("bn1.dgrad", 3, NORM1), passes("bn1.dgrad", 4, NORM1)]
