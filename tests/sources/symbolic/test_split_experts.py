"""Experts that ranks split among them, shared experts beside the exchange, and unequal loads, counted by hand."""

from dataclasses import replace

import numpy as np
import pytest

from forerun.answers.analysis.setup import Setup
from forerun.answers.analysis.simulate_setup import simulate_setup
from forerun.common.errors import ImpossiblePlan
from forerun.core.program.counts import op_counts
from forerun.core.program.types import Collective, OpKind, Stream
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.constraints import check_plan
from forerun.describe.plan.plan import Plan
from forerun.describe.plan.routing import spread
from forerun.sources.symbolic.build import build

CLUSTER, TOKENS = load_cluster("h100-sxm"), 2048
MODEL = replace(load_model("qwen3-30b-a3b"), n_layers=2)
SHARED = replace(load_model("deepseek-v3"), n_layers=4)
ROW = 2 * MODEL.hidden
WHOLE = Plan(
    seq_len=TOKENS,
    dp_shard=4,
    tp=2,
    ep=4,
    zero_stage=1,
    sequence_parallel=True,
    stack="megatron-core",
    dispatcher="alltoall",
)
SPLIT = replace(WHOLE, ep=2, etp=2)
BESIDE = replace(WHOLE, shared_expert_overlap=True)


def made(plan: Plan, model=MODEL):
    return build(model, plan, CLUSTER)


def flops(program) -> float:
    ops = program.ops
    return float(op_counts(program)[0] @ np.where(ops.kind == OpKind.GEMM, ops.flops, 0.0))


@pytest.mark.parametrize("way", ["alltoall", "allgather", "deepep"])
def test_ranks_that_split_experts_hold_and_compute_what_whole_experts_would(way):
    whole, split = (made(replace(plan, dispatcher=way)) for plan in (WHOLE, SPLIT))
    assert flops(split) == flops(whole)
    np.testing.assert_array_equal(split.rank_classes[0].resident_bytes, whole.rank_classes[0].resident_bytes)


def test_they_gather_the_tokens_that_arrived_and_reduce_what_comes_of_them():
    program = made(SPLIT)
    ops, counts = program.ops, op_counts(program)[0]
    etp = next(number for number, group in enumerate(program.groups) if group.axis == "etp")
    rows = np.flatnonzero(ops.is_collective & (ops.group == etp))
    size = TOKENS // 2 * MODEL.moe.top_k * ROW * 2  # a rank's own tokens under tp, of two ranks
    assert {float(ops.bytes_comm[row]) for row in rows} == {size}
    times = {kind: sum(int(counts[row]) for row in rows if ops.collective[row] == kind) for kind in Collective}
    assert (times[Collective.ALL_GATHER], times[Collective.REDUCE_SCATTER]) == (2 * MODEL.n_layers, 2 * MODEL.n_layers)


def test_widths_that_do_not_split_are_refused():
    with pytest.raises(ImpossiblePlan, match="width 768 is not divisible by etp 5"):
        check_plan(MODEL, replace(WHOLE, dp_shard=10, ep=1, etp=5), CLUSTER)


def simulated(plan: Plan, model=SHARED):
    return simulate_setup(Setup(model, plan, CLUSTER))


def test_shared_experts_beside_the_exchange_do_the_same_work_in_less_time():
    serial, beside = simulated(WHOLE), simulated(BESIDE)
    assert flops(beside.program) == flops(serial.program)
    assert beside.prediction.step_time_s < serial.prediction.step_time_s
    flat, timeline = beside.flat, beside.timeline
    names = [beside.program.ops.name[op] for op in flat.op]
    exchanges = [i for i, name in enumerate(names) if flat.stream[i] == Stream.EP and name.startswith("ffn.dispatch")]
    shared = [i for i, name in enumerate(names) if name.startswith("shared.") and flat.stream[i] == Stream.COMPUTE]
    start, end = timeline.start_ps, timeline.end_ps
    for i in exchanges:
        assert any(start[j] < end[i] and end[j] > start[i] for j in shared)


def test_routed_experts_wait_for_the_exchange_all_the_same():
    run = simulated(BESIDE)
    names = [run.program.ops.name[op] for op in run.flat.op]
    ends = [run.timeline.end_ps[i] for i, name in enumerate(names) if name == "ffn.dispatch"]
    starts = [run.timeline.start_ps[i] for i, name in enumerate(names) if name == "ffn.expert_up"]
    assert len(starts) == len(ends) > 0
    assert all(start >= end for start, end in zip(starts, ends, strict=True))


@pytest.mark.parametrize(
    ("model", "changes", "why"),
    [
        (MODEL, {}, "needs shared experts, which qwen3-30b-a3b does not have"),
        (SHARED, {"ep": 1}, "needs ep above 1"),
        (SHARED, {"expert_overlap": True, "n_microbatches": 2}, "leave one of them out"),
    ],
)
def test_shared_experts_need_an_exchange_beside_them(model, changes, why):
    with pytest.raises(ImpossiblePlan, match=why):
        check_plan(model, replace(BESIDE, **changes), CLUSTER)


def test_the_busiest_rank_sets_the_pace_and_the_fullest_one_the_memory():
    even, skewed = (simulated(replace(WHOLE, expert_routing=text), MODEL) for text in ("balanced", "zipf:1"))
    found = spread("zipf:1", 128, 8, 4, TOKENS // 2 * 4, MODEL.n_layers)
    same_pace = simulated(replace(WHOLE, expert_imbalance=found.busiest), MODEL)
    assert skewed.prediction.step_time_s == pytest.approx(same_pace.prediction.step_time_s, rel=0.01)
    peaks = [run.prediction.peak_allocated_gib for run in (even, skewed, same_pace)]
    assert peaks[0] < peaks[1] < peaks[2]


def test_loads_are_those_of_the_models_experts():
    with pytest.raises(ImpossiblePlan, match="expert_routing has 3 loads, but qwen3-30b-a3b has 128 experts"):
        check_plan(MODEL, replace(WHOLE, expert_routing="loads:1:2:3"), CLUSTER)
