"""Predictions and searches on a network: as on the cluster's own links where they are alike, named in the result."""

import json
from dataclasses import replace

import pytest

import forerun
from forerun.answers.analysis.predict import predict, simulate
from forerun.answers.search.search import search
from forerun.common.errors import ForerunError
from forerun.core.network.on_topology import load_network
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan
from forerun.interfaces.report.records import prediction_record

LLAMA = replace(load_model("llama-3.1-8b"), n_layers=4)
MIXTRAL = replace(load_model("mixtral-8x7b"), n_layers=4)
H100 = load_cluster("h100-sxm")
TWO_LEVELS = load_network("switch:8@450/300,switch:8@50/1350")
PLANS = {
    "tensor parallel": Plan(seq_len=4096, tp=8, dp_shard=8),
    "sharded": Plan(seq_len=4096, dp_shard=64),
    "replicated": Plan(seq_len=4096, dp_replicate=64, zero_stage=0),
    "hybrid": Plan(seq_len=4096, dp_replicate=8, dp_shard=8),
    "context parallel": Plan(seq_len=8192, cp=4, tp=2, dp_shard=8),
    "pipeline": Plan(seq_len=4096, tp=4, pp=4, dp_shard=4, zero_stage=1, n_microbatches=8),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_network_like_the_links_of_the_cluster_changes_nothing_but_the_name(plan):
    """Within 1 %: transfers from one place in a node to another of the next node first cross their own."""
    own, placed = predict(LLAMA, plan, H100), predict(LLAMA, plan, H100, TWO_LEVELS)
    assert placed.step_time_s == pytest.approx(own.step_time_s, rel=0.01)
    assert own.network is None
    assert placed.network is not None
    assert placed.network.topology == "Switch 8 at 450 GB/s, Switch 8 at 50 GB/s"
    assert all(0 <= axis.utilisation <= 1 for axis in placed.network.axes)


def test_experts_on_a_network_like_the_links_of_the_cluster():
    plan = Plan(seq_len=4096, dp_shard=64, ep=8)
    own, placed = (predict(MIXTRAL, plan, H100, network).step_time_s for network in (None, TWO_LEVELS))
    assert placed == pytest.approx(own, rel=0.01)


def test_an_oversubscribed_core_slows_the_axis_across_it_alone():
    """Pods of 16 in a fat tree: tensor parallelism and shards stay in a pod, replicas are 16 ranks apart."""
    plan = Plan(seq_len=4096, tp=4, dp_shard=4, dp_replicate=8)
    rates = ("fat-tree:128:radix=8@50/500", "fat-tree:128:radix=8:oversubscription=4@50/500")
    full, thin = (predict(LLAMA, plan, H100, load_network(network)) for network in rates)
    assert thin.step_time_s > full.step_time_s
    assert thin.breakdown["exposed_tensor_parallel"] == pytest.approx(
        full.breakdown["exposed_tensor_parallel"], rel=0.1
    )
    before, after = ({axis.axis: axis for axis in each.network.axes} for each in (full, thin))
    assert (after["tp"].busy_s, after["dp_shard"].busy_s) == (before["tp"].busy_s, before["dp_shard"].busy_s)
    assert after["dp_replicate"].busy_s > 2 * before["dp_replicate"].busy_s
    assert after["dp_replicate"].busiest_link.startswith("switch")


def test_a_torus_favours_axes_along_its_dimensions():
    """Eight by eight: tp 8 is a row; of 4 x 16 the ring of 16 shares its links with others."""
    torus = load_network("torus2d:8x8@50/500")
    groups = {plan.tp: simulate(LLAMA, plan, H100, network=torus) for plan in
              (Plan(seq_len=4096, tp=8, dp_shard=8), Plan(seq_len=4096, tp=4, dp_shard=16))}  # fmt: skip
    use = {tp: {axis.axis: axis for axis in each.prediction.network.axes} for tp, each in groups.items()}
    per_shard = {tp: use[tp]["dp_shard"].busy_s * tp for tp in use}
    assert per_shard[4] > 1.3 * per_shard[8]


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_bandwidth_never_hurts_and_answers_repeat(plan):
    times = [
        predict(LLAMA, plan, H100, load_network(f"torus3d:4x4x4@{gb_s}/500")).step_time_s for gb_s in (10, 40, 160)
    ]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]
    again = predict(LLAMA, plan, H100, load_network("torus3d:4x4x4@10/500"))
    assert again.step_time_s == times[0]
    assert again == predict(LLAMA, plan, H100, load_network("torus3d:4x4x4@10/500"))


