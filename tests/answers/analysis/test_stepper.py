"""Iterations of one Setup under factors."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forerun.answers.analysis.setup import RankKind, Setup
from forerun.answers.analysis.simulate_setup import simulate_setup
from forerun.answers.analysis.stepper import CAUSES, Stepper
from forerun.common.errors import ForerunError
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan

MODEL = replace(load_model("llama-3.1-8b"), n_layers=4)
CLUSTER = load_cluster("h100-sxm")
PLANS = {
    "FSDP": dict(dp_shard=8),
    "DDP": dict(dp_replicate=16, zero_stage=0),
    "pipelines": dict(dp_shard=4, pp=2, n_microbatches=8),
    "tensor parallel": dict(dp_shard=2, tp=4),
}


def setup_of(fields: dict[str, int], *kinds: RankKind) -> Setup:
    return Setup(MODEL, Plan(seq_len=1024, **fields), CLUSTER, kinds=kinds)  # type: ignore[arg-type]


def alike(stepper: Stepper, factor: float) -> list[float]:
    return [factor] * stepper.n_classes


@pytest.mark.parametrize("fields", PLANS.values(), ids=PLANS)
def test_an_undisturbed_step_is_the_simulations_folded_or_not(fields: dict[str, int]) -> None:
    setup = setup_of(fields)
    stepper = Stepper(setup)
    step = stepper.step(alike(stepper, 1.0))
    assert step.time_s == stepper.simulation.prediction.step_time_s
    assert step.time_s == simulate_setup(setup, folded=True).prediction.step_time_s
    assert step.slowest == stepper.simulation.slowest


@pytest.mark.parametrize("fields", PLANS.values(), ids=PLANS)
def test_slower_kernels_are_those_of_a_slower_cluster_folded_or_not(fields: dict[str, int]) -> None:
    setup = setup_of(fields)
    stepper = Stepper(setup)
    slower = replace(setup, kinds=(RankKind("slow", setup.n_gpus, slowdown=1.25),))
    step = stepper.step(alike(stepper, 1.25))
    assert step.time_s == simulate_setup(slower).prediction.step_time_s
    assert step.time_s == simulate_setup(slower, folded=True).prediction.step_time_s


def test_a_slower_network_is_that_of_slow_links() -> None:
    setup = setup_of(PLANS["FSDP"])
    stepper = Stepper(setup)
    slow = simulate_setup(replace(setup, slow_links=3.0)).prediction.step_time_s
    assert stepper.step(alike(stepper, 1.0), network=3.0).time_s == slow > stepper.simulation.prediction.step_time_s


def test_a_slower_host_is_a_stack_with_slower_launches() -> None:
    setup = setup_of(PLANS["FSDP"])
    stepper, stack = Stepper(setup), setup.stack
    slow = replace(setup, changed_stack=replace(stack, issue_us=100 * stack.issue_us, step_us=100 * stack.step_us))
    found = stepper.step(alike(stepper, 1.0), host=100.0)
    assert found.time_s == simulate_setup(slow).prediction.step_time_s
    assert found.breakdown_s["host"] > 0.9 * found.time_s - found.breakdown_s["compute"]


def test_one_slow_stage_slows_its_own_kernels_only() -> None:
    setup = setup_of(PLANS["pipelines"])
    stepper = Stepper(setup)
    none, first, last, both = (stepper.step(factors) for factors in ((1.0, 1.0), (4.0, 1.0), (1.0, 4.0), (4.0, 4.0)))
    assert none.time_s < min(first.time_s, last.time_s) <= max(first.time_s, last.time_s) < both.time_s
    assert first.slowest == 0
    assert last.slowest == 1


@pytest.mark.parametrize("name", ["FSDP", "DDP"])
def test_the_slowest_rank_of_a_class_is_its_time(name: str) -> None:
    # The ranks one by one, each a kind of its own, against one class with the largest factor.
    factors = (1.0, 1.1, 1.02, 1.3, 1.07, 1.21)
    setup = setup_of(PLANS[name])
    kinds = tuple(RankKind(f"rank {i}", 1, slowdown=factor) for i, factor in enumerate(factors))
    stepper = Stepper(setup)
    apart = simulate_setup(replace(setup, kinds=kinds)).prediction.step_time_s
    assert stepper.step([max(factors)]).time_s == apart


def test_stages_that_are_slow_in_different_replicas_are_taken_to_be_in_one() -> None:
    setup = setup_of(dict(dp_replicate=2, pp=2, n_microbatches=8, zero_stage=0))
    together = Stepper(setup).step((1.3, 1.3)).time_s
    replicas_apart = Stepper(replace(setup, kinds=(RankKind("second", 2),)))
    assert replicas_apart.step((1.3, 1.0, 1.0, 1.3)).time_s < together
    assert replicas_apart.step((1.3, 1.3, 1.0, 1.0)).time_s == together


def test_the_causes_of_a_step_sum_to_it() -> None:
    setup = setup_of(PLANS["pipelines"], RankKind("slow", 2, slowdown=1.2))
    stepper = Stepper(setup)
    for factors in ((1.0, 1.0, 1.0, 1.0), (1.0, 1.4, 1.3, 1.0), (2.0, 1.0, 1.0, 1.0)):
        step = stepper.step(factors, network=1.5, host=2.0)
        assert tuple(step.breakdown_s) == CAUSES
        assert sum(step.breakdown_s.values()) == pytest.approx(step.time_s, rel=1e-12)
        assert min(step.breakdown_s.values()) >= 0


def test_waiting_is_for_gpus_of_another_kind_and_a_bubble_for_another_stage() -> None:
    replicas = Stepper(setup_of(PLANS["DDP"], RankKind("other", 8)))
    # Either kind is slow for some time that the other has to wait, so that the pace-setter waits too.
    assert replicas.step((1.0, 1.0)).breakdown_s["waiting"] == 0
    assert replicas.step((1.0, 1.5)).slowest == 1
    assert replicas.step((1.5, 1.0)).slowest == 0
    assert replicas.step((1.5, 1.0)).time_s == replicas.step((1.0, 1.5)).time_s
    pipeline = Stepper(setup_of(PLANS["pipelines"])).step((1.0, 1.0)).breakdown_s
    assert pipeline["bubble"] > 0
    assert pipeline["waiting"] == 0


def test_equal_arguments_are_run_once() -> None:
    stepper = Stepper(setup_of(PLANS["FSDP"]))
    first = stepper.step([1.1])
    assert stepper.step((1.1,)) is first
    assert stepper.step([1.1], network=1.1) is not first


def test_ranks_are_counted_as_torchtitan_does() -> None:
    found = Stepper(setup_of(dict(dp_replicate=2, dp_shard=2, tp=2, pp=2, n_microbatches=2))).class_of_rank
    assert found.tolist() == [0] * 8 + [1] * 8


@pytest.mark.parametrize(
    ("compute", "more", "message"),
    [
        ([1.0, 1.0], {}, "step: expected one factor of compute for each of 1 rank classes, got 2"),
        ([0.0], {}, "step: factor of compute must be above 0 and finite, got 0.0"),
        ([1.0], {"network": float("inf")}, "step: factor of network must be above 0"),
        ([1.0], {"host": float("nan")}, "step: factor of host must be above 0"),
    ],
)
def test_factors_that_are_none_are_refused(compute: list[float], more: dict[str, float], message: str) -> None:
    with pytest.raises(ForerunError, match=message):
        Stepper(setup_of(PLANS["FSDP"])).step(compute, **more)
