"""A compilation that fails ends the trace, or is part of everything that is said of the Program."""

from __future__ import annotations

import json
import textwrap

import pytest

from forerun.core.program.storage import load
from forerun.interfaces.cli.main import run

pytest.importorskip("torch")
pytestmark = pytest.mark.slow
_SCRIPT = """
import sys
import torch

model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch._dynamo.config.recompile_limit = 1

def broken(graph, inputs):
    raise ValueError("never works")

def plain(x, how):
    return (model(x) * how).sum()

def breaks(x, how):
    torch._dynamo.graph_break()
    return model(x).sum()

step = {
    "backend": torch.compile(plain, backend=broken),
    "limit": torch.compile(plain, dynamic=False),
    "fullgraph": torch.compile(breaks, fullgraph=True),
    "break": torch.compile(breaks),
}[sys.argv[1]]
for _ in range(3):
    for how in (1, 2, 3):
        try:
            step(torch.randn(8, 64, device="cuda"), how if sys.argv[1] == "limit" else 1).backward()
        except Exception:
            pass
    optimizer.step()
"""
_REASONS = {
    "backend": ("fails on plain (ValueError: never works)", 10),
    "limit": ("fails on plain (RuntimeError: it was compiled more often than", 12),
    "fullgraph": ("fails on breaks (Unsupported: Call to `torch._dynamo.graph_break()`", 16),
}


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(_SCRIPT), encoding="utf-8")
    return path


@pytest.mark.parametrize("way", _REASONS)
def test_a_failed_compilation_ends_the_trace_with_its_reason_and_place(way, script, capsys):
    assert run(["trace", str(script), "-o", str(script.with_suffix(".program")), "--", way]) == 2
    said = capsys.readouterr().err
    reason, line = _REASONS[way]
    assert reason in said
    assert f"{script}:{line}" in said
    assert said.count("\n") == 1


def test_a_graph_break_is_no_failure(script):
    out = script.with_suffix(".program")
    assert run(["trace", str(script), "-o", str(out), "--", "break"]) == 0
    assert load(out).meta["fallbacks"] == []


def test_allowed_fallbacks_are_said_everywhere_and_widen_the_band(script, capsys):
    out, page = script.with_suffix(".program"), script.with_suffix(".html")
    assert (
        run(["trace", "--allow-fallback", "--tokens-per-step", "77", str(script), "-o", str(out), "--", "backend"]) == 0
    )
    assert "warning: torch.compile failed: plain ran uncompiled" in capsys.readouterr().out
    assert load(out).meta["tokens_per_step"] == 77
    predict = ["predict", "--program", str(out), "--cluster", "h100-sxm"]
    assert run([*predict, "--json", "--report", str(page)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert any("torch.compile failed: plain ran uncompiled" in line for line in found["warnings"])
    assert found["step_time_low_s"] < found["step_time_s"] / 4
    assert "torch.compile failed: plain ran uncompiled" in page.read_text(encoding="utf-8")
    assert run(predict) == 0
    assert "torch.compile failed" in capsys.readouterr().out


_UNFINISHED = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("nccl")
mesh = dist.device_mesh.init_device_mesh("cuda", (2,))
model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64)).cuda()
parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
tail = torch.compile(lambda x: x.sin().sum())
for _ in range(2):
    y = model(torch.randn(8, 64, device="cuda"))
    tail(y.clone() if sys.argv[1] == "finished" else y).backward()
    optimizer.step()
"""


@pytest.mark.parametrize("given", ["finished", "unfinished"])
def test_an_input_that_a_collective_still_computes_would_have_no_gradient(given, tmp_path, capsys):
    path = tmp_path / "tail.py"
    path.write_text(_UNFINISHED)
    program = tmp_path / "step.program"
    code = run(["trace", str(path), "--world-size", "2", "-o", str(program), "--", given])
    assert program.is_file() == (given == "finished")
    assert code == (0 if given == "finished" else 2)
    if given == "unfinished":
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert "input 1 of a compiled function, (8, 64), is an AsyncCollectiveTensor" in line
        assert "x.clone()" in line
        assert line.endswith("tail.py:16")
