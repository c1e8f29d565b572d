"""Layers that a person wrote down: a list of mappings into a LayeredModel.

Keys of a layer:
    layer_id              its name
    layer_type            conv2d, linear, attention, norm, embedding, pool, activation, add, custom
    input_shape           without the batch; left out: what the layer before it makes
    output_shape          without the batch; left out where the type keeps the shape (norm, activation, add, attention)
    num_parameters        elements of its parameters; left out: what type and shapes say
    forward_flops         of one sample, 2 for each multiply-add
    backward_flops        of one sample, gradients of input and parameters
    activation_memory_mb  MB (10**6 bytes) that the layer keeps for its backward pass, for one sample
    gradient_memory_mb    MB of the gradients of its parameters, 2 or 4 bytes each
    reads                 layer_ids of what it reads, where that isn't the layer before it
    unit                  name of the group that it is gathered and reduced with
    kernel_size, groups   conv2d; left out: what num_parameters or forward_flops say
    bias                  conv2d, linear; left out: what num_parameters say
    num_heads, causal     attention
    function              activation: relu, gelu, silu, tanh, sigmoid, softmax, dropout
    mode                  pool: max or average

What is stated must agree with what type and shapes say within 2 %; a custom layer is what it states.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isqrt, prod
from typing import Any, get_args

from forerun.errors import ForerunError
from forerun.model.fields import Fields
from forerun.model.layer_types import (
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
from forerun.model.layered import INPUT, MB, Kernel, Layer, LayeredModel, LayerType, Matmul, Traffic

_TOLERANCE = 0.02
_MOST = 10**15
"""no count of a layer comes near; what is larger is a slip, and would overflow further on"""
_KEPT_SHAPE = ("norm", "activation", "add", "attention")


def layers_from(entries: object, place: str, name: str = "layers", sample: str = "image") -> LayeredModel:
    """The model of a list of layers; `place` says where it stands, for error messages.

    Raises:
        ForerunError: anything malformed or contradictory, in one line that names the place, the layer and the key.
    """
    if not isinstance(entries, Sequence) or isinstance(entries, str | bytes) or not entries:
        raise ForerunError(f"{place}: must be a list of layers, each with its keys")
    layers: list[Layer] = []
    shapes: dict[str, tuple[int, ...]] = {}
    for number, entry in enumerate(entries):
        where = f"{place}, layer {number}"
        if not isinstance(entry, Mapping):
            raise ForerunError(f"{where}: must be keys and values, got {type(entry).__name__}")
        layer = _Reader(Fields(entry, where), layers[-1] if layers else None, shapes).layer()
        shapes[layer.layer_id] = layer.output_shape
        shapes.setdefault(INPUT, layer.input_shape)
        layers.append(layer)
    try:
        return LayeredModel(name, tuple(layers), sample, source=place)
    except ForerunError as error:
        raise ForerunError(f"{place}: {error}") from None


def load_layers(document: Fields, name: str) -> LayeredModel:
    """The model of a file with the keys `layers`, and `name` and `sample` (image unless it says otherwise).

    Raises:
        ForerunError: as `layers_from`; a key that no such file has.
    """
    name, sample = document.text("name", name), document.text("sample", "image")
    entries = document.items("layers")
    document.finish()
    return layers_from(entries, f"{document.place}: layers", name, sample)


@dataclass(frozen=True, kw_only=True)
class StatedLayer(Layer):
    """A layer of stated FLOPs, which run as one product a direction, and of memory traffic where there are none."""

    forward_work: float
    backward_work: float

    def _work(self, samples: int, flops: float) -> Sequence[Kernel]:
        read, written = samples * self.input_elements + self.num_parameters, samples * self.output_elements
        if not flops:
            return [Traffic(read, written)]
        width = self.output_shape[0] if len(self.output_shape) == 3 else self.output_shape[-1]
        rows = samples * (self.output_elements // width)
        depth = max(1, round(flops * samples / (2.0 * rows * width)))
        return [Matmul(rows, width, depth, 1, read, written, flops * samples)]

    def forward(self, samples: int) -> Sequence[Kernel]:
        """One kernel of the stated FLOPs."""
        return self._work(samples, self.forward_work)

    def backward(self, samples: int) -> Sequence[Kernel]:
        """That of the input's gradient: half of the stated FLOPs, all of them where there are no parameters."""
        return self._work(samples, self.backward_work / (2 if self.parameters else 1))

    def weight_backward(self, samples: int) -> Sequence[Kernel]:
        """That of the parameters' gradients: the other half."""
        return self._work(samples, self.backward_work / 2) if self.parameters else []


@dataclass(frozen=True, kw_only=True)
class _Stated:
    """The numbers of an entry, None where it is silent."""

    parameters: int | None
    forward: float | None
    backward: float | None


