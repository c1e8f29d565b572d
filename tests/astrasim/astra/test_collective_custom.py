"""Custom algorithms: classes and traces against the built-in algorithms, and what they may get wrong."""

import numpy as np
import pytest
from collective_building import networks, system
from hypothesis import given, settings
from hypothesis import strategies as st
from random_traces import collective, comp, recv, send, trace

from forerun.astrasim.astra.collective_cases import strided_groups
from forerun.astrasim.astra.custom import BinomialBroadcast, Receive, RingBroadcast, Send, Wait, load_algorithm
from forerun.astrasim.astra.replay import Machine, replay
from forerun.astrasim.astra.single import collective_times
from forerun.astrasim.chakra.trace import CommType
from forerun.astrasim.chakra.writer import write_rank
from forerun.common.errors import ForerunError
from forerun.core.network.network_file import parse_topology


class RingAllReduce:
    """The built-in ring: a message to the next rank in each round, those of the first half are reduced."""

    def steps(self, rank, n_ranks, size, costs):
        piece = size // n_ranks
        ready = Wait(ns=costs.endpoint_ns)
        yield ready
        for k in range(2 * (n_ranks - 1)):
            yield Send(to=(rank + 1) % n_ranks, size=piece, tag=k, after=[ready])
            got = Receive(source=(rank - 1) % n_ranks, size=piece, tag=k, after=[ready])
            yield got
            ready = Wait(ns=costs.endpoint_ns, after=[got])
            yield ready
            if k < n_ranks - 1:
                ready = Wait(ns=costs.reduction_ns(piece), after=[ready])
                yield ready


