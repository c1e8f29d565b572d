"""Programs of models given layer by layer: work, messages and memory under every plan that they take."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from forerun.answers.analysis.setup import Setup
from forerun.answers.analysis.simulate_setup import simulate_setup
from forerun.common.errors import ForerunError, ImpossiblePlan
from forerun.core.memory.profile import profile
from forerun.core.program.counts import op_counts
from forerun.core.program.kinds import OpKind
from forerun.core.program.types import Category, Collective, Phase, Program
from forerun.core.program.validate import check
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.convolutional import ConvNet, load_convolutional
from forerun.describe.model.layer_types import activation, linear
from forerun.describe.model.layered import Layer, LayeredModel, Traffic
from forerun.describe.model.layers_by_hand import layers_from
from forerun.describe.plan.constraints import check_plan
from forerun.describe.plan.plan import Plan
from forerun.describe.stacks.catalog import load_stack
from forerun.sources.symbolic.build import build

from .cases import CLUSTER
from .test_conservation import leak

SMALL = ConvNet("bottleneck", (1, 2, 1, 1), classes=10, image=64).model("small")
DEEP = load_convolutional("resnet50")
STACKS = ("pytorch-vision", "pytorch-vision-nchw", "mxnet-vision", "mxnet-vision-nchw", "torchtitan")


def plan(**fields: object) -> Plan:
    values: dict[str, object] = {
        "seq_len": 1,
        "micro_batch": 8,
        "zero_stage": 0,
        "stack": "pytorch-vision",
        "optimizer": "sgd",
    }
    return Plan(**{**values, **fields})  # type: ignore[arg-type]


def flops(program: Program, phase: Phase) -> float:
    return float((op_counts(program, (phase,))[0] * program.ops.flops).sum())


def communicated(program: Program) -> dict[str, float]:
    """Bytes by kind of collective."""
    ops, out = program.ops, {}
    for i, count in enumerate(op_counts(program)[0].tolist()):
        if count and ops.kind[i] == OpKind.COLLECTIVE:
            name = Collective(ops.collective[i]).name
            out[name] = out.get(name, 0.0) + count * float(ops.bytes_comm[i])
    return out


PLANS = [
    {},
    {"dp_replicate": 4},
    {"dp_shard": 4, "zero_stage": 1},
    {"dp_shard": 4, "zero_stage": 2, "n_microbatches": 3, "reshard_after_forward": "always"},
    {"dp_shard": 4, "zero_stage": 3},
    {"dp_shard": 2, "dp_replicate": 2, "zero_stage": 3, "n_microbatches": 2},
    {"dp_shard": 4, "n_microbatches": 3},
    {"precision": "fp32"},
    {"precision": "tf32", "compile": True},
    {"precision": "fp16", "master_dtype": "fp16"},
]


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("fields", PLANS, ids=str)
def test_work_is_that_of_the_layers_and_memory_ends_where_it_began(stack: str, fields: dict[str, object]) -> None:
    p = plan(stack=stack, **fields)
    program = build(SMALL, p, CLUSTER)
    check(program)
    samples = p.micro_batch * p.n_microbatches
    assert flops(program, Phase.FORWARD) == samples * SMALL.forward_flops
    assert flops(program, Phase.BACKWARD) == samples * SMALL.backward_flops
    assert leak(program) == {}


@pytest.mark.parametrize("fields", [{}, {"dp_shard": 4, "zero_stage": 3}, {"n_microbatches": 2}], ids=str)
@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("stack", STACKS)
def test_checkpointed_blocks_run_again_and_keep_less(stack: str, policy: str, fields: dict[str, object]) -> None:
    plain = build(DEEP, plan(stack=stack, **fields), CLUSTER)
    again = build(DEEP, plan(stack=stack, activation_checkpointing=policy, **fields), CLUSTER)
    assert leak(again) == {}
    samples = 8 * (2 if "n_microbatches" in fields else 1)
    ran = flops(again, Phase.RECOMPUTE) / (samples * DEEP.forward_flops)
    assert (0.6 if policy == "full" else 0.2) < ran <= 1
    assert profile(again)[0].peak_bytes < profile(plain)[0].peak_bytes
    other = build(DEEP, plan(stack=stack, activation_checkpointing=policy, checkpoint_every=2, **fields), CLUSTER)
    assert 0 < flops(other, Phase.RECOMPUTE) < flops(again, Phase.RECOMPUTE)


def left_by(program: Program, phase: Phase, category: Category) -> int:
    """Bytes that blocks of a pass allocate and don't free."""
    total = 0
    for number in program.rank_classes[0].block.tolist():
        block = program.blocks[number]
        if len(block) and block.phase[0] == phase:
            left = (block.tensor_category == category) & (block.tensor_alloc >= 0) & (block.tensor_free < 0)
            total += int(block.tensor_bytes[left].sum())
    return total


