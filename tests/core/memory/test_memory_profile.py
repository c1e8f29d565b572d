"""Allocated memory over a step: against hand counts and against a walk over every allocation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_programs import program

from forerun.answers.analysis.predict import predict
from forerun.common.errors import ImpossiblePlan
from forerun.core.memory.profile import MemoryProfile, profile
from forerun.core.program.builder import BlockBuilder
from forerun.core.program.types import N_CATEGORIES, Block, Category, Program
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.model.spec import ModelSpec, MoESpec
from forerun.describe.plan.constraints import check_plan
from forerun.describe.plan.plan import Plan
from forerun.sources.symbolic.build import build

CLUSTER = load_cluster("h100-sxm")
LLAMA = replace(load_model("llama-3.1-8b"), n_layers=8)
SMALL = ModelSpec("small", 8, 512, 8, 4, 64, 1408, 8192)
EXPERTS = replace(SMALL, name="experts", moe=MoESpec(8, 2, 352))


# -- by hand -----------------------------------------------------------------------------------------------------------


def forward_block() -> Block:
    """Keeps 100 bytes of activations; a temporary of 40 lives during its second node."""
    block = BlockBuilder()
    block.node(0)
    block.tensor(100, Category.ACTIVATION, 0, -1)
    block.temporary(40, block.node(1))
    return block.build("forward")


def backward_block() -> Block:
    """Frees the activations after its first node, at which 30 bytes of gradients and 50 of logits appear."""
    block = BlockBuilder()
    block.node(2)
    block.tensor(30, Category.GRADIENT, 0, -1)
    block.tensor(50, Category.LOGITS, 0, 0)
    block.tensor(100, Category.ACTIVATION, -1, 0)
    block.temporary(60, block.node(3))
    return block.build("backward")


def step(blocks: list[int], resident: dict[Category, int]) -> Program:
    made = program([forward_block(), backward_block()], [blocks])
    held = np.zeros(N_CATEGORIES, np.int64)
    for category, size in resident.items():
        held[category] = size
    layers = np.array([0, 1, 1, 0][: len(blocks)], np.int32)
    return replace(made, rank_classes=(replace(made.rank_classes[0], resident_bytes=held, layer=layers),))


def test_peak_category_and_owner_of_a_step_counted_by_hand() -> None:
    made = step([0, 0, 1, 1], {Category.PARAMETER: 1000, Category.OPTIMIZER: 500})
    (found,) = profile(made)
    assert found.step_bytes.tolist() == [1500, 1600, 1700, 1630]
    assert (found.peak_bytes, found.peak_step, found.peak_node) == (1780, 2, 0)
    assert found.by_category == {"parameter": 1000, "optimizer": 500, "activation": 200, "gradient": 30, "logits": 50}
    assert found.owner(made, 0) == "op2 in backward of layer 1, micro batch 2"


def test_a_temporary_can_own_the_peak() -> None:
    made = step([0, 0], {Category.PARAMETER: 7})
    (found,) = profile(made)
    assert (found.peak_bytes, found.peak_step, found.peak_node) == (247, 1, 1)
    assert found.by_category == {"parameter": 7, "activation": 200, "temporary": 40}
    assert found.owner(made, 0) == "op1 in forward of layer 1, micro batch 1"


def test_a_step_that_allocates_nothing_holds_what_is_resident() -> None:
    block = BlockBuilder()
    block.node(0)
    made = program([block.build("empty")], [[0, 0]])
    held = np.full(N_CATEGORIES, 3, np.int64)
    (found,) = profile(replace(made, rank_classes=(replace(made.rank_classes[0], resident_bytes=held),)))
    assert found.peak_bytes == 3 * N_CATEGORIES == sum(found.by_category.values())


def test_a_block_without_nodes_can_own_the_peak() -> None:
    keep = BlockBuilder()
    keep.tensor(500, Category.UNSHARDED, 0, -1)
    made = program([forward_block(), keep.build("keep")], [[0, 1]])
    (found,) = profile(made)
    assert (found.peak_bytes, found.peak_step) == (600, 1)
    assert found.owner(made, 0) == "what is kept in keep of layer 1, micro batch 1"


def test_a_tensor_freed_by_another_block_does_not_raise_the_peak() -> None:
    free = BlockBuilder()
    free.node(0)
    free.tensor(100, Category.ACTIVATION, -1, 0)
    made = program([forward_block(), free.build("free")], [[0, 1, 0, 1]])
    (found,) = profile(made)
    assert found.peak_bytes == 140
    assert found.step_bytes.tolist() == [0, 100, 0, 100]


# -- against a walk over every allocation ------------------------------------------------------------------------------


def walk(made: Program, rank: int) -> tuple[int, dict[str, int]]:
    """Peak and its categories by replaying every allocation and free, one at a time."""
    cls = made.rank_classes[rank]
    live = {c: int(cls.resident_bytes[c]) for c in Category}
    peak, at_peak = sum(live.values()), dict(live)
    for number in cls.block:
        block = made.blocks[number]
        tensors = list(
            zip(block.tensor_bytes, block.tensor_category, block.tensor_alloc, block.tensor_free, strict=True)
        )
        for node in range(max(1, len(block))):  # a block without nodes can keep tensors
            for size, category, alloc, _ in tensors:
                if alloc == node:
                    live[Category(category)] += int(size)
            if sum(live.values()) > peak:
                peak, at_peak = sum(live.values()), dict(live)
            for size, category, _, free in tensors:
                if free == node:
                    live[Category(category)] -= int(size)
    return peak, {c.name.lower(): size for c, size in at_peak.items() if size}


def agrees(made: Program, found: list[MemoryProfile]) -> None:
    for rank, one in enumerate(found):
        peak, by_category = walk(made, rank)
        assert one.peak_bytes == peak
        assert sum(one.by_category.values()) == peak
        assert one.by_category == by_category
        assert one.owner(made, rank)


PLANS = st.fixed_dictionaries(
    {
        "micro_batch": st.integers(1, 3),
        "n_microbatches": st.sampled_from([1, 2, 4, 8]),
        "dp_replicate": st.sampled_from([1, 2]),
        "dp_shard": st.sampled_from([1, 2, 8]),
        "cp": st.sampled_from([1, 2]),
        "tp": st.sampled_from([1, 2]),
        "pp": st.sampled_from([1, 2, 4]),
        "ep": st.sampled_from([1, 2]),
        "zero_stage": st.sampled_from([0, 1, 2, 3]),
        "reshard_after_forward": st.sampled_from(["default", "always", "never"]),
        "prefetch": st.integers(0, 2),
        "pp_schedule": st.sampled_from(["1F1B", "GPipe", "Interleaved1F1B", "ZB1P", "ZBV", "DualPipeV"]),
        "activation_checkpointing": st.sampled_from(["none", "selective", "full"]),
        "checkpoint_every": st.integers(1, 2),
        "compile": st.booleans(),
        "activation_offload": st.sampled_from([0.0, 0.5]),
        "stack": st.sampled_from(["torchtitan", "megatron-core", "nemo", "deepspeed", "fms-fsdp"]),
    }
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.filter_too_much])
@given(fields=PLANS, experts=st.booleans())
def test_profile_is_a_walk_over_all_allocations(fields: dict[str, Any], experts: bool) -> None:
    model = EXPERTS if experts else SMALL
    virtual = {"Interleaved1F1B": 2, "ZBV": 2, "DualPipeV": 2}.get(fields["pp_schedule"], 1) if fields["pp"] > 1 else 1
    if fields["pp"] == 1:
        fields["pp_schedule"] = "1F1B"
    if not experts:
        fields["ep"] = 1
    plan = Plan(seq_len=1024, virtual_stages=virtual, **fields)
    try:
        check_plan(model, plan, CLUSTER)
    except ImpossiblePlan:
        return
    made = build(model, plan, CLUSTER)
    agrees(made, profile(made))


# -- what pipelines and plans do to it ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stack", ["torchtitan", "megatron-core"])
def test_the_first_stage_of_1f1b_holds_most(stack: str) -> None:
    """It has the most micro batches in flight. A small vocabulary, so that the loss at the end weighs nothing."""
    model = replace(LLAMA, vocab=1024)
    plan = Plan(seq_len=4096, pp=4, n_microbatches=8, zero_stage=0, stack=stack)
    peaks = [one.peak_bytes for one in profile(build(model, plan, CLUSTER))]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] > 1.2 * peaks[-1]


@pytest.mark.parametrize(("schedule", "virtual", "most"), [("1F1B", 1, 1.01), ("ZB1P", 1, 1.03), ("ZBV", 2, 1.05)])
def test_memory_of_a_schedule_with_bounded_flight_does_not_grow_with_micro_batches(
    schedule: str, virtual: int, most: float
) -> None:
    """ZB1P and ZBV are made to need 1F1B's memory (arXiv 2401.10241, 2405.15362)."""
    model = replace(LLAMA, vocab=1024)

    def peak(n: int, name: str = "1F1B", stages: int = 1) -> int:
        fields = dict(pp=4, n_microbatches=n, zero_stage=0, pp_schedule=name, virtual_stages=stages)
        made = build(model, Plan(seq_len=4096, stack="megatron-core", **fields), CLUSTER)  # type: ignore[arg-type]
        return max(one.peak_bytes for one in profile(made))

    assert peak(64, schedule, virtual) == peak(16, schedule, virtual)
    assert peak(16, schedule, virtual) <= most * peak(16)
    assert peak(64, "GPipe") > 1.5 * peak(16, "GPipe") > 2 * peak(16)


def test_the_prediction_reports_the_profile() -> None:
    plan = Plan(seq_len=4096, pp=2, tp=2, dp_shard=2, n_microbatches=4)
    found = profile(build(LLAMA, plan, CLUSTER))
    worst = max(found, key=lambda one: one.peak_bytes)
    said = predict(LLAMA, plan, CLUSTER)
    assert said.peak_allocated_gib == worst.peak_bytes / 2**30
    assert said.peak_rank_class == worst.rank_class
    assert said.memory_by_category_gib == {name: size / 2**30 for name, size in worst.by_category.items()}
    assert said.peak_reserved_gib >= said.peak_allocated_gib
    assert said.fits


def test_profile_of_several_rank_classes_is_one_each() -> None:
    made = program([forward_block()], [[0], [0, 0]])
    assert [one.peak_bytes for one in profile(made)] == [140, 240]
    assert [one.rank_class for one in profile(made)] == ["class 0", "class 1"]