class DirectAllToAll:
    """The built-in direct all-to-all: all messages at once."""

    def steps(self, rank, n_ranks, size, costs):
        begin = Wait(ns=costs.endpoint_ns)
        yield begin
        for d in range(1, n_ranks):
            yield Send(to=(rank + d) % n_ranks, size=size // n_ranks, after=[begin])
            got = Receive(source=(rank - d) % n_ranks, size=size // n_ranks, after=[begin])
            yield got
            yield Wait(ns=costs.endpoint_ns, after=[got])


class Steps:
    """The steps of each rank, given by functions of nothing."""

    def __init__(self, *ranks):
        self.ranks = ranks

    def steps(self, rank, n_ranks, size, costs):
        return self.ranks[rank]() if rank < len(self.ranks) else ()


@settings(max_examples=60)
@given(network=networks, size=st.integers(100, 1 << 24), splits=st.integers(1, 4), active=st.integers(1, 3))
def test_a_custom_ring_is_the_built_in_ring(network, size, splits, active):
    of = system("oneRing", splits=splits, active=active)
    built_in = collective_times(network, of, CommType.ALL_REDUCE, size)[0]
    custom = collective_times(network, of, CommType.ALL_REDUCE, size, algorithm=RingAllReduce())[0]
    assert custom.tolist() == built_in.tolist()


@pytest.mark.parametrize("topology", ["ring:8", "ring:5", "switch:8", "fully-connected:6"])
@pytest.mark.parametrize("splits", [1, 3])
def test_a_custom_ring_is_the_built_in_ring_over_queues(topology, splits):
    network, of = parse_topology(f"{topology}@50/500"), system("ring", splits=splits)
    built_in = collective_times(network, of, CommType.ALL_REDUCE, 1 << 20, aware=True)[0]
    custom = collective_times(network, of, CommType.ALL_REDUCE, 1 << 20, aware=True, algorithm=RingAllReduce())[0]
    assert custom.tolist() == built_in.tolist()


@pytest.mark.parametrize("topology", ["ring:8", "switch:8", "mesh2d:4x2", "ring:4,switch:2"])
def test_a_custom_all_to_all_is_the_direct_one(topology):
    """Over queues they differ where a rank has got everything before its last message has arrived."""
    network, of = parse_topology(topology, [50], [500]), system("oneDirect", splits=3)
    built_in = collective_times(network, of, CommType.ALL_TO_ALL, 1 << 22)[0]
    custom = collective_times(network, of, CommType.ALL_TO_ALL, 1 << 22, algorithm=DirectAllToAll())[0]
    assert custom.tolist() == built_in.tolist()


def test_groups_run_custom_algorithms_too():
    network, of = parse_topology("ring:8@50/500,switch:2@25/700"), system("ring", "ring", splits=2)
    groups = strided_groups(16, 4, 2)
    built_in = collective_times(network, of, CommType.ALL_REDUCE, 1 << 20, groups)[0]
    custom = collective_times(network, of, CommType.ALL_REDUCE, 1 << 20, groups, algorithm=RingAllReduce())[0]
    assert custom.tolist() == built_in.tolist()


@pytest.mark.parametrize("n", [2, 3, 5, 8, 13])
def test_a_binomial_broadcast_takes_a_message_for_each_bit(n):
    size, message = 1 << 20, int(500 + (1 << 20) / 50)
    network = parse_topology(f"fully-connected:{n}@50/500")
    ends = collective_times(network, system("ring"), CommType.BROADCAST, size, algorithm=BinomialBroadcast())[0]
    rounds = (n - 1).bit_length()
    depth = [bin(rank).count("1") for rank in range(n)]
    arrives = [10]
    for rank in range(1, n):
        highest = 1 << (rank.bit_length() - 1)
        sends_before = rank.bit_length() - 1 - (rank - highest).bit_length()
        arrives.append(arrives[rank - highest] + (sends_before + 1) * message + 10)
    sends = [sum(rank + (1 << k) < n for k in range(rank.bit_length(), 8)) for rank in range(n)]
    assert ends.tolist() == [at + k * message for at, k in zip(arrives, sends, strict=True)]
    assert ends.max() <= 10 + rounds * message + 10 * max(depth)


def test_a_pipeline_is_faster_than_a_tree_for_many_bytes_and_slower_for_few():
    network, of = parse_topology("ring:16@50/500"), system("ring")
    times = {
        size: [
            collective_times(network, of, CommType.BROADCAST, size, aware=True, algorithm=algorithm)[0].max()
            for algorithm in (BinomialBroadcast(), RingBroadcast())
        ]
        for size in (1000, 1 << 28)
    }
    assert times[1000][0] < times[1000][1]
    assert times[1 << 28][0] > 3 * times[1 << 28][1]


def test_messages_meet_in_order_and_a_receive_may_come_after_its_message():
    def sender():
        first, second = Send(to=1, size=100), Send(to=1, size=200)
        return [first, second]

    def receiver():
        late = Wait(ns=5000)
        return [late, Receive(source=0, size=100, after=[late]), Receive(source=0, size=200)]

    network = parse_topology("ring:4@1/0")
    ends = collective_times(network, system("ring"), CommType.BROADCAST, 100, algorithm=Steps(sender, receiver))[0]
    assert ends.tolist() == [200, 5000, 0, 0]


STEP = Wait(ns=1)
BAD = [
    ([lambda: [Send(to=1, size=8)]], "message from rank 0 to rank 1 with tag 0 has no receive"),
    ([lambda: [Receive(source=1, size=8, tag=4)]], "message from rank 1 to rank 0 with tag 4 has no send"),
    ([lambda: [Send(to=1, size=8)], lambda: [Receive(source=0, size=9)]], "receives 9"),
    ([lambda: [Send(to=4, size=8)]], "another rank"),
    ([lambda: [Send(to=0, size=8)]], "another rank"),
    ([lambda: [Send(to=1, size=0)]], "size above 0"),
    ([lambda: [Wait(ns=-1)]], "below 0"),
    ([lambda: [Wait(ns=1.5)]], "whole numbers"),
    ([lambda: [Wait(ns="x")]], "whole numbers"),
    ([lambda: [STEP, STEP]], "again"),
    ([lambda: [Wait(ns=1, after=[STEP])]], "not given before"),
    ([lambda: ["send"]], "must be a Send"),
    ([lambda: 1 / 0], "ZeroDivisionError"),
    ([lambda: None], "TypeError"),
    (
        [
            lambda: [got := Receive(source=1, size=8), Send(to=1, size=8, after=[got])],
            lambda: [got := Receive(source=0, size=8), Send(to=0, size=8, after=[got])],
        ],
        "deadlock",
    ),
]


@pytest.mark.parametrize(("ranks", "problem"), BAD, ids=range(len(BAD)))
def test_wrong_algorithms_are_refused(ranks, problem):
    network = parse_topology("ring:4@50/500")
    with pytest.raises(ForerunError, match=problem):
        collective_times(network, system("ring"), CommType.BROADCAST, 1 << 10, algorithm=Steps(*ranks))


def test_algorithms_are_loaded_from_modules_and_files(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from dataclasses import dataclass\nfrom forerun.astrasim.astra.custom import Wait\n\n\n"
        "@dataclass\nclass Slow:\n    ns: int = 77\n\n"
        "    def steps(self, rank, n_ranks, size, costs):\n        yield Wait(ns=self.ns)\n"
    )
    network = parse_topology("ring:4@50/500")
    ends = collective_times(network, system("ring"), CommType.BROADCAST, 8, algorithm=load_algorithm(f"{path}:Slow"))[0]
    assert ends.tolist() == [77] * 4
    assert isinstance(load_algorithm("forerun.astrasim.astra.custom:RingBroadcast"), RingBroadcast)


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        ("mine", "module:Class"),
        ("no.such.module:Mine", "can't be imported"),
        ("no_such_file.py:Mine", "can't be imported"),
        ("forerun.astrasim.astra.custom:Nope", "no class Nope"),
        ("forerun.astrasim.astra.custom:Costs", "no class Costs with a method"),
        ("forerun.astrasim.astra.custom:load_algorithm", "no class"),
    ],
)
def test_algorithms_that_are_not_there(spec, problem):
    with pytest.raises(ForerunError, match=problem):
        load_algorithm(spec)


