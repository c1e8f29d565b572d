"""Reads a user's list of layers, each a mapping, into a LayeredModel.

Keys of a layer:
    layer_id              its name, or a whole number
    layer_type            conv2d, linear, attention, norm, embedding, pool, activation, add, custom; in any case
    input_shape           without the batch, as [3, 224, 224] or (3, 224, 224); left out: output of the layer before it
    output_shape          without the batch; left out where the type keeps the shape (norm, activation, add, attention)
    num_parameters        elements of its parameters; left out: as many as type and shapes give
    forward_flops         of one sample, 2 for each multiply-add
    backward_flops        of one sample, gradients of input and parameters
    activation_memory_mb  MB (10**6 bytes) that the layer keeps for its backward pass, for one sample
    gradient_memory_mb    MB of the gradients of its parameters, in 16 bits or fp32
    reads                 layer_ids that it reads, where that isn't the layer before it
    unit                  name of the group of layers that FSDP gathers and reduces together
    kernel_size, groups   conv2d; left out: they follow from num_parameters or forward_flops
    bias                  conv2d, linear; left out: it follows from num_parameters
    num_heads, causal     attention
    function              activation: relu, gelu, silu, tanh, sigmoid, softmax, dropout
    mode                  pool: max or average

Stated figures replace those of type and shapes; `LayeredModel.notes` has a line for each layer where the two differ
(stated_layers.py). A custom layer has only stated figures. Shapes that contradict each other are errors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import isqrt, prod
from typing import Any, get_args

from forerun.common.errors import ForerunError, at
from forerun.describe.model.fields import Fields
from forerun.describe.model.layer_types import (
    Conv2d,
    Embedding,
    Function,
    Linear,
    Norm,
    SelfAttention,
    activation,
    add,
    batch_norm,
    pool,
)
from forerun.describe.model.layered import INPUT, Layer, LayeredModel, LayerType
from forerun.describe.model.stated_layers import Stated, StatedLayer, as_stated, at_the_start

_TOLERANCE = 0.02
"""largest relative error of a square kernel that stated parameters or FLOPs imply"""
_MOST = 10**15
"""largest count of a layer; every real layer lies far below, and larger numbers overflow in later products"""
_NUMBER = re.compile(r"\d{1,16}")
_TUPLE = re.compile(r"\(\s*(\d{1,16}\s*,\s*)*(\d{1,16}\s*)?\)")
_KEPT_SHAPE = ("norm", "activation", "add", "attention")


def layers_from(entries: object, place: str, name: str = "layers", sample: str = "image") -> LayeredModel:
    """Returns the model of a list of layers; error messages begin with `place`.

    Raises ForerunError if the list is malformed or contradicts itself. The message names the place, the layer and the
    key.
    """
    if not isinstance(entries, Sequence) or isinstance(entries, str | bytes) or not entries:
        raise ForerunError(f"{place}: must be a list of layers, each with its keys")
    layers: list[Layer] = []
    notes: list[str] = []
    shapes: dict[str, tuple[int, ...]] = {}
    for number, entry in enumerate(entries):
        where = f"{place}, layer {number}"
        if not isinstance(entry, Mapping):
            raise ForerunError(f"{where}: must be keys and values, got {type(entry).__name__}")
        layer, note = _Reader(Fields(entry, where), layers[-1] if layers else None, shapes).layer()
        shapes[layer.layer_id] = layer.output_shape
        shapes.setdefault(INPUT, layer.input_shape)
        layers.append(layer)
        notes += [note] if note else []
    with at(place):
        model = LayeredModel(name, tuple(layers), sample, source=place, notes=tuple(notes))
    pairs = zip(layers, model.input_gradients, strict=True)
    return replace(model, layers=tuple(layer if wanted else at_the_start(layer) for layer, wanted in pairs))


def load_layers(document: Fields, name: str) -> LayeredModel:
    """Returns the model of a file with the keys `layers`, and optionally `name` and `sample` (image by default).

    Raises ForerunError as `layers_from` does, or for an unknown key.
    """
    name, sample = document.text("name", name), document.text("sample", "image")
    entries = document.items("layers")
    document.finish()
    return layers_from(entries, f"{document.place}: layers", name, sample)


class _Reader:
    """Reads one entry of a list into a Layer."""

    def __init__(self, fields: Fields, before: Layer | None, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.fields, self.before, self.shapes = fields, before, shapes
        self.layer_id = (
            str(fields.integer("layer_id", least=0)) if fields.is_whole("layer_id") else fields.text("layer_id")
        )
        if not self.layer_id or self.layer_id == INPUT:
            raise fields.error("layer_id", f"must be a name of its own, got {self.layer_id!r}")
        fields.place += f" ({self.layer_id})"
        self.layer_type = fields.text("layer_type").lower()
        if self.layer_type not in get_args(LayerType):
            known = ", ".join(get_args(LayerType))
            raise fields.error("layer_type", f"{self.layer_type!r} is not known; known: {known}")
        self.reads = self._names("reads")
        self.unit = fields.text("unit", "")
        self.input_shape = self._input_shape()
        self.output_shape = self._shape("output_shape", self.input_shape if self.layer_type in _KEPT_SHAPE else None)
        self.stated = Stated(
            parameters=fields.integer("num_parameters", least=0, most=_MOST)
            if fields.stated("num_parameters")
            else None,
            forward=self._amount("forward_flops"),
            backward=self._amount("backward_flops"),
            activation_mb=self._amount("activation_memory_mb"),
            gradient_mb=self._amount("gradient_memory_mb"),
        )

    def layer(self) -> tuple[Layer, str]:
        """Returns the layer as stated, and a line (or an empty text) on how it differs from its type and shapes."""
        makers: dict[str, Callable[[], Layer]] = {
            "conv2d": self._conv2d,
            "linear": self._linear,
            "attention": self._attention,
            "norm": self._norm,
            "embedding": self._embedding,
            "pool": self._pool,
            "activation": self._activation,
            "add": self._add,
            "custom": self._custom,
        }
        layer = replace(makers[self.layer_type](), reads=self.reads, unit=self.unit)
        layer, note = as_stated(layer, self.stated)
        if self.stated.gradient_mb and not layer.num_parameters:
            raise self.fields.error("gradient_memory_mb", "of a layer without parameters; give num_parameters")
        self.fields.finish()
        return layer, note

    # -- keys ------------------------------------------------------------------------------------------------

    def _names(self, key: str) -> tuple[str, ...]:
        names = self.fields.items(key)
        if not all(isinstance(name, str | int) and not isinstance(name, bool) for name in names):
            raise self.fields.error(key, f"must be a list of layer_ids, got {names!r}")
        return tuple(map(str, names))

    def _amount(self, key: str) -> float | None:
        """Reads a number of at least 0; None if it is not stated."""
        if not self.fields.stated(key) or self.fields.is_zero(key):
            return 0.0 if self.fields.stated(key) else None
        value = self.fields.number(key)
        if value is not None and value > _MOST:
            raise self.fields.error(key, f"must be at most {_MOST:g}, got {value:g}")
        return value

    def _input_shape(self) -> tuple[int, ...]:
        missing = next((name for name in self.reads if name not in self.shapes), None)
        if missing is not None:
            raise self.fields.error("reads", f"names {missing!r}, which is not a layer before it")
        made = self.shapes[self.reads[0]] if self.reads else self.before.output_shape if self.before else None
        shape = self._shape("input_shape", made)
        if made is not None and prod(made) != prod(shape):
            raise self.fields.error("input_shape", f"is {list(shape)}, what it reads has the shape {list(made)}")
        return shape

    def _shape(self, key: str, default: tuple[int, ...] | None) -> tuple[int, ...]:
        if not self.fields.stated(key):
            if default is None:
                raise self.fields.error(key, "is missing (a list of sizes, without the batch)")
            return default
        sizes = self._written_as_tuple(key) or self.fields.items(key)
        whole = [size for size in sizes if isinstance(size, int) and not isinstance(size, bool) and size > 0]
        if not sizes or len(whole) != len(sizes) or prod(whole) > _MOST:
            raise self.fields.error(key, f"must be a list of whole numbers above 0, got {sizes!r}")
        return tuple(whole)

    def _written_as_tuple(self, key: str) -> list[object]:
        """Returns the sizes of a text such as (3, 224, 224), which YAML reads as text; None for any other value."""
        text = self.fields.text(key) if self.fields.is_text(key) else ""
        return [int(size) for size in _NUMBER.findall(text)] if _TUPLE.fullmatch(text) else []

    # -- types -----------------------------------------------------------------------------------------------

    def _conv2d(self) -> Layer:
        for key, shape in (("input_shape", self.input_shape), ("output_shape", self.output_shape)):
            if len(shape) != 3:
                hint = "; leave out the batch" if len(shape) == 4 else ""
                raise self.fields.error(key, f"of a conv2d is [channels, height, width], got {list(shape)}{hint}")
        groups, channels = self.fields.integer("groups", 1), self.output_shape[0]
        if self.input_shape[0] % groups or channels % groups:
            raise self.fields.error(
                "groups", f"{groups} divides not both {self.input_shape[0]} and {channels} channels"
            )
        kernel = self._kernel(groups)
        weights = channels * (self.input_shape[0] // groups) * prod(kernel)
        return Conv2d(
            self.layer_id,
            "conv2d",
            self.input_shape,
            self.output_shape,
            self._with_bias(weights, channels),
            kernel=kernel,
            groups=groups,
        )

    def _kernel(self, groups: int) -> tuple[int, int]:
        """Returns kernel_size, or the square or else the row of taps that the parameters or FLOPs imply."""
        if self.fields.stated("kernel_size"):
            if not self.fields.is_list("kernel_size"):
                side = self.fields.integer("kernel_size", most=1024)
                return side, side
            sides = self.fields.items("kernel_size")
            if len(sides) != 2 or not all(
                isinstance(s, int) and not isinstance(s, bool) and 0 < s <= 1024 for s in sides
            ):
                raise self.fields.error("kernel_size", f"must be a whole number or two, got {sides!r}")
            return int(str(sides[0])), int(str(sides[1]))
        pairs = self.output_shape[0] * (self.input_shape[0] // groups)
        positions = prod(self.output_shape[1:])
        if not self.stated.parameters and not self.stated.forward:
            raise self.fields.error("kernel_size", "is missing (a whole number or two)")
        of_parameters = bool(self.stated.parameters)
        taps = (self.stated.parameters or (self.stated.forward or 0.0) / (2 * positions)) / pairs
        side = isqrt(max(1, round(taps)))
        with_bias = self.output_shape[0] / pairs if of_parameters else 0.0
        if min(abs(taps - side**2), abs(taps - with_bias - side**2)) <= _TOLERANCE * side**2:
            return side, side
        if not of_parameters:
            raise self.fields.error(
                "forward_flops", f"fits no square kernel ({taps:.4g} taps a pair of channels); give kernel_size"
            )
        return 1, max(1, round(taps))

    def _with_bias(self, weights: int, width: int) -> tuple[int, ...]:
        """Returns the elements of weights and bias; where `bias` is not stated, num_parameters decides."""
        fitting = self.stated.parameters is None or self.stated.parameters > weights
        return (weights, width) if self.fields.flag("bias", fitting) else (weights,)

    def _linear(self) -> Layer:
        rows, width = prod(self.output_shape[:-1]), self.output_shape[-1]
        if prod(self.input_shape) % rows:
            raise self.fields.error(
                "output_shape", f"{list(self.output_shape)} has {rows} rows, which don't divide the input's elements"
            )
        parameters = self._with_bias(prod(self.input_shape) // rows * width, width)
        return Linear(self.layer_id, "linear", self.input_shape, self.output_shape, parameters)

    def _attention(self) -> Layer:
        if len(self.input_shape) != 2 or self.output_shape != self.input_shape:
            raise self.fields.error("input_shape", f"of attention is [sequence, width], got {list(self.input_shape)}")
        width = self.input_shape[1]
        heads = self.fields.integer("num_heads", max(1, width // 64))
        if width % heads:
            raise self.fields.error("num_heads", f"{heads} does not divide the width {width}")
        weights, biases = (3 * width * width, width * width), (3 * width, width)
        biased = self.stated.parameters is None or self.stated.parameters > sum(weights)
        return SelfAttention(
            self.layer_id,
            "attention",
            self.input_shape,
            self.output_shape,
            (*weights, *biases) if self.fields.flag("bias", biased) else weights,
            own_elements=4 * prod(self.input_shape),
            heads=heads,
            causal=self.fields.flag("causal"),
        )

    def _norm(self) -> Layer:
        shape = self.input_shape
        if len(shape) == 3:
            return batch_norm(self.layer_id, shape)
        return Norm(self.layer_id, "norm", shape, shape, (shape[-1], shape[-1]))

    def _embedding(self) -> Layer:
        if self.stated.parameters is None:
            raise self.fields.error("num_parameters", "of an embedding is missing (entries x width)")
        shapes = self.input_shape, self.output_shape
        return Embedding(self.layer_id, "embedding", *shapes, (self.stated.parameters,), saves_input=False)

    def _pool(self) -> Layer:
        small = prod(self.output_shape[1:]) == 1
        mode = self.fields.text("mode", "average" if small else "max", choices=("max", "average"))
        return pool(self.layer_id, self.input_shape, self.output_shape, mode == "max")

    def _activation(self) -> Layer:
        function: Any = self.fields.text("function", "relu", choices=get_args(Function))
        return activation(self.layer_id, self.input_shape, function)

    def _add(self) -> Layer:
        if len(self.reads) < 2:
            raise self.fields.error("reads", "of an add names the two or more layers that it sums")
        for name in self.reads:
            if prod(self.shapes[name]) != prod(self.input_shape):
                raise self.fields.error("reads", f"sums {name!r} of shape {list(self.shapes[name])}, not of its own")
        return add(self.layer_id, self.input_shape, self.reads)

    def _custom(self) -> Layer:
        stated = self.stated
        forward = stated.forward or 0.0
        backward = stated.backward if stated.backward is not None else forward * (2 if stated.parameters else 1)
        return StatedLayer(
            self.layer_id,
            "custom",
            self.input_shape,
            self.output_shape,
            (stated.parameters,) if stated.parameters else (),
            forward_work=forward,
            backward_work=backward,
            backward_stated=stated.backward is not None,
        )
