"""Profiles at another device's peaks, new constants in old profiles, and errors of a fit, with figures by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forerun.common.errors import ForerunError
from forerun.core.cost.profile import AttentionEntry, GemmEntry, Reference, load_profile
from forerun.core.network.constants import NodeOp
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.kernels.attention import attention_kernel
from forerun.evidence.measure import calibrate, parts
from forerun.evidence.measure.calibrate import Change
from forerun.evidence.measure.fit import Peaks, gemm_weights, mape
from forerun.evidence.measure.new_profile import NewPart, at_device, rounded, rounded_entry, with_parts, with_roles
from forerun.evidence.measure.parts import Fitted, Part, kernel_rate, nearest, parts_of, peaks_of, present, rows_of
from forerun.evidence.measure.samples import Samples

H100 = load_cluster("h100-sxm")
OLD = at_device(load_profile("h100"), H100)
SAMPLES = Samples(of_kernels="k.csv", of_network="n.log")


@pytest.mark.parametrize(
    ("value", "digits", "expected"),
    [
        (1.23456, 4, 1.235), (123456.0, 4, 123500.0), (0.5, 4, 0.5), (2e-6, 4, 2e-6),
        (9.9e-7, 4, 0.0), (-9.9e-7, 4, 0.0), (-0.12345678, 4, -0.1235), (989.4321987, 6, 989.432),
    ],
)  # fmt: skip
def test_constants_have_four_digits_and_what_is_nearly_nothing_is_nothing(
    value: float, digits: int, expected: float
) -> None:
    assert rounded(value, digits) == expected


def test_an_entry_is_rounded_without_its_words() -> None:
    entry = GemmEntry(700.12345, 2500.06, 4.00004, 0.123456, 110.0, 0.1, 900.0, "a source")
    assert rounded_entry(entry) == GemmEntry(700.1, 2500.0, 4.0, 0.1235, 110.0, 0.1, 900.0, "a source")


def _half(share: float) -> Any:
    """The H100's cluster with a share of its peaks."""
    device = H100.device
    flops = {dtype: share * peak for dtype, peak in device.peak_flops.items()}
    return replace(
        H100, device=replace(device, peak_flops=flops, memory_bytes_per_s=0.5 * device.memory_bytes_per_s, name="half")
    )


def test_rates_follow_the_peaks_of_a_device() -> None:
    found = at_device(OLD, _half(0.25))
    assert found.name == "half"
    assert found.reference.hbm_gb_s == pytest.approx(0.5 * OLD.reference.hbm_gb_s, rel=1e-5)
    for dtype in ("bf16", "fp8"):
        entry = OLD.gemm[dtype]
        assert found.reference.peak_tflops[dtype] == pytest.approx(0.25 * OLD.reference.peak_tflops[dtype], rel=1e-5)
        assert found.gemm[dtype].p_tflops == pytest.approx(0.25 * entry.p_tflops, rel=1e-3)
        assert found.gemm[dtype].hbm_gb_s == pytest.approx(0.5 * entry.hbm_gb_s, rel=1e-3)
        assert found.gemm[dtype].launch_us == entry.launch_us
    for size, head in OLD.attention.head_dim.items():
        assert found.attention.head_dim[size].p_tflops == pytest.approx(0.25 * head.p_tflops, rel=1e-3)
    assert found.collectives == OLD.collectives


def test_a_rate_never_passes_the_peak_of_a_device() -> None:
    full = replace(OLD, gemm={"bf16": replace(OLD.gemm["bf16"], p_tflops=OLD.reference.peak_tflops["bf16"])})
    peaks = dict.fromkeys(H100.device.peak_flops, 1235.67 * 1000000000000.0)
    found = at_device(full, replace(H100, device=replace(H100.device, peak_flops=peaks)))
    assert found.gemm["bf16"].p_tflops == found.reference.peak_tflops["bf16"] == 1235.67  # four digits are 1236


def test_fp16_stands_in_where_a_device_has_no_bf16() -> None:
    v100 = load_cluster("v100")
    assert "bf16" not in v100.device.peak_flops
    found = at_device(load_profile(v100.device.cost_profile), v100)
    assert found.reference.peak_tflops["bf16"] == pytest.approx(v100.device.peak_flops["fp16"] / 1e12, rel=1e-5)
    assert peaks_of(v100.device, "bf16").tflops == pytest.approx(v100.device.peak_flops["fp16"] / 1e12)


