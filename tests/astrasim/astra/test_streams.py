"""Replay with CUDA-stream semantics: streams in order, overlap, the host, meetings, deadlocks."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_traces import collective, comp, programs, recv, send, trace

from forerun.astrasim.astra.remote_memory import RemoteMemory
from forerun.astrasim.astra.replay import Machine, replay
from forerun.astrasim.astra.single import collective_times
from forerun.astrasim.astra.streams import replay_streams, run_streams
from forerun.astrasim.astra.system import system_from
from forerun.astrasim.chakra.trace import CommType, NodeKind
from forerun.common.errors import ForerunError
from forerun.core.network.network_file import network_from
from forerun.core.program.types import N_STREAMS
from forerun.core.program.unfold import unfold

SYSTEM = {
    "preferred-dataset-splits": 4,
    "collective-optimization": "localBWAware",
    "local-mem-bw": 1600,
    "peak-perf": 900,
    "roofline-enabled": 1,
    "track-local-mem": 1,
    **{f"{name}-implementation": ["ring"] for name in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")},
}
PAIRS = {"r0": (0, 1), "r1": (2, 3), "c0": (0, 2), "c1": (1, 3)}
ALL_REDUCE_NS = 1000
BIG, SIZE = 9 * 10**8, 10**6
"""operations that take a microsecond, and bytes that take less"""


def machine(n=2, topology="Switch", aware=False, **system):
    network = network_from({"topology": [topology], "npus_count": [n], "bandwidth": [50], "latency": [500]}, "network")
    return Machine(system_from({**SYSTEM, **system}, "system"), network, aware=aware)


def streams(one, *numbers):
    return replace(one, stream=np.array(numbers, np.int32))


def host(duration_us, after=()):
    return comp(0, 0, after, is_cpu=True, duration_us=duration_us)


def kernel(duration_us, after=()):
    return comp(0, 0, after, duration_us=duration_us)


def times(result, rank=0):
    """(start, end) in ns of a rank's nodes, by row of its trace."""
    c = result.traced.class_of_rank[rank]
    flat, one = unfold(result.traced.program), result.traced.classes[c]
    nodes = slice(flat.class_ptr[c], flat.class_ptr[c + 1])
    start, end = np.empty((2, len(one.row)), np.int64)
    start[one.row], end[one.row] = result.timeline.start_ps[nodes] // 1000, result.timeline.end_ps[nodes] // 1000
    return list(zip(start.tolist(), end.tolist(), strict=True))


def all_reduce_ns(size, where, members=None):
    groups = () if members is None else (members,)
    return int(collective_times(where.network, where.system, CommType.ALL_REDUCE, size, groups, where.aware)[0].max())


@st.composite
def chains(draw):
    """Nodes of which each waits for the one before it."""
    nodes = []
    for step in range(draw(st.integers(1, 8))):
        after = (step - 1,) if step else ()
        if draw(st.booleans()):
            nodes.append(comp(draw(st.integers(1, 10**9)), draw(st.integers(1, 10**8)), after))
        else:
            kind = draw(st.sampled_from([CommType.ALL_REDUCE, CommType.ALL_GATHER, CommType.ALL_TO_ALL]))
            nodes.append(collective(kind, draw(st.integers(1000, 10**7)), None, after))
    return nodes


@settings(max_examples=40, deadline=None)
@given(chains())
def test_on_a_chain_both_semantics_agree_in_every_figure(nodes):
    traces = [trace(nodes)] * 4
    assert replay_streams(traces, {}, machine(4)) == replay(traces, {}, machine(4)).statistics


def test_on_a_chain_of_messages_both_semantics_end_together():
    traces = [
        trace([comp(BIG, SIZE), send(1, 10**6, 1, (0,)), recv(1, 10**6, 2, (1,)), comp(BIG, SIZE, (2,))]),
        trace([recv(0, 10**6, 1), comp(BIG, SIZE, (0,)), send(0, 10**6, 2, (1,))]),
    ]
    slots, ours = replay(traces, {}, machine()).statistics, replay_streams(traces, {}, machine())
    assert [rank.wall_time for rank in ours] == [rank.wall_time for rank in slots]
    assert [rank.gpu_time for rank in ours] == [rank.gpu_time for rank in slots]


@pytest.mark.parametrize("topology", ["Switch", "Ring", "FullyConnected"])
@settings(max_examples=30, deadline=None)
@given(programs(groups=PAIRS, messages=False))
def test_without_messages_slots_and_streams_issue_alike(topology, traces):
    # Nodes of no bytes end at once in a slot, and make it forget to look for the next.
    traces = [replace(one, tensor_size=np.maximum(one.tensor_size, 1)) for one in traces]
    where = machine(4, topology)
    slots, ours = replay(traces, PAIRS, where).statistics, replay_streams(traces, PAIRS, where)
    assert [rank.gpu_time for rank in ours] == [rank.gpu_time for rank in slots]
    # A slot is held by whoever comes first; lanes are taken by those that can start.
    assert max(rank.wall_time for rank in ours) <= 2 * max(rank.wall_time for rank in slots)


