"""The folded run is the unfolded one."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_programs import N_OPS, program, random_programs

from forerun.answers.analysis.fold_program import fold
from forerun.answers.analysis.predict import simulate
from forerun.core.cost.step_costs import StepCosts
from forerun.core.engine.simulate import simulate as run
from forerun.core.program.builder import BlockBuilder
from forerun.core.program.types import Program, Stream
from forerun.core.program.unfold import unfold
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan

MODEL = dataclasses.replace(load_model("llama-3.1-8b"), n_layers=8)
CLUSTER = load_cluster("h100-sxm")

PLANS = [
    dict(dp_shard=8),
    dict(tp=8),
    dict(tp=2, dp_shard=4, zero_stage=1, n_microbatches=4),
    dict(dp_shard=4, cp=2, activation_checkpointing="full"),
    dict(pp=4, n_microbatches=8, zero_stage=0),
    dict(pp=4, tp=2, n_microbatches=8, zero_stage=1, stack="megatron-core"),
    dict(pp=2, tp=2, dp_shard=2, n_microbatches=4, zero_stage=1, stack="nemo", activation_checkpointing="selective"),
    dict(pp=4, dp_shard=2, n_microbatches=8, zero_stage=3),
    dict(pp=4, virtual_stages=2, n_microbatches=8, pp_schedule="Interleaved1F1B", zero_stage=0),
    dict(pp=4, virtual_stages=2, n_microbatches=8, pp_schedule="ZBV", zero_stage=0),
    dict(pp=4, n_microbatches=8, zero_stage=1, stack="megatron-deepspeed"),
    dict(tp=8, pp=2, dp_shard=2, n_microbatches=4, zero_stage=1),  # transfers and gradients between nodes
    dict(cp=4, dp_shard=4, cp_method="ring"),  # parameters between nodes beside keys in them
    dict(pp=2, n_microbatches=4, zero_stage=0, seq_len=128),  # the host holds the device up
]


@pytest.mark.parametrize("fields", PLANS, ids=str)
def test_a_folded_run_is_the_unfolded_run(fields: dict[str, object]) -> None:
    plan = Plan(**{"seq_len": 4096, **fields})  # type: ignore[arg-type]
    whole, folded = simulate(MODEL, plan, CLUSTER), simulate(MODEL, plan, CLUSTER, folded=True)
    assert folded.timeline.end_of_step_ps == whole.timeline.end_of_step_ps
    a, b = dataclasses.asdict(whole.prediction), dataclasses.asdict(folded.prediction)
    for name in ("hfu", "coverage", "exposed_comm_s", "bubble_s", "shared_links_s"):
        assert b[name] == pytest.approx(a[name], rel=1e-9), name
    assert b["breakdown"] == pytest.approx(a["breakdown"], rel=1e-9)
    assert b["memory_by_category_gib"] == a["memory_by_category_gib"]


def test_folding_shrinks_a_pipeline() -> None:
    plan = Plan(seq_len=4096, pp=2, n_microbatches=32, zero_stage=0)
    assert len(simulate(MODEL, plan, CLUSTER, folded=True).flat) * 4 < len(simulate(MODEL, plan, CLUSTER).flat)


TIMES = st.lists(st.integers(1, 50), min_size=N_OPS, max_size=N_OPS)


def ends(program: Program, durations: list[int], issues: list[int]) -> tuple[list[int], list[int]]:
    """When each class is done, in ps: of the whole run and of the folded one."""
    none = np.zeros(N_OPS)
    costs = StepCosts(np.array(durations, np.int64), np.array(issues, np.int64), none, none, none > 0, none)
    folded = fold(program, costs)
    found = []
    for each, of in ((program, costs), (folded.program, folded.costs)):
        columns = (of.duration_ps, of.issue_ps, of.slow_compute, of.slow_network, of.network_op)
        found.append(run(unfold(each), *columns).class_end_ps.tolist())
    return found[0], found[1]


@given(random_programs(), TIMES, st.lists(st.integers(0, 5), min_size=N_OPS, max_size=N_OPS))
def test_any_program_folds_to_the_same_ends(program: Program, durations: list[int], issues: list[int]) -> None:
    whole, folded = ends(program, durations, issues)
    assert folded == whole


@pytest.mark.parametrize("slot", [0, 1])
def test_a_block_that_others_wait_for_is_not_folded(slot: int) -> None:
    """The gather of the last block starts when the first kernel ends, not with the third."""
    first, last = BlockBuilder(), BlockBuilder()
    first.node(0, record=slot)
    first.node(1)
    gathered = last.node(2, Stream.GATHER, wait=[slot])
    last.node(3, after=[gathered])
    what = program([first.build("first"), last.build("last")], [[0, 1]])
    assert ends(what, [10, 100, 105, 1, 1, 1], [0] * N_OPS) == ([116], [116])
