"""Rules of fused attention: PyTorch's scaled_dot_product kernels, flex attention, the flash-attention library.

Each kernel's entry in describe/kernels/attention.yaml names the operators that run it and describes its backward pass.
Every backward pass needs fp32 accumulators of the query gradient and the row sums of grad * out (flash_api.cpp,
kernel_backward.h).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.nn.attention import current_flash_attention_impl
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from forerun.common.errors import ForerunError
from forerun.core.program.builder import OpTableBuilder
from forerun.core.program.kinds import ATTENTION_BACKWARD_FLOPS, Attention
from forerun.describe.kernels.attention import AttentionKernel, attention_kernel, attention_kernels, names_in
from forerun.sources.trace.inside.data_files import read_data
from forerun.sources.trace.inside.kernels.tensors import Call, Kernel, dtype_name, shape_of
from forerun.sources.trace.inside.values import known_value

_DEFAULT_FLASH = "FA2"
"""The FlashAttention that PyTorch contains."""
_FP32 = 4
_BLOCKS: dict[str, int] = read_data("kernels/cuda_kernels.yaml")["attention_backward"]
_SAMPLES = 64
"""The queries at which a mask function of positions alone is evaluated."""
_SAMPLES_OF_DATA = 512
"""The queries at which a mask function that reads data, such as the document of each token, is evaluated."""
_CAUSAL_HALF = 0.5
_CLOSE = 0.02


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _flash_kernel() -> AttentionKernel:
    """Returns the kernel of the active FlashAttention.

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


def _backward_workspace(kernel: AttentionKernel, shape: Attention[int], size: int) -> int:
    """Returns the bytes of memory that a backward pass on elements of `size` bytes allocates and frees itself."""
    rows = shape.batch * shape.heads * _round_up(shape.seq_q, _BLOCKS["row_block"])
    workspace = rows * _FP32 * (1 + _round_up(shape.head_dim, _BLOCKS["head_dim_block"]))
    expanded = shape.batch * shape.heads * shape.seq_kv * (shape.head_dim + shape.v_head_dim)
    if kernel.backward.grouped_gradients == "wide":
        if shape.head_dim > kernel.backward.registers_hold:
            workspace += expanded * _FP32
    elif shape.kv_heads != shape.heads:
        workspace += expanded * size
    return workspace


def attention(
    table: OpTableBuilder,
    name: str,
    kernel: AttentionKernel,
    shape: Attention[int],
    like: torch.Tensor,
    pairs: float | None = None,
) -> list[Kernel]:
    """Returns the rows of one attention kernel on elements as in `like`.

    `pairs` is how many (query, key) pairs a head has where a mask leaves out more than `causal` says. Such a row has as
    many keys as a query attends to on average. The sum of expanded key and value gradients is a memory-bound row.
    """
    if min(shape.batch, shape.heads, shape.kv_heads, shape.seq_q, shape.seq_kv, shape.head_dim) <= 0:
        return []
    size, flops, row_shape = like.itemsize, None, shape
    dims = shape.head_dim + shape.v_head_dim
    if pairs is not None:
        flops = 2.0 * shape.batch * shape.heads * pairs * dims * (ATTENTION_BACKWARD_FLOPS if shape.backward else 1.0)
        row_shape = replace(shape, seq_kv=max(1, round(pairs / shape.seq_q)), causal=0)
    launches = kernel.backward.launches if shape.backward else 1
    row = table.attention(name, row_shape, kernel.name, dtype_name(like), size, flops, launches)
    if not shape.backward:
        return [Kernel(row)]
    kernels = [Kernel(row, _backward_workspace(kernel, shape, size))]
    if shape.kv_heads != shape.heads and kernel.backward.grouped_gradients == "summed":
        expanded = float(shape.batch * shape.seq_kv * dims * size)
        read, written = expanded * shape.heads, expanded * shape.kv_heads
        kernels.append(Kernel(table.memory("sum", read, written, 2, dtype=dtype_name(like))))
    return kernels


