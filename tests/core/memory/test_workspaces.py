"""The workspaces that PyTorch and Transformer Engine keep for cuBLAS."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from saved_programs import H100, plan_of, program_of

from forerun.answers.analysis.predict_program import predict_program
from forerun.common.errors import ForerunError
from forerun.common.units import GIB, MIB
from forerun.core.memory.profile import profile
from forerun.core.memory.workspaces import configured_bytes, workspace_count
from forerun.core.program.types import Phase
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan
from forerun.describe.stacks.catalog import load_stack
from forerun.sources.symbolic.build import build


@pytest.mark.parametrize(("cluster", "each_mib"), [("h100-sxm", 32), ("a100-sxm", 8.125)])
def test_workspaces_are_allocated_throughout(cluster: str, each_mib: float) -> None:
    place = load_cluster(cluster)
    without, held = (
        predict_program(program_of(plan_of(dp_shard=8), H100, blas_workspaces=[count]), place).prediction
        for count in (0, 2)
    )
    more = (held.peak_allocated_gib - without.peak_allocated_gib) * GIB
    assert more == pytest.approx(2 * each_mib * MIB)
    assert held.peak_reserved_gib >= without.peak_reserved_gib


@pytest.mark.parametrize(("cluster", "own_mib"), [("h100-sxm", 32), ("a100-sxm", 8.125)])
@pytest.mark.parametrize("mib", [0, 32, 64])
def test_a_program_that_sets_their_size_has_that_size_on_every_device(cluster: str, own_mib: float, mib: int) -> None:
    place = load_cluster(cluster)
    own, configured = (
        predict_program(program_of(plan_of(dp_shard=8), H100, blas_workspaces=[2], blas_workspace_bytes=size), place)
        for size in (None, mib * MIB)
    )
    more = (configured.prediction.peak_allocated_gib - own.prediction.peak_allocated_gib) * GIB
    assert more == pytest.approx(2 * (mib - own_mib) * MIB)


@pytest.mark.parametrize(
    ("setting", "mib"),
    [(":4096:8", 32), (":16:8", 0.125), (":4096:2:16:8", 8.125), (":0:0", 0), ("", None), ("none", None)],
)
def test_the_setting_is_read_as_pytorch_reads_it(setting: str, mib: float | None) -> None:
    found = configured_bytes(setting)
    assert found == (None if mib is None else mib * MIB)


@pytest.mark.parametrize("size", [-1, 1 << 41, 1.5, "8 MiB"])
def test_a_size_that_makes_no_sense_is_refused(size: object) -> None:
    program = program_of(plan_of(dp_shard=8), H100, blas_workspaces=[2], blas_workspace_bytes=size)
    with pytest.raises(ForerunError, match="blas_workspace_bytes"):
        predict_program(program, load_cluster("h100-sxm"))


@pytest.mark.parametrize(
    ("cluster", "stack", "mib"),
    [
        ("h100-sxm", "torchtitan", 2 * 32),
        ("h100-sxm", "megatron-core", 2 * 32 + 32),  # and Transformer Engine's own
        ("h100-sxm", "megatron-core-local", 2 * 32),
        ("a100-sxm", "megatron-core", 2 * 8.125 + 4),
        ("mi300x", "torchtitan", 2 * 128),
        ("h100-sxm", "mxnet-vision", 0),
    ],
)
def test_a_plan_has_those_of_its_framework(cluster: str, stack: str, mib: float) -> None:
    place, model, own = load_cluster(cluster), load_model("gpt2-small"), load_stack(stack)
    plan = Plan(seq_len=1024, micro_batch=2, dp_replicate=2, zero_stage=0, stack=stack)
    bare = replace(own, blas_workspaces=0, transformer_engine=False)
    peaks = [max(one.peak_bytes for one in profile(build(model, plan, place, some))) for some in (own, bare)]
    assert peaks[0] - peaks[1] == mib * MIB


def test_each_thread_and_stream_with_products_has_its_own() -> None:
    phase = np.array([Phase.FORWARD, Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE, Phase.OPTIMIZER], np.int8)
    stream = np.array([0, 3, 0, 0, 0], np.int32)
    assert workspace_count(np.ones(5, bool), phase, stream) == 3
    assert workspace_count(np.array([1, 0, 0, 0, 0], bool), phase, stream) == 1
    assert workspace_count(np.zeros(5, bool), phase, stream) == 0
