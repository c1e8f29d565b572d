"""What a Setup says is what is simulated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from forerun.answers.analysis.predict import predict, simulate
from forerun.answers.analysis.setup import RankKind, Setup
from forerun.answers.analysis.simulate_setup import simulate_setup
from forerun.common.errors import ForerunError
from forerun.core.cost.measured import ANY, Curve, KernelProfile, Measured
from forerun.core.network.on_topology import load_network
from forerun.core.network.patterns import NoNetwork, TimedBy
from forerun.core.program.kinds import OpKind
from forerun.core.program.types import Collective
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_any, load_model
from forerun.describe.model.layered import LayeredModel
from forerun.describe.plan.plan import Plan

CLUSTER = load_cluster("a100-80gb-sxm")
MODEL = replace(load_model("llama-3.1-8b"), n_layers=2)
DDP = Setup(MODEL, Plan(seq_len=512, dp_replicate=16, zero_stage=0), CLUSTER)


def test_predict_is_the_prediction_of_a_plain_setup() -> None:
    plan = Plan(seq_len=512, dp_shard=4, pp=2, n_microbatches=8)
    shown = simulate_setup(Setup(MODEL, plan, CLUSTER, replays=True)).prediction
    assert simulate(MODEL, plan, CLUSTER).prediction == shown
    assert predict(MODEL, plan, CLUSTER) == shown


def test_a_changed_stack_goes_over_the_plans() -> None:
    usual = simulate_setup(DDP)
    stack = replace(DDP.stack, step_us=DDP.stack.step_us + 1000.0)
    found = simulate_setup(replace(DDP, changed_stack=stack))
    assert found.timeline.end_of_step_ps == usual.timeline.end_of_step_ps + 10**9
    assert DDP.stack.clip_grad
    unclipped = simulate_setup(replace(DDP, changed_stack=replace(DDP.stack, clip_grad=False)))
    assert len(unclipped.flat) < len(usual.flat)


def test_a_pattern_prices_the_gradients() -> None:
    found = simulate_setup(replace(DDP, pattern=TimedBy(lambda size, ranks: 0.125 * ranks)))
    ops, costs = found.program.ops, found.costs.duration_ps
    reduced = [i for i, name in enumerate(ops.name) if name.endswith(".grads")]
    assert reduced
    assert all(ops.collective[i] == Collective.ALL_REDUCE for i in reduced)
    assert (costs[reduced] == 2 * 10**12).all()
    assert simulate_setup(replace(DDP, pattern=NoNetwork())).prediction.exposed_comm_s == 0


def test_a_pattern_that_the_plan_has_no_use_for_is_refused() -> None:
    setup = Setup(MODEL, Plan(seq_len=512, dp_shard=8), CLUSTER, pattern=TimedBy(lambda size, ranks: 1.0))
    with pytest.raises(ForerunError, match="communication_pattern own: with zero_stage 3"):
        simulate_setup(setup)


def test_a_network_that_is_too_small_is_refused() -> None:
    with pytest.raises(ForerunError, match="8"):
        simulate_setup(replace(DDP, network=load_network("ring:8@50/700")))


def test_measured_kernels_are_of_the_clusters_own_device() -> None:
    slow = Measured(kernels=KernelProfile(memory={ANY: Curve((1.0, 1e12), (1.0, 1.0))}))
    other = replace(CLUSTER.device, name="other")
    mixed = simulate_setup(replace(DDP, measured=slow, kinds=(RankKind("other", 4, device=other),)))
    n_ops = len(mixed.program.ops) // 2
    memory = mixed.program.ops.kind[:n_ops] == OpKind.MEMORY
    own, others = mixed.costs.duration_ps[:n_ops][memory], mixed.costs.duration_ps[n_ops:][memory]
    assert (own >= 10**12).all()
    assert (others < 10**11).all()
    shipped = simulate_setup(DDP).costs.duration_ps[memory]
    assert np.array_equal(others, shipped)


def test_layers_are_counted_by_their_flops_and_have_no_tokens() -> None:
    model = load_any("resnet50")
    assert isinstance(model, LayeredModel)
    plan = Plan(seq_len=1, micro_batch=32, dp_replicate=8, zero_stage=0, precision="fp16", stack="pytorch-vision")
    found = simulate_setup(Setup(model, plan, CLUSTER)).prediction
    flops_per_s = 32 * model.flops_per_sample / found.step_time_s
    assert found.mfu == pytest.approx(flops_per_s / CLUSTER.device.peak("fp16"))
    assert found.tokens_per_s_per_gpu is None
    assert found.dollars_per_billion_tokens is None
