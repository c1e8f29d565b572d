"""Rules of matrix products: mm and related operators, scaled and grouped products, convolutions, cuDNN's RNNs.

The role of a product is forward outside the backward pass, and in a forward that a checkpoint recomputes (where
gradients are on). In the backward pass it is the weight gradient if its first operand is transposed in memory (autograd
computes grad.t() @ input), else the input gradient. Scaled products of float8 need one layout for all, so their weight
gradients count as input gradients.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from forerun.core.program.builder import OpTableBuilder
from forerun.core.program.kinds import Gemm, GemmRole
from forerun.sources.trace.inside.kernels.tensors import (
    Arguments,
    Kernel,
    Keywords,
    Plan,
    all_bytes,
    bytes_of,
    dtype_name,
    memory,
    plan_named,
    shape_of,
)

FORWARD, DGRAD, WGRAD = (int(role) for role in GemmRole)
_DTYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp32",
    torch.complex128: "fp32",
    torch.float4_e2m1fn_x2: "nvfp4",
    **dict.fromkeys((torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz), "fp8"),
    **dict.fromkeys((torch.int8, torch.uint8), "fp8"),
}
"""The dtype of the matrix unit. fp64 runs at fp32's rate on data-centre devices (67 TFLOP/s on an H100), int8 at
fp8's."""
_COMPLEX = (torch.complex64, torch.complex128)
_GATES = (1, 1, 4, 3)
"""The gates of cuDNN's modes RNN_RELU, RNN_TANH, LSTM, GRU."""
_PER_PACKED = 2
"""The fp4 numbers in one element of float4_e2m1fn_x2."""


def gemm_dtype(dtype: torch.dtype, unit: str = "matmul") -> str:
    """Returns the name of the matrix unit's dtype. fp32 is tf32 where the current setting of `unit` ("matmul" or
    "conv") says so."""
    if dtype in (torch.float32, torch.complex64):
        return "tf32" if torch._C._get_fp32_precision_getter("cuda", unit) == "tf32" else "fp32"
    return _DTYPES.get(dtype, "fp32")


def in_backward() -> bool:
    """Returns whether autograd runs a backward pass now, and not the forward that a checkpoint recomputes inside it."""
    return torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()


def _transposed(matrix: torch.Tensor) -> bool:
    if matrix.dim() < 2:
        return False
    strides, sizes = matrix.stride(), matrix.shape
    return bool(strides[-1] != 1 and strides[-2] == 1 and sizes[-1] > 1)


def role_of(first: torch.Tensor, weight_gradients: bool = True) -> int:
    """Returns the role of a product whose first operand is `first`."""
    if not in_backward():
        return FORWARD
    return WGRAD if weight_gradients and _transposed(first) else DGRAD


def product(
    table: OpTableBuilder,
    plan: Plan,
    m: int,
    n: int,
    k: int,
    batch: int,
    first: torch.Tensor,
    out: Any,
    accumulate: bool = False,
    dtype: str = "",
) -> list[Kernel]:
    """Returns the row of `batch` products (m, k) by (k, n); nothing where they have no element.

    A complex product counts as the real one of (2 m, 2 k) by (2 k, n) with its 8 m n k FLOPs.
    """
    if m <= 0 or n <= 0 or k <= 0 or batch <= 0:
        return []
    size = out.itemsize if isinstance(out, torch.Tensor) else first.itemsize
    width: float = first.itemsize
    if first.dtype in _COMPLEX:
        m, k, width, size = 2 * m, 2 * k, width / 2, size // 2
    row = table.gemm(
        plan.name,
        m,
        n,
        k,
        batch,
        role_of(first),
        dtype or gemm_dtype(first.dtype),
        accumulate_bytes=size if accumulate else 0,
        element_bytes=(width, size),
    )
    return [Kernel(row)]


def _mm(table: OpTableBuilder, plan: Plan, args: Arguments, kwargs: Keywords, out: Any) -> list[Kernel]:
    a, b = args[0], args[1]
    m, k = shape_of(a)
    return product(table, plan, m, shape_of(b)[1], k, 1, a, out)


def _bmm(table: OpTableBuilder, plan: Plan, args: Arguments, kwargs: Keywords, out: Any) -> list[Kernel]:
    a, b = args[0], args[1]
    batch, m, k = shape_of(a)
    return product(table, plan, m, shape_of(b)[2], k, batch, a, out)


