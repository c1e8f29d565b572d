"""What the groups of a job's plan send over which links, by hand and as properties."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.answers.jobs.contention import SharedNetwork
from forerun.answers.jobs.description import cluster_of
from forerun.answers.jobs.job import Exchange, Job, Progress, Traffic
from forerun.answers.jobs.job_traffic import loads_of_switches, loads_of_topology, messages, numbered, volumes
from forerun.answers.jobs.placement import Shape
from forerun.answers.jobs.schedule import schedule
from forerun.answers.jobs.simulation import Terms
from forerun.common.errors import ForerunError
from forerun.core.network.network_file import parse_topology

SHAPE = Shape(2, 2, 4)
"""two switches of two nodes of four GPUs"""
WHOLE = ((0, 4), (1, 4), (2, 4), (3, 4))
RING = Exchange(1.0)


def of_switches(exchange, place=WHOLE, shared_nics=False, rails=False, nvlink_domains=False, shape=SHAPE):
    return dict(loads_of_switches(exchange, place, shape, shared_nics, rails, nvlink_domains))


def sent(exchange, *nodes):
    return sorted(zip(*(column.tolist() for column in messages(exchange, np.array(nodes))), strict=True))


def test_rings_have_a_lane_for_each_gpu_of_the_node_with_the_fewest():
    assert sent(RING, 0, 0, 1, 1) == [(0, 2, 1), (1, 3, 1), (2, 0, 1), (3, 1, 1)]
    assert sent(RING, 0, 0, 0, 1) == [(0, 3, 1), (3, 0, 1)]
    assert sent(RING, 5, 5, 5, 5) == []
    assert sent(Exchange(1.0, "ring", 2, 2), 0, 0, 1, 1) == [(0, 2, 1), (1, 3, 1), (2, 0, 1), (3, 1, 1)]
    assert sent(Exchange(1.0, "ring", 2, 1), 0, 0, 1, 1) == []


def test_stages_send_to_their_neighbours_and_experts_to_all_others():
    assert sent(Exchange(1.0, "hops", 3, 1), 0, 1, 2) == [(0, 1, 1), (1, 0, 1), (1, 2, 1), (2, 1, 1)]
    found = sent(Exchange(1.0, "direct", 4, 1), 0, 0, 1, 1)
    assert [pair[:2] for pair in found] == [(0, 2), (0, 3), (1, 2), (1, 3), (2, 0), (2, 1), (3, 0), (3, 1)]
    assert {weight for *_, weight in found} == {1 / 3}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=6),
    st.sampled_from(["ring", "hops", "direct"]),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_no_gpu_sends_more_than_it_can(sizes, pattern, size, inner):
    nodes = np.repeat(np.arange(len(sizes)), sizes)
    src, dst, weight = messages(Exchange(1.0, pattern, size, inner), nodes)
    assert (nodes[src] != nodes[dst]).all()
    out = np.bincount(src, weight, len(nodes))
    assert out.max(initial=0.0) <= (2.0 if pattern == "hops" else 1.0) + 1e-9
    assert np.bincount(dst, weight, len(nodes)) == pytest.approx(out) or pattern == "hops"


def test_links_of_switches_carry_what_groups_send_across():
    """A node has four NICs; loads are in rates of a node."""
    up = {("switch", 0): 1.0, ("switch", 1): 1.0}
    assert of_switches(RING) == up, "each of four rings leaves a switch once"
    assert of_switches(Exchange(1.0, "ring", 4, 1)) == {}, "tensor parallelism stays in nodes"
    assert of_switches(Exchange(1.0, "ring", 2, 4)) == {}, "pairs of nodes stay under their switches"
    assert of_switches(Exchange(1.0, "ring", 2, 8)) == dict.fromkeys(up, 2.0), "two nodes with all their NICs"
    assert of_switches(Exchange(1.0, "hops", 4, 4)) == up, "one border of the pipeline lies between switches"
    direct = of_switches(Exchange(1.0, "direct", 16, 1))
    assert direct == {link: pytest.approx(8 * (8 / 15) / 4) for link in up}, (
        "eight GPUs send to eight of fifteen others"
    )
    assert of_switches(RING, ((0, 4), (1, 4))) == {}
    assert of_switches(RING, ((0, 4), (1, 4)), rails=True) == {("switch", 0): 2.0}, "off its rails all goes above"
    assert of_switches(RING, ((0, 2), (1, 2)), shared_nics=True) == {("node", 0): 1.0, ("node", 1): 1.0}
    together = Shape(2, 2, 4, domain=2)
    assert of_switches(RING, nvlink_domains=True, shape=together) == up
    assert of_switches(RING, ((0, 4), (1, 4)), shared_nics=True, nvlink_domains=True, shape=together) == {}


def test_loads_on_a_topology_are_shares_of_its_links():
    ring = parse_topology("switch:2@100/0ns,ring:4@10/0ns")
    found = loads_of_topology(RING, (0, 1, 4, 5), 2, ring)
    assert found
    assert max(load for _, load in found) == 1.0
    assert {kind for (kind, _), _ in found} == {"link"}
    assert loads_of_topology(RING, (0, 1), 2, ring) == ()


def test_jobs_on_a_node_have_gpus_of_their_own():
    assert numbered([((0, 2), (1, 4)), ((0, 2),), ((2, 1),)], 4) == [(0, 1, 4, 5, 6, 7), (2, 3), (8,)]


def placed(number, *nodes):
    job = Progress(Job(str(number), 4 * len(nodes), 0, 10, traffic=Traffic(1.0, 1.0)), number)
    job.place = tuple((node, 4) for node in nodes)
    return job


def test_jobs_share_the_links_of_a_ring_of_nodes():
    """On a ring of four nodes, jobs on 0 and 2 and on 1 and 3 go over common links both ways; neighbours do not."""
    ring = SharedNetwork(1.0, False, False, topology=parse_topology("switch:4@400/0ns,ring:4@10/0ns"))
    shape = Shape(1, 4, 4)
    assert ring.paces([placed(0, 0, 1), placed(1, 2, 3)], shape) == {}
    crossing = ring.paces([placed(0, 0, 2), placed(1, 1, 3)], shape)
    assert crossing == {0: pytest.approx(2 / 3), 1: pytest.approx(2 / 3)}
    full = SharedNetwork(1.0, False, False, topology=parse_topology("switch:4@400/0ns,fully-connected:4@10/0ns"))
    assert full.paces([placed(0, 0, 2), placed(1, 1, 3)], shape) == {}


def of_bytes(exchange, *nodes):
    return sorted(zip(*(column.tolist() for column in volumes(exchange, np.array(nodes))), strict=True))


def test_what_gpus_send_in_all_follows_from_where_they_lie():
    """In a ring every GPU sends all to the next on its node; lanes between nodes share what one lane would carry."""
    inside = [(0, 1, 1), (1, 0, 1), (2, 3, 1), (3, 2, 1)]
    lanes = [(0, 2, 0.5), (1, 3, 0.5), (2, 0, 0.5), (3, 1, 0.5)]
    assert of_bytes(RING, 0, 0, 1, 1) == sorted(inside + lanes)
    assert of_bytes(RING, 0, 1, 2) == [(0, 1, 1), (1, 2, 1), (2, 0, 1)]
    assert of_bytes(RING, 0, 0) == [(0, 1, 1), (1, 0, 1)]
    assert of_bytes(RING, 0, 0, 0, 1) == [(0, 1, 1), (0, 3, 1), (1, 2, 1), (2, 0, 1), (3, 0, 1)]
    assert of_bytes(Exchange(1.0, "hops", 2, 1), 0, 0) == [(0, 1, 1), (1, 0, 1)]
    assert of_bytes(Exchange(1.0, "direct", 3, 1), 0, 0, 1) == [
        (one, other, 0.5) for one in range(3) for other in range(3) if one != other
    ]


HALF = Traffic(1.0, 1.0)


def on(number, *place, traffic=HALF):
    job = Progress(Job(str(number), sum(gpus for _, gpus in place), 0, 10, traffic=traffic), number)
    job.place = place
    return job


TREE = parse_topology("switch:4@400/0ns,switch:2@50/0ns,switch:2@25/0ns")
"""two switches of two nodes of four GPUs; a node's four links to its switch have 50, those above 25"""


