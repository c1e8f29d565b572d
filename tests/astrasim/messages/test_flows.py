"""Messages as flows that share links max-min fairly."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_topologies import topologies
from test_links import columns, patterns

from forerun.astrasim.messages.flows import share
from forerun.astrasim.messages.links import deliver
from forerun.core.network.topology.registry import make


@settings(max_examples=60)
@given(topologies(), st.integers(1, 10**9), st.integers(0, 10**6))
def test_a_single_flow_takes_its_latencies_and_its_bytes(topology, size, start):
    last = topology.n_npus - 1
    path = topology.routes(np.array([0], np.int32), np.array([last], np.int32)).link
    links = topology.links()
    expected = start + links.latency_ns[path].sum() + size / links.bandwidth_gbps[path].min()
    assert share(topology, start, [0], [last], size).arrival_ns[0] == pytest.approx(expected, rel=1e-12)


@settings(max_examples=80)
@given(patterns())
def test_no_link_carries_more_than_its_bandwidth(pattern):
    topology, messages = pattern
    delivery = share(topology, *columns(messages))
    start, src, dst, size = (np.array(column, np.int64) for column in columns(messages))
    paths = topology.routes(src.astype(np.int32), dst.astype(np.int32))
    links = topology.links()
    ends = delivery.arrival_ns - [links.latency_ns[p].sum() for p in np.split(paths.link, paths.first[1:-1])]
    owner = np.repeat(np.arange(len(messages)), paths.hops)
    for link in np.unique(paths.link):
        flows = owner[paths.link == link]
        needed = size[flows].sum() / links.bandwidth_gbps[link]
        assert ends[flows].max() >= (start[flows].min() + needed) * (1 - 1e-6)
    slowest = np.minimum.reduceat(links.bandwidth_gbps[paths.link], paths.first[:-1])
    assert (ends >= (start + size / slowest) * (1 - 1e-6)).all()
    assert delivery.use.size_bytes.sum() == (size * paths.hops).sum()


@settings(max_examples=50)
@given(patterns(max_messages=12, max_start=0))
def test_rates_are_max_min_fair(pattern):
    """Until the first flow ends every flow has a link that is full and on which nobody gets more."""
    topology, messages = pattern
    _, src, dst, _ = (np.array(column, np.int32) for column in columns(messages))
    paths = topology.routes(src, dst)
    link_of = np.split(paths.link, paths.first[1:-1])
    rate = np.array([fair_rate(topology, link_of, flow) for flow in range(len(messages))])
    first = np.argmin([size / r for (_, _, _, size), r in zip(messages, rate, strict=True)])
    until = messages[first][3] / rate[first]
    latency = topology.links().latency_ns[link_of[first]].sum()
    assert share(topology, *columns(messages)).arrival_ns[first] == pytest.approx(until + latency, rel=1e-9)


def fair_rate(topology, link_of, flow):
    """The rate of one flow by the definition: raise all rates together, stop those on a full link."""
    capacity = topology.links().bandwidth_gbps
    rate, open_flows = np.zeros(len(link_of)), set(range(len(link_of)))
    while flow in open_flows:
        room = {}
        for link in {int(link) for each in open_flows for link in link_of[each]}:
            on_it = [each for each in range(len(link_of)) if link in link_of[each]]
            room[link] = (capacity[link] - rate[on_it].sum()) / len(open_flows & set(on_it))
        least = min(room.values())
        for each in open_flows:
            rate[each] += least
        full = {link for link, space in room.items() if space <= least + 1e-9}
        open_flows -= {each for each in open_flows if full & set(link_of[each].tolist())}
    return rate[flow]


def test_two_flows_share_and_the_second_speeds_up_when_the_first_ends():
    switch = make("Switch", 4, 10, 100)
    assert list(share(switch, 0, [0, 2], [1, 1], [1000, 3000]).arrival_ns) == pytest.approx([200 + 200, 200 + 400])


def test_a_flow_that_starts_later_slows_the_first_one_down():
    switch = make("Switch", 4, 10, 100)
    assert list(share(switch, [0, 50], [0, 2], [1, 1], 1000).arrival_ns) == pytest.approx([350, 400])


def test_a_flow_held_up_elsewhere_leaves_its_share_to_others():
    switch = make("Switch", 4, 12, 0)
    sent = share(switch, 0, [0, 1, 2, 2], [3, 3, 3, 0], [4000, 4000, 4000, 8000])
    assert list(sent.arrival_ns) == pytest.approx([1000, 1000, 1000, 1000])


def test_an_all_to_all_on_a_switch_meets_the_bandwidth_bound():
    n, size = 64, 10**6
    src, dst = (each.ravel() for each in np.meshgrid(np.arange(n), np.arange(n), indexing="ij"))
    away = src != dst
    delivery = share(make("Switch", n, 50, 500), 0, src[away], dst[away], size)
    assert delivery.finish_ns == pytest.approx(1000 + (n - 1) * size / 50)
    assert delivery.use.utilisation.max() == pytest.approx(1, rel=1e-3)


@settings(max_examples=30)
@given(st.integers(2, 12), st.integers(1, 10**7))
def test_where_nobody_meets_a_hop_costs_the_same_in_both_models(n, size):
    ring = make("FullyConnected", n, 50, 500)
    src = np.arange(n)
    queues = deliver(ring, 0, src, (src + 1) % n, size)
    flows = share(ring, 0, src, (src + 1) % n, size)
    np.testing.assert_array_equal(queues.arrival_ns, np.floor(flows.arrival_ns + 1e-6))


def test_no_flows_take_no_time():
    assert share(make("Ring", 4, 50, 500), [], [], [], []).finish_ns == 0
