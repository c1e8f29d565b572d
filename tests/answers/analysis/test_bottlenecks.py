"""Bottlenecks: shares of the step and of memory, what they are of, and when they count as one."""

from dataclasses import replace

import numpy as np
import pytest

from forerun.answers.analysis.bottlenecks import bottlenecks, exposed_by_collective
from forerun.answers.analysis.setup import RankKind, Setup
from forerun.answers.analysis.simulate_setup import simulate_setup
from forerun.common.units import PS_PER_S
from forerun.core.program.kinds import OpKind
from forerun.core.program.types import Stream
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan

H100 = load_cluster("h100-sxm")
SETUPS = {
    "DDP": Setup(load_model("gpt2-small"), Plan(seq_len=1024, micro_batch=4, dp_replicate=16, zero_stage=0), H100),
    "FSDP": Setup(load_model("llama-3.2-1b"), Plan(seq_len=4096, dp_shard=16), H100),
    "TP": Setup(load_model("llama-3.2-1b"), Plan(seq_len=4096, dp_shard=4, tp=8, offload="optimizer"), H100),
    "PP": Setup(load_model("llama-3.2-1b"), Plan(seq_len=4096, dp_shard=4, pp=4, n_microbatches=4), H100),
    "large": Setup(load_model("llama-3-8b"), Plan(seq_len=9216, dp_shard=8), H100),
    "one GPU": Setup(load_model("gpt2-small"), Plan(seq_len=1024), H100),
}
SIMULATIONS = {name: simulate_setup(setup) for name, setup in SETUPS.items()}
every = pytest.mark.parametrize("simulation", SIMULATIONS.values(), ids=SIMULATIONS)


@every
def test_the_shares_of_the_pace_setting_rank_fill_the_step(simulation):
    found, prediction = bottlenecks(simulation), simulation.prediction
    bubble = prediction.breakdown.get("bubble", 0.0) / prediction.step_time_s
    assert sum(found[name].value for name in ("compute", "network", "host")) + bubble == pytest.approx(1.0)
    assert found["compute"].value == pytest.approx(sum(part.share for part in found["compute"].contributors))
    assert found["memory"].value == prediction.peak_reserved_gib / prediction.memory_limit_gib
    assert found["pipeline"].value == pytest.approx(prediction.bubble_s / prediction.step_time_s)
    assert found.matrix_units == prediction.hfu


@every
def test_contributors_come_most_first_and_are_named_in_the_text(simulation):
    for usage in bottlenecks(simulation).usages:
        values = [part.value for part in usage.contributors]
        assert values == sorted(values, reverse=True)
        if usage.contributors and usage.value > 0:
            assert usage.contributors[0].name in usage.text


@every
def test_exposed_collectives_are_what_no_kernel_runs_beside(simulation):
    """Against a walk over all intervals."""
    flat, timeline, ops = simulation.flat, simulation.timeline, simulation.program.ops
    rank = simulation.slowest
    nodes = range(int(flat.class_ptr[rank]), int(flat.class_ptr[rank + 1]))
    spans = [(int(timeline.start_ps[i]), int(timeline.end_ps[i]), int(flat.op[i]), int(flat.stream[i])) for i in nodes]
    kernels = [s[:2] for s in spans if s[3] == Stream.COMPUTE and ops.kind[s[2]] <= OpKind.MEMORY and s[1] > s[0]]
    starts, ends = (np.array(column, np.int64) for column in zip(*kernels, strict=True))
    expected = 0
    for start, end, op, _ in spans:
        if OpKind.COLLECTIVE <= ops.kind[op] <= OpKind.HOST_COPY:
            shared = np.minimum(end, ends) - np.maximum(start, starts)
            expected += end - start - int(shared[shared > 0].sum())
    found = exposed_by_collective(simulation, rank)
    assert sum(part.value for part in found) == pytest.approx(expected / PS_PER_S)


def test_the_biggest_contributor_is_named_with_its_ranks():
    most = bottlenecks(SIMULATIONS["DDP"])["network"].contributors[0]
    assert most.name == "all-reduce over data-parallel ranks (2 nodes x 8)"
    names = [part.name for part in bottlenecks(SIMULATIONS["TP"])["network"].contributors]
    assert {"all-gather over tp (8 in a node)", "reduce-scatter over tp (8 in a node)"} < set(names)
    assert "copies between device and host" in names
    assert not bottlenecks(SIMULATIONS["one GPU"])["network"].contributors


def test_thresholds_decide_what_a_bottleneck_is():
    simulation = SIMULATIONS["PP"]
    assert [usage.name for usage in bottlenecks(simulation).found] == ["pipeline"]
    assert not bottlenecks(simulation, waiting=0.99).found
    low = bottlenecks(simulation, compute=0.01, memory=0.02, network=1e-9, waiting=0.3)
    assert [usage.name for usage in low.found] == ["network", "compute", "memory", "pipeline"]
    ratios = [usage.value / usage.threshold for usage in low.found]
    assert ratios == sorted(ratios, reverse=True)


def test_gpus_that_wait_for_slower_ones():
    slow = replace(SETUPS["DDP"], kinds=(RankKind("slow", 4, slowdown=1.5),))
    found = bottlenecks(simulate_setup(slow))
    waiting = found["waiting"]
    assert [part.name for part in waiting.contributors] == [f"{H100.device.name}: every rank"]
    share = waiting.contributors[0].share
    assert waiting.value == pytest.approx(share * 12 / 16)
    assert 0.15 < share < 1 / 3
    assert waiting in found.found
    assert "slow: every rank" not in waiting.text
    assert "waiting" not in [usage.name for usage in bottlenecks(SIMULATIONS["DDP"]).usages]


def test_a_step_that_does_not_fit_says_so():
    memory = bottlenecks(SIMULATIONS["large"])["memory"]
    assert memory.is_bottleneck
    assert memory.value > 1
    assert "does not fit" in memory.text
    assert memory.contributors[0].name == "activation"