class _Reader:
    """One entry of a list into a Layer."""

    def __init__(self, fields: Fields, before: Layer | None, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.fields, self.before, self.shapes = fields, before, shapes
        self.layer_id = fields.text("layer_id")
        if not self.layer_id or self.layer_id == INPUT:
            raise fields.error("layer_id", f"must be a name of its own, got {self.layer_id!r}")
        fields.place += f" ({self.layer_id})"
        self.layer_type = fields.text("layer_type", choices=get_args(LayerType))
        self.reads = self._names("reads")
        self.unit = fields.text("unit", "")
        self.input_shape = self._input_shape()
        self.output_shape = self._shape("output_shape", self.input_shape if self.layer_type in _KEPT_SHAPE else None)
        self.stated = _Stated(
            parameters=fields.integer("num_parameters", least=0, most=_MOST)
            if fields.stated("num_parameters")
            else None,
            forward=self._amount("forward_flops"),
            backward=self._amount("backward_flops"),
        )

    def layer(self) -> Layer:
        """The layer, checked against what the entry states."""
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
        if not isinstance(layer, StatedLayer):
            self._agree(layer)
        activation_mb, gradient_mb = self._amount("activation_memory_mb"), self._amount("gradient_memory_mb")
        if activation_mb is not None:
            kept = {"saves_input": False, "saves_output": False, "own_elements": 0.0, "own_bytes": activation_mb * MB}
            layer = replace(layer, **kept)  # type: ignore[arg-type]
        if gradient_mb is not None:
            self._gradient_width(layer, gradient_mb)
        self.fields.finish()
        return layer

    # -- keys ------------------------------------------------------------------------------------------------

    def _names(self, key: str) -> tuple[str, ...]:
        names = self.fields.items(key)
        if not all(isinstance(name, str) for name in names):
            raise self.fields.error(key, f"must be a list of layer_ids, got {names!r}")
        return tuple(map(str, names))

    def _amount(self, key: str) -> float | None:
        """A number of at least 0, None where it is not stated."""
        if not self.fields.stated(key) or self.fields.is_zero(key):
            return 0.0 if self.fields.stated(key) else None
        value = self.fields.number(key)
        if value is not None and value > _MOST:
            raise self.fields.error(key, f"must be at most {_MOST:g}, got {value:g}")
        return value

    def _input_shape(self) -> tuple[int, ...]:
        missing = next((name for name in self.reads if name not in self.shapes), None)
        if missing is not None:
            raise self.fields.error("reads", f"names {missing!r}, which is no layer before it")
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
        sizes = self.fields.items(key)
        whole = [size for size in sizes if isinstance(size, int) and not isinstance(size, bool) and size > 0]
        if not sizes or len(whole) != len(sizes) or prod(whole) > _MOST:
            raise self.fields.error(key, f"must be a list of whole numbers above 0, got {sizes!r}")
        return tuple(whole)

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
        """kernel_size, or the square that the parameters or FLOPs come from."""
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
        if self.stated.parameters:
            key, taps = "num_parameters", self.stated.parameters / pairs
        elif self.stated.forward:
            key, taps = "forward_flops", self.stated.forward / (2 * pairs * positions)
        else:
            raise self.fields.error("kernel_size", "is missing (a whole number or two)")
        side = isqrt(max(1, round(taps)))
        with_bias = self.output_shape[0] / pairs if key == "num_parameters" else 0.0
        if min(abs(taps - side**2), abs(taps - with_bias - side**2)) > _TOLERANCE * side**2:
            raise self.fields.error(
                key, f"fits no square kernel ({taps:.4g} taps a pair of channels); give kernel_size"
            )
        return side, side

    def _with_bias(self, weights: int, width: int) -> tuple[int, ...]:
        """Tensors of weights and bias; without `bias` the parameters say whether there is one."""
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
        )

    # -- agreement -------------------------------------------------------------------------------------------

    def _agree(self, layer: Layer) -> None:
        """Refuse numbers that type and shapes contradict."""
        stated = self.stated
        if stated.parameters is not None and stated.parameters != layer.num_parameters:
            raise self.fields.error(
                "num_parameters",
                f"is {stated.parameters}, {self.layer_type} of these shapes has {layer.num_parameters}",
            )
        weights = sum(kernel.flops for kernel in layer.weight_backward(1))
        for key, value, known in (
            ("forward_flops", stated.forward, (layer.forward_flops,)),
            ("backward_flops", stated.backward, (layer.backward_flops, weights)),
        ):
            if value is None or not known[0] or any(abs(value - flops) <= _TOLERANCE * flops for flops in known):
                continue
            macs = abs(2 * value - known[0]) <= _TOLERANCE * known[0]
            hint = "; a multiply-add counts as 2 FLOPs" if macs else ""
            raise self.fields.error(
                key, f"is {value:g}, {self.layer_type} of these shapes has {known[0]:g} for a sample{hint}"
            )

    def _gradient_width(self, layer: Layer, gradient_mb: float) -> None:
        size = gradient_mb * MB
        expected = [layer.gradient_bytes(width) for width in (2, 4)]
        if not any(abs(size - fit) <= max(_TOLERANCE * fit, MB / 1000) for fit in expected):
            raise self.fields.error(
                "gradient_memory_mb",
                f"is {gradient_mb:g}, {layer.num_parameters} parameters make {expected[0] / MB:g} MB in 16 bit and"
                f" {expected[1] / MB:g} MB in fp32 (MB of 10**6 bytes)",
            )
