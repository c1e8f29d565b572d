"""Builds of ASTRA-sim by name: their issue order and their lines."""

from dataclasses import fields
from datetime import datetime
from string import Formatter

import pytest

from forerun.astrasim.astra.release import DEFAULT_RELEASE, release_named, releases
from forerun.astrasim.astra.replay import Machine, replay
from forerun.astrasim.astra.rings import DimensionRing, GroupRing, rings_of_groups, rings_of_rank_0
from forerun.astrasim.astra.statistics import RankStatistics
from forerun.astrasim.astra.stdout import output_lines
from forerun.astrasim.astra.system import system_from
from forerun.astrasim.stage.first_generation import StageArgs, generate
from forerun.common.errors import ForerunError
from forerun.core.network.network_file import parse_topology

PRINTED = """\
[2025-03-26 16:10:12.487] [workload] [info] sys[0] finished, 3556872116 cycles, exposed communication 2637085435 cycles.
[2025-03-26 16:10:12.487] [statistics] [info] sys[0]. Post statistics processing start.
[2025-03-26 16:10:12.487] [statistics] [info] sys[0]. Post statistics processing end.
[2025-03-26 16:10:12.487] [statistics] [info] sys[0], Wall time: 3556872116
[2025-03-26 16:10:12.487] [statistics] [info] sys[0], GPU time: 919786681
[2025-03-26 16:10:12.487] [statistics] [info] sys[0], Comm time: 3521411134
[2025-03-26 16:10:12.487] [statistics] [info] sys[0], Compute bound percentage: 83.794%
[2025-03-26 16:10:12.487] [statistics] [info] sys[0], Average compute utilization: 85.661%
[2025-03-26 16:10:12.487] [statistics] [info] sys[0], Average memory utilization: 28.401%
[2025-03-26 16:10:12.487] [statistics] [info] sys[0], Average operation intensity: 3523.082
[2025-03-26 16:10:12.487] [workload] [info] sys[0] peak memory usage: 19676528640
""".splitlines()
"""what the build of March 2025 printed for one rank"""
NOW = datetime(2025, 3, 26, 16, 10, 12, 487_000)
FIGURES = RankStatistics(
    wall_cycles_finished=3556872116,
    exposed_communication=2637085435,
    wall_time=3556872116,
    gpu_time=919786681,
    comm_time=3521411134,
    compute_bound_pct=83.794,
    avg_compute_util_pct=85.661,
    avg_mem_util_pct=28.401,
    avg_op_intensity=3523.082,
    peak_memory_bytes=19676528640,
)


def test_the_lines_of_march_2025_are_those_that_it_printed():
    assert list(output_lines(release_named("2025-03"), [FIGURES], NOW)) == PRINTED


def test_a_line_without_its_figure_is_left_out():
    without = RankStatistics(5, 0, 5, 5, 0, None, None, None, None, None, cpu_time=3)
    texts = [line.split("] ", 3)[3] for line in output_lines(release_named("2025-03"), [without], NOW)]
    assert texts[3:] == ["sys[0], Wall time: 5", "sys[0], CPU time: 3", "sys[0], GPU time: 5", "sys[0], Comm time: 0"]


def test_the_default_build_prints_the_letter_of_the_level_and_the_offset_of_the_time():
    line, *_ = output_lines(release_named(), [FIGURES], NOW)
    assert line.startswith(f"[{NOW.astimezone().isoformat(timespec='seconds')}] [I] <workload>: sys[0] finished, ")


def test_lines_come_in_the_order_of_what_happens():
    first = RankStatistics(**{**{f.name: getattr(FIGURES, f.name) for f in fields(FIGURES)}, "wall_cycles_finished": 9})
    rings = [GroupRing(start_ns=9, rank=1, n_ranks=2, index=1), GroupRing(start_ns=10, rank=0, n_ranks=2, index=0)]
    lines = list(output_lines(release_named("2025-03"), [FIGURES, first], NOW, [DimensionRing(4, 1)], rings))
    assert "ring of node 0, id: 0 dimension: local total nodes in ring: 4 index in ring: 0 offset: 1" in lines[0]
    assert "custom ring, id: 1, dimension: local total nodes in ring: 2 index in ring: 1" in lines[1]
    assert "sys[1] finished, 9 cycles" in lines[2]
    assert "custom ring, id: 0" in lines[13]
    assert lines[14:] == PRINTED


