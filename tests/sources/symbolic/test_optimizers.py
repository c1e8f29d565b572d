"""Optimizer states, products and exchanges of a Program, against formulas, under each sharding."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from forerun.common.errors import ImpossiblePlan
from forerun.core.program.counts import op_counts
from forerun.core.program.types import Category, Phase, Program
from forerun.describe.kernels.optimizers import optimizer, optimizers
from forerun.describe.model.parameters import parameter_count
from forerun.describe.model.spec import ModelSpec, MoESpec
from forerun.describe.plan.constraints import check_plan
from forerun.describe.plan.plan import Plan
from forerun.describe.stacks.catalog import load_stack
from forerun.sources.symbolic.build import build
from forerun.sources.symbolic.training_state import training_state

from .cases import CLUSTER, DENSE, plan

LAYER = [(1024, 1024), (512, 1024), (512, 1024), (1024, 1024), (2816, 1024), (2816, 1024), (1024, 2816)]
"""matrices of a layer of DENSE"""
IN_MATRICES = 8 * sum(m * n for m, n in LAYER)
OTHERS = parameter_count(DENSE) - IN_MATRICES
EXPERTS = ModelSpec("experts", 2, 512, 8, 8, 64, 0, 1024, moe=MoESpec(8, 2, 256))


def states(program: Program) -> int:
    return int(program.rank_classes[0].resident_bytes[Category.OPTIMIZER])


def work(program: Program) -> float:
    """FLOPs of the products of an optimizer step, mean over ranks."""
    return float(op_counts(program, (Phase.OPTIMIZER,))[0] @ (program.ops.flops * program.ops.is_gemm))


def flops(name: str, shapes: Iterable[tuple[int, int]]) -> float:
    own = optimizer(name).matrices
    assert own is not None
    return sum(each.flops for shape in shapes for each in own.work(*shape))


def of(name: str, model: ModelSpec = DENSE, **fields: object) -> Program:
    return build(model, plan(optimizer=name, stack="pytorch", **fields), CLUSTER)


WIDE = {"precision": "fp32", "stack": "pytorch"}
PER_ELEMENT = {"adamw": 8, "adam": 8, "sgd": 4}


@pytest.mark.parametrize("name", sorted(PER_ELEMENT))
@pytest.mark.parametrize(("stage", "ranks"), [(0, 1), (1, 4), (2, 4), (3, 4)])
def test_element_wise_states_are_shared_by_the_ranks_that_shard_them(name: str, stage: int, ranks: int) -> None:
    found = build(DENSE, plan(optimizer=name, dp_shard=4, zero_stage=stage, **WIDE), CLUSTER)
    assert states(found) == pytest.approx(PER_ELEMENT[name] * parameter_count(DENSE) / ranks, rel=1e-5)


@pytest.mark.parametrize(("stage", "ranks"), [(0, 1), (1, 4), (3, 4)])
def test_8_bit_adamw_keeps_two_bytes_and_two_scales_for_256_elements(stage: int, ranks: int) -> None:
    found = build(DENSE, plan(optimizer="adamw8bit", dp_shard=4, zero_stage=stage, **WIDE), CLUSTER)
    norms = 17 * 1024  # below 4096 elements: 8 bytes
    expected = (parameter_count(DENSE) - norms) * (2 + 8 / 256) + 8 * norms
    assert states(found) == pytest.approx(expected / ranks, rel=1e-4)


@pytest.mark.parametrize(("stage", "ranks"), [(0, 1), (1, 4), (2, 4), (3, 4)])
def test_muon_keeps_one_state_of_matrices_and_adamw_two_of_the_rest(stage: int, ranks: int) -> None:
    found = build(DENSE, plan(optimizer="muon", dp_shard=4, zero_stage=stage, **WIDE), CLUSTER)
    assert states(found) == pytest.approx((4 * IN_MATRICES + 8 * OTHERS) / ranks, rel=1e-3)


def test_adafactor_keeps_rows_and_columns_whole_vectors_of_a_flat_shard_and_columns_on_every_fsdp_rank() -> None:
    sides = 8 * sum(m + n for m, n in LAYER)
    assert states(build(DENSE, plan(optimizer="adafactor", zero_stage=0, **WIDE), CLUSTER)) == 4 * (sides + OTHERS)
    flat = build(DENSE, plan(optimizer="adafactor", dp_shard=4, zero_stage=1, **WIDE), CLUSTER)
    assert states(flat) == pytest.approx(parameter_count(DENSE), rel=1e-5)  # 4 bytes an element, over 4 ranks
    rows, columns = (8 * sum(shape[axis] for shape in LAYER) for axis in (0, 1))
    shards = build(DENSE, plan(optimizer="adafactor", dp_shard=4, zero_stage=3, **WIDE), CLUSTER)
    assert states(shards) == pytest.approx(4 * (rows / 4 + columns + OTHERS / 4), rel=1e-5)
    sums = [row for row, name in enumerate(shards.ops.name) if name == "optimizer.sum"]
    assert {float(size) for size in shards.ops.bytes_comm[sums]} == {4096.0, 4 * 2816.0, 12.0}


def test_soap_keeps_two_squares_of_each_side() -> None:
    squares = 8 * sum(m * m + n * n for m, n in LAYER)
    found = build(DENSE, plan(optimizer="soap", zero_stage=0, **WIDE), CLUSTER)
    assert states(found) == 8 * parameter_count(DENSE) + 8 * squares


@pytest.mark.parametrize("name", ["muon", "soap", "shampoo"])
def test_a_rank_without_sharding_multiplies_all_its_matrices(name: str) -> None:
    assert work(of(name, zero_stage=0, dp_shard=4)) == pytest.approx(8 * flops(name, LAYER), rel=1e-3)


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_share_out_the_products_of_muon(stage: int) -> None:
    everything = 8 * flops("muon", LAYER)
    for ranks in (2, 4, 8):
        found = work(of("muon", dp_shard=ranks, zero_stage=stage))
        assert everything / ranks * 0.999 <= found <= everything / ranks * 1.3
    alone = work(of("muon", dp_shard=1024, zero_stage=stage))  # more ranks than matrices
    most = [(2816, 1024)] if stage == 1 else set(LAYER)  # FSDP2 takes matrices of one shape at a time
    assert alone == pytest.approx(flops("muon", most))


def test_tensor_parallel_ranks_work_on_their_parts_alone() -> None:
    parts = [(512, 1024), (256, 1024), (256, 1024), (1024, 512), (1408, 1024), (1408, 1024), (1024, 1408)]
    assert work(of("muon", tp=2, zero_stage=0)) == pytest.approx(8 * flops("muon", parts))


def test_fused_projections_of_queries_keys_and_values_are_taken_apart() -> None:
    fused = build(DENSE, plan(optimizer="muon", zero_stage=0, stack="megatron-core"), CLUSTER)
    joined = [*LAYER[:4], (5632, 1024), LAYER[-1]]  # Megatron-Core keeps gate and up in one matrix
    assert work(fused) == pytest.approx(8 * flops("muon", joined))


def test_fsdp_brings_whole_matrices_to_ranks_and_takes_them_back_in_two_bytes() -> None:
    found = of("muon", dp_shard=4)
    counts = op_counts(found, (Phase.OPTIMIZER,))[0]
    for name in ("optimizer.gather", "optimizer.scatter"):
        rows = [row for row, each in enumerate(found.ops.name) if each == name]
        assert float((counts[rows] * found.ops.bytes_comm[rows]).sum()) == 2 * IN_MATRICES / 4
    assert "optimizer.gather" not in of("muon", dp_shard=4, zero_stage=1).ops.name
    assert "parameters.gather" in of("muon", dp_shard=4, zero_stage=1).ops.name


def test_ranks_that_hold_whole_experts_exchange_nothing_for_them() -> None:
    found = of("muon", EXPERTS, dp_shard=4)  # 2 of 8 experts on each rank
    counts = op_counts(found, (Phase.OPTIMIZER,))[0]
    rows = [row for row, each in enumerate(found.ops.name) if each == "optimizer.gather"]
    own = 2 * 512 * 512 + 8 * 512  # two of 8 projections, and one of 2 routers, padded to 4
    assert float((counts[rows] * found.ops.bytes_comm[rows]).sum()) == 2 * own
    shapes = [(512, 512)] * 2 + [(8, 512)] + [(256, 512)] * 3 * 4  # of 8, 2 and 48 matrices
    assert work(found) == pytest.approx(flops("muon", shapes))


@pytest.mark.parametrize("name", sorted(optimizers()))
def test_a_checkpoint_has_the_states_of_every_parameter(name: str) -> None:
    one = replace(plan(optimizer=name, **WIDE), zero_stage=0)
    saved = training_state(DENSE, one, CLUSTER, load_stack("pytorch")).saved
    assert saved.total_bytes == pytest.approx(4 * parameter_count(DENSE) + states(build(DENSE, one, CLUSTER)), rel=1e-3)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"optimizer": "soap", "zero_stage": 3}, "soap needs whole matrices: use zero_stage 0 to 2"),
        ({"optimizer": "muon", "dp_shard": 2, "tp": 2}, "muon at zero_stage 3 gathers one dimension"),
        ({"optimizer": "muon", "offload": "params"}, "offload params: optimizer muon multiplies"),
    ],
)
def test_what_an_optimizer_of_matrices_cannot_do(fields: dict[str, object], reason: str) -> None:
    with pytest.raises(ImpossiblePlan, match=reason):
        check_plan(DENSE, plan(**fields), CLUSTER)


def test_offloaded_states_of_muon_cross_the_host_link_twice() -> None:
    found = build(DENSE, plan(optimizer="muon", zero_stage=0, offload="optimizer", **WIDE), CLUSTER)
    row = found.ops.name.index("optimizer.offload")
    assert float(found.ops.bytes_comm[row]) == pytest.approx(4 * parameter_count(DENSE) + 4 * IN_MATRICES + 8 * OTHERS)
    assert states(found) == 0
    assert int(np.count_nonzero(found.blocks[-1].op == row)) == 2


def test_plans_name_optimizers_of_the_data_file() -> None:
    assert Plan(seq_len=8, optimizer="muon").optimizer in optimizers()
