"""A timeline for people has few slices, and all of the time."""

from __future__ import annotations

from itertools import pairwise

import pytest

from forerun.answers.analysis.predict import simulate
from forerun.answers.analysis.reading import Simulation
from forerun.answers.analysis.tables import stream_times
from forerun.answers.analysis.timeline_lanes import HOST, lanes
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan


@pytest.fixture(scope="module")
def done() -> Simulation:
    plan = Plan(1024, pp=2, tp=2, dp_shard=2, n_microbatches=4, activation_checkpointing="full")
    return simulate(load_model("gpt2-small"), plan, load_cluster("h100-sxm"))


@pytest.mark.parametrize("slices", [20, 200, 2000, 10**9])
@pytest.mark.parametrize("rank_class", [0, 1])
def test_slices_are_in_order_and_hold_all_time_and_all_nodes(done: Simulation, slices: int, rank_class: int) -> None:
    shown = lanes(done, rank_class, slices)
    expected = {row.name: row for row in stream_times(done, rank_class)}
    nodes = slice(int(done.flat.class_ptr[rank_class]), int(done.flat.class_ptr[rank_class + 1]))
    longer = done.timeline.end_ps[nodes] > done.timeline.start_ps[nodes]
    assert sum(each.count for lane in shown if lane.name != HOST for each in lane.slices) == int(longer.sum())
    for lane in shown:
        assert all(a.end_ps <= b.start_ps for a, b in pairwise(lane.slices))
        assert sum(each.busy_ps for each in lane.slices) == round(expected[lane.name].busy_s * 1e12)
    assert sum(len(lane.slices) for lane in shown) <= 2 * slices + 2 * len(shown)


def test_a_slice_says_what_runs(done: Simulation) -> None:
    every = {lane.name: lane for lane in lanes(done, 0, 10**9)}
    compute = every["compute"].slices
    assert {each.work for each in compute} >= {"matmul", "attention", "recompute", "optimizer"}
    assert {each.work for each in every["tp"].slices} == {"exposed_tensor_parallel"}
    assert {each.work for each in every[HOST].slices} == {"host"}
    assert any("of layer 3, micro batch 2" in each.text and each.count == 1 for each in compute)


def test_from_far_away_the_passes_of_the_micro_batches_are_seen(done: Simulation) -> None:
    (compute,) = [lane for lane in lanes(done, 0, 300) if lane.name == "compute"]
    passes = [each for each in compute.slices if each.work in ("forward", "backward")]
    assert [each.work for each in passes].count("forward") >= 4
    assert len(passes) <= 40
    assert {each.work for each in compute.slices} <= {"forward", "backward", "optimizer", "host"}
    near = {each.work for lane in lanes(done, 0, 6000) for each in lane.slices}
    assert "forward" not in near


def test_what_waits_between_is_not_hidden(done: Simulation) -> None:
    step = done.timeline.end_of_step_ps
    for lane in lanes(done, 0, 60):
        assert all(each.end_ps - each.start_ps - each.busy_ps <= step // 4 for each in lane.slices)
