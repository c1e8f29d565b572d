"""torch.compile on the virtual device: kernels, memory, modules and phases of compiled regions against eager ones."""

import json
import os
from pathlib import Path

import pytest
from warm_process import fork, run_file, wait

from forerun.core.program.types import Phase
from forerun.sources.trace.job import Job
from forerun.sources.trace.launch import Limits, record_script

PROGRAM = Path(__file__).parent / "compiled_regions.py"
pytestmark = pytest.mark.slow


USUAL = (
    "eager",
    "whole",
    "blocks",
    "recomputed blocks",
    "data parallel",
    "sharded",
    "flexible",
    "impossible",
    "optimizer",
)
LATER = ("broken", "graphs", "dynamic", "recomputed inside")
"""programs of the long tests"""


@pytest.fixture(scope="module")
def steps(tmp_path_factory, request):
    out = tmp_path_factory.mktemp("compiled") / "steps.json"
    asked = [item for item in request.session.items if item.path == request.path]
    later = LATER if any(item.get_closest_marker("long") for item in asked) else ()

    def run():
        os.chdir(out.parent)
        run_file(PROGRAM, out, *USUAL, *later)

    with out.with_suffix(".txt").open("wb") as sink:
        code = wait(fork(run, sink.fileno(), {}), 600)
    assert code == 0, out.with_suffix(".txt").read_text()[-4000:]
    return json.loads(out.read_text(encoding="utf-8"))


def programs(*names):
    """The programs as parameters; some are of the long tests."""
    return [pytest.param(name, marks=pytest.mark.long) if name in LATER else name for name in names]


COMPILED = ("whole", "broken", "blocks", "graphs", "dynamic", "recomputed blocks", "recomputed inside", "sharded")


@pytest.mark.parametrize("name", programs(*COMPILED))
def test_a_compiled_program_launches_fewer_kernels_and_moves_fewer_bytes(steps, name):
    assert len(steps[name]["names"]) < 0.6 * len(steps["eager"]["names"])
    assert steps[name]["moved_bytes"] < 0.8 * steps["eager"]["moved_bytes"]
    assert sum(steps[name]["compiled"]) > 0.5 * len(steps[name]["names"])


@pytest.mark.parametrize("name", programs("whole", "broken", "blocks", "graphs", "dynamic", "data parallel", "sharded"))
def test_products_and_attention_are_those_of_eager_mode(steps, name):
    assert steps[name]["matmuls"] == steps["eager"]["matmuls"]
    assert steps[name]["flops"] == steps["eager"]["flops"]


def test_eager_programs_have_no_compiled_kernels(steps):
    assert not any(steps["eager"]["compiled"])
    assert not any(name.startswith("fused_") for name in steps["eager"]["names"])


@pytest.mark.parametrize("name", programs("whole", "blocks", "dynamic"))
def test_activations_are_what_the_partitioner_saves(steps, name):
    assert steps[name]["activation_bytes"] < 0.8 * steps["eager"]["activation_bytes"]
    assert steps[name]["activation_bytes"] == pytest.approx(steps[name]["saved_bytes"], rel=0.01)


@pytest.mark.long
def test_a_graph_break_splits_the_region_but_nothing_fails(steps):
    assert steps["broken"]["notes"] == steps["broken"]["fallbacks"] == []
    assert len(steps["broken"]["names"]) - len(steps["whole"]["names"]) in range(1, 6)


def test_kernels_carry_the_path_of_their_module(steps):
    for name in ("whole", "blocks"):
        for phase in ("FORWARD", "BACKWARD"):
            paths = {m for m, p in zip(steps[name]["modules"], steps[name]["phases"], strict=True) if p == phase}
            assert {"layers.0.w2", "layers.1.w2", "layers.0.attention.wo", "layers.1.attention.wo"} <= paths
    products = [m for n, m in zip(steps["blocks"]["names"], steps["blocks"]["modules"], strict=True) if n == "mm"]
    assert products.count("layers.0.w1") == products.count("layers.1.w1") == 3


@pytest.mark.parametrize("name", programs("recomputed blocks", "recomputed inside"))
def test_recomputation_has_its_phase_outside_and_inside_of_the_graph(steps, name):
    step = steps[name]
    assert step["phases"].count("RECOMPUTE") > 5
    assert step["flops"] - step["recomputed_flops"] == steps["whole"]["flops"]
    assert step["recomputed_flops"] > 0.1 * steps["whole"]["flops"]
    assert step["activation_bytes"] < 0.4 * steps["whole"]["activation_bytes"]


