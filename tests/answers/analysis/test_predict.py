"""What a prediction must do whatever the calibration: sums, monotone answers, pipelines, definitions, refusals."""

from __future__ import annotations

import dataclasses
import gc
import math
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.answers.analysis.predict import predict, simulate
from forerun.answers.analysis.prediction import Prediction
from forerun.common.errors import ForerunError, ImpossiblePlan, UnknownName
from forerun.core.program.kinds import OpKind
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.cluster.types import Cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.model.parameters import model_flops_per_token
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.plan import Plan
from forerun.describe.stacks.catalog import load_stack, stack_names

LLAMA = replace(load_model("llama-3.1-8b"), n_layers=4)
MIXTRAL = replace(load_model("mixtral-8x7b"), n_layers=4)
H100 = load_cluster("h100-sxm")
A100 = load_cluster("a100-80gb-sxm")
COMPUTE = ("matmul", "attention", "memory_bound", "recompute")


def faster(cluster: Cluster, times: float, latency: float = 1.0) -> Cluster:
    """The cluster with links of so many times the bandwidth."""
    links = (replace(k, bytes_per_s=k.bytes_per_s * times, latency_s=k.latency_s * latency) for k in cluster.links)
    return replace(cluster, links=tuple(links))


@cache
def ask(model: ModelSpec = LLAMA, cluster: Cluster = H100, **fields: object) -> Prediction:
    """Prediction of a plan of 4,096-token sequences."""
    return predict(model, Plan(**{"seq_len": 4096, **fields}), cluster)  # type: ignore[arg-type]


def compute_s(found: Prediction) -> float:
    """Seconds of forward and backward kernels per step of the slowest rank."""
    return sum(found.breakdown.get(name, 0.0) for name in COMPUTE)


# -- sums and finite figures -------------------------------------------------------------------------------------------

MESHES = [
    dict(),
    dict(dp_replicate=4, zero_stage=0),
    dict(dp_shard=8),
    dict(dp_shard=16, activation_checkpointing="full", compile=True),
    dict(tp=8, dp_shard=2),
    dict(tp=2, cp=2, dp_shard=4, zero_stage=1, stack="megatron-core"),
    dict(pp=4, tp=2, n_microbatches=8, zero_stage=1, stack="nemo"),
    dict(pp=2, dp_shard=4, n_microbatches=4, activation_offload=0.5),
    dict(pp=2, virtual_stages=2, n_microbatches=4, pp_schedule="ZBV", dp_shard=2),
    dict(dp_shard=4, offload="params"),
]


def check_figures(found: Prediction) -> None:
    assert sum(found.breakdown.values()) == pytest.approx(found.step_time_s, rel=1e-9)
    assert all(value > 0 for value in found.breakdown.values())
    assert sum(found.memory_by_category_gib.values()) == pytest.approx(found.peak_allocated_gib, rel=1e-9)
    for field in dataclasses.fields(found):
        value = getattr(found, field.name)
        values = value.values() if isinstance(value, dict) else [value]
        assert all(math.isfinite(v) and v >= 0 for v in values if isinstance(v, (int, float))), field.name
    assert found.step_time_s > 0
    assert 0 < found.mfu < 1
    assert 0 < found.hfu < 1
    assert 0 <= found.coverage <= 1
    assert found.bubble_s < found.step_time_s
    assert found.peak_reserved_gib >= found.peak_allocated_gib or not found.fits or found.warnings
    assert found.bottleneck in found.breakdown
    assert found.explain


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_breakdown_and_memory_sum_to_the_whole(mesh: dict[str, object]) -> None:
    found = ask(**mesh)
    check_figures(found)
    assert found.n_gpus == found.plan.world_size
    exposed = sum(value for name, value in found.breakdown.items() if name.startswith("exposed_"))
    assert found.exposed_comm_s == pytest.approx(exposed)


FAMILIES = [
    "llama-2-7b", "llama-3.1-70b", "qwen2.5-7b", "qwen3-8b", "qwen3-30b-a3b", "mistral-7b-v0.1", "mixtral-8x7b",
    "deepseek-v2-lite", "deepseek-v3", "gpt2-small", "gpt3-6.7b", "bert-base", "mpt-7b", "megatron-7.5b",
]  # fmt: skip


