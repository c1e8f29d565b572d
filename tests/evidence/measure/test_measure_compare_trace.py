"""A profiled step beside its Program. The profile is made up, as Kineto writes it: there is no GPU here."""

import io
import json

import numpy as np
import pytest
from rich.console import Console

from forerun.common.errors import ForerunError
from forerun.core.program.builder import BlockBuilder, OpTableBuilder
from forerun.core.program.groups import CommGroup
from forerun.core.program.storage import save
from forerun.core.program.types import N_CATEGORIES, Category, Collective, Program, RankClass
from forerun.describe.cluster.catalog import load_cluster
from forerun.evidence.measure.compare_trace import compare, main, print_comparison
from forerun.evidence.measure.kernels import kernels_of

torch = pytest.importorskip("torch")
H100 = load_cluster("h100-sxm")
MIB = 1 << 20


def program():
    """Two products, an AdamW of three launches, an all-gather, and an all-to-all, with 3 MiB at the peak."""
    ops, block = OpTableBuilder(), BlockBuilder()
    product = ops.gemm("mm", 1024, 1024, 1024)
    block.node(product)
    block.node(product)
    block.node(ops.memory("_fused_adamw_", 4e6, 4e6, launches=3))
    block.node(ops.collective("all_gather", Collective.ALL_GATHER, 0, 1e6))
    block.node(ops.collective("all_to_all", Collective.ALL_TO_ALL, 0, 1e6))
    block.tensor(MIB, Category.TEMPORARY, 0, 1)
    resident = np.zeros(N_CATEGORIES, np.int64)
    resident[Category.PARAMETER] = 2 * MIB
    one = np.zeros(1, np.int32)
    ranks = RankClass("all", 8, one, one, one - 1, resident)
    return Program(ops.build(), (block.build("step"),), (ranks,), (CommGroup("dp", 8, 1, 8),), (), ("",))


class Kineto:
    """Writes a profile: operations of the host, and the kernels that they launch."""

    def __init__(self):
        self.events, self.correlation, self.device_us = [], 0, 1000.0

    def event(self, category, name, ts, dur, tid=1, **args):
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": tid} | {"args": args}
        )

    def launch(self, ts, kernel, us, category="kernel", tid=1):
        self.correlation += 1
        self.event("cuda_runtime", "cudaLaunchKernel", ts, 1, tid, correlation=self.correlation)
        self.event(category, kernel, self.device_us, us, "stream 7", correlation=self.correlation)
        self.device_us += us

    def trace(self):
        return {"schemaVersion": 1, "traceEvents": [{"ph": "M", "name": "process_name"}, *reversed(self.events)]}


