"""Files of measurements as columns, tables of inference stacks, and the steps that a harness counts, by hand."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forerun.common.errors import ForerunError
from forerun.core.program.types import Collective
from forerun.evidence.measure import microbench
from forerun.evidence.measure.bench_kernels import Case, Sizes, _batches
from forerun.evidence.measure.fit import (
    Peaks,
    Switches,
    attention_shapes,
    cache_pass_s,
    fit_attention,
    fit_bytes,
    fit_collective,
    fit_gemm,
    fit_rate,
)
from forerun.evidence.measure.microbench import Measurements, _group_sizes, is_distributed, measure_kernels
from forerun.evidence.measure.samples import Samples, network_times, of_source, read_samples, read_tables

GEMM = "kind,dtype,m,n,k,layout,time_us\n"
HEADS = "kind,batch,heads,kv_heads,seq_q,seq_kv,head_dim,causal,backward,time_us\n"


def _write(folder: Path, **files: str) -> list[Path]:
    for name, text in files.items():
        (folder / f"{name}.csv").write_text(text)
    return [folder / f"{name}.csv" for name in files]


def _listed(table: dict[str, Any]) -> dict[str, list[float]]:
    return {name: column.tolist() for name, column in table.items()}


def test_rows_of_several_files_are_one_sorted_table(tmp_path: Path) -> None:
    first = f"{GEMM}gemm,bf16,64,32,16,,7\ngemm,bf16,8,32,16,wgrad,5\ngemm,fp8,8,8,8,,3\n"
    second = f"{GEMM}gemm,bf16,8,32,16,dgrad,4\n"
    bytes_ = "kind,bytes,op,time_us\nmemory,4096,,2\nmemory,1024,silu,1\nhost_copy,512,,9\n"
    found = read_samples(_write(tmp_path, a=first, b=second, c=bytes_), [], 8)
    assert list(found.gemm) == ["bf16", "fp8"]
    assert _listed(found.gemm["bf16"]) == {
        "m": [8, 8, 64], "n": [32, 32, 32], "k": [16, 16, 16], "batch": [1, 1, 1], "layout": [1, 2, 0],
        "latency_us": [pytest.approx(4), pytest.approx(5), pytest.approx(7)],
    }  # fmt: skip
    assert _listed(found.memory) == {"bytes": [1024, 4096], "latency_us": [pytest.approx(1), pytest.approx(2)]}
    assert _listed(found.host_copy) == {"bytes": [512], "latency_us": [pytest.approx(9)]}
    assert (found.of_kernels, found.of_network, found.serving, found.notes) == ("a.csv, b.csv, c.csv", "", False, ())
    assert (found.attention, found.collectives) == ({}, {})


def test_attention_keeps_its_whole_shape(tmp_path: Path) -> None:
    (path,) = _write(tmp_path, a=f"{HEADS}attention,2,32,8,1024,2048,128,0,1,50\n")
    (table,) = read_samples([path], [], 8).attention.values()
    names = ("batch", "heads", "kv_heads", "seq", "seq_kv", "head_dim", "causal", "backward", "v_head_dim")
    assert [table[name].tolist() for name in names] == [[2], [32], [8], [1024], [2048], [128], [0], [1], [128]]
    assert table["latency_us"].tolist() == pytest.approx([50])
    shapes = attention_shapes(table)
    sizes = (shapes.batch, shapes.heads, shapes.kv_heads, shapes.seq_q, shapes.seq_kv, shapes.head_dim)
    assert (*sizes, shapes.causal, shapes.backward) == (2, 32, 8, 1024, 2048, 128, 0, 1)
    bare = {name: table[name] for name in ("batch", "seq", "heads", "kv_heads", "head_dim")}
    usual = attention_shapes(bare)
    assert (usual.seq_kv, usual.causal, usual.backward, usual.v_head_dim) == (1024, 1, 0, 128)
    # keys and values, read and written, in two bytes: 2 x 1024 x 8 x 128 elements, twice
    seconds = 4 * 2 * 1024 * 8 * 128 / 2e12
    assert cache_pass_s(usual, Peaks(1.0, 2000.0, 1)) == pytest.approx(seconds)


def test_collectives_of_neighbours_in_a_node_are_taken(tmp_path: Path) -> None:
    rows = ["all_gather,8,1,1024,5", "all_gather,8,1,512,4", "all_reduce,4,1,512,6", "all_reduce,4,2,512,6"]
    rows += ["all_reduce,9,1,512,7", "broadcast,8,1,512,9", "all_to_all,2,1,512,3"]
    text = "collective,ranks,stride,bytes,time_us\n" + "\n".join(rows) + "\n"
    paths = _write(tmp_path, n=text, m="collective,ranks,bytes,time_us\nall_gather,8,1024,9\n")
    found = read_samples([], paths, 8)
    assert list(found.collectives) == ["all_reduce", "all_gather", "all_to_all"]
    assert _listed(found.collectives["all_gather"]) == {
        "num_gpus": [8, 8, 8], "message_bytes": [512, 1024, 1024], "latency_us": pytest.approx([4, 5, 9]),
    }  # fmt: skip
    assert found.notes == ("2 collectives between nodes or of scattered ranks left out",)
    assert read_samples([], paths, 9).notes == ("1 collectives between nodes or of scattered ranks left out",)
    times = network_times(paths)
    assert times[Collective.ALL_GATHER, 8, 1, 1024.0] == pytest.approx(7e-6)  # the middle of 5 and 9
    assert times[Collective.ALL_REDUCE, 4, 2, 512.0] == pytest.approx(6e-6)
    assert len(times) == 7


def test_a_source_stands_behind_the_names_of_files() -> None:
    assert of_source(Samples(of_kernels="a.csv"), "here") == Samples(of_kernels="a.csv (here)")


def _tables(folder: Path, **changes: Any) -> Path:
    pandas = pytest.importorskip("pandas")
    tables = {
        "gemm": {"device": ["x", "x", "y"], "dtype": ["fp8", "int8", "fp8"], "m": 8, "n": [4, 5, 6], "k": 8},
        "attention_forward": {"device": ["x"], "batch": 1, "seq": 8, "heads": 2, "kv_heads": 1, "head_dim": 64},
        "nccl": {
            "device": "x", "op": ["all_reduce", "all_reduce", "all_reduce", "sendrecv"], "num_gpus": 8,
            "message_bytes": 1024, "dtype": ["half", "half", "int8", "half"],
        },
    }  # fmt: skip
    times = {"gemm": [1.0, 2.0, 3.0], "attention_forward": [4.0], "nccl": [5.0, 7.0, 100.0, 9.0]}
    for name, columns in tables.items():
        frame = pandas.DataFrame({**columns, "latency_us": times[name]})
        frame.drop(columns=changes.get(name, [])).to_parquet(folder / f"{name}.parquet")
    return folder


def test_tables_leave_out_other_devices_and_what_training_does_not_run(tmp_path: Path) -> None:
    found = read_tables(_tables(tmp_path), "x")
    assert {dtype: table["n"].tolist() for dtype, table in found.gemm.items()} == {"fp8": [4], "int8": [5]}
    assert list(found.collectives) == ["all_reduce"]
    assert found.collectives["all_reduce"]["latency_us"].tolist() == [6]
    assert (found.serving, found.notes) == (True, ())
    assert (found.of_kernels, found.of_network) == ("gemm.parquet, attention_forward.parquet", "nccl.parquet")
    without = read_tables(_tables(tmp_path, nccl=["dtype"]), "x")
    assert without.collectives["all_reduce"]["latency_us"].tolist() == [7]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gemm": ["device"]}, r"gemm\.parquet: column 'device' is missing"),
        ({"gemm": ["k"]}, "tables: column 'k' is missing; needed: m, n, k, latency_us"),
    ],
)
def test_tables_without_a_column_are_one_line(tmp_path: Path, changes: dict[str, list[str]], said: str) -> None:
    with pytest.raises(ForerunError, match=said):
        read_tables(_tables(tmp_path, **changes), "x")


def test_copies_give_back_their_launch_and_share() -> None:
    size = [4.0**power for power in range(8, 16, 2)]
    data = {"bytes": size, "latency_us": [3.0 + one / (0.6 * 2000e9) * 1e6 for one in size]}
    assert fit_bytes(data, 2000.0) == pytest.approx((3.0, 0.6, 0.0), abs=1e-3)


@pytest.mark.parametrize(
    ("fit", "columns", "least"),
    [
        (lambda data: fit_gemm(data, Peaks(1.0, 1.0, 1), ""), "m n k latency_us", 10),
        (lambda data: fit_attention(data, Peaks(1.0, 1.0, 1)), "latency_us", 7),
        (lambda data: fit_bytes(data, 1.0), "bytes latency_us", 4),
        (lambda data: fit_collective(Collective.ALL_GATHER, data, 1.0), "num_gpus message_bytes latency_us", 9),
    ],
)
def test_a_fit_needs_a_few_rows(fit: Any, columns: str, least: int) -> None:
    """Rows that are enough go on to the next check, which finds a time that is none."""
    for rows, says in ((least - 1, f"{least - 1} rows are too few to fit {least} constants"), (least, "every value")):
        with pytest.raises(ForerunError, match=says):
            fit({name: [-1.0] * rows for name in columns.split()})


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_measurements_are_positive_numbers(value: float) -> None:
    with pytest.raises(ForerunError, match="every value of bytes, latency_us must be a positive number"):
        fit_bytes({"bytes": [1.0] * 5, "latency_us": [1.0] * 4 + [value]}, 2000.0)


def test_a_rate_is_the_one_that_explains_the_times_and_stray_ones_weigh_little() -> None:
    work_s = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    rate, error = fit_rate(lambda rate: work_s / rate, work_s / 0.7)
    assert (rate, error) == (pytest.approx(0.7, rel=1e-4), pytest.approx(0.0, abs=0.01))
    stray = work_s / 0.7 * np.array([1, 1, 1, 1, 10])
    assert fit_rate(lambda rate: work_s / rate, stray)[0] == pytest.approx(0.7, rel=0.06)


def test_several_head_sizes_are_refused() -> None:
    data = {name: [1.0] * 7 for name in ("batch", "seq", "heads", "kv_heads", "latency_us")}
    with pytest.raises(ForerunError, match="several values of head_dim"):
        fit_attention({**data, "head_dim": [64.0] * 6 + [128.0]}, Peaks(1.0, 1.0, 1))


def test_switches_add_all_reduces_alone() -> None:
    switches = Switches("hopper", 450.0)
    assert switches.lines(Collective.ALL_REDUCE, 8).latency_s
    assert not switches.lines(Collective.ALL_GATHER, 8).latency_s
    assert not Switches("ampere", 300.0).lines(Collective.ALL_REDUCE, 8).latency_s
    assert not Switches().lines(Collective.ALL_REDUCE, 8).latency_s


@pytest.mark.parametrize(
    ("world", "sizes"), [(1, [1]), (2, [2]), (4, [2, 4]), (6, [2, 4, 6]), (8, [2, 4, 8]), (9, [2, 4, 8, 9])]
)
def test_groups_are_powers_of_two_and_all_ranks(world: int, sizes: list[int]) -> None:
    assert _group_sizes(world) == sizes


@pytest.mark.parametrize(("world", "distributed"), [(None, False), ("1", False), ("2", True)])
def test_torchrun_tells_whether_there_are_others(
    monkeypatch: pytest.MonkeyPatch, world: str | None, distributed: bool
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if world is not None:
        monkeypatch.setenv("WORLD_SIZE", world)
    assert is_distributed() is distributed


def test_batches_and_sequences_hold_the_wanted_tokens() -> None:
    sizes = Sizes(sequences=(512, 1024, 4096), attention_tokens=(1024, 4096))
    assert _batches(sizes) == [(1, 1024), (1, 4096), (2, 512), (4, 1024), (8, 512)]


def test_kernels_have_the_time_of_one_and_reasons_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(reason: str) -> Any:
        def prepare() -> Any:
            raise RuntimeError(reason)

        return prepare

    cases = [
        Case({"kind": "host_copy", "bytes": 8}, lambda: lambda: None, 2),
        Case({"kind": "gemm", "dtype": "fp8", "m": 1}, refuses("\nno such kernel\nat line 5")),
        Case({"kind": "gemm", "dtype": "fp8", "m": 2}, refuses("another reason")),
        Case({"kind": "attention", "kernel": "cudnn"}, refuses("")),
        Case({"kind": "memory", "bytes": 8}, lambda: lambda: None),
    ]
    monkeypatch.setattr(microbench, "kernel_cases", lambda *_: iter(cases))
    monkeypatch.setattr(microbench, "tiny_kernel", lambda *_: lambda: None)
    timer: Any = SimpleNamespace(device="cpu", kernel_s=lambda run: 3e-6, issue_s=lambda run: 4e-6)
    heard: list[int] = []
    found = measure_kernels(timer, None, Sizes(), heard.append)
    assert found.rows == (
        {"kind": "host_copy", "bytes": 8, "time_us": "1.5"},
        {"kind": "memory", "bytes": 8, "time_us": "3"},
    )
    assert found.failed == ("gemm fp8: no such kernel", "attention cudnn: RuntimeError('')")
    assert (heard, found.issue_us) == ([1, 2, 3, 4, 5], pytest.approx(4.0))


def test_a_file_of_kernels_names_the_machine_and_the_hosts_time() -> None:
    lines = Measurements(({"kind": "memory", "bytes": 8, "time_us": "1.5"},), 3.14159, ()).csv("a GPU").splitlines()
    assert lines[:2] == ["# a GPU", "# host: 3.14 us to issue an eager kernel"]
    assert lines[2].split(",")[0::17] == ["kind", "time_us"]
    assert lines[3].split(",") == ["memory", *[""] * 14, "8", "", "1.5"]


def test_what_is_measured_unless_told_otherwise_is_what_training_runs() -> None:
    """Aligned products from small to large, in the shapes of layers; bytes in powers of two from pages to gigabytes."""
    sizes = Sizes()
    assert all(size % 128 == 0 for size in (*sizes.gemm_m, *np.ravel(sizes.gemm_nk)))
    assert {sizes.gemm_m[0], sizes.gemm_m[-1]} == {128, 16384}
    assert {(head_dim, heads % kv_heads) for head_dim in sizes.head_dims for heads, kv_heads in sizes.heads} == {
        (64, 0), (128, 0),
    }  # fmt: skip
    assert all(batch * seq in (4096, 16384) for batch, seq in _batches(sizes))
    for found, first, last in (
        (sizes.moved_bytes, 2**12, 2**31), (sizes.copied_bytes, 2**12, 2**28), (microbench._MESSAGES, 2**10, 2**30),
    ):  # fmt: skip
        assert (found[0], found[-1]) == (first, last)
        assert all(2 * one == following for one, following in pairwise(found))


@pytest.mark.parametrize(("rank", "device"), [(None, 0), ("3", 3)])
def test_a_rank_times_its_own_gpu(monkeypatch: pytest.MonkeyPatch, rank: str | None, device: int) -> None:
    chosen: list[int] = []
    cuda = SimpleNamespace(is_available=lambda: True, set_device=chosen.append)
    monkeypatch.setattr(microbench, "CudaTimer", lambda torch: torch)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    torch: Any = SimpleNamespace(cuda=cuda)
    assert microbench.gpu_timer(torch) is torch
    assert chosen == [device]
