"""Allocated and reserved memory where compiled code runs from CUDA graphs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from forerun.answers.analysis.memory_need import memory_need
from forerun.answers.analysis.prediction import Prediction
from forerun.answers.analysis.setup import Setup
from forerun.answers.analysis.simulate_setup import simulate_setup
from forerun.common.units import GIB
from forerun.core.memory.allocator_settings import AllocatorSettings
from forerun.core.memory.peak_tensors import peak_tensors
from forerun.core.memory.profile import profile
from forerun.core.program.types import Category
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan
from forerun.describe.stacks.catalog import load_stack
from forerun.sources.symbolic.build import build

pytestmark = pytest.mark.compiles(8)
MODEL = replace(load_model("llama-3.1-8b"), n_layers=4)
LOGITS = 4096 * MODEL.vocab * 2 / GIB


def predicted(**fields: object) -> Prediction:
    values = {"seq_len": 4096, "dp_shard": 8, "stack": "simple-fsdp", "compile": True, "attention": "sdpa", **fields}
    plan = Plan(**values)  # type: ignore[arg-type]
    return simulate_setup(Setup(MODEL, plan, load_cluster("h100-sxm"), replays=True)).prediction


def test_what_graphs_hold_is_not_allocated() -> None:
    apart = predicted(cuda_graphs=True)
    held = {"parameter", "optimizer", "gradient", "communication"}
    assert set(apart.memory_by_category_gib) <= held
    assert apart.peak_allocated_gib == pytest.approx(sum(apart.memory_by_category_gib.values()))
    assert apart.peak_allocated_gib < predicted().peak_allocated_gib


def test_a_loss_beside_the_graphs_is_allocated() -> None:
    """Its log-softmax and both gradients are; logits come out of a graph."""
    apart = predicted(cuda_graphs=True, compile_loss=False).memory_by_category_gib
    assert apart["logits"] == pytest.approx(3 * LOGITS, rel=1e-6)
    assert set(apart) <= {"parameter", "optimizer", "logits"}


def test_the_pool_of_graphs_is_reserved_and_shared_with_nothing() -> None:
    beside, apart = (predicted(cuda_graphs=graphs, compile_loss=False) for graphs in (False, True))
    assert apart.peak_reserved_gib > beside.peak_reserved_gib - 0.1
    assert apart.peak_reserved_gib > apart.peak_allocated_gib + 1


def test_a_loss_that_is_not_compiled_holds_more() -> None:
    """Its log-softmax beside two gradients of that size, where a graph of its own has logits and one gradient."""
    eager, compiled = (
        predicted(compile_loss=each, graph_breaks=True, seq_len=32768).peak_allocated_gib for each in (False, True)
    )
    assert eager - compiled == pytest.approx(8 * LOGITS, rel=0.02)


def test_a_loss_that_is_compiled_alone_holds_what_a_compiled_one_does() -> None:
    """The loss is a graph, and every layer is as it is without a compiler."""
    fields = {"stack": "torchtitan", "seq_len": 32768, "cuda_graphs": False}
    eager, alone, whole = (
        predicted(**fields, **change).memory_by_category_gib
        for change in ({"compile": False}, {"compile_model": False}, {})
    )
    assert alone["logits"] == whole["logits"] == pytest.approx(8 * LOGITS)
    assert eager["logits"] == pytest.approx(16 * LOGITS)
    assert alone["activation"] == eager["activation"] > whole["activation"]


def test_what_a_traced_program_holds_in_the_pool_of_graphs_is_reserved_and_not_allocated() -> None:
    plan = Plan(seq_len=4096, dp_shard=8, stack="simple-fsdp", compile=True, attention="sdpa")
    cluster = load_cluster("h100-sxm")
    program = build(MODEL, plan, cluster)
    pool, activation = int(Category.GRAPH_POOL), int(Category.ACTIVATION)
    blocks = [
        replace(
            one, tensor_category=np.where(one.tensor_category == activation, pool, one.tensor_category).astype(np.int8)
        )
        for one in program.blocks
    ]
    apart, beside = (
        memory_need(one, cluster, load_stack("pytorch"), settings=AllocatorSettings())
        for one in (replace(program, blocks=tuple(blocks)), program)
    )
    (alone,) = profile(program, without=(Category.ACTIVATION,))
    assert apart.profiles[0].peak_bytes == alone.peak_bytes < beside.profiles[0].peak_bytes
    assert apart.held.peak_bytes > 0.95 * beside.profiles[0].peak_bytes
    found = peak_tensors(replace(program, blocks=tuple(blocks)), 0, apart.profiles[0])
    assert sum(one.total_bytes for one in found) == alone.peak_bytes
