"""The kernels that `forerun measure` times; each is one row of a file for `--kernel-profile`.

A case allocates its tensors only when its turn comes, and returns the function to time. Operands are random: zeros draw
less power and run faster than training does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from forerun.describe.kernels.attention import attention_kernel, names_in
from forerun.evidence.measure.timers import Run

_LAYOUTS = ("forward", "dgrad", "wgrad")
_FP8 = "fp8"


@dataclass(frozen=True)
class Sizes:
    """The sizes to measure; the defaults take some minutes on a GPU."""

    gemm_m: tuple[int, ...] = (128, 512, 1024, 2048, 4096, 8192, 16384)
    gemm_nk: tuple[tuple[int, int], ...] = (
        *((1024, 1024), (4096, 1024), (1024, 4096), (2048, 2048), (4096, 4096), (6144, 4096), (14336, 4096)),
        *((4096, 14336), (5120, 5120), (8192, 8192), (10240, 8192), (28672, 8192), (8192, 28672), (3584, 8192)),
    )
    gemm_dtypes: tuple[str, ...] = ("bf16", "fp16", "tf32", "fp32", "fp8")
    gemm_most_flops: float = 4e12
    """FLOPs of the largest product; an eighth of it for slower dtypes"""
    backward_least_m: int = 2048
    """least m at which dgrad and wgrad are measured, in bf16"""
    head_dims: tuple[int, ...] = (64, 128)
    heads: tuple[tuple[int, int], ...] = ((16, 16), (32, 8), (32, 32), (64, 8), (8, 1))
    """heads of queries, and heads of keys and values"""
    sequences: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384)
    attention_tokens: tuple[int, ...] = (4096, 16384)
    """batch times sequence"""
    moved_bytes: tuple[int, ...] = tuple(2**power for power in range(12, 32))
    """bytes that memory-bound kernels move"""
    copied_bytes: tuple[int, ...] = tuple(2**power for power in range(12, 29))
    """bytes of copies to and from the host"""


@dataclass(frozen=True)
class Case:
    """One row, before it has a time."""

    cells: dict[str, str | int]
    prepare: Callable[[], Run]
    kernels: int = 1
    """number of kernels that one run issues in turn; the row's time is that of one of them"""


def kernel_cases(sizes: Sizes, torch: Any, device: str) -> Iterator[Case]:
    """Returns all cases in the order of the file: products, attention, memory-bound kernels, host copies."""
    yield from _gemms(sizes, torch, device)
    yield from _attention(sizes, torch, device)
    for size in sizes.moved_bytes:
        yield Case({"kind": "memory", "bytes": size}, partial(_add, torch, device, size))
        yield Case({"kind": "memory", "bytes": size, "op": "silu"}, partial(_silu, torch, device, size))
        yield Case({"kind": "memory", "bytes": size, "op": "copy"}, partial(_copy, torch, device, size))
    for size in sizes.copied_bytes:
        yield Case({"kind": "host_copy", "bytes": size}, partial(_host_copy, torch, device, size), 2)


def tiny_kernel(torch: Any, device: str) -> Run:
    """Returns a kernel that the device runs faster than the host can issue it."""
    cell = torch.zeros(8, device=device)
    return partial(cell.add_, 1.0)


# -- products ----------------------------------------------------------------------------------------------------


def _gemms(sizes: Sizes, torch: Any, device: str) -> Iterator[Case]:
    for dtype in sizes.gemm_dtypes:
        most = sizes.gemm_most_flops / (1 if dtype in ("bf16", "fp16", _FP8) else 8)
        for n, k in sizes.gemm_nk:
            for m in sizes.gemm_m:
                if 2.0 * m * n * k > most:
                    continue
                whole = dtype == "bf16" and m >= sizes.backward_least_m
                for layout in _LAYOUTS if whole else _LAYOUTS[:1]:
                    yield _gemm_case(torch, device, dtype, layout, (m, n, k))


def _gemm_case(torch: Any, device: str, dtype: str, layout: str, linear: tuple[int, int, int]) -> Case:
    """Returns a product of a linear layer of m tokens, n outputs and k inputs, in the shape in which it runs."""
    m, n, k = linear
    shape = {"forward": (m, n, k), "dgrad": (m, k, n), "wgrad": (n, k, m)}[layout]
    cells: dict[str, str | int] = {"kind": "gemm", "dtype": dtype, **dict(zip("mnk", shape, strict=True))}
    make = _scaled_product if dtype == _FP8 else _product
    return Case({**cells, "layout": layout}, partial(make, torch, device, dtype, layout, linear))


