"""LoRA and QLoRA: what is trained, kept, moved and multiplied, against formulas."""

from __future__ import annotations

import numpy as np
import pytest

from forerun.answers.analysis.predict import predict
from forerun.common.errors import ImpossiblePlan
from forerun.core.program.counts import op_counts
from forerun.core.program.kinds import OpKind
from forerun.core.program.types import Category, Collective, Phase, Program
from forerun.describe.model.catalog import load_model
from forerun.describe.model.parameters import compute_parameter_count, parameter_count
from forerun.describe.plan.constraints import check_plan
from forerun.describe.stacks.catalog import load_stack
from forerun.sources.symbolic.build import build
from forerun.sources.symbolic.training_state import training_state

from .cases import CLUSTER, DENSE, MOE, plan

RANK = 8
PER_LAYER = {
    "q_proj": (1024, 1024),
    "k_proj": (1024, 512),
    "v_proj": (1024, 512),
    "o_proj": (1024, 1024),
    "gate_proj": (1024, 2816),
    "up_proj": (1024, 2816),
    "down_proj": (2816, 1024),
}
"""input and output widths of the linear layers of DENSE"""
IN_LAYERS = 8 * sum(n * m for n, m in PER_LAYER.values())
ALL = tuple(PER_LAYER)


def adapters(targets: tuple[str, ...] = ALL, rank: int = RANK) -> int:
    """Trainable parameters: r (n_in + n_out) for each adapted layer."""
    return 8 * sum(rank * sum(PER_LAYER[name]) for name in targets)


def of(**fields: object) -> Program:
    return build(DENSE, plan(**{"lora_rank": RANK, "stack": "pytorch", "zero_stage": 0, **fields}), CLUSTER)


def resident(program: Program, category: Category) -> int:
    return int(program.rank_classes[0].resident_bytes[category])


def flops(program: Program, *phases: Phase) -> float:
    """FLOPs of matrix products outside of attention."""
    return float(op_counts(program, phases)[0] @ (program.ops.flops * program.ops.is_gemm))


def moved(program: Program, kind: Collective) -> float:
    rows = (program.ops.kind == OpKind.COLLECTIVE) & (program.ops.collective == int(kind))
    return float(op_counts(program)[0][rows] @ program.ops.bytes_comm[rows])


@pytest.mark.parametrize("targets", [ALL, ("q_proj", "v_proj"), ("down_proj",)])
@pytest.mark.parametrize("rank", [4, 64])
def test_only_adapters_have_states_and_gradients(targets: tuple[str, ...], rank: int) -> None:
    found = of(lora_rank=rank, lora_targets=targets, precision="fp32")
    assert resident(found, Category.OPTIMIZER) == 8 * adapters(targets, rank)
    gradients = sum(
        int(block.tensor_bytes[(block.tensor_category == Category.UNSHARDED) & (block.tensor_free < 0)].sum())
        for block in found.blocks
        if ".backward" in block.name and "layer" in block.name
    )
    assert gradients == 4 * adapters(targets, rank) // 8


def test_peft_counts_the_same_trainable_parameters() -> None:
    """print_trainable_parameters of peft says 41,943,040 for rank 16 on all linear layers of Llama 3.1 8B."""
    model = load_model("llama-3.1-8b")
    found = build(model, plan(lora_rank=16, stack="pytorch", zero_stage=0, precision="fp32"), CLUSTER)
    assert resident(found, Category.OPTIMIZER) == 8 * 41_943_040
    attention = plan(lora_rank=8, lora_targets=("q_proj", "v_proj"), stack="pytorch", zero_stage=0, precision="fp32")
    assert resident(build(model, attention, CLUSTER), Category.OPTIMIZER) == 8 * 3_407_872


def test_a_frozen_model_multiplies_two_thirds() -> None:
    tokens = 2048
    own = 2.0 * tokens * adapters()
    whole = 2.0 * tokens * compute_parameter_count(DENSE)
    norms = 2.0 * tokens * 17 * 1024
    found = of()
    assert flops(found, Phase.FORWARD) == pytest.approx(whole - norms + own)
    assert flops(found, Phase.BACKWARD) == pytest.approx(whole - norms + 2 * own)
    trained = build(DENSE, plan(stack="pytorch", zero_stage=0), CLUSTER)
    both = (Phase.FORWARD, Phase.BACKWARD)
    assert (flops(found, *both) - 3 * own) / flops(trained, *both) == pytest.approx(2 / 3)


@pytest.mark.parametrize(("dtype", "per_element"), [("wide", 2.0), ("nf4", 0.5 + 1 / 64 + 4 / (64 * 256))])
@pytest.mark.parametrize(("stage", "ranks"), [(0, 1), (1, 1), (3, 4)])
def test_frozen_weights_take_what_their_dtype_says(dtype: str, per_element: float, stage: int, ranks: int) -> None:
    found = of(frozen_dtype=dtype, zero_stage=stage, dp_shard=4, master_dtype="bf16")
    outside = parameter_count(DENSE) - IN_LAYERS
    expected = (per_element * IN_LAYERS + 2 * outside + 2 * adapters()) / ranks
    assert resident(found, Category.PARAMETER) == pytest.approx(expected, rel=1e-4)


