"""Plans run in windows as they do whole, and the windows stay small."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from forerun.answers.analysis.setup import RankKind, Setup
from forerun.answers.analysis.simulate_setup import simulate_setup
from forerun.core.engine.windows import Finished, simulate_in_windows
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan

MODEL = dataclasses.replace(load_model("llama-3.1-8b"), n_layers=8)
CLUSTER = load_cluster("h100-sxm")
WINDOW = 200
PLANS = {
    "FSDP": Plan(dp_shard=8, n_microbatches=4, zero_stage=3, seq_len=4096),
    "ZeRO-1, GPUs of two kinds": Plan(tp=2, dp_shard=4, zero_stage=1, n_microbatches=4, seq_len=4096),
    "1F1B": Plan(pp=4, tp=2, n_microbatches=8, zero_stage=1, seq_len=4096),
    "ZBV": Plan(pp=4, virtual_stages=2, n_microbatches=8, pp_schedule="ZBV", zero_stage=0, seq_len=4096),
    "launch-bound": Plan(pp=2, n_microbatches=4, zero_stage=0, seq_len=128),
}


@pytest.mark.parametrize("name", PLANS)
def test_windows_give_the_times_of_the_whole_run(name: str) -> None:
    kinds = (RankKind("slow", 2, slowdown=1.1),) if "kinds" in name else ()
    whole = simulate_setup(Setup(MODEL, PLANS[name], CLUSTER, kinds=kinds))
    flat, costs = whole.flat, whole.costs
    end = np.full(len(flat), -1)

    def keep(part: Finished) -> None:
        first = flat.class_ptr[part.rank_class] + part.first
        end[first : first + len(part)] = part.end_ps

    columns = (costs.duration_ps, costs.issue_ps, costs.slow_compute, costs.slow_network, costs.network_op)
    run = simulate_in_windows(whole.program, *columns, finished=keep, window_nodes=WINDOW, demand=costs.demand)
    np.testing.assert_array_equal(end, whole.timeline.end_ps)
    assert run.end_of_step_ps == whole.timeline.end_of_step_ps
    assert run.n_nodes == len(flat)
    assert run.most_nodes <= 3 * WINDOW < len(flat) / 2
