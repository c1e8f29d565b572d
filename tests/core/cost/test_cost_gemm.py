"""Matrix multiplication: monotone, smooth, never faster than the device."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.common.errors import ForerunError
from forerun.core.cost.gemm import DGRAD, WGRAD, GemmRates, gemm_rates, gemm_s
from forerun.describe.cluster.catalog import device_names, load_device

DEVICES = [load_device(name) for name in device_names()]
PAIRS = [(device, dtype) for device in DEVICES for dtype in device.peak_flops]
BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "nvfp4": 0.5}
sizes = st.integers(1, 4096).map(lambda x: 16 * x)
pairs = st.sampled_from(PAIRS)


def seconds(m: int, n: int, k: int, rates: GemmRates, **more: float) -> float:
    return float(gemm_s(np.array(m), np.array(n), np.array(k), rates, **more))  # type: ignore[arg-type]


@given(pairs, sizes, sizes, sizes, st.integers(1, 64), st.integers(1, 100))
def test_a_larger_product_takes_longer(pair, m, n, k, batch, more):
    rates = gemm_rates(*pair)
    base = seconds(m, n, k, rates, batch=batch)
    assert seconds(m + 16 * more, n, k, rates, batch=batch) > base
    assert seconds(m, n + 16 * more, k, rates, batch=batch) > base
    assert seconds(m, n, k + 16 * more, rates, batch=batch) > base
    assert seconds(m, n, k, rates, batch=batch + more) > base


@given(pairs, sizes, sizes, sizes, st.integers(1, 64), st.sampled_from([0, 1, 2]), st.sampled_from([0, 2, 4]))
def test_no_product_beats_the_roofline(pair, m, n, k, batch, role, accumulate):
    device, dtype = pair
    time = seconds(m, n, k, gemm_rates(device, dtype), batch=batch, role=role, accumulate_bytes=accumulate, speed=1.5)
    stored = batch * m * n * (2 * accumulate or 2)
    moved = batch * (m + n) * k * BYTES[dtype] + stored
    assert time >= 2 * batch * m * n * k / device.peak(dtype)
    assert time >= moved / device.memory_bytes_per_s


@pytest.mark.parametrize("power", range(7, 16))
@pytest.mark.parametrize("device", ["a100", "h100", "b200", "l40s", "mi300x"])
def test_time_is_continuous_at_powers_of_two(device, power):
    rates = gemm_rates(load_device(device), "bf16")
    m = np.array([2.0**power - 1, 2.0**power, 2.0**power + 1])
    time = gemm_s(m, np.array(4096.0), np.array(4096.0), rates)
    assert np.all(np.diff(time) > 0)
    assert np.all(time[1:] / time[:-1] <= 1 + 1.3 / m[:-1])


@pytest.mark.parametrize("device", ["a100", "h100", "h200", "b200", "gb200", "l40s"])
def test_steps_of_16_rows_never_jump(device):
    rows = np.arange(1024, 16385, 16)
    time = gemm_s(rows, np.array(8192), np.array(8192), gemm_rates(load_device(device), "bf16"))
    assert np.max(time[1:] / time[:-1]) < 1.016


@given(sizes, sizes, sizes)
def test_rows_and_columns_of_the_result_are_alike(m, n, k):
    rates = gemm_rates(load_device("h100"), "bf16")
    assert seconds(m, n, k, rates) == pytest.approx(seconds(n, m, k, rates))


@pytest.mark.parametrize(
    ("device", "tflops"), [("a100", 254), ("h100", 724), ("h200", 719), ("b200", 1394), ("gb200", 1492), ("l40s", 198)]
)
def test_large_products_reach_the_typical_measured_rate(device, tflops):
    time = seconds(16384, 16384, 16384, gemm_rates(load_device(device), "bf16"))
    assert 2 * 16384**3 / time / 1e12 == pytest.approx(tflops, rel=0.07)


def test_a_variant_keeps_the_fraction_of_its_own_peaks():
    full, slow = load_device("h100"), load_device("h100-pcie")
    big = [seconds(16384, 16384, 16384, gemm_rates(device, "bf16")) for device in (full, slow)]
    thin = [seconds(16384, 16384, 16, gemm_rates(device, "bf16")) for device in (full, slow)]
    assert big[1] / big[0] == pytest.approx(full.peak("bf16") / slow.peak("bf16"), rel=0.01)
    assert thin[1] / thin[0] == pytest.approx(full.memory_bytes_per_s / slow.memory_bytes_per_s, rel=0.05)


def test_gradients_of_weights_cost_more_and_accumulating_them_more_still():
    rates = gemm_rates(load_device("h100"), "bf16")
    shape = (4096, 4096, 8192, rates)
    forward, dgrad, wgrad = (seconds(*shape, role=role) for role in (0, DGRAD, WGRAD))
    accumulating = seconds(*shape, role=WGRAD, accumulate_bytes=4)
    assert forward <= dgrad < wgrad < accumulating
    traffic = 8 * 4096**2 / rates.bytes_per_s
    assert 0.5 * traffic < accumulating - wgrad < traffic


def test_sustained_clocks_slow_compute_and_not_memory():
    rates = gemm_rates(load_device("h100"), "bf16")
    assert seconds(8192, 8192, 8192, rates, speed=0.8) == pytest.approx(
        seconds(8192, 8192, 8192, rates) / 0.8, rel=0.02
    )
    assert seconds(16, 65536, 65536, rates, speed=0.8) < 1.02 * seconds(16, 65536, 65536, rates)


def test_rows_that_do_not_start_at_16_bytes_are_slower():
    rates = gemm_rates(load_device("h100"), "bf16")
    aligned = seconds(4096, 50304, 2048, rates)
    assert seconds(4096, 50257, 2048, rates) > 3 * aligned  # of the result
    assert seconds(4096, 2048, 50257, rates, role=1) > 3 * aligned  # of the gradient that comes in
    assert seconds(50257, 2048, 4096, rates, role=2) > 3 * aligned  # of the same, as the weight's gradient reads it
    assert seconds(4095, 50304, 2048, rates) < 1.01 * aligned  # tokens are rows, of any number
    assert seconds(50304, 2048, 4095, rates, role=2) < 1.1 * aligned


def test_rows_that_are_no_multiple_of_16_are_slower_where_the_profile_says_so():
    rates = replace(gemm_rates(load_device("h100"), "fp8"), odd_rows=0.2)
    assert 1.15 < seconds(4097, 4096, 4096, rates) / seconds(4096, 4096, 4096, rates) < 1.21
    assert seconds(4112, 4096, 4096, rates) < 1.01 * seconds(4096, 4096, 4096, rates)


@given(pairs, sizes, sizes, sizes)
def test_compute_and_memory_time_overlap_between_not_at_all_and_wholly(pair, m, n, k):
    rates = gemm_rates(*pair)
    times = [seconds(m, n, k, replace(rates, overlap=power)) for power in (1.0, 1.5, 3.0, 8.0)]
    assert times == sorted(times, reverse=True)
    assert times[0] - rates.launch_s <= 2 * (times[-1] - rates.launch_s)


def test_quantising_inside_the_kernel_costs_passes_over_the_first_operand():
    plain = gemm_rates(load_device("h100"), "fp8")
    quantising = replace(plain, quant_passes=1.0)
    extra = seconds(4096, 8192, 2048, quantising) - seconds(4096, 8192, 2048, plain)
    assert extra == pytest.approx(3 * 4096 * 2048 / plain.bytes_per_s)


def test_narrow_dtypes_are_faster_and_wide_ones_slower():
    device = load_device("b200")
    times = [seconds(8192, 8192, 8192, gemm_rates(device, d)) for d in ("nvfp4", "fp8", "bf16", "tf32", "fp32")]
    assert times == sorted(times)
    assert gemm_rates(device, "fp16").flops_per_s == gemm_rates(device, "bf16").flops_per_s


def test_bf16_without_a_bf16_unit_runs_as_fp16_tf32_as_fp32_and_fp8_is_refused():
    volta = load_device("v100")
    assert gemm_rates(volta, "tf32") == gemm_rates(volta, "fp32")
    assert gemm_rates(volta, "bf16").flops_per_s == gemm_rates(volta, "fp16").flops_per_s
    with pytest.raises(ForerunError, match="has no fp8 matrix unit"):
        gemm_rates(volta, "fp8")


def test_padding_helps_unaligned_products_of_compiled_code_alone():
    """Rows off 16 bytes are slow; TorchInductor copies them into aligned ones where that is faster."""
    rates = gemm_rates(load_device("h100-sxm"), "bf16")
    aligned, odd = 50304, 50257
    size = (8192.0, 4096.0)

    def time_s(vocabulary, pads):
        return float(gemm_s(size[0], vocabulary, size[1], rates, pads=pads))

    copies = 2 * (size[0] + odd) * size[1] * 2 / rates.bytes_per_s
    assert time_s(aligned, True) == time_s(aligned, False)
    assert time_s(odd, True) == pytest.approx(time_s(aligned, False) + copies, rel=0.01)
    assert time_s(odd, False) > 2 * time_s(odd, True)


def test_products_that_move_more_than_they_compute_are_left_as_they_are():
    rates = replace(gemm_rates(load_device("h100-sxm"), "bf16"), unaligned=0.5)
    assert float(gemm_s(8.0, 4097.0, 4096.0, rates, pads=True)) == float(gemm_s(8.0, 4097.0, 4096.0, rates))
