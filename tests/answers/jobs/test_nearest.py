"""Placers that know the topology: units of the smallest size, rails, and what both do to jobs that share links."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.answers.jobs.contention import SharedNetwork
from forerun.answers.jobs.description import cluster_of
from forerun.answers.jobs.job import Job, Traffic
from forerun.answers.jobs.nearest import Nearest, Rails
from forerun.answers.jobs.placement import Shape
from forerun.answers.jobs.placers import PLACERS, placer
from forerun.answers.jobs.policies import POLICIES
from forerun.answers.jobs.schedule import schedule
from forerun.answers.jobs.simulation import Terms
from forerun.common.errors import ForerunError

SHAPE = Shape(switches=2, nodes=4, gpus=4, domain=2)


def unit(place, size):
    return {node // size for node, _ in place}


def test_a_job_lies_in_the_smallest_unit_that_has_room():
    near = Nearest(SHAPE)
    assert near.place(3) == ((0, 3),)
    assert near.place(1) == ((0, 1),), "the fullest node that has room"
    pair = near.place(6)
    assert len(unit(pair, 2)) == 1
    assert sorted(taken for _, taken in pair) == [2, 4]
    assert len(unit(near.place(10), 4)) == 1, "no domain has room, a switch has"
    assert len(unit(near.place(12), 4)) == 2, "only the cluster has room"
    assert near.free == 0
    assert near.place(1) is None


def test_large_units_stay_free_for_large_jobs():
    near = Nearest(SHAPE)
    near.place(2)
    assert near.place(2) == ((0, 2),)
    near.place(3)
    assert len(unit(near.place(8), 2)) == 1


def test_a_job_on_rails_has_the_same_gpus_of_its_nodes():
    rails = Rails(SHAPE)
    halves = [rails.place(2) for _ in range(4)]
    assert halves == [((0, 2),), ((0, 2),), ((1, 2),), ((1, 2),)]
    rails.release(halves[0], 2)
    rails.release(halves[2], 2)
    assert rails.place(12) == ((4, 4), (5, 4), (6, 4))
    assert rails.place(6) == ((2, 3), (3, 3)), "as many of each node as it can"
    assert rails.place(4) == ((7, 4),)
    rest = rails.place(6)
    assert rest == ((0, 2), (1, 2), (2, 1), (3, 1))
    assert not rails.on_rails(rest)


def test_without_free_rails_a_job_lies_as_near_as_it_can():
    rails = Rails(Shape(1, 2, 4))
    first, second = rails.place(3), rails.place(1)
    rails.release(first, 3)
    other = rails.place(3)
    assert rails.place(4) is not None
    rails.release(other, 3)
    assert (first, second) == (((0, 3),), ((0, 1),))
    apart = Rails(Shape(1, 2, 2))
    assert apart.place(1) == ((0, 1),)
    spare = apart.place(1)
    assert apart.place(1) == ((1, 1),)
    apart.release(spare, 1)
    apart.rails[0] = 0b01
    crossed = apart.place(2)
    assert (crossed, apart.on_rails(crossed)) == (((0, 1), (1, 1)), False)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(PLACERS)), st.lists(st.tuples(st.booleans(), st.integers(1, 20)), max_size=40))
def test_no_placer_gives_a_gpu_twice_or_loses_one(name, wishes):
    place, held = placer(name, SHAPE), []
    for gives_back, gpus in wishes:
        if gives_back and held:
            place.release(*held.pop(gpus % len(held)))
        elif (found := place.place(gpus)) is not None:
            assert not found or sum(taken for _, taken in found) == gpus
            held.append((found, gpus))
        of_node = [0] * (SHAPE.switches * SHAPE.nodes)
        for found, _ in held:
            for node, taken in found:
                of_node[node] += taken
        assert max(of_node) <= SHAPE.gpus
        assert place.free == SHAPE.total - sum(gpus for _, gpus in held)
        if isinstance(place, Nearest):
            assert (place.of_node == [SHAPE.gpus - taken for taken in of_node]).all()
            assert place.place(place.free + 1) is None
        if isinstance(place, Rails):
            assert [mask.bit_count() for mask in place.rails] == place.of_node.tolist()


@pytest.mark.parametrize("name", ["nearest", "rails"])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_ends_every_job(name, policy):
    jobs = [Job(f"{i}", 1 + i * 7 % 20, 10.0 * i, 50.0 + i, priority=i % 3) for i in range(30)]
    done = schedule(jobs, SHAPE, policy, name)
    assert {one.job.name for one in done} == {job.name for job in jobs}
    assert all(one.ran_s == pytest.approx(one.job.duration_s) for one in done)


HALF = Traffic(1.0, 1.0)


def ends_of(placement, network, shape, sizes):
    jobs = [Job(f"{i}", gpus, 0.0, 20.0, traffic=HALF) for i, gpus in enumerate(sizes)]
    return [
        one.end_s
        for one in sorted(
            schedule(jobs, shape, "fifo", placement, Terms(network=network)), key=lambda one: one.job.name
        )
    ]


def test_jobs_inside_nvlink_domains_share_no_link():
    """Two jobs of 6 GPUs and one of 4 share the middle node's NIC under a placer that does not know domains."""
    network = SharedNetwork(1.0, shared_nics=True, shifts=False, nvlink_domains=True)
    assert ends_of("nearest", network, SHAPE, [6, 6, 4]) == [20.0] * 3
    apart = SharedNetwork(1.0, shared_nics=True, shifts=False)
    assert max(ends_of("spread", apart, SHAPE, [6, 6, 4, 16])) > 20.0


def test_jobs_off_their_rails_share_the_links_of_the_switch():
    shape = Shape(1, 4, 4)
    narrow = SharedNetwork(4.0, shared_nics=False, shifts=False, rails=True)
    assert ends_of("rails", narrow, shape, [6, 6]) == [20.0] * 2
    assert ends_of("nearest", narrow, shape, [6, 6]) == pytest.approx([30.0] * 2, rel=1e-6)
    wide = SharedNetwork(1.0, shared_nics=False, shifts=False, rails=True)
    assert ends_of("nearest", wide, shape, [6, 6]) == [20.0] * 2


def test_a_file_says_domains_and_rails():
    data = {
        "nodes": 4,
        "switches": 2,
        "gpus_per_node": 4,
        "nodes_per_domain": 2,
        "placement": "nearest",
        "network": {"rails": True, "nvlink_domains": True},
        "jobs": [{"name": "a", "gpus": 8, "duration_s": 10}],
    }
    request = cluster_of(data, "x")
    assert request.shape == SHAPE
    assert (request.terms.network.rails, request.terms.network.nvlink_domains) == (True, True)
    with pytest.raises(ForerunError, match="x: 4 nodes under a switch are not a whole number of domains of 3"):
        cluster_of({**data, "nodes_per_domain": 3}, "x")