def step():
    """The step of `program`: one product through aten::linear, one through its backward on another thread."""
    made = Kineto()
    made.event("cpu_op", "aten::linear", 0, 10)
    made.event("cpu_op", "aten::mm", 0, 8)
    made.launch(2, "nvjet_tst_128x256", 5.0)
    made.event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 3, 9, tid=2)
    made.event("cpu_op", "aten::mm", 4, 7, tid=2)
    made.launch(5, "nvjet_tst_256x128", 7.0, tid=2)
    made.event("cpu_op", "aten::_fused_adamw_", 20, 10)
    for ts in (21, 23, 25):
        made.launch(ts, "multi_tensor_apply_kernel", 2.0)
    made.event("cpu_op", "c10d::_allgather_base_", 40, 10)
    made.launch(42, "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 30.0)
    made.launch(60, "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t", 11.0)
    made.event("cpu_op", "aten::copy_", 70, 5)
    made.launch(71, "Memcpy HtoD (Pageable -> Device)", 4.0, "gpu_memcpy")
    made.launch(90, "lonely_kernel", 1.0)
    return made.trace()


def test_kernels_know_what_launched_them():
    found = {(kernel.name, kernel.operations) for kernel in kernels_of(step())}
    assert ("nvjet_tst_128x256", ("mm", "linear")) in found
    assert ("nvjet_tst_256x128", ("mm", "evaluate_function: MmBackward0")) in found
    assert ("Memcpy HtoD (Pageable -> Device)", ("copy_",)) in found
    assert ("lonely_kernel", ()) in found, "an operation that has ended launches nothing"


def test_kernels_go_to_the_innermost_operation_that_the_program_has():
    kernel = next(kernel for kernel in kernels_of(step()) if kernel.operations == ("mm", "linear"))
    assert kernel.key({"mm", "linear"}) == "mm"
    assert kernel.key({"linear"}) == "linear"
    assert kernel.key(set()) == "mm"


def test_counts_and_times_stand_side_by_side():
    found = compare(program(), H100, kernels_of(step()), 4 * MIB)
    rows = {row.name: row for row in found.rows}
    counts = {name: (row.predicted_kernels, row.measured_kernels) for name, row in rows.items()}
    assert counts == {
        "mm": (2, 2),
        "_fused_adamw_": (3, 3),
        "nccl all_gather": (1, 1),
        "nccl send_recv": (1, 1),
        "copy_": (0, 1),
        "lonely_kernel": (0, 1),
    }
    assert rows["mm"].measured_ms == pytest.approx(0.012)
    assert rows["_fused_adamw_"].measured_ms == pytest.approx(0.006)
    assert 0.002 < rows["mm"].predicted_ms < 0.1
    assert rows["copy_"].predicted_ms == 0
    assert found.rows[0].name == "nccl all_gather", "most time first"


def test_figures_of_the_step():
    found = compare(program(), H100, kernels_of(step()), 4 * MIB)
    assert (found.predicted_peak_bytes, found.measured_peak_bytes) == (3 * MIB, 4 * MIB)
    assert found.measured_step_ms == pytest.approx((5 + 7 + 6 + 30 + 11 + 4 + 1) * 1e-3)
    # The collectives come one after the other; the kernels run beside them.
    assert found.predicted_step_ms >= sum(r.predicted_ms for r in found.rows if r.name.startswith("nccl")) * 0.99


def test_the_table_names_what_was_measured():
    out = Console(record=True, width=100, file=io.StringIO())
    print_comparison(out, compare(program(), H100, kernels_of(step()), 4 * MIB), limit=3)
    text = out.export_text()
    assert "nccl all_gather" in text
    assert "lonely_kernel" not in text
    assert "3 operations more" in text
    assert "-25.0%" in text


def test_a_profile_of_the_cpu_is_refused(tmp_path):
    with torch.profiler.profile() as profiled:
        torch.ones(4) @ torch.ones(4)
    path = tmp_path / "trace.json"
    profiled.export_chrome_trace(str(path))
    with pytest.raises(ForerunError, match="no kernel of a GPU"):
        kernels_of(json.loads(path.read_text()))


def test_what_is_no_profile_is_refused():
    with pytest.raises(ForerunError, match="traceEvents"):
        kernels_of({"nodes": []})


def test_without_a_gpu_one_line_says_so(tmp_path, capsys, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('it must not run')")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([str(script), "--", "--lr", "1"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: comparing needs a GPU")
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["nowhere.py"], "nowhere.py: no such script"), ([__file__, "--cluster", "abacus"], "abacus")],
)
def test_what_is_wrong_is_named(arguments, said, capsys):
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


class Rank:
    """A stand-in of what needs a GPU: the profiler, one of whose kernels has brackets in its name."""

    def __init__(self, monkeypatch):
        self.steps = []
        made = Kineto()
        made.event("cpu_op", "aten::mm", 0, 8)
        made.launch(2, "nvjet", 5.0)
        made.launch(90, "odd[kernel]", 1.0)
        self.kernels = kernels_of(made.trace())
        monkeypatch.setattr("forerun.evidence.measure.compare_trace._torch", lambda: torch)
        monkeypatch.setattr("forerun.evidence.measure.compare_trace.trace_job", lambda job, _: self.trace(job))
        monkeypatch.setattr("forerun.evidence.measure.profiled.profiled_step", self.profile)

    def trace(self, job):
        self.job = job
        return program(), None

    def profile(self, script, arguments, steps):
        self.steps.append((arguments, steps))
        return self.kernels, 4 * MIB


def test_the_command_traces_profiles_and_compares(tmp_path, capsys, monkeypatch):
    rank = Rank(monkeypatch)
    told = tmp_path / "told.json"
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert main([__file__, "--steps", "3", "--json", str(told), "--", "--lr", "1"]) == 0
    assert rank.steps == [(["--lr", "1"], 3)]
    assert (rank.job.arguments, rank.job.world_size, rank.job.steps) == (("--lr", "1"), 8, 3)
    assert "odd[kernel]" in capsys.readouterr().out
    record = json.loads(told.read_text())
    assert record["measured_peak_bytes"] == 4 * MIB
    assert [row["name"] for row in record["rows"]][:2] == ["mm", "odd[kernel]"]


def test_other_ranks_profile_and_say_nothing(capsys, monkeypatch):
    rank = Rank(monkeypatch)
    monkeypatch.setenv("RANK", "1")
    assert main([__file__]) == 0
    assert len(rank.steps) == 1
    assert not hasattr(rank, "job")
    assert capsys.readouterr().out == ""


def test_a_saved_program_is_not_traced_again(tmp_path, capsys, monkeypatch):
    rank = Rank(monkeypatch)
    save(program(), tmp_path / "a.program")
    assert main([__file__, "--program", str(tmp_path / "a.program")]) == 0
    assert not hasattr(rank, "job")
    assert "nccl all_gather" in capsys.readouterr().out