def test_collectives_follow_the_rate_of_nvlink_and_stay_without_it() -> None:
    faster = replace(H100.links[0], bytes_per_s=2 * H100.links[0].bytes_per_s)
    assert OLD.collectives is not None
    found = at_device(OLD, replace(H100, links=(faster, *H100.links[1:]))).collectives
    assert found is not None
    assert found.link_gb_s == pytest.approx(2 * OLD.collectives.link_gb_s)
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        new, old = getattr(found, name), getattr(OLD.collectives, name)
        assert (new.bw1, new.bw2, new.bw3) == pytest.approx((2 * old.bw1, 2 * old.bw2, 2 * old.bw3), rel=1e-3)
        assert (new.a_us, new.h_us, new.d2, new.kappa) == (old.a_us, old.h_us, old.d2, old.kappa)
    assert at_device(OLD, load_cluster("l40s")).collectives == OLD.collectives


def _part(section: str, entry: Any, left_out: float | None = None) -> NewPart:
    return NewPart(section, entry, 20, 1.26, left_out)


def test_new_constants_take_their_places() -> None:
    gemm = GemmEntry(5000.0, 9999.0, 4.12345, 0.15, 110, 0.1, 900, "made up")
    entries = [
        _part("gemm.fp8", gemm, 2.04),
        _part("attention.head_dim.128", AttentionEntry(5000.0, 300, 9, 0.3)),
        _part("memory_bound", (2.51239, 0.71239)),
        _part("host_copy", (9.51239, 0.81239)),
        _part("collectives.all_gather", NodeOp(6.0, 1.2, 6.0, 1.5, 180, 15.0, 1.0, 340.123, 0.4)),
    ]
    found = with_parts(OLD, entries, SAMPLES, H100)
    fp8, old = found.gemm["fp8"], OLD.gemm["fp8"]
    assert (fp8.p_tflops, fp8.launch_us) == (found.reference.peak_tflops["fp8"], 4.123)
    assert fp8.hbm_gb_s == OLD.reference.hbm_gb_s
    assert fp8.source == "forerun calibrate on k.csv: 20 rows, mean error 1.3 % in sample, 2.0 % on shapes left out"
    assert (fp8.gradient_slowdown, fp8.own_wgrad_rate) == (old.gradient_slowdown, old.own_wgrad_rate)
    assert old.gradient_slowdown > 0
    head = found.attention.head_dim[128]
    assert (head.p_tflops, head.extra_keys) == (OLD.reference.peak_tflops["bf16"], 300)
    assert found.attention.head_dim[64] == OLD.attention.head_dim[64]
    one = "forerun calibrate on k.csv: 128: 20 rows, mean error 1.3 % in sample; others: "
    assert found.attention.source == one + OLD.attention.source
    assert (found.memory_bound.launch_us, found.memory_bound.hbm_fraction) == (2.512, 0.7124)
    assert (found.host_copy.launch_us, found.host_copy.link_fraction) == (9.512, 0.8124)
    assert (
        found.memory_bound.source
        == found.host_copy.source
        == ("forerun calibrate on k.csv: 20 rows, mean error 1.3 % in sample")
    )
    assert found.collectives is not None
    assert OLD.collectives is not None
    assert found.collectives.all_gather.bw3 == 340.1
    assert found.collectives.all_reduce == OLD.collectives.all_reduce
    assert found.collectives.source.startswith("forerun calibrate on n.log: all_gather: 20 rows")
    assert found.source == (
        "forerun calibrate on k.csv, n.log; what they do not tell about is of cost profile "
        + Path(H100.device.cost_profile).name
    )
    assert {"bf16", "fp8"} <= set(found.gemm)
    assert found.gemm["bf16"] == OLD.gemm["bf16"]


def test_a_profile_is_calibrated_once_bf16_is() -> None:
    shipped, entry = replace(OLD, calibrated=False), OLD.gemm["bf16"]
    assert with_parts(shipped, [_part("gemm.bf16", entry)], SAMPLES, H100).calibrated
    assert not with_parts(shipped, [_part("gemm.fp8", entry)], SAMPLES, H100).calibrated
    assert with_parts(OLD, [], SAMPLES, H100).calibrated


def test_all_head_sizes_and_all_collectives_need_no_other_source() -> None:
    heads = [_part(f"attention.head_dim.{size}", OLD.attention.head_dim[size]) for size in OLD.attention.head_dim]
    names = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    ops = [_part(f"collectives.{name}", getattr(OLD.collectives, name)) for name in names]
    found = with_parts(OLD, [*heads, *ops], SAMPLES, H100)
    assert found.collectives is not None
    assert "others: " not in found.attention.source
    assert "others: " not in found.collectives.source


