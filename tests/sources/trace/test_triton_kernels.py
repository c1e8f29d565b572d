"""Triton kernels that a program launches: what they write, and how they are recorded."""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from forerun.core.program.storage import load
from forerun.sources.trace.inside.kernels import triton_kernels
from forerun.sources.trace.inside.kernels.triton_kernels import stored_arguments
from forerun.sources.trace.opaque import Rule


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


def names(source, target, other):
    tl.store(value=tl.load(source), pointer=target)  # noqa: F821
    helper(source=tl.load(source), out=other)  # noqa: F821


def describes(source, target):
    rows = tl.make_tensor_descriptor(target, [16], [1], [16])  # noqa: F821
    columns = tl.make_tensor_descriptor(source, [16], [1], [16])  # noqa: F821
    rows.store([0], columns.load([0]))


@pytest.mark.parametrize(
    ("kernel", "stored", "kept"),
    [
        (names, "target", "source"),
        (names, "other", "source"),
        (describes, "target", "source"),
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


# -- without Triton, whose classes a few lines stand for -------------------------------------------------------------


class Function:
    """Triton's JITFunction."""

    def __init__(self, fn):
        self.fn, self.arg_names, self.ran = fn, list(inspect.signature(fn).parameters), []

    def run(self, *args, grid, warmup, **kwargs):
        self.ran.append((args, grid, warmup, kwargs))
        return "compiled"


class Recorded:
    """The launches and notes of a trace."""

    def __init__(self):
        self.launched, self.notes, self.recorder = [], [], self
        self.note = self.notes.append

    def launch(self, *launch):
        self.launched.append(launch)


def products(a, b, out, alpha=2, beta=3):
    tl.store(out, tl.dot(tl.load(a), tl.load(b)))  # noqa: F821


@pytest.fixture
def recorded():
    """A class of kernels whose launches are recorded, and what was."""
    kernel_class, launches = type("Function", (Function,), {}), Recorded()
    triton_kernels._launches(launches, SimpleNamespace(JITFunction=kernel_class))
    return kernel_class, launches


def test_launches_on_fakes_are_recorded_with_all_parameters_and_others_run(recorded):
    kernel_class, launches = recorded
    kernel, real = kernel_class(products), torch.zeros(4)
    assert kernel.run(real, real, real, grid=(1,), warmup=False, alpha=5) == "compiled"
    assert kernel.ran == [((real, real, real), (1,), False, {"alpha": 5})]
    assert kernel.run(1, 2, 3, grid=(1,), warmup=True) == "compiled"
    with FakeTensorMode():
        a, b, out = (torch.zeros(4) for _ in range(3))
    assert kernel.run(a, b, out, grid=(1,), warmup=True) is None
    assert launches.launched == launches.notes == []
    assert kernel.run(real, b, out, grid=(2,), warmup=False, alpha=5) is None
    given = {"a": real, "b": b, "out": out, "alpha": 5, "beta": 3}
    assert launches.launched == [(None, "products", given, ("out",))]
    (note,) = launches.notes
    assert note.startswith("Triton kernel products: it costs the bytes that it reads and writes and not its matrix")
    assert len(kernel.ran) == 2


@pytest.mark.parametrize("costed", [False, True])
def test_a_described_kernel_writes_what_its_description_says(recorded, costed, monkeypatch):
    kernel_class, launches = recorded
    rule = Rule("triton", "copies", writes=("count",), of_cost=print if costed else None)
    monkeypatch.setattr(
        triton_kernels, "rule_of", lambda kind, name: rule if (kind, name) == ("triton", "copies") else None
    )
    with FakeTensorMode():
        a = torch.zeros(4)
    kernel_class(copies).run(a, a, 3, 128, grid=(1,), warmup=False)
    ((used, name, _, stored),) = launches.launched
    assert (used, name, stored) == (rule, "copies", ("count",))
    assert len(launches.notes) == (not costed)
    assert all("matrix products" not in note for note in launches.notes)


def test_the_first_configuration_is_taken_and_wrong_tuning_keys_are_dropped():
    class Tuner:
        def __init__(self, fn, arg_names, configs, key):
            self.fn, self.configs, self.key = fn, configs, key

        def run(self, *args, **kwargs):
            raise AssertionError("nothing can be timed")

    triton_kernels._untuned(SimpleNamespace(Autotuner=Tuner))
    configs = [SimpleNamespace(all_kwargs=lambda size=size: {"BLOCK": size, "num_warps": 4}) for size in (128, 256)]
    kernel = Function(copies)
    tuner = Tuner(kernel, ["source", "count"], configs, key=["count", "no_such_argument"])
    assert tuner.key == ["count"]
    assert Tuner(kernel, ["source"], configs, None).key == []
    assert tuner.run("source", grid=(1,), warmup=False, num_warps=8) == "compiled"
    assert kernel.ran == [(("source",), (1,), False, {"BLOCK": 128, "num_warps": 8})]


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