def _product(torch: Any, device: str, dtype: str, layout: str, linear: tuple[int, int, int]) -> Run:
    m, n, k = linear
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype, torch.float32)
    inputs = torch.randn(m, k, device=device, dtype=kind)
    weight, gradient = torch.randn(n, k, device=device, dtype=kind), torch.randn(m, n, device=device, dtype=kind)
    one, other = {
        "forward": (inputs, weight.t()),
        "dgrad": (gradient, weight),
        "wgrad": (gradient.t(), inputs),
    }[layout]
    return partial(torch.matmul, one, other)


def _scaled_product(torch: Any, device: str, dtype: str, layout: str, linear: tuple[int, int, int]) -> Run:
    m, n, k = linear
    inputs = torch.randn(m, k, device=device).to(torch.float8_e4m3fn)
    weight = torch.randn(n, k, device=device).to(torch.float8_e4m3fn)
    scale = torch.ones((), device=device)
    return partial(torch._scaled_mm, inputs, weight.t(), scale, scale, out_dtype=torch.bfloat16)


# -- attention ---------------------------------------------------------------------------------------------------


def _attention(sizes: Sizes, torch: Any, device: str) -> Iterator[Case]:
    names = names_in("sdp_backend")
    backends = torch.nn.attention.SDPBackend.__members__
    fused = [name for name in names if attention_kernel(name).form == "fused" and names[name] in backends]
    for kernel in fused:
        backend = backends[names[kernel]]
        for head_dim in sizes.head_dims:
            for heads, kv_heads in sizes.heads:
                for batch, seq in _batches(sizes):
                    shape = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "seq_q": seq, "seq_kv": seq}
                    for backward in (0, 1):
                        cells: dict[str, str | int] = {"kind": "attention", **shape, "head_dim": head_dim, "causal": 1}
                        cells |= {"backward": backward, "kernel": kernel}
                        yield Case(cells, partial(_causal, torch, device, backend, shape, head_dim, backward > 0))


def _batches(sizes: Sizes) -> list[tuple[int, int]]:
    """Returns batches and sequence lengths whose products are the wanted numbers of tokens."""
    return sorted(
        {(tokens // seq, seq) for tokens in sizes.attention_tokens for seq in sizes.sequences if seq <= tokens}
    )


def _causal(torch: Any, device: str, backend: Any, shape: dict[str, int], head_dim: int, backward: bool) -> Run:
    def operand(heads: int) -> Any:
        size = (shape["batch"], heads, shape["seq_q"], head_dim)
        return torch.randn(size, device=device, dtype=torch.bfloat16, requires_grad=backward)

    queries, keys, values = (operand(shape[name]) for name in ("heads", "kv_heads", "kv_heads"))
    shared = shape["heads"] != shape["kv_heads"]

    def forward() -> Any:
        with torch.nn.attention.sdpa_kernel(backend):
            attend = torch.nn.functional.scaled_dot_product_attention
            return attend(queries, keys, values, is_causal=True, enable_gqa=shared)

    if not backward:
        return forward
    output = forward()
    return partial(torch.autograd.grad, output, (queries, keys, values), torch.randn_like(output), retain_graph=True)


# -- bytes -------------------------------------------------------------------------------------------------------


def _operand(torch: Any, device: str, size: int) -> Any:
    return torch.randn(max(1, size // 2), device=device, dtype=torch.bfloat16)


def _add(torch: Any, device: str, size: int) -> Run:
    one, other, total = (_operand(torch, device, size // 3) for _ in range(3))
    return partial(torch.add, one, other, out=total)


def _silu(torch: Any, device: str, size: int) -> Run:
    return partial(torch.nn.functional.silu, _operand(torch, device, size // 2))


def _copy(torch: Any, device: str, size: int) -> Run:
    one, other = (_operand(torch, device, size // 2) for _ in range(2))
    return partial(one.copy_, other)


def _host_copy(torch: Any, device: str, size: int) -> Run:
    """Returns a copy to the device and back."""
    there, here = torch.empty(size, dtype=torch.int8, device=device), torch.empty(size, dtype=torch.int8)
    pinned = here.pin_memory() if device == "cuda" else here

    def both() -> None:
        there.copy_(pinned, non_blocking=True)
        pinned.copy_(there, non_blocking=True)

    return both
