"""Norms as kernels: PyTorch's own one, op by op, without weights, and of single heads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forerun.answers.analysis.predict import simulate
from forerun.answers.analysis.reading import Simulation
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.plan import Plan

SEQ = 1024
MODEL = replace(load_model("llama-3.1-8b"), n_layers=2)
CLUSTER = load_cluster("h100-sxm")


def simulated(stack: str, model: ModelSpec = MODEL) -> Simulation:
    return simulate(model, Plan(seq_len=SEQ, dp_shard=8, stack=stack), CLUSTER)


def kernels(found: Simulation, name: str, elements: int) -> set[tuple[float, int, str]]:
    """Bytes for each of `elements`, launches and kind of the ops called `name`."""
    ops = found.program.ops
    rows = [row for row in range(len(ops)) if ops.name[row] == name]
    return {
        (float(ops.bytes_read[row] + ops.bytes_written[row]) / elements, int(ops.launches[row]), str(ops.kernel[row]))
        for row in rows
    }


def test_pytorch_has_one_kernel_for_rms_norm_from_2_9_on() -> None:
    elements = SEQ * MODEL.hidden
    older, newer = simulated("torchtitan-0.1"), simulated("torchtitan")
    assert kernels(older, "rmsnorm", elements) == {(36.0, 7, "")}
    assert kernels(newer, "rmsnorm", elements) == {(4.0, 1, "")}
    assert kernels(newer, "rmsnorm.backward", elements) == {(10.0, 2, "norm_backward_aten")}
    assert newer.prediction.peak_allocated_gib < older.prediction.peak_allocated_gib


@pytest.mark.parametrize("stack", ["torchtitan", "megatron-core"])
def test_a_norm_without_weights_sums_nothing_over_tokens(stack: str) -> None:
    elements = SEQ * MODEL.hidden
    found = simulated(stack, replace(MODEL, norm_weight=False))
    assert kernels(found, "weightless_norm.backward", elements) == {(6.0, 1, "")}


def test_norms_of_single_heads_gain_nothing_from_pytorchs_kernel() -> None:
    model = replace(MODEL, qk_norm=True)
    elements = SEQ * model.head_dim * (model.n_heads + model.n_kv_heads)
    assert (36.0, 7, "") in kernels(simulated("torchtitan", model), "rmsnorm", elements)