@pytest.mark.parametrize("stack", stack_names())
def test_every_stack_runs_every_family(stack: str) -> None:
    for name in FAMILIES:
        model = load_model(name)
        cut = replace(model, n_layers=4 if model.moe else 2)
        seq_len = min(1024, model.max_positions or 1024)
        for mesh in (dict(), dict(tp=2, pp=2, n_microbatches=2, zero_stage=1)):
            check_figures(ask(cut, A100, seq_len=seq_len, stack=stack, **mesh))


# -- one GPU -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stack", ["torchtitan", "megatron-core", "nemo"])
def test_plans_of_one_gpu_are_the_plain_model(stack: str) -> None:
    """There is nobody to shard with, gather from or reduce to."""
    plain = ask(zero_stage=0, stack=stack)
    assert plain.exposed_comm_s == plain.bubble_s == 0
    for change in (
        dict(zero_stage=1),
        dict(zero_stage=1 if load_stack(stack).keeps_gathered_at_zero_2 else 2),  # ZeRO-2 may be FSDP, which is ZeRO-3
        dict(sequence_parallel=False),
        dict(loss_parallel=False),
        dict(overlap_grad_reduce=False),
        dict(pp_schedule="GPipe"),
        dict(cp_method="ulysses"),
    ):
        same = ask(**{"zero_stage": 0, "stack": stack, **change})
        assert same.step_time_s == plain.step_time_s, change
        assert same.breakdown == plain.breakdown, change
        assert same.peak_allocated_gib == plain.peak_allocated_gib, change


@pytest.mark.parametrize("stack", ["torchtitan", "megatron-core", "nemo"])
def test_full_sharding_of_one_gpu_changes_the_optimizer_only(stack: str) -> None:
    """Fully sharded parameters and their gradients are fp32, so clipping reads other bytes than in ZeRO-0 to 2."""
    plain, full = ask(zero_stage=0, stack=stack), ask(zero_stage=3, stack=stack)
    assert compute_s(full) == pytest.approx(compute_s(plain), rel=1e-9)
    assert full.step_time_s == pytest.approx(plain.step_time_s, rel=0.06)
    for change in (dict(reshard_after_forward="always"), dict(reshard_after_forward="never"), dict(prefetch=0)):
        assert ask(zero_stage=3, stack=stack, **change).step_time_s == full.step_time_s, change


# -- monotone ----------------------------------------------------------------------------------------------------------

SIZES = st.fixed_dictionaries(
    {
        "seq_len": st.sampled_from([512, 1024, 2048, 4096, 8192]),
        "micro_batch": st.sampled_from([1, 2, 4]),
        "n_microbatches": st.sampled_from([2, 4]),
        "compile": st.booleans(),
    }
)
MESH = st.sampled_from(
    [
        dict(),
        dict(dp_shard=8),
        dict(tp=4, dp_shard=2),
        dict(pp=2, dp_shard=4, zero_stage=1),
        dict(cp=2, dp_shard=4),
        dict(dp_replicate=8, zero_stage=0),
    ]
)
MODELS = st.sampled_from([LLAMA, MIXTRAL])
STACKS = st.sampled_from(["torchtitan", "megatron-core"])


@settings(max_examples=30)
@given(sizes=SIZES, mesh=MESH, model=MODELS, stack=STACKS)
def test_more_work_never_takes_less_time(
    sizes: dict[str, object], mesh: dict[str, object], model: ModelSpec, stack: str
) -> None:
    fields = {**sizes, **mesh, "stack": stack}
    base = ask(model, **fields).step_time_s
    for key in ("seq_len", "micro_batch", "n_microbatches"):
        assert ask(model, **{**fields, key: 2 * fields[key]}).step_time_s > base, key  # type: ignore[operator]
    assert ask(replace(model, n_layers=6), **fields).step_time_s > base
    assert ask(replace(model, hidden=2 * model.hidden), **fields).step_time_s > base
    assert ask(replace(model, vocab=2 * model.vocab), **fields).step_time_s > base


