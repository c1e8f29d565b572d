"""Messages over queues at the links."""

import heapq
from collections import deque
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_topologies import topologies

from forerun.astrasim.messages.links import deliver
from forerun.common.errors import ForerunError
from forerun.core.network.network_file import bytes_per_ns, parse_topology
from forerun.core.network.topology.registry import make


def plain(topology, messages, gib):
    """The model written out event by event, each link's release among them."""
    links = topology.links()
    rate = bytes_per_ns(links.bandwidth_gbps, gib=gib)
    number = {(s, d): i for i, (s, d) in enumerate(zip(links.src, links.dst, strict=True))}
    route = [topology.route(src, dst) for _, src, dst, _ in messages]
    path = [[number[step] for step in pairwise(devices)] for devices in route]
    queue, busy = [deque() for _ in range(len(links))], [False] * len(links)
    at, arrival = [0] * len(messages), [None] * len(messages)
    order = sorted(range(len(messages)), key=lambda m: messages[m][0])
    events = [(messages[m][0], i, "start", m) for i, m in enumerate(order)]
    heapq.heapify(events)
    n_events = len(events)

    def schedule(time, kind, what):
        nonlocal n_events
        heapq.heappush(events, (time, n_events, kind, what))
        n_events += 1

    def transmit(now, link, m):
        busy[link] = True
        duration = messages[m][3] / rate[link]
        schedule(now + int(links.latency_ns[link] + duration), "arrive", m)
        schedule(now + int(duration), "free", link)

    def send(now, m):
        link = path[m][at[m]]
        if busy[link]:
            queue[link].append(m)
        else:
            transmit(now, link, m)

    while events:
        now, _, kind, what = heapq.heappop(events)
        if kind == "free":
            busy[what] = False
            if queue[what]:
                transmit(now, what, queue[what].popleft())
            continue
        at[what] += kind == "arrive"
        if at[what] == len(path[what]):
            arrival[what] = now
        else:
            send(now, what)
    return arrival


@st.composite
def patterns(draw, max_messages=40, max_start=2000):
    topology = draw(topologies())
    npu = st.integers(0, topology.n_npus - 1)
    message = st.tuples(
        st.integers(0, max_start), npu, npu, st.sampled_from([1, 7, 1000, 1024, 50_000]) | st.integers(1, 10**6)
    )
    messages = draw(st.lists(message.filter(lambda m: m[1] != m[2]), min_size=1, max_size=max_messages))
    return topology, messages


def columns(messages):
    return [list(column) for column in zip(*messages, strict=True)]


@settings(max_examples=100)
@given(patterns(), st.booleans())
def test_it_is_the_model_written_out_event_by_event(pattern, gib):
    topology, messages = pattern
    assert list(deliver(topology, *columns(messages), gib=gib).arrival_ns) == plain(topology, messages, gib)


@settings(max_examples=50)
@given(patterns(max_messages=200, max_start=0))
def test_ties_at_the_start_are_broken_by_the_order_given(pattern):
    topology, messages = pattern
    equal = [(0, src, dst, 1000) for _, src, dst, _ in messages]
    assert list(deliver(topology, *columns(equal)).arrival_ns) == plain(topology, equal, gib=False)


@settings(max_examples=60)
@given(topologies(), st.integers(1, 10**9), st.integers(0, 10**9))
def test_a_single_message_takes_the_sum_of_its_hops(topology, size, start):
    last = topology.n_npus - 1
    arrival = deliver(topology, start, [0], [last], size, gib=True).arrival_ns[0]
    links = topology.links()
    path = topology.routes(np.array([0], np.int32), np.array([last], np.int32)).link
    rate = bytes_per_ns(links.bandwidth_gbps[path], gib=True)
    assert arrival == start + sum(int(delay) for delay in links.latency_ns[path] + size / rate)


@settings(max_examples=60)
@given(patterns())
def test_links_carry_what_was_sent_and_are_never_busier_than_time_allows(pattern):
    topology, messages = pattern
    delivery = deliver(topology, *columns(messages))
    _, src, dst, size = (np.array(column, np.int32) for column in columns(messages))
    hops = topology.hop_counts(src, dst)
    assert delivery.use.messages.sum() == hops.sum()
    assert delivery.use.size_bytes.sum() == (size * hops).sum()
    assert (delivery.use.utilisation <= 1).all()
    assert delivery.finish_ns == delivery.arrival_ns.max()