def test_saved_activations_are_those_of_the_model() -> None:
    """Without autocast, everything that lives between forward and backward is what the layers keep."""
    for width, fields in ((4, {"precision": "fp32"}), (2, {"precision": "fp16", "master_dtype": "fp16"})):
        program = build(DEEP, plan(**fields), CLUSTER)  # type: ignore[arg-type]
        kept = left_by(program, Phase.FORWARD, Category.ACTIVATION)
        assert kept == pytest.approx(8 * DEEP.activation_bytes(width), rel=1e-6)


def test_autocast_keeps_a_cast_copy_of_what_products_read() -> None:
    program = build(DEEP, plan(), CLUSTER)
    casts = sum(layer.num_parameters for layer in DEEP.layers if layer.layer_type in ("conv2d", "linear"))
    assert left_by(program, Phase.FORWARD, Category.UNSHARDED) == 2 * casts
    assert left_by(program, Phase.BACKWARD, Category.UNSHARDED) == 4 * DEEP.parameter_count


def test_ddp_reduces_every_gradient_once_and_broadcasts_the_statistics() -> None:
    for microbatches in (1, 4):
        program = build(DEEP, plan(dp_shard=8, n_microbatches=microbatches), CLUSTER)
        statistics = sum(layer.buffer_bytes for layer in DEEP.layers)
        assert communicated(program) == {"ALL_REDUCE": 4.0 * DEEP.parameter_count, "BROADCAST": statistics}
    assert "BROADCAST" not in communicated(build(DEEP, plan(dp_shard=8, stack="mxnet-vision"), CLUSTER))
    assert communicated(build(DEEP, plan(), CLUSTER)) == {}


def test_buckets_are_filled_unit_by_unit() -> None:
    def reductions(mib: float) -> int:
        program = build(DEEP, plan(dp_shard=8, ddp_bucket_mib=mib), CLUSTER)
        rows = (program.ops.collective == Collective.ALL_REDUCE)[None] * op_counts(program)
        return int(rows.sum())

    assert reductions(1000) == 1
    assert reductions(25) in (4, 5)
    assert reductions(1) > 15


def test_fsdp_gathers_forward_and_backward_but_the_last_unit_once() -> None:
    program = build(DEEP, plan(dp_shard=8, zero_stage=3), CLUSTER)
    moved, fc = communicated(program), 2048 * 1000 + 1000
    count = DEEP.parameter_count
    assert moved["ALL_GATHER"] == pytest.approx(2 * (2 * count - fc), rel=1e-3)
    assert moved["REDUCE_SCATTER"] == pytest.approx(4 * count, rel=1e-3)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_state_is_sharded_as_zero_says(stage: int) -> None:
    resident = build(DEEP, plan(dp_shard=8, zero_stage=stage, optimizer="adam"), CLUSTER).rank_classes[0].resident_bytes
    count = DEEP.parameter_count
    shard = 8 if stage else 1
    assert resident[Category.OPTIMIZER] == pytest.approx(8 * count / shard, rel=1e-3)
    assert resident[Category.PARAMETER] == pytest.approx(4 * count / (8 if stage == 3 else 1), rel=1e-3)


def test_nodes_name_their_layer() -> None:
    program = build(DEEP, plan(), CLUSTER)
    assert program.modules == (*(layer.layer_id for layer in DEEP.layers), "loss", "optimizer")
    for block in program.blocks:
        for op, module in zip(block.op.tolist(), block.module.tolist(), strict=True):
            if program.ops.kind[op] == OpKind.GEMM:
                assert program.ops.name[op].removesuffix(".dgrad").removesuffix(".wgrad") == program.modules[module]


