"""Triton kernels that a program launches: what they write, and how they are recorded."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import textwrap

import pytest

from forerun.core.program.storage import load
from forerun.sources.trace.inside.kernels.triton_kernels import stored_arguments


def copies(source, target, count, BLOCK):
    offsets = tl.arange(0, BLOCK)  # noqa: F821
    tl.store(target + offsets, tl.load(source + offsets, mask=offsets < count))  # noqa: F821


def scatters(source, places, target, size):
    at = tl.load(places + tl.program_id(0))  # noqa: F821
    pointer = target
    pointer += at * size
    row = pointer + tl.arange(0, 4)  # noqa: F821
    tl.atomic_add(row, tl.load(source))  # noqa: F821


def calls(source, target, other):
    helper(source, other)  # noqa: F821
    for _ in range(target):
        pass


@pytest.mark.parametrize(
    ("kernel", "stored", "kept"),
    [
        (copies, "target", "source"),
        (scatters, "target", "places"),
        (scatters, "target", "source"),
        (calls, "other", "target"),
    ],
)
def test_a_kernel_writes_what_its_source_stores_to(kernel, stored, kept):
    found = stored_arguments(kernel)
    assert stored in found
    assert kept not in found


def test_a_kernel_without_source_may_write_everything():
    made: dict[str, object] = {}
    exec("def hidden(a, b): pass", made)
    assert stored_arguments(made["hidden"]) == {"a", "b"}


PROGRAM = """
import torch, triton, triton.language as tl

@triton.autotune(configs=[triton.Config({"BLOCK": 128}), triton.Config({"BLOCK": 256})], key=["no_such_argument"])
@triton.jit
def doubled(source, target, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + offsets, 2 * tl.load(source + offsets, mask=offsets < count), mask=offsets < count)

model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    counts = torch.arange(4, device="cuda")
    target = torch.zeros(1000, device="cuda")
    kept = torch.full((3,), 5, device="cuda")
    written = torch.full((3,), 5, device="cuda")
    doubled[lambda meta: (triton.cdiv(1000, meta["BLOCK"]),)](torch.ones(1000, device="cuda"), target, 1000)
    doubled[(1,)](kept, written, 3)
    assert kept.sum().item() == 15, "what is only read is still known"
    assert written.sum().item() != 15, "what is written is not known any more"
    model(torch.ones(2, 64, device="cuda")).sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_a_launch_is_one_kernel_that_moves_its_tensors(tmp_path):
    script, program = tmp_path / "train.py", tmp_path / "step.program"
    script.write_text(textwrap.dedent(PROGRAM))
    command = [
        sys.executable,
        "-c",
        "from forerun.interfaces.cli.main import main; main()",
        "trace",
        str(script),
        "-o",
        str(program),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    traced = load(program)
    rows = [op for op, name in enumerate(traced.ops.name) if name == "doubled"]
    moved = {(int(traced.ops.bytes_read[op]), int(traced.ops.bytes_written[op])) for op in rows}
    assert moved == {(4000, 4000), (24, 24)}
    assert "Triton kernel doubled: costed by its bytes" in traced.meta["notes"]