def test_rates_of_the_backward_pass_change_nothing_else_of_their_roles() -> None:
    old = OLD.gemm_roles
    assert old.unaligned > 0
    found = with_roles(OLD, {"wgrad": 0.912345}, "measured").gemm_roles
    assert found == replace(old, wgrad_rate=0.9123, source=f"measured; what it does not name: {old.source}")
    assert with_roles(OLD, {"dgrad": 0.5}, "measured").gemm_roles.dgrad_rate == 0.5
    assert with_roles(OLD, {}, "measured") is OLD


def test_a_dtype_without_constants_has_the_fractions_of_bf16() -> None:
    bf16 = OLD.gemm["bf16"]
    profile = replace(OLD, gemm={"bf16": bf16}, reference=Reference({"bf16": 100.0, "fp8": 250.0}, 1.0))
    assert present(profile, "bf16") == bf16
    assert present(profile, "fp8") == replace(bf16, p_tflops=pytest.approx(2.5 * bf16.p_tflops))
    assert present(profile, "tf32") == bf16


def test_a_head_size_without_constants_has_those_of_the_nearest() -> None:
    heads = {64: AttentionEntry(1, 1, 1, 1), 128: AttentionEntry(2, 1, 1, 1), 256: AttentionEntry(3, 1, 1, 1)}
    profile = replace(OLD, attention=replace(OLD.attention, head_dim=heads))
    sizes = (32, 64, 96, 97, 192, 193, 999)
    assert [nearest(profile, size).p_tflops for size in sizes] == [1, 1, 1, 2, 2, 3, 3]


def test_kernels_have_their_own_rates_and_any_kernel_that_of_the_profile() -> None:
    forward, backward = attention_kernel("flash3").rate_on("hopper").at(128)
    assert kernel_rate("flash3", H100.device, 128) == forward
    assert kernel_rate("flash3", H100.device, 128, backward=True) == backward
    assert forward != backward
    assert kernel_rate("", H100.device, 128, backward=True) == 1.0


def _gemm_rows(count: int, layout: float | None = None) -> dict[str, Any]:
    rows = {name: np.full(count, 4096.0) for name in ("m", "n", "k", "latency_us")}
    return rows if layout is None else {**rows, "batch": np.ones(count), "layout": np.full(count, layout)}


def test_only_what_can_be_fitted_is_a_part() -> None:
    size = {"bytes": np.array([2.0**19, 2.0**20]), "latency_us": np.ones(2)}
    ring = {"num_gpus": np.full(2, 8.0), "message_bytes": np.array([2.0**19, 2.0**20]), "latency_us": np.ones(2)}
    samples = Samples(
        gemm={"bf16": _gemm_rows(3, 0.0), "int8": _gemm_rows(3), "fp8": _gemm_rows(4), "fp16": _gemm_rows(2, 1.0)},
        memory=size,
        collectives={"all_gather": ring},
    )

    def found(link_gb_s: float) -> list[tuple[str, int]]:
        return [(one.section, len(one)) for one in parts_of(samples, OLD, H100.device, link_gb_s, 64.0)]

    without = [("gemm.bf16", 3), ("gemm.fp8", 4), ("memory_bound", 2)]
    assert found(0.0) == without
    assert found(450.0) == [*without, ("collectives.all_gather", 2)]
    memory = list(parts_of(samples, OLD, H100.device, 0.0, 64.0))[-1]
    assert {name: mask.tolist() for name, mask in memory.classes.items()} == {
        "below 1 MiB": [True, False],
        "1 MiB and more": [False, True],
        "all": [True, True],
    }
    launch_s, share = OLD.memory_bound.launch_us * 1e-6, OLD.memory_bound.hbm_fraction
    seconds = launch_s + size["bytes"] / (share * H100.device.memory_bytes_per_s)
    assert memory.before(Fitted(None, lambda rows: rows["bytes"]), memory.table) == pytest.approx(seconds)