def _shape(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, backward: bool) -> Attention[int]:
    """Returns the shape of attention on (batch, heads, sequence, head size)."""
    (batch, heads, seq_q, head_dim), (_, kv_heads, seq_kv, _) = shape_of(q), shape_of(k)
    return Attention(batch, heads, kv_heads, seq_q, seq_kv, head_dim, int(causal), int(backward), shape_of(v)[-1])


def _heads_first(kernel: AttentionKernel | None, backward: bool) -> Any:
    """Returns the rule of an op on (batch, heads, sequence, head size); no `kernel`: the active FlashAttention."""

    def rule(call: Call) -> list[Kernel]:
        q, k, v = call.args[1:4] if backward else call.args[:3]
        shape = _shape(q, k, v, bool(call.argument("is_causal")), backward)
        return attention(call.table, call.name, kernel or _flash_kernel(), shape, q)

    return rule


def window_pairs(seq_q: int, seq_kv: int, left: int, right: int) -> float:
    """Returns the (query, key) pairs of a sliding window aligned to the last query and key; -1 leaves a side open.

    Query i attends to keys from i + seq_kv - seq_q - left to i + seq_kv - seq_q + right.
    """
    shift = seq_kv - seq_q

    def count_up_to(offset: int) -> float:
        """Returns the pairs with key <= query + offset."""
        first = max(0, -offset)
        last = min(seq_q, max(0, seq_kv - 1 - offset))
        ramp = 0.0
        if last > first:
            ramp = (last - first) * (first + offset + 1 + last - 1 + offset + 1) / 2.0
        return ramp + (seq_q - max(last, 0)) * float(seq_kv)

    upper = count_up_to(shift + right) if right >= 0 else float(seq_q) * seq_kv
    return upper - (count_up_to(shift - left - 1) if left >= 0 else 0.0)


def _sequence_first(kernel: AttentionKernel | None, backward: bool) -> Any:
    """Returns the rule of an op on (batch, sequence, heads, head size), or on packed sequences with their cumulative
    lengths.

    Packed sequences whose lengths depend on data that is not known count as equally long.
    """

    def rule(call: Call) -> list[Kernel]:
        def argument(*names: str) -> Any:
            found = [call.argument(name) for name in names]
            return next((value for value in found if value is not None), None)

        q, k, v = argument("query", "q"), argument("key", "k"), argument("value", "v")
        lengths = argument("cum_seq_q", "cu_seqlens_q", "cu_seq_q")
        (*outer, heads, head_dim), (*outer_kv, kv_heads, _) = shape_of(q), shape_of(k)
        if lengths is not None and lengths.dim() > 0 and lengths.numel() > 1:
            batch = shape_of(lengths)[0] - 1
            tokens, tokens_kv = outer[-1] * (outer[0] if len(outer) > 1 else 1), outer_kv[-1]
            seq = (max(1, round(tokens / batch)), max(1, round(tokens_kv / batch)))
        else:
            batch, seq = outer[0], (outer[-1], outer_kv[-1])
        causal = bool(argument("is_causal", "causal", "custom_mask_type"))
        window = argument("window_size_left", "window_size")
        left, right = window if isinstance(window, (list, tuple)) else (window, argument("window_size_right"))
        left = -1 if left is None else int(left)
        right = 0 if causal else -1 if right is None else int(right)
        pairs = window_pairs(*seq, left, right) if 0 <= left < seq[1] - 1 else None
        known = _packed_pairs(lengths, argument("cum_seq_k", "cu_seqlens_k", "cu_seq_k"), left, right)
        if known is not None:
            batch, seq, causal, pairs = 1, (outer[-1], outer_kv[-1]), False, known
        shape = Attention(batch, heads, kv_heads, *seq, head_dim, int(causal), int(backward), shape_of(v)[-1])
        return attention(call.table, call.name, kernel or _flash_kernel(), shape, q, pairs)

    return rule


