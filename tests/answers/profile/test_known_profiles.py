"""Small profiles whose figures anyone can work out."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profile_files import host, kernel, launch, write_profile

from forerun.answers.profile.analyze import analyze
from forerun.answers.profile.breakdown import by_kernel
from forerun.answers.profile.critical_path import critical_path
from forerun.answers.profile.facts import facts_of
from forerun.answers.profile.intervals import shared_times, union
from forerun.answers.profile.kernel_types import KernelType, kernel_type, short_name
from forerun.answers.profile.tables import Table, describe
from forerun.answers.profile.window import windows
from forerun.common.errors import ForerunError
from forerun.sources.profile.communication import communicates
from forerun.sources.profile.read import read_profile, read_profiles

NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevComm*)"
STEP = [
    host("ProfilerStep#3", 0, 400, "user_annotation"),
    host("aten::mm", 10, 40),
    launch(20, 10, 1),
    host("aten::all_reduce", 60, 30),
    launch(65, 10, 2),
    host("aten::add", 110, 60),
    launch(120, 20, 3),
    kernel("gemm", 40, 60, 1),
    kernel(NCCL, 80, 70, 2, stream=9),
    kernel("add", 150, 30, 3),
]


@pytest.fixture
def analysis(tmp_path):
    return analyze([read_profile(write_profile(tmp_path / "a.json", STEP))])


def test_busy_and_idle_time(analysis):
    # gemm 40..100, all-reduce 80..150, add 150..180: never idle, 90 of 140 us compute
    (row,) = analysis.table("temporal_breakdown").rows
    assert row == (0, 0.0, 90.0, 50.0, 140.0, 0.0, 64.29, 35.71)


def test_overlap_is_a_share_of_communication(analysis):
    assert analysis.table("comm_comp_overlap").rows == [(0, round(100 * 20 / 70, 2))]


def test_communication_of_other_libraries_counts_in_a_table_of_its_own(tmp_path):
    events = [kernel("gemm", 0.5, 100, 1), kernel("void dpsk::ep::internode::dispatch<8>(int4*)", 50.5, 100, 2, 9)]
    found = analyze([read_profile(write_profile(tmp_path / "a.json", events))])
    assert found.table("communication").rows == [(0, 100.0, 50.0, 50.0, 50.0)]
    assert found.table("temporal_breakdown").rows[0][3] == 0.0


@pytest.mark.parametrize(
    ("name", "talks"),
    [
        (NCCL, True),
        ("void vllm::cross_device_reduce_1stage<float, 2>(vllm::RankData*)", True),
        ("void c10d::symm_mem::multimem_all_reduce_kernel<c10::BFloat16, 16>", True),
        ("void at::native::reduce_kernel<512, 1>", False),
        ("cudnn::ops::nchwToNhwcKernel", False),
    ],
)
def test_names_tell_what_communicates(name, talks):
    assert communicates(name) is talks


def test_time_by_type(analysis):
    rows = {row[0]: row[1] for row in analysis.table("gpu_kernel_breakdown.0").rows}
    assert rows == {"COMPUTATION": 70.0, "COMMUNICATION": 50.0, "COMPUTATION overlapping COMMUNICATION": 20.0}


def test_idle_time_is_the_hosts_where_the_launch_comes_late(analysis):
    rows = analysis.table("idle_time_breakdown.0").rows
    assert (0, 7, "host_wait", 50.0, 1.0) in rows  # add was launched at 120, gemm ended at 100


def test_launches_have_delays(analysis):
    rows = analysis.table("cuda_kernel_launch_stats.rank0").rows
    assert rows == [(1, 10.0, 60.0, 10.0), (2, 10.0, 70.0, 5.0), (3, 20.0, 30.0, 10.0)]


def test_queues_grow_at_launches_and_shrink_at_starts(analysis):
    rows = {row[1]: row[2:] for row in analysis.table("queue_length_summary").rows}
    assert rows[7][:2] == (4.0, 0.5)
    assert rows[9][-1] == 1.0


def test_the_critical_path_goes_through_the_last_launch(analysis):
    (path,) = analysis.paths
    # the host from aten::mm to the launch of add (10..50, 60..90, 110..120), its delay of 30, add of 30
    assert path.length_us == 40 + 30 + 10 + 30 + 30
    assert path.bounds()["gpu_kernel_launch_overhead"] == 30
    assert path.bounds()["gpu_compute_bound"] == 30


def test_the_last_of_several_steps_is_left_out(tmp_path):
    later = [{**event, "ts": event["ts"] + 1000} for event in STEP]
    for event in later:
        event["args"] = {name: value + 10 if name == "correlation" else value for name, value in event["args"].items()}
    later[0]["name"] = "ProfilerStep#4"
    both = analyze([read_profile(write_profile(tmp_path / "a.json", STEP + later))])
    assert both.table("temporal_breakdown").rows[0][4] == 140.0
    assert any("last profiler step" in note for note in both.notes)
    same = later[:1] + STEP[1:]
    assert not analyze([read_profile(write_profile(tmp_path / "b.json", same))]).windows[0].last_step_dropped


def test_times_with_fractions_shrink_to_whole_microseconds(tmp_path):
    events = [kernel("a", 1.2, 3.9, 1), kernel("b", 7.1, 0.5, 2)]
    (view,) = windows([read_profile(write_profile(tmp_path / "a.json", events))])
    assert view.ts_us.tolist() == [0.0, 6.0]
    assert view.dur_us.tolist() == [3.0, -1.0]  # HTA's rule makes short events negative


def test_a_profile_of_the_host_alone(tmp_path):
    found = read_profile(write_profile(tmp_path / "a.json", STEP[:2]))
    analysis = analyze([found])
    assert analysis.table("temporal_breakdown").rows == []
    assert math.isnan(analysis.table("comm_comp_overlap").rows[0][1])
    assert any("no work of a device" in note for note in analysis.notes)
    assert any("no work of a device" in sentence for sentence in facts_of(found).missing)


def test_facts_count_and_say_what_is_missing(tmp_path):
    found = facts_of(read_profile(write_profile(tmp_path / "a.json", [*STEP, kernel("Memcpy HtoD (x)", 300, 5, 77)])))
    assert (found.kernels, found.copies, found.collectives, found.described_collectives) == (3, 1, 1, 0)
    assert found.streams == (7, 9)
    assert found.step_times_s == (400e-6,)
    assert found.device_busy_s == pytest.approx(145e-6)
    assert any(sentence.startswith("no launch of 1 of 4") for sentence in found.missing)


def test_an_instance_that_is_not_there_is_an_error(analysis):
    with pytest.raises(ForerunError, match="instance 2 is not among the 1"):
        critical_path(analysis.windows[0], "ProfilerStep", 2)


def test_a_stream_that_waits_for_an_event_is_bound_by_the_other_stream(tmp_path):
    wait = {"stream": 9, "wait_on_stream": 7, "wait_on_cuda_event_record_corr_id": 5, "correlation": 6}
    events = [
        host("ProfilerStep#1", 0, 300, "user_annotation"),
        launch(10, 5, 1),
        launch(20, 2, 5, "cudaEventRecord"),
        launch(24, 2, 6, "cudaStreamWaitEvent"),
        launch(30, 5, 2),
        kernel("long", 20, 150, 1),
        {**kernel("Stream Wait Event", 28, 1, 6, 9), "cat": "cuda_sync", "args": wait},
        kernel("short", 172, 10, 2, 9),
    ]
    (path,) = analyze([read_profile(write_profile(tmp_path / "a.json", events))]).paths
    assert path.length_us == 10 + 150 + 10  # launch delay of long, long, short
    assert path.bounds()["gpu_compute_bound"] == 160


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (NCCL, KernelType.COMMUNICATION),
        ("ncclKernel_AllReduce_RING_LL_Sum_float", KernelType.COMMUNICATION),
        ("Memcpy DtoH (Device -> Pageable)", KernelType.MEMORY),
        ("Memset (Device)", KernelType.MEMORY),
        ("void SyncBatchNorm<float>", KernelType.OTHER),
        ("deep_ep::combine", KernelType.COMPUTATION),
        ("Stream Wait Event", KernelType.COMPUTATION),
    ],
)
def test_types_follow_names(name, kind):
    assert kernel_type(name) is kind


def test_short_names_have_no_arguments():
    assert short_name("void at::native::foo<float, bar<2> >(int*, float)") == "at::native::foo"
    assert short_name("Memcpy DtoH (Device -> Pageable)") == "Memcpy DtoH (Device -> Pageable)"


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20), st.integers(0, 2)), min_size=1, max_size=30))
def test_unions_and_shared_times_are_those_of_a_grid(intervals):
    grid = np.zeros((3, 100), bool)
    for start, length, kind in intervals:
        grid[kind, start : start + length] = True
    sets = []
    for kind in range(3):
        chosen = np.array([(start, start + length) for start, length, k in intervals if k == kind], float).reshape(
            -1, 2
        )
        sets.append(union(chosen[:, 0], chosen[:, 1]))
        assert sets[-1].total() == grid[kind].sum()
    combination = grid[0] + 2 * grid[1] + 4 * grid[2]
    found = shared_times(sets)
    assert all(found.get(number, 0.0) == (combination == number).sum() for number in range(1, 8))


def synchronised(name, call, stream=7, **args):
    """A host that waits for a kernel of 150 us by `call`, and then launches another one."""
    said = {"correlation": 6, "stream": stream, **args}
    return [
        host("ProfilerStep#1", 0, 300, "user_annotation"),
        host("aten::a", 5, 20),
        launch(10, 5, 1),
        launch(17, 2, 5, "cudaEventRecord"),
        host("aten::b", 28, 160),
        launch(30, 150, 6, call),
        host("aten::c", 195, 20),
        launch(200, 5, 2),
        kernel("long", 20, 150, 1),
        kernel("beside", 20, 30, 77, 9),
        {**kernel(name, 170, 1, 6, stream), "cat": "cuda_sync", "args": said},
        kernel("short", 210, 10, 2),
    ]


@pytest.mark.parametrize(
    ("name", "call", "stream", "args"),
    [
        ("Event Sync", "cudaEventSynchronize", -1, {"wait_on_stream": 7, "wait_on_cuda_event_record_corr_id": 5}),
        ("Stream Sync", "cudaStreamSynchronize", 7, {}),
        ("Context Sync", "cudaDeviceSynchronize", -1, {}),
    ],
)
def test_a_host_that_waits_for_the_device_is_bound_by_it(name, call, stream, args, tmp_path):
    """The path goes from the launch of the long kernel over its end to the host, and on to the short kernel."""
    events = synchronised(name, call, stream, **args)
    (path,) = analyze([read_profile(write_profile(tmp_path / "a.json", events))]).paths
    assert path.length_us == 5 + 10 + 150 + 8 + 5 + 10 + 10  # between operators of the host no time counts
    assert path.bounds()["gpu_compute_bound"] == 160
    assert path.bounds()["gpu_kernel_launch_overhead"] == 20
    assert path.bounds()["cpu_bound"] == 18
    without = [event for event in events if event["cat"] != "cuda_sync"]
    (other,) = analyze([read_profile(write_profile(tmp_path / "b.json", without))]).paths
    assert other.length_us == 5 + 10 + 150


def test_tables_of_two_ranks(tmp_path):
    events = [
        kernel("gemm", 0, 30, 1),
        kernel("gemm", 40, 60, 2),
        kernel("norm", 110, 7, 3),
        kernel(NCCL, 90, 30, 4, stream=9),
        kernel("Memcpy DtoH (Device -> Pinned)", 200, 10, 5, **{"memory bandwidth (GB/s)": 12.0}),
        kernel("Memset (Device)", 205, 10, 6, 9, **{"memory bandwidth (GB/s)": 3.0}),
        kernel("Memcpy DtoH (Device -> Pinned)", 208, 0, 7, 9, **{"memory bandwidth (GB/s)": 5.0}),
        {**kernel("forward", 0, 100, 8), "cat": "gpu_user_annotation"},
        {**kernel("forward", 100, 20, 9), "cat": "gpu_user_annotation"},
    ]
    second = [{**event, "ts": event["ts"] + 3} for event in events[:3]]
    files = [write_profile(tmp_path / "a.json", events)]
    files.append(write_profile(tmp_path / "b.json", second, distributedInfo={"rank": 1, "world_size": 2}))
    found = analyze(read_profiles(files))
    # rank 0: communication 90..120, of which 90..100 and 110..117 beside kernels
    assert found.table("communication").rows == [(0, 30.0, 17.0, 13.0, 56.67)]
    kernels = {row[:3]: row[3:] for row in found.table("kernels").rows}
    assert kernels[0, "COMPUTATION", "gemm"] == (2, 90.0, 45.0, 30.0, 60.0, pytest.approx(math.sqrt(2) * 15))
    assert kernels[1, "COMPUTATION", "norm"] == (1, 7.0, 7.0, 7.0, 7.0, 0.0)
    assert [row[0] for row in found.table("kernels").rows] == [0] * 6 + [1] * 2
    assert found.table("gpu_user_annotation").rows == [
        ("forward", 120.0, 100.0, 20.0, pytest.approx(math.sqrt(2) * 40), 60.0, 0)
    ]
    copies = {row[1]: row[2:] for row in found.table("memory_bw_summary").rows}
    assert copies["Memset"][:2] == (1.0, 3.0)
    # 12 from 200 on, 17 from 208 to 209, 12 again until 210
    assert copies["Memcpy DtoH"][:2] == (3.0, pytest.approx((12 + 17 + 12) / 3))


def test_of_many_kernels_the_rarest_are_summed_up(tmp_path):
    events = [kernel(f"kernel {n}", 100 * n, n + 1, n) for n in range(6)]
    (one,) = windows([read_profile(write_profile(tmp_path / "a.json", events))])
    rows = {row[0]: row[1:6] for row in by_kernel([one], most=3).rows}
    assert rows["kernel 5"] == (6.0, 6.0, 6.0, 0.0, 6.0)
    assert set(rows) >= {"others", "kernel 5", "kernel 4"}
    assert sum(row[0] for row in rows.values()) == 21.0
    assert {row[0] for row in by_kernel([one], most=6).rows} == {f"kernel {n}" for n in range(6)}


def test_figures_of_a_column():
    assert describe(np.array([])) == (0.0, *[pytest.approx(math.nan, nan_ok=True)] * 7)
    assert describe(np.array([4.0])) == (1.0, 4.0, pytest.approx(math.nan, nan_ok=True), 4.0, 4.0, 4.0, 4.0, 4.0)
    assert describe(np.array([1.0, 2.0, 4.0, 9.0])) == (
        4.0, 4.0, pytest.approx(math.sqrt(38 / 3)), 1.0, 1.75, 3.0, 5.25, 9.0,
    )  # fmt: skip
    table = Table("t", ("a", "b"), [("x", math.nan), ("y", 1.0)])
    assert table.records() == [{"a": "x", "b": None}, {"a": "y", "b": 1.0}]


def test_facts_of_a_file_are_exact(tmp_path):
    wait = launch(130, 1, 8, "cudaStreamWaitEvent")
    found = facts_of(read_profile(write_profile(tmp_path / "a.json", [*STEP, wait])))
    assert (found.events, found.operators, found.calls, found.world_size) == (11, 3, 4, 2)
    assert found.device_span_s == pytest.approx(140e-6)
    assert found.mean_step_s == 400e-6
    assert (found.peak_allocated_bytes, found.peak_reserved_bytes, found.devices) == (None, None, ())
    assert found.missing == (
        "no sizes and groups of 1 of 1 collectives",
        "no synchronisation events (enable_cuda_sync_events): the waits between streams are unknown",
        "no memory events (profile_memory=True)",
    )
    host_alone = facts_of(
        read_profile(write_profile(tmp_path / "b.json", [launch(0, 5, 1), {**launch(9, 1, 2), "dur": None}]))
    )
    assert host_alone.missing[:3] == (
        "no work of a device: a profile of the host alone, or of a run without a GPU",
        "no profiler steps (ProfilerStep#N): call the profiler's step() once a step",
        "no operators of the host",
    )
    assert (host_alone.mean_step_s, host_alone.device_span_s, host_alone.device_busy_s) == (None, 0.0, 0.0)
