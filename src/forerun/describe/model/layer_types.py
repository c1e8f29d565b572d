"""The kinds of layers in convolutional networks and hand-written lists, with their kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from forerun.describe.model.layered import Attention, Kernel, Layer, Matmul, Traffic

_INDEX_BYTES = 8
"""bytes of one index of max pooling (int64)"""
_FROM_OUTPUT = ("relu", "sigmoid", "tanh")
"""activations whose backward pass reads their output; that of the others reads their input"""

Function = Literal["relu", "gelu", "silu", "tanh", "sigmoid", "softmax", "dropout"]


@dataclass(frozen=True, kw_only=True)
class Conv2d(Layer):
    """A convolution over (channels, height, width), priced as an implicit matrix product."""

    kernel: tuple[int, int]
    groups: int = 1

    @property
    def _taps(self) -> int:
        """Returns the number of input elements that one output element reads."""
        return self.input_shape[0] // self.groups * prod(self.kernel)

    def _product(self, samples: int, role: str) -> list[Kernel]:
        """Returns the product of one role: it exchanges positions, channels and taps as rows, columns and depth."""
        positions, channels = samples * prod(self.output_shape[1:]), self.output_shape[0] // self.groups
        x, y, w = samples * self.input_elements, samples * self.output_elements, self.output_shape[0] * self._taps
        read, written = {"forward": (x + w, y), "input": (y + w, x), "weight": (x + y, w)}[role]
        if self.groups > 1 and self.input_shape[0] == self.groups:  # memory bounds one filter a channel
            return [Traffic(read, written, flops=2.0 * y * self._taps)]
        m, n, k = {
            "forward": (positions, channels, self._taps),
            "input": (positions, self._taps, channels),
            "weight": (channels, self._taps, positions),
        }[role]
        return [Matmul(m, n, k, self.groups, read, written)]

    def forward(self, samples: int) -> Sequence[Kernel]:
        """Returns one product over all output positions."""
        return self._product(samples, "forward")

    def backward(self, samples: int) -> Sequence[Kernel]:
        """Returns the kernel of the gradient of the input."""
        return self._product(samples, "input")

    def weight_backward(self, samples: int) -> Sequence[Kernel]:
        """Returns a product whose depth is the number of output positions; the bias's gradient is a sum."""
        bias = [Traffic(samples * self.output_elements, self.output_shape[0])] if len(self.parameters) > 1 else []
        return [*self._product(samples, "weight"), *bias]


