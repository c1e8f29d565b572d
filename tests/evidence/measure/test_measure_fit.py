"""Fits find the constants that made the measurements, and say what is wrong with a table."""

from pathlib import Path

import numpy as np
import pytest

from forerun.common.errors import ForerunError
from forerun.core.cost.attention import attention_s
from forerun.core.cost.gemm import gemm_s
from forerun.core.cost.profile import AttentionEntry, GemmEntry, load_profile
from forerun.core.network.constants import NodeOp
from forerun.core.program.types import Collective
from forerun.evidence.measure.fit import (
    Peaks,
    _Parameter,
    attention_constants,
    attention_shapes,
    collective_s,
    fit_attention,
    fit_bytes,
    fit_collective,
    fit_gemm,
    gemm_constants,
    mape,
)

PEAKS = Peaks(tflops=989.4, hbm_gb_s=3350, multiprocessors=132)
GEMM = GemmEntry(800, 2500, 3.0, 0.12, 120, 0.2, 900, "made up")
HEAD = AttentionEntry(600, 300, 9, 0.3)
OP = NodeOp(5.0, 1.2, 6.0, 1.5, 180, 15.0, 1.0, 370, 0.4)
TABLE = Path(__file__).resolve().parents[3].parent / "shared" / "calibration" / "gemm.parquet"


def gemms(noise: float = 0.0) -> dict[str, np.ndarray]:
    size = np.array([128, 256, 512, 1024, 2048, 4096, 8192, 16384])
    m, n, k = (axis.ravel() for axis in np.meshgrid(size, size, size))
    wobble = np.exp(noise * np.random.default_rng(0).standard_normal(len(m)))
    return {"m": m, "n": n, "k": k, "latency_us": gemm_s(m, n, k, gemm_constants(GEMM, PEAKS)) * 1e6 * wobble}


