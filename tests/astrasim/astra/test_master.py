"""ASTRA-sim as its branch master is: its lines, what groups run, the name of all ranks, custom collectives."""

import json
import re
from datetime import datetime

import pytest
from collective_building import system as cut
from command_here import run_here
from random_traces import collective, comp, recv, send, trace

from forerun.astrasim.astra.node_kinds import COMM, GPU, kinds_of_ranks, overlap
from forerun.astrasim.astra.release import release_named
from forerun.astrasim.astra.replay import Machine, replay
from forerun.astrasim.astra.single import collective_times
from forerun.astrasim.astra.statistics import RankStatistics
from forerun.astrasim.astra.stdout import output_lines
from forerun.astrasim.astra.system import system_from
from forerun.astrasim.chakra.groups import with_world
from forerun.astrasim.chakra.trace import CommType
from forerun.astrasim.chakra.writer import write_rank
from forerun.common.errors import ForerunError
from forerun.core.network.network_file import parse_topology

SIZE = 1 << 20
SYSTEM = {"local-mem-bw": 50, "preferred-dataset-splits": 4, "collective-optimization": "localBWAware"}
RING = {f"{name}-implementation": ["ring"] for name in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")}
PRINTED = """\
ring of node 0, id: 0 dimension: local total nodes in ring: 8 index in ring: 0 offset: 1 total nodes in ring: 8
ring of node 0, id: 0 dimension: local total nodes in ring: 8 index in ring: 0 offset: 1 total nodes in ring: 8
ring of node 0, id: 0 dimension: local total nodes in ring: 8 index in ring: 0 offset: 1 total nodes in ring: 8
ring of node 0, id: 0 dimension: local total nodes in ring: 8 index in ring: 0 offset: 1 total nodes in ring: 8
sys[0] finished, 117780 cycles, exposed communication 117780 cycles.
sys[0]. Post statistics processing start.
sys[0]. Post statistics processing end.
sys[0], Wall time: 117780
sys[0], Comm time: 117780
sys[1] finished, 117780 cycles, exposed communication 117780 cycles.
""".splitlines()
"""the first lines of tests/rt_template/refs/stdout.txt of astra-sim/astra-sim, branch master at 518bd51"""


@pytest.fixture
def files(tmp_path):
    """The inputs of ASTRA-sim's own test: an all-reduce of 1 MiB on a ring of 8."""
    for rank in range(8):
        write_rank(tmp_path / f"w.{rank}.et", trace([collective(CommType.ALL_REDUCE, SIZE)], ids=[rank]))
    (tmp_path / "system.json").write_text(json.dumps(SYSTEM | RING | {"endpoint-delay": 10}))
    (tmp_path / "ring.yml").write_text("topology: [Ring]\nnpus_count: [8]\nbandwidth: [50.0]\nlatency: [500.0]\n")
    return tmp_path


def test_the_lines_are_those_of_its_own_test(files):
    of_files = [f"--system-configuration={files}/system.json", f"--network-configuration={files}/ring.yml"]
    shown = run_here(None, "astra", "--release", "master", f"--workload-configuration={files}/w", *of_files)
    lines = shown.stdout.splitlines()
    stamped = r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}\] \[[a-zA-Z:]+\] \[(info|warning)\] "
    assert all(re.match(stamped, line) for line in lines)
    assert [line.split("] ", 3)[3] for line in lines][: len(PRINTED)] == PRINTED
    assert len(lines) == 4 + 8 * 5 + 1
    assert lines[-1].endswith("] [system] [warning] Exiting")


def printed(system, ranks, topology="ring:2", groups=None, own=True):
    machine = Machine(system, parse_topology(topology, [50.0], [500.0]), own_group_algorithms=own)
    result = replay(ranks, groups or {}, machine)
    kinds = kinds_of_ranks(result)
    lines = output_lines(release_named("master"), result.statistics, datetime.now(), kinds=kinds)
    return [line.split("] ", 3)[-1] for line in lines], result, kinds


ROOFLINE = system_from(SYSTEM | RING | {"roofline-enabled": 1, "peak-perf": 1, "track-local-mem": 1}, "system")


def test_the_kind_of_the_last_node_to_start_comes_first():
    for last_first in (False, True):
        nodes = [comp(ops=10**6, size=10**6), collective(CommType.ALL_REDUCE, SIZE)]
        if last_first:
            nodes = [collective(CommType.ALL_REDUCE, SIZE), comp(ops=10**6, size=10**6, after=[0])]
        else:
            nodes[1]["after"] = [0]
        _, _, kinds = printed(ROOFLINE, [trace(nodes), trace(nodes)])
        assert kinds[0] == ((GPU, COMM) if last_first else (COMM, GPU))


def test_overlap_is_compute_plus_communication_minus_wall_time():
    nodes = [comp(ops=10**8, size=10**8), collective(CommType.ALL_REDUCE, SIZE)]
    lines, result, kinds = printed(ROOFLINE, [trace(nodes), trace(nodes)])
    of_rank = result.statistics[0]
    both = of_rank.gpu_time + of_rank.comm_time - of_rank.wall_time
    assert both == min(of_rank.gpu_time, of_rank.comm_time)
    assert f"sys[0], Total compute-communication overlap: {both}" in lines
    assert overlap(of_rank, kinds[0]) == both


def test_an_idle_rank_has_the_overlap_of_unsigned_numbers():
    idle = RankStatistics(100, 90, 100, 10, 20, None, None, None, None, None)
    assert overlap(idle, (GPU, COMM)) == 2**64 - 70
    assert overlap(idle, (GPU,)) == overlap(idle, (GPU, COMM, "cpu_time")) == 0