@pytest.mark.parametrize("axis", ["dp_shard", "dp_replicate", "tp", "cp"])
@pytest.mark.parametrize("stack", ["torchtitan", "megatron-core"])
def test_more_gpus_at_a_fixed_batch_never_compute_longer(axis: str, stack: str) -> None:
    times = []
    for n in (1, 2, 4, 8):
        micro_batches = 16 // n if axis.startswith("dp") else 16
        fields = {axis: n, "n_microbatches": micro_batches, "stack": stack, "zero_stage": 1}
        times.append(compute_s(ask(**fields)))
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("base", [dict(dp_shard=8), dict(pp=2, tp=2, n_microbatches=4, zero_stage=1)], ids=str)
def test_a_simulation_does_not_grow_with_replicas(base: dict[str, object]) -> None:
    sizes = []
    for n in (2, 16, 1024):
        plan = Plan(**{"seq_len": 4096, "dp_replicate": n, **base})  # type: ignore[arg-type]
        found = simulate(LLAMA, plan, H100)
        sizes.append((len(found.flat), len(found.program.rank_classes), len(found.program.ops)))
    assert len(set(sizes)) == 1


NETWORKED = [
    dict(dp_shard=16),
    dict(dp_replicate=16, zero_stage=0),
    dict(dp_replicate=4, dp_shard=8),
    dict(tp=8, dp_shard=2),
    dict(cp=4, dp_shard=4),
    dict(cp=4, dp_shard=4, cp_method="ulysses"),
    dict(pp=4, dp_shard=4, n_microbatches=8, zero_stage=1),
    dict(tp=2, cp=2, pp=2, dp_shard=2, n_microbatches=4),
    dict(pp=4, dp_shard=4, n_microbatches=8, virtual_stages=2, pp_schedule="ZBV", zero_stage=1),
]


@pytest.mark.parametrize("mesh", NETWORKED, ids=str)
def test_a_faster_network_never_slows_a_step(mesh: dict[str, object]) -> None:
    model = replace(LLAMA, n_layers=8)
    times = [ask(model, faster(H100, times), **mesh).step_time_s for times in (0.25, 1.0, 4.0)]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]


def test_a_faster_network_never_slows_experts() -> None:
    times = [ask(MIXTRAL, faster(H100, times), dp_shard=16, ep=8).step_time_s for times in (0.25, 1.0, 4.0)]
    assert times == sorted(times, reverse=True)


# -- pipelines ---------------------------------------------------------------------------------------------------------

UNIFORM = replace(LLAMA, name="uniform", n_layers=16, vocab=512)
"""A small vocabulary: every stage takes the same time."""
FREE = faster(H100, 1e4, 1e-3)
"""Sends that cost nothing"""


def bubble(schedule: str, p: int, m: int, stages: int = 1, stack: str = "torchtitan") -> float:
    """Share of the forward and backward part of the step that a rank waits for others, mean over ranks."""
    found = ask(
        UNIFORM, FREE, pp=p, n_microbatches=m, zero_stage=0, pp_schedule=schedule, virtual_stages=stages, stack=stack
    )
    return found.bubble_s / (found.bubble_s + compute_s(found))


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 4), (4, 8), (4, 16), (8, 8), (8, 16)])
@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
def test_bubble_of_a_uniform_pipeline(schedule: str, p: int, m: int) -> None:
    """(p - 1) / (m + p - 1) of the time (arXiv 2104.04473, section 2.2)."""
    assert bubble(schedule, p, m) == pytest.approx((p - 1) / (m + p - 1), rel=0.03)


@pytest.mark.parametrize(("p", "m"), [(4, 8), (4, 16), (8, 16)])
def test_bubble_of_the_interleaved_schedule(p: int, m: int) -> None:
    """1 / v of it with v stages a rank (arXiv 2104.04473, section 2.2)."""
    assert bubble("Interleaved1F1B", p, m, 2) == pytest.approx((p - 1) / (2 * m + p - 1), rel=0.05)


