"""Whole runs of nodes in hardware slots, with times by hand: a message of `size` bytes takes `size` + 100 ns here."""

import numpy as np
import pytest
from random_traces import collective, comp, recv, send, trace

from forerun.astrasim.astra.replay import Machine, replay
from forerun.astrasim.astra.single import message_times
from forerun.astrasim.astra.system import system_from
from forerun.astrasim.chakra.trace import CommType, NodeKind
from forerun.core.network.network_file import parse_topology

RING = [f"{name}-implementation" for name in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")]
SYSTEM = system_from(
    {"endpoint-delay": 10, "local-mem-bw": 1000, "peak-perf": 1, **{name: ["ring"] for name in RING}}, ""
)
LATENCY_NS = 100


def run(*ranks, topology="fully-connected", order="ascending", fold=False, aware=False, ids=None):
    """(start, end) of the nodes of each rank, and when each rank is done. Durations of compute nodes are in us."""
    network = parse_topology(f"{topology}:{len(ranks)}@1GBps/{LATENCY_NS}")
    found = replay([trace(nodes, ids) for nodes in ranks], {}, Machine(SYSTEM, network, aware=aware), order, fold)
    result = found.run.result
    spans = list(zip(result.start_ns.tolist(), result.end_ns.tolist(), strict=True))
    return [spans[found.rows(actor)] for actor in found.actor_of_rank], [
        int(result.finish_ns[actor]) for actor in found.actor_of_rank
    ]


def work(duration_us, after=(), **more):
    return comp(duration_us=duration_us, after=after, **more)


def host(duration_us, after=()):
    return work(duration_us, after, is_cpu=True)


def instant(after=()):
    return {"kind": NodeKind.METADATA, "after": after}


def test_a_rank_has_one_slot_for_compute_one_for_the_host_and_one_for_communication():
    nodes = [work(3), host(5), work(2), host(1), work(1, (1,)), send(1, 400), send(1, 100)]
    peer = [recv(0, 400), recv(0, 100)]
    spans, finish = run(nodes, peer)
    assert spans[0] == [(0, 3000), (0, 5000), (3000, 5000), (5000, 6000), (5000, 6000), (0, 500), (500, 700)]
    assert spans[1] == [(0, 500), (0, 700)]
    assert finish == [6000, 700]


def test_of_nodes_that_are_ready_the_lowest_goes_first():
    nodes = [work(1), work(4, (0,)), work(2, (0,)), work(1), host(1), host(1, (4,))]
    spans, _ = run(nodes, [])
    assert spans[0] == [(0, 1000), (1000, 5000), (5000, 7000), (7000, 8000), (0, 1000), (1000, 2000)]


def test_a_node_that_waits_for_two_starts_when_the_last_has_ended():
    nodes = [work(2), host(5), work(1, (0, 1)), host(1, (2,)), work(1, (0,))]
    spans, finish = run(nodes, [])
    assert spans[0] == [(0, 2000), (0, 5000), (5000, 6000), (6000, 7000), (2000, 3000)]
    assert finish == [7000, 0]


def test_what_an_instant_node_makes_ready_waits_for_the_next_look():
    """Nodes 2 and 3 become ready at 0, but the rank looks again when the host's node ends."""
    nodes = [instant(), host(4), work(1, (0,)), instant((0,)), work(1, (3,))]
    spans, finish = run(nodes, [])
    assert spans[0] == [(0, 0), (0, 4000), (4000, 5000), (4000, 4000), (5000, 6000)]
    assert finish[0] == 6000


def test_equal_messages_meet_in_the_order_in_which_they_are_posted():
    sender = [send(1, 1000), send(1, 1000, after=(0,)), work(5), send(1, 1000, after=(2,))]
    receiver = [recv(0, 1000), work(9), recv(0, 1000, after=(1,)), recv(0, 1000)]
    spans, finish = run(sender, receiver)
    assert spans[0] == [(0, 1100), (1100, 2200), (0, 5000), (5000, 6100)]
    # node 3 is posted at 0 and takes the second message; the third meets node 2, which is posted at 9000
    assert spans[1] == [(0, 1100), (0, 9000), (9000, 9000), (0, 2200)]
    assert finish == [6100, 9000]


def test_messages_of_other_tags_sizes_and_senders_do_not_meet():
    first = [send(2, 1000, tag=1), send(2, 2000, tag=2)]
    second = [work(7), send(2, 1000, tag=1, after=(0,))]
    third = [recv(0, 2000, tag=2), recv(1, 1000, tag=1), recv(0, 1000, tag=1)]
    spans, _ = run(first, second, third)
    assert spans[2] == [(0, 3200), (0, 8100), (0, 1100)]


@pytest.mark.parametrize("fold", [False, True])
def test_a_collective_waits_for_its_last_rank_and_holds_the_slot(fold):
    """All gather 1000 bytes of 4 ranks after 1 us, then the sends of neighbours go on."""
    gather = 10 + 3 * (1000 + LATENCY_NS + 10)
    early = [work(1), collective(CommType.ALL_GATHER, 1000, after=(0,)), send(1, 500), recv(3, 500)]
    ranks = [early]
    for rank in (1, 2, 3):
        ranks.append(
            [work(1), collective(CommType.ALL_GATHER, 1000, after=(0,)), send((rank + 1) % 4, 500), recv(rank - 1, 500)]
        )
    spans, _ = run(*ranks, fold=fold)
    assert spans == [[(0, 1000), (1000, 1000 + gather), (0, 600), (0, 600)]] * 4


@pytest.mark.parametrize("kind", [CommType.ALL_REDUCE, CommType.REDUCE_SCATTER, CommType.ALL_TO_ALL])
def test_a_folded_collective_ends_before_or_after_what_ends_with_it(kind):
    """Both a collective and the compute node beside it make nodes of one slot ready in the same ns."""
    size = 10_000 - 3 * (LATENCY_NS + 10) if kind != CommType.ALL_REDUCE else 9_600
    nodes = [collective(kind, size), work(1), work(3, (1,)), work(2, (0,)), work(1, (0,)), host(1, (0, 1))]
    assert run(*[nodes] * 3, fold=True) == run(*[nodes] * 3, fold=False)


def test_a_message_counts_the_lowest_dimension_in_which_its_ranks_differ():
    """Ranks 0 and 7 of a ring of 4 and a switch of 2 differ by one hop of the ring, and by the switch."""
    network = parse_topology("ring:4@1GBps/100,switch:2@2GBps/700")
    arrivals = {other: int(message_times(network, 0, other, 1000)[other]) for other in range(1, 8)}
    assert arrivals == {1: 1100, 2: 1200, 3: 1100, 4: 500 + 2 * 700, 5: 1100, 6: 1200, 7: 1100}
    mesh = parse_topology("ring:2@1GBps/100,mesh2d:3x2@2GBps/700")
    arrivals = {other: int(message_times(mesh, 2, other, 1000)[other]) for other in (0, 3, 4, 8, 10)}
    assert arrivals == {3: 1100, 0: 500 + 700, 4: 500 + 700, 8: 500 + 700, 10: 500 + 2 * 700}


def test_the_other_ranks_of_a_message_are_idle():
    assert np.array(message_times(parse_topology("ring:3@1GBps/100"), 2, 0, 1000)).tolist() == [1100, 2222, 1100]


def test_with_queues_messages_of_one_link_go_one_after_the_other():
    """Rank 0 sends over rank 1, whose own message waits at the link."""
    first, second = [send(2, 1000)], [work(1), send(2, 3000, tag=1, after=(0,)), work(1, (0,)), recv(0, 7, tag=5)]
    first.append(send(1, 7, tag=5, after=(0,)))
    third = [recv(0, 1000), recv(1, 3000, tag=1)]
    others = [[], []]
    spans, _ = run(first, second, third, *others, topology="ring", aware=True)
    # the first message is at rank 1 at 1100 and finds the link busy from 1000 to 4000
    assert spans[2] == [(0, 4000 + 1100), (0, 1000 + 3100)]
    assert spans[0] == [(0, 5100), (5100, 5207)]


def looked_at(ids, n_buckets):
    """The ids in the order of a hash set with so many buckets: a new one goes to the front of its bucket, or of all."""
    order = []
    for each in ids:
        same = [i for i, other in enumerate(order) if other % n_buckets == each % n_buckets]
        order.insert(same[0] if same else 0, each)
    return order


def test_in_the_hashed_order_a_rank_looks_at_the_set_of_its_ready_nodes():
    """Nodes become ready in the order of the map of parents; ids of one bucket stand together."""
    ids = [3, 16, 5, 29, 1]
    spans, _ = run([work(1) for _ in ids], [work(1) for _ in ids], order="march-2025", ids=ids)
    by_id = dict(zip(sorted(ids), (start for start, _ in spans[0]), strict=True))
    ready = looked_at(looked_at(ids, 13), 13)
    started = []
    while ready:  # one slot: at each look the first of what is left
        started.append(ready.pop(0))
    assert sorted(ids, key=by_id.get) == started


def test_in_the_hashed_order_slots_and_instant_nodes_are_as_in_the_other():
    nodes = [host(2), work(3, (0,)), instant((0,)), work(1, (2,)), send(1, 100, after=(0,))]
    spans, finish = run(nodes, [recv(0, 100)] + [host(1)] * 4, order="march-2025")
    assert spans[0][0] == (0, 2000)
    assert spans[0][4] == (2000, 2200)
    assert sorted(spans[0][k] for k in (1, 2, 3)) == [(2000, 2000), (2000, 5000), (5000, 6000)]
    assert finish == [6000, 4000]
