"""The parts of collectives add up to the time of the timeline, and mean what they say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from forerun.answers.analysis.communication import CollectiveTime, collective_times
from forerun.answers.analysis.reading import Simulation
from forerun.answers.analysis.setup import Setup
from forerun.answers.analysis.simulate_setup import simulate_setup
from forerun.core.program.types import Collective
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.cluster.types import Cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan

H100 = load_cluster("h100-sxm")
PLANS = {
    "sharded": Plan(1024, dp_shard=16, n_microbatches=2),
    "replicated": Plan(1024, dp_replicate=16, zero_stage=0, n_microbatches=2),
    "tensor parallel": Plan(1024, dp_shard=4, tp=4, n_microbatches=2),
    "pipeline": Plan(1024, dp_shard=4, tp=2, pp=2, n_microbatches=4),
}


def simulated(plan: Plan, cluster: Cluster = H100) -> tuple[Simulation, tuple[CollectiveTime, ...]]:
    done = simulate_setup(Setup(load_model("gpt2-small"), plan, cluster))
    return done, collective_times(done, cluster)


@pytest.mark.parametrize("name", PLANS)
def test_the_parts_add_up_to_the_time_of_the_collectives(name: str) -> None:
    done, found = simulated(PLANS[name])
    flat, ops = done.flat, done.program.ops
    mine = np.arange(int(flat.class_ptr[done.slowest]), int(flat.class_ptr[done.slowest + 1]))
    kinds = ops.collective[flat.op[mine]]
    sizes = np.array([group.size for group in done.program.groups])[ops.group[flat.op[mine]]]
    mine = mine[(kinds != Collective.NONE) & (kinds != Collective.SEND_RECV) & (sizes > 1)]
    busy_s = float((done.timeline.end_ps[mine] - done.timeline.start_ps[mine]).sum()) / 1e12
    assert sum(each.total_s - each.waiting_s for each in found) == pytest.approx(busy_s)
    assert sum(each.count for each in found) == len(mine)
    for each in found:
        parts = (each.waiting_s, each.wire_s, each.latency_s, each.protocol_s)
        assert all(part >= 0 for part in parts)
        assert each.sharing_s >= -1e-9


def test_the_longest_comes_first_and_says_what_it_is() -> None:
    _, found = simulated(PLANS["sharded"])
    assert [each.total_s for each in found] == sorted((each.total_s for each in found), reverse=True)
    assert any("gather" in each.name for each in found)
    assert all("(2 nodes x 8)" in each.name for each in found)


def test_a_wire_of_half_the_rate_takes_twice_the_time_and_leaves_the_latency() -> None:
    inner, outer = H100.links
    slow = replace(H100, links=(inner, replace(outer, bytes_per_s=outer.bytes_per_s / 2)))
    (name, usual), (_, halved) = (
        max(((each.name, each) for each in simulated(PLANS["replicated"], one)[1]), key=lambda pair: pair[1].wire_s)
        for one in (H100, slow)
    )
    assert name.startswith("all-reduce")
    assert halved.wire_s == pytest.approx(2 * usual.wire_s, rel=0.35), "the tree or the ring limits the wire"
    assert halved.wire_s > 1.3 * usual.wire_s


def test_a_group_of_one_rank_takes_nothing() -> None:
    assert simulated(Plan(1024))[1] == ()