def test_fsdp_gathers_frozen_weights_as_they_are_kept_and_reduces_adapters_alone() -> None:
    shard = {"zero_stage": 3, "dp_shard": 4, "stack": "torchtitan"}
    outside = parameter_count(DENSE) - IN_LAYERS
    for dtype, per_element in (("wide", 2.0), ("nf4", 0.5 + 1 / 64 + 4 / (64 * 256))):
        found = of(frozen_dtype=dtype, **shard, reshard_after_forward="never")
        gathered = per_element * IN_LAYERS + 2 * outside + 2 * adapters()
        assert moved(found, Collective.ALL_GATHER) == pytest.approx(gathered, rel=1e-6)
        assert moved(found, Collective.REDUCE_SCATTER) == 4 * adapters()  # torchtitan reduces in fp32


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_replicated_gradients_are_those_of_adapters(stage: int) -> None:
    found = of(zero_stage=stage, dp_shard=4, n_microbatches=2, reduce_dtype="bf16")
    reduced = moved(found, Collective.ALL_REDUCE) + moved(found, Collective.REDUCE_SCATTER)
    assert reduced == pytest.approx(2 * adapters(), rel=0.01)


def test_nf4_is_dequantised_in_both_passes_and_again_in_recomputation() -> None:
    for checkpointing, times in (("none", 2), ("full", 3)):
        found = of(frozen_dtype="nf4", activation_checkpointing=checkpointing)
        rows = [row for row, name in enumerate(found.ops.name) if name.endswith(".dequantise")]
        counts = op_counts(found)[0][rows]
        assert float(counts @ found.ops.bytes_written[rows]) == times * 2 * IN_LAYERS
        assert float(counts @ found.ops.bytes_read[rows]) == pytest.approx(times * 0.515869140625 * IN_LAYERS)
    assert not [name for name in of().ops.name if name.endswith(".dequantise")]


def test_frozen_products_keep_no_inputs() -> None:
    def kept(**fields: object) -> int:
        block = next(block for block in of(**fields).blocks if block.name == "layer.forward")
        return int(block.tensor_bytes[(block.tensor_category == Category.ACTIVATION) & (block.tensor_free < 0)].sum())

    tokens, few = 2048, kept(lora_targets=("q_proj",))
    normed, act, low = tokens * 1024 * 2, tokens * 2816 * 2, tokens * RANK * 2
    assert kept(lora_targets=("q_proj", "down_proj")) - few == act + low  # the input of the last product
    assert kept(lora_targets=("q_proj", "k_proj")) - few == low  # which reads what q_proj reads
    assert kept(lora_targets=("q_proj", "up_proj")) - few == normed + low


def test_a_checkpoint_holds_adapters_and_a_restart_reads_the_frozen_weights_too() -> None:
    fields = plan(lora_rank=RANK, stack="pytorch", zero_stage=0, precision="fp32")
    saved = training_state(DENSE, fields, CLUSTER, load_stack("pytorch")).saved
    assert saved.total_bytes == 12 * adapters()
    assert saved.held_total_bytes == 12 * adapters() + 4 * parameter_count(DENSE)


def test_mfu_counts_no_gradients_of_frozen_weights() -> None:
    frozen, trained = (predict(DENSE, plan(lora_rank=rank, zero_stage=0), CLUSTER) for rank in (RANK, 0))
    assert frozen.mfu is not None
    assert trained.mfu is not None
    counted = frozen.mfu * frozen.step_time_s / (trained.mfu * trained.step_time_s)
    attention = 12.0 * 8 * 1024 * 2048
    weights = compute_parameter_count(DENSE)
    assert counted == pytest.approx((4 * weights + attention) / (6 * weights + attention))


def test_experts_are_frozen_too() -> None:
    found = build(MOE, plan(lora_rank=RANK, lora_targets=("o_proj",), stack="pytorch", zero_stage=0), CLUSTER)
    trained = 4 * RANK * (MOE.n_heads * 64 + 1024)
    assert resident(found, Category.OPTIMIZER) == 8 * trained
    names = [found.ops.name[row] for row in np.flatnonzero(op_counts(found)[0])]
    assert not [name for name in names if name.endswith(".wgrad") and "adapter" not in name]


def test_pipelines_of_tied_models_exchange_no_frozen_embedding() -> None:
    model = load_model("llama-3.2-1b")
    found = build(model, plan(lora_rank=RANK, pp=2, n_microbatches=4, stack="pytorch", zero_stage=0), CLUSTER)
    assert "embedding.tied" not in found.ops.name
    whole = build(model, plan(lora_rank=RANK, stack="pytorch", zero_stage=0, master_dtype="bf16"), CLUSTER)
    per_layer = sum(RANK * (n + m) for n, m in ((2048, 2048), (2048, 512), (2048, 512), (2048, 2048)))
    per_layer += 3 * RANK * (2048 + 8192)
    assert resident(whole, Category.PARAMETER) == 2 * (parameter_count(model) + 16 * per_layer)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"lora_rank": 8, "tp": 2}, "lora_rank runs with data, context and pipeline parallelism, not tp 2"),
        ({"lora_rank": 8, "precision": "fp8"}, "lora_rank needs precision bf16"),
        ({"lora_rank": 8, "stack": "torchtitan-simple-fsdp"}, "gathers each parameter by itself"),
        ({"lora_rank": 8, "lora_targets": ()}, "lora_rank needs lora_targets"),
        ({"frozen_dtype": "nf4"}, "frozen_dtype nf4 needs frozen weights: give lora_rank"),
    ],
)
def test_plans_that_have_no_adapters(fields: dict[str, object], reason: str) -> None:
    with pytest.raises(ImpossiblePlan, match=reason):
        check_plan(DENSE, plan(**fields), CLUSTER)
