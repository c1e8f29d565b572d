"""Applies the figures that a user states for a layer over those of its type and shapes, and notes where they differ.

Stated FLOPs and parameters that agree with the shapes, within 2 % or to the digits given, change nothing; stated memory
always counts. A layer whose FLOPs differ runs them as one matrix product for each direction, which reads the layer's
input and writes its output. Norms, activations, pools, sums and embeddings are memory-bound: up to 32 stated FLOPs for
each element that they move count but take no time, as the memory traffic hides them on every GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from math import log

from forerun.describe.model.layered import MB, Kernel, Layer, Matmul, Traffic

_TOLERANCE = 0.02
_HIDDEN_FLOPS = 32
"""FLOPs for each element moved, 16 for each byte in 16 bits: fewer than GPUs since the V100 compute while a byte
arrives (a V100: 125 TFLOP/s in matrix units and 31 TFLOP/s in other cores at 0.9 TB/s)"""
_WIDTHS = (2, 4)
"""possible bytes of one element of activations or gradients"""


@dataclass(frozen=True, kw_only=True)
class Stated:
    """The figures that an entry states; None if it states none."""

    parameters: int | None
    forward: float | None
    """FLOPs of one sample"""
    backward: float | None
    activation_mb: float | None
    gradient_mb: float | None


@dataclass(frozen=True, kw_only=True)
class StatedLayer(Layer):
    """A layer that runs stated FLOPs as one product for each direction; a direction without FLOPs only moves memory."""

    forward_work: float
    backward_work: float
    backward_stated: bool = False
    """whether a user states backward_work; else it follows from forward_work"""
    makes_input_gradient: bool = True
    """whether it makes its input's gradient; else all of backward_work is that of the parameters' gradients"""

    def _work(self, samples: int, flops: float) -> Sequence[Kernel]:
        read, written = samples * self.input_elements + self.num_parameters, samples * self.output_elements
        if not flops:
            return [Traffic(read, written)]
        width = self.output_shape[0] if len(self.output_shape) == 3 else self.output_shape[-1]
        rows = samples * (self.output_elements // width)
        depth = max(1, round(flops * samples / (2.0 * rows * width)))
        return [Matmul(rows, width, depth, 1, read, written, flops * samples)]

    def forward(self, samples: int) -> Sequence[Kernel]:
        """Returns one kernel of the stated FLOPs."""
        return self._work(samples, self.forward_work)

    def backward(self, samples: int) -> Sequence[Kernel]:
        """Returns the kernel of the input's gradient: half of the stated FLOPs, or all without parameters."""
        if not self.makes_input_gradient:
            return []
        return self._work(samples, self.backward_work / (2 if self.parameters else 1))

    def weight_backward(self, samples: int) -> Sequence[Kernel]:
        """Returns the kernel of the parameters' gradients: half of the stated FLOPs, or all without the input's."""
        if not self.parameters:
            return []
        return self._work(samples, self.backward_work / (2 if self.makes_input_gradient else 1))


def at_the_start(layer: Layer) -> Layer:
    """Returns `layer` without its input's gradient; the parameters' gradients take all stated backward FLOPs."""
    whole = isinstance(layer, StatedLayer) and layer.backward_stated and bool(layer.parameters)
    return replace(layer, makes_input_gradient=False) if whole else layer  # type: ignore[call-arg]


def as_stated(layer: Layer, stated: Stated) -> tuple[Layer, str]:
    """Returns `layer` with the stated figures over those of its shapes, and a line that tells where the two differ.

    The line is empty if nothing differs. `stated.gradient_mb` above 0 needs parameters.
    """
    shaped, told = layer, list[str]()
    if stated.parameters is not None and stated.parameters != layer.num_parameters:
        told.append(_difference("num_parameters", stated.parameters, layer.num_parameters))
        layer = replace(layer, parameters=(stated.parameters,) if stated.parameters else ())
    if not isinstance(shaped, StatedLayer):
        layer, differences = _with_flops(layer, shaped, stated)
        told += differences
    if stated.activation_mb is not None:
        own = {"saves_input": False, "saves_output": False, "own_elements": 0.0, "own_bytes": stated.activation_mb * MB}
        layer = replace(layer, **own)  # type: ignore[arg-type]
        kept = [shaped.activation_bytes(width) / MB for width in _WIDTHS]
        outputs = [shaped.output_elements * width / MB for width in _WIDTHS]
        if not isinstance(shaped, StatedLayer) and not _agrees(stated.activation_mb, *kept, *outputs):
            told.append(_difference("activation_memory_mb", stated.activation_mb, kept[0]))
    if stated.gradient_mb is not None:
        layer, differences = _with_gradients(layer, stated.gradient_mb)
        told += differences
    return layer, f"layer {layer.layer_id} ({layer.layer_type}): {'; '.join(told)}" if told else ""


def _with_flops(layer: Layer, shaped: Layer, stated: Stated) -> tuple[Layer, list[str]]:
    """Returns `layer` with the stated FLOPs, where they differ from those of `shaped`, and the differences."""
    known, backwards = shaped.forward_flops, (shaped.backward_flops, shaped.gradient_flops(of_input=False))
    forward = known if stated.forward is None or _near(stated.forward, known) else stated.forward
    told = [] if forward == known else [_difference("forward_flops", forward, known, flops=True)]
    if stated.backward is None:
        backward = backwards[0] * forward / known if known else forward * (2 if layer.parameters else 1)
    elif _near(stated.backward, *backwards):
        backward = backwards[0]
    else:
        backward = stated.backward
        told.append(_difference("backward_flops", backward, backwards[0], flops=True))
    if not told and bool(layer.parameters) == bool(shaped.parameters):
        return layer, []
    if not known and max(forward, backward) <= _HIDDEN_FLOPS * (layer.input_elements + layer.output_elements):
        return replace(layer, counted_flops=(forward, backward)), []
    own = {each.name: getattr(layer, each.name) for each in fields(Layer)}
    known_backward = stated.backward is not None
    return StatedLayer(**own, forward_work=forward, backward_work=backward, backward_stated=known_backward), told


def _with_gradients(layer: Layer, gradient_mb: float) -> tuple[Layer, list[str]]:
    """Returns `layer` with gradients of the stated size, in 16 bits or fp32, whichever is nearer; and the difference.

    A stated size of 0 is no difference where the parameters are so few that theirs rounds to 0.
    """
    known = [layer.num_parameters * width / MB for width in _WIDTHS]
    told = [] if _agrees(gradient_mb, *known) else [_difference("gradient_memory_mb", gradient_mb, known[1])]
    if not layer.num_parameters or (not gradient_mb and not told):
        return layer, told
    size = gradient_mb * MB
    width = min(_WIDTHS, key=lambda each: abs(log(size / (layer.num_parameters * each)))) if size else _WIDTHS[0]
    return replace(layer, gradient_elements=round(size / width)), told


def _near(value: float, *known: float) -> bool:
    return any(abs(value - each) <= _TOLERANCE * each for each in known)


def _agrees(value: float, *known: float) -> bool:
    """Returns whether `value` is one of `known` within 2 %, or rounded to the digits that it has."""
    exponent = Decimal(repr(float(value))).normalize().as_tuple().exponent
    half = 0.5 * 10.0 ** min(0, int(exponent))
    return _near(value, *known) or any(abs(value - each) <= half for each in known)


def _difference(key: str, stated: float, known: float, flops: bool = False) -> str:
    twice = flops and _near(2 * stated, known)
    hint = " (a multiply-add counts as 2 FLOPs)" if twice else ""
    return f"{key} is {stated:.6g} as stated, {known:.6g} by its shapes{hint}"