def traffic(stack: str, **fields: object) -> float:
    program = build(DEEP, plan(stack=stack, **fields), CLUSTER)
    phases = (Phase.FORWARD, Phase.BACKWARD)
    memory = op_counts(program, phases)[0] * (program.ops.kind == OpKind.MEMORY)
    return float((memory * (program.ops.bytes_read + program.ops.bytes_written)).sum())


def test_kernels_that_take_over_sums_and_activations_move_less() -> None:
    assert traffic("mxnet-vision") < traffic("pytorch-vision", compile=True) < 0.85 * traffic("pytorch-vision")
    assert traffic("pytorch-vision") < 0.65 * traffic("pytorch-vision-nchw")
    plain, summed = (traffic(stack, precision="fp32") for stack in ("pytorch-vision-nchw", "mxnet-vision-nchw"))
    # each of 16 sums: add r2 w1, ReLU r1 w1, backward r2 w1 -> r2 w1, backward r2 w1
    blocks = [layer.output_elements for layer in DEEP.layers if layer.layer_type == "add"]
    assert plain - summed == 2 * 4 * 8 * sum(blocks)
    assert traffic("pytorch-vision", precision="fp32") == traffic("pytorch-vision-nchw", precision="fp32")


def test_a_changed_stack_goes_over_the_plans_stack() -> None:
    fused = load_stack("mxnet-vision")
    one = build(DEEP, plan(), CLUSTER, fused)
    other = build(DEEP, plan(stack="mxnet-vision"), CLUSTER)
    assert np.array_equal(one.ops.bytes_read, other.ops.bytes_read)


@dataclass(frozen=True)
class Fourier(Layer):
    """Mixes positions by a fast Fourier transform: three passes over the sequence."""

    def forward(self, samples: int) -> list[Traffic]:
        size = samples * self.input_elements
        return [Traffic(3 * size, 3 * size, launches=3, flops=5 * size * 9)]


def test_layers_of_ones_own_run_what_they_say() -> None:
    shape = (512, 64)
    layers = (
        linear("in", shape, 64, output_shape=shape),
        activation("act", shape, "gelu"),
        Fourier("mix", "custom", shape, shape, saves_input=False),
    )
    model = LayeredModel("fnet", layers, "sequence", classes_loss=False)
    program = build(model, plan(precision="fp32"), CLUSTER)
    mixing = [i for i, name in enumerate(program.ops.name) if name.startswith("mix")]
    assert [float(program.ops.bytes_read[i]) for i in mixing] == [3 * 8 * 512 * 64 * 4] * 2
    assert [int(program.ops.launches[i]) for i in mixing] == [3, 3]
    prediction = simulate_setup(Setup(model, plan(), CLUSTER)).prediction
    assert (prediction.sample, prediction.tokens_per_s_per_gpu) == ("sequence", None)
    assert prediction.samples_per_s_per_gpu == pytest.approx(8 / prediction.step_time_s)


def test_hand_written_layers_run() -> None:
    entries = [
        {"layer_id": "e", "layer_type": "embedding", "input_shape": [64], "output_shape": [64, 128],
         "num_parameters": 12800},
        {"layer_id": "a", "layer_type": "attention", "num_heads": 2},
        {"layer_id": "r", "layer_type": "add", "reads": ["e", "a"]},
        {"layer_id": "n", "layer_type": "norm"},
        {"layer_id": "x", "layer_type": "custom", "output_shape": [64, 128], "forward_flops": 1e6, "num_parameters": 50,
         "activation_memory_mb": 2.0},
        {"layer_id": "h", "layer_type": "linear", "output_shape": [100]},
    ]  # fmt: skip
    model = layers_from(entries, "net.yaml", sample="sequence")
    for fields in ({}, {"dp_shard": 4, "zero_stage": 3}, {"activation_checkpointing": "full"}):
        program = build(model, plan(**fields), CLUSTER)
        check(program)
        assert leak(program) == {}
        assert flops(program, Phase.BACKWARD) == 8 * model.backward_flops
        assert simulate_setup(Setup(model, plan(**fields), CLUSTER)).prediction.step_time_s > 0


