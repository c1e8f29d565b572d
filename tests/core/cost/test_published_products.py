"""Large bf16 products on devices without a table of benchmarks, against what their users published."""

import numpy as np
import pytest

from forerun.core.cost.clock import gemm_in_steps
from forerun.core.cost.gemm import gemm_s
from forerun.describe.cluster.catalog import load_device

SIZES = (4096, 8192, 10240)
PUBLISHED_TFLOPS = {
    "h20": (133.4, 138.6, 142.3),  # zzc0721/torch-performance-test-data, issue 77
    "rtx-pro-6000": (384.2, 383.8, 360.5),  # issues 160 and 161, the mean of the two parts
    "rtx-4090": (151.5, 160.2, 158.5),  # issue 78
    "a40": (115.2, 110.6, 122.3),  # issue 185
    "l20": (111.8, 114.1, 108.0),  # issue 107
}


@pytest.mark.parametrize("name", PUBLISHED_TFLOPS)
def test_a_product_takes_as_long_as_published(name: str) -> None:
    rates, clock = gemm_in_steps(load_device(name), "bf16")
    n = np.array(SIZES, dtype=float)
    tflops = 2 * n**3 / gemm_s(n, n, n, rates, speed=clock) / 1e12
    assert np.abs(tflops / PUBLISHED_TFLOPS[name] - 1).mean() < 0.07
    assert tflops.max() < load_device(name).peak("bf16") / 1e12
