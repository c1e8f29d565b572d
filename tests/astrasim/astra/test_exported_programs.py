"""Predictions written as traces and replayed: no rank waits for ever, and about the predicted time passes."""

import pytest

from forerun.answers.analysis.predict import simulate
from forerun.astrasim.astra.replay import Machine, replay
from forerun.astrasim.astra.streams import replay_streams
from forerun.astrasim.astra.system import system_from
from forerun.astrasim.chakra.export import to_traces
from forerun.core.network.network_file import network_from
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan

PLANS = {
    "fsdp": {"dp_shard": 8},
    "pipeline": {"pp": 2, "dp_shard": 2, "tp": 2, "n_microbatches": 8},
    "V pipeline": {"pp": 4, "dp_shard": 2, "n_microbatches": 8, "pp_schedule": "ZBV", "virtual_stages": 2},
    "ring attention": {"cp": 4, "tp": 2},
}
SYSTEM = {
    "local-mem-bw": 3350,
    "peak-perf": 989,
    **{f"{name}-implementation": ["ring"] for name in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")},
}
NETWORK = {"topology": ["Switch"], "npus_count": [8], "bandwidth": [450], "latency": [500]}


@pytest.mark.parametrize("fields", PLANS.values(), ids=PLANS)
def test_both_semantics_take_about_as_long_as_predicted(fields):
    plan = Plan(seq_len=2048, **fields)
    predicted = simulate(load_model("qwen3-0.6b"), plan, load_cluster("h100-sxm"))
    traces, groups = to_traces(predicted.program, predicted.costs.duration_ps)
    machine = Machine(system_from(SYSTEM, "system"), network_from(NETWORK, "network"))
    step_ns = predicted.prediction.step_time_s * 1e9
    slots = replay(traces, groups, machine).wall_ns
    streams = max(rank.wall_time for rank in replay_streams(traces, groups, machine))
    # The host's time to launch kernels and what collectives and kernels take from each other are not in a trace.
    assert 0.8 * step_ns < streams < 1.05 * step_ns
    assert streams == pytest.approx(slots, rel=0.1)