def test_folding_does_not_change_a_step_on_a_network():
    plan, network = PLANS["pipeline"], load_network("fat-tree:64@50/500")
    folded, plain = (simulate(LLAMA, plan, H100, folded=f, network=network).prediction for f in (True, False))
    assert folded.step_time_s == plain.step_time_s
    assert folded.network == plain.network


def test_records_name_the_network_only_where_there_is_one():
    plan = PLANS["tensor parallel"]
    assert "network" not in prediction_record(predict(LLAMA, plan, H100))
    prediction = predict(LLAMA, plan, H100, TWO_LEVELS)
    record = json.loads(json.dumps(prediction_record(prediction)))["network"]
    assert record["npus"] == 64
    assert {axis["axis"] for axis in record["axes"]} == {"tp", "dp_shard"}
    shard = next(axis for axis in record["axes"] if axis["axis"] == "dp_shard")
    assert (shard["ranks"], shard["apart"], shard["busiest_link"]) == (8, 8, "NPU 0 -> switch 72")
    assert shard["utilisation"] == pytest.approx(shard["busy_s"] / prediction.step_time_s)
    assert any(
        "dp_shard (8 ranks, 8 apart) is limited by link NPU 0 -> switch 72" in line for line in prediction.explain
    )


def test_the_busiest_link_carries_what_the_collectives_send():
    """Sharding over 8 ranks: bf16 parameters are gathered twice, fp32 gradients scattered once, 7/8 of them a time."""
    plan = Plan(seq_len=4096, dp_shard=8)
    prediction = predict(LLAMA, plan, H100, load_network("switch:8@50/500"))
    simulation = simulate(LLAMA, plan, H100, network=load_network("switch:8@50/500"))
    sizes = simulation.program.ops.bytes_comm[simulation.program.ops.group >= 0]
    assert sizes.max() > 0
    axis = prediction.network.axes[0]
    n_parameters = 4 * 218e6 + 2 * 128256 * 4096
    sent = axis.busy_s * 50e9
    assert sent == pytest.approx(7 / 8 * n_parameters * (2 + 2 + 4), rel=0.2)


def test_a_network_that_is_too_small_is_refused():
    small = load_network("switch:8@450/300")
    with pytest.raises(ForerunError, match=r"joins 8 NPUs .* 64 GPUs"):
        predict(LLAMA, PLANS["sharded"], H100, small)
    with pytest.raises(ForerunError, match=r"joins 8 NPUs .* 16 GPUs"):
        search(LLAMA, H100, 16, 4096, 32, network=small, workers=1)


@pytest.mark.parametrize(
    "network",
    [
        "switch:8@450/300,switch:2@5/1350",
        pytest.param("ring:16@20/500", marks=pytest.mark.long),
        pytest.param("torus2d:4x4@20/500", marks=pytest.mark.long),
    ],
)
def test_a_search_finds_what_trying_everything_finds(network):
    tiny = replace(load_model("gpt2-small"), n_layers=4, vocab=1024, name="tiny")
    fixed = {"cp": 1, "activation_checkpointing": ["none", "full"], "tp": [1, 2, 4, 8, 16], "micro_batch": [1, 4]}
    options = {"fixed": fixed, "network": load_network(network), "keep": 3}
    every = search(tiny, H100, 16, 512, 64, exhaustive=True, workers=1, **options)
    for workers in (1, 2):
        some = search(tiny, H100, 16, 512, 64, workers=workers, **options)
        found = [[(each.step_time_s, each.plan) for each in result.top(3)] for result in (some, every)]
        assert found[0] == found[1]
        assert some.best.network is not None


def test_the_python_interface_takes_files_text_and_networks(tmp_path):
    (tmp_path / "ring.yml").write_text("topology: Ring\nnpus_count: [8]\nbandwidth: 50\nlatency: 500\n")
    (tmp_path / "cluster.yaml").write_text("device: h100-sxm\nnetwork: ring.yml\n")
    plan = Plan(seq_len=2048, dp_shard=8)
    text = "ring:8@50/500"
    times = [
        forerun.predict(LLAMA, plan, "h100-sxm", network).step_time_s
        for network in (text, load_network(text), tmp_path / "ring.yml", str(tmp_path / "ring.yml"))
    ]
    times.append(forerun.predict(LLAMA, plan, tmp_path / "cluster.yaml").step_time_s)
    times.append(forerun.simulate(LLAMA, plan, "h100-sxm", text).prediction.step_time_s)
    assert len(set(times)) == 1
    assert times[0] > forerun.predict(LLAMA, plan, "h100-sxm").step_time_s
    found = forerun.search(LLAMA, "h100-sxm", 8, 2048, 8, network=text, fixed={"pp": 1, "tp": 1}, workers=1)
    assert found.best.network.topology == "Ring 8 at 50 GB/s"
