"""What waits for a collective where it stands, and what works beside it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from forerun.answers.analysis.setup import Setup
from forerun.answers.analysis.simulate_setup import simulate_setup
from forerun.core.program.kinds import OpKind
from forerun.core.program.types import Collective, Stream
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.plan import Plan

MODEL = ModelSpec("small", 4, 1024, 16, 4, 64, 2816, 32000)
WIDE = ModelSpec("wide", 2, 4096, 32, 8, 128, 14336, 32000)
H100 = load_cluster("h100-sxm")


def share_beside_compute(kinds: set[Collective], **fields: Any) -> float:
    """Share of the time of all collectives of `kinds` during which kernels run."""
    simulation = simulate_setup(Setup(MODEL, Plan(seq_len=2048, micro_batch=4, **fields), H100))
    flat, timeline, ops = simulation.flat, simulation.timeline, simulation.program.ops
    spans = np.stack([timeline.start_ps, timeline.end_ps], axis=1)
    computes = (flat.stream == Stream.COMPUTE) & (ops.kind[flat.op] != OpKind.DELAY)
    moves = np.isin(ops.collective[flat.op], list(kinds))
    total = beside = 0
    for start, end in spans[moves].tolist():
        total += end - start
        within = np.minimum(spans[computes, 1], end) - np.maximum(spans[computes, 0], start)
        beside += int(within[within > 0].sum())
    return beside / total


def gathers_beside_compute(**fields: Any) -> float:
    return share_beside_compute({Collective.ALL_GATHER}, dp_shard=8, **fields)


@pytest.mark.parametrize("fields", [{"prefetch": 0}, {"stack": "simple-fsdp", "compile": True}])
def test_gathers_without_prefetch_run_alone(fields: dict[str, Any]) -> None:
    assert gathers_beside_compute(**fields) == 0.0


def test_prefetched_gathers_run_beside_compute() -> None:
    assert gathers_beside_compute(prefetch=1) > 0.4


def keys_beside_compute(**fields: Any) -> float:
    kinds = {Collective.ALL_GATHER, Collective.SEND_RECV}
    return share_beside_compute(kinds, cp=4, zero_stage=0, cp_method="allgather", **fields)


def test_compiled_context_parallelism_waits_for_keys() -> None:
    assert keys_beside_compute(compile=True) == 0.0
    assert keys_beside_compute(compile=False) > 0.4


def step_s(recipe: str, async_tp: bool) -> float:
    fields: dict[str, Any] = {"precision": "fp8", "fp8_recipe": recipe, "async_tp": async_tp, "compile": True}
    plan = Plan(seq_len=2048, micro_batch=4, tp=8, **fields)
    return simulate_setup(Setup(WIDE, plan, H100)).prediction.step_time_s


def test_async_tp_needs_products_that_read_what_is_gathered() -> None:
    """Rowwise scaling gathers wide values and casts them before the product."""
    assert step_s("tensorwise", async_tp=True) < 0.95 * step_s("tensorwise", async_tp=False)
    assert step_s("rowwise", async_tp=True) == step_s("rowwise", async_tp=False)


def reductions_beside_compute(**fields: Any) -> float:
    return share_beside_compute({Collective.REDUCE_SCATTER}, tp=8, zero_stage=0, **fields)


def test_async_tp_reduces_sums_of_gradients_apart() -> None:
    """A sum over query, key and value, or over gate and up, is no product that a reduction could join."""
    assert reductions_beside_compute(async_tp=True, compile=True) == 0.0
    assert reductions_beside_compute(stack="nemo", cuda_graphs=True) > 0.2