def ring_nodes(rank, n, piece):
    nodes, ready = [comp(duration_us=0)], (0,)
    for k in range(n - 1):
        nodes.append(send((rank + 1) % n, piece, k, ready))
        nodes.append(recv((rank - 1) % n, piece, k, ready))
        nodes.append(comp(duration_us=2, after=(len(nodes) - 1,)))
        ready = (len(nodes) - 1,)
    return nodes


def test_a_collective_runs_traces(tmp_path):
    """As ASTRA-sim reads them: every chunk runs the whole trace; a compute node takes 1 ns or its duration."""
    n, piece = 4, 1 << 16
    for rank in range(n):
        write_rank(tmp_path / f"gather.{rank}.et", trace(ring_nodes(rank, n, piece)))
    keys = {"all-gather-implementation-chakra": [str(tmp_path / "gather")]}
    network = parse_topology("switch:4@50/500", gib=True)
    message = int(2 * 500 + piece / (50 * 2**30 / 1e9))
    for splits in (1, 3):
        ends = collective_times(network, system(splits=splits, **keys), CommType.ALL_GATHER, 999)[0]
        assert ends.tolist() == [splits * (1 + (n - 1) * (message + 2000))] * n
    traces = [trace([collective(CommType.ALL_GATHER, 999)]) for _ in range(n)]
    walls = {
        fold: replay(traces, {}, Machine(system(splits=3, **keys), network), fold=fold).wall_ns
        for fold in (True, False)
    }
    assert walls == dict.fromkeys((True, False), int(ends.max()))


def test_traces_that_are_no_algorithm(tmp_path):
    network = parse_topology("switch:2@50/500")
    keys = {"all-gather-implementation-chakra": [str(tmp_path / "w")]}

    def run(*ranks):
        for rank, nodes in enumerate(ranks):
            write_rank(tmp_path / f"w.{rank}.et", trace(nodes))
        return collective_times(network, system(**keys), CommType.ALL_GATHER, 999)

    with pytest.raises(ForerunError, match="w"):
        collective_times(network, system(**keys), CommType.ALL_GATHER, 999)
    with pytest.raises(ForerunError, match="collective node"):
        run([collective(CommType.ALL_REDUCE, 100)], [comp()])
    with pytest.raises(ForerunError, match="cycle"):
        run([comp(after=(1,)), comp(after=(0,))], [comp()])
    with pytest.raises(ForerunError, match="no receive"):
        run([send(1, 8)], [comp()])
    assert np.all(run([send(1, 8)], [recv(0, 8)])[0] > 0)
