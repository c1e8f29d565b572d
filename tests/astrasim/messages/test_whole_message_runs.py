"""Whole runs of collectives, with times that follow by hand from what each algorithm sends and reduces.

A bundle takes `E` ns, a message of `size` bytes over h hops floor(h * 500 + size / rate), a reduction three times the
time in which memory moves the message.
"""

from dataclasses import replace

import numpy as np
import pytest

from forerun.astrasim.astra.collective_cases import implementations
from forerun.astrasim.astra.collectives import CollectiveTables
from forerun.astrasim.astra.custom import Receive, Send, Wait
from forerun.astrasim.astra.fabric import fabric_of
from forerun.astrasim.astra.run import run_program
from forerun.astrasim.astra.single import chain_of, collective_times
from forerun.astrasim.astra.system import system_from
from forerun.astrasim.chakra.trace import CommType
from forerun.astrasim.messages.ready import SLOT_NONE
from forerun.core.network.network_file import parse_topology

E = 10
LATENCY_NS = 500
BYTES_PER_NS = 50.0
MEMORY_BYTES_PER_S = 16e9
ALL = (CommType.ALL_REDUCE, CommType.ALL_GATHER, CommType.REDUCE_SCATTER, CommType.ALL_TO_ALL)


def system(*algorithms, splits=1, active=1, **keys):
    return system_from(
        {
            "endpoint-delay": E,
            "preferred-dataset-splits": splits,
            "active-chunks-per-dimension": active,
            "collective-optimization": "localBWAware",
            "local-mem-bw": 16,
            **implementations(list(algorithms)),
            **keys,
        },
        "test",
    )


def ends(topology, algorithm, kind, size, aware=False, mirror=False, groups=(), own=None, **keys):
    """When each rank ends; `topology` is ring:8 or several dimensions, all with equal links."""
    network = parse_topology(",".join(f"{part}@50GBps/500" for part in topology.split(",")))
    algorithms = [algorithm] if isinstance(algorithm, str) else algorithm
    of = system(*algorithms, **keys)
    return collective_times(network, of, kind, size, groups, aware, own, mirror).ends_ns.tolist()


def message(size, hops=1):
    return int(hops * LATENCY_NS + size / BYTES_PER_NS)


def reduction(size):
    return 3 * int(size / MEMORY_BYTES_PER_S * 1e9)


def on_ring(n, distance):
    return min(distance % n, -distance % n)


