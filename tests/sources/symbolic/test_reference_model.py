"""A frozen reference model beside the trained one (DPO): two forward passes, one backward pass."""

from __future__ import annotations

import pytest

from forerun.answers.analysis.predict import predict
from forerun.common.errors import ImpossiblePlan
from forerun.core.program.counts import op_counts
from forerun.core.program.kinds import OpKind
from forerun.core.program.types import Category, Collective, Phase, Program
from forerun.describe.model.catalog import load_model
from forerun.describe.model.parameters import parameter_count
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.constraints import check_plan
from forerun.sources.symbolic.build import build

from .cases import CLUSTER, DENSE, GPT, MOE, plan


def of(model: ModelSpec = DENSE, **fields: object) -> Program:
    return build(model, plan(**{"stack": "pytorch", "zero_stage": 0, **fields}), CLUSTER)


def flops(program: Program, *phases: Phase) -> float:
    return float(op_counts(program, phases)[0] @ program.ops.flops)


def resident(program: Program) -> int:
    return int(program.rank_classes[0].resident_bytes[Category.PARAMETER])


def gathered(program: Program) -> float:
    rows = (program.ops.kind == OpKind.COLLECTIVE) & (program.ops.collective == int(Collective.ALL_GATHER))
    return float(op_counts(program)[0][rows] @ program.ops.bytes_comm[rows])


@pytest.mark.parametrize("model", [DENSE, GPT, MOE], ids=["dense", "gpt", "moe"])
@pytest.mark.parametrize("n_microbatches", [1, 3])
def test_the_forward_pass_runs_twice_and_the_backward_pass_once(model: ModelSpec, n_microbatches: int) -> None:
    alone, both = (of(model, reference=flag, n_microbatches=n_microbatches) for flag in (False, True))
    assert flops(both, Phase.FORWARD) == 2 * flops(alone, Phase.FORWARD)
    for phase in (Phase.BACKWARD, Phase.OPTIMIZER):
        assert flops(both, phase) == flops(alone, phase)


@pytest.mark.parametrize("model", [DENSE, GPT, MOE, load_model("llama-3.2-1b")], ids=["dense", "gpt", "moe", "tied"])
@pytest.mark.parametrize(("stage", "ranks"), [(0, 1), (1, 1), (3, 4)])
def test_the_reference_takes_two_bytes_for_each_parameter(model: ModelSpec, stage: int, ranks: int) -> None:
    fields = {"zero_stage": stage, "dp_shard": 4}
    more = resident(of(model, reference=True, **fields)) - resident(of(model, **fields))
    assert more == pytest.approx(2 * parameter_count(model) / ranks, rel=1e-3)


def test_with_adapters_the_frozen_model_is_the_reference_and_runs_without_them() -> None:
    alone, both = (of(reference=flag, lora_rank=8) for flag in (False, True))
    assert resident(both) == resident(alone)
    assert flops(both, Phase.FORWARD) == flops(alone, Phase.FORWARD) + flops(of(), Phase.FORWARD)
    narrow = of(reference=True, lora_rank=8, frozen_dtype="nf4")
    rows = [row for row, name in enumerate(narrow.ops.name) if name.endswith(".dequantise")]
    in_layers = 8 * (3 * 1024 * 1024 + 3 * 1024 * 2816)
    assert float(op_counts(narrow)[0][rows] @ narrow.ops.bytes_written[rows]) == 3 * 2 * in_layers


def test_fsdp_gathers_the_reference_once_for_each_micro_batch() -> None:
    fields = {"zero_stage": 3, "dp_shard": 4, "stack": "torchtitan", "n_microbatches": 2}
    more = gathered(of(reference=True, **fields)) - gathered(of(**fields))
    assert more == pytest.approx(2 * 2 * parameter_count(DENSE), rel=1e-6)


def test_the_reference_keeps_nothing_for_a_backward_pass() -> None:
    for fields in ({}, {"activation_checkpointing": "full"}, {"zero_stage": 3, "dp_shard": 4, "stack": "torchtitan"}):
        for block in of(reference=True, **fields).blocks:
            if block.name.endswith(".reference"):
                assert (block.tensor_free >= 0).all()
                assert (block.tensor_alloc >= 0).all()


def test_a_step_with_a_reference_takes_a_third_more_at_most_and_mfu_counts_it() -> None:
    alone, both = (predict(DENSE, plan(reference=flag, micro_batch=4), CLUSTER) for flag in (False, True))
    assert 1.2 * alone.step_time_s < both.step_time_s < 1.45 * alone.step_time_s
    assert alone.mfu is not None
    assert both.mfu is not None
    assert both.mfu * both.step_time_s == pytest.approx(4 / 3 * alone.mfu * alone.step_time_s)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"pp": 2, "n_microbatches": 2}, "a reference model runs without pipelines, not with pp 2"),
        ({"stack": "torchtitan-simple-fsdp"}, "gathers each parameter by itself"),
    ],
)
def test_plans_that_have_no_reference(fields: dict[str, object], reason: str) -> None:
    with pytest.raises(ImpossiblePlan, match=reason):
        check_plan(DENSE, plan(reference=True, **fields), CLUSTER)
