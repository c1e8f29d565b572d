"""torch.compile sees nothing of the tracer: regions have the graphs and breaks that they have without it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import forerun
from forerun.core.program.counts import op_counts
from forerun.core.program.types import Phase
from forerun.interfaces.cli.main import run

pytest.importorskip("torch", reason="tracing needs torch")
PROGRAM = Path(__file__).parent / "captured_regions.py"
NAMES = (
    "forward only",
    "fused update inside",
    "multi-tensor update inside",
    "plain update inside",
    "own update inside",
    "whole step",
    "whole step, breaks",
    "whole step, recomputed",
    "whole step, recomputed with breaks",
    "whole step, replicated",
    "optimizer alone",
    "fused optimizer alone",
    "scheduler",
    "hooks",
    "closure",
    "own function",
    "values",
    "saves",
    "reduces",
    "sharded",
)


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    """What Dynamo captured of each program, with the tracer and without it."""
    folder = tmp_path_factory.mktemp("captured")
    runs = {}
    for how in ("traced", "plain"):
        command = [sys.executable, str(PROGRAM), str(folder / how), how]
        runs[how] = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
    for process in runs.values():
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors[-4000:]
    return {how: json.loads((folder / how).read_text(encoding="utf-8")) for how in runs}


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_region_has_the_graphs_and_breaks_that_it_has_without_the_tracer(captured, name):
    assert captured["traced"][name] == captured["plain"][name]
    assert captured["plain"][name]["graphs"] or captured["plain"][name]["breaks"]


@pytest.mark.long
def test_every_program_is_compared_and_none_falls_back(captured):
    assert captured["traced"].pop("notes") == []
    assert tuple(captured["traced"]) == NAMES


OWN_STEP = """
import sys
import torch
from forerun.sources.trace.marks import mark_step

class Descent(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad)

model = torch.nn.Linear(256, 256).cuda()
optimizer = Descent(model.parameters())

@torch.compile
def captured(x):  # the step is part of a graph
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss

@torch.compile
def called(x):  # no tensor is left after backward: Dynamo leaves what follows alone, and captures the step by itself
    model(x).square().mean().backward()
    optimizer.step()

@torch.compile
def marked(x):
    loss = captured(x)
    mark_step()
    return loss

for _ in range(2):
    globals()[sys.argv[1]](torch.ones(64, 256, device="cuda"))
    optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["captured", "called", "marked"])
def test_a_step_inside_a_compiled_function_ends_the_step(tmp_path, monkeypatch, how):
    (tmp_path / "train.py").write_text(OWN_STEP, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert run(["trace", "train.py", "-o", "step.program", "--", how]) == 0
    program = forerun.load_program(tmp_path / "step.program")
    (updates,) = op_counts(program, (Phase.OPTIMIZER,))
    assert {name for name, count in zip(program.ops.name, updates, strict=True) if count} == {"fused_sub_copy_"}
    assert updates.sum() == 2  # weight and bias
    fused = [op for op, name in enumerate(program.ops.name) if name.startswith("fused_")]
    assert set(program.ops.launches[fused]) == {1}
    assert program.meta["notes"] == []
