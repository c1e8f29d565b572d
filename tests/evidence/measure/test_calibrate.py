"""Refitted profiles: known constants come back, files are the same every time, shipped constants come out again."""

import shutil
from dataclasses import replace
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import yaml
from synthetic_device import (
    GEMM,
    HBM_LAUNCH_US,
    HBM_SHARE,
    HEAD,
    HOST_LAUNCH_US,
    HOST_SHARE,
    OP,
    WGRAD,
    write_all_gathers,
    write_kernels,
)

from forerun.common.errors import ForerunError
from forerun.core.cost.profile import load_profile, parse_profile, profile_names
from forerun.core.cost.profile_text import profile_text, written_over
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.kernels.attention import attention_kernel
from forerun.evidence.measure.calibrate import Calibration, calibrate, folds
from forerun.evidence.measure.new_profile import at_device
from forerun.evidence.measure.samples import of_source, read_samples, read_tables

DEVICES = Path(str(resources.files("forerun.describe.cluster") / "devices"))
GENERIC = Path(str(resources.files("forerun.core.cost") / "generic_kernels.yaml"))
TABLES = Path(__file__).resolve().parents[3].parent / "shared" / "calibration"


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("measured")
    return write_kernels(folder / "kernels.csv"), write_all_gathers(folder / "network.csv")


@pytest.fixture(scope="module")
def found(files) -> Calibration:
    return calibrate(load_cluster("h100-sxm"), read_samples([files[0]], [files[1]], 8))


def test_a_device_of_known_constants_is_recovered(found):
    gemm, head = found.profile.gemm["bf16"], found.profile.attention.head_dim[128]
    assert gemm.p_tflops / (1 + gemm.slowdown) == pytest.approx(GEMM.p_tflops / (1 + GEMM.slowdown), rel=0.02)
    assert gemm.hbm_gb_s == pytest.approx(GEMM.hbm_gb_s, rel=0.03)
    assert found.profile.gemm_roles.wgrad_rate == pytest.approx(WGRAD, rel=0.02)
    assert found.profile.gemm_roles.dgrad_rate == pytest.approx(1.0, rel=0.02)
    forward, _ = attention_kernel("flash3").rate_on("hopper").at(128)
    assert forward * head.p_tflops / (1 + head.slowdown) == pytest.approx(HEAD.p_tflops, rel=0.03)
    memory, host = found.profile.memory_bound, found.profile.host_copy
    assert (memory.hbm_fraction, memory.launch_us) == pytest.approx((HBM_SHARE, HBM_LAUNCH_US), rel=1e-3)
    assert (host.link_fraction, host.launch_us) == pytest.approx((HOST_SHARE, HOST_LAUNCH_US), rel=1e-3)
    assert found.profile.collectives.all_gather.bw3 == pytest.approx(OP.bw3, rel=0.05)
    assert found.profile.collectives.all_gather.a_us == pytest.approx(OP.a_us, rel=0.1)


def test_errors_fall_to_the_noise_also_on_shapes_left_out(found):
    rows = {(row.section, row.rows_class): row for row in found.errors}
    for section in ("gemm.bf16", "attention.head_dim.128", "collectives.all_gather"):
        row = rows[section, "all"]
        assert row.after < 1.5 < 5 < row.before
        assert row.after <= row.left_out < 2
    assert rows["gemm.bf16", "m 2048+, n, k 1024+"].rows == 4 * 5 * 5


def test_what_was_not_measured_stays(found):
    shipped = load_profile("h100")
    assert found.profile.gemm["fp8"] == shipped.gemm["fp8"]
    assert found.profile.attention.head_dim[64] == shipped.attention.head_dim[64]
    assert found.profile.collectives.all_reduce == shipped.collectives.all_reduce
    own = shipped.gemm_roles
    assert found.profile.gemm_roles == replace(
        found.profile.gemm_roles, accumulate_exposed=own.accumulate_exposed, unaligned=own.unaligned
    )
    paths = {change.path for change in found.changes}
    assert "gemm.bf16.p_tflops" in paths
    assert not any(path.startswith(("gemm.fp8", "collectives.all_reduce", "reference")) for path in paths)


def test_what_no_profile_holds_is_said(found):
    text = "\n".join(found.notes)
    assert "1 collectives between nodes or of scattered ranks left out" in text
    assert "attention backward of flash3, head size 128: 0.80 of the forward rate on 45 measurements" in text


