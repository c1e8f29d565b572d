"""What no way of cutting a model may change: its parameters, its FLOPs, and memory that ends where it began."""

from __future__ import annotations

import numpy as np
import pytest

from forerun.core.memory.profile import profile
from forerun.core.program.kinds import OpKind
from forerun.core.program.types import Category, Program
from forerun.core.program.unfold import unfold
from forerun.describe.model.parameters import parameter_count
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.plan import Plan
from forerun.describe.stacks.catalog import load_stack, stack_names
from forerun.sources.symbolic.build import build
from forerun.sources.symbolic.fsdp_units import build_units, staged_kinds
from forerun.sources.symbolic.kernels import TransformerKernels
from forerun.sources.symbolic.mesh import groups_of

from .cases import BERT, CLUSTER, DENSE, GPT, MOE, SCHEDULES, plan


def matmul_flops(program: Program, p: Plan) -> float:
    """FLOPs of matrix products and attention of all ranks together."""
    flat = unfold(program)
    total = 0.0
    for i, cls in enumerate(program.rank_classes):
        ops = flat.op[flat.class_ptr[i] : flat.class_ptr[i + 1]]
        counted = np.isin(program.ops.kind[ops], (OpKind.GEMM, OpKind.ATTENTION))
        total += float(program.ops.flops[ops][counted].sum()) * cls.n_ranks
    return total / p.global_batch


def leak(program: Program) -> dict[str, int]:
    """Bytes by category that a step leaves behind on some rank class."""
    out: dict[str, int] = {}
    for cls in program.rank_classes:
        for number in cls.block:
            block = program.blocks[number]
            for tensor in range(len(block.tensor_bytes)):
                born, gone = block.tensor_alloc[tensor] >= 0, block.tensor_free[tensor] >= 0
                name = Category(int(block.tensor_category[tensor])).name
                out[name] = out.get(name, 0) + int(block.tensor_bytes[tensor]) * (int(born) - int(gone))
    return {name: size for name, size in out.items() if size}


@pytest.mark.parametrize("model", [DENSE, GPT, MOE, BERT], ids=lambda m: m.name)
def test_one_rank_holds_every_parameter(model: ModelSpec) -> None:
    p = plan(stack="megatron-core", zero_stage=0)
    kernels = TransformerKernels(model, p, load_stack("torchtitan"), groups_of(p, 8), "hopper")
    units = build_units(kernels, split=False)
    (stage,) = staged_kinds(model, p, kernels.stack)
    total = sum(units[kind].weights.total for kind in stage)
    if model.tied_embeddings:
        total -= model.vocab * model.hidden
    assert total == parameter_count(model)


SPLITS = [
    dict(dp_shard=4),
    dict(tp=4),
    dict(tp=4, sequence_parallel=False),
    dict(tp=2, dp_shard=2, dp_replicate=2),
    dict(cp=2, dp_shard=2),
    dict(cp=2, cp_method="allgather"),
    dict(cp=2, cp_method="ulysses"),
    dict(pp=4, n_microbatches=8),
    dict(pp=2, tp=2, cp=2, dp_shard=2, n_microbatches=4, zero_stage=1),
    dict(tp=2, async_tp=True),
]


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_flops_are_conserved_under_every_sharding(split: dict[str, object]) -> None:
    whole = matmul_flops(build(DENSE, plan(), CLUSTER), plan())
    p = plan(**split)
    assert matmul_flops(build(DENSE, p, CLUSTER), p) == pytest.approx(whole, rel=2e-3)


@pytest.mark.parametrize(("schedule", "virtual", "microbatches"), SCHEDULES)
def test_every_schedule_runs_every_pass_once(schedule: str, virtual: int, microbatches: int) -> None:
    whole = matmul_flops(build(DENSE, plan(), CLUSTER), plan())
    p = plan(pp=4, virtual_stages=virtual, n_microbatches=microbatches, pp_schedule=schedule)
    assert matmul_flops(build(DENSE, p, CLUSTER), p) == pytest.approx(whole, rel=1e-9)


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_expert_parallel_ranks_share_the_experts(ep: int) -> None:
    whole = matmul_flops(build(MOE, plan(dp_shard=4), CLUSTER), plan(dp_shard=4))
    p = plan(dp_shard=4, ep=ep)
    assert matmul_flops(build(MOE, p, CLUSTER), p) == pytest.approx(whole, rel=2e-2)


def test_full_checkpointing_runs_forward_again_but_for_its_tail() -> None:
    plain = matmul_flops(build(DENSE, plan(), CLUSTER), plan())
    again = plan(activation_checkpointing="full", stack="torchtitan-0.1")
    ratio = matmul_flops(build(DENSE, again, CLUSTER), again) / plain
    assert 1.15 < ratio < 1.3
    whole = plan(activation_checkpointing="full", stack="composer-torch2.0")
    assert matmul_flops(build(DENSE, whole, CLUSTER), whole) / plain > ratio