def _mv(table: OpTableBuilder, plan: Plan, args: Arguments, kwargs: Keywords, out: Any) -> list[Kernel]:
    matrix = args[1] if plan.name.startswith("addmv") else args[0]
    m, k = shape_of(matrix)
    return product(table, plan, m, 1, k, 1, matrix, out)


def _dot(table: OpTableBuilder, plan: Plan, args: Arguments, kwargs: Keywords, out: Any) -> list[Kernel]:
    return product(table, plan, 1, 1, shape_of(args[0])[0], 1, args[0], out)


def _added(table: OpTableBuilder, plan: Plan, args: Arguments, kwargs: Keywords, out: Any) -> list[Kernel]:
    """addmm, baddbmm, addbmm: cuBLASLt adds a bias vector in its epilogue; any other addend is copied first, then added
    to."""
    bias, a, b = args[0], args[1], args[2]
    sizes, n = shape_of(a), shape_of(b)[-1]
    batch, m, k = (1, *sizes) if len(sizes) == 2 else sizes
    if plan.name.startswith("addbmm"):
        k, batch = k * batch, 1
    beta = plan.argument("beta", args, kwargs)
    vector = bias.dim() == 1 and beta == 1 and m > 1 and n > 1
    if vector or beta == 0:
        return product(table, plan, m, n, k, batch, a, out)
    made: list[Kernel] = []
    if not plan.name.endswith("_"):
        copied = plan_named(plan, "copy_")
        made = memory(table, copied, bytes_of(bias), batch * m * n * out.itemsize, 1, dtype_name(bias))
    return made + product(table, plan, m, n, k, batch, a, out, accumulate=True)


def _linear(table: OpTableBuilder, plan: Plan, args: Arguments, kwargs: Keywords, out: Any) -> list[Kernel]:
    x, weight = args[0], args[1]
    k = shape_of(x)[-1]
    n = shape_of(weight)[0] if weight.dim() == 2 else 1
    return product(table, plan, prod(shape_of(x)[:-1]), n, k, 1, x, out)


