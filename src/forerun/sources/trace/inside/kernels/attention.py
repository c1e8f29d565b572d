"""Rules of fused attention: PyTorch's scaled_dot_product kernels, flex attention, the flash-attention library.

Which operators run which kernel, and how its backward pass goes, stands in the kernel's entry
(describe/kernels/attention.yaml). Each backward pass needs fp32 accumulators of the query gradient and the row sums of
grad * out (flash_api.cpp, kernel_backward.h).
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.attention import current_flash_attention_impl
from torch.utils._python_dispatch import _disable_current_modes

from forerun.common.errors import ForerunError
from forerun.core.program.builder import OpTableBuilder
from forerun.core.program.kinds import Attention
from forerun.describe.kernels.attention import AttentionKernel, attention_kernel, attention_kernels, names_in
from forerun.sources.trace.inside.kernels.tensors import Arguments, Kernel, Keywords, Plan, dtype_name, shape_of

_FLASH = {
    "heads_first": {
        "forward": (
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_fused_attention_overrideable",
        ),
        "backward": (
            "_scaled_dot_product_flash_attention_backward",
            "_scaled_dot_product_flash_attention_for_cpu_backward",
            "_scaled_dot_product_fused_attention_overrideable_backward",
        ),
    },
    "sequence_first": {
        "forward": ("_flash_attention_forward", "_flash_attention_forward_no_dropout_inplace"),
        "backward": ("_flash_attention_backward",),
    },
}
"""operators of PyTorch that run whichever FlashAttention is active"""
_DEFAULT_FLASH = "FA2"
"""what PyTorch itself carries"""
_FP32 = 4
_ROW_BLOCK = 128
_SAMPLES = 64
"""positions a side at which a mask function is evaluated"""
_CAUSAL_HALF = 0.5
_CLOSE = 0.02


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _flash_kernel() -> AttentionKernel:
    """The kernel of the FlashAttention that is active.

    Raises:
        ForerunError: the program activates one that no entry knows.
    """
    active = current_flash_attention_impl() or _DEFAULT_FLASH
    for kernel, name in names_in("torch").items():
        if name == active:
            return attention_kernel(kernel)
    raise ForerunError(
        f"the program activates FlashAttention {active!r}, which no kernel in describe/kernels/attention.yaml is"
        f" called by torch: add an entry with names: {{torch: {active}}}"
    )


def _backward_workspace(
    kernel: AttentionKernel,
    batch: int,
    heads: int,
    kv_heads: int,
    seq_q: int,
    seq_kv: int,
    dims: tuple[int, int],
    size: int,
) -> int:
    head_dim, v_dim = dims
    rows = batch * heads * _round_up(seq_q, _ROW_BLOCK)
    workspace = rows * _FP32 * (1 + _round_up(head_dim, 32))
    if kernel.backward.grouped_gradients == "wide":
        if head_dim > kernel.backward.registers_hold:
            workspace += batch * heads * seq_kv * (head_dim + v_dim) * _FP32
    elif kv_heads != heads:
        workspace += batch * heads * seq_kv * (head_dim + v_dim) * size
    return workspace


def attention(
    table: OpTableBuilder,
    plan: Plan,
    kernel: AttentionKernel,
    batch: int,
    heads: tuple[int, int],
    seq: tuple[int, int],
    dims: tuple[int, int],
    causal: bool,
    backward: bool,
    like: torch.Tensor,
    pairs: float | None = None,
) -> list[Kernel]:
    """Row of one attention kernel; `pairs` is how many (query, key) pairs a head has where a mask leaves out more.

    A row says a mask by `causal` only, so that with `pairs` it has as many keys as a query attends on average.
    The sum of the expanded key and value gradients is a memory-bound row of its own.
    """
    (n_heads, kv_heads), (seq_q, seq_kv), (head_dim, v_dim) = heads, seq, dims
    if min(batch, n_heads, kv_heads, seq_q, seq_kv, head_dim) <= 0:
        return []
    size, flops, keys = like.itemsize, None, seq_kv
    if pairs is not None:
        flops = 2.0 * batch * n_heads * pairs * (head_dim + v_dim) * (2.5 if backward else 1.0)
        keys, causal = max(1, round(pairs / seq_q)), False
    row = table.attention(
        plan.name,
        Attention(batch, n_heads, kv_heads, seq_q, keys, head_dim, int(causal), int(backward), v_dim),
        kernel.name,
        dtype_name(like),
        size,
        flops,
        kernel.backward.launches if backward else 1,
    )
    if not backward:
        return [Kernel(row)]
    workspace = _backward_workspace(kernel, batch, n_heads, kv_heads, seq_q, seq_kv, dims, size)
    kernels = [Kernel(row, workspace)]
    if kv_heads != n_heads and kernel.backward.grouped_gradients == "summed":
        expanded = float(batch * seq_kv * (head_dim + v_dim) * size)
        kernels.append(Kernel(table.memory("sum", expanded * n_heads, expanded * kv_heads, 2, dtype=dtype_name(like))))
    return kernels


def _heads_first(kernel: AttentionKernel | None, backward: bool) -> Any:
    """Rule of an op on (batch, heads, sequence, head size); no `kernel`: the FlashAttention that is active."""

    def rule(table: OpTableBuilder, plan: Plan, args: Arguments, kwargs: Keywords, out: Any) -> list[Kernel]:
        q, k, v = args[1:4] if backward else args[:3]
        (batch, heads, seq_q, head_dim), (_, kv_heads, seq_kv, _) = shape_of(q), shape_of(k)
        return attention(
            table,
            plan,
            kernel or _flash_kernel(),
            batch,
            (heads, kv_heads),
            (seq_q, seq_kv),
            (head_dim, shape_of(v)[-1]),
            bool(plan.argument("is_causal", args, kwargs)),
            backward,
            q,
        )

    return rule


def window_pairs(seq_q: int, seq_kv: int, left: int, right: int) -> float:
    """(query, key) pairs of a sliding window aligned to the last query and key; -1 leaves a side open.

    Query i attends keys from i + seq_kv - seq_q - left to i + seq_kv - seq_q + right.
    """
    shift = seq_kv - seq_q

    def count_up_to(offset: int) -> float:
        """Pairs with key <= query + offset."""
        first = max(0, -offset)
        last = min(seq_q, max(0, seq_kv - 1 - offset))
        ramp = 0.0
        if last > first:
            ramp = (last - first) * (first + offset + 1 + last - 1 + offset + 1) / 2.0
        return ramp + (seq_q - max(last, 0)) * float(seq_kv)

    upper = count_up_to(shift + right) if right >= 0 else float(seq_q) * seq_kv
    return upper - (count_up_to(shift - left - 1) if left >= 0 else 0.0)


def _sequence_first(kernel: AttentionKernel | None, backward: bool) -> Any:
    """Rule of an op on (batch, sequence, heads, head size), or on packed sequences with their cumulated lengths.

    Packed sequences count as equally long, as their lengths lie on the device.
    """

    def rule(table: OpTableBuilder, plan: Plan, args: Arguments, kwargs: Keywords, out: Any) -> list[Kernel]:
        def argument(*names: str) -> Any:
            found = [plan.argument(name, args, kwargs) for name in names]
            return next((value for value in found if value is not None), None)

        q, k, v = argument("query", "q"), argument("key", "k"), argument("value", "v")
        lengths = argument("cum_seq_q", "cu_seqlens_q")
        (*outer, heads, head_dim), (*outer_kv, kv_heads, _) = shape_of(q), shape_of(k)
        if lengths is not None and lengths.dim() > 0 and lengths.numel() > 1:
            batch = shape_of(lengths)[0] - 1
            tokens, tokens_kv = outer[-1] * (outer[0] if len(outer) > 1 else 1), outer_kv[-1]
            seq = (max(1, round(tokens / batch)), max(1, round(tokens_kv / batch)))
        else:
            batch, seq = outer[0], (outer[-1], outer_kv[-1])
        causal = bool(argument("is_causal", "causal", "custom_mask_type"))
        left, right = argument("window_size_left", "window_size"), argument("window_size_right")
        left = -1 if left is None else int(left)
        right = 0 if causal else -1 if right is None else int(right)
        pairs = window_pairs(*seq, left, right) if 0 <= left < seq[1] - 1 else None
        dims = (head_dim, shape_of(v)[-1])
        runs = kernel or _flash_kernel()
        return attention(table, plan, runs, batch, (heads, kv_heads), seq, dims, causal, backward, q, pairs)

    return rule


# -- flex attention --------------------------------------------------------------------------------------------

_densities: dict[tuple[Any, int, int], float] = {}


def _mask_density(mask: Any, seq_q: int, seq_kv: int) -> float:
    """Share of (query, key) pairs that a mask function lets through, at evenly spread positions of the first head.

    A function that cannot be evaluated on the host, as it reads tensors of the device, counts as causal.
    """
    key = (getattr(mask, "__code__", mask), seq_q, seq_kv)
    found = _densities.get(key)
    if found is None:
        with _disable_current_modes(), unset_fake_temporarily(), torch.no_grad():
            rows = torch.linspace(0, seq_q - 1, min(_SAMPLES, seq_q)).long()
            columns = torch.linspace(0, seq_kv - 1, min(_SAMPLES, seq_kv)).long()
            none = torch.tensor(0)
            try:
                seen = mask(none, none, rows[:, None], columns[None, :])
                found = float(torch.broadcast_to(seen, (len(rows), len(columns))).float().mean())
            except Exception:  # whatever the user's function raises
                found = _CAUSAL_HALF
        _densities[key] = found
    return found


def _block_mask(kernel: AttentionKernel | None, backward: bool) -> Any:
    """Rule of FlexAttention: heads first, under a mask function with its blocks."""

    def rule(table: OpTableBuilder, plan: Plan, args: Arguments, kwargs: Keywords, out: Any) -> list[Kernel]:
        q, k, v = args[:3]
        block_mask = next((value for value in args[3:] if isinstance(value, tuple) and len(value) > 4), ())
        mask = block_mask[-1] if block_mask and callable(block_mask[-1]) else None
        (batch, heads, seq_q, head_dim), (_, kv_heads, seq_kv, _) = shape_of(q), shape_of(k)
        density = _mask_density(mask, seq_q, seq_kv) if mask is not None else 1.0
        causal = seq_q == seq_kv and abs(density - _CAUSAL_HALF) < _CLOSE
        pairs = None if causal or density >= 1.0 else density * seq_q * seq_kv
        dims = (head_dim, shape_of(v)[-1])
        return attention(
            table,
            plan,
            kernel or _flash_kernel(),
            batch,
            (heads, kv_heads),
            (seq_q, seq_kv),
            dims,
            causal,
            backward,
            q,
            pairs,
        )

    return rule


def _rules(kernel: AttentionKernel | None, operators: Any) -> dict[str, Any]:
    """Operator -> rule for the operators of an entry."""
    layouts = {"heads_first": _heads_first, "sequence_first": _sequence_first, "block_mask": _block_mask}
    return {
        name: layouts[layout](kernel, direction == "backward")
        for layout, directions in operators.items()
        for direction, names in directions.items()
        for name in names
    }


ATTENTION_RULES = {
    **_rules(None, _FLASH),
    **{name: rule for one in attention_kernels().values() for name, rule in _rules(one, one.operators).items()},
}
