"""LayeredModel: a model given layer by layer, such as a convolutional network or a list that a user wrote.

A `Layer` states its inputs and outputs, its parameters, the tensors that it keeps for its backward pass, and its
kernels. A kernel is a `Matmul`, an `Attention` or a `Traffic`. A user's own layer is a subclass with `forward` (and
`backward`, where its kernels differ from those of `forward`), or a function given to `function_layer`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Literal

from forerun.common.errors import ForerunError
from forerun.describe.model.spec import MOST_LAYERS

LayerType = Literal["conv2d", "linear", "attention", "norm", "embedding", "pool", "activation", "add", "custom"]
INPUT = "input"
"""name of the sample, which the first layer reads"""
MB = 10**6


@dataclass(frozen=True, slots=True)
class Matmul:
    """`groups` products of (m, k) by (k, n), explicit or implicit (a convolution). A multiply-add is 2 FLOPs."""

    m: int
    n: int
    k: int
    groups: int = 1
    elements_read: int = 0
    """elements of the operands, where memory holds fewer than the product reads (a convolution reads an element for
    many taps); 0: as many as the product reads"""
    elements_written: int = 0
    """elements of the result, likewise (the gradient of a convolution's input); 0: as many as the product writes"""
    stated_flops: float = 0.0
    """FLOPs that a user states, where they differ slightly from those of the shape; 0: those of the shape"""

    @property
    def flops(self) -> float:
        """Returns the stated FLOPs, or 2 m n k for each group."""
        return self.stated_flops or 2.0 * self.m * self.n * self.k * self.groups


@dataclass(frozen=True, slots=True)
class Attention:
    """Fused attention of `samples` sequences. `flops` are those that run: a causal mask halves them."""

    samples: int
    heads: int
    seq: int
    head_dim: int
    causal: bool = False
    backward: bool = False

    @property
    def flops(self) -> float:
        """Returns 4 s s h for each sample, of s tokens and h = heads x head size; the backward kernel has 2.5 times as
        many (FlashAttention-2, arXiv 2307.08691, section 4.1)."""
        pairs = self.seq * self.seq * (0.5 if self.causal else 1.0)
        return 4.0 * self.samples * self.heads * pairs * self.head_dim * (2.5 if self.backward else 1.0)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Memory-bound kernels, and the bytes that they move together. `flops` count as the model's; most kernels have
    0.
    """

    elements_read: float
    """elements of the width of an activation"""
    elements_written: float
    bytes_read: float = 0.0
    """bytes of other tensors"""
    bytes_written: float = 0.0
    launches: int = 1
    flops: float = 0.0


Kernel = Matmul | Attention | Traffic


@dataclass(frozen=True)
class Layer:
    """One layer. Shapes and sizes are those of one sample; the kernels are those of a given number of samples."""

    layer_id: str
    layer_type: LayerType
    input_shape: tuple[int, ...]
    """sizes without the batch dimension"""
    output_shape: tuple[int, ...]
    parameters: tuple[int, ...] = ()
    """elements of each parameter tensor"""
    reads: tuple[str, ...] = ()
    """layer_ids of all that it reads, `input` for the sample; empty: the layer before it"""
    unit: str = ""
    """FSDP gathers, reduces and checkpoints neighbouring layers of one name together"""
    saves_input: bool = True
    """whether its backward pass reads its input"""
    saves_output: bool = False
    """whether its backward pass reads its output"""
    own_elements: float = 0.0
    """further elements of the width of an activation that it keeps for its backward pass, for each sample"""
    own_bytes: float = 0.0
    """further bytes of tensors of a fixed width (masks, indices), for each sample"""
    buffer_bytes: int = 0
    """bytes of buffers that replicas keep equal (running statistics)"""
    counted_flops: tuple[float, float] | None = None
    """FLOPs of one sample, forward and backward, that a user states for a layer whose kernels only move memory; they
    count as the model's and take no time"""
    gradient_elements: int | None = None
    """elements of its parameters' gradients, where a user states another size than that of the parameters"""

    def forward(self, samples: int) -> Sequence[Kernel]:
        """Returns the kernels of the forward pass; here one that reads the input and writes the output."""
        return [Traffic(samples * self.input_elements, samples * self.output_elements)]

    def backward(self, samples: int) -> Sequence[Kernel]:
        """Returns the kernels of the gradient of the input; here those of the forward pass."""
        return self.forward(samples)

    def weight_backward(self, samples: int) -> Sequence[Kernel]:
        """Returns the kernels of the parameters' gradients; here those of the forward pass if there are parameters."""
        return self.forward(samples) if self.parameters else []

    @property
    def input_elements(self) -> int:
        """Returns the number of elements in the input of one sample."""
        return prod(self.input_shape)

    @property
    def output_elements(self) -> int:
        """Returns the number of elements in the output of one sample."""
        return prod(self.output_shape)

    @property
    def num_parameters(self) -> int:
        """Returns the elements of all parameters."""
        return sum(self.parameters)

    @property
    def forward_flops(self) -> float:
        """Returns the FLOPs of the forward pass of one sample, 2 for each multiply-add."""
        return self.counted_flops[0] if self.counted_flops else sum(kernel.flops for kernel in self.forward(1))

    @property
    def backward_flops(self) -> float:
        """Returns the FLOPs of both gradients for one sample."""
        return self.gradient_flops(of_input=True)

    def gradient_flops(self, of_input: bool) -> float:
        """Returns the FLOPs of the backward pass of one sample, with or without the gradient of the input."""
        if self.counted_flops:
            share = 1.0 if of_input else 0.5 if self.parameters else 0.0
            return self.counted_flops[1] * share
        kernels = (*(self.backward(1) if of_input else ()), *self.weight_backward(1))
        return sum(kernel.flops for kernel in kernels)

    def activation_bytes(self, element_bytes: int = 2) -> float:
        """Returns the bytes that the layer keeps for its backward pass, for one sample. Other layers may keep them
        too; a model's `activation_bytes` counts each tensor once."""
        kept = self.input_elements * self.saves_input + self.output_elements * self.saves_output
        return (kept + self.own_elements) * element_bytes + self.own_bytes

    def gradient_bytes(self, element_bytes: int = 4) -> int:
        """Returns the bytes of the gradients of the parameters."""
        elements = self.num_parameters if self.gradient_elements is None else self.gradient_elements
        return elements * element_bytes


LayerKernels = Callable[[int], Sequence[Kernel]]


@dataclass(frozen=True)
class FunctionLayer(Layer):
    """A layer with a function that returns its kernels for a number of samples."""

    runs: LayerKernels = field(kw_only=True)
    runs_backward: LayerKernels | None = field(default=None, kw_only=True)
    """function for both gradients; None: each runs the forward kernels"""

    def forward(self, samples: int) -> Sequence[Kernel]:
        """Returns the function's kernels."""
        return self.runs(samples)

    def backward(self, samples: int) -> Sequence[Kernel]:
        """Returns the kernels of `runs_backward`, or of `runs` where there is none."""
        return self.runs(samples) if self.runs_backward is None else self.runs_backward(samples)

    def weight_backward(self, samples: int) -> Sequence[Kernel]:
        """Returns the forward kernels, or none where `runs_backward` covers both gradients."""
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
    """Makes a user's own layer from a function that returns its kernels for a number of samples."""
    return FunctionLayer(
        layer_id, "custom", input_shape, output_shape, parameters, reads, runs=runs, runs_backward=runs_backward
    )


@dataclass(frozen=True)
class LayeredModel:
    """A model whose layers run in the order given."""

    name: str
    layers: tuple[Layer, ...]
    sample: str = "image"
    """word for one sample: image, sequence"""
    classes_loss: bool = True
    """whether a cross entropy over the last layer's output follows"""
    source: str = ""
    notes: tuple[str, ...] = ()
    """a line for each layer for which a user states other figures than its shapes give"""

    def __post_init__(self) -> None:
        """Raises ForerunError for no layers, a repeated layer_id, or a layer whose input is missing or doesn't fit."""
        if not self.layers:
            raise ForerunError(f"{self.name}: the model has no layers; add one")
        if len(self.layers) > MOST_LAYERS:
            raise ForerunError(f"{self.name}: {len(self.layers):,} layers; at most {MOST_LAYERS:,} are simulated")
        shapes: dict[str, tuple[int, ...]] = {INPUT: self.layers[0].input_shape}
        before = INPUT
        for layer in self.layers:
            if layer.layer_id in shapes:
                taken = "names the sample" if layer.layer_id == INPUT else "is there twice"
                raise ForerunError(f"{self.name}: layer_id {layer.layer_id!r} {taken}; choose another")
            for name in layer.reads or (before,):
                if name not in shapes:
                    raise ForerunError(
                        f"{self.name}: layer {layer.layer_id!r}: reads {name!r}, which is not a layer before it"
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
        """Returns the names of all that layer `number` reads."""
        own = self.layers[number].reads
        return own or ((self.layers[number - 1].layer_id,) if number else (INPUT,))

    @property
    def parameter_count(self) -> int:
        """Returns the elements of all parameters."""
        return sum(layer.num_parameters for layer in self.layers)

    @property
    def forward_flops(self) -> float:
        """Returns the FLOPs of one sample's forward pass, 2 for each multiply-add."""
        return sum(layer.forward_flops for layer in self.layers)

    @property
    def backward_flops(self) -> float:
        """Returns the FLOPs of one sample's backward pass, which makes no gradient of the sample itself."""
        pairs = zip(self.layers, self.input_gradients, strict=True)
        return sum(layer.gradient_flops(wanted) for layer, wanted in pairs)

    @property
    def flops_per_sample(self) -> float:
        """Returns the FLOPs of one sample's forward and backward passes."""
        return self.forward_flops + self.backward_flops

    @cached_property
    def input_gradients(self) -> tuple[bool, ...]:
        """Returns whether each layer makes the gradient of its input: only where a layer before it has parameters."""
        differentiable = {INPUT: False}
        wanted = []
        for number, layer in enumerate(self.layers):
            asked = any(differentiable[name] for name in self.read_by(number))
            wanted.append(asked)
            differentiable[layer.layer_id] = asked or bool(layer.parameters)
        return tuple(wanted)

    def kept_of(self, element_bytes: int = 2) -> dict[str, float]:
        """Returns the bytes that one sample's forward pass keeps for the backward pass, by the layer that makes them.

        A tensor that several layers keep counts once, at the layer that makes it; `input` is the sample.
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
        """Returns the bytes that one sample's forward pass keeps for the backward pass."""
        return sum(self.kept_of(element_bytes).values())

    @cached_property
    def units(self) -> tuple[tuple[int, ...], ...]:
        """Returns the layer numbers of each unit: layers of one name, and all layers between a layer and its inputs.

        Later units read only the last output of a unit, so that FSDP can gather, run and checkpoint it alone.
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
        """Returns whether layer `number` and the next one have the same unit name."""
        unit = self.layers[number].unit
        return bool(unit) and unit == self.layers[number + 1].unit