def test_compute_and_communication_overlap_and_what_is_left_is_exposed():
    where, size = machine(), 1 << 20
    comm_ns = all_reduce_ns(size, where)
    nodes = [collective(CommType.ALL_REDUCE, size), comp(BIG, SIZE), comp(BIG, SIZE, (0, 1))]
    rank = replay_streams([trace(nodes)] * 2, {}, where)[0]
    assert comm_ns > 1000
    assert rank.wall_time == comm_ns + 1000
    assert (rank.gpu_time, rank.comm_time, rank.exposed_communication) == (2000, comm_ns, comm_ns - 1000)


def test_waiting_for_other_ranks_is_not_communication():
    where, size = machine(), 1 << 20
    slow, fast = (
        trace([kernel(50), collective(CommType.ALL_REDUCE, size, None, (0,))]),
        trace([kernel(1), collective(CommType.ALL_REDUCE, size, None, (0,))]),
    )
    ranks = replay_streams([slow, fast], {}, where)
    assert [rank.wall_time for rank in ranks] == [50_000 + all_reduce_ns(size, where)] * 2
    assert ranks[1].exposed_communication == all_reduce_ns(size, where)


def test_a_stream_runs_in_order_of_launch_even_where_a_later_node_is_ready():
    nodes = [kernel(10), kernel(5, (0,)), kernel(7)]
    one = trace(nodes)
    in_order = run_streams([streams(one, 7, 9, 9)] * 2, {}, machine())
    assert times(in_order) == [(0, 10_000), (10_000, 15_000), (15_000, 22_000)]
    apart = run_streams([streams(one, 7, 9, 11)] * 2, {}, machine())
    assert times(apart) == [(0, 10_000), (10_000, 15_000), (0, 7_000)]
    assert apart.statistics[0].gpu_time == 15_000


def test_where_the_host_is_slow_kernels_wait_for_it():
    nodes = [host(30), kernel(10, (0,)), host(30, (0,)), kernel(10, (2,)), host(30, (2,)), kernel(10, (4,))]
    rank = replay_streams([streams(trace(nodes), 0, 7, 0, 7, 0, 7)] * 2, {}, machine())[0]
    assert (rank.wall_time, rank.gpu_time, rank.cpu_time) == (100_000, 30_000, 90_000)


def test_where_the_host_is_ahead_it_does_not_count():
    nodes = [host(1), kernel(10, (0,)), host(1, (0,)), kernel(10, (2,)), host(1, (2,)), kernel(10, (4,))]
    rank = replay_streams([streams(trace(nodes), 0, 7, 0, 7, 0, 7)] * 2, {}, machine())[0]
    assert rank.wall_time == 31_000


def test_measured_durations_go_over_the_roofline_unless_told_otherwise():
    traces = [trace([comp(BIG, SIZE, duration_us=77)])] * 2
    assert replay_streams(traces, {}, machine())[0].wall_time == 77_000
    assert replay_streams(traces, {}, machine(), measured=False)[0].wall_time == 1000
    rank = replay_streams(traces, {}, machine())[0]
    assert rank.avg_compute_util_pct == pytest.approx(100 / 77, abs=0.002)


def test_two_streams_of_collectives_run_beside_each_other():
    where, size = machine(4), 1 << 20
    nodes = [collective(CommType.ALL_REDUCE, size, "a"), collective(CommType.ALL_REDUCE, size, "b")]
    groups = {"a": (0, 1, 2, 3), "b": (0, 1, 2, 3)}
    one = trace(nodes)
    together = replay_streams([streams(one, 20, 24)] * 4, groups, where)[0].wall_time
    one_by_one = replay_streams([streams(one, 20, 20)] * 4, groups, where)[0].wall_time
    assert together == all_reduce_ns(size, where)
    assert one_by_one == 2 * together


def test_a_broadcast_takes_what_an_all_gather_of_the_buffer_takes():
    where = machine(4)
    gathered = collective_times(where.network, where.system, CommType.ALL_GATHER, 1 << 18)[0].max()
    rank = replay_streams([trace([collective(CommType.BROADCAST, 1 << 20)])] * 4, {}, where)[0]
    assert rank.wall_time == gathered


