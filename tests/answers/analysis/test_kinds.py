"""Runs on GPUs of several kinds."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.answers.analysis.breakdown import breakdown_ps
from forerun.answers.analysis.setup import RankKind, Setup
from forerun.answers.analysis.simulate_setup import simulate_setup
from forerun.answers.analysis.stepper import class_of_rank
from forerun.common.errors import ForerunError, ImpossiblePlan
from forerun.core.network.on_topology import load_network
from forerun.core.program.causes import Cause
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan

MODEL = replace(load_model("llama-3.1-8b"), n_layers=4)
CLUSTER = load_cluster("h100-sxm")
A100 = load_cluster("a100-80gb-sxm").device
V100 = load_cluster("v100-dgx1").device
PLANS = {
    "FSDP": dict(dp_shard=8),
    "DDP between nodes": dict(dp_replicate=16, zero_stage=0),
    "HSDP": dict(dp_shard=8, dp_replicate=2),
    "ZeRO-1": dict(dp_shard=8, zero_stage=1),
    "FSDP and tensor parallel": dict(dp_shard=4, tp=2),
    "FSDP and context parallel": dict(dp_shard=4, cp=2),
    "DDP and pipelines": dict(dp_replicate=4, pp=2, n_microbatches=4, zero_stage=0),
    "FSDP and pipelines": dict(dp_shard=4, pp=2, n_microbatches=4),
}


def as_slow(fields: dict[str, int], of_one: int, of_all: int) -> bool:
    """Whether one slow replica makes a step as slow as if all were. Under context parallelism the exchanges of two axes
    run side by side, and of the one that is hidden a sound rank may be the last."""
    return of_one == pytest.approx(of_all, rel=1e-3) if "cp" in fields else of_one == of_all


def setup_of(fields: dict[str, int], *kinds: RankKind) -> Setup:
    return Setup(MODEL, Plan(seq_len=1024, micro_batch=2, **fields), CLUSTER, kinds=kinds)  # type: ignore[arg-type]


def replica(fields: dict[str, int]) -> int:
    """GPUs of one data-parallel replica."""
    plan = setup_of(fields).plan
    return plan.world_size // plan.dp


def step_ps(setup: Setup, folded: bool = False) -> int:
    return simulate_setup(setup, folded).timeline.end_of_step_ps


@pytest.mark.parametrize("fields", PLANS.values(), ids=PLANS)
def test_kinds_equal_to_the_clusters_own_change_nothing(fields: dict[str, int]) -> None:
    alone = simulate_setup(setup_of(fields))
    divided = simulate_setup(setup_of(fields, RankKind("some", replica(fields)), RankKind("more", replica(fields))))
    assert divided.timeline.end_of_step_ps == alone.timeline.end_of_step_ps
    for name in ("step_time_s", "tokens_per_s_per_gpu", "peak_reserved_gib", "fits", "breakdown", "exposed_comm_s"):
        assert getattr(divided.prediction, name) == getattr(alone.prediction, name), name
    for name in ("mfu", "hfu", "bubble_s"):
        assert getattr(divided.prediction, name) == pytest.approx(getattr(alone.prediction, name)), name


@pytest.mark.parametrize("fields", PLANS.values(), ids=PLANS)
def test_one_slower_replica_makes_all_as_slow(fields: dict[str, int]) -> None:
    world = setup_of(fields).n_gpus
    one = simulate_setup(setup_of(fields, RankKind("slow", replica(fields), slowdown=1.1)))
    all_slow = step_ps(setup_of(fields, RankKind("slow", world, slowdown=1.1)))
    assert as_slow(fields, one.timeline.end_of_step_ps, all_slow)
    assert all_slow > step_ps(setup_of(fields))
    assert one.program.rank_classes[one.slowest].name.startswith("slow")


@pytest.mark.parametrize("fields", PLANS.values(), ids=PLANS)
def test_one_gpu_of_an_older_generation_makes_all_as_slow(fields: dict[str, int]) -> None:
    # An A100 takes longer than an H100 for every kernel, so that it is the last to come to every collective. The links
    # are the cluster's own for both.
    world = setup_of(fields).n_gpus
    one = step_ps(setup_of(fields, RankKind("old", replica(fields), device=A100)))
    assert as_slow(fields, one, step_ps(setup_of(fields, RankKind("old", world, device=A100))))


def test_a_v100_among_a100s_is_a_v100_cluster_on_the_same_links() -> None:
    # On the V100s' own links. A V100 has no constants of collectives of its own, and takes those of the A100's NVLink.
    links = load_cluster("v100-dgx1").links
    cluster = replace(load_cluster("a100-80gb-sxm"), links=links)
    plan = Plan(seq_len=512, dp_replicate=16, zero_stage=0, precision="fp16")
    model = replace(load_model("gpt2-small"), n_layers=4)
    mixed = Setup(model, plan, cluster, kinds=(RankKind("old", 1, device=V100),))
    only = Setup(model, plan, replace(cluster, device=V100))
    assert step_ps(mixed) == step_ps(only) > step_ps(Setup(model, plan, cluster))


@pytest.mark.parametrize("name", ["FSDP", "DDP and pipelines"])
def test_the_order_of_kinds_changes_nothing(name: str) -> None:
    fields = PLANS[name]
    n = replica(fields)
    kinds = (RankKind("old", n, device=A100), RankKind("slow", n, slowdown=1.3), RankKind("large", n, micro_batch=3))
    found = {step_ps(setup_of(fields, *(kinds[i] for i in order))) for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0))}
    assert len(found) == 1


@pytest.mark.parametrize("name", ["FSDP and pipelines", "DDP and pipelines", "DDP between nodes"])
def test_folding_changes_nothing(name: str) -> None:
    fields = PLANS[name]
    setup = setup_of(fields, RankKind("slow", replica(fields), slowdown=1.2))
    assert step_ps(setup, folded=True) == step_ps(setup)


def test_more_samples_on_the_faster_gpus_help() -> None:
    even = setup_of(dict(dp_shard=8), RankKind("old", 4, device=A100, micro_batch=3))
    even = replace(even, plan=replace(even.plan, micro_batch=3))
    uneven = replace(even, plan=replace(even.plan, micro_batch=4), kinds=(replace(even.kinds[0], micro_batch=2),))
    assert uneven.samples_per_step == even.samples_per_step
    assert step_ps(uneven) < 0.9 * step_ps(even)


def test_samples_and_tokens_count_every_gpus_own() -> None:
    setup = setup_of(dict(dp_shard=4, tp=2, n_microbatches=3), RankKind("small", 2, micro_batch=1))
    assert setup.samples_per_step == 3 * (3 * 2 + 1)
    found = simulate_setup(setup).prediction
    assert found.tokens_per_s_per_gpu == pytest.approx(setup.samples_per_step * 1024 / 8 / found.step_time_s)


def test_mfu_is_over_the_mean_peak() -> None:
    found = simulate_setup(setup_of(dict(dp_shard=8), RankKind("old", 2, device=A100)))
    mean = (6 * CLUSTER.device.peak("bf16") + 2 * A100.peak("bf16")) / 8
    assert found.subject.model_flops is not None
    assert found.prediction.mfu == pytest.approx(found.subject.model_flops / found.prediction.step_time_s / mean)


def test_faster_gpus_wait_and_the_slower_sets_the_pace() -> None:
    found = simulate_setup(setup_of(dict(dp_replicate=8, zero_stage=0), RankKind("slow", 1, slowdown=1.5)))
    assert found.slowest == 1
    assert "waiting" not in found.prediction.breakdown
    assert "bubble" not in found.prediction.breakdown
    fast, slow = breakdown_ps(found.flat, found.program, found.timeline)
    assert fast.sum() == slow.sum() == found.timeline.end_of_step_ps
    kernels = [Cause.MATMUL, Cause.ATTENTION, Cause.MEMORY_BOUND, Cause.OPTIMIZER]
    assert 0 < fast[Cause.WAITING] <= slow[kernels].sum() - fast[kernels].sum()
    assert fast[Cause.BUBBLE] == slow[Cause.BUBBLE] == slow[Cause.WAITING] == 0


def test_every_kind_has_to_fit_its_own_memory() -> None:
    small = replace(A100, name="small", memory_bytes=CLUSTER.device.memory_bytes // 16)
    fits = simulate_setup(setup_of(dict(dp_shard=8))).prediction
    found = simulate_setup(setup_of(dict(dp_shard=8), RankKind("small", 1, device=small))).prediction
    assert fits.fits
    assert not found.fits
    assert found.peak_rank_class == "small: every rank"
    assert found.memory_limit_gib == small.memory_bytes / 2**30
    assert any("1 x small (small" in line for line in found.explain)


def test_a_fuller_gpu_of_a_larger_memory_is_not_the_fullest() -> None:
    large = replace(CLUSTER.device, name="large", memory_bytes=4 * CLUSTER.device.memory_bytes)
    found = simulate_setup(setup_of(dict(dp_shard=8), RankKind("large", 4, device=large, micro_batch=4))).prediction
    assert found.peak_rank_class == f"{CLUSTER.device.name}: every rank"
    assert found.fits


def test_ranks_of_kinds_are_the_last_replicas() -> None:
    fields = dict(tp=2, cp=2, dp_shard=2, dp_replicate=3, pp=2, n_microbatches=2)
    setup = setup_of(fields, RankKind("a", 16), RankKind("b", 8))
    found = class_of_rank(setup)
    kind_of_replica = [0, 0, 0, 1, 1, 2]
    mesh = product(range(2), range(3), range(2), range(2), range(2))
    for rank, (stage, outer, inner, _, _) in enumerate(mesh):
        assert found[rank] == kind_of_replica[outer * 2 + inner] * 2 + stage
    classes = simulate_setup(setup).program.rank_classes
    assert [cls.n_ranks for cls in classes] == [(found == i).sum() for i in range(len(classes))]


def test_kinds_of_one_name_are_numbered() -> None:
    name = CLUSTER.device.name
    setup = setup_of(dict(dp_shard=8), RankKind(name, 1, slowdown=1.1), RankKind("x", 1), RankKind(name, 1))
    assert [part.name for part in setup.parts] == [name, f"{name} (2)", "x", f"{name} (3)"]
    assert simulate_setup(setup).program.rank_classes[1].name == f"{name} (2): every rank"


def test_slow_links_lengthen_collectives_only() -> None:
    setup = setup_of(dict(dp_shard=8, tp=2))
    sound, slow = simulate_setup(setup), simulate_setup(replace(setup, slow_links=2.0))
    network = sound.costs.network_op
    assert (slow.costs.duration_ps[network] == 2 * sound.costs.duration_ps[network]).all()
    assert (slow.costs.duration_ps[~network] == sound.costs.duration_ps[~network]).all()


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        ((RankKind("x", 3),), r"GPUs 'x': n_gpus 3 must be a multiple of the 2 GPUs of a data-parallel replica"),
        ((RankKind("x", 0),), r"GPUs 'x': n_gpus 0 must be a multiple"),
        ((RankKind("x", 6), RankKind("y", 4)), r"GPUs 'x', 'y': 10 together, but the plan has only 8"),
        ((RankKind("x", 2, slowdown=0.0),), r"GPUs 'x': slowdown must be above 0 and finite, got 0.0"),
        ((RankKind("x", 2, slowdown=float("nan")),), r"GPUs 'x': slowdown must be above 0"),
        ((RankKind("x", 2, micro_batch=0),), r"GPUs 'x': micro_batch must be at least 1, got 0"),
    ],
)
def test_impossible_kinds_are_refused(kinds: tuple[RankKind, ...], message: str) -> None:
    with pytest.raises(ForerunError, match=message):
        simulate_setup(setup_of(dict(dp_shard=4, tp=2), *kinds))


def test_links_can_not_take_no_time_by_a_factor() -> None:
    with pytest.raises(ForerunError, match="slow_links must be above 0"):
        simulate_setup(replace(setup_of(dict(dp_shard=4)), slow_links=0.0))


def test_a_kind_whose_device_lacks_the_precision_is_refused() -> None:
    setup = setup_of(dict(dp_shard=8), RankKind("old", 1, device=V100))
    with pytest.raises(ImpossiblePlan, match="has no bf16"):
        simulate_setup(setup)


def test_links_of_a_topology_are_as_busy_as_without_kinds() -> None:
    fields = dict(dp_shard=4, pp=2, tp=2, n_microbatches=4)
    setup = replace(setup_of(fields), network=load_network("switch:8@450/300,fat-tree:4@50/700"))
    alone, divided = (simulate_setup(replace(setup, kinds=kinds)) for kinds in ((), (RankKind("some", 4),)))
    assert divided.prediction.network == alone.prediction.network
    assert divided.timeline.end_of_step_ps == alone.timeline.end_of_step_ps


def test_experts_that_gpus_of_two_kinds_share_make_them_wait_too() -> None:
    model = replace(load_model("mixtral-8x7b"), n_layers=2)
    setup = Setup(model, Plan(seq_len=512, dp_shard=8, ep=4), CLUSTER)
    slow = step_ps(replace(setup, kinds=(RankKind("slow", 1, slowdown=1.2),)))
    assert slow == step_ps(replace(setup, kinds=(RankKind("slow", 8, slowdown=1.2),)))
    with pytest.raises(ForerunError, match=r"share the collectives of ep.*number \d is all_to_all of"):
        simulate_setup(replace(setup, kinds=(RankKind("more", 1, micro_batch=2),)))


@given(st.lists(st.sampled_from((1.0, 1.01, 1.1, 1.5)), min_size=1, max_size=5), st.sampled_from(list(PLANS)))
@settings(max_examples=15)
def test_the_slowest_of_many_is_the_step(factors: list[float], name: str) -> None:
    fields = PLANS[name]
    n = replica(fields)
    factors = factors[: setup_of(fields).plan.dp]
    kinds = [RankKind(f"kind {i}", n, slowdown=factor) for i, factor in enumerate(factors)]
    world = setup_of(fields).n_gpus
    slowest = max((*factors, 1.0) if len(factors) * n < world else factors)
    of_all = step_ps(setup_of(fields, RankKind("all", world, slowdown=slowest)))
    assert as_slow(fields, step_ps(setup_of(fields, *kinds)), of_all)
