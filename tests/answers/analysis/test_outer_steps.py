"""Replicas that agree in outer steps: the mean step, memory, the bandwidth they need, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from forerun.answers.analysis.outer_steps import OuterSteps, outer_effect, replica_of
from forerun.answers.analysis.setup import Setup
from forerun.answers.analysis.simulate_setup import simulate_setup
from forerun.common.errors import ForerunError
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.model.parameters import parameter_count
from forerun.describe.plan.complete import complete_plan
from forerun.interfaces.cli.main import run

MODEL = load_model("llama-3.2-1b")
FIELDS = {"seq_len": 1024, "dp_replicate": 4, "dp_shard": 8}
SETUP = Setup(MODEL, complete_plan(FIELDS, 32), load_cluster("h100-sxm"))
ALONE = simulate_setup(replica_of(SETUP, OuterSteps("diloco"))).prediction
PARAMETERS_GIB = parameter_count(MODEL) * 4 / 2**30
COMMAND = "predict llama-3.2-1b --cluster h100-sxm --gpus 32 --seq-len 1024 --dp-replicate 4 --dp-shard 8"


def effect(text, setup=SETUP):
    return outer_effect(setup, OuterSteps.of_text(text), ALONE)


def test_the_inner_step_is_that_of_one_replica():
    found = effect("diloco:every=10")
    assert (found.replicas, found.gpus_of_replica) == (4, 8)
    alone = Setup(MODEL, complete_plan({"seq_len": 1024, "dp_shard": 8}, 8), SETUP.cluster)
    assert found.inner_step_s == simulate_setup(alone).prediction.step_time_s


def test_the_mean_step_has_its_share_of_outer_steps():
    found = effect("diloco:every=10,link_gb_s=1,link_ms=10")
    added = found.exchange_s + found.kernels_s
    assert found.mean_step_s == pytest.approx(found.inner_step_s + added / 10)
    ring = 2 * 3 / 4 * parameter_count(MODEL) * 4 / 1e9
    assert found.exchange_s == pytest.approx(ring, rel=0.06)
    assert found.tokens_per_s * found.mean_step_s == pytest.approx(SETUP.plan.global_batch * 1024)
    assert found.plain_step_s > found.exchange_s
    near = effect("diloco:every=10,link_gb_s=1")
    assert found.exchange_s - near.exchange_s == pytest.approx(2 * 3 * 0.01)
    assert found.plain_step_s > near.plain_step_s


def test_rarer_outer_steps_cost_less_down_to_the_inner_step():
    means = [effect(f"diloco:every={n},link_gb_s=1").mean_step_s for n in (1, 10, 100, 100_000)]
    assert means == sorted(means, reverse=True)
    assert means[-1] == pytest.approx(ALONE.step_time_s, rel=0.01)


def test_fragments_take_turns_and_delays_hide_their_exchange():
    whole, parts = (effect(f"diloco:every=40,fragments={n},link_gb_s=1,wire=fp8") for n in (1, 4))
    assert parts.sent_gib == pytest.approx(whole.sent_gib / 4)
    assert parts.mean_step_s == pytest.approx(whole.mean_step_s, rel=0.01)
    delayed = effect("diloco:every=40,fragments=4,delay=9,link_gb_s=1,wire=fp8")
    assert delayed.exposed_s == pytest.approx(max(0.0, delayed.exchange_s - 9 * delayed.inner_step_s))
    assert delayed.mean_step_s < parts.mean_step_s
    assert delayed.gpu_gib == pytest.approx(parts.gpu_gib + whole.gpu_gib / 4)


def test_memory_of_outer_parameters_and_momentum():
    shard = PARAMETERS_GIB / 8
    on_host, on_gpu, averaged = effect("diloco"), effect("diloco:keep=gpu"), effect("local_sgd")
    assert (on_host.gpu_gib, on_host.host_gib) == pytest.approx((shard, shard), rel=0.01)
    assert (on_gpu.gpu_gib, on_gpu.host_gib) == pytest.approx((2 * shard, 0), rel=0.01)
    assert (averaged.gpu_gib, averaged.host_gib) == (0, 0)
    assert on_host.kernels_s > on_gpu.kernels_s > averaged.kernels_s


@pytest.mark.parametrize("text", ["diloco:every=20", "diloco:every=20,link_gb_s=1", "local_sgd:every=4,wire=bf16"])
def test_the_bandwidth_that_is_needed_makes_outer_steps_cost_a_twentieth(text):
    found = effect(text)
    steps = OuterSteps.of_text(text)
    if steps.link_gb_s is None:
        factor = found.needed_gb_s * 1e9 / SETUP.cluster.links[-1].bytes_per_s
        there = outer_effect(replace(SETUP, cluster=SETUP.cluster.with_outermost_link(factor)), steps, ALONE)
    else:
        there = outer_effect(SETUP, replace(steps, link_gb_s=found.needed_gb_s), ALONE)
    assert there.mean_step_s / there.inner_step_s - 1 == pytest.approx(0.05, rel=0.02)


def test_no_bandwidth_helps_where_kernels_alone_take_too_long():
    assert effect("diloco:every=1").needed_gb_s is None


def test_the_command_says_what_outer_steps_do(capsys):
    assert run([*COMMAND.split(), "--outer-steps", "diloco:every=50,link_gb_s=1.25", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["n_gpus"] == 8
    assert found["outer_steps"]["inner_step_s"] == found["step_time_s"]
    assert found["outer_steps"]["steps"]["every"] == 50
    assert run([*COMMAND.split(), "--outer-steps", "local_sgd"]) == 0
    printed = capsys.readouterr().out
    assert "Outer steps: local SGD, 4 replicas of 8 GPUs" in printed
    assert "Convergence is not simulated" in printed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dilcoo", "did you mean diloco"),
        ("diloco:evry=5", "did you mean every"),
        ("diloco:every=many", "expected a value for every, as in every=500"),
        ("diloco:every", "expected a value for every"),
        ("diloco:every=0", "must be a multiple of fragments"),
        ("diloco:every=10,fragments=3", "must be a multiple of fragments"),
        ("diloco:every=10,fragments=2,delay=5", "delay must be between 0 and 4 steps"),
        ("diloco:wire=fp7", "unknown wire 'fp7'"),
        ("diloco:keep=disk", "unknown keep 'disk'"),
        ("diloco:link_gb_s=0", "link_gb_s must be above 0"),
        ("diloco:link_gb_s=nan", "link_gb_s must be above 0"),
        ("diloco:link_ms=5", "needs link_gb_s"),
        ("local_sgd:delay=1", "takes no fragments and no delay"),
    ],
)
def test_mistakes_are_one_line(text, words):
    with pytest.raises(ForerunError, match=words) as error:
        OuterSteps.of_text(text)
    assert "\n" not in str(error.value)


def test_plans_that_have_no_replicas_are_refused():
    single = replace(SETUP, plan=complete_plan({"seq_len": 1024}, 32))
    with pytest.raises(ForerunError, match="give the number of replicas with --dp-replicate"):
        replica_of(single, OuterSteps("diloco"))
    small = replace(SETUP, plan=complete_plan({"seq_len": 1024, "dp_replicate": 8, "dp_shard": 4}, 32))
    with pytest.raises(ForerunError, match="link_gb_s needs replicas of whole nodes"):
        replica_of(small, OuterSteps.of_text("diloco:link_gb_s=1"))
