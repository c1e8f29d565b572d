"""Builds convolutional networks from short descriptions: a stem, stages of residual blocks or convolutions, a head.

Layers have the order and the names of torchvision's modules; autograd walks back in that order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from forerun.common.errors import ForerunError, UnknownName
from forerun.describe.model.fields import Fields, read_yaml
from forerun.describe.model.layer_types import activation, add, batch_norm, conv2d, linear, pool
from forerun.describe.model.layered import Layer, LayeredModel

PRESETS = Path(__file__).parent / "layered_presets" / "convolutional.yaml"
_EXPANSION = {"basic": 1, "bottleneck": 4}
_RESNET_WIDTHS = (64, 128, 256, 512)
_VGG_WIDTHS = (64, 128, 256, 512, 512)
_VGG_POOLED = 7

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class ConvNet:
    """The description of a network that takes images."""

    blocks: str
    """basic, bottleneck (ResNet), plain (VGG)"""
    depths: tuple[int, ...]
    """number of blocks (plain: convolutions) of each stage"""
    classes: int = 1000
    image: int = 224
    """height and width of an image in pixels"""
    groups: int = 1
    """groups of a bottleneck's 3 x 3 convolution (ResNeXt)"""
    width_per_group: int = 64
    stride_in_first: bool = False
    """whether a bottleneck strides in its first convolution (the paper), not in its 3 x 3 one (v1.5, torchvision)"""

    def model(self, name: str, source: str = "") -> LayeredModel:
        """Returns the network as layers."""
        build = _vgg if self.blocks == "plain" else _resnet
        return LayeredModel(name, tuple(build(self)), "image", source=source)