@pytest.mark.parametrize(("p", "m"), [(4, 8), (4, 16), (4, 32), (8, 16), (8, 32)])
@pytest.mark.parametrize("stack", ["megatron-core", "torchtitan", "nemo"])
def test_zero_bubble_schedules_wait_less(p: int, m: int, stack: str) -> None:
    """ZB-H1 leaves 1F1B's bubble of F + B + W a stage at F + B - W, ZBV less (arXiv 2401.10241, 2405.15362)."""
    shares = [bubble(name, p, m, v, stack) for name, v in (("1F1B", 1), ("ZB1P", 1), ("ZBV", 2))]
    assert shares[0] > shares[1] > shares[2]
    assert shares[1] < 0.7 * shares[0]
    assert shares[2] < 0.35 * shares[0]
    assert bubble("DualPipeV", p, m, 2, stack) < shares[1]


@pytest.mark.parametrize(("schedule", "stages"), [("1F1B", 1), ("ZB1P", 1), ("ZBV", 2), ("DualPipeV", 2)])
def test_the_bubble_of_a_step_does_not_grow_with_micro_batches(schedule: str, stages: int) -> None:
    """But for the little that the embedding and the loss of the end stages add to each micro batch: 1 % of it."""
    fields = dict(pp=4, zero_stage=0, pp_schedule=schedule, virtual_stages=stages)
    short, long = (ask(UNIFORM, FREE, n_microbatches=m, **fields) for m in (8, 64))
    assert (long.bubble_s - short.bubble_s) / 56 < 0.01 * compute_s(long) / 64


# -- levers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stack", ["torchtitan", "megatron-core", "nemo"])
def test_checkpointing_trades_time_for_memory(stack: str) -> None:
    modes = ("none", "selective", "full")
    found = [ask(dp_shard=8, micro_batch=2, activation_checkpointing=mode, stack=stack) for mode in modes]
    assert found[0].step_time_s < found[1].step_time_s < found[2].step_time_s
    assert found[0].peak_allocated_gib > found[1].peak_allocated_gib > found[2].peak_allocated_gib


def test_compiled_kernels_are_faster_than_eager_ones() -> None:
    for model in (LLAMA, replace(load_model("gpt2-medium"), n_layers=4), MIXTRAL):
        seq_len = min(4096, model.max_positions or 4096)
        times = [ask(model, seq_len=seq_len, dp_shard=8, compile=on).step_time_s for on in (True, False)]
        assert times[0] < times[1], model.name


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_fp8_is_faster_for_a_large_compiled_model(recipe: str) -> None:
    model = replace(load_model("llama-3.1-70b"), n_layers=4)
    times = [
        ask(model, dp_shard=8, micro_batch=2, compile=True, **precision).step_time_s
        for precision in (dict(precision="fp8", fp8_recipe=recipe), dict())
    ]
    assert 0.6 < times[0] / times[1] < 0.95


@pytest.mark.parametrize("ep", [2, 8])
def test_imbalanced_experts_are_slower(ep: int) -> None:
    found = [ask(MIXTRAL, dp_shard=8, ep=ep, expert_imbalance=i) for i in (1.0, 1.2, 1.5)]
    times = [one.step_time_s for one in found]
    assert times == sorted(times)
    assert times[-1] > 1.05 * times[0]


@pytest.mark.parametrize("mesh", [dict(dp_shard=8), dict(tp=2, pp=2, n_microbatches=4, zero_stage=1)], ids=str)
def test_offloaded_activations_free_memory(mesh: dict[str, object]) -> None:
    shares = (0.0, 0.25, 0.5, 1.0)
    found = [ask(micro_batch=2, activation_offload=share, **mesh) for share in shares]
    memory = [one.peak_allocated_gib for one in found]
    assert memory == sorted(memory, reverse=True)
    assert memory[-1] < memory[0]
    times = [one.step_time_s for one in found]
    assert times[-1] >= times[0]


# -- definitions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_throughput_and_mfu_by_hand(mesh: dict[str, object]) -> None:
    found = ask(**mesh)
    plan = found.plan
    tokens = plan.micro_batch * plan.n_microbatches * plan.dp * plan.seq_len
    per_gpu = tokens / found.step_time_s / plan.world_size
    assert found.tokens_per_s_per_gpu == pytest.approx(per_gpu)
    n = 4 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096) + 4096 + 4096 * 128256
    flops = 6 * n + 12 * 4 * 4096 * 4096
    assert model_flops_per_token(LLAMA, 4096) == flops
    assert found.mfu == pytest.approx(per_gpu * flops / H100.device.peak_flops["bf16"])