def heads() -> dict[str, np.ndarray]:
    batch, seq, count = (x.ravel() for x in np.meshgrid([1, 2, 8], [128, 512, 2048, 4096, 16384], [8, 32, 64]))
    data = {"batch": batch, "seq": seq, "heads": count, "kv_heads": np.maximum(count // 4, 1)}
    data["head_dim"] = np.full(len(seq), 128)
    data["latency_us"] = attention_s(attention_shapes(data), attention_constants(HEAD, PEAKS)) * 1e6
    return data


def transfers() -> dict[str, np.ndarray]:
    ranks, size = (x.ravel() for x in np.meshgrid([2, 4, 8], 2.0 ** np.arange(9, 31)))
    time_us = collective_s(Collective.ALL_GATHER, OP, ranks, size) * 1e6
    return {"num_gpus": ranks, "message_bytes": size, "latency_us": time_us}


def test_products_give_back_their_constants():
    entry, error = fit_gemm(gemms(), PEAKS, "here")
    assert error < 0.1
    assert entry.p_tflops == pytest.approx(GEMM.p_tflops, rel=0.01)
    assert entry.hbm_gb_s == pytest.approx(GEMM.hbm_gb_s, rel=0.01)
    assert entry.depth_pad == pytest.approx(GEMM.depth_pad, rel=0.05)
    assert entry.source == "here"


def test_noise_moves_the_rate_of_long_kernels_little():
    entry, error = fit_gemm(gemms(noise=0.02), PEAKS, "here")
    assert 1 < error < 2
    assert entry.p_tflops / (1 + entry.slowdown) == pytest.approx(GEMM.p_tflops / (1 + GEMM.slowdown), rel=0.03)


def test_attention_gives_back_its_constants():
    entry, passes, error = fit_attention(heads(), PEAKS)
    assert passes == 0
    assert error < 0.1
    assert entry.p_tflops == pytest.approx(HEAD.p_tflops, rel=0.01)
    assert entry.extra_keys == pytest.approx(HEAD.extra_keys, rel=0.03)


def test_a_serving_cache_is_kept_out_of_the_constants():
    data = heads()
    passes = 4.0 * data["batch"] * data["seq"] * data["kv_heads"] * 128 / (PEAKS.hbm_gb_s * 1e9) * 1e6
    slower = data | {"latency_us": data["latency_us"] + 3 * passes}
    entry, found, error = fit_attention(slower, PEAKS, kv_cache=True)
    assert found == pytest.approx(3, rel=0.02)
    assert error < 0.2
    assert entry.p_tflops == pytest.approx(HEAD.p_tflops, rel=0.01)


def test_collectives_are_reproduced():
    op, error = fit_collective(Collective.ALL_GATHER, transfers(), 450)
    assert error < 1
    assert op.bw3 == pytest.approx(OP.bw3, rel=0.03)


def test_a_kernel_of_another_rate_gives_the_same_constants():
    data = heads()
    speed = np.where(data["batch"] > 1, 0.5, 1.0)
    times = attention_s(attention_shapes(data), attention_constants(HEAD, PEAKS), speed) * 1e6
    entry, _, error = fit_attention(data | {"latency_us": times, "speed": speed}, PEAKS)
    assert error < 0.1
    assert entry.p_tflops == pytest.approx(HEAD.p_tflops, rel=0.01)


def test_batched_products_give_back_their_constants():
    data = gemms()
    batch = np.where(data["m"] < 1024, 16, 1)
    times = gemm_s(data["m"], data["n"], data["k"], gemm_constants(GEMM, PEAKS), batch) * 1e6
    entry, error = fit_gemm(data | {"batch": batch, "latency_us": times}, PEAKS, "here")
    assert error < 0.1
    assert entry.p_tflops == pytest.approx(GEMM.p_tflops, rel=0.01)


def test_bytes_give_back_launch_and_bandwidth():
    size = 2.0 ** np.arange(12, 31)
    launch, share, error = fit_bytes({"bytes": size, "latency_us": 3.0 + size / (0.7 * 3350e9) * 1e6}, 3350)
    assert (launch, share) == pytest.approx((3.0, 0.7), rel=1e-3)
    assert error < 0.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: {name: data[name] for name in ("m", "n", "k")}, "column 'latency_us' is missing"),
        (lambda data: {name: column[:5] for name, column in data.items()}, "5 rows are too few"),
        (lambda data: data | {"latency_us": -data["latency_us"]}, "must be a positive number"),
        (lambda data: data | {"latency_us": data["latency_us"] * np.nan}, "must be a positive number"),
    ],
)
def test_a_bad_table_is_refused(change, message):
    with pytest.raises(ForerunError, match=message):
        fit_gemm(change(gemms()), PEAKS, "here")


def test_mixed_head_sizes_are_refused():
    data = heads()
    mixed = data | {"head_dim": np.where(data["seq"] > 1000, 64, 128)}
    with pytest.raises(ForerunError, match="fit one at a time"):
        fit_attention(mixed, PEAKS)


@pytest.mark.skipif(not TABLE.exists(), reason="the measured kernels are not beside this checkout")
def test_the_shipped_constants_come_out_again_and_hold_on_rows_left_out():
    table = pytest.importorskip("pandas").read_parquet(TABLE)
    rows = table[(table.device == "h100_sxm") & (table.dtype == "bfloat16")]
    fold = np.random.default_rng(0).random(len(rows)) < 0.3
    entry, _ = fit_gemm(rows[~fold], PEAKS, "here")
    shipped = load_profile("h100").gemm["bf16"]
    assert entry.p_tflops == pytest.approx(shipped.p_tflops, rel=0.03)
    assert entry.hbm_gb_s == pytest.approx(shipped.hbm_gb_s, rel=0.04)
    left_out = rows[fold & (rows.m >= 2048) & (rows.n >= 1024) & (rows.k >= 1024)]
    m, n, k, latency_us = (left_out[name].to_numpy(float) for name in ("m", "n", "k", "latency_us"))
    assert mape(gemm_s(m, n, k, gemm_constants(entry, PEAKS)), latency_us * 1e-6) < 3.2


@pytest.mark.parametrize(("of", "scale"), [("", 1.0), ("tflops", 500.0)])
def test_starts_are_fractions_of_what_they_name(of, scale):
    found = _Parameter("p", 0.5, 0.25, 2.0, of=of).on({"tflops": 500.0, "hbm_gb_s": 2000.0})
    assert found == _Parameter("p", 0.5 * scale, 0.25 * scale, 2.0 * scale)
