"""Convolutions: bounded by the roofline, alike in all three roles, and slower where there is more to do."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.core.cost.convolution import convolution_s
from forerun.core.cost.gemm import gemm_rates, gemm_s
from forerun.core.program.kinds import Gemm
from forerun.describe.cluster.catalog import load_device
from forerun.describe.model.layer_types import conv2d
from forerun.describe.model.layered import Matmul

A100 = gemm_rates(load_device("a100"), "fp16")
ROLES = ("forward", "backward", "weight_backward")
sizes = st.builds(
    lambda batch, channels, out, side, kernel, stride: (batch, (8 * channels, side, side), 8 * out, kernel, stride),
    st.integers(1, 512),
    st.integers(1, 128),
    st.integers(1, 128),
    st.sampled_from([7, 14, 28, 56, 112]),
    st.sampled_from([1, 3, 5, 7]),
    st.sampled_from([1, 2]),
)


def kernels(batch, shape, channels, kernel, stride):
    layer = conv2d("c", shape, channels, (kernel, kernel), stride)
    return {role: next(k for k in getattr(layer, role)(batch) if isinstance(k, Matmul)) for role in ROLES}


def seconds(kernel, role, rates=A100, speed=1.0):
    width = int(rates.input_bytes)
    read, written = kernel.elements_read * width, kernel.elements_written * width
    shape = Gemm(kernel.m, kernel.n, kernel.k, kernel.groups, role, operand_bytes=read, result_bytes=written)
    return float(convolution_s(shape, rates, speed))


@given(sizes)
def test_no_convolution_beats_the_roofline(size):
    for role, kernel in enumerate(kernels(*size).values()):
        time = seconds(kernel, role)
        assert time > kernel.flops / A100.peak_flops_per_s
        assert time > 2 * (kernel.elements_read + kernel.elements_written) / load_device("a100").memory_bytes_per_s


@given(sizes)
def test_more_images_take_longer(size):
    batch, *rest = size
    for role, (one, more) in enumerate(
        zip(kernels(batch, *rest).values(), kernels(batch + 1, *rest).values(), strict=True)
    ):
        assert seconds(one, role) < seconds(more, role)


def test_large_convolutions_run_at_the_rate_of_products():
    made = kernels(256, (2048, 28, 28), 2048, 1, 1)
    for role, kernel in enumerate(made.values()):
        explicit = float(gemm_s(256 * 28 * 28, 2048, 2048, A100, role=role))
        assert seconds(kernel, role) == pytest.approx(explicit, rel=0.05)


def test_the_gradient_of_an_input_costs_what_the_output_does():
    made = kernels(256, (64, 56, 56), 64, 3, 1)
    assert seconds(made["backward"], 1) == pytest.approx(seconds(made["forward"], 0), rel=0.05)


def test_a_deep_and_small_weight_gradient_is_split():
    """64 x 64 results of 800,000 positions: one tile's depth would leave all but one multiprocessor idle."""
    kernel = kernels(256, (64, 56, 56), 64, 1, 1)["weight_backward"]
    assert (kernel.m, kernel.n, kernel.k) == (64, 64, 256 * 56 * 56)
    whole = float(gemm_s(64, 64, 256 * 56 * 56, A100, role=2))
    read_s = 2 * kernel.elements_read / A100.bytes_per_s
    assert read_s < seconds(kernel, 2) < 1.2 * read_s
    assert seconds(kernel, 2) < 0.7 * whole


def test_what_older_files_say_of_a_convolution_is_enough():
    """Programs saved without the result's bytes: those of the product stand for them."""
    kernel = kernels(64, (64, 56, 56), 64, 1, 1)["forward"]
    older = Gemm(kernel.m, kernel.n, kernel.k, operand_bytes=2 * kernel.elements_read)
    known = replace(older, result_bytes=2 * kernel.elements_written)
    assert convolution_s(known, A100) == convolution_s(older, A100)