def conv2d(
    layer_id: str,
    input_shape: tuple[int, int, int],
    channels: int,
    kernel: tuple[int, int],
    stride: int = 1,
    padding: tuple[int, int] | None = None,
    groups: int = 1,
    bias: bool = False,
    reads: tuple[str, ...] = (),
    unit: str = "",
) -> Conv2d:
    """Makes a convolution with `channels` output channels; padding keeps the size at stride 1 unless given."""
    pads = padding or (kernel[0] // 2, kernel[1] // 2)
    depth, *sides = input_shape
    out = tuple((side + 2 * pad - taps) // stride + 1 for side, pad, taps in zip(sides, pads, kernel, strict=True))
    weights = channels * (depth // groups) * prod(kernel)
    parameters = (weights, channels) if bias else (weights,)
    return Conv2d(
        layer_id, "conv2d", input_shape, (channels, *out), parameters, reads, unit, kernel=kernel, groups=groups
    )


@dataclass(frozen=True)
class Linear(Layer):
    """A matrix product over the last dimension of its input, or over all dimensions where the output has one."""

    @property
    def _rows(self) -> int:
        return prod(self.output_shape[:-1])

    @property
    def _width(self) -> int:
        return self.input_elements // self._rows

    def forward(self, samples: int) -> Sequence[Kernel]:
        """Returns one product, which adds the bias too."""
        return [Matmul(samples * self._rows, self.output_shape[-1], self._width)]

    def backward(self, samples: int) -> Sequence[Kernel]:
        """Returns the kernel of the gradient of the input."""
        return [Matmul(samples * self._rows, self._width, self.output_shape[-1])]

    def weight_backward(self, samples: int) -> Sequence[Kernel]:
        """Returns the product of the weights' gradient; the bias's gradient is a sum over the gradient."""
        product = Matmul(self.output_shape[-1], self._width, samples * self._rows)
        bias = [Traffic(samples * self.output_elements, self.output_shape[-1])] if len(self.parameters) > 1 else []
        return [product, *bias]


def linear(
    layer_id: str,
    input_shape: tuple[int, ...],
    width: int,
    bias: bool = True,
    unit: str = "",
    output_shape: tuple[int, ...] | None = None,
) -> Linear:
    """Makes a linear layer with `width` outputs; it flattens its input unless `output_shape` is given."""
    out = output_shape or (width,)
    weights = prod(input_shape) // prod(out[:-1]) * width
    return Linear(layer_id, "linear", input_shape, out, (weights, width) if bias else (weights,), unit=unit)


@dataclass(frozen=True)
class Norm(Layer):
    """Batch norm (input of three dimensions) or layer norm.

    Batch norm reads its input once for the statistics and once to write the output. Its backward pass reads gradient
    and input once for the sums and once to write (cuDNN's and ATen's kernels). Layer norm keeps a row on chip.
    """

    @property
    def batch(self) -> bool:
        """Returns whether this is batch norm, which takes its statistics over the batch."""
        return self.layer_type == "norm" and len(self.input_shape) == 3

    def forward(self, samples: int) -> Sequence[Traffic]:
        """Returns the kernels of statistics and normalisation."""
        size = samples * self.input_elements
        return [Traffic((2 if self.batch else 1) * size, size)]

    def backward(self, samples: int) -> Sequence[Traffic]:
        """Returns the kernel of the input's gradient, which uses the sums of `weight_backward`."""
        size = samples * self.input_elements
        return [Traffic(2 * size, size)]

    def weight_backward(self, samples: int) -> Sequence[Traffic]:
        """Returns the kernel that sums over the gradient: the sums are the gradients of the weights."""
        return [Traffic(2 * samples * self.input_elements, 0)]


def batch_norm(layer_id: str, shape: tuple[int, int, int], unit: str = "") -> Norm:
    """Makes batch norm over (channels, height, width): for each channel two weights and two fp32 statistics, and one
    64-bit counter."""
    channels = shape[0]
    return Norm(layer_id, "norm", shape, shape, (channels, channels), unit=unit, buffer_bytes=2 * channels * 4 + 8)


@dataclass(frozen=True, kw_only=True)
class Activation(Layer):
    """An element-wise function."""

    function: Function = "relu"

    def forward(self, samples: int) -> Sequence[Kernel]:
        """Returns one pass; dropout also writes a mask of one byte for each element."""
        size = samples * self.input_elements
        return [Traffic(size, size, bytes_written=samples * self.own_bytes)]

    def backward(self, samples: int) -> Sequence[Kernel]:
        """Returns one pass, which reads the gradient and the kept tensor."""
        size, mask = samples * self.input_elements, samples * self.own_bytes
        return [Traffic(size if mask else 2 * size, size, bytes_read=mask)]


def activation(
    layer_id: str, shape: tuple[int, ...], function: Function = "relu", unit: str = "", reads: tuple[str, ...] = ()
) -> Activation:
    """Makes an activation; its function decides which tensor it keeps."""
    dropout, from_output = function == "dropout", function in _FROM_OUTPUT or function == "softmax"
    return Activation(
        layer_id,
        "activation",
        shape,
        shape,
        (),
        reads,
        unit,
        saves_input=not dropout and not from_output,
        saves_output=from_output,
        own_bytes=prod(shape) if dropout else 0,
        function=function,
    )


@dataclass(frozen=True)
class Add(Layer):
    """The sum of all that it reads; all summands have the gradient of the sum."""

    def forward(self, samples: int) -> Sequence[Kernel]:
        """Returns one pass for each summand beyond the first."""
        size, sums = samples * self.output_elements, max(1, len(self.reads) - 1)
        return [Traffic(2 * size * sums, size * sums, launches=sums)]

    def backward(self, samples: int) -> Sequence[Kernel]:
        """Returns no kernels: the summands take over the gradient."""
        return []


def add(layer_id: str, shape: tuple[int, ...], reads: tuple[str, ...], unit: str = "") -> Add:
    """Makes the sum of the outputs of the layers `reads`."""
    return Add(layer_id, "add", shape, shape, (), reads, unit, saves_input=False)


@dataclass(frozen=True, kw_only=True)
class Pool(Layer):
    """Maximum or average over windows; maximum pooling keeps the index of each maximum."""

    maximum: bool

    def forward(self, samples: int) -> Sequence[Kernel]:
        """Returns a kernel that reads the input and writes output and indices."""
        out = samples * self.output_elements
        return [Traffic(samples * self.input_elements, out, bytes_written=samples * self.own_bytes)]

    def backward(self, samples: int) -> Sequence[Kernel]:
        """Returns kernels that read gradient and indices and write the input's gradient; a maximum clears it first."""
        size, launches = samples * self.input_elements, 2 if self.maximum else 1
        return [Traffic(samples * self.output_elements, size, samples * self.own_bytes, launches=launches)]


def pool(
    layer_id: str, input_shape: tuple[int, ...], output_shape: tuple[int, ...], maximum: bool, unit: str = ""
) -> Pool:
    """Makes pooling to `output_shape`; the maximum keeps its input (as autograd does) and an index for each output."""
    indices = prod(output_shape) * _INDEX_BYTES if maximum else 0
    return Pool(
        layer_id, "pool", input_shape, output_shape, unit=unit, saves_input=maximum, own_bytes=indices, maximum=maximum
    )


@dataclass(frozen=True)
class Embedding(Layer):
    """A table from which each index takes a row; the backward pass sorts the indices and adds into the rows."""

    def forward(self, samples: int) -> Sequence[Kernel]:
        """Returns a kernel that reads a row for each index."""
        size = samples * self.output_elements
        return [Traffic(size, size)]

    def backward(self, samples: int) -> Sequence[Kernel]:
        """Returns no kernels: indices have no gradient."""
        return []

    def weight_backward(self, samples: int) -> Sequence[Kernel]:
        """Returns the kernels that sort the indices and scatter the gradients."""
        size = samples * self.output_elements
        return [Traffic(2 * size, 2 * size, launches=3)]


@dataclass(frozen=True, kw_only=True)
class SelfAttention(Layer):
    """Self-attention over (sequence, width): a product for queries, keys and values, fused attention, and a product for
    the output."""

    heads: int
    causal: bool = False

    def _products(self, samples: int) -> tuple[Matmul, Matmul]:
        rows, width = samples * self.input_shape[0], self.input_shape[1]
        return Matmul(rows, 3 * width, width), Matmul(rows, width, width)

    def _core(self, samples: int, backward: bool) -> Attention:
        seq, width = self.input_shape
        return Attention(samples, self.heads, seq, width // self.heads, self.causal, backward)

    def forward(self, samples: int) -> Sequence[Kernel]:
        """Returns both products and the attention kernel between them."""
        inside, outside = self._products(samples)
        return [inside, self._core(samples, False), outside]

    def backward(self, samples: int) -> Sequence[Kernel]:
        """Returns the kernels of the gradients of the inputs of all three."""
        inside, outside = self._products(samples)
        return [
            Matmul(outside.m, outside.k, outside.n),
            self._core(samples, True),
            Matmul(inside.m, inside.k, inside.n),
        ]

    def weight_backward(self, samples: int) -> Sequence[Kernel]:
        """Returns the kernels of the gradients of both matrices and of their biases."""
        products = [Matmul(product.n, product.k, product.m) for product in self._products(samples)]
        bias = [Traffic(4 * samples * self.input_elements, 0, launches=2)] if len(self.parameters) > 2 else []
        return [*products, *bias]