def _packed_pairs(lengths_q: Any, lengths_kv: Any, left: int, right: int) -> float | None:
    """Returns the (query, key) pairs of packed sequences, None if their cumulative lengths are not known."""
    both = [known_value(one) if isinstance(one, torch.Tensor) else None for one in (lengths_q, lengths_kv)]
    if both[0] is None or both[1] is None or both[0].dim() != 1:
        return None
    with _disable_current_modes(), unset_fake_temporarily():
        own, keys = (one.diff().tolist() for one in both if one is not None)
    return sum(window_pairs(q, kv, left, right) for q, kv in zip(own, keys, strict=True) if q > 0 and kv > 0) or None


# -- flex attention --------------------------------------------------------------------------------------------


def _mask_density(mask: Any, data: Sequence[Any], batch: int, seq_q: int, seq_kv: int) -> float:
    """Returns the share of (query, key) pairs that a mask function lets through, at evenly spread positions of the
    first head.

    `data` are the tensors that the function reads. The positions of keys lie as far before as after those of queries,
    so that a diagonal has half of its pairs. A function whose data is not known, or that can't run on the host,
    counts as causal.
    """
    samples = _SAMPLES_OF_DATA if data else _SAMPLES
    with _disable_current_modes(), unset_fake_temporarily(), torch.no_grad(), _OnHost():
        rows, columns = _spread(seq_q, samples, (0.5,)), _spread(seq_kv, samples, (0.25, 0.75))
        sequences = torch.arange(batch if data else 1)
        try:
            seen = mask(sequences[:, None, None], torch.tensor(0), rows[:, None], columns, *data)
            return float(torch.broadcast_to(seen, (len(sequences), len(rows), len(columns))).float().mean())
        except Exception:  # The user's function may raise anything, and its data may not be known.
            return _CAUSAL_HALF


class _OnHost(TorchDispatchMode):
    """Runs a function of device tensors on their known values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(FakeTensor, known_value, (args, kwargs or {}))
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


def _spread(length: int, samples: int, parts: tuple[float, ...]) -> torch.Tensor:
    """Returns positions at `parts` of each of `samples` equal spans of a sequence."""
    spans = min(samples, length)
    starts = torch.arange(spans, dtype=torch.float64)[:, None] + torch.tensor(parts, dtype=torch.float64)
    return (starts * (length / spans)).floor().long().flatten()


def _block_mask(kernel: AttentionKernel | None, backward: bool) -> Any:
    """Returns the rule of FlexAttention: heads first, under a mask function with its blocks."""

    def rule(call: Call) -> list[Kernel]:
        q, k, v = call.args[:3]
        block_mask = next((value for value in call.args[3:] if isinstance(value, tuple) and len(value) > 4), ())
        mask = block_mask[-1] if block_mask and callable(block_mask[-1]) else None
        data = call.args[-1] if isinstance(call.args[-1], tuple) else ()
        (batch, _, seq_q, _), seq_kv = shape_of(q), shape_of(k)[2]
        density = _mask_density(mask, data, batch, seq_q, seq_kv) if mask is not None else 1.0
        causal = seq_q == seq_kv and abs(density - _CAUSAL_HALF) < _CLOSE
        pairs = None if causal or density >= 1.0 else density * seq_q * seq_kv
        shape = _shape(q, k, v, causal, backward)
        return attention(call.table, call.name, kernel or _flash_kernel(), shape, q, pairs)

    return rule


def _rules(entry: AttentionKernel) -> dict[str, Any]:
    """Returns the rule of each operator of an entry."""
    kernel = None if entry.is_torchs_choice else entry
    layouts = {"heads_first": _heads_first, "sequence_first": _sequence_first, "block_mask": _block_mask}
    return {
        name: layouts[layout](kernel, direction == "backward")
        for layout, directions in entry.operators.items()
        for direction, names in directions.items()
        for name in names
    }


ATTENTION_RULES = {name: rule for one in attention_kernels().values() for name, rule in _rules(one).items()}