CHECKPOINTS = [
    dict(activation_checkpointing="none"),
    dict(activation_checkpointing="full"),
    dict(activation_checkpointing="full", checkpoint_every=2),
    *(
        dict(activation_checkpointing="selective", selective_policy=policy)
        for policy in ("op", "attention", "attention-block", "mlp", "mlp-act-norm", "attention+mlp", "params")
    ),
]


@pytest.mark.parametrize("stack", stack_names())
@pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=str)
def test_a_step_leaves_no_memory_behind(stack: str, checkpoint: dict[str, object]) -> None:
    for zero in (0, 1, 3):
        p = plan(stack=stack, zero_stage=zero, dp_shard=2, tp=2, n_microbatches=2, **checkpoint)
        assert leak(build(DENSE, p, CLUSTER)) == {}


@pytest.mark.parametrize(("schedule", "virtual", "microbatches"), SCHEDULES)
@pytest.mark.parametrize("reshard", ["default", "always", "never"])
def test_a_pipelined_step_leaves_no_memory_behind(schedule: str, virtual: int, microbatches: int, reshard: str) -> None:
    for zero in (1, 3):
        p = plan(
            zero_stage=zero, pp=4, dp_shard=2, n_microbatches=microbatches, pp_schedule=schedule,
            virtual_stages=virtual, reshard_after_forward=reshard, activation_checkpointing="full",
        )  # fmt: skip
        assert leak(build(DENSE, p, CLUSTER)) == {}


def test_experts_leave_no_memory_behind() -> None:
    for zero, ep, checkpoint in ((1, 2, "none"), (3, 2, "selective"), (3, 1, "full")):
        p = plan(zero_stage=zero, ep=ep, dp_shard=4, n_microbatches=2, activation_checkpointing=checkpoint)
        assert leak(build(MOE, p, CLUSTER)) == {}


def test_sharded_states_fall_with_the_shard_degree() -> None:
    def states(n: int) -> float:
        by = profile(build(DENSE, plan(dp_shard=n), CLUSTER))[0].by_category
        return by["parameter"] + by["optimizer"]

    assert states(1) == parameter_count(DENSE) * 12
    for n in (2, 4, 8):
        assert states(n) == pytest.approx(states(1) / n, rel=1e-4)


def test_checkpointing_never_needs_more_memory() -> None:
    peaks = [
        profile(build(DENSE, plan(dp_shard=2, micro_batch=4, activation_checkpointing=mode), CLUSTER))[0].peak_bytes
        for mode in ("none", "selective", "full")
    ]
    assert peaks[0] > peaks[1] > peaks[2]


@pytest.mark.parametrize("offload", ["optimizer", "params"])
def test_offloaded_state_is_not_on_the_device(offload: str) -> None:
    kept, away = (build(DENSE, plan(dp_shard=4, offload=o), CLUSTER) for o in ("none", offload))
    assert leak(away) == {}
    states = {"optimizer"} | ({"parameter"} if offload == "params" else set())
    by_category = profile(away)[0].by_category
    assert states <= set(profile(kept)[0].by_category)
    assert not states & set(by_category)


def test_offloaded_activations_come_back() -> None:
    half = build(DENSE, plan(micro_batch=4, activation_offload=0.5), CLUSTER)
    assert leak(half) == {}
    assert profile(half)[0].peak_bytes < profile(build(DENSE, plan(micro_batch=4), CLUSTER))[0].peak_bytes


def test_prefetching_further_trades_memory_for_time() -> None:
    programs = [
        build(DENSE, plan(dp_shard=8, prefetch=depth, activation_checkpointing="full"), CLUSTER)
        for depth in (0, 1, 2, 3)
    ]
    assert all(leak(program) == {} for program in programs)
    peaks = [profile(program)[0].peak_bytes for program in programs]
    assert peaks[1] <= peaks[2] <= peaks[3]


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_buckets_change_how_gradients_travel_and_not_how_much(zero_stage: int) -> None:
    def traffic(bucket_mib: float) -> tuple[int, float]:
        p = plan(zero_stage=zero_stage, dp_shard=8, ddp_bucket_mib=bucket_mib)
        program = build(DENSE, p, CLUSTER)
        ops = unfold(program).op
        grads = np.array([name.endswith(".grads") for name in program.ops.name])[ops]
        return int(grads.sum()), float(program.ops.bytes_comm[ops][grads].sum())

    (few, whole), (many, same) = traffic(200.0), traffic(10.0)
    assert many > 3 * few
    assert same == pytest.approx(whole, rel=1e-9)
    assert whole == pytest.approx(4 * parameter_count(DENSE), rel=1e-9)
