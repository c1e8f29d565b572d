"""Time of convolutions: implicit matrix products, priced as explicit ones (cost/gemm.py) with three differences.

* Operands and result are read and written once, however many taps of the filter use an element.
* The gradient of the input is a product with result (positions, channels) and depth work / (2 positions channels), as
  in cuDNN's implicit GEMM (NVIDIA, "Convolutional Layers User's Guide", table 1).
* A weight gradient is small, and its depth is the number of positions. The kernel splits the depth into s parts, whose
  fp32 results it adds up: work (A s + W) (K / s + P) for a result of A elements, depth K, an idle wave of W
  outputs and a pipeline of P to fill, least at s = sqrt(W K / (A P)).
"""

from __future__ import annotations

import numpy as np

from forerun.core.cost.gemm import DGRAD, WGRAD, GemmRates, overlapped_s
from forerun.core.cost.kernel_constants import kernel_constants
from forerun.core.program.kinds import Gemm
from forerun.core.program.types import F64, I64


def convolution_s(shape: Gemm[I64], rates: GemmRates, speed: float = 1.0) -> F64:
    """Returns the seconds of convolutions, (n,), as the implicit products `shape`; `speed` multiplies the rate."""
    role, outputs = shape.role, shape.batch * shape.m * shape.n
    by_role = np.where(role == WGRAD, rates.wgrad_rate, np.where(role == DGRAD, rates.dgrad_rate, 1.0))
    rate = np.minimum(rates.flops_per_s * speed * by_role, rates.peak_flops_per_s)
    work = 1.0 * outputs * shape.k
    result = np.where(shape.result_bytes > 0, shape.result_bytes / rates.output_bytes, outputs)
    depth = work / result
    split = np.where(
        role == WGRAD, np.maximum(1.0, np.sqrt(rates.wave_outputs * depth / (result * rates.depth_pad))), 1.0
    )
    compute = 2.0 * (result * split + rates.wave_outputs) * (depth / split + rates.depth_pad) / rate
    ideal = 2.0 * work / rate
    compute = compute * (1.0 + rates.slowdown * ideal / (ideal + rates.slowdown_tau_s))
    partial = np.where(split > 1.0, result * split * kernel_constants().convolution.partial_sum_bytes, 0.0)
    memory = (shape.operand_bytes + result * rates.output_bytes + partial) / rates.bytes_per_s
    return np.asarray(rates.launch_s + overlapped_s(compute, memory, rates), np.float64)
