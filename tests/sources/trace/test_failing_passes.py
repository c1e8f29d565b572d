"""A graph that torch.compile can't compile runs operator by operator, where the user allows it."""

import pytest

from forerun.common.errors import ForerunError
from forerun.sources.trace.job import Job
from forerun.sources.trace.launch import Limits, record_script

pytest.importorskip("torch", reason="tracing needs torch")
pytestmark = pytest.mark.slow
SCRIPT = """
import json
import sys
import torch
import torch._inductor.config as config

if sys.argv[1] == "passes":
    config.post_grad_custom_post_pass = json.loads
elif sys.argv[1] == "graph":
    config.joint_custom_pre_pass = json.loads
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
wave = torch.compile(lambda x: x.sin().cos(), mode="reduce-overhead" if sys.argv[1] == "graphs" else None)
for _ in range(2):
    wave(model(torch.ones(8, 64, device="cuda"))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
CALL = SCRIPT.count("\n", 0, SCRIPT.index("    wave(model")) + 1


def recorded(tmp_path, way, **settings):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    (recording,) = record_script(Job("", str(script), (way,), **settings), Limits(time_s=120))
    waves = [node for node, op in enumerate(recording.op) if {"sin", "cos"} & set(recording.ops.name[op].split("_"))]
    names = [recording.ops.name[recording.op[node]] for node in waves]
    return recording, names, recording.compiled[waves].tolist()


REASON = "(TypeError: the JSON object must be str, bytes or bytearray, not Graph)"


@pytest.mark.parametrize(
    ("way", "what", "names", "compiled"),
    [
        ("passes", "Inductor's passes over a graph", ["fused_sin_cos", "fused_sin_neg_mul_cos"], [1, 1]),
        ("graph", "a graph", ["sin", "cos", "sin", "cos"], [1, 1, 0, 0]),
    ],
)
def test_what_runs_uncompiled_is_named_with_its_place(tmp_path, way, what, names, compiled):
    recording, *found = recorded(tmp_path, way, allow_fallback=True)
    (said,) = recording.meta["fallbacks"]
    assert said == f"{what} ran uncompiled at {tmp_path / 'train.py'}:{CALL} {REASON}"
    assert found == [names, compiled]


def test_it_ends_the_trace_where_nobody_allows_it(tmp_path):
    with pytest.raises(ForerunError) as failed:
        recorded(tmp_path, "graph")
    assert f"torch.compile fails on a graph {REASON}" in str(failed.value)
    assert str(failed.value).endswith(f"train.py:{CALL}")


def test_cuda_graphs_of_the_compiler_are_noted(tmp_path):
    recording, names, compiled = recorded(tmp_path, "graphs")
    assert recording.meta["notes"] == ["cuda_graphs: compiled with CUDA graphs"]
    assert names == ["fused_sin_cos", "fused_sin_neg_mul_cos"]
    assert compiled == [1, 1]
