"""Jobs that share links: max-min fair rates, the phases of steps, and what both do to a schedule."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.answers.jobs.contention import SharedNetwork
from forerun.answers.jobs.description import cluster_of
from forerun.answers.jobs.job import Job, Progress, Traffic
from forerun.answers.jobs.long_run import paces_together
from forerun.answers.jobs.placement import Shape
from forerun.answers.jobs.policies import POLICIES
from forerun.answers.jobs.schedule import schedule
from forerun.answers.jobs.simulation import Terms
from forerun.common.errors import ForerunError

HALF = Traffic(1.0, 1.0)
"""a step that communicates for half of its time"""
HALVES = (((1.0, ()), (1.0, ((0, 1.0),))),) * 2
"""two such jobs on one link"""


def rates_of(routes, capacities):
    """The rates of jobs that do nothing but communicate, each over all links of a route."""
    steps = tuple(((1.0, tuple((link, 1.0) for link in route)),) for route in routes)
    return paces_together(steps, tuple(capacities), shifts=False)


@pytest.mark.parametrize(
    ("routes", "capacities", "expected"),
    [
        ([[0]] * 4, [1.0], [0.25] * 4),
        ([[0]] * 2, [3.0], [1.0, 1.0]),
        ([[0, 1], [0], [1]], [0.5, 0.6], [0.25, 0.25, 0.35]),
        ([[0], [0], [1]], [1.0, 2.0], [0.5, 0.5, 1.0]),
    ],
)
def test_rates_are_max_min_fair(routes, capacities, expected):
    assert rates_of(routes, capacities) == pytest.approx(expected)


routes = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True), min_size=1, max_size=6)


@settings(max_examples=80, deadline=None)
@given(routes, st.lists(st.floats(0.2, 3.0), min_size=4, max_size=4))
def test_no_rate_can_grow_without_one_that_is_no_larger(flows, capacities):
    rates = rates_of(flows, capacities)
    loads = [sum(rate for rate, flow in zip(rates, flows, strict=True) if link in flow) for link in range(4)]
    assert all(load <= room + 1e-9 for load, room in zip(loads, capacities, strict=True))
    for rate, flow in zip(rates, flows, strict=True):
        full = [link for link in flow if loads[link] >= capacities[link] - 1e-9]
        others = [
            max(each for each, other in zip(rates, flows, strict=True) if link in other) <= rate + 1e-9 for link in full
        ]
        assert rate >= 1.0 - 1e-9 or any(others)


def test_two_jobs_in_phase_take_twice_as_long_to_communicate():
    """Alone T + B = 2 s, in phase T + 2 B = 3 s each."""
    assert paces_together(HALVES, (1.0,), shifts=False) == pytest.approx((2 / 3, 2 / 3), rel=1e-6)


def test_shifted_phases_take_as_long_as_alone_where_they_fit():
    """The gain of CASSINI is the quotient: 1.5 here. Jobs that communicate for 60 % of their steps can't be apart."""
    assert paces_together(HALVES, (1.0,), shifts=True) == pytest.approx((1.0, 1.0), rel=1e-3)
    often = ((0.4, ()), (0.6, ((0, 1.0),)))
    paces = paces_together((often, often), (1.0,), shifts=True)
    assert 0.8 < sum(paces) / 2 <= 1 / 1.2 + 0.02


def test_five_jobs_fit_one_behind_the_other():
    """Each communicates for a fifth of its step, which is no whole number of the places that shifts try."""
    seldom = ((4.0, ()), (1.0, ((0, 1.0),)))
    assert paces_together((seldom,) * 5, (1.0,), shifts=True) == pytest.approx((1.0,) * 5, rel=1e-6)


def test_unlike_jobs_go_at_the_pace_of_the_cycle_that_they_fall_into():
    """Steps of 3 and 2 s, 1 s of each on the link: both communicate from 5 to 7 s, and begin a step at 7 s again."""
    unlike = (((2.0, ()), (1.0, ((0, 1.0),))), HALVES[0])
    assert paces_together(unlike, (1.0,), shifts=False) == pytest.approx((6 / 7, 6 / 7), rel=1e-9)


def test_two_flows_of_unlike_size_share_a_link_by_the_gpus_that_send():
    """One job sends from four GPUs of a node and the other from two: each of the six has a sixth of the link."""
    steps = (((1.0, ((0, 1.0),)),), ((1.0, ((0, 0.5),)),))
    assert paces_together(steps, (1.0,), shifts=False) == pytest.approx((2 / 3, 2 / 3))


computing = st.integers(1, 12)
communicating = st.integers(1, 12)


def walked(drawn, steps=1000):
    """What jobs on one link do of their steps, second by second of those that change nothing."""
    left = [float(compute) for compute, _ in drawn]
    sends = [False] * len(drawn)
    done, now = [0] * len(drawn), 0.0
    while now < steps * max(sum(each) for each in drawn):
        share = 1.0 / max(1, sum(sends))
        took = min(each / (share if sending else 1.0) for each, sending in zip(left, sends, strict=True))
        now += took
        for i, each in enumerate(drawn):
            left[i] -= took * (share if sends[i] else 1.0)
            if left[i] < 1e-9:
                done[i] += each[sends[i]]
                sends[i] = not sends[i]
                left[i] += each[sends[i]]
    return [each / now for each in done]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(computing, communicating), min_size=2, max_size=4))