REFUSED = [
    ({"tp": 2}, "tp 2 needs a transformer; small, given layer by layer, runs on dp_replicate x dp_shard"),
    ({"pp": 2}, "pp 2 needs a transformer"),
    ({"cp": 2}, "cp 2 needs a transformer"),
    ({"ep": 2}, "ep 2 needs a transformer"),
    ({"virtual_stages": 2}, "virtual_stages and layers_per_stage need a transformer"),
    ({"seq_len": 128}, "seq_len 128: small takes whole samples; leave seq_len at 1"),
    ({"precision": "fp8"}, "precision fp8 needs a transformer"),
    (
        {"activation_checkpointing": "selective", "selective_policy": "mlp"},
        "selective_policy mlp needs a transformer; small takes op, or full",
    ),
    ({"offload": "params"}, "offload params needs zero_stage 3"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[m[:20] for _, m in REFUSED])
def test_plans_that_need_a_transformer_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ImpossiblePlan, match=f"^impossible plan: {message}"):
        check_plan(SMALL, plan(**fields), CLUSTER)


@pytest.mark.parametrize(
    ("stack", "device", "kernel"),
    [
        *[("pytorch", "h100-sxm", "cudnn"), ("pytorch", "b200", "cudnn"), ("torchtitan-2025-08", "h100-sxm", "sdpa")],
        *[
            ("torchtitan-2025-08", "b200", "cudnn"),
            ("torchtitan", "h100-sxm", "cudnn"),
            ("torchtitan", "a100", "cudnn"),
        ],
        *[("torchtitan", "mi300x", "sdpa"), ("other", "h100-sxm", "sdpa"), ("pytorch-ddp", "h100-sxm", "sdpa")],
        *[("nemo", "h100-sxm", "cudnn"), ("nemo", "a100", "flash2"), ("nemo-2024", "h100-sxm", "flash2")],
        *[("nemo-2023", "a100", "flash1"), ("megatron-core", "b200", "cudnn"), ("megatron-core", "mi300x", "aiter")],
    ],
)
def test_library_and_framework_choose_the_attention_kernel_of_a_device(stack: str, device: str, kernel: str) -> None:
    model = layers_from([{"layer_id": "a", "layer_type": "attention", "input_shape": [64, 128]}], "net.yaml")
    ops = build(model, plan(stack=stack), load_cluster(device)).ops
    assert {name for name, kind in zip(ops.kernel, ops.kind, strict=True) if kind == OpKind.ATTENTION} == {kernel}


def test_attention_by_hand_needs_a_fused_kernel() -> None:
    model = layers_from([{"layer_id": "a", "layer_type": "attention", "input_shape": [64, 128]}], "net.yaml")
    with pytest.raises(ImpossiblePlan, match="attention naive needs a transformer"):
        check_plan(model, plan(attention="naive"), CLUSTER)
    check_plan(SMALL, plan(attention="naive"), CLUSTER)


def test_a_stack_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ForerunError, match="unknown stack"):
        check_plan(SMALL, replace(plan(), stack="caffe"), CLUSTER)


@pytest.mark.parametrize("fields", PLANS[1:7], ids=str)
def test_gradients_of_a_stated_size_are_what_is_reduced_and_held(fields: dict[str, object]) -> None:
    """Twice the size that the parameters have: twice the bytes on the wire, and nothing else changes."""
    entry = {"layer_id": 0, "layer_type": "linear", "input_shape": [512], "output_shape": [512], "bias": False}
    plain = layers_from([entry], "net.yaml")
    doubled = layers_from([{**entry, "gradient_memory_mb": 2 * 512 * 512 * 4 / 1e6}], "net.yaml")
    one, two = (build(model, plan(**fields), CLUSTER) for model in (plain, doubled))
    for program in (one, two):
        check(program)
        assert leak(program) == {}
    first, second = communicated(one), communicated(two)
    gathered = {"ALL_GATHER"}
    assert first
    for kind, size in first.items():
        assert second[kind] == pytest.approx(size if kind in gathered else 2 * size, rel=0.01), kind
    held = [profile(program)[0].peak_bytes for program in (one, two)]
    assert held[1] > held[0]