def test_serving_fits_more_constants_and_keeps_none_of_what_it_quantises() -> None:
    samples = Samples(gemm={"bf16": _gemm_rows(3), "fp8": _gemm_rows(3)}, serving=True)
    bf16, fp8 = parts_of(samples, OLD, H100.device, 0.0, 64.0)
    assert (bf16.kept, fp8.kept, bf16.least, fp8.least) == (True, False, 10, 11)
    shape = {"batch": 1.0, "heads": 32.0, "kv_heads": 8.0, "seq": 4096.0, "head_dim": 128.0, "latency_us": 5.0}
    rows = {name: np.full(3, value) for name, value in shape.items()}
    for serving, least in ((False, 7), (True, 8)):
        (head,) = parts_of(Samples(attention={"": rows}, serving=serving), OLD, H100.device, 0.0, 64.0)
        assert (head.section, head.least, len(head)) == ("attention.head_dim.128", least, 3)


def test_weights_of_products_favour_the_shapes_of_training() -> None:
    m = np.array([2048, 2047, 2048, 512, 511, 4096, 4096])
    n = np.array([1024, 1024, 1023, 512, 512, 511, 1024])
    k = np.array([1024, 1024, 1024, 512, 512, 4096, 1024])
    assert gemm_weights(m, n, k).tolist() == [3.0, 1.5, 1.5, 1.5, 0.5, 0.5, 3.0]
    assert mape(np.array([1.1, 0.7]), np.ones(2)) == pytest.approx(20.0)


def _plain_part(rows: int, folds: int = 5, least: int = 2) -> Part:
    """A part whose only constant is the mean of the times."""
    table = {"latency_us": 1e6 * np.arange(1.0, rows + 1)}

    def fit(rows: Any) -> Fitted:
        mean_s = float(rows["latency_us"].mean()) * 1e-6
        return Fitted(mean_s, lambda some: np.full(len(some["latency_us"]), mean_s))

    first = np.arange(rows) == 0
    classes = {"first": first, "none": np.zeros(rows, np.bool_), parts.ALL: np.ones(rows, np.bool_)}
    together = np.arange(float(rows))[:, None]
    return Part("p", table, least, fit, lambda _, some: 2e-6 * some["latency_us"], together, classes, folds=folds)


def test_errors_are_of_the_old_constants_the_new_ones_and_those_that_did_not_see_the_row() -> None:
    part = _plain_part(6, folds=6)
    first, whole = calibrate._errors(part, part.fit(part.table))
    assert (first.rows_class, first.rows, whole.rows_class, whole.rows) == ("first", 1, "all", 6)
    assert (first.before, whole.before) == (pytest.approx(100.0), pytest.approx(100.0))
    times = np.arange(1.0, 7.0)
    assert first.after == pytest.approx(250.0)  # the mean is 3.5
    assert first.left_out == pytest.approx(300.0)  # that of 2 to 6 is 4
    assert whole.after == pytest.approx(100 * np.abs(3.5 / times - 1).mean())
    assert whole.left_out == pytest.approx(100 * np.abs((21 - times) / 5 / times - 1).mean())


def test_too_few_rows_have_no_error_on_rows_left_out() -> None:
    assert calibrate._left_out(_plain_part(4)) is None
    assert calibrate._left_out(_plain_part(5)) is not None
    assert calibrate._left_out(_plain_part(5, least=4)) is not None
    assert calibrate._left_out(_plain_part(5, least=5)) is None


def test_changes_are_named_by_their_path() -> None:
    new = replace(OLD, memory_bound=replace(OLD.memory_bound, launch_us=99.0), gemm={**OLD.gemm, "x": OLD.gemm["fp8"]})
    found = {one.path: one for one in calibrate._changes(OLD, new)}
    change = Change("memory_bound.launch_us", OLD.memory_bound.launch_us, 99.0)
    assert found.pop("memory_bound.launch_us") == change
    assert found["gemm.x.p_tflops"] == Change("gemm.x.p_tflops", None, OLD.gemm["fp8"].p_tflops)
    assert all(path.startswith("gemm.x.") for path in found)


def test_a_table_of_rows_keeps_its_columns() -> None:
    found = rows_of({"a": np.arange(3), "b": np.arange(3) * 2}, np.array([True, False, True]))
    assert {name: column.tolist() for name, column in found.items()} == {"a": [0, 2], "b": [0, 4]}


def test_peaks_are_those_of_the_datasheet() -> None:
    device = H100.device
    expected = Peaks(device.peak_flops["fp8"] / 1e12, device.memory_bytes_per_s / 1e9, device.multiprocessors)
    assert peaks_of(device, "fp8") == expected


def test_an_unknown_kernel_is_named() -> None:
    with pytest.raises(ForerunError, match="flash9"):
        kernel_rate("flash9", H100.device, 128)
