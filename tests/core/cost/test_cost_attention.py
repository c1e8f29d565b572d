"""Fused attention: monotone, bounded, and additive over pieces of a sequence."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.common.errors import UnknownName
from forerun.core.cost.attention import attention_rates, attention_s
from forerun.core.program.kinds import ATTENTION_BACKWARD_FLOPS, Attention
from forerun.describe.cluster.catalog import load_device
from forerun.describe.kernels.attention import attention_kernels

CALIBRATED = ("a100", "h100", "h200", "b200", "gb200", "l40s")
devices = st.sampled_from([*CALIBRATED, "v100", "mi300x", "a6000"])
FUSED = [one for one in attention_kernels().values() if one.form == "fused"]
kernels = st.sampled_from(sorted(one.name for one in FUSED))
heads = st.sampled_from([1, 4, 8, 32])


def seconds(
    device: str = "h100",
    kernel: str = "flash3",
    batch: int = 1,
    heads: int = 32,
    kv_heads: int = 8,
    seq_q: int = 4096,
    seq_kv: int = 4096,
    head_dim: int = 128,
    causal: bool = True,
    backward: bool = False,
    v_head_dim: int = 0,
    speed: float = 1.0,
) -> float:
    sizes = (batch, heads, kv_heads, seq_q, seq_kv, head_dim, causal, backward, v_head_dim or head_dim)
    rates = attention_rates(load_device(device), kernel, head_dim)
    return float(attention_s(Attention(*(np.float64(size) for size in sizes)), rates, speed))


@given(devices, kernels, heads, st.integers(1, 16), st.integers(1, 65536), st.booleans(), st.booleans())
def test_more_work_never_takes_less_time(device, kernel, kv_heads, batch, seq, causal, backward):
    case = {"device": device, "kernel": kernel, "kv_heads": kv_heads, "causal": causal, "backward": backward}
    base = seconds(**case, batch=batch, seq_q=seq, seq_kv=seq)
    assert seconds(**case, batch=batch + 1, seq_q=seq, seq_kv=seq) >= base
    assert seconds(**case, batch=batch, seq_q=seq + 1, seq_kv=seq + 1) >= base
    assert seconds(**case, batch=batch, seq_q=seq, seq_kv=seq + 1) >= base
    assert seconds(**case, batch=batch, heads=64, seq_q=seq, seq_kv=seq) >= base
    assert seconds(**(case | {"causal": False}), batch=batch, seq_q=seq, seq_kv=seq) >= base
    assert seconds(**(case | {"backward": True}), batch=batch, seq_q=seq, seq_kv=seq) >= base


@given(devices, kernels, st.integers(8, 512), st.integers(128, 131072), st.booleans(), st.booleans())
def test_no_kernel_beats_the_roofline(device, kernel, head_dim, seq, causal, backward):
    time = seconds(
        device, kernel, seq_q=seq, seq_kv=seq, head_dim=head_dim, causal=causal, backward=backward, speed=3.0
    )
    flops = 4 * 32 * seq * seq * head_dim * (0.5 if causal else 1.0) * (ATTENTION_BACKWARD_FLOPS if backward else 1.0)
    moved = 2 * 2 * seq * head_dim * (32 + 8)
    spec = load_device(device)
    assert time >= flops / max(spec.peak_flops.get("bf16", 0), spec.peak_flops.get("fp16", 0))
    assert time >= moved / spec.memory_bytes_per_s


@given(devices, kernels, st.integers(1, 63).map(lambda x: 8 * x), st.booleans())
def test_larger_heads_take_longer(device, kernel, head_dim, backward):
    case = {"device": device, "kernel": kernel, "backward": backward, "seq_q": 16384, "seq_kv": 16384}
    assert seconds(**case, head_dim=head_dim + 8) >= seconds(**case, head_dim=head_dim) * 0.999


@pytest.mark.parametrize("seq", [1024, 2048, 4096, 8192, 16384, 65536])
def test_time_is_continuous_at_powers_of_two(seq):
    below, at, above = (seconds(seq_q=s, seq_kv=s) for s in (seq - 1, seq, seq + 1))
    assert below < at < above < at * (1 + 2.1 / seq)


def test_a_causal_mask_halves_long_sequences():
    assert seconds(seq_q=65536, seq_kv=65536) / seconds(seq_q=65536, seq_kv=65536, causal=False) == pytest.approx(
        0.5, abs=0.02
    )


def test_pieces_of_a_sequence_cost_about_as_much_as_the_whole():
    whole = seconds(seq_q=32768, seq_kv=32768)
    own = seconds(seq_q=8192, seq_kv=8192)
    far = seconds(seq_q=8192, seq_kv=8192, causal=False)
    assert 0.95 * whole < 4 * own + 6 * far < 1.1 * whole


def test_long_kernels_run_slower_and_no_piece_of_a_sequence_slower_than_they():
    rates = replace(attention_rates(load_device("h100"), "flash3", 128), slowdown=0.2, slowdown_tau_s=4e-3)
    length = 2 ** np.arange(10, 19)
    shapes = Attention(1, 32, 8, length, length, 128, causal=1, backward=0, v_head_dim=128)
    ratio = attention_s(shapes, rates) / attention_s(shapes, replace(rates, slowdown=0.0))
    assert np.all(np.diff(ratio) > 0)
    assert ratio[0] < 1.01
    assert 1.19 < ratio[-1] < 1.2


def test_backward_runs_two_and_a_half_times_the_flops_at_a_lower_rate():
    rates, pairs = attention_rates(load_device("h100"), "flash3", 128), 32768 / 2
    ratio = seconds(seq_q=32768, seq_kv=32768, backward=True) / seconds(seq_q=32768, seq_kv=32768)
    longer = (pairs + rates.backward_extra_keys) / (pairs + rates.extra_keys)
    assert ratio == pytest.approx(ATTENTION_BACKWARD_FLOPS / rates.backward_rate * longer, rel=0.03)


def test_head_sizes_between_templates_pay_for_the_next_one():
    assert seconds(kernel="flash2", head_dim=108) == pytest.approx(seconds(kernel="flash2", head_dim=128), rel=0.01)
    assert seconds(kernel="flash2", head_dim=96) < seconds(kernel="flash2", head_dim=108)


def test_narrow_values_cost_less_than_wide_ones():
    mla = seconds(head_dim=192, v_head_dim=128, kv_heads=32)
    assert seconds(head_dim=128, kv_heads=32) < mla < seconds(head_dim=192, kv_heads=32)


@pytest.mark.parametrize("device", CALIBRATED)
def test_calibrated_head_sizes_are_flagged(device):
    assert attention_rates(load_device(device), "flash2", 128).calibrated
    assert not attention_rates(load_device(device), "flash2", 80).calibrated


def test_every_kernel_has_rates_that_a_kernel_can_have():
    for kernel in FUSED:
        for architecture in ("volta", "ampere", "ada", "hopper", "blackwell", "cdna3", "another"):
            rate = kernel.rate_on(architecture)
            for head_dim in (32, 64, 96, 128, 192, 256):
                forward, backward = rate.at(head_dim)
                assert 0 < forward <= 1.4, "the profile's kernels are nearly the fastest ones"
                assert 0 < backward <= 1.1


def test_an_unknown_kernel_is_an_error_that_lists_the_known_ones():
    with pytest.raises(UnknownName, match=r"unknown attention kernel 'flash9'.*flash2.*naive"):
        attention_rates(load_device("h100"), "flash9", 128)


@pytest.mark.parametrize(("device", "peak_tflops"), [("a100", 156 / 3), ("h100", 494.5 / 3)])
def test_the_memory_efficient_kernel_multiplies_fp32_by_three_products_in_tf32(device, peak_tflops):
    """On an RTX 5060 Ti a profile of torch's kernel counts three operations in tf32 for each in fp32."""
    of = load_device(device)
    assert of.peak("tf32") == pytest.approx(3e12 * peak_tflops, rel=1e-3)
    for dtype in ("fp32", "tf32"):
        assert attention_rates(of, "efficient", 64, dtype=dtype).peak_flops_per_s == pytest.approx(
            peak_tflops * 1e12, rel=1e-3
        )
    assert attention_rates(of, "triton", 64, dtype="fp32").peak_flops_per_s == of.peak("fp32")


def test_short_sequences_in_fp32_pay_for_their_softmax_as_in_bf16():
    """A query of 16 keys takes some times as long as in bf16, and not by the rate of products in fp32 longer."""
    device = load_device("a100")
    shape = Attention(*(np.array([n]) for n in (2048, 2, 2, 16, 16, 8, 1, 0, 8)))
    wide, narrow = (attention_rates(device, "efficient", 8, dtype=dtype) for dtype in ("fp32", "bf16"))
    slower = narrow.flops_per_s / wide.flops_per_s
    assert wide.extra_keys / wide.flops_per_s == pytest.approx(
        narrow.extra_keys / narrow.flops_per_s + 32 / wide.flops_per_s
    )
    assert attention_s(shape, wide)[0] < 0.6 * slower * attention_s(shape, narrow)[0]