def test_a_refit_gives_the_same_bytes_whatever_the_order_of_rows(found, files, tmp_path):
    kernels, network = files
    header, *rows = kernels.read_text().splitlines()
    turned = tmp_path / "kernels.csv"
    turned.write_text("\n".join([header, *reversed(rows)]))
    again = calibrate(load_cluster("h100-sxm"), read_samples([turned], [network], 8))
    assert again.text() == found.text()


def test_the_written_file_is_a_profile_that_a_device_takes(found, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(found.text("# Of the machine in the cellar.\n"))
    assert replace(load_profile(str(path)), name=found.profile.name) == found.profile
    assert path.read_text().startswith("# Of the machine in the cellar.\nsource: ")
    assert found.text().startswith("# Kernel constants of the h100-sxm-80gb.")
    assert found.profile.gemm["bf16"].source.startswith("forerun calibrate on kernels.csv: 343 rows, mean error 0.")


@pytest.mark.parametrize("name", profile_names())
def test_shipped_profiles_stand_as_they_are_written_so_that_a_diff_shows_a_refit(name):
    texts = [path.read_text() for path in (GENERIC, *DEVICES.iterdir())]
    (old,) = [text for text in texts if kernels_name(text) == name] or texts[:1]
    assert written_over(old, load_profile(name), name) == old


def kernels_name(text: str) -> str | None:
    return yaml.safe_load(text).get("kernels", {}).get("name")


def test_a_refit_changes_the_kernels_of_a_device_and_nothing_else(found, tmp_path):
    path = tmp_path / "h100-sxm-80gb.yaml"
    shutil.copy(DEVICES / path.name, path)
    old, new = path.read_text(), found.text(path.read_text())
    path.write_text(new)
    assert old.partition("kernels:")[0] == new.partition("kernels:")[0]
    assert kernels_name(new) == "h100"
    assert replace(load_profile(str(path)), name=found.profile.name) == found.profile


def test_a_profile_says_where_its_measurements_come_from(files):
    samples = of_source(read_samples([], [files[1]], 8), "the machine in the cellar")
    found = calibrate(load_cluster("h100-sxm"), samples)
    start = "forerun calibrate on network.csv (the machine in the cellar): all_gather: 63 rows, mean error"
    assert found.profile.collectives.source.startswith(start)
    assert "; others: forerun calibrate on nccl.parquet (ai-dynamo" in found.profile.collectives.source


@pytest.mark.parametrize("value", [0.0, 1.0, 1e-5, 1.5e-7, 123456.0, 1978.9, 0.1 + 0.2])
def test_numbers_are_written_in_full_and_without_exponents(value):
    profile = load_profile("h100")
    changed = replace(profile, memory_bound=replace(profile.memory_bound, launch_us=value))
    data = yaml.safe_load(profile_text(changed, []))
    assert parse_profile({"name": "h100", **data}, "h100") == changed


def test_text_with_quotes_is_read_back():
    profile = replace(load_profile("h100"), source='a "quoted" \\ thing: # no comment')
    assert yaml.safe_load(profile_text(profile, []))["source"] == profile.source


def test_another_device_takes_the_fractions_of_its_own_peaks():
    profile = at_device(load_profile("h100"), load_cluster("h100-pcie"))
    shipped, device = load_profile("h100"), load_cluster("h100-pcie").device
    assert profile.reference.peak_tflops["bf16"] == device.peak("bf16") / 1e12
    fraction = shipped.gemm["bf16"].p_tflops / shipped.reference.peak_tflops["bf16"]
    assert profile.gemm["bf16"].p_tflops / profile.reference.peak_tflops["bf16"] == pytest.approx(fraction, rel=1e-3)
    assert at_device(load_profile("h100"), load_cluster("h100-sxm")) == replace(shipped, name="h100-sxm-80gb")


def test_a_device_without_a_profile_of_its_own_gets_one(files):
    found = calibrate(load_cluster("v100"), read_samples([], [files[1]], 8))
    assert found.profile.collectives.link_gb_s == 150
    assert not found.profile.calibrated
    assert found.profile.gemm == found.old.gemm


def test_rows_of_a_shape_are_left_out_together():
    together = np.array([[1, 2], [3, 4], [1, 2], [5, 6], [7, 8], [9, 9], [3, 4]])
    fold = folds(together, 5)
    assert fold[0] == fold[2]
    assert fold[1] == fold[6]
    assert len(set(fold.tolist())) == 5
    assert len(set(folds(together, 3).tolist())) == 3


@pytest.mark.parametrize(
    ("kernels", "network", "message"),
    [
        ("kind,time_us,dtype,m,n,k\ngemm,5,bf16,8,8,8\n", None, "nothing to fit: gemm.bf16 left out: 1 measurements"),
        (None, "collective,ranks,bytes,time_us\nbroadcast,8,8,8\n", "nothing to fit: no products"),
        ("kind,time_us,m,n,k\ngemm,5,8,8,8\n", None, "line 2: column dtype is missing or empty"),
        (None, "hello\n", "network, line 1: unknown column 'hello'"),
    ],
)
def test_measurements_that_tell_nothing_are_one_line(tmp_path, kernels, network, message):
    paths = []
    for name, text in (("kernels", kernels), ("network", network)):
        paths.append([tmp_path / name] if text is not None else [])
        if text is not None:
            (tmp_path / name).write_text(text)
    with pytest.raises(ForerunError, match=message) as caught:
        calibrate(load_cluster("h100-sxm"), read_samples(*paths, 8))
    assert "\n" not in str(caught.value)


def test_collectives_over_pcie_are_not_taken(files):
    with pytest.raises(ForerunError, match="profiles hold those over NVLink, and l40s has none"):
        calibrate(load_cluster("l40s"), read_samples([], [files[1]], 8))


@pytest.mark.skipif(not TABLES.exists(), reason="the measured kernels are not beside this checkout")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("cluster", "device"), [pytest.param("a100", "a100_sxm", marks=pytest.mark.long), ("h100", "h100_sxm")]
)
def test_the_shipped_profiles_come_out_of_their_tables(cluster, device):
    found = calibrate(load_cluster(cluster), read_tables(TABLES, device))
    constants = {change.path: change for change in found.changes if change.old is not None}
    for path, change in constants.items():
        if path.endswith(("p_tflops", "hbm_gb_s", "bw3")):
            assert change.new == pytest.approx(change.old, rel=0.05), path
    for row in found.errors:
        if row.section.partition(".")[0] in ("gemm", "collectives") and row.kept:
            assert row.after == pytest.approx(row.before, abs=1.5), (row.section, row.rows_class)


