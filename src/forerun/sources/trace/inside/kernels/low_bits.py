"""Rules of the products of bitsandbytes, whose weights have 4 or 8 bits.

Its product of weights of 4 bits restores them in the dtype of the input and multiplies those, as it does for all but a
few rows on every device (`_gemm_4bit_use_custom_cuda`). Products in 8 bits run on the unit of 8-bit elements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

from forerun.sources.trace.inside.kernels.gemm import product
from forerun.sources.trace.inside.kernels.tensors import Call, Kernel, all_bytes, bytes_of, dtype_name, memory, shape_of


def _four_bits(call: Call) -> list[Kernel]:
    x, packed, (n, k) = call.args[0], call.args[1], call.args[2]
    restored = n * k * x.itemsize
    scales = [call.argument(name) for name in ("absmax", "absmax_8bit", "absmax_code", "absmax_offset")]
    made = memory(call.named("dequantize_4bit"), bytes_of(packed) + all_bytes(scales), restored, 1, dtype_name(x))
    products = product(call, prod(shape_of(x)[:-1]), n, k, 1, x, call.out)
    return made + [replace(one, workspace_bytes=restored) for one in products]


def _eight_bits(first: int) -> Callable[[Call], list[Kernel]]:
    """Returns the rule of an operator whose inputs in 8 bits are its arguments `first` and the next one."""

    def rule(call: Call) -> list[Kernel]:
        x, weight = call.args[first], call.args[first + 1]
        n, k = shape_of(weight)
        out = call.out[0] if isinstance(call.out, tuple) else call.out
        return product(call, prod(shape_of(x)[:-1]), n, k, 1, x, out)

    return rule


LOW_BIT_RULES = {
    "bitsandbytes::gemm_4bit": _four_bits,
    "bitsandbytes::int8_linear_matmul": _eight_bits(0),
    "bitsandbytes::int8_scaled_mm": _eight_bits(0),
    "bitsandbytes::int8_mixed_scaled_mm": _eight_bits(1),
}
