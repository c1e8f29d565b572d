"""Whole steps under a communication pattern: what waits for gradients, and which link limits them."""

from dataclasses import replace

import pytest

from forerun.answers.analysis.setup import Setup
from forerun.answers.analysis.simulate_setup import simulate_setup
from forerun.common.errors import ForerunError
from forerun.core.network.for_experiment import topology_of
from forerun.core.network.patterns_catalog import PATTERNS, pattern_of
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan

pytestmark = pytest.mark.usefixtures("equal_clocks")

H100 = load_cluster("h100-sxm")
MODEL = replace(load_model("gpt2-medium"), n_layers=4)
PLAN = Plan(seq_len=512, micro_batch=4, dp_replicate=16)


def prediction(pattern, plan=PLAN, network=None):
    return simulate_setup(Setup(MODEL, plan, H100, network=network, pattern=pattern_of(pattern))).prediction


@pytest.mark.parametrize("replicas", [2, 8, 64, 1024])
def test_weak_scaling_on_an_ideal_network_is_1(replicas):
    one = prediction("no_network", replace(PLAN, dp_replicate=1))
    many = prediction("no_network", replace(PLAN, dp_replicate=replicas))
    assert many.step_time_s == one.step_time_s
    assert many.exposed_comm_s == 0


def test_a_step_waits_for_what_its_pattern_takes():
    free = prediction("no_network").step_time_s
    times = [prediction(name).step_time_s for name in ("nccl", "ring_allreduce", "all_gather", "parameter_server")]
    assert free < times[0]
    assert times == sorted(times)


def test_a_slow_function_is_exposed_to_the_nanosecond():
    """Gradients are reduced one after the other, so that a second more for each adds up."""
    slow, slower = (prediction(lambda size_bytes, n_ranks, s=s: s) for s in (1.0, 2.0))
    reductions = slower.step_time_s - slow.step_time_s
    assert reductions == pytest.approx(round(reductions), abs=1e-9)
    assert round(reductions) >= 3


def test_explain_names_the_pattern():
    told = [line for line in prediction("ring_allreduce").explain if line.startswith("gradients:")]
    assert told == ["gradients: exchanged as ring_allreduce does, not as NCCL would choose"]
    assert not [line for line in prediction("nccl").explain if line.startswith("gradients:")]


@pytest.mark.parametrize("name", [*PATTERNS, "own"])
def test_the_busiest_link_is_that_of_the_pattern(name):
    network = topology_of("torus_2d", H100, 2)
    pattern = (lambda size_bytes, n_ranks: 1e-3) if name == "own" else name
    axes = {use.axis: use for use in prediction(pattern, network=network).network.axes}
    assert ("dp_all" in axes) == (name != "no_network")
    if name == "own":  # the norm of the gradients alone goes over the network
        assert axes["dp_all"].utilisation < 1e-6
    if name == "parameter_server":
        assert axes["dp_all"].busiest_link == "NPU 8 -> NPU 0"
    for use in axes.values():
        assert 0 <= use.utilisation <= 1


def test_a_pattern_that_a_plan_has_no_use_for_is_refused():
    with pytest.raises(ForerunError, match="tree_allreduce: with zero_stage 3 gradients are reduce-scattered"):
        prediction("tree_allreduce", Plan(seq_len=512, dp_shard=16, zero_stage=3))