@pytest.mark.parametrize("mirror", [False, True])
@pytest.mark.parametrize("n", [2, 3, 5, 8])
@pytest.mark.parametrize(
    ("kind", "messages", "reductions", "whole"),
    [
        (CommType.ALL_REDUCE, lambda n: 2 * (n - 1), lambda n: n - 1, False),
        (CommType.REDUCE_SCATTER, lambda n: n - 1, lambda n: n - 1, False),
        (CommType.ALL_GATHER, lambda n: n - 1, lambda n: 0, True),
        (CommType.ALL_TO_ALL, lambda n: n * (n - 1) // 2, lambda n: 0, False),
    ],
)
def test_a_ring_sends_one_message_after_the_other(n, kind, messages, reductions, whole, mirror):
    size = 4800 if whole else 4800 // n
    expected = E + messages(n) * (message(size) + E) + reductions(n) * reduction(size)
    assert ends(f"ring:{n}", "ring", kind, 4800, mirror=mirror) == [expected] * n


@pytest.mark.parametrize("mirror", [False, True])
@pytest.mark.parametrize("n", [2, 5, 8])
@pytest.mark.parametrize("kind", ALL)
def test_direct_sends_to_all_others_at_once(n, kind, mirror):
    """An all-reduce does so twice. The farthest rank is heard last."""
    size = 4800 if kind == CommType.ALL_GATHER else 4800 // n
    once = message(size, n // 2) + E
    reduced = reduction(size) if kind in (CommType.ALL_REDUCE, CommType.REDUCE_SCATTER) else 0
    expected = E + once + reduced + (once if kind == CommType.ALL_REDUCE else 0)
    assert ends(f"ring:{n}", "direct", kind, 4800, mirror=mirror) == [expected] * n


@pytest.mark.parametrize("mirror", [False, True])
@pytest.mark.parametrize("kind", [CommType.ALL_GATHER, CommType.ALL_TO_ALL])
def test_a_window_of_one_sends_to_each_distance_in_turn(kind, mirror):
    size = 800 * 8 if kind == CommType.ALL_GATHER else 800
    expected = E + sum(message(size, on_ring(8, d)) + E for d in range(1, 8))
    assert ends("ring:8", "direct1", kind, 6400, mirror=mirror) == [expected] * 8


def test_of_an_all_reduce_with_a_window_of_one_every_fourth_packet_is_reduced():
    """ASTRA-sim reduces the second packet of the first round, then none in the next round, and so on."""
    packets = 1 + 2 * 7
    reduced = len([k for k in range(packets) if k % 4 == 1])
    expected = E + 2 * sum(message(800, on_ring(8, d)) + E for d in range(1, 8)) + reduced * reduction(800)
    assert ends("ring:8", "direct1", CommType.ALL_REDUCE, 6400) == [expected] * 8


def test_of_a_reduce_scatter_with_a_window_of_one_every_second_packet_is_reduced():
    expected = E + sum(message(800, on_ring(8, d)) + E for d in range(1, 8)) + 4 * reduction(800)
    assert ends("ring:8", "direct1", CommType.REDUCE_SCATTER, 6400) == [expected] * 8


def test_with_a_window_of_two_each_message_waits_for_the_one_two_before():
    """Four distances of a ring of 5, two at a time: 1 and 3 (two hops), 2 (two hops) and 4."""
    first = [message(1000, 1), message(1000, 2)]
    expected = E + max(first[0] + E + message(1000, 2), first[1] + E + message(1000, 1)) + E
    assert ends("ring:5", "direct2", CommType.ALL_TO_ALL, 5000) == [expected] * 5


@pytest.mark.parametrize("topology", ["ring", "switch", "fully-connected"])
@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("kind", [CommType.ALL_REDUCE, CommType.REDUCE_SCATTER, CommType.ALL_GATHER])
def test_halving_and_doubling_exchange_over_powers_of_two(topology, n, kind):
    size = 800 * n
    rounds = n.bit_length() - 1
    halves = [(size >> k, 1 << (k - 1)) for k in range(1, rounds + 1)]
    exchanges = {
        CommType.ALL_REDUCE: halves + halves[::-1],
        CommType.REDUCE_SCATTER: halves,
        CommType.ALL_GATHER: [(size << k, n >> (k + 1)) for k in range(rounds)],
    }[kind]
    hops = {"ring": lambda d: on_ring(n, d), "switch": lambda d: 2, "fully-connected": lambda d: 1}[topology]
    expected = E + sum(message(bytes_, hops(distance)) + E for bytes_, distance in exchanges)
    if kind != CommType.ALL_GATHER:  # the packets behind the first, of the size of the message that follows
        sizes = [bytes_ for bytes_, _ in exchanges[1:rounds]]
        expected += sum(map(reduction, sizes))
    assert ends(f"{topology}:{n}", "halvingDoubling", kind, size) == [expected] * n


def tree(n, which):
    """Parent of each rank in one of the two trees, -1 at the root: a perfect tree in order, with the root above it."""
    root, base = (n - 1, 0) if which == 0 else (0, 1)
    parent = [-1] * n

    def fill(low, high, above):
        if low < high:
            middle = (low + high - 1) // 2
            parent[middle] = above
            fill(low, middle, middle)
            fill(middle + 1, high, middle)

    fill(base, base + n - 1, root)
    return parent


def tree_ends(parent, start, size, hops):
    """When each rank of a tree ends, where rank i begins at start[i]."""
    n = len(parent)
    children = [[c for c in range(n) if parent[c] == rank] for rank in range(n)]
    reduced = E + reduction(size)

    def up(rank):
        """When a rank has what lies under it."""
        if not children[rank]:
            return start[rank] + E
        return max(max(up(c) + message(size, hops(c, rank)), start[rank]) + reduced for c in children[rank])

    end = [0] * n

    def down(rank, has):
        end[rank] = has
        for c in children[rank]:
            down(c, has + message(size, hops(rank, c)) + (reduced if children[c] else E))

    root = parent.index(-1)
    down(root, up(root))
    return end


@pytest.mark.parametrize("topology", ["ring", "switch"])
@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_a_double_binary_tree_reduces_upwards_and_sends_down(topology, n):
    def hops(a, b):
        return on_ring(n, a - b) if topology == "ring" else 2

    first, second = (tree_ends(tree(n, which), [0] * n, 4800, hops) for which in (0, 1))
    assert ends(f"{topology}:{n}", "doubleBinaryTree", CommType.ALL_REDUCE, 4800) == first
    both = [max(pair) for pair in zip(first, second, strict=True)]
    assert ends(f"{topology}:{n}", "doubleBinaryTree", CommType.ALL_REDUCE, 9600, splits=2, active=2) == both
    in_turn = tree_ends(tree(n, 1), first, 4800, hops)
    assert ends(f"{topology}:{n}", "doubleBinaryTree", CommType.ALL_REDUCE, 9600, splits=2) == in_turn


@pytest.mark.parametrize(("splits", "active"), [(1, 1), (4, 1), (4, 3), (6, 3), (5, 8)])
def test_a_queue_runs_so_many_chunks_at_a_time(splits, active):
    one = E + 7 * (message(800) + E)
    rounds = -(-splits // active)
    assert ends("ring:8", "ring", CommType.ALL_GATHER, 800 * splits, splits=splits, active=active) == [rounds * one] * 8


@pytest.mark.parametrize("mirror", [False, True])
@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("shape", [(2, 8), (8, 2), (4, 4), (3, 2)])
def test_chunks_go_through_the_dimensions_one_behind_the_other(shape, splits, mirror):
    """A dimension works on one chunk at a time, so the slower one sets the pace."""
    chunk, expected, time = 9600, 0, []
    for n in shape:
        size = chunk // n
        time.append(E + (n - 1) * (message(size) + E + reduction(size)))
        chunk = size
    first, second = time
    expected = first * splits + second if first >= second else first + second * splits
    topology = ",".join(f"ring:{n}" for n in shape)
    found = ends(topology, ["ring", "ring"], CommType.REDUCE_SCATTER, 9600 * splits, splits=splits, mirror=mirror)
    assert found == [expected] * (shape[0] * shape[1])


def test_an_all_gather_takes_the_outer_dimension_first():
    outer, inner = E + 3 * (message(960) + E), E + 1 * (message(960 * 4) + E)
    assert ends("ring:2,ring:4", ["ring", "ring"], CommType.ALL_GATHER, 960) == [outer + inner] * 8


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("shape", [(2, 8), (8, 2)])
def test_an_all_reduce_gathers_in_the_inner_dimension_once_all_chunks_are_scattered_there(shape, splits):
    """The gathers of a dimension queue behind the reduce-scatters, which are all there from the start."""
    n, m = shape
    size, part = 9600 // n, 9600 // n // m
    scatter = E + (n - 1) * (message(size) + E + reduction(size))
    reduce = E + 2 * (m - 1) * (message(part) + E) + (m - 1) * reduction(part)
    gather = E + (n - 1) * (message(size) + E)
    scattered = reduced = 0
    inner = splits * scatter
    for _ in range(splits):
        scattered += scatter
        reduced = max(reduced, scattered) + reduce
        inner = max(inner, reduced) + gather
    topology = f"ring:{n},ring:{m}"
    assert ends(topology, ["ring", "ring"], CommType.ALL_REDUCE, 9600 * splits, splits=splits) == [inner] * (n * m)
    plain = {"collective-optimization": "baseline", "splits": splits}
    each = [E + 2 * (k - 1) * (message(9600 // k) + E) + (k - 1) * reduction(9600 // k) for k in shape]
    whole = max(each) * splits + min(each)
    assert ends(topology, ["ring", "ring"], CommType.ALL_REDUCE, 9600 * splits, **plain) == [whole] * (n * m)


@pytest.mark.parametrize("mirror", [False, True])
def test_groups_run_rings_of_their_own(mirror):
    """Neighbours of a group of every second rank are two hops apart."""
    groups = [(0, 2, 4, 6), (1, 3, 5, 7)]
    expected = 10 + 6 * (message(1200, 2) + 10) + 3 * reduction(1200)
    assert ends("ring:8", "direct", CommType.ALL_REDUCE, 4800, groups=groups, mirror=mirror) == [expected] * 8


def test_ranks_outside_of_all_groups_end_at_once():
    expected = 10 + 3 * (message(1200, 1) + 10)
    found = ends("switch:8", "ring", CommType.ALL_GATHER, 1200, groups=[(1, 2, 4, 7)])
    expected = 10 + 3 * (message(1200, 2) + 10)
    assert found == [0, expected, expected, 0, expected, 0, 0, expected]


def test_with_queues_messages_of_one_link_follow_each_other():
    """All seven messages of a rank leave by its one link to the switch, and come in by one."""
    wire = int(1000 / BYTES_PER_NS)
    expected = E + 7 * wire + int(LATENCY_NS + wire) + LATENCY_NS + E
    assert ends("switch:8", "direct", CommType.ALL_TO_ALL, 8000, aware=True) == [expected] * 8


def test_with_queues_neighbours_of_a_ring_never_meet():
    plain = ends("ring:8", "ring", CommType.ALL_REDUCE, 9600)
    assert ends("ring:8", "ring", CommType.ALL_REDUCE, 9600, aware=True) == plain


def at_once(dims, kinds, splits=4, n_queues=1, policy="LIFO", priorities=(0, 0), aware=False):
    """Each rank begins all of `kinds` at 0, on rings; when they end on rank 0, and bytes by link."""
    network = parse_topology(",".join(f"ring:{n}@50GBps/500" for n in dims))
    of = system(*["ring"] * len(dims), splits=splits, **{"scheduling-policy": policy})
    tables = CollectiveTables(of, dims, n_queues=n_queues)
    n, k = network.n_npus, len(kinds)
    calls = [
        tables.call(kind, 1600 * splits, tables.communicator(str(i), tuple(range(n))), priorities[i])
        for i, kind in enumerate(kinds)
    ]
    chain = chain_of([calls] * n, range(n), tables)
    nodes = chain.nodes._replace(
        slot=np.full(n * k, SLOT_NONE, np.int8),
        n_pred=np.zeros(n * k, np.int32),
        child_ptr=np.zeros(n * k + 1, np.int64),
        root=np.arange(n * k),
        root_ptr=np.arange(n + 1) * k,
    )
    run = run_program(replace(chain, nodes=nodes), tables, fabric_of(network, aware))
    found = run.result.end_ns.reshape(n, k)
    assert (found == found[0]).all()
    links = network.topology().links()
    moved = zip(links.src.tolist(), links.dst.tolist(), run.link_bytes.tolist(), strict=True) if aware else ()
    return found[0].tolist(), {(src, dst): bytes_ for src, dst, bytes_ in moved}


GATHER = E + 3 * (message(1600) + E)
SCATTER = E + 3 * (message(400) + E + reduction(400))
REDUCE = SCATTER + 3 * (message(400) + E)


@pytest.mark.parametrize(
    ("policy", "priorities", "expected"),
    [
        ("FIFO", (0, 0), [4, 8]),
        ("LIFO", (0, 0), [8, 5]),
        ("EXPLICIT", (0, 0), [4, 8]),
        ("EXPLICIT", (3, 1), [4, 8]),
        ("EXPLICIT", (1, 3), [8, 5]),
    ],
)
def test_of_two_collectives_the_policy_says_whose_chunks_wait(policy, priorities, expected):
    """A chunk that runs is not interrupted, so the second collective waits at least for one."""
    found, _ = at_once([4], [CommType.ALL_GATHER] * 2, policy=policy, priorities=priorities)
    assert found == [GATHER * k for k in expected]


@pytest.mark.parametrize(("n_queues", "gather", "reduce"), [(1, 8, 8), (2, 4, 8), (4, 2, 4), (8, 1, 2)])
def test_chunks_take_the_queues_of_a_dimension_in_turn(n_queues, gather, reduce):
    """Those of an all-reduce have the first half of the queues, so that gathers have the second."""
    assert at_once([4], [CommType.ALL_GATHER], 8, n_queues)[0] == [GATHER * gather]
    assert at_once([4], [CommType.ALL_REDUCE], 8, n_queues)[0] == [REDUCE * reduce]


@pytest.mark.parametrize("n_queues", [2, 4])
def test_with_two_queues_gathers_do_not_wait_for_reduce_scatters(n_queues):
    scatter = E + (message(800) + E + reduction(800))
    part = E + 6 * (message(200) + E) + 3 * reduction(200)
    gather = E + (message(800) + E)
    ends_of, scattered, reduced, gathered = [], 0, 0, 0
    for _ in range(8 * 2 // n_queues):
        scattered += scatter
        reduced = max(reduced, scattered) + part
        gathered = max(gathered, reduced) + gather
        ends_of.append(gathered)
    assert at_once([2, 4], [CommType.ALL_REDUCE], 8, n_queues)[0] == [ends_of[-1]]


@pytest.mark.parametrize("n_queues", [1, 2, 4])
def test_the_second_half_of_the_queues_turns_the_other_way(n_queues):
    _, moved = at_once([4], [CommType.ALL_GATHER], 8, n_queues, aware=True)
    backwards = 0 if n_queues == 1 else 4
    up = {moved[rank, (rank + 1) % 4] for rank in range(4)}
    down = {moved[rank, (rank - 1) % 4] for rank in range(4)}
    assert (up, down) == ({(8 - backwards) * 3 * 1600}, {backwards * 3 * 1600})


def test_gathers_of_an_all_reduce_turn_the_other_way():
    """Reduce-scatter and all-gather of dimension 0 send 800 bytes of each chunk, to the only other rank there."""
    _, moved = at_once([4, 2], [CommType.ALL_REDUCE], 1, 2, aware=True)
    there = [moved[rank, (rank + 1) % 4] for rank in range(4)]
    assert there == [moved[rank, (rank - 1) % 4] for rank in range(4)] == [3 * 400] * 4


@pytest.mark.parametrize(
    ("algorithm", "kind", "expected"),
    [
        ("ring", CommType.ALL_GATHER, E),
        ("ring", CommType.REDUCE_SCATTER, reduction(1200)),
        ("ring", CommType.ALL_REDUCE, E),
        ("direct", CommType.REDUCE_SCATTER, reduction(1200)),
        ("direct", CommType.ALL_TO_ALL, E),
        ("halvingDoubling", CommType.ALL_REDUCE, E),
    ],
)
def test_the_last_thing_of_a_collective_is_a_bundle_or_its_reduction(algorithm, kind, expected):
    network = parse_topology("ring:4@50GBps/500")
    for mirror in (True, False):
        run = collective_times(network, system(algorithm, splits=2), kind, 9600, mirror=mirror).run
        assert set(run.result.last_tail_ns.tolist()) == {expected}


class Given:
    """The steps of each rank, from functions."""

    def __init__(self, *ranks):
        self.ranks = ranks

    def steps(self, rank, n_ranks, size, costs):
        return self.ranks[rank](size) if rank < len(self.ranks) else ()


@pytest.mark.parametrize("late", [3, 5000])
@pytest.mark.parametrize("splits", [1, 3])
def test_a_receive_ends_once_it_is_posted_and_its_message_is_there(late, splits):
    def sender(size):
        first = Wait(ns=5)
        yield first
        sent = Send(to=1, size=size, after=[first])
        yield sent
        yield Wait(ns=7, after=[sent])

    def receiver(size):
        first = Wait(ns=late)
        yield first
        got = Receive(source=0, size=size, after=[first])
        yield got
        yield Wait(ns=2, after=[got])

    arrival = 5 + message(1000)
    expected = [splits * (arrival + 7), 0]
    start = [0, 0]
    for _ in range(splits):
        came = start[0] + arrival
        start = [came + 7, max(start[1] + late, came) + 2]
    expected = [*start, 0, 0]
    own = Given(sender, receiver)
    assert ends("ring:4", "ring", CommType.BROADCAST, 1000 * splits, own=own, splits=splits) == expected


def test_steps_fork_and_join():
    """A step waits for the last of those before it, and messages of equal tag meet in order."""

    def first(_):
        begin = Wait(ns=10)
        yield begin
        near, far = Send(to=1, size=1000, after=[begin]), Send(to=2, size=5000, after=[begin])
        yield near
        yield far
        yield Wait(ns=100, after=[near, far])

    def second(_):
        yield Receive(source=0, size=1000)

    def third(_):
        got, short, long = Receive(source=0, size=5000), Wait(ns=20), Wait(ns=30)
        yield got
        yield short
        yield long
        yield Wait(ns=1000, after=[short])
        yield Wait(ns=50, after=[got, short, long])

    expected = [10 + message(5000, 2) + 100, 10 + message(1000), max(10 + message(5000, 2) + 50, 1020), 4]
    own = Given(first, second, third, lambda _: [Wait(ns=4)])
    assert ends("ring:4", "ring", CommType.BROADCAST, 1000, own=own) == expected


def test_equal_messages_of_a_custom_algorithm_arrive_in_order():
    def sender(_):
        one = Send(to=1, size=100)
        yield one
        yield Send(to=1, size=100, after=[one])

    def receiver(_):
        one = Receive(source=0, size=100)
        yield one
        yield Wait(ns=900, after=[one])
        yield Receive(source=0, size=100)

    expected = [2 * message(100), message(100) + 900, 0]
    assert ends("fully-connected:3", "ring", CommType.BROADCAST, 100, own=Given(sender, receiver)) == expected
