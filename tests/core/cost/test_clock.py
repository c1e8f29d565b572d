"""The clock that a power limit leaves to a long step."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.core.cost.attention import attention_rates
from forerun.core.cost.clock import attention_in_steps, clock, gemm_in_steps, is_known, power_constants
from forerun.core.cost.gemm import gemm_rates
from forerun.describe.cluster.catalog import load_device

H200 = load_device("h200")


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        # monitored for a second at the power limit (ai-dynamo/aiconfigurator), 10,000 warm-ups (Azure)
        ("h200", "bf16", 712),
        ("b200", "bf16", 1430),
        ("gb200", "bf16", 1550),
        ("h100", "fp8", 1403),
        # a short benchmark of an A100 of 400 W is not slower when it lasts longer
        ("a100-sxm-80gb", "bf16", 252),
    ],
)
def test_products_at_the_power_limit_reach_what_long_benchmarks_measure(name, dtype, tflops):
    rates, speed = gemm_in_steps(load_device(name), dtype)
    assert rates.slowdown == 0.0
    assert rates.flops_per_s * speed == pytest.approx(tflops * 1e12, rel=0.02)


@pytest.mark.parametrize(("name", "measured"), [("a100-pcie-80gb", 0.898), ("a100-pcie-40gb", 0.838)])
def test_smaller_limits_of_one_chip_cost_clock_with_the_cube_root_of_power(name, measured):
    assert clock(load_device(name), "bf16") == pytest.approx(measured, rel=0.01)


@given(st.floats(150, 2000), st.floats(1.01, 2.0))
def test_more_power_never_slows_down(power_w, more):
    little, much = (clock(replace(H200, power_w=w), "bf16") for w in (power_w, power_w * more))
    assert 0 < little <= much <= 1
    draw = power_constants().architectures["hopper"]
    if power_constants().least_clock < little and much < 1:
        ratio = (power_w * more - draw.idle_w) / (power_w - draw.idle_w)
        assert much / little == pytest.approx(ratio ** (1 / 3))


def test_a_limit_below_idle_leaves_the_lowest_clock():
    assert clock(replace(H200, power_w=50.0), "bf16") == power_constants().least_clock > 0


def test_block_scaled_fp8_runs_at_the_clock_of_fp8_and_others_at_that_of_bf16():
    assert gemm_in_steps(H200, "fp8")[1] == clock(H200, "fp8") > clock(H200, "bf16")
    assert gemm_in_steps(load_device("b200"), "mxfp8")[1] == clock(load_device("b200"), "fp8")
    assert gemm_in_steps(H200, "fp32")[1] == clock(H200, "bf16") == attention_in_steps(H200, "flash2", 128)[1]


def test_a_device_without_matrix_units_of_two_bytes_keeps_its_clock():
    assert clock(replace(H200, peak_flops={"fp32": 6e13}), "fp32") == 1.0


def test_a_hot_host_is_slower_still():
    hot = replace(H200, sustained=0.8)
    assert gemm_in_steps(hot, "bf16")[1] == pytest.approx(0.8 * clock(H200, "bf16"))


def test_an_architecture_of_unknown_draw_slows_down_as_its_benchmark_did():
    device = load_device("l40s")
    assert not is_known(device)
    assert clock(device, "bf16") is None
    assert gemm_in_steps(device, "bf16") == (gemm_rates(device, "bf16"), 1.0)
    assert attention_in_steps(device, "flash2", 64) == (attention_rates(device, "flash2", 64), 1.0)