@pytest.mark.parametrize("name", sorted(releases()))
def test_every_text_names_what_is_known(name):
    release = releases()[name]
    known = {"rank": {"rank", "overlap", "peak_memory", *(field.name for field in fields(RankStatistics))}}
    known |= {"node_0_ring": {"n_ranks", "index", "offset"}, "group_ring": {"rank", "n_ranks", "index"}}
    lines = [("rank", line) for line in release.rank]
    lines += [(key, getattr(release, key)) for key in ("node_0_ring", "group_ring") if getattr(release, key)]
    for key, (_, text) in lines:
        assert {field for _, field, _, _ in Formatter().parse(text) if field} <= known[key]
    assert {field for _, field, _, _ in Formatter().parse(release.line) if field} == {"stamp", "logger", "text"}


def test_an_issue_order_that_is_asked_for_goes_before_the_builds():
    assert release_named("2025-03").order() == "march-2025"
    assert release_named("2025-03").order("ascending") == "ascending"
    assert release_named(DEFAULT_RELEASE).order() == "ascending"


def test_an_unknown_build_is_one_line_that_lists_the_known_ones():
    with pytest.raises(ForerunError) as caught:
        release_named("2017-01")
    assert str(caught.value).startswith("unknown release of ASTRA-sim '2017-01'; ")
    assert str(caught.value).endswith("known: 2025-03, 2025-04, master")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("implementations", "rings"),
    [
        (["ring", "direct"], [(4, 1), (2, 4)]),
        (["ring"], [(4, 1)]),
        (["ring", "doubleBinaryTree"], [(4, 1)]),
        (["doubleBinaryTree", "halvingDoubling"], [(2, 4)]),
        (["oneRing", "oneRing"], [(8, 1)]),
        ([], []),
    ],
)
def test_rank_0_makes_a_ring_for_every_dimension_that_has_one(implementations, rings):
    system = system_from({"all-gather-implementation": implementations}, "system")
    made = rings_of_rank_0(system, parse_topology("ring:4,switch:2", [50.0], [500.0]))
    assert [(ring.n_ranks, ring.offset) for ring in made] == rings


def test_groups_make_a_ring_for_each_kind_of_collective_when_first_used(small_replay):
    replayed, traces, groups = small_replay
    rings = rings_of_groups(replayed, traces, groups)
    uses = {
        (rank, trace.group_names[group], kind)
        for rank, trace in enumerate(traces)
        for group, kind in zip(trace.group.tolist(), trace.comm_type.tolist(), strict=True)
        if group >= 0 and len(groups[trace.group_names[group]]) < len(traces)
    }
    assert uses
    assert sorted(ring.rank for ring in rings) == sorted(rank for rank, _, _ in uses)
    assert [ring.start_ns for ring in rings] == sorted(ring.start_ns for ring in rings)
    assert {(ring.n_ranks, ring.index) for ring in rings} == {(2, 0), (2, 1)}


@pytest.fixture
def small_replay():
    """A transformer on dp 2 x tp 2."""
    sizes = {"din": 64, "dout": 64, "dmodel": 32, "dff": 64, "head": 4, "seq": 16, "batch": 8, "num_stacks": 2}
    traces = generate(StageArgs(dp=2, tp=2, sp=1, pp=1, weight_sharded=False, activation_recompute=True, **sizes))
    ring = {f"{name}-implementation": ["ring"] for name in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")}
    system = system_from({"roofline-enabled": 1, "local-mem-bw": 300, "peak-perf": 45, **ring}, "system")
    machine = Machine(system, parse_topology("ring:4", [50.0], [500.0]))
    ranks = list(traces)
    return replay(ranks, traces.groups, machine, "march-2025"), ranks, traces.groups