def test_without_checkpoints_no_product_is_recomputed(steps):
    assert steps["whole"]["recomputed_flops"] == steps["blocks"]["recomputed_flops"] == 0


@pytest.mark.long
def test_cuda_graphs_are_noted(steps):
    assert any("CUDA graphs" in note for note in steps["graphs"]["notes"])
    assert not any("CUDA graphs" in note for note in steps["whole"]["notes"])


@pytest.mark.long
def test_what_a_graph_makes_is_in_its_pool(steps):
    """Activations that a compiled program saves are in the pool of its CUDA graphs; the loss is eager."""
    graphs, whole = steps["graphs"], steps["whole"]
    assert whole["pooled_bytes"] == 0
    assert graphs["pooled_bytes"] > whole["saved_bytes"]
    assert graphs["activation_bytes"] < 0.5 * whole["activation_bytes"]


def test_data_parallel_collectives_stay(steps):
    assert steps["data parallel"]["collectives"].count("all_reduce") >= 1
    assert steps["sharded"]["collectives"] == ["all_gather"] * 5 + ["reduce_scatter"] * 3


def test_compiled_flex_attention_is_one_kernel_each_way(steps):
    names, compiled = steps["flexible"]["names"], steps["flexible"]["compiled"]
    assert names.count("flex_attention") == names.count("flex_attention_backward") == 2
    assert sum(compiled) == 4
    assert steps["flexible"]["flops"] == steps["eager"]["flops"]


def test_a_compiled_optimizer_fuses_its_update(steps):
    update = [
        n for n, p in zip(steps["optimizer"]["names"], steps["optimizer"]["phases"], strict=True) if p == "OPTIMIZER"
    ]
    assert update
    assert all(name.startswith("fused_") for name in update)
    assert steps["optimizer"]["moved_bytes"] < steps["eager"]["moved_bytes"]


def test_a_compiled_optimizer_keeps_no_second_copy_of_its_states(steps):
    """The parameters have several sizes, and each is updated by the part of one kernel that has its tensor."""
    update = [
        n for n, p in zip(steps["optimizer"]["names"], steps["optimizer"]["phases"], strict=True) if p == "OPTIMIZER"
    ]
    assert sum("addcdiv" in name for name in update) == 1
    assert not any(name == "fused_copy_" for name in update)
    assert max(steps["optimizer"]["made_by_optimizer"], default=0) <= 512


def test_what_dynamo_cannot_capture_runs_as_it_is_and_is_named(steps):
    (fallback,) = steps["impossible"]["fallbacks"]
    assert "not_for_dynamo" in fallback
    assert "Unsupported" in fallback
    assert steps["impossible"]["flops"] == steps["eager"]["flops"]


CHECKPOINTED = """
import torch
from torch.utils.checkpoint import checkpoint

model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
wave = torch.compile(lambda x: checkpoint(lambda y: y.sin().cos(), x, use_reentrant=False).sum(), backend="aot_eager")
for _ in range(2):
    wave(model(torch.ones(8, 64, device="cuda"))).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_what_a_graph_run_operator_by_operator_recomputes_is_told(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(CHECKPOINTED, encoding="utf-8")
    (step,) = record_script(Job("", str(script)), Limits(time_s=120))
    phases = [(step.ops.name[op], Phase(phase).name) for op, phase in zip(step.op, step.phase, strict=True)]
    assert [name for name, phase in phases if phase == "RECOMPUTE"] == ["sin"]
    assert phases[2:4] == [("sin", "FORWARD"), ("cos", "FORWARD")]


ZEROS = """
import torch
model, unused = torch.nn.Linear(64, 64).cuda(), torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD([*model.parameters(), *unused.parameters()], lr=0.1)

@torch.compile
def loss_of(x):
    return model(x).sum() + 0 * sum(p.sum() for p in unused.parameters())

for _ in range(2):
    loss_of(torch.ones(8, 64, device="cuda")).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_product_with_zero_is_a_constant(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(ZEROS, encoding="utf-8")
    (step,) = record_script(Job("", str(script)), Limits(time_s=120))
    assert [step.ops.name[op] for op in step.op].count("addmm") == 1
