"""Figures of replays, wire times and files of case folders, by hand."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from collective_building import system
from random_traces import collective, comp, recv, send, trace

from forerun.astrasim.astra.case import read_case
from forerun.astrasim.astra.collective_cases import strided_groups
from forerun.astrasim.astra.collective_sweep import Setting, bus_factor, default_algorithms, fitting_setting, sweep
from forerun.astrasim.astra.custom import Costs
from forerun.astrasim.astra.hot_links import HotLink, hottest_links
from forerun.astrasim.astra.remote_memory import NO_EXPANSION, RemoteMemory, read_remote_memory
from forerun.astrasim.astra.replay import Machine, replay
from forerun.astrasim.astra.single import collective_times
from forerun.astrasim.astra.statistics import peak_memory
from forerun.astrasim.astra.streams import replay_streams, run_streams
from forerun.astrasim.astra.system import system_from
from forerun.astrasim.chakra.trace import CommType, NodeKind
from forerun.astrasim.chakra.writer import write_rank
from forerun.common.errors import ForerunError
from forerun.core.network.network_file import parse_topology

SYSTEM = {
    "endpoint-delay": 10,
    "local-mem-bw": 1000,
    "peak-perf": 1,
    "roofline-enabled": 1,
    "track-local-mem": 1,
    "all-gather-implementation": ["ring"],
    "reduce-scatter-implementation": ["ring"],
    "all-reduce-implementation": ["ring"],
    "all-to-all-implementation": ["ring"],
}
"""1 operation a byte: 1,000 bytes or operations take 1 ns"""


def machine(n=2, aware=False, memory=NO_EXPANSION, **keys):
    return Machine(system_from({**SYSTEM, **keys}, "s"), parse_topology(f"ring:{n}@1GBps/100"), memory, aware)


def load(size, after=()):
    return {"kind": NodeKind.MEM_LOAD, "tensor_size": size, "after": after}


def store(size, after=()):
    return {"kind": NodeKind.MEM_STORE, "tensor_size": size, "after": after}


def test_figures_of_a_rank():
    """Compute for 4 and 6 us, a host node beside it for 5, a load and a store of 2 us each, and a gather at the end."""
    nodes = [
        comp(4_000_000, 1_000_000),  # 4 us, bound by compute, 4 operations a byte
        comp(3_000_000, 6_000_000, (0,)),  # 6 us, bound by memory, half an operation a byte
        comp(duration_us=5, is_cpu=True),
        load(1900, (0,)),
        store(1900, (3,)),
        collective(CommType.ALL_GATHER, 880, after=(1,)),
    ]
    memory = RemoteMemory(True, 100, 1.0)
    found = replay([trace(nodes)] * 2, {}, machine(memory=memory)).statistics[0]
    gather = 10 + 880 + 100 + 10
    assert found.wall_time == found.wall_cycles_finished == 10_000 + gather
    assert (found.gpu_time, found.cpu_time, found.remote_mem_time, found.comm_time) == (10_000, 5_000, 4_000, gather)
    assert found.exposed_communication == gather
    total = 1 + 15_000  # ASTRA-sim counts a nanosecond more, and nodes of the host too
    assert found.compute_bound_pct == round(100 * 4_000 / total, 3)
    assert found.avg_compute_util_pct == round(100 * (4_000 + 0.5 * 6_000) / total, 3)
    assert found.avg_mem_util_pct == round(100 * (0.25 * 4_000 + 6_000) / total, 3)
    assert found.avg_op_intensity == round((4 * 4_000 + 0.5 * 6_000) / total, 3)


def test_of_a_trace_that_is_only_replayed_every_node_but_the_hosts_is_busy():
    nodes = [comp(duration_us=3), collective(CommType.ALL_GATHER, 880, duration_us=4, after=(0,))]
    nodes.append(comp(duration_us=9, is_cpu=True))
    keys = {"replay-only": 1, "roofline-enabled": 0, "track-local-mem": 0}
    found = replay([trace(nodes)] * 2, {}, machine(**keys)).statistics[0]
    assert (found.wall_time, found.exposed_communication) == (9000, 2000)
    assert (found.gpu_time, found.comm_time, found.cpu_time) == (3000, 4000, 9000)
    assert (found.peak_memory_bytes, found.avg_op_intensity) == (None, None)


@pytest.mark.parametrize("kind", [NodeKind.INVALID, NodeKind.METADATA])
def test_nodes_that_do_nothing_end_at_once(kind):
    nodes = [comp(10**6, 10**6), {"kind": kind, "after": (0,)}, comp(0, 0, (0,)), comp(2 * 10**6, 10**6, (0,))]
    result = replay([trace(nodes)] * 2, {}, machine()).run.result
    spans = list(zip(result.start_ns.tolist(), result.end_ns.tolist(), strict=True))[:4]
    assert spans == [(0, 1000), (1000, 1000), (1000, 1000), (1000, 3000)]


@pytest.mark.parametrize(
    ("distance", "topology", "actors"), [(1, "ring:4", 1), (2, "ring:4", 1), (1, "mesh2d:4x1", 4), (1, "switch:4", 1)]
)
def test_ranks_that_send_equally_far_are_simulated_once(distance, topology, actors):
    """A message to the next rank and one from the one before; on a line the last rank sends over all others."""
    traces = [
        trace([comp(1000, 1000), send((r + distance) % 4, 500, 3, (0,)), recv((r - distance) % 4, 500, 3, (0,))])
        for r in range(4)
    ]
    where = Machine(machine().system, parse_topology(f"{topology}@1GBps/100"))
    folded, whole = replay(traces, {}, where), replay(traces, {}, where, fold=False)
    assert len(set(folded.actor_of_rank)) == actors
    assert folded.statistics == whole.statistics


def test_ranks_of_two_kinds_are_two_classes():
    first = [comp(2000, 1000), collective(CommType.ALL_REDUCE, 4000, after=(0,))]
    other = [comp(1000, 1000), collective(CommType.ALL_REDUCE, 4000, after=(0,))]
    traces = [trace(first), trace(other), trace(first), trace(other)]
    folded, whole = replay(traces, {}, machine(4)), replay(traces, {}, machine(4), fold=False)
    assert folded.statistics == whole.statistics
    apart = [
        replace(one, group_names=("a" if r % 2 == 0 else "b",))
        for r, one in enumerate(
            trace([comp((1 + r % 2) * 1000, 1000), collective(CommType.ALL_REDUCE, 4000, "x", (0,))]) for r in range(4)
        )
    ]
    groups = {"a": (0, 2), "b": (1, 3)}
    folded, whole = (replay(apart, groups, machine(4), fold=fold) for fold in (True, False))
    assert folded.actor_of_rank == (0, 1, 0, 1)
    assert folded.statistics == whole.statistics


def test_memory_lives_from_its_first_write_or_the_start_to_its_last_read_or_for_ever():
    weight, early, late, kept = ("w", 1000), ("e", 200), ("l", 30), ("k", 4)
    nodes = [
        comp(1000, 1000, inputs=[weight], outputs=[early]),
        comp(1000, 1000, (0,), inputs=[early], outputs=[late, kept]),
        comp(1000, 1000, (1,), inputs=[weight, late]),
        comp(1000, 1000, (2,), inputs=[late]),
    ]
    one = trace(nodes)
    lowered = replay([one] * 2, {}, machine()).traces[0]
    time = np.arange(4)
    assert peak_memory(lowered, time, time + 1, time) == (1234, 1000)
    # late is written only after its only read has ended: it lives from the start
    swapped = peak_memory(lowered, time, time + 1, np.array([0, 3, 1, 2]))
    assert swapped == (1234, 1030)
    assert replay([one] * 2, {}, machine()).statistics[0].peak_memory_bytes == 1234
    assert peak_memory(replace(lowered, trace=replace(one, tensor_bytes=np.zeros(0))), time, time, time) == (0, 0)


def test_memory_that_is_freed_counts_no_more():
    nodes = [comp(1000, 1000, outputs=[("a", 5)])]
    nodes += [comp(1000, 1000, (k,), inputs=[("abc"[k], 5)], outputs=[("bcd"[k], 5)]) for k in range(3)]
    assert replay([trace(nodes)] * 2, {}, machine()).statistics[0].peak_memory_bytes == 10


def test_memory_that_nothing_reads_lives_for_ever():
    nodes = [comp(1000, 1000, tuple(range(k)), outputs=[("abcd"[k], 5 + k)]) for k in range(4)]
    assert replay([trace(nodes)] * 2, {}, machine()).statistics[0].peak_memory_bytes == 5 + 6 + 7 + 8
    one = trace([*nodes, comp(1000, 1000, (3,), inputs=[("w", 100)])])
    assert replay([one] * 2, {}, machine()).statistics[0].peak_memory_bytes == 100 + 5 + 6 + 7 + 8


@pytest.mark.parametrize(("peer", "right"), [(-1, False), (0, False), (1, True), (2, False)])
def test_a_message_goes_to_another_rank(peer, right):
    traces = [trace([send(peer, 100)]), trace([recv(0, 100)])]
    if right:
        assert replay(traces, {}, machine()).statistics[0].wall_cycles_finished > 0
    else:
        with pytest.raises(ForerunError, match="its peer must be another rank, 0 to 1"):
            replay(traces, {}, machine())


def test_streams_count_kernels_and_those_that_take_no_time():
    first = [comp(0, 0), comp(5000, 1000), comp(0, 0, duration_us=2), comp(0, 0, is_cpu=True, duration_us=1)]
    second = [comp(0, 0), comp(0, 0), send(0, 100)]
    third = [recv(1, 100)]
    found = run_streams([trace([*first, recv(1, 100)]), trace([*second, send(2, 100)]), trace(third)], {}, machine(3))
    assert (found.kernels, found.untimed) == (5, 3)


def test_the_rates_of_measured_kernels_are_their_work_over_their_time():
    """One of 4 us for 1,000,000 operations on 500,000 bytes, one by the roofline, one without work, one of the host."""
    nodes = [
        comp(1_000_000, 500_000, duration_us=4),
        comp(2_000_000, 1_000_000, (0,)),
        comp(0, 0, (1,), duration_us=5),
        comp(9_000_000, 10, (2,), duration_us=6, is_cpu=True),
    ]
    found = replay_streams([trace(nodes)] * 2, {}, machine())[0]
    total = 1 + 4_000 + 2_000 + 5_000 + 6_000
    assert found.wall_time == 17_000
    assert (found.gpu_time, found.cpu_time) == (11_000, 6_000)
    assert found.compute_bound_pct == round(100 * 2_000 / total, 3)
    assert found.avg_compute_util_pct == round(100 * (0.25 * 4_000 + 2_000) / total, 3)
    assert found.avg_mem_util_pct == round(100 * (0.125 * 4_000 + 0.5 * 2_000) / total, 3)
    assert found.avg_op_intensity == round(2 * (4_000 + 2_000) / total, 3)


def test_streams_time_messages_and_collectives_as_alone():
    nodes = [[send(2, 1000, 1), collective(CommType.BROADCAST, 4000, after=(0,))],
             [collective(CommType.BROADCAST, 4000)],
             [recv(0, 1000, 1), collective(CommType.BROADCAST, 4000, after=(0,))],
             [collective(CommType.BROADCAST, 4000)]]  # fmt: skip
    gather = 10 + 3 * (1000 + 100 + 10)
    for aware, message in ((False, 1000 + 2 * 100), (True, 2 * (1000 + 100))):
        found = replay_streams([trace(each) for each in nodes], {}, machine(4, aware))
        assert {one.wall_time for one in found} == {message + gather}


WIRE = [
    ("ring:4", "ring", CommType.ALL_GATHER, 3 * 4000),
    ("ring:4", "ring", CommType.REDUCE_SCATTER, 3 * 1000),
    ("ring:4", "ring", CommType.ALL_REDUCE, 6 * 1000),
    ("ring:4", "ring", CommType.ALL_TO_ALL, 6 * 1000),
    ("ring:5", "direct", CommType.ALL_TO_ALL, 800 * (1 + 2)),
    ("ring:4", "direct", CommType.ALL_REDUCE, 2 * 1000 * (1 + 1 + 2) // 2),
    ("switch:4", "direct", CommType.ALL_REDUCE, 2 * 1000 * 3),
    ("fully-connected:4", "direct", CommType.ALL_REDUCE, 2 * 1000),
    ("switch:4", "halvingDoubling", CommType.ALL_REDUCE, 2 * (2000 + 1000)),
    ("fully-connected:4", "halvingDoubling", CommType.ALL_REDUCE, 2 * 2000),
    ("ring:4", "halvingDoubling", CommType.ALL_REDUCE, None),
    ("switch:4", "doubleBinaryTree", CommType.ALL_REDUCE, None),
]


@pytest.mark.parametrize(("topology", "algorithm", "kind", "load"), WIRE)
@pytest.mark.parametrize("splits", [1, 4])
def test_the_busiest_link_carries_what_the_algorithm_sends(topology, algorithm, kind, load, splits):
    """At 1 byte a ns; all chunks go over the same links."""
    network = parse_topology(f"{topology}@1GBps/100")
    found = collective_times(network, system(algorithm, splits=splits), kind, 4000 * splits).wire_ns
    assert found == (None if load is None else load * splits)


def test_dimensions_have_links_of_their_own_and_gathers_go_backward():
    network = parse_topology("ring:2@1GBps/100,switch:4@2GBps/100")
    of = system("ring", "ring")
    scatter, reduce = 4000 / 2, 6 * (2000 / 4) / 2
    assert collective_times(network, of, CommType.ALL_REDUCE, 4000).wire_ns == max(scatter, reduce)
    switched = parse_topology("switch:2@1GBps/100,ring:4@2GBps/100")
    assert collective_times(switched, of, CommType.ALL_REDUCE, 4000).wire_ns == 2 * scatter
    plain = system("ring", "ring", optimization="baseline")
    assert collective_times(network, plain, CommType.ALL_REDUCE, 4000).wire_ns == max(2 * 2000, 6 * 1000 / 2)


def test_groups_load_the_links_between_their_neighbours():
    """Rings of every second rank pass two links for each message; all-gather of 1000 bytes in groups of 4."""
    network, of = parse_topology("ring:8@1GBps/100"), system("ring")
    near, far = strided_groups(8, 4, 1), strided_groups(8, 4, 2)
    assert collective_times(network, of, CommType.ALL_GATHER, 1000, far).wire_ns == 3 * 1000 * 2
    # the way back of 0, 1, 2, 3 has three hops: in the mean of all links (3 + 3) / 4
    assert collective_times(network, of, CommType.ALL_GATHER, 1000, near).wire_ns == 3 * 1000 * 6 / 4
    switch = parse_topology("switch:8@1GBps/100")
    assert collective_times(switch, of, CommType.ALL_GATHER, 1000, far).wire_ns == 3 * 1000


def test_hottest_links_are_the_busiest_that_carry_anything():
    network = parse_topology("ring:3@1GBps/100")
    links = network.topology().links()
    n = len(links)
    run = SimpleNamespace(link_busy_ns=np.arange(n) * 10, link_bytes=np.arange(n) * 7)
    expected = [HotLink(int(links.src[k]), int(links.dst[k]), k * 10 / 200, k * 7) for k in range(n - 1, 0, -1)]
    assert hottest_links(network, run, 200, 2) == tuple(expected[:2])
    assert hottest_links(network, run, 200, 100) == tuple(expected)


def test_bandwidths_of_a_sweep():
    """A ring of 4 at 1 byte a ns: an all-gather of 4,000 bytes in all takes 3 messages of 1,000."""
    setting = Setting(parse_topology("ring:4@1GBps/100"), system("ring", **{"endpoint-delay": 10}))
    (point,) = sweep(setting, "all_gather", [4000], ["ring"])
    time = 10 + 3 * (1000 + 100 + 10)
    assert (point.size_bytes, point.time_ns, point.unqueued_ns, point.beyond_links) == (4000, time, time, False)
    assert point.algbw_gbps == pytest.approx(4000 / time)
    assert point.busbw_gbps == pytest.approx(3000 / time)
    assert [bus_factor(name, 4) for name in ("broadcast", "all_reduce", "all_gather")] == [1.0, 1.5, 0.75]
    serial = replace(setting, serial=True, system=system("direct", **{"endpoint-delay": 10}))
    (point,) = sweep(serial, "all_to_all", [4000], ["direct"])
    assert point.unqueued_ns == 10 + 1000 + 2 * 100 + 10
    assert point.time_ns == max(point.unqueued_ns, 2000, 3000 / 2)


def test_a_reduction_needs_memory():
    assert Costs(10, 16e9).reduction_ns(1600) == 3 * 100
    for none in (0.0, -1.0):
        with pytest.raises(ForerunError, match="local-mem-bw above 0"):
            Costs(10, none).reduction_ns(1600)


@pytest.mark.parametrize(
    ("topology", "keys", "size", "problem"),
    [
        ("ring:4@1e9GBps/0", {"local-mem-bw": 1e-9}, 1 << 40, "longer than a simulation can count"),
        ("ring:4@1e-9GBps/0", {}, 1 << 40, "longer than a simulation can count"),
        ("ring:4@1GBps/0", {}, 1 << 53, "messages of up to 9,007,199,254,740,992 bytes are too large"),
        ("ring:4@1GBps/0", {}, 1 << 40, None),
    ],
)
def test_times_that_do_not_fit_64_bits_are_refused(topology, keys, size, problem):
    of = system("ring", **{"local-mem-bw": 1e9, **keys})
    if problem is None:
        assert collective_times(parse_topology(topology), of, CommType.ALL_REDUCE, size).ends_ns.max() > 1 << 40
        return
    with pytest.raises(ForerunError, match=problem):
        collective_times(parse_topology(topology), of, CommType.ALL_REDUCE, size)


def test_what_a_sweep_runs_by_default():
    assert not Setting(parse_topology("ring:4@1/1"), system("ring")).aware
    assert default_algorithms("all_reduce") == ["ring", "direct", "halvingDoubling", "doubleBinaryTree"]
    assert default_algorithms("all_gather") == ["ring", "direct", "halvingDoubling"]
    assert default_algorithms("all_to_all") == ["ring", "direct"]
    assert default_algorithms("all_to_all", grouped=True) == ["ring"]
    assert default_algorithms("broadcast", grouped=True) == ["binomial", "ringPipeline"]
    closed, queued = (
        fitting_setting(parse_topology(f"{name}@1/1"), system("ring")) for name in ("ring:4", "mesh2d:2x2")
    )
    assert (closed.aware, closed.serial, queued.aware, queued.serial) == (False, True, True, False)


def written(folder, name, data):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_remote_memory_of_a_file(tmp_path):
    assert read_remote_memory(None) == NO_EXPANSION
    none = written(tmp_path, "m.json", {"memory-type": "NO_MEMORY_EXPANSION"})
    assert read_remote_memory(none) == NO_EXPANSION
    given = {"memory-type": "PER_NPU_MEMORY_EXPANSION", "remote-mem-latency": 0, "remote-mem-bw": 4}
    found = read_remote_memory(written(tmp_path, "m.json", given))
    assert found == RemoteMemory(True, 0, 4.0)
    assert found.runtime_ns(np.array([0, 7, 8])).tolist() == [0, 1, 2]
    with pytest.raises(ForerunError, match="says there is none"):
        NO_EXPANSION.runtime_ns(np.array([1]))


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({"memory-type": "POOL"}, "memory-type 'POOL' is not simulated"),
        ({}, "not a remote memory file"),
        ([], "not a remote memory file"),
        ({"memory-type": "PER_NPU_MEMORY_EXPANSION", "remote-mem-bw": 4}, "not a remote memory file"),
        ({"memory-type": "PER_NPU_MEMORY_EXPANSION", "remote-mem-latency": -1, "remote-mem-bw": 4}, "at least 0"),
        ({"memory-type": "PER_NPU_MEMORY_EXPANSION", "remote-mem-latency": 1, "remote-mem-bw": 0}, "above 0"),
    ],
)
def test_remote_memory_that_makes_no_sense_is_one_line(data, problem, tmp_path):
    with pytest.raises(ForerunError, match=problem):
        read_remote_memory(written(tmp_path, "m.json", data))


@pytest.fixture
def case(tmp_path):
    folder = tmp_path / "mine"
    for rank in range(2):
        (folder / "et").mkdir(parents=True, exist_ok=True)
        write_rank(folder / "et" / f"w.{rank}.et", trace([comp(1000, 1000), load(100)]))
    return folder


def put_system(folder, n=2):
    written(folder, "system.json", SYSTEM)
    written(folder, "network.yml", f"topology: [Ring]\nnpus_count: [{n}]\nbandwidth: [1]\nlatency: [100]\n")


def test_a_case_has_one_system_of_its_own_name(case):
    put_system(case)
    written(
        case,
        "remote_memory.json",
        {"memory-type": "PER_NPU_MEMORY_EXPANSION", "remote-mem-latency": 5, "remote-mem-bw": 4},
    )
    found = read_case(case)
    assert (list(found.machines), len(found.traces), dict(found.comm_groups)) == (["mine"], 2, {})
    one = found.machines["mine"]
    assert (one.aware, one.memory, one.network.n_npus) == (False, RemoteMemory(True, 5, 4.0), 2)
    assert read_case(case, aware=True).machines["mine"].aware
    written(case, "comm_group.json", {"7": [0, 1]})
    assert dict(read_case(case).comm_groups) == {"7": (0, 1)}
    written(case, "metrics.json", {"systems": {"theirs": {"congestion_aware": True}}})
    assert [(name, one.aware) for name, one in read_case(case).machines.items()] == [("theirs", True)]
    assert not read_case(case, aware=False).machines["theirs"].aware
    written(case, "metrics.json", {"systems": {"a": 1, "b": {}}})
    assert list(read_case(case).machines) == ["mine"]
    written(case, "metrics.json", [])
    assert list(read_case(case).machines) == ["mine"]


def test_a_case_has_a_folder_for_each_of_its_systems(case):
    for name in ("slow", "fast"):
        put_system(case / name)
    written(case, "metrics.json", {"systems": {"slow": {"congestion_aware": 1}}})
    found = read_case(case)
    assert [(name, one.aware, one.memory) for name, one in found.machines.items()] == [
        ("fast", False, NO_EXPANSION),
        ("slow", True, NO_EXPANSION),
    ]
    below = case.parent / "congestion_aware"
    below.mkdir()
    case.rename(below / "mine")
    assert [one.aware for one in read_case(below / "mine").machines.values()] == [True, True]


def test_a_case_that_lacks_something_says_what(case):
    with pytest.raises(ForerunError, match=r"no system\.json here or in a sub-folder"):
        read_case(case)
    with pytest.raises(ForerunError, match="no such folder"):
        read_case(case / "nowhere")
    put_system(case, n=3)
    shutil.rmtree(case / "et")
    with pytest.raises(ForerunError, match=r"neither the traces of all 3 ranks nor stage_args\.json"):
        read_case(case)