def test_a_job_that_lies_apart_is_slower_alone():
    """Four GPUs need 1/400 of a second on a node. On two nodes, two lanes carry 1/2 each over links of 50."""
    network, shape = SharedNetwork(1.0, False, False, topology=TREE), Shape(2, 2, 4)
    assert network.paces([on(0, (0, 4))], shape) == {}
    near = network.paces([on(0, (0, 2), (1, 2))], shape)
    assert near == {0: pytest.approx(2.0 / (1.0 + 400 / (2 * 50)))}
    far = network.paces([on(0, (0, 2), (2, 2))], shape)
    assert far == {0: pytest.approx(2.0 / (1.0 + 400 / (2 * 25)))}
    jobs = [Job(str(node), 3, 0, 1000) for node in range(4)] + [Job("a", 4, 1, 10, traffic=Traffic(1.0, 1.0))]
    ran_s = [one.ran_s for one in schedule(jobs, shape, "fifo", "nearest", Terms(network=network))]
    assert ran_s[0] == pytest.approx(10 * (1.0 + 400 / 25) / 2.0), "a single lane over one GPU of each node"


def test_only_the_groups_that_lie_apart_are_slower():
    """Pairs of neighbours stay on their nodes; the data-parallel groups go over the links above."""
    network, shape = SharedNetwork(1.0, False, False, topology=TREE), Shape(2, 2, 4)
    traffic = Traffic(1.0, 2.0, (Exchange(1.0, "ring", 2, 1), Exchange(1.0, "ring", 2, 2)))
    near, far = on(0, (0, 4), traffic=traffic), on(0, (0, 2), (2, 2), traffic=traffic)
    assert network.alone([near], shape) == {}
    assert network.alone([far], shape) == {0: (1.0, pytest.approx(400 / 25))}


