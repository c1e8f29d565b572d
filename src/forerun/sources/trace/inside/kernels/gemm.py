"""Rules of matrix products: mm and related operators, scaled and grouped products.

The role of a product is forward outside the backward pass, and in a forward that a checkpoint recomputes (where
gradients are on). In the backward pass it is the weight gradient if its first operand is transposed in memory (autograd
computes grad.t() @ input), else the input gradient. Scaled products of float8 need one layout for all, so their weight
gradients count as input gradients.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from forerun.core.program.kinds import Gemm, GemmRole
from forerun.sources.trace.inside.kernels.tensors import (
    Call,
    Kernel,
    all_bytes,
    bytes_of,
    dtype_name,
    memory,
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
    call: Call,
    m: int,
    n: int,
    k: int,
    batch: int,
    first: torch.Tensor,
    out: Any,
    accumulate: bool = False,
    dtype: str = "",
) -> list[Kernel]:
    """Returns the row of `batch` products (m, k) by (k, n); nothing if they have no element.

    A complex product counts as the real one of (2 m, 2 k) by (2 k, n) with its 8 m n k FLOPs.
    """
    if m <= 0 or n <= 0 or k <= 0 or batch <= 0:
        return []
    size = out.itemsize if isinstance(out, torch.Tensor) else first.itemsize
    width: float = first.itemsize
    if first.dtype in _COMPLEX:
        m, k, width, size = 2 * m, 2 * k, width / 2, size // 2
    row = call.table.gemm(
        call.name,
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


def _mm(call: Call) -> list[Kernel]:
    a, b = call.args[0], call.args[1]
    m, k = shape_of(a)
    return product(call, m, shape_of(b)[1], k, 1, a, call.out)


def _bmm(call: Call) -> list[Kernel]:
    a, b = call.args[0], call.args[1]
    batch, m, k = shape_of(a)
    return product(call, m, shape_of(b)[2], k, batch, a, call.out)


def _mv(call: Call) -> list[Kernel]:
    matrix = call.args[1] if call.name.startswith("addmv") else call.args[0]
    m, k = shape_of(matrix)
    return product(call, m, 1, k, 1, matrix, call.out)


def _dot(call: Call) -> list[Kernel]:
    return product(call, 1, 1, shape_of(call.args[0])[0], 1, call.args[0], call.out)


def _added(call: Call) -> list[Kernel]:
    """Returns the kernels of addmm, baddbmm, addbmm: cuBLASLt adds a bias vector in its epilogue; any other addend is
    copied first, then added to."""
    bias, a, b = call.args[0], call.args[1], call.args[2]
    sizes, n = shape_of(a), shape_of(b)[-1]
    batch, m, k = (1, *sizes) if len(sizes) == 2 else sizes
    if call.name.startswith("addbmm"):
        k, batch = k * batch, 1
    beta = call.argument("beta")
    vector = bias.dim() == 1 and beta == 1 and m > 1 and n > 1
    if vector or beta == 0:
        return product(call, m, n, k, batch, a, call.out)
    made: list[Kernel] = []
    if not call.name.endswith("_"):
        made = memory(call.named("copy_"), bytes_of(bias), batch * m * n * call.out.itemsize, 1, dtype_name(bias))
    return made + product(call, m, n, k, batch, a, call.out, accumulate=True)


def _linear(call: Call) -> list[Kernel]:
    x, weight = call.args[0], call.args[1]
    k = shape_of(x)[-1]
    n = shape_of(weight)[0] if weight.dim() == 2 else 1
    return product(call, prod(shape_of(x)[:-1]), n, k, 1, x, call.out)


def _matmul(call: Call) -> list[Kernel]:
    a, b = call.args[0], call.args[1]
    left, right = shape_of(a), shape_of(b)
    k, n = left[-1], right[-1] if len(right) > 1 else 1
    if len(right) <= 2:
        return product(call, prod(left[:-1]), n, k, 1, a, call.out)
    m = left[-2] if len(left) > 1 else 1
    return product(call, m, n, k, prod(shape_of(call.out)) // max(1, m * n), a, call.out)


def _einsum(call: Call) -> list[Kernel]:
    """Contracts operands from left to right, each pair as one batched product; a single operand is reduced."""
    inputs, _, result = call.args[0].replace(" ", "").partition("->")
    terms, operands = inputs.split(","), list(call.args[1])
    if len(operands) < 2 or "." in call.args[0] or not result:
        read = all_bytes(operands)
        return memory(call, read, all_bytes(call.out), max(1, len(operands) - 1), dtype_name(operands))
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
        kernels += product(call, m, n, volume(shared - kept), volume(batch), operands[0], call.out)
        left = (left | right) & kept
    return kernels


def _scaled_mm(call: Call) -> list[Kernel]:
    a, b = call.args[0], call.args[1]
    m, k = shape_of(a)
    scale = call.argument("scale_a")
    scale = scale[0] if isinstance(scale, list | tuple) else scale
    packed = a.dtype == torch.float4_e2m1fn_x2
    dtype = gemm_dtype(a.dtype)
    if dtype == "fp8" and scale is not None and scale.dtype == torch.float8_e8m0fnu:
        dtype = "mxfp8"
    n, k, width = shape_of(b)[1], k * (_PER_PACKED if packed else 1), a.itemsize / (_PER_PACKED if packed else 1)
    if min(m, n, k) <= 0:
        return []
    role = role_of(a, weight_gradients=False)
    row = call.table.gemm(call.name, m, n, k, 1, role, dtype, element_bytes=(width, call.out.itemsize))
    return [Kernel(row)]


def _grouped(call: Call) -> list[Kernel]:
    """Returns one kernel for all groups; a dim that is divided among the groups counts as equal shares."""
    a, b = call.args[0], call.args[1]
    left, right = shape_of(a), shape_of(b)
    offsets = call.argument("offs")
    groups = max(1, left[0] if len(left) == 3 else right[0] if len(right) == 3 else shape_of(offsets)[0])
    m, k, n = left[-2], left[-1], right[-1]
    if min(m, k, n) <= 0:
        return []
    shared = {(2, 3): "m", (2, 2): "k", (3, 2): "n"}.get((len(left), len(right)), "")
    flops = 2.0 * m * n * k * (1 if shared else groups)
    share = {"m": (max(1, m // groups), n, k), "n": (m, max(1, n // groups), k), "k": (m, n, max(1, k // groups))}
    rows, columns, depth = share.get(shared, (m, n, k))
    shape = Gemm(rows, columns, depth, groups, role_of(a, call.name == "_grouped_mm"))
    read, written = bytes_of(a) + bytes_of(b), all_bytes(call.out)
    return [Kernel(call.table.counted_gemm(call.name, shape, gemm_dtype(a.dtype), flops, read, written))]


def _foreach_mm(call: Call) -> list[Kernel]:
    pairs = zip(call.args[0], call.args[1], call.out, strict=True)
    return [kernel for a, b, c in pairs for kernel in _matmul(call.on((a, b), c))]


def _symmetric(call: Call) -> list[Kernel]:
    """Returns the products of operators that fuse them with a collective over symmetric memory. The tracer records the
    collective."""
    if "reduce_scatter" in call.name:
        return _matmul(call.on((call.args[0], call.args[1]), call.out))
    return [
        kernel
        for weight, made in zip(call.args[1], call.out[1], strict=True)
        for kernel in product(
            call, prod(shape_of(made)[:-1]), shape_of(weight)[-1], shape_of(weight)[-2], 1, call.args[0], made
        )
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
}
