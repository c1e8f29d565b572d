"""Sizes of a recording are those of the fakes: none wraps around, and none that can't be is written down."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from forerun.common.errors import ForerunError
from forerun.core.program.builder import OpTableBuilder

torch = pytest.importorskip("torch", reason="tracing needs torch")
sizes = pytest.importorskip("forerun.sources.trace.inside.sizes")
recorder_module = pytest.importorskip("forerun.sources.trace.inside.recorder")
PROGRAM = Path(__file__).parent / "random_sizes.py"
COUNT = 24


@pytest.fixture
def recorder():
    made = recorder_module.Recorder(0, 8, 8)
    made.start()
    return made


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    out = tmp_path_factory.mktemp("sizes") / "steps.json"
    command = [sys.executable, str(PROGRAM), str(out), str(COUNT)]
    made = subprocess.run(command, cwd=out.parent, capture_output=True, text=True, timeout=600, check=False)
    assert made.returncode == 0, made.stderr[-4000:]
    return json.loads(out.read_text(encoding="utf-8"))


def block(size_bytes):
    return -(-size_bytes // 512) * 512


@pytest.mark.long
def test_eager_and_compiled_steps_of_any_size_have_the_same_bytes(steps):
    assert len(steps["steps"]) == COUNT
    assert steps["notes"] == []
    for step in steps["steps"]:
        assert step["compiled"] == step["eager"], step["shape"]


@pytest.mark.long
def test_tensors_have_the_bytes_that_their_shapes_say(steps):
    for step in steps["steps"]:
        (batch, rows, columns), element = step["shape"], step["element_bytes"]
        weights = [block(rows * columns * element)] * 3  # the weight, its gradient, its momentum
        products = [block(batch * columns * element)] * 2  # the product, and what its gradient is made of
        expected = sorted([*weights, *products, block(batch * rows * element)])
        there = [size for size in step["eager"]["tensors"] if size > 512]
        assert there == [size for size in expected if size > 512], step["shape"]
    assert {1 << 31, 1 << 32, 1 << 33, 1 << 40} <= {
        size for step in steps["steps"] for size in step["eager"]["tensors"]
    }


@pytest.mark.parametrize("size", [-1, -(2**31), (1 << 50) + 1, np.int64(512), 512.0])
def test_a_size_that_no_tensor_has_is_an_error_where_it_is_recorded(recorder, size):
    storage = torch.empty(8).untyped_storage()
    with pytest.raises(ForerunError, match=r"a tensor has .* bytes"):
        recorder.memory.allocated(storage, size)
    with pytest.raises(ForerunError, match=r"a tensor has .* bytes"):
        recorder.memory.workspace(size, 0)


def test_a_recording_that_disagrees_with_the_tensors_is_refused_and_names_the_kernel(recorder):
    tensor = torch.empty(1 << 20, dtype=torch.uint8)
    recorder.memory.allocated(tensor.untyped_storage(), 1 << 19)
    recorder.node(recorder.ops.memory("half_of_it", 1, 1))
    with pytest.raises(ForerunError, match="524288 bytes recorded of a tensor of half_of_it, 1048576 there"):
        recorder.finish([""], {})


def test_a_total_that_is_not_the_sum_is_refused(recorder):
    tensor = torch.empty(1 << 20, dtype=torch.uint8)
    recorder.memory.allocated(tensor.untyped_storage(), 1 << 20)
    recorder.memory.allocated_bytes -= 1 << 32
    with pytest.raises(ForerunError, match="lost count of memory"):
        recorder.finish([""], {})


@pytest.mark.parametrize("size", [-2.0, float("inf"), float("nan")])
def test_an_operation_of_a_size_that_cannot_be_is_refused_by_name(size):
    ops = OpTableBuilder()
    ops.memory("fine", 1, 1)
    ops.memory("wrong", 1, size)
    with pytest.raises(ForerunError, match="bytes_written of wrong"):
        sizes.check_ops(ops.build())