def test_a_job_apart_shares_links_at_the_pace_that_it_has_alone():
    network, shape = SharedNetwork(1.0, False, False, topology=TREE), Shape(2, 2, 4)
    one, other = on(0, (0, 2), (2, 2)), on(1, (1, 2), (3, 2))
    alone = network.paces([one], shape)[0]
    both = network.paces([one, other], shape)
    assert both[0] == both[1] <= alone


PLAN = {"model": "llama-3.1-8b", "cluster": "h100-sxm", "steps": 100, "global_batch": 32}
TENSOR = {"seq_len": 4096, "tp": 8, "dp_shard": 1, "dp_replicate": 4}


def test_a_plan_tells_which_of_its_communication_leaves_its_nodes():
    """Two jobs of 32 GPUs share a link of switch 1, which has room for none of them: tensor parallelism goes on."""
    data = {
        "nodes": 3,
        "switches": 3,
        "placement": "spread",
        "network": {"oversubscription": 1e6},
        "jobs": [{"name": name, "gpus": 32, "plan": {**PLAN, "fields": TENSOR}} for name in "ab"],
    }
    request = cluster_of(data, "x")
    traffic = request.jobs[0].traffic
    assert [(each.size, each.inner, each.pattern) for each in traffic.exchanges] == [(4, 8, "ring"), (8, 1, "ring")]
    inside = traffic.exchanges[1].seconds
    assert inside > 0
    job = Progress(request.jobs[0], 0)
    job.place = ((1, 8), (2, 8), (3, 8), (4, 8))
    ((data_parallel, tensor_parallel),) = request.terms.network.loads([job], request.shape).values()
    assert dict(data_parallel) == {("switch", 0): 1.0, ("switch", 1): 1.0}
    assert tensor_parallel == ()
    alone = {**data, "network": {"oversubscription": 1}}
    ends = [one.end_s for one in schedule(cluster_of(alone, "x").jobs, request.shape, "fifo", "spread", request.terms)]
    assert min(ends) > 100 * request.jobs[0].duration_s


@pytest.mark.parametrize(
    ("network", "words"),
    [
        ({"topology": "ring:4@50/1ns"}, "x: network: the network joins 4 NPUs"),
        ({"topology": "rung:8@50/1ns"}, "x: network: "),
        ({"topology": "ring:16@50/1ns", "rails": True}, "x: network: rails is about links of nodes and switches"),
    ],
)
def test_a_topology_that_does_not_fit_is_one_line(network, words):
    data = {"nodes": 2, "network": network, "jobs": [{"name": "a", "gpus": 8, "duration_s": 10}]}
    with pytest.raises(ForerunError) as error:
        cluster_of(data, "x")
    assert str(error.value).startswith(words)
    assert "\n" not in str(error.value)
