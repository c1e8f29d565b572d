"""Predictions whose answer is known in closed form."""

from __future__ import annotations

import dataclasses

import pytest

from forerun.answers.analysis.predict import predict
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.cluster.types import Cluster, Link
from forerun.describe.model.catalog import load_model
from forerun.describe.model.parameters import model_flops_per_token
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.plan import Plan

CLUSTER = load_cluster("h100-sxm")
UNIFORM = ModelSpec("uniform", 16, 4096, 32, 32, 128, 16384, 1024, mlp="gelu", norm="layernorm", position="none")


def instant(cluster: Cluster) -> Cluster:
    """The cluster with links that take next to no time."""
    links = tuple(Link(k.name, "nvswitch", k.size, 1e15, 0.0) for k in cluster.links)
    return dataclasses.replace(cluster, links=links)


@pytest.mark.parametrize(("schedule", "virtual"), [("1F1B", 1), ("GPipe", 1), ("Interleaved1F1B", 2)])
def test_the_bubble_is_the_formulas(schedule: str, virtual: int) -> None:
    p, m = 4, 16
    plan = Plan(
        seq_len=4096, pp=p, n_microbatches=m, pp_schedule=schedule, virtual_stages=virtual, zero_stage=0,
        stack="nemo", micro_batch=2,
    )  # fmt: skip
    found = predict(UNIFORM, plan, instant(CLUSTER))
    ideal = (p - 1) / virtual / (m + (p - 1) / virtual)
    assert found.bubble_s / found.step_time_s == pytest.approx(ideal, rel=0.12)


def test_zero_bubble_schedules_have_less_bubble() -> None:
    def bubble(schedule: str, virtual: int) -> float:
        plan = Plan(
            seq_len=4096, pp=4, n_microbatches=16, pp_schedule=schedule, virtual_stages=virtual, zero_stage=0,
            stack="nemo", micro_batch=2,
        )  # fmt: skip
        found = predict(UNIFORM, plan, instant(CLUSTER))
        return found.bubble_s / found.step_time_s

    assert bubble("ZBV", 2) < bubble("1F1B", 1)
    assert bubble("ZB1P", 1) < bubble("1F1B", 1)


def test_figures_follow_from_each_other() -> None:
    model = dataclasses.replace(load_model("llama-3.1-8b"), n_layers=4)
    plan = Plan(seq_len=4096, dp_shard=8, micro_batch=2)
    found = predict(model, plan, CLUSTER)
    assert sum(found.breakdown.values()) == pytest.approx(found.step_time_s, rel=1e-9)
    assert found.tokens_per_s_per_gpu == pytest.approx(2 * 4096 / found.step_time_s)
    assert found.mfu == pytest.approx(
        model_flops_per_token(model, 4096) * found.tokens_per_s_per_gpu / CLUSTER.device.peak("bf16")
    )
    assert sum(found.memory_by_category_gib.values()) == pytest.approx(found.peak_allocated_gib)
    assert CLUSTER.price_per_gpu_hour is not None
    cost = CLUSTER.price_per_gpu_hour / 3600 / found.tokens_per_s_per_gpu * 1e9
    assert found.dollars_per_billion_tokens == pytest.approx(cost)


def test_replicas_cost_no_time_of_their_own_on_an_instant_network() -> None:
    model = dataclasses.replace(load_model("llama-3.1-8b"), n_layers=4)
    times = [
        predict(model, Plan(seq_len=4096, dp_replicate=n, zero_stage=0), instant(CLUSTER)).step_time_s
        for n in (2, 16, 128)
    ]
    assert times == pytest.approx([times[0]] * 3, rel=0.05)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_one_gpu_runs_the_plain_model(zero_stage: int) -> None:
    model = dataclasses.replace(load_model("llama-3.1-8b"), n_layers=4)
    plain = predict(model, Plan(seq_len=4096, zero_stage=0), CLUSTER)
    found = predict(model, Plan(seq_len=4096, zero_stage=zero_stage), CLUSTER)
    assert found.breakdown["matmul"] == plain.breakdown["matmul"]
    assert found.breakdown["attention"] == plain.breakdown["attention"]
    # FSDP's weights and gradients are fp32 between steps, the plain model's gradients have the kernels' dtype.
    outside_the_optimizer = [each.step_time_s - each.breakdown["optimizer"] for each in (found, plain)]
    assert outside_the_optimizer[0] == pytest.approx(outside_the_optimizer[1], rel=1e-9)
    assert found.exposed_comm_s == 0


def test_a_faster_network_never_slows_a_step() -> None:
    model = dataclasses.replace(load_model("llama-3.1-8b"), n_layers=4)
    faster = dataclasses.replace(
        CLUSTER, links=tuple(dataclasses.replace(link, bytes_per_s=4 * link.bytes_per_s) for link in CLUSTER.links)
    )
    for fields in (dict(dp_shard=64), dict(tp=8, dp_shard=8), dict(pp=2, dp_shard=32, n_microbatches=4)):
        plan = Plan(seq_len=2048, **fields)
        assert predict(model, plan, faster).step_time_s <= predict(model, plan, CLUSTER).step_time_s * 1.0001