def _matmul(table: OpTableBuilder, plan: Plan, args: Arguments, kwargs: Keywords, out: Any) -> list[Kernel]:
    a, b = args[0], args[1]
    left, right = shape_of(a), shape_of(b)
    k, n = left[-1], right[-1] if len(right) > 1 else 1
    if len(right) <= 2:
        return product(table, plan, prod(left[:-1]), n, k, 1, a, out)
    m = left[-2] if len(left) > 1 else 1
    return product(table, plan, m, n, k, prod(shape_of(out)) // max(1, m * n), a, out)


def _einsum(table: OpTableBuilder, plan: Plan, args: Arguments, kwargs: Keywords, out: Any) -> list[Kernel]:
    """Contracts operands from left to right, each pair as one batched product; a single operand is reduced."""
    inputs, _, result = args[0].replace(" ", "").partition("->")
    terms, operands = inputs.split(","), list(args[1])
    if len(operands) < 2 or "." in args[0] or not result:
        read = all_bytes(operands)
        return memory(table, plan, read, all_bytes(out), max(1, len(operands) - 1), dtype_name(operands))
    size = {
        index: length
        for term, operand in zip(terms, operands, strict=True)
        for index, length in zip(term, shape_of(operand), strict=True)
    }

    def volume(indices: set[str]) -> int:
        return prod([size[index] for index in indices])

    kernels: list[Kernel] = []
    left = set(terms[0])
    for position in range(1, len(terms)):
        right = set(terms[position])
        kept = set(result).union(*terms[position + 1 :])
        shared = left & right
        batch = shared & kept
        m, n = volume((left - right) & kept), volume((right - left) & kept)
        kernels += product(table, plan, m, n, volume(shared - kept), volume(batch), operands[0], out)
        left = (left | right) & kept
    return kernels


def _scaled_mm(table: OpTableBuilder, plan: Plan, args: Arguments, kwargs: Keywords, out: Any) -> list[Kernel]:
    a, b = args[0], args[1]
    m, k = shape_of(a)
    scale = plan.argument("scale_a", args, kwargs)
    scale = scale[0] if isinstance(scale, list | tuple) else scale
    packed = a.dtype == torch.float4_e2m1fn_x2
    dtype = gemm_dtype(a.dtype)
    if dtype == "fp8" and scale is not None and scale.dtype == torch.float8_e8m0fnu:
        dtype = "mxfp8"
    n, k, width = shape_of(b)[1], k * (_PER_PACKED if packed else 1), a.itemsize / (_PER_PACKED if packed else 1)
    if min(m, n, k) <= 0:
        return []
    role = role_of(a, weight_gradients=False)
    row = table.gemm(plan.name, m, n, k, 1, role, dtype, element_bytes=(width, out.itemsize))
    return [Kernel(row)]


def _grouped(table: OpTableBuilder, plan: Plan, args: Arguments, kwargs: Keywords, out: Any) -> list[Kernel]:
    """One kernel for all groups; a dim that is divided among the groups counts as equal shares."""
    a, b = args[0], args[1]
    left, right = shape_of(a), shape_of(b)
    offsets = plan.argument("offs", args, kwargs)
    groups = max(1, left[0] if len(left) == 3 else right[0] if len(right) == 3 else shape_of(offsets)[0])
    m, k, n = left[-2], left[-1], right[-1]
    if min(m, k, n) <= 0:
        return []
    shared = {(2, 3): "m", (2, 2): "k", (3, 2): "n"}.get((len(left), len(right)), "")
    flops = 2.0 * m * n * k * (1 if shared else groups)
    share = {"m": (max(1, m // groups), n, k), "n": (m, max(1, n // groups), k), "k": (m, n, max(1, k // groups))}
    rows, columns, depth = share.get(shared, (m, n, k))
    shape = Gemm(rows, columns, depth, groups, role_of(a, plan.name == "_grouped_mm"))
    read, written = bytes_of(a) + bytes_of(b), all_bytes(out)
    return [Kernel(table.counted_gemm(plan.name, shape, gemm_dtype(a.dtype), flops, read, written))]


def _foreach_mm(table: OpTableBuilder, plan: Plan, args: Arguments, kwargs: Keywords, out: Any) -> list[Kernel]:
    pairs = zip(args[0], args[1], out, strict=True)
    return [kernel for a, b, c in pairs for kernel in _matmul(table, plan, (a, b), {}, c)]


def _symmetric(table: OpTableBuilder, plan: Plan, args: Arguments, kwargs: Keywords, out: Any) -> list[Kernel]:
    """The products of operators that fuse them with a collective over symmetric memory. The tracer records the
    collective."""
    if "reduce_scatter" in plan.name:
        return _matmul(table, plan, (args[0], args[1]), {}, args[0])
    return [
        kernel
        for weight, made in zip(args[1], out[1], strict=True)
        for kernel in product(
            table, plan, prod(shape_of(made)[:-1]), shape_of(weight)[-1], shape_of(weight)[-2], 1, args[0], made
        )
    ]


# -- convolutions ----------------------------------------------------------------------------------------------


def _convolution_row(
    table: OpTableBuilder,
    plan: Plan,
    dims: tuple[int, int, int],
    groups: int,
    role: int,
    weight: torch.Tensor,
    read: int,
    written: int,
) -> list[Kernel]:
    """An implicit GEMM with exact FLOPs and the bytes of its tensors; depthwise convolutions are memory-bound."""
    m, n, k = dims
    flops = 2.0 * m * n * k * groups
    if flops <= 0:
        return []
    if groups > 1 and weight.shape[1] == 1:
        return memory(table, plan, read, written, 1, dtype_name(weight), flops=flops)
    implicit = Gemm(m, n, k, groups, role, operand_bytes=int(read), result_bytes=int(written))
    dtype = gemm_dtype(weight.dtype, "conv")
    return [Kernel(table.counted_gemm(plan.name, implicit, dtype, flops, read, written))]


def _geometry(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, transposed: bool, groups: int) -> tuple[int, ...]:
    """Returns the positions, the channels on their side, and channels times taps on the other side, of one group.

    Positions are those of the output, or of a transposed convolution's input: the side where each has one product.
    """
    first, second, *taps = shape_of(weight)
    side = shape_of(x) if transposed else shape_of(y)
    return side[0] * prod(side[2:]), first // groups, second * prod(taps)


def _convolution(table: OpTableBuilder, plan: Plan, args: Arguments, kwargs: Keywords, out: Any) -> list[Kernel]:
    x, weight = args[0], args[1]
    groups = int(plan.argument("groups", args, kwargs) or (shape_of(weight)[0] if "depthwise" in plan.name else 1))
    transposed = bool(plan.argument("transposed", args, kwargs)) or plan.name.endswith("transpose")
    positions, channels, unfolded = _geometry(x, weight, out, transposed, groups)
    dims = (positions, unfolded, channels) if transposed else (positions, channels, unfolded)
    bias = plan.argument("bias", args, kwargs)
    read = bytes_of(x) + bytes_of(weight) + all_bytes(bias)
    return _convolution_row(table, plan, dims, groups, FORWARD, weight, read, bytes_of(out))


def _convolution_backward(
    table: OpTableBuilder, plan: Plan, args: Arguments, kwargs: Keywords, out: Any
) -> list[Kernel]:
    """A row for each requested gradient: of the input, of the weight, of the bias (a reduction)."""
    gradient, x, weight = args[0], args[1], args[2]
    groups, transposed = int(plan.argument("groups", args, kwargs)), plan.argument("transposed", args, kwargs)
    positions, channels, unfolded = _geometry(x, weight, gradient, transposed, groups)
    mask = plan.argument("output_mask", args, kwargs)
    size = bytes_of(gradient)
    kernels: list[Kernel] = []
    if mask[0]:
        dims = (positions, channels, unfolded) if transposed else (positions, unfolded, channels)
        read = size + bytes_of(weight)
        kernels += _convolution_row(table, plan, dims, groups, DGRAD, weight, read, bytes_of(x))
    if mask[1]:
        read = size + bytes_of(x)
        kernels += _convolution_row(
            table, plan, (channels, unfolded, positions), groups, WGRAD, weight, read, bytes_of(weight)
        )
    if mask[2]:
        kernels += memory(table, plan_named(plan, "sum"), size, all_bytes(out[2]), 1, dtype_name(gradient))
    return kernels


# -- recurrent networks ------------------------------------------------------------------------------------------


def _cudnn_rnn(table: OpTableBuilder, plan: Plan, args: Arguments, kwargs: Keywords, out: Any) -> list[Kernel]:
    """cuDNN's RNN: for each layer and direction one product over all steps, and one per step with the hidden state."""

    def argument(name: str) -> Any:
        return plan.argument(name, args, kwargs)

    x, backward = args[0], plan.name.endswith("backward")
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
            kernels += _rnn_products(table, plan, x, steps, samples, width, state, gates, backward)
        width = state * directions
    return kernels


def _rnn_products(
    table: OpTableBuilder,
    plan: Plan,
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
        return Kernel(table.gemm(plan.name, m, n, k, batch, role, dtype, element_bytes=(size, size), kernels=batch))

    tokens = steps * samples
    if not backward:
        return [row(tokens, gates, width, 1, FORWARD), row(samples, gates, state, steps, FORWARD)]
    return [
        row(samples, state, gates, steps, DGRAD),
        row(tokens, width, gates, 1, DGRAD),
        row(gates, width, tokens, 1, WGRAD),
        row(gates, state, tokens, 1, WGRAD),
    ]


GEMM_RULES = {
    **dict.fromkeys(("mm", "_int_mm"), _mm),
    "bmm": _bmm,
    **dict.fromkeys(("mv", "addmv", "addmv_"), _mv),
    **dict.fromkeys(("dot", "vdot"), _dot),
    **dict.fromkeys(("addmm", "addmm_", "_addmm_activation", "baddbmm", "baddbmm_", "addbmm", "addbmm_"), _added),
    **dict.fromkeys(("linear", "mkldnn_linear", "mkldnn::_linear_pointwise", "_weight_int8pack_mm"), _linear),
    "matmul": _matmul,
    "einsum": _einsum,
    **dict.fromkeys(("_scaled_mm", "_scaled_mm_v2"), _scaled_mm),
    **dict.fromkeys(("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"), _grouped),
    "_foreach_mm": _foreach_mm,
    **dict.fromkeys(
        (
            "symm_mem::fused_all_gather_matmul",
            "symm_mem::fused_all_gather_scaled_matmul",
            "symm_mem::fused_matmul_reduce_scatter",
            "symm_mem::fused_scaled_matmul_reduce_scatter",
        ),
        _symmetric,
    ),
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
