"""Head and loss over parts of the tokens: the same products, and the logits of one part in memory."""

from __future__ import annotations

import pytest

from forerun.answers.analysis.predict import predict
from forerun.common.errors import ImpossiblePlan
from forerun.core.program.counts import op_counts
from forerun.core.program.types import Category, Phase, Program
from forerun.describe.plan.constraints import check_plan
from forerun.sources.symbolic.build import build

from .cases import CLUSTER, DENSE, GPT, plan

TOKENS, VOCAB = 4 * 2048, 32000


def of(**fields: object) -> Program:
    return build(DENSE, plan(**{"stack": "pytorch", "zero_stage": 0, "micro_batch": 4, **fields}), CLUSTER)


def flops(program: Program, *phases: Phase) -> float:
    """FLOPs of the head's products."""
    rows = [row for row, name in enumerate(program.ops.name) if name.startswith("head")]
    return float(op_counts(program, phases or tuple(Phase))[0][rows] @ program.ops.flops[rows])


def logits(program: Program) -> int:
    """The largest tensor of logits."""
    return max(
        int(size) for block in program.blocks for size in block.tensor_bytes[block.tensor_category == Category.LOGITS]
    )


@pytest.mark.parametrize("chunks", [2, 8, 64])
def test_the_head_multiplies_as_often_and_in_the_forward_pass(chunks: int) -> None:
    assert flops(of(loss_chunks=chunks)) == flops(of())
    assert flops(of(loss_chunks=chunks), Phase.FORWARD) == 3 * flops(of(), Phase.FORWARD)


@pytest.mark.parametrize("chunks", [8, 64])
def test_the_logits_of_one_part_are_in_memory(chunks: int) -> None:
    assert logits(of()) >= 2 * TOKENS * VOCAB
    gradients = {2 * VOCAB * 1024, 2 * TOKENS * 1024}  # of the head, and of its input
    assert logits(of(loss_chunks=chunks)) == max(2 * TOKENS * VOCAB // chunks, *gradients)


@pytest.mark.parametrize("fields", [{}, {"dp_shard": 4, "zero_stage": 3}, {"activation_checkpointing": "full"}])
def test_memory_falls_by_the_logits_and_what_the_loss_makes_of_them(fields: dict[str, object]) -> None:
    whole, parts = (
        predict(DENSE, plan(**{"micro_batch": 4, "zero_stage": 0, "loss_chunks": chunks, **fields}), CLUSTER)
        for chunks in (1, 16)
    )
    saved = (whole.peak_allocated_gib - parts.peak_allocated_gib) * 2**30
    made = 2 * TOKENS * VOCAB
    assert 1.0 * made < saved < 6.0 * made
    assert whole.mfu is not None
    assert parts.mfu is not None
    assert whole.mfu * whole.step_time_s == pytest.approx(parts.mfu * parts.step_time_s)


def test_frozen_heads_and_references_run_fewer_products() -> None:
    forward = flops(of(), Phase.FORWARD)
    assert flops(of(loss_chunks=4, lora_rank=8)) == 2 * forward
    assert flops(of(loss_chunks=4, reference=True)) == 4 * forward
    assert flops(of(loss_chunks=4, reference=True, lora_rank=8)) == 3 * forward


def test_gradients_of_several_micro_batches_are_scaled() -> None:
    assert "loss.scale" in of(loss_chunks=4, n_microbatches=2).ops.name
    assert "loss.scale" not in of(loss_chunks=4).ops.name


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe", "ZB1P"])
def test_pipelines_reduce_and_update_the_head_as_before(schedule: str) -> None:
    fields = {"pp": 2, "n_microbatches": 4, "pp_schedule": schedule}
    programs = [build(GPT, plan(**fields, zero_stage=0, loss_chunks=chunks), CLUSTER) for chunks in (1, 4)]
    for phase in (Phase.OPTIMIZER,):
        first, second = (op_counts(one, (phase,)) @ one.ops.bytes_written for one in programs)
        assert first.tolist() == second.tolist()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tp": 2}, "loss_chunks 4: the fused head and loss are not split over tp 2"),
        ({"autocast": True}, "run without autocast"),
        ({"stack": "megatron-core", "zero_stage": 1}, "adds up weight gradients in its own products"),
    ],
)
def test_plans_whose_loss_is_whole(fields: dict[str, object], reason: str) -> None:
    with pytest.raises(ImpossiblePlan, match=reason):
        check_plan(DENSE, plan(loss_chunks=4, **fields), CLUSTER)