def test_a_collective_of_one_rank_takes_no_time():
    traces = [trace([collective(CommType.ALL_REDUCE, 8, str(rank))]) for rank in range(2)]
    assert [rank.wall_time for rank in replay_streams(traces, {"0": (0,), "1": (1,)}, machine())] == [0, 0]


def test_ranks_that_see_the_network_differently_are_apart_and_others_are_folded():
    nodes = [collective(CommType.ALL_REDUCE, 1 << 20, "x")]
    traces = [replace(trace(nodes), group_names=("a" if rank in (0, 1) else "b",)) for rank in range(4)]
    near = run_streams(traces, {"a": (0, 1), "b": (2, 3)}, machine(4, "Ring"))
    assert len(near.traced.classes) == 1
    traces = [replace(trace(nodes), group_names=("a" if rank in (0, 1, 2) else "b",)) for rank in range(5)]
    apart = run_streams(traces, {"a": (0, 1, 2), "b": (3, 4)}, machine(5, "Ring"))
    assert len(apart.traced.classes) == 5
    where = machine(5, "Ring")
    expected = [all_reduce_ns(1 << 20, where, (0, 1, 2))] * 3 + [all_reduce_ns(1 << 20, where, (3, 4))] * 2
    assert [rank.wall_time for rank in apart.statistics] == expected


def test_folded_ranks_have_the_figures_of_unfolded_ones():
    nodes = [comp(BIG, SIZE), collective(CommType.ALL_REDUCE, 1 << 20, "x"), comp(BIG, SIZE, (0,))]
    nodes.append(collective(CommType.ALL_GATHER, 1 << 16, None, (1, 2)))
    pairs = {"a": (0, 1), "b": (2, 3)}
    traces = [replace(trace(nodes), group_names=("a" if rank in (0, 1) else "b",)) for rank in range(4)]
    other = trace([*nodes, kernel(0, (0,))])
    unfolded = [*traces[:3], replace(other, group_names=("b",))]
    folded = run_streams(traces, pairs, machine(4))
    apart = run_streams(unfolded, pairs, machine(4))
    assert (len(folded.traced.classes), len(apart.traced.classes)) == (1, 4)
    assert folded.statistics[:3] == apart.statistics[:3]


def test_remote_memory_and_congestion_are_those_of_the_machine():
    nodes = [{"kind": NodeKind.MEM_LOAD, "tensor_size": 1000}, send(1, 10**6)]
    where = replace(machine(), memory=RemoteMemory("PER_NPU_MEMORY_EXPANSION", 100, 10))
    one = replay_streams([trace(nodes), trace([recv(0, 10**6)])], {}, where)
    assert one[0].remote_mem_time == where.memory.runtime_ns(np.array([1000]))[0]
    # Through a switch the whole message is sent twice; without congestion it passes.
    unaware, aware = (replay_streams([trace(nodes[1:]), trace([recv(0, 10**6)])], {}, machine(aware=a)) for a in (0, 1))
    slots = replay([trace(nodes[1:]), trace([recv(0, 10**6)])], {}, machine(aware=True)).statistics
    assert aware[1].wall_time == slots[1].wall_time > unaware[1].wall_time


def test_streams_that_wait_for_each_other_are_named_with_their_nodes():
    a, b = collective(CommType.ALL_REDUCE, 64, "a"), collective(CommType.ALL_REDUCE, 64, "b")
    first = replace(trace([a, b]), group_names=("a", "b"), names=("grads", "logits"))
    second = streams(trace([b, a]), 20, 20)
    with pytest.raises(ForerunError) as caught:
        replay_streams([streams(first, 20, 20), second], {"a": (0, 1), "b": (0, 1)}, machine())
    text = str(caught.value)
    assert "deadlock: these nodes never run: rank 0 node 1 (grads): all_reduce of 64 bytes in group a" in text
    assert "rank 1 node 1: all_reduce of 64 bytes in group b" in text


def test_without_streams_the_same_traces_find_an_order():
    a, b = collective(CommType.ALL_REDUCE, 64, "a"), collective(CommType.ALL_REDUCE, 64, "b")
    ranks = replay_streams([trace([a, b]), trace([b, a])], {"a": (0, 1), "b": (0, 1)}, machine())
    assert ranks[0].wall_time == ranks[1].wall_time == 2 * all_reduce_ns(64, machine())


def test_ranks_that_wait_for_each_other_in_a_circle_are_a_deadlock():
    a, b = collective(CommType.ALL_REDUCE, 64, "a"), collective(CommType.ALL_REDUCE, 64, "b")
    traces = [trace([a, {**b, "after": (0,)}]), trace([b, {**a, "after": (0,)}])]
    with pytest.raises(ForerunError, match="deadlock: these nodes never run: rank 0 node 1: all_reduce"):
        replay_streams(traces, {"a": (0, 1), "b": (0, 1)}, machine())


