"""Traced memory against what torch's MemTracker counts while the same step runs for real on the CPU.

The CPU's figures are of the second step. Compared are the peak, and parameters with buffers, gradients and optimizer
state at the end of the step, to 1 % each. What the two sides count differently, all of it below that:

* CUDA's allocator rounds to 512 bytes, MemTracker does not on the CPU;
* fused AdamW keeps its step counts on the device, one for each parameter, where the allocator rounds 4 bytes to 512;
* the CPU counts what a GPU run keeps on the host (step counts of AdamW that is not fused).

The peak of short sequences stands in the optimizer, of the others in backward. There, the sum of activations and
temporaries is compared, since MemTracker calls what backward recomputes activations, and what comes between forward
and the first backward temporary where the trace does not, or the reverse.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CASES = (
    "llama",
    "llama, fused",
    "llama, SGD",
    "llama, one tensor at a time",
    "llama, accumulating",
    "llama, checkpointed",
    "llama, selectively checkpointed",
    "llama, bfloat16",
    "llama, tied",
    "llama, short",
    "gpt2",
    "bert",
    "resnet50",
)
SHARDED = ("fsdp", "fsdp, kept until backward", "ddp", "ddp, views of buckets")
"""on two ranks, over gloo"""
ALLOWED = 0.01


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    if find_spec("torch") is None or find_spec("transformers") is None:
        pytest.skip("needs torch and transformers")
    path = tmp_path_factory.mktemp("memory") / "memory.json"
    command = [sys.executable, str(HERE / "real_memory.py"), str(path)]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    variables = [os.environ | shared | {"RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]
    with (path.parent / "second.txt").open("wb") as log:
        second = subprocess.Popen(command, env=variables[1], stdout=log, stderr=subprocess.STDOUT)
        try:
            done = subprocess.run(command, env=variables[0], capture_output=True, text=True, timeout=400, check=False)
        finally:
            second.kill()
            second.wait()
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(path.read_text())


@pytest.mark.long
def test_every_case_was_run(measured):
    assert tuple(measured) == CASES + SHARDED


@pytest.mark.long
@pytest.mark.parametrize("case", CASES + SHARDED)
def test_peak_is_that_of_the_cpu(measured, case):
    traced, real = measured[case]["traced"], measured[case]["real"]
    assert traced["peak"] == pytest.approx(real["peak"], rel=ALLOWED)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["parameter", "gradient", "optimizer"])
def test_what_a_step_leaves_is_that_of_the_cpu(measured, case, kind):
    traced, real = measured[case]["traced"]["at_end"], measured[case]["real"]["at_end"]
    assert traced[kind] == pytest.approx(real[kind], rel=ALLOWED)


@pytest.mark.long
@pytest.mark.parametrize("case", [case for case in CASES if case != "llama, short"])
def test_activations_at_the_peak_are_those_of_the_cpu(measured, case):
    def moving(at_peak):
        return sum(at_peak.get(kind, 0) for kind in ("gradient", "activation", "temporary", "logits"))

    traced, real = measured[case]["traced"]["at_peak"], measured[case]["real"]["at_peak"]
    assert moving(traced) == pytest.approx(moving(real), rel=ALLOWED)


@pytest.mark.long
def test_checkpointing_and_accumulation_show(measured):
    peak = {case: measured[case]["traced"]["peak"] for case in CASES}
    assert peak["llama, checkpointed"] < peak["llama, selectively checkpointed"] < peak["llama, fused"]
    assert peak["llama, fused"] < peak["llama, accumulating"]
    assert peak["llama, tied"] < peak["llama"]
