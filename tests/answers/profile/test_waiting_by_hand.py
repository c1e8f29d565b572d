"""Idle times by cause, queues, launches and bandwidth of a small profile, and the step made of it, by hand."""

from __future__ import annotations

import pytest
from profile_files import host, kernel, launch, write_profile

from forerun.answers.profile import waiting
from forerun.answers.profile.imported import import_step
from forerun.answers.profile.window import windows
from forerun.sources.profile.read import read_profile

TO_HOST = "Memcpy DtoH (Device -> Pageable)"
EVENTS = [
    host("ProfilerStep#3", 0, 1000, "user_annotation"),
    launch(1, 5, 1), launch(10, 5, 2), launch(20, 5, 3), launch(150, 5, 4), launch(30, 5, 5, "cudaMemcpyAsync"),
    launch(45, 5, 6, "cudaMemcpyAsync"), launch(190, 5, 7, "cudaEventRecord"),
    kernel("a", 20, 30, 1),  # 20 .. 50
    kernel("b", 60, 20, 2),  # a short gap: of the kernels
    kernel("c", 110, 20, 3),  # a gap of 30, launched long before: no cause
    kernel("d", 170, 10, 4),  # launched after c ended: of the host
    kernel(TO_HOST, 40, 10, 5, stream=9, **{"memory bandwidth (GB/s)": 2.0}),
    kernel(TO_HOST, 55, 10, 6, stream=9, **{"memory bandwidth (GB/s)": 6.0}),
]  # fmt: skip


@pytest.fixture
def one(tmp_path):
    return windows([read_profile(write_profile(tmp_path / "a.json", EVENTS))])


def test_gaps_of_a_stream_have_causes(one):
    times, lengths = waiting.idle_times(one)
    assert times.rows == [
        (0, 7, "host_wait", 40.0, 0.5),
        (0, 7, "kernel_wait", 10.0, 0.12),
        (0, 7, "other", 30.0, 0.38),
        (0, 9, "kernel_wait", 5.0, 1.0),
        (0, 9, "other", 0.0, 0.0),
    ]
    assert [row[3:5] for row in lengths.rows if row[:3] == (0, 7, "host_wait")] == [(1.0, 40.0)]


def test_launches_wait_in_a_queue_until_their_kernel_starts(one):
    rows, stream, length = waiting.queue_lengths(one[0])
    found = {number: length[stream == number].tolist() for number in (7, 9)}
    # launches at 1, 10, 20 (when a starts), 150; kernels at 20, 60, 110, 170
    assert found[7] == [1.0, 2.0, 3.0, 2.0, 1.0, 0.0, 1.0, 0.0]
    assert found[9] == [1.0, 0.0, 1.0, 0.0]
    assert len(rows) == 12


def test_a_launch_is_as_late_as_its_kernel_starts_after_it(one):
    table = waiting.launch_stats(one[0])
    assert table.rows == [
        (1, 5.0, 30.0, 14.0),
        (2, 5.0, 20.0, 45.0),
        (3, 5.0, 20.0, 85.0),
        (4, 5.0, 10.0, 15.0),
        (5, 5.0, 10.0, 5.0),
        (6, 5.0, 10.0, 5.0),
    ]


def test_copies_have_a_bandwidth_while_they_run(one):
    (row,) = waiting.bandwidth_summary(one).rows
    assert row[:2] == (0, "Memcpy DtoH")
    assert row[2:4] == (2.0, 4.0)


def test_an_imported_step_takes_the_measured_time(tmp_path):
    more = [
        {**event, "ts": event["ts"] + 1000 * k, "name": event["name"].replace("#3", f"#{3 + k}"),
         "args": {name: value + 100 * k if name == "correlation" else value for name, value in event["args"].items()}}
        for k in range(3) for event in EVENTS
    ]  # fmt: skip
    profile = read_profile(write_profile(tmp_path / "a.json", more))
    found = import_step([profile], 3, "h100-sxm")
    assert found.name == "ProfilerStep#3"
    assert (found.measured_s, found.step_times_s) == (1e-3, (1e-3, 1e-3, 1e-3))
    assert found.error == pytest.approx(found.replayed_s / found.measured_s - 1)
    assert abs(found.error) < 1e-6