def test_wrong_numbers_of_traces_and_missing_rates_are_refused():
    with pytest.raises(ForerunError, match="the network has 2 ranks, but there are traces of 1"):
        replay_streams([trace([comp()])], {}, machine())
    with pytest.raises(ForerunError, match="need local-mem-bw and peak-perf"):
        replay_streams([trace([comp()])] * 2, {}, machine(**{"peak-perf": 0}))
    with pytest.raises(ForerunError, match=r"all_reduce of 64 bytes of ranks 0, 1: .*all-reduce-implementation"):
        replay_streams(
            [trace([collective(CommType.ALL_REDUCE, 64)])] * 2, {}, machine(**{"all-reduce-implementation": []})
        )


@st.composite
def streamed(draw):
    """Equal ranks with measured kernels, host work and collectives on some streams."""
    nodes, numbers = [], []
    for step in range(draw(st.integers(1, 14))):
        after = tuple(sorted(draw(st.sets(st.integers(0, step - 1), max_size=3)))) if step else ()
        what = draw(st.sampled_from(["kernel", "host", "collective"]))
        if what == "host":
            nodes.append(host(draw(st.integers(0, 50)), after))
        elif what == "kernel":
            nodes.append(kernel(draw(st.integers(0, 50)), after))
        else:
            nodes.append(collective(CommType.ALL_REDUCE, draw(st.integers(1000, 10**6)), None, after))
        numbers.append(draw(st.integers(1, 3)))
    named = draw(st.booleans())
    return streams(trace(nodes), *numbers) if named else trace(nodes)


@settings(max_examples=60, deadline=None)
@given(streamed())
def test_a_run_takes_as_long_as_its_critical_path_and_its_busiest_stream(one):
    result = run_streams([one] * 2, {}, machine())
    spans = times(result)
    wall_ns = result.statistics[0].wall_time
    duration = [end - start for start, end in spans]
    reached = [0] * len(one)
    for row in range(len(one)):
        before = one.data[one.data_ptr[row] : one.data_ptr[row + 1]].tolist()
        assert all(spans[p][1] <= spans[row][0] for p in before)
        reached[row] = duration[row] + max((reached[p] for p in before), default=0)
    assert wall_ns >= max(reached)
    block = result.traced.program.blocks[0]
    row = result.traced.classes[0].row
    for lane in range(N_STREAMS):
        mine = sorted(spans[row[k]] for k in np.flatnonzero(block.stream == lane).tolist())
        assert wall_ns >= sum(end - start for start, end in mine)
        assert all(a[1] <= b[0] for a, b in pairwise(mine))


@settings(max_examples=40, deadline=None)
@given(programs(groups=PAIRS))
def test_random_traces_end_on_all_ranks(traces):
    ranks = replay_streams(traces, PAIRS, machine(4))
    assert all(rank.wall_time >= rank.gpu_time + rank.exposed_communication for rank in ranks)
    assert all(rank.comm_time >= rank.exposed_communication for rank in ranks)


@st.composite
def nonsense(draw):
    """Nodes of any kind with any figures, waiting for any nodes."""
    n = draw(st.integers(1, 6))
    nodes = []
    for row in range(n):
        others = st.sampled_from([k for k in range(n) if k != row]) if n > 1 else st.nothing()
        nodes.append(
            {
                "kind": draw(st.sampled_from(list(NodeKind))),
                "is_cpu": draw(st.booleans()),
                "duration_us": draw(st.integers(0, 10)),
                "num_ops": draw(st.integers(0, 1 << 62)),
                "tensor_size": draw(st.integers(0, 1 << 40)),
                "comm_type": draw(st.sampled_from(list(CommType)[1:])),
                "comm_size": draw(st.integers(0, 1 << 30)),
                "comm_tag": draw(st.integers(-1, 1)),
                "peer": draw(st.integers(-1, 3)),
                "group": draw(st.sampled_from([None, "a", "b", "?"])),
                "after": tuple(draw(st.lists(others, max_size=2))) if n > 1 else (),
            }
        )
    one = trace(nodes)
    return streams(one, *draw(st.lists(st.integers(-1, 20), min_size=n, max_size=n))) if draw(st.booleans()) else one


@settings(max_examples=100, deadline=None)
@given(st.lists(nonsense(), min_size=2, max_size=2), st.booleans())
def test_any_traces_give_figures_or_an_error(traces, equal):
    traces = traces[:1] * 2 if equal else traces
    try:
        ranks = replay_streams(traces, {"a": (0, 1), "b": (1,)}, machine())
    except ForerunError:
        return
    assert all(rank.wall_time >= rank.gpu_time for rank in ranks)