def test_paces_are_those_of_a_thousand_steps(drawn):
    steps = tuple(((float(compute), ()), (float(network), ((0, 1.0),))) for compute, network in drawn)
    paces = paces_together(steps, (1.0,), shifts=False)
    assert paces == pytest.approx(walked(drawn), rel=0.01)
    used = sum(pace * network / (compute + network) for pace, (compute, network) in zip(paces, drawn, strict=True))
    assert used <= 1.0 + 1e-6


def ends_of(name: str, network: SharedNetwork) -> tuple[float, float]:
    """Three nodes of four GPUs, packed: each of two jobs has a node, and both share the third."""
    jobs = [Job("a", 6, 0, 20, traffic=HALF), Job("b", 6, 0, 40, traffic=HALF)]
    done = {one.job.name: one.end_s for one in schedule(jobs, Shape(1, 3, 4), name, "packed", Terms(network=network))}
    return done["a"], done["b"]


@pytest.mark.parametrize("name", ["fifo", "srtf", "las", "easy"])
def test_the_other_job_goes_on_at_full_pace_when_one_has_ended(name):
    """Both do 2 s of work in 3 s until the first has done its 20 s; the other then has 20 s left."""
    assert ends_of(name, SharedNetwork(1.0, shared_nics=True, shifts=False)) == pytest.approx((30, 50), rel=1e-6)
    assert ends_of(name, SharedNetwork(1.0, shared_nics=True, shifts=True)) == pytest.approx((20, 40), rel=1e-3)
    assert ends_of(name, SharedNetwork(1.0, shared_nics=False, shifts=False)) == (20, 40)


def placed(number: int, *nodes: int) -> Progress:
    """A job with two GPUs on each of some nodes."""
    job = Progress(Job(str(number), 2 * len(nodes), 0, 10, traffic=HALF), number)
    job.place = tuple((node, 2) for node in nodes)
    return job


def test_jobs_across_switches_share_the_links_above_them():
    """Two switches of two nodes: their links up carry two nodes, and half of one where they are oversubscribed four
    times. Each job sends over two of four NICs of a node."""
    shape, jobs = Shape(2, 2, 4), [placed(0, 0, 2), placed(1, 1, 3), placed(2, 0, 1)]
    assert SharedNetwork(1.0, shared_nics=False, shifts=False).paces(jobs, shape) == {}
    assert SharedNetwork(2.0, shared_nics=False, shifts=False).paces(jobs, shape) == {}
    found = SharedNetwork(4.0, shared_nics=False, shifts=False).paces(jobs, shape)
    assert found == {0: pytest.approx(2 / 3), 1: pytest.approx(2 / 3)}
    assert set(SharedNetwork(1.0, shared_nics=True, shifts=False).paces(jobs, shape)) == {0, 1, 2}


@pytest.mark.parametrize("name", list(POLICIES))
def test_contention_only_delays(name):
    shape, network = Shape(2, 2, 4), SharedNetwork(4.0, shared_nics=True, shifts=False)
    jobs = [Job(str(i), 2 + 3 * (i % 4), 3.0 * i, 20.0 + i, traffic=HALF) for i in range(12)]
    done = schedule(jobs, shape, name, "spread", Terms(network=network))
    assert len(done) == len(jobs)
    assert all(one.ran_s >= one.job.duration_s * (1 - 1e-9) for one in done)
    assert any(one.ran_s > 1.05 * one.job.duration_s for one in done)


def test_a_file_says_the_network_and_the_steps():
    data = {
        "nodes": 2,
        "placement": "spread",
        "network": {"oversubscription": 4, "shared_nics": True, "shifts": True},
        "jobs": [{"name": "a", "gpus": 9, "duration_s": 60, "step_s": 2, "network_share": 0.25}],
    }
    request = cluster_of(data, "x")
    assert request.jobs[0].traffic == Traffic(1.5, 0.5)
    assert request.terms.network == SharedNetwork(4, True, True)
    with pytest.raises(ForerunError, match="job a: network_share needs step_s"):
        cluster_of({"nodes": 2, "jobs": [{"name": "a", "gpus": 9, "duration_s": 60, "network_share": 0.25}]}, "x")
    with pytest.raises(ForerunError, match="network: this needs to know the nodes of each job"):
        schedule(request.jobs, request.shape, "fifo", "count", request.terms)


def test_what_is_wrong_in_a_plan_names_the_job():
    plan = {"model": "llama-3.1-8b", "cluster": "h100-sxm", "steps": 5, "fields": {"seq_len": 8, "sequence": 9}}
    with pytest.raises(ForerunError, match=r"^x: job a: unknown plan field 'sequence'"):
        cluster_of({"nodes": 2, "jobs": [{"name": "a", "gpus": 8, "plan": plan}]}, "x")
