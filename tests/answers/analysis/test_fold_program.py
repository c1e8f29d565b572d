"""The folded run is the unfolded one."""

from __future__ import annotations

import dataclasses

import pytest

from forerun.answers.analysis.predict import simulate
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