@pytest.mark.parametrize(("size", "text"), [(1023, "1023.00 B"), (1536, "1.50 KB"), (19676528640, "18.33 GB")])
def test_memory_is_printed_in_the_largest_unit(size, text):
    figures = RankStatistics(5, 0, 5, 5, 0, None, None, None, None, size)
    *_, last, _ = output_lines(release_named("master"), [figures], datetime.now())
    assert last.endswith(f"sys[0] peak memory usage: {text}")


@pytest.mark.parametrize(("name", "kind"), [("direct", CommType.ALL_TO_ALL), ("halvingDoubling", CommType.ALL_REDUCE)])
def test_a_group_runs_the_algorithm_of_a_system_file_that_names_one(name, kind):
    groups = {"1": (0, 1, 2, 3), "2": (4, 5, 6, 7)}
    ranks = [trace([collective(kind, SIZE, group="1" if rank < 4 else "2")]) for rank in range(8)]
    of = cut(name, splits=4)
    alone = collective_times(parse_topology("switch:4@50/500", gib=True), of, kind, SIZE)[0].max()
    network = parse_topology("switch:8@50/500", gib=True)
    assert replay(ranks, groups, Machine(of, network, own_group_algorithms=True)).wall_ns == alone
    assert replay(ranks, groups, Machine(of, network)).wall_ns != alone


def test_a_group_of_a_network_with_several_dimensions_runs_the_ring():
    of = system_from(SYSTEM | {"all-reduce-implementation": ["direct", "direct"]}, "system")
    groups = {"1": (0, 1, 2, 3), "2": (4, 5, 6, 7)}
    ranks = [trace([collective(CommType.ALL_REDUCE, SIZE, group="1" if rank < 4 else "2")]) for rank in range(8)]
    network = parse_topology("switch:4,switch:2", [50.0], [500.0])
    machines = [Machine(of, network, own_group_algorithms=own) for own in (False, True)]
    assert len({replay(ranks, groups, machine).wall_ns for machine in machines}) == 1


def test_group_0_is_all_ranks():
    ranks = [trace([collective(CommType.ALL_REDUCE, SIZE, group="0")]) for _ in range(4)]
    traces, groups = with_world(ranks, {}, ["0"])
    assert all((one.group == -1).all() for one in traces)
    with pytest.raises(ForerunError, match="communicator group '0': this build of ASTRA-sim takes that name"):
        with_world(ranks, {"0": (0, 1)}, ["0"])
    assert groups == {}


def pair(size):
    """Traces of two ranks that send to each other."""
    return [trace([send(1 - rank, size), recv(1 - rank, size)]) for rank in range(2)]


def written(folder, name, ranks):
    for rank, one in enumerate(ranks):
        write_rank(folder / f"{name}.{rank}.et", one)
    return str(folder / name)


def test_a_custom_collective_runs_its_traces_once_and_groups_run_it_too(tmp_path):
    prefix = written(tmp_path, "exchange", pair(53687))
    of = system_from({"all-reduce-implementation-custom": [prefix], "local-mem-bw": 50}, "system")
    groups = {"1": (0, 1), "2": (2, 3)}
    ranks = [trace([collective(CommType.ALL_REDUCE, SIZE, group="1" if rank < 2 else "2")]) for rank in range(4)]
    network = parse_topology("switch:4@50/500", gib=True)
    assert replay(ranks, groups, Machine(of, network)).wall_ns == 2 * 500 + 999


def test_a_node_may_have_a_custom_collective_of_its_own(tmp_path):
    (tmp_path / "nodes.yaml").write_text(f"2: {written(tmp_path, 'exchange', pair(53687))}\n")
    of = system_from({**SYSTEM, **RING, "preferred-dataset-splits": 1}, "system")
    own = of.model_copy(update={"per_node_custom_implementation": str(tmp_path / "nodes.yaml")})
    nodes = [collective(CommType.ALL_REDUCE, SIZE), collective(CommType.ALL_REDUCE, SIZE, after=[0])]
    network = parse_topology("switch:2@50/500", gib=True)
    first = replay([trace(nodes[:1])] * 2, {}, Machine(of, network)).wall_ns
    assert replay([trace(nodes)] * 2, {}, Machine(own, network)).wall_ns == first + 2 * 500 + 999


def test_what_the_reference_cannot_run_is_one_line(tmp_path):
    prefix = written(tmp_path, "exchange", pair(1000))
    ranks = [trace([collective(CommType.ALL_REDUCE, SIZE)])] * 2
    network = parse_topology("switch:2@50/500")
    of = system_from({"all-reduce-implementation-custom": [prefix], "preferred-dataset-splits": 4}, "system")
    with pytest.raises(ForerunError, match="never ends a custom all_reduce of 4 chunks; set preferred-dataset-splits"):
        replay(ranks, {}, Machine(of, network))
    (tmp_path / "nodes.yaml").write_text("[1, 2]")
    wrong = system_from({**RING, "per-node-custom-implementation": str(tmp_path / "nodes.yaml")}, "system")
    with pytest.raises(ForerunError, match="expected numbers of nodes with the prefix of their traces"):
        replay(ranks, {}, Machine(wrong, network))
    grouped = [trace([collective(CommType.ALL_REDUCE, SIZE, group="1")])] * 4
    tree = system_from({**SYSTEM, "all-reduce-implementation": ["doubleBinaryTree"]}, "system")
    machine = Machine(tree, parse_topology("switch:4@50/500"), own_group_algorithms=True)
    with pytest.raises(ForerunError, match="a group of 2 ranks has no doubleBinaryTree"):
        replay(grouped[:2] + [trace([comp()])] * 2, {"1": (0, 1)}, machine)