@pytest.mark.skipif(not TABLES.exists(), reason="the measured kernels are not beside this checkout")
def test_an_unknown_device_of_the_tables_is_one_line(tmp_path):
    with pytest.raises(ForerunError, match="no rows of 'h900'; it has a100_sxm"):
        read_tables(TABLES, "h900")
    with pytest.raises(ForerunError, match="can't be read"):
        read_tables(tmp_path, "h100_sxm")


def test_attention_that_few_of_the_usual_stacks_measured_is_left_out(tmp_path):
    pandas = pytest.importorskip("pandas")
    shape = {"device": "x", "batch": 1, "heads": 32, "kv_heads": 8, "head_dim": 128}
    rows = [(1024, 300.0, 4), (2048, 900.0, 4), (3072, 1500.0, 4), (4096, 3000.0, 1), (6144, 5000.0, 2), (8192, 1.0, 1)]
    seq, latency_us, stacks = zip(*rows, strict=True)
    attention = pandas.DataFrame({**shape, "seq": seq, "latency_us": latency_us, "stacks": stacks})
    attention.to_parquet(tmp_path / "attention_forward.parquet")
    gemm = pandas.DataFrame({"device": ["x"], "dtype": "bfloat16", "m": 8, "n": 8, "k": 8, "latency_us": 5.0})
    gemm.to_parquet(tmp_path / "gemm.parquet")
    nccl = {"device": ["x", "x"], "op": "alltoall", "num_gpus": 8, "message_bytes": 1024, "latency_us": [5.0, 7.0]}
    pandas.DataFrame(nccl).to_parquet(tmp_path / "nccl.parquet")
    samples = read_tables(tmp_path, "x")
    assert samples.attention[""]["seq"].tolist() == [1024, 2048, 3072, 6144]
    assert samples.notes == ("attention: 2 rows left out, which few of the usual stacks measured",)
    assert samples.gemm["bf16"]["m"].tolist() == [8]
    assert samples.collectives["all_to_all"]["latency_us"].tolist() == [6]