@settings(max_examples=40)
@given(patterns(max_messages=30))
def test_messages_of_one_pair_and_size_arrive_in_the_order_sent(pattern):
    topology, messages = pattern
    repeated = sorted((start, src, dst, 3000) for start, src, dst, _ in messages) * 2
    repeated.sort(key=lambda message: message[0])
    arrival = deliver(topology, *columns(repeated)).arrival_ns
    last = {}
    for (_, src, dst, _), at in zip(repeated, arrival, strict=True):
        assert at > last.get((src, dst), -1)
        last[src, dst] = at


@settings(max_examples=40)
@given(patterns(max_messages=20))
def test_more_traffic_on_one_link_never_speeds_it_up(pattern):
    """On a single link; elsewhere first come, first served has anomalies."""
    _, messages = pattern
    pair = make("FullyConnected", 2, 50, 500)
    alone = [(start, 0, 1, size) for start, _, _, size in messages]
    finish = deliver(pair, *columns(alone)).finish_ns
    assert deliver(pair, *columns([*alone, (0, 0, 1, 5000)])).finish_ns >= finish


def test_messages_wait_in_the_order_in_which_they_come_whatever_their_numbers():
    pair = make("FullyConnected", 2, 1, 500)
    arrival = deliver(pair, [2, 0, 1, 7000], [0] * 4, [1] * 4, [1000, 2000, 3000, 10]).arrival_ns
    assert list(arrival) == [6000 + 500, 2000 + 500, 5000 + 500, 7010 + 500]


def test_thousands_of_messages_may_be_under_way():
    n = 40
    pairs = [(a, b) for a in range(n) for b in range(n) if a != b]
    found = deliver(make("FullyConnected", n, 1, 500), 0, *map(list, zip(*pairs, strict=True)), 1000)
    assert set(found.arrival_ns.tolist()) == {1500}
    assert set(found.use.busy_ns.tolist()) == {1000}


def test_the_hottest_links_are_named():
    switch = make("Switch", 4, 50, 500)
    use = deliver(switch, 0, [0, 1, 2], [3, 3, 3], 50_000).use
    hottest = use.hottest(10)
    assert [(use.links.src[link], use.links.dst[link]) for link in hottest] == [(4, 3), (0, 4), (1, 4), (2, 4)]
    assert list(use.busy_ns[hottest]) == [3000, 1000, 1000, 1000]
    assert use.utilisation[hottest[0]] == 3000 / (2 * 1500 + 2000)
    assert len(use.hottest(0)) == 0


def test_several_dimensions_work_too():
    network = parse_topology("ring:4,switch:2@25/1000", [50], [500])
    delivery = deliver(network.topology(), 0, [0], [7], 50_000)
    assert list(delivery.arrival_ns) == [1500 + 2 * (1000 + 2000)]


def test_a_gigabyte_is_of_ten_to_the_nine_bytes_unless_told():
    pair = make("FullyConnected", 2, 1, 0)
    assert deliver(pair, 0, [0], [1], 2**30).arrival_ns[0] == 2**30
    assert deliver(pair, 0, [0], [1], 2**30, gib=True).arrival_ns[0] == pytest.approx(10**9, abs=1)


def test_no_messages_take_no_time():
    assert deliver(make("Ring", 4, 50, 500), [], [], [], []).finish_ns == 0


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ((0, [0], [0], 1), "message 0 goes to its own sender"),
        ((0, [0, 1], [1, 0], [1, 0]), "message 1 has no bytes"),
        ((-1, [0], [1], 1), "message 0 starts before 0"),
        ((0, [0], [9], 1), "there is no NPU 9"),
        ((0, [0], [2**40], 1), "there is no NPU"),
        ((0, [-3], [1], 1), "there is no NPU"),
        ((0, [0, 1], [1, 2, 3], 1), "differ in length"),
        ((0.5, [0], [1], 1), "start_ns must be whole numbers"),
        ((0, [0], [1], 2**70), "size_bytes must be whole numbers"),
        ((0, [0], [1], 2**63), "size_bytes must be whole numbers"),
        ((0, ["a"], [1], 1), "src must be whole numbers"),
        ((0, [[0], [1, 2]], [1], 1), "src must be whole numbers"),
        ((2**62, [0] * 9, [1] * 9, 2**62), "more than a century"),
    ],
)
def test_messages_that_make_no_sense_are_refused(columns, message):
    with pytest.raises(ForerunError, match=message):
        deliver(make("Ring", 4, 1, 500), *columns)