class _Net:
    """Layers under construction, and the output shape of the last one: (channels, height, width)."""

    def __init__(self, image: int) -> None:
        self.layers: list[Layer] = []
        self.shape: Shape = (3, image, image)

    @property
    def last(self) -> str:
        return self.layers[-1].layer_id

    def append(self, layer: Layer) -> None:
        self.layers.append(layer)
        self.shape = layer.output_shape  # type: ignore[assignment]

    def conv(self, name: str, channels: int, kernel: int, stride: int = 1, **options: object) -> None:
        self.append(conv2d(name, self.shape, channels, (kernel, kernel), stride, **options))  # type: ignore[arg-type]

    def norm(self, name: str, unit: str) -> None:
        self.append(batch_norm(name, self.shape, unit))

    def relu(self, name: str, unit: str) -> None:
        self.append(activation(name, self.shape, "relu", unit))

    def max_pool(self, name: str, kernel: int, stride: int, padding: int, unit: str) -> None:
        channels, *sides = self.shape
        out = (channels, *((side + 2 * padding - kernel) // stride + 1 for side in sides))
        self.append(pool(name, self.shape, out, True, unit))


def _resnet(net: ConvNet) -> Sequence[Layer]:
    """Returns the layers of table 1 of arXiv 1512.03385 (ResNet), as torchvision builds them."""
    made = _Net(net.image)
    made.conv("conv1", 64, 7, 2, unit="stem")
    made.norm("bn1", "stem")
    made.relu("relu", "stem")
    made.max_pool("maxpool", 3, 2, 1, "stem")
    for stage, (depth, width) in enumerate(zip(net.depths, _RESNET_WIDTHS, strict=True)):
        for number in range(depth):
            stride = 2 if stage > 0 and number == 0 else 1
            _block(made, net, f"layer{stage + 1}.{number}", width, stride)
    channels = made.shape[0]
    made.append(pool("avgpool", made.shape, (channels, 1, 1), False, "head"))
    made.append(linear("fc", made.shape, net.classes, unit="head"))
    return made.layers


def _block(made: _Net, net: ConvNet, unit: str, width: int, stride: int) -> None:
    """Appends a residual block, whose shortcut has a convolution where the shape changes."""
    entered, before, out = made.last, made.shape, width * _EXPANSION[net.blocks]
    inner = width * net.width_per_group // 64 * net.groups
    first, second = (stride, 1) if net.stride_in_first else (1, stride)
    plan = [(inner, 1, first, 1), (inner, 3, second, net.groups), (out, 1, 1, 1)]
    if net.blocks == "basic":
        plan = [(width, 3, stride, 1), (width, 3, 1, 1)]
    for number, (channels, kernel, step, groups) in enumerate(plan, 1):
        made.conv(f"{unit}.conv{number}", channels, kernel, step, groups=groups, unit=unit)
        made.norm(f"{unit}.bn{number}", unit)
        if number < len(plan):
            made.relu(f"{unit}.relu{number}", unit)
    branch, shortcut = made.last, entered
    if stride > 1 or before[0] != out:
        made.shape = before
        made.conv(f"{unit}.downsample.0", out, 1, stride, reads=(entered,), unit=unit)
        made.norm(f"{unit}.downsample.1", unit)
        shortcut = made.last
    made.append(add(f"{unit}.add", made.shape, (branch, shortcut), unit))
    made.relu(f"{unit}.relu", unit)


def _vgg(net: ConvNet) -> Sequence[Layer]:
    """Returns the layers of table 1 of arXiv 1409.1556 (VGG), as torchvision builds them without batch norm."""
    made, number = _Net(net.image), 0
    for depth, width in zip(net.depths, _VGG_WIDTHS, strict=True):
        for _ in range(depth):
            made.conv(f"features.{number}", width, 3, bias=True, unit=f"features.{number}")
            made.relu(f"features.{number + 1}", f"features.{number}")
            number += 2
        made.max_pool(f"features.{number}", 2, 2, 0, "")
        number += 1
    made.append(pool("avgpool", made.shape, (made.shape[0], _VGG_POOLED, _VGG_POOLED), False))
    for place, width in ((0, 4096), (3, 4096), (6, net.classes)):
        made.append(linear(f"classifier.{place}", made.shape, width, unit=f"classifier.{place}"))
        if place < 6:
            made.append(activation(f"classifier.{place + 1}", made.shape, "relu", f"classifier.{place}"))
            made.append(activation(f"classifier.{place + 2}", made.shape, "dropout", f"classifier.{place}"))
    return made.layers


def convolutional_names() -> list[str]:
    """Returns the presets' names, by family and size."""
    return list(_entries())


def load_convolutional(name: str) -> LayeredModel:
    """Returns the preset `name`, in any case. Raises UnknownName, which lists the known presets."""
    if name.lower() not in _entries():
        raise UnknownName("layered model", name, convolutional_names())
    return _load(name.lower())


@cache
def _load(name: str) -> LayeredModel:
    entry = Fields(_entries()[name], f"preset {name}")
    source, stated = entry.text("source"), entry.integer("parameters")
    model = read_convolutional(entry).model(name, source)
    if model.parameter_count != stated:
        raise ForerunError(f"preset {name}: parameters says {stated}, but its layers have {model.parameter_count}")
    return model


def read_convolutional(entry: Fields) -> ConvNet:
    """Reads the description in a mapping. Raises ForerunError, which names the place and the wrong key."""
    blocks = entry.text("blocks", choices=("basic", "bottleneck", "plain"))
    depths = entry.items("depths")
    stages = len(_VGG_WIDTHS) if blocks == "plain" else len(_RESNET_WIDTHS)
    if len(depths) != stages or not all(
        isinstance(d, int) and not isinstance(d, bool) and 0 < d < 1000 for d in depths
    ):
        raise entry.error("depths", f"must be {stages} whole numbers from 1 to 999, got {depths!r}")
    net = ConvNet(
        blocks,
        tuple(int(str(depth)) for depth in depths),
        entry.integer("classes", 1000),
        entry.integer("image", 224, least=32, most=4096),
        entry.integer("groups", 1),
        entry.integer("width_per_group", 64),
        entry.flag("stride_in_first"),
    )
    entry.finish()
    return net


@cache
def _entries() -> Mapping[str, dict[str, object]]:
    document = read_yaml(PRESETS)
    models = document.mapping("models")
    document.finish()
    return models
