"""The op of every kernel: a matrix product or attention if the operator's sizes show it, otherwise memory-bound
work."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from forerun.core.program.builder import OpTableBuilder
from forerun.core.program.kinds import Attention, Direction
from forerun.core.program.types import Collective
from forerun.describe.kernels.attention import Layout, attention_kernels
from forerun.sources.profile.collectives import Call
from forerun.sources.profile.kernel_names import work_of
from forerun.sources.profile.labels import Operator

_PRODUCTS = {"aten::mm": 0, "aten::addmm": 1, "aten::bmm": 0, "aten::baddbmm": 1}
"""operators that are one product -> the place of its first operand among their arguments"""
_ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
_LARGEST = 1 << 31
"""no tensor has a side as long"""
_NAME = 120
"""letters of a name; those of kernels go on for thousands"""
_BRACKETS = {"<": ">", "(": ")"}


def add_kernel(
    ops: OpTableBuilder, name: str, seconds: float, bytes_per_s: float, copied: float, operator: Operator | None
) -> int:
    """Adds the op of a kernel, copy or fill that took `seconds`, and returns its number.

    A kernel whose sizes the file does not tell moves what memory of `bytes_per_s` moves in its time, so that its time
    on another device follows the bandwidth. `copied` are the bytes of a copy; `operator` is given where this is the
    kernel that takes most of its time.
    """
    name = cut(name)
    if name.startswith(("Memcpy DtoH", "Memcpy HtoD")):
        return ops.host_copy(name, copied, direction=Direction.OUT if "DtoH" in name else Direction.IN)
    if name.startswith("Memcpy"):
        return ops.memory(name, copied, copied)
    if name.startswith("Memset"):
        return ops.memory(name, 0, copied)
    shape = None if operator is None else product_shape(operator)
    if operator is not None and shape is not None:
        batch, m, n, k = shape
        size = _ELEMENT_BYTES[operator.dtype]
        return ops.gemm(name, m, n, k, batch, dtype=operator.dtype, element_bytes=(size, size))
    attention = None if operator is None else attention_shape(operator)
    if operator is not None and attention is not None and work_of(name).work == "attention":
        size = _ELEMENT_BYTES[operator.dtype]
        return ops.attention(name, attention.shape, attention.kernel, operator.dtype, size)
    return ops.memory(name, round(seconds * bytes_per_s), 0)


def cut(name: str) -> str:
    """Returns the first `_NAME` letters of a name, and the brackets that close those that are open there."""
    if len(name) <= _NAME:
        return name
    kept, closing = name[:_NAME], ""
    for letter in kept:
        if letter in _BRACKETS:
            closing = _BRACKETS[letter] + closing
        elif closing.startswith(letter):
            closing = closing[1:]
    return kept + closing


def product_shape(operator: Operator) -> tuple[int, int, int, int] | None:
    """Returns batch, m, n and k of an operator that is one product; None for others, or where sizes or dtype lack."""
    first = _PRODUCTS.get(operator.name)
    if first is None or operator.sizes is None or operator.dtype not in _ELEMENT_BYTES:
        return None
    operands = operator.sizes[first : first + 2]
    if len(operands) < 2 or not 2 <= len(operands[0]) <= 3 or len(operands[1]) != len(operands[0]):
        return None
    one, other = operands
    batch = one[0] if len(one) == 3 else 1
    shape = (batch, one[-2], other[-1], one[-1])
    return shape if 0 < min(shape) <= max(shape) < _LARGEST and other[-2] == one[-1] else None


class _Fused(NamedTuple):
    """An operator that is fused attention."""

    kernel: str
    shape: Attention[int]


def attention_shape(operator: Operator) -> _Fused | None:
    """Returns the kernel and the shape of an operator that is fused attention; None if sizes or dtype lack.

    Packed sequences, whose lengths no file says, and masks of blocks have none.
    """
    known = _attention_operators().get(operator.name.removeprefix("aten::"))
    if known is None or operator.sizes is None or operator.dtype not in _ELEMENT_BYTES:
        return None
    kernel, layout, backward = known
    operands = operator.sizes[backward : backward + 3]  # a backward pass begins with the gradient of the output
    if len(operands) < 3 or any(len(one) != 4 or not 0 < min(one) <= max(one) < _LARGEST for one in operands):
        return None
    heads, sequence = (1, 2) if layout == "heads_first" else (2, 1)
    q, k, v = operands
    causal = int(q[sequence] == k[sequence])
    sizes = (q[0], q[heads], k[heads], q[sequence], k[sequence], q[3])
    return _Fused(kernel, Attention(*sizes, causal, int(backward), v[3]))


def guesses_mask(operator: Operator) -> bool:
    """Returns whether the mask of an operator follows from its sizes."""
    found = attention_shape(operator)
    return found is not None and bool(found.shape.causal)


@cache
def _attention_operators() -> dict[str, tuple[str, Layout, bool]]:
    """Returns the kernel, the order of axes, and whether it is a backward pass, of every operator."""
    return {
        name: (kernel, layout, direction == "backward")
        for kernel, one in attention_kernels().items()
        for layout, directions in one.operators.items()
        for direction, names in directions.items()
        for name in names
        if layout != "block_mask"
    }


def add_collective(ops: OpTableBuilder, name: str, call: Call, group: int) -> int:
    """Adds the op of a collective over Program.groups[group], and returns its number.

    One of a kind that the file does not tell counts as an all-reduce, the kind of plain data parallelism.
    """
    if call.kind == Collective.SEND_RECV:
        return ops.p2p(cut(name), group, call.bytes_comm, call.dtype)
    kind = Collective.ALL_REDUCE if call.kind == Collective.NONE else call.kind
    return ops.collective(cut(name), kind, group, call.bytes_comm, call.dtype)