def test_mfu_of_fp8_divides_by_the_16_bit_peak() -> None:
    found = ask(dp_shard=8, compile=True, precision="fp8", fp8_recipe="rowwise")
    flops = model_flops_per_token(LLAMA, 4096) * found.tokens_per_s_per_gpu
    assert found.mfu == pytest.approx(flops / H100.device.peak_flops["bf16"])


@pytest.mark.parametrize("seq_len", [1024, 32768])
def test_hfu_without_recomputation_is_mfu(seq_len: int) -> None:
    plain = ask(compile=True, seq_len=seq_len)
    assert plain.hfu == plain.mfu


def test_recomputation_counts_for_hfu_only() -> None:
    """A whole forward of the layers on top of forward and backward: a third more of their FLOPs at most."""
    model = replace(LLAMA, vocab=512)
    plain, again = (ask(model, activation_checkpointing=mode) for mode in ("none", "full"))
    assert again.mfu < plain.mfu
    assert again.hfu / again.mfu > plain.hfu / plain.mfu
    ratio = (again.hfu * again.step_time_s) / (plain.hfu * plain.step_time_s)
    assert 1.2 < ratio <= 4 / 3


def test_dollars_by_hand() -> None:
    found = ask(replace(LLAMA, n_layers=8), replace(H100, price_per_gpu_hour=3.5), dp_shard=16)
    gpu_hours_per_token = 1 / found.tokens_per_s_per_gpu / 3600
    assert found.dollars_per_billion_tokens == pytest.approx(3.5 * gpu_hours_per_token * 1e9)
    assert ask(cluster=replace(H100, price_per_gpu_hour=None)).dollars_per_billion_tokens is None


def test_a_step_that_does_not_fit_says_so() -> None:
    assert ask().fits
    big = ask(replace(LLAMA, n_layers=32))
    assert not big.fits
    assert big.peak_reserved_gib > big.memory_limit_gib == pytest.approx(H100.device.memory_bytes / 2**30)


def test_phases_of_recomputation_appear_only_with_checkpointing() -> None:
    assert "recompute" not in ask().breakdown
    assert ask(activation_checkpointing="full").breakdown["recompute"] > 0


def test_a_single_gpu_runs_no_collective() -> None:
    found = simulate(LLAMA, Plan(seq_len=4096), H100)
    assert not (found.program.ops.kind == OpKind.COLLECTIVE).any()
    assert not (found.program.ops.kind == OpKind.P2P).any()


# -- refusals ----------------------------------------------------------------------------------------------------------

REFUSED = [
    (UnknownName, H100, dict(stack="jax"), "jax"),
    (ForerunError, H100, dict(attention="flash9"), "flash9"),
    (ForerunError, H100, dict(precision="fp4"), "fp4"),
    (ImpossiblePlan, A100, dict(precision="fp8", fp8_recipe="rowwise"), "fp8"),
    (ImpossiblePlan, H100, dict(precision="nvfp4"), "nvfp4"),
    (ImpossiblePlan, H100, dict(tp=3), "tp 3"),
    (ImpossiblePlan, H100, dict(ep=2, dp_shard=2), "ep"),
    (ImpossiblePlan, H100, dict(pp=8, n_microbatches=8), "8"),
    (ForerunError, H100, dict(seq_len=0), "seq_len"),
]


@pytest.mark.parametrize(
    ("error", "cluster", "fields", "word"), REFUSED, ids=lambda v: str(v) if isinstance(v, dict) else ""
)
def test_what_cannot_run_is_one_clear_line(
    error: type[ForerunError], cluster: Cluster, fields: dict[str, object], word: str
) -> None:
    with pytest.raises(error) as raised:
        ask(LLAMA, cluster, **fields)
    assert word in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_prediction_leaves_no_reference_cycles() -> None:
    """Cycles wait for Python's collector, which took a tenth of the time of predictions while builders had some."""
    plan = Plan(seq_len=4096, dp_shard=8, activation_checkpointing="full")
    predict(LLAMA, plan, H100)
    gc.collect()
    gc.disable()
    try:
        predict(LLAMA, replace(plan, seq_len=2048), H100)
        assert gc.collect() == 0
    finally:
        gc.enable()
