"""HTA's view of profiles: links, places, windows of several ranks, the order of tables and the names on a path."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profile_files import Event, host, kernel, launch, write_profile

from forerun.answers.profile.analyze import Analysis, analyze
from forerun.answers.profile.breakdown import annotation_times, by_kernel, kernels
from forerun.answers.profile.cp_graph import stack_order
from forerun.answers.profile.critical_path import _next_kernel, critical_path
from forerun.answers.profile.imported import import_step
from forerun.answers.profile.kernel_types import is_communication, short_name
from forerun.answers.profile.waiting import bandwidth_summary, idle_times, launch_mask, queue_lengths
from forerun.answers.profile.window import NONE, Window, by_time, counts_of, last_with, windows
from forerun.common.errors import ForerunError
from forerun.sources.profile.read import read_profiles

NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevComm*)"


def _windows(folder: Path, *ranks: list[Event]) -> list[Window]:
    files = [
        write_profile(folder / f"{rank}.json", events, distributedInfo={"rank": rank, "world_size": len(ranks)})
        for rank, events in enumerate(ranks)
    ]
    return windows(read_profiles(files))


def _names(window: Window) -> list[str]:
    return [window.profile.texts[number] for number in window.name]


numbers = st.lists(st.integers(-2, 6), max_size=12)


@given(numbers, numbers)
def test_partners_are_the_last_of_their_number(keys: list[int], wanted: list[int]) -> None:
    has, wants = np.array(keys, np.int64), np.array(wanted, np.int64)
    last = [max((place for place, key in enumerate(keys) if key == one), default=NONE) for one in wanted]
    assert last_with(has, wants).tolist() == last
    assert counts_of(has, wants).tolist() == [keys.count(one) for one in wanted]


def test_a_launch_and_its_kernel_name_each_other(tmp_path: Path) -> None:
    events = [
        host("aten::mm", 0, 50),
        launch(1, 2, 11),
        kernel("k", 5, 10, 11),
        launch(20, 2, 12),
        kernel("alone", 30, 5, 99),
        {**kernel("Context Sync", 40, 2, 12, -1), "cat": "cuda_sync"},
    ]
    (one,) = _windows(tmp_path, events)
    assert one.index.tolist() == [0, 1, 2, 3, 4, 5]
    # no correlation; its kernel; its launch; what synchronises; a correlation without a partner; its call
    assert one.linked.tolist() == [NONE, 2, 1, 5, 0, 3]
    assert one.on_stream.tolist() == [False, False, True, False, True, False]
    assert one.rows_at(np.array([5, 0, NONE, 2])).tolist() == [5, 0, NONE, 2]
    few = one.take(np.array([2, 4]))
    assert few.rows_at(np.array([2, 4, 1, NONE])).tolist() == [0, 1, NONE, NONE]
    assert (_names(few), few.end_us.tolist(), len(few)) == (["k", "alone"], [15, 35], 2)


def test_all_ranks_count_from_the_first_event_of_any(tmp_path: Path) -> None:
    first, second = _windows(tmp_path, [kernel("a", 130, 5, 1)], [kernel("b", 110, 5, 1), kernel("c", 150, 5, 2)])
    assert (first.ts_us.tolist(), second.ts_us.tolist()) == ([20], [0, 40])
    assert (first.rank, second.rank) == (0, 1)


def test_traces_of_the_profiler_itself_and_memory_events_are_left_out(tmp_path: Path) -> None:
    memory = {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 1, "tid": 1, "ts": 1, "args": {}}
    (one,) = _windows(tmp_path, [{**host("PyTorch Profiler", 0, 900), "cat": "Trace"}, kernel("a", 10, 5, 1), memory])
    assert (_names(one), one.ts_us.tolist()) == (["a"], [0])


def test_the_last_step_goes_with_what_its_launches_run(tmp_path: Path) -> None:
    def step(number: int, begin: float) -> list[Event]:
        return [
            host(f"ProfilerStep#{number}", begin, 100, "user_annotation"),
            launch(begin + 10, 5, number),
            kernel(f"k{number}", begin + 130, 20, number),
            host("aten::mm", begin + 20, 5),
        ]

    events = [*step(1, 0), *step(2, 100), *step(3, 200), kernel("no launch", 290, 5, 77)]
    (one,) = _windows(tmp_path, events)
    assert one.last_step_dropped
    on_host = ["cudaLaunchKernel", "aten::mm"]
    assert _names(one) == ["k1", "k2", "ProfilerStep#1", *on_host, "ProfilerStep#2", *on_host]
    (alone,) = _windows(tmp_path, step(1, 0))
    assert not alone.last_step_dropped
    assert len(alone) == 4


def test_a_kernel_counts_once_for_each_of_its_launches(tmp_path: Path) -> None:
    """HTA joins kernels with launches, so that two launches of one number make two of their kernel."""
    events = [host(f"ProfilerStep#{number}", 100 * number, 90, "user_annotation") for number in (1, 2)]
    events += [launch(110, 5, 7), launch(120, 5, 7), kernel("k", 130, 5, 7)]
    (one,) = _windows(tmp_path, events)
    assert _names(one) == ["k", "k", "ProfilerStep#1", "cudaLaunchKernel", "cudaLaunchKernel"]


def test_events_are_ordered_by_time() -> None:
    times = np.array([5.0, 1.0, 3.5, -2.0])
    assert times[by_time(times)].tolist() == [-2, 1, 3.5, 5]
    assert by_time(np.array([3.0, 1.0, 2.0])).tolist() == [1, 2, 0]


def _tables(folder: Path) -> list[Window]:
    first = [
        *(
            kernel("b", 0, 10, 1),
            kernel("a", 20, 30, 2),
            kernel(NCCL, 60, 5, 3, 9),
            kernel("Memset (Device)", 70, 1, 4),
        ),
        *({**kernel(name, 0, 8, 5), "cat": "gpu_user_annotation"} for name in ("z", "y")),
    ]
    return _windows(folder, first, [kernel("a", 0, 50, 1), kernel("c", 60, 40, 2)])


def test_kernels_are_listed_by_type_name_and_rank_or_by_rank_and_time(tmp_path: Path) -> None:
    found = _tables(tmp_path)
    assert [(row[6], row[0], row[7]) for row in by_kernel(found).rows] == [
        ("COMMUNICATION", NCCL, 0),
        ("COMPUTATION", "a", 0),
        ("COMPUTATION", "a", 1),
        ("COMPUTATION", "b", 0),
        ("COMPUTATION", "c", 1),
        ("COMPUTATION", "y", 0),
        ("COMPUTATION", "z", 0),
        ("MEMORY", "Memset (Device)", 0),
    ]
    listed = [(row[0], row[2], row[4]) for row in kernels(found).rows]
    assert listed[:2] == [(0, "a", 30), (0, "b", 10)]
    assert listed[-2:] == [(1, "a", 50), (1, "c", 40)]
    assert [(row[0], row[1], row[6]) for row in annotation_times(found).rows] == [("y", 8, 0), ("z", 8, 0)]


def _analysis(folder: Path, *ranks: list[Event], **options: Any) -> Analysis:
    files = [
        write_profile(folder / f"{rank}.json", events, distributedInfo={"rank": rank, "world_size": len(ranks)})
        for rank, events in enumerate(ranks)
    ]
    return analyze(read_profiles(files), **options)


def test_shares_of_the_time_between_the_first_and_the_last_kernel(tmp_path: Path) -> None:
    events = [kernel("a", 10, 30, 1), kernel(NCCL, 30, 30, 2, 9), kernel("b", 80, 10, 3)]
    found = _analysis(tmp_path, events, annotation="")
    # 80 us: 10..60 and 80..90 busy, of which 40 compute and 20 only communicate
    (row,) = found.table("temporal_breakdown").rows
    assert row == (0, 20.0, 40.0, 20.0, 80.0, 25.0, 50.0, 25.0)
    assert found.table("comm_comp_overlap").rows == [(0, pytest.approx(33.33))]
    assert found.table("gpu_kernel_breakdown.0").rows == [
        ("COMPUTATION", 30.0, 50.0),
        ("COMMUNICATION", 20.0, pytest.approx(33.3)),
        ("COMPUTATION overlapping COMMUNICATION", 10.0, pytest.approx(16.7)),
    ]


def test_the_path_names_each_edge(tmp_path: Path) -> None:
    events = [
        host("ProfilerStep#1", 0, 300, "user_annotation"),
        *(host("aten::mm", 5, 40), launch(10, 5, 1), launch(30, 5, 2)),
        *(kernel("void at::native::gemm<float>(int)", 20, 100, 1), kernel(NCCL, 121, 50, 2)),
    ]
    (one,) = _windows(tmp_path, events)
    path = critical_path(one, "ProfilerStep#1")
    table = path.edge_table()
    assert table.name == "critical_path_edges.rank0.ProfilerStep_1.0"
    rows = [tuple(None if cell != cell else cell for cell in row) for row in table.rows]
    assert rows == [
        (1.0, 5.0, "critical_path_operator", "aten::mm", -1.0, "cpu_bound"),
        (None, 10.0, "critical_path_kernel_launch_delay", "", None, "gpu_kernel_launch_overhead"),
        (4.0, 100.0, "critical_path_operator", "at::native::gemm", 7.0, "gpu_compute_bound"),
        (4.0, 1.0, "critical_path_kernel_kernel_delay", "at::native::gemm", 7.0, "gpu_kernel_kernel_overhead"),
        (5.0, 50.0, "critical_path_operator", short_name(NCCL), 7.0, "gpu_communication_bound"),
    ]
    assert path.length_us == 166
    assert path.bounds() == {
        "cpu_bound": 5.0, "gpu_communication_bound": 50.0, "gpu_compute_bound": 100.0,
        "gpu_kernel_kernel_overhead": 1.0, "gpu_kernel_launch_overhead": 10.0,
    }  # fmt: skip
    assert list(path.bounds()) == sorted(path.bounds())
    assert critical_path(one, "").edge_table().name == "critical_path_edges.rank0.all.0"


@pytest.mark.parametrize("instance", [-1, 1])
def test_an_instance_is_one_of_those_in_the_file(tmp_path: Path, instance: int) -> None:
    (one,) = _windows(tmp_path, [host("ProfilerStep#1", 0, 300, "user_annotation"), launch(1, 2, 3)])
    with pytest.raises(ForerunError, match=f"instance {instance} is not among the 1 in the file"):
        critical_path(one, "ProfilerStep", instance)


def test_a_part_without_operators_has_no_path(tmp_path: Path) -> None:
    (one,) = _windows(tmp_path, [host("ProfilerStep#1", 0, 300, "user_annotation")])
    with pytest.raises(ForerunError, match="it has no operators, calls or kernels that follow each other"):
        critical_path(one, "ProfilerStep")


@pytest.mark.parametrize(
    ("name", "short", "talks"),
    [
        ("void foo<a, b>(c)", "foo", False),
        ("foo", "foo", False),
        ("a::b<c>::d(e)", "a::b::d", False),
        ("void f<x->y>(z)", "f", False),
        ("Memset (Device)", "Memset (Device)", False),
        (NCCL, "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", True),
        ("void ncclKernel_Sum<int>(x)", "ncclKernel_Sum", True),
    ],
)
def test_short_names(name: str, short: str, talks: bool) -> None:
    assert (short_name(name), is_communication(name)) == (short, talks)


def test_ranks_without_communication_have_no_share_of_it(tmp_path: Path) -> None:
    found = _analysis(tmp_path, [kernel("a", 0, 5, 1)], [kernel(NCCL, 0, 5, 1)], annotation="")
    shares = [row[1] for row in found.table("comm_comp_overlap").rows]
    assert math.isnan(shares[0])  # type: ignore[arg-type]
    assert shares[1] == 0.0


def test_starts_and_ends_of_a_thread_nest() -> None:
    """Equal events nest in the order of the file, and what ends as another begins is beside it."""
    events = {"a": (0, 10), "b": (0, 10), "c": (0, 4), "d": (10, 12), "e": (6, 10)}
    for order in ("abcde", "edcab", "daebc"):
        start, end = (np.array([float(events[name][side]) for name in order]) for side in (0, 1))
        event, is_start = stack_order(start, end, np.arange(len(order)))
        told = [order[k].upper() if begins else order[k] for k, begins in zip(event, is_start, strict=True)]
        assert "".join(told) == "ABCcEebaDd"


def test_only_launches_of_what_the_file_shows_count(tmp_path: Path) -> None:
    events = [launch(0, 5, 1), launch(10, 5, 2), kernel("k", 20, 5, 1), host("aten::mm", 30, 5)]
    no_number = {**launch(40, 5, 3), "args": {}}
    other = [launch(50, 5, 4, "cudaEventRecord"), kernel("k", 60, 5, 4)]
    (one,) = _windows(tmp_path, [*events, no_number, *other])
    assert launch_mask(one).tolist() == [True, False, False, False, False, False, False]
    rows, stream, length = queue_lengths(one)
    assert (rows.tolist(), stream.tolist(), length.tolist()) == ([0, 2], [7, 7], [1, 0])


def test_idle_time_has_a_cause_by_the_launch_and_the_length(tmp_path: Path) -> None:
    def causes(*kernels: tuple[float, float, float]) -> list[tuple[Any, ...]]:
        """Kernels of one stream by launch, start and duration."""
        events = [launch(at, 1, number) for number, (at, _, _) in enumerate(kernels, 1)]
        events += [kernel("k", start, dur, number) for number, (_, start, dur) in enumerate(kernels, 1)]
        times, lengths = idle_times(_windows(tmp_path, events))
        assert [row[:3] for row in lengths.rows] == [row[:3] for row in times.rows]
        return [row[2:] for row in times.rows if row[3]]

    assert causes((0, 10, 10), (5, 49, 5)) == [("kernel_wait", 29.0, 1.0)]
    assert causes((0, 10, 10), (5, 50, 5)) == [("other", 30.0, 1.0)]
    assert causes((0, 10, 10), (20, 50, 5)) == [("other", 30.0, 1.0)]  # launched as the one before ended
    assert causes((0, 10, 10), (21, 50, 5)) == [("host_wait", 30.0, 1.0)]
    assert causes((0, 10, 10), (1, 25, 5), (40, 45, 5)) == [("host_wait", 15.0, 0.75), ("kernel_wait", 5.0, 0.25)]


def test_copies_without_time_last_a_microsecond(tmp_path: Path) -> None:
    def copy(name: str, at: float, dur: float, rate: float) -> Event:
        return kernel(name, at, dur, 1, **{"memory bandwidth (GB/s)": rate})

    events = [copy("Memcpy HtoD (Pinned -> Device)", 0, 0, 8.0), copy("Memset (Device)", 5, 5, 2.0)]
    events += [copy("dma transfer", 20, 5, 3.0), kernel("Memcpy DtoD (x)", 30, 5, 2)]
    rows = bandwidth_summary(_windows(tmp_path, events)).rows
    assert [(row[1], row[2], row[3]) for row in rows] == [
        ("Memcpy HtoD", 1.0, 8.0),
        ("Memcpy Unknown", 1.0, 3.0),
        ("Memset", 1.0, 2.0),
    ]


@pytest.mark.parametrize(("count", "named"), [(50, 50), (51, 41)])
def test_more_than_fifty_kernels_are_summed_up(tmp_path: Path, count: int, named: int) -> None:
    """Of 51 equal kernels those have a row whose running sum is within four fifths of the running sums: 1 to 41."""
    events = [kernel(f"k{number:02}", 10 * number, 5, number) for number in range(count)]
    rows = _analysis(tmp_path, events, annotation="").table("gpu_kernel_breakdown.1").rows
    listed = [row for row in rows if row[0] != "others"]
    assert len(listed) == named
    assert (len(rows) > len(listed)) is (count > 50)
    assert sum(row[1] for row in rows) == 5 * count  # type: ignore[misc]


def test_what_waits_is_the_next_kernel_of_its_stream_and_thread() -> None:
    """Launches (0 to 4) of kernels (10 to 14): one before the wait (5), one of another stream, thread and process."""
    stream = np.full(20, NONE)
    stream[10:16] = [7, 9, 7, 7, 7, 7]
    ts_us = np.arange(20.0)
    ts_us[[0, 1, 2, 3, 4, 5, 6]] = [1, 3, 4, 5, 7, 2, 6]
    pid, tid = np.zeros(20, np.int64), np.zeros(20, np.int64)
    pid[3], tid[2] = 1, 1
    one: Any = SimpleNamespace(stream=stream, ts_us=ts_us)
    calls, work = np.array([0, 1, 2, 3, 6, 4]), np.array([10, 11, 12, 13, 15, 14])

    def following(wait: int, on: int) -> int:
        return _next_kernel(one, calls, work, wait, on, (pid, tid))

    assert following(5, 7) == 15
    assert following(5, 9) == 11
    assert following(6, 7) == 15  # at the same time
    assert following(4, 9) == NONE


def test_a_step_that_is_not_there_is_told_with_the_first_eight_that_are(tmp_path: Path) -> None:
    events = []
    for number in range(10):
        at = 100.0 * number
        events += [host(f"ProfilerStep#{number}", at, 90, "user_annotation"), launch(at + 1, 1, number)]
        events.append(kernel("k", at + 5, 5, number))
    profile = read_profiles([write_profile(tmp_path / "a.json", events)])
    names = ", ".join(f"ProfilerStep#{number}" for number in range(8))
    with pytest.raises(ForerunError, match=rf"has no step ProfilerStep#77 that .*; it has {names}$"):
        import_step(profile, 77)
