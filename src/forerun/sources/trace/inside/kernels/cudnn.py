"""Rules of the layers that cuDNN runs: convolutions as implicit matrix products, and recurrent networks."""

from __future__ import annotations

from math import prod

import torch

from forerun.core.program.kinds import Gemm
from forerun.sources.trace.inside.kernels.gemm import DGRAD, FORWARD, WGRAD, gemm_dtype
from forerun.sources.trace.inside.kernels.tensors import (
    Call,
    Kernel,
    all_bytes,
    bytes_of,
    dtype_name,
    memory,
    shape_of,
)

_GATES = (1, 1, 4, 3)
"""The gates of cuDNN's modes RNN_RELU, RNN_TANH, LSTM, GRU."""


def _convolution_row(
    call: Call,
    dims: tuple[int, int, int],
    groups: int,
    role: int,
    weight: torch.Tensor,
    read: int,
    written: int,
) -> list[Kernel]:
    """Returns an implicit GEMM with exact FLOPs and the bytes of its tensors; depthwise convolutions are
    memory-bound."""
    m, n, k = dims
    flops = 2.0 * m * n * k * groups
    if flops <= 0:
        return []
    if groups > 1 and weight.shape[1] == 1:
        return memory(call, read, written, 1, dtype_name(weight), flops=flops)
    implicit = Gemm(m, n, k, groups, role, operand_bytes=int(read), result_bytes=int(written))
    dtype = gemm_dtype(weight.dtype, "conv")
    return [Kernel(call.table.counted_gemm(call.name, implicit, dtype, flops, read, written))]


def _geometry(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, transposed: bool, groups: int) -> tuple[int, ...]:
    """Returns the positions, the channels on their side, and channels times taps on the other side, of one group.

    Positions are those of the output, or of a transposed convolution's input: the side where each has one product.
    """
    first, second, *taps = shape_of(weight)
    side = shape_of(x) if transposed else shape_of(y)
    return side[0] * prod(side[2:]), first // groups, second * prod(taps)


def _convolution(call: Call) -> list[Kernel]:
    x, weight = call.args[0], call.args[1]
    groups = int(call.argument("groups") or (shape_of(weight)[0] if "depthwise" in call.name else 1))
    transposed = bool(call.argument("transposed")) or call.name.endswith("transpose")
    positions, channels, unfolded = _geometry(x, weight, call.out, transposed, groups)
    dims = (positions, unfolded, channels) if transposed else (positions, channels, unfolded)
    bias = call.argument("bias")
    read = bytes_of(x) + bytes_of(weight) + all_bytes(bias)
    return _convolution_row(call, dims, groups, FORWARD, weight, read, bytes_of(call.out))


def _convolution_backward(call: Call) -> list[Kernel]:
    """Returns a row for each requested gradient: of the input, of the weight, of the bias (a reduction)."""
    gradient, x, weight = call.args[0], call.args[1], call.args[2]
    groups, transposed = int(call.argument("groups")), call.argument("transposed")
    positions, channels, unfolded = _geometry(x, weight, gradient, transposed, groups)
    mask = call.argument("output_mask")
    size = bytes_of(gradient)
    kernels: list[Kernel] = []
    if mask[0]:
        dims = (positions, channels, unfolded) if transposed else (positions, unfolded, channels)
        read = size + bytes_of(weight)
        kernels += _convolution_row(call, dims, groups, DGRAD, weight, read, bytes_of(x))
    if mask[1]:
        read = size + bytes_of(x)
        kernels += _convolution_row(
            call, (channels, unfolded, positions), groups, WGRAD, weight, read, bytes_of(weight)
        )
    if mask[2]:
        kernels += memory(call.named("sum"), size, all_bytes(call.out[2]), 1, dtype_name(gradient))
    return kernels


# -- recurrent networks ------------------------------------------------------------------------------------------


def _cudnn_rnn(call: Call) -> list[Kernel]:
    """Returns cuDNN's RNN: for each layer and direction one product over all steps, and one per step with the hidden
    state."""
    x, backward, argument = call.args[0], call.name.endswith("backward"), call.argument
    sizes = shape_of(x)
    packed = argument("batch_sizes")
    if packed:
        steps, samples, width = len(packed), max(packed), sizes[-1]
    else:
        first, second, width = sizes
        steps, samples = (second, first) if argument("batch_first") else (first, second)
    hidden, directions = int(argument("hidden_size")), 2 if argument("bidirectional") else 1
    state = int(argument("proj_size") or 0) or hidden
    gates = _GATES[int(argument("mode"))] * hidden
    kernels: list[Kernel] = []
    for _ in range(int(argument("num_layers"))):
        for _ in range(directions):
            kernels += _rnn_products(call, x, steps, samples, width, state, gates, backward)
        width = state * directions
    return kernels


def _rnn_products(
    call: Call,
    x: torch.Tensor,
    steps: int,
    samples: int,
    width: int,
    state: int,
    gates: int,
    backward: bool,
) -> list[Kernel]:
    dtype, size = gemm_dtype(x.dtype), x.itemsize

    def row(m: int, n: int, k: int, batch: int, role: int) -> Kernel:
        made = call.table.gemm(call.name, m, n, k, batch, role, dtype, element_bytes=(size, size), kernels=batch)
        return Kernel(made)

    tokens = steps * samples
    if not backward:
        return [row(tokens, gates, width, 1, FORWARD), row(samples, gates, state, steps, FORWARD)]
    return [
        row(samples, state, gates, steps, DGRAD),
        row(tokens, width, gates, 1, DGRAD),
        row(gates, width, tokens, 1, WGRAD),
        row(gates, state, tokens, 1, WGRAD),
    ]


CUDNN_RULES = {
    **dict.fromkeys(
        (
            "convolution",
            "_convolution",
            "convolution_overrideable",
            "cudnn_convolution",
            "cudnn_convolution_relu",
            "cudnn_convolution_add_relu",
            "slow_conv3d_forward",
            "slow_conv_dilated2d",
            "slow_conv_dilated3d",
            "cudnn_convolution_transpose",
            "_conv_depthwise2d",
            "conv_depthwise3d",
            "mkldnn_convolution",
        ),
        _convolution,
    ),
    **dict.fromkeys(("convolution_backward", "convolution_backward_overrideable"), _convolution_backward),
    **dict.fromkeys(("_cudnn_rnn", "_cudnn_rnn_backward"), _cudnn_rnn),
}
