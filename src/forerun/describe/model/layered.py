"""LayeredModel: a model given layer by layer, which need not be a transformer: convolutional, or written by hand.

A `Layer` says what it reads and makes, which parameters it has, what its backward pass needs again, and which kernels
it runs. Kernels are `Matmul`, `Attention` and `Traffic`; whatever a layer computes is one of them or several. A layer
of one's own is a subclass with `forward` (and `backward`, where it isn't twice the forward), or a function given to
`function_layer`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Literal

from forerun.common.errors import ForerunError

LayerType = Literal["conv2d", "linear", "attention", "norm", "embedding", "pool", "activation", "add", "custom"]
INPUT = "input"
"""what the first layer reads: the sample"""
MB = 10**6


@dataclass(frozen=True, slots=True)
class Matmul:
    """`groups` products of (m, k) by (k, n), explicit or implicit (a convolution's). FLOPs: 2 per multiply-add."""

    m: int
    n: int
    k: int
    groups: int = 1
    elements_read: int = 0
    """of the operands, where they are fewer than the product's (a convolution reads an element for many taps); 0: all
    of the product's"""
    elements_written: int = 0
    """of the result, likewise (the gradient of a convolution's input)"""
    stated_flops: float = 0.0
    """where a person states FLOPs that the shape only comes near; 0: those of the shape"""

    @property
    def flops(self) -> float:
        """2 m n k for each group, or as stated."""
        return self.stated_flops or 2.0 * self.m * self.n * self.k * self.groups


@dataclass(frozen=True, slots=True)
class Attention:
    """Fused attention of `samples` sequences; `flops` as executed (a causal mask halves the square)."""

    samples: int
    heads: int
    seq: int
    head_dim: int
    causal: bool = False
    backward: bool = False

    @property
    def flops(self) -> float:
        """4 s s h a sample, backward 2.5 times as much (FlashAttention-2, arXiv 2307.08691, section 4.1)."""
        pairs = self.seq * self.seq * (0.5 if self.causal else 1.0)
        return 4.0 * self.samples * self.heads * pairs * self.head_dim * (2.5 if self.backward else 1.0)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Memory-bound kernels that together move so much. `flops` are those that count as the model's (0 for most)."""

    elements_read: float
    """of the width of an activation"""
    elements_written: float
    bytes_read: float = 0.0
    """beside them, of whatever width"""
    bytes_written: float = 0.0
    launches: int = 1
    flops: float = 0.0


Kernel = Matmul | Attention | Traffic


@dataclass(frozen=True)
class Layer:
    """One layer, for one sample; kernels are asked for with a number of samples."""

    layer_id: str
    layer_type: LayerType
    input_shape: tuple[int, ...]
    """without the batch"""
    output_shape: tuple[int, ...]
    parameters: tuple[int, ...] = ()
    """elements of each parameter tensor"""
    reads: tuple[str, ...] = ()
    """layer_ids of everything it reads, `input` for the sample; empty: the layer before it"""
    unit: str = ""
    """layers next to each other with one name are gathered, checkpointed and reduced together"""
    saves_input: bool = True
    """its backward pass reads what it read"""
    saves_output: bool = False
    """its backward pass reads what it made"""
    own_elements: float = 0.0
    """what else it keeps for its backward pass, for each sample, of the width of an activation"""
    own_bytes: float = 0.0
    """the same of a fixed width (masks, indices)"""
    buffer_bytes: int = 0
    """state beside the parameters that replicas keep equal (running statistics)"""
    counted_flops: tuple[float, float] | None = None
    """FLOPs of one sample, forward and backward, that a person states of a layer whose kernels only move memory; they
    count as the model's and take no time of their own"""
    gradient_elements: int | None = None
    """elements of the gradients of its parameters, where a person states another size than the parameters have"""

    def forward(self, samples: int) -> Sequence[Kernel]:
        """Kernels of the forward pass; here one that reads the input and writes the output."""
        return [Traffic(samples * self.input_elements, samples * self.output_elements)]

    def backward(self, samples: int) -> Sequence[Kernel]:
        """Kernels of the gradient of the input; here the forward kernels once more."""
        return self.forward(samples)

    def weight_backward(self, samples: int) -> Sequence[Kernel]:
        """Kernels of the gradients of the parameters; here the forward kernels once more where it has parameters."""
        return self.forward(samples) if self.parameters else []

    @property
    def input_elements(self) -> int:
        """Elements of the input of one sample."""
        return prod(self.input_shape)

    @property
    def output_elements(self) -> int:
        """Elements of the output of one sample."""
        return prod(self.output_shape)

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters."""
        return sum(self.parameters)

    @property
    def forward_flops(self) -> float:
        """FLOPs of one sample, 2 for each multiply-add."""
        return self.counted_flops[0] if self.counted_flops else sum(kernel.flops for kernel in self.forward(1))

    @property
    def backward_flops(self) -> float:
        """FLOPs of both gradients for one sample."""
        return self.gradient_flops(of_input=True)

    def gradient_flops(self, of_input: bool) -> float:
        """FLOPs of the backward pass of one sample, with or without the gradient of the input."""
        if self.counted_flops:
            share = 1.0 if of_input else 0.5 if self.parameters else 0.0
            return self.counted_flops[1] * share
        kernels = (*(self.backward(1) if of_input else ()), *self.weight_backward(1))
        return sum(kernel.flops for kernel in kernels)

    def activation_bytes(self, element_bytes: int = 2) -> float:
        """What the layer alone would keep for its backward pass, for one sample. Layers share what they keep: a
        model's `activation_bytes` counts every tensor once."""
        kept = self.input_elements * self.saves_input + self.output_elements * self.saves_output
        return (kept + self.own_elements) * element_bytes + self.own_bytes

    def gradient_bytes(self, element_bytes: int = 4) -> int:
        """Bytes of the gradients of the parameters."""
        elements = self.num_parameters if self.gradient_elements is None else self.gradient_elements
        return elements * element_bytes


LayerKernels = Callable[[int], Sequence[Kernel]]


@dataclass(frozen=True)
class FunctionLayer(Layer):
    """A layer whose kernels a function answers for a number of samples."""

    runs: LayerKernels = field(kw_only=True)
    runs_backward: LayerKernels | None = field(default=None, kw_only=True)
    """both gradients; None: the forward kernels for each of them"""

    def forward(self, samples: int) -> Sequence[Kernel]:
        """The function's kernels."""
        return self.runs(samples)

    def backward(self, samples: int) -> Sequence[Kernel]:
        """The second function's, or the first one's again."""
        return self.runs(samples) if self.runs_backward is None else self.runs_backward(samples)

    def weight_backward(self, samples: int) -> Sequence[Kernel]:
        """The forward kernels again, unless a second function answers for both gradients."""
        return self.runs(samples) if self.parameters and self.runs_backward is None else []


def function_layer(
    layer_id: str,
    input_shape: tuple[int, ...],
    output_shape: tuple[int, ...],
    runs: LayerKernels,
    runs_backward: LayerKernels | None = None,
    parameters: tuple[int, ...] = (),
    reads: tuple[str, ...] = (),
) -> Layer:
    """A layer of one's own from the function that says which kernels it runs for a number of samples."""
    return FunctionLayer(
        layer_id, "custom", input_shape, output_shape, parameters, reads, runs=runs, runs_backward=runs_backward
    )


@dataclass(frozen=True)
class LayeredModel:
    """Layers in the order in which they run."""

    name: str
    layers: tuple[Layer, ...]
    sample: str = "image"
    """what one sample is called: image, sequence"""
    classes_loss: bool = True
    """a cross entropy over the last layer's output follows"""
    source: str = ""
    notes: tuple[str, ...] = ()
    """where a person states other figures than shapes say: a line for each such layer"""

    def __post_init__(self) -> None:
        """Raises ForerunError: no layers, a layer_id twice, a layer that reads what isn't there or doesn't fit."""
        if not self.layers:
            raise ForerunError(f"{self.name}: a model has at least one layer")
        shapes: dict[str, tuple[int, ...]] = {INPUT: self.layers[0].input_shape}
        before = INPUT
        for layer in self.layers:
            if layer.layer_id in shapes:
                taken = "names the sample" if layer.layer_id == INPUT else "is there twice"
                raise ForerunError(f"{self.name}: layer_id {layer.layer_id!r} {taken}; choose another")
            for name in layer.reads or (before,):
                if name not in shapes:
                    raise ForerunError(
                        f"{self.name}: layer {layer.layer_id!r}: reads {name!r}, which is no layer before it"
                    )
            first = (layer.reads or (before,))[0]
            if prod(shapes[first]) != layer.input_elements:
                raise ForerunError(
                    f"{self.name}: layer {layer.layer_id!r}: input_shape {list(layer.input_shape)} has"
                    f" {layer.input_elements} elements, {first!r} makes {list(shapes[first])}"
                )
            shapes[layer.layer_id] = layer.output_shape
            before = layer.layer_id

    def read_by(self, number: int) -> tuple[str, ...]:
        """Names of everything that layer `number` reads."""
        own = self.layers[number].reads
        return own or ((self.layers[number - 1].layer_id,) if number else (INPUT,))

    @property
    def parameter_count(self) -> int:
        """Elements of all parameters."""
        return sum(layer.num_parameters for layer in self.layers)

    @property
    def forward_flops(self) -> float:
        """FLOPs of a sample's forward pass, 2 for each multiply-add."""
        return sum(layer.forward_flops for layer in self.layers)

    @property
    def backward_flops(self) -> float:
        """FLOPs of a sample's backward pass: no gradient of the sample itself is made."""
        pairs = zip(self.layers, self.input_gradients, strict=True)
        return sum(layer.gradient_flops(wanted) for layer, wanted in pairs)

    @property
    def flops_per_sample(self) -> float:
        """FLOPs of forward and backward of a sample."""
        return self.forward_flops + self.backward_flops

    @cached_property
    def input_gradients(self) -> tuple[bool, ...]:
        """Whether each layer makes a gradient of what it reads: not where nothing before it has parameters."""
        differentiable = {INPUT: False}
        wanted = []
        for number, layer in enumerate(self.layers):
            asked = any(differentiable[name] for name in self.read_by(number))
            wanted.append(asked)
            differentiable[layer.layer_id] = asked or bool(layer.parameters)
        return tuple(wanted)

    def kept_of(self, element_bytes: int = 2) -> dict[str, float]:
        """Bytes that the forward pass of one sample leaves for the backward pass, by the layer that makes them.

        A tensor that several layers keep counts once, at its maker; `input` is the sample.
        """
        sizes = {INPUT: self.layers[0].input_elements} | {
            layer.layer_id: layer.output_elements for layer in self.layers
        }
        kept = dict.fromkeys(sizes, 0.0)
        for number, layer in enumerate(self.layers):
            names = (*(self.read_by(number) if layer.saves_input else ()), *([layer.layer_id] * layer.saves_output))
            for name in names:
                kept[name] = sizes[name] * element_bytes
        for layer in self.layers:
            kept[layer.layer_id] += layer.own_elements * element_bytes + layer.own_bytes
        return kept

    def activation_bytes(self, element_bytes: int = 2) -> float:
        """Bytes that the forward pass of one sample leaves for the backward pass."""
        return sum(self.kept_of(element_bytes).values())

    @cached_property
    def units(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of the layers of each unit: those of one name, and all between a layer and what it reads.

        Only a unit's last output is read by later ones, so that it can be gathered, run and checkpointed alone.
        """
        ends = [n for n in range(len(self.layers)) if n + 1 == len(self.layers) or not self._joined(n)]
        number_of = {layer.layer_id: n for n, layer in enumerate(self.layers)} | {INPUT: -1}
        furthest: dict[int, int] = {}
        for n in range(len(self.layers)):
            for name in self.read_by(n):
                furthest[number_of[name]] = n
        units, start, needed = [], 0, furthest.get(-1, 0)
        for n in range(len(self.layers)):
            if n in ends and n >= needed:
                units.append(tuple(range(start, n + 1)))
                start, needed = n + 1, furthest.get(n, 0)
            else:
                needed = max(needed, furthest.get(n, 0))
        return tuple(units)

    def _joined(self, number: int) -> bool:
        """Whether a layer and the next one bear one unit's name."""
        unit = self.layers[number].unit
        return bool(unit) and unit == self.layers[number + 1].unit
