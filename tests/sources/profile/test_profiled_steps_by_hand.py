"""Steps of profiles and what their work waits for, against times counted by hand and against plain loops."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profile_files import Event, host, kernel, launch, write_profile

from forerun.common.errors import ForerunError
from forerun.sources.profile.labels import MODULE, labels_of
from forerun.sources.profile.read import read_profile
from forerun.sources.profile.schedule import HostWait, Schedule, schedule_of, typical
from forerun.sources.profile.step import NONE, Step, _in_order, _queued, steps_of

US = 1000


def _step(begin: float, dur: float, number: int = 1) -> Event:
    return host(f"ProfilerStep#{number}", begin, dur, "user_annotation")


def _steps(folder: Path, *events: Event) -> list[Step]:
    return steps_of(read_profile(write_profile(folder / "a.json", events)))


def _schedule(folder: Path, *events: Event, number: int = -1) -> Schedule:
    return schedule_of(_steps(folder, *events)[number])


def test_a_file_without_steps_is_one_from_its_first_event_to_its_last(tmp_path: Path) -> None:
    (step,) = _steps(tmp_path, launch(5, 2, 1), kernel("a", 9, 4, 1), kernel("last", 40, 0, 8), host("aten::mm", 3, 8))
    assert (step.name, step.begin_ns, step.end_ns, len(step)) == ("the whole file", 3 * US, 40 * US + 1, 2)
    assert (step.before_ns, step.backlog_ns) == (3 * US, 3 * US)
    (step,) = _steps(tmp_path, kernel("a", 9, 4, 1))
    assert (step.begin_ns, step.end_ns, step.call.tolist()) == (9 * US, 13 * US + 1, [NONE])


def test_steps_hold_what_they_launch_or_what_starts_in_them(tmp_path: Path) -> None:
    first, third = _steps(
        tmp_path,
        *(_step(0, 100, 1), _step(100, 100, 2), _step(200, 100, 3)),
        *(launch(0, 5, 11), launch(99, 5, 12), launch(200, 5, 13)),
        *(kernel("in the first", 20, 10, 11), kernel("runs later", 120, 130, 12), kernel("last", 260, 90, 13)),
        kernel("without a launch", 250, 5, 99, 9),
        launch(301, 1, 14),
        kernel("after all steps", 400, 5, 14),
    )
    names = [[step.profile.texts[one] for one in step.profile.rows.name[step.row]] for step in (first, third)]
    assert names == [["in the first", "runs later"], ["last", "without a launch"]]
    assert [step.name for step in (first, third)] == ["ProfilerStep#1", "ProfilerStep#3"]
    assert (first.before_ns, first.done_ns, first.backlog_ns) == (0, 250 * US, 0)
    assert (third.before_ns, third.done_ns, third.backlog_ns) == (250 * US, 350 * US, 250 * US)
    assert third.call.tolist()[1] == NONE
    assert third.leads.tolist() == [False, False]


def test_a_step_of_a_day_is_the_longest(tmp_path: Path) -> None:
    day = 86_400 * 10**6
    assert len(_steps(tmp_path, _step(0, day), launch(1, 1, 1), kernel("a", 3, day - 3, 1))) == 1
    with pytest.raises(ForerunError, match="a step takes 1 days"):
        _steps(tmp_path, _step(0, day), launch(1, 1, 1), kernel("a", 3, day - 2, 1))
    with pytest.raises(ForerunError, match="no profiler step launches work"):
        _steps(tmp_path, _step(0, 5), launch(6, 1, 1), kernel("a", 8, 2, 1))


work = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30), st.integers(0, 2)), min_size=1, max_size=12)


@given(work)
def test_a_queue_holds_what_is_issued_and_has_not_begun(work: list[tuple[int, int, int]]) -> None:
    issued, start = np.array([one for one, _, _ in work]), np.array([one + later for one, later, _ in work])
    stream = np.array([one for _, _, one in work])
    wanted = [
        sum(s == stream[k] and i < issued[k] < b for i, b, s in zip(issued, start, stream, strict=True))
        for k in range(len(work))
    ]
    assert _queued(issued, start, stream).tolist() == wanted


@given(work, st.randoms(use_true_random=False))
def test_the_order_of_issue_is_that_of_each_stream(work: list[tuple[int, int, int]], random: object) -> None:
    """Nothing is issued after it starts, nor after what follows it on its stream."""
    issued, stream = np.array([one for one, _, _ in work]), np.array([one for _, _, one in work])
    start = np.arange(len(work))
    random.shuffle(start)  # type: ignore[attr-defined]
    order, times = _in_order(start, stream, issued)
    limits = [
        min(min(i, b) for i, b, s in zip(issued, start, stream, strict=True) if s == stream[k] and b >= start[k])
        for k in range(len(work))
    ]
    assert times.tolist() == [limits[k] for k in order] == sorted(limits)
    assert sorted(order.tolist()) == list(range(len(work)))
    for one in set(stream.tolist()):
        begins = [start[k] for k in order if stream[k] == one]
        assert begins == sorted(begins)


def test_the_host_leads_while_the_device_runs_the_step_before(tmp_path: Path) -> None:
    """The second step begins 50 us before the first is done; a copy of its own begins before that."""
    events = (
        *(_step(0, 100, 1), _step(100, 100, 2), launch(10, 5, 1), launch(110, 5, 2), launch(120, 5, 3)),
        *(kernel("first", 20, 130, 1), kernel("second", 150, 30, 2), kernel("Memcpy HtoD", 130, 10, 3, 9)),
    )
    found = _schedule(tmp_path, *events)
    assert found.step.leads.tolist() == [False, True]
    assert found.ready_ns.tolist() == [150 * US, 130 * US]  # behind the first step's kernel; as late as it began
    assert (found.lead_ns, found.measured_ns) == (50 * US, 100 * US)
    longer = (*events[:6], kernel("second", 150, 130, 2), events[7])
    assert _schedule(tmp_path, *longer).measured_ns == 130 * US  # 280 - 150


def test_a_wait_for_the_step_before_is_no_work_of_the_host(tmp_path: Path) -> None:
    events = (
        *(_step(0, 100, 1), _step(100, 100, 2), launch(10, 5, 1), kernel("first", 20, 130, 1)),
        *(launch(112, 48, 9, "cudaDeviceSynchronize"), launch(170, 5, 2), kernel("second", 180, 10, 2)),
    )
    found = _schedule(tmp_path, *events)
    assert found.lead_ns == 12 * US  # 50 us, of which the host waits from 112 to 150
    assert found.host_waits == ()  # nothing of its own step
    assert found.measured_ns == (12 + 50) * US


def test_calls_that_synchronise_wait_for_what_ends_in_them(tmp_path: Path) -> None:
    def events(name: str) -> tuple[Event, ...]:
        return (
            *(_step(0, 300), launch(10, 5, 1), launch(16, 2, 2), launch(19, 1, 3), launch(30, 90, 9, name)),
            *(kernel("a", 20, 60, 1), kernel("b", 22, 83, 2, 9), kernel("early", 23, 7, 3, 11)),
            *(launch(200, 5, 4), kernel("late", 210, 5, 4, 13)),
        )

    for name, until in (
        ("hipDeviceSynchronize", (0, 1)),
        ("cudaStreamSynchronize", (1,)),
        ("hipEventSynchronize", (1,)),
    ):
        found = _schedule(tmp_path, *events(name))
        assert found.host_waits == (HostWait(30 * US, 120 * US, until),)
        assert (found.lead_ns, found.measured_ns) == (0, 300 * US)
    assert _schedule(tmp_path, *events("cudaMalloc")).host_waits == ()


def test_of_waits_that_overlap_the_first_counts(tmp_path: Path) -> None:
    sync = "cudaStreamSynchronize"
    common = (_step(0, 300), launch(10, 5, 1), kernel("a", 20, 60, 1), launch(90, 5, 2), kernel("b", 96, 60, 2))
    first, inside = launch(30, 52, 9, sync), launch(40, 45, 10, sync, tid=2)
    behind = launch(100, 60, 11, sync)
    found = _schedule(tmp_path, *common, inside, behind, first).host_waits
    assert found == (HostWait(30 * US, 82 * US, (0,)), HostWait(100 * US, 160 * US, (1,)))
    busy = launch(50, 2, 3, tid=3)  # another thread launches meanwhile
    found = _schedule(tmp_path, *common, first, busy, kernel("c", 60, 1, 3, 9)).host_waits
    assert found == ()


def test_a_copy_holds_its_call_only_if_it_ends_in_it(tmp_path: Path) -> None:
    for name, dur, until in (
        ("Memcpy HtoD (Pageable -> Device)", 20, [(0,)]),
        ("Memcpy DtoH", 80, [(0,)]),
        ("Memcpy DtoH", 81, []),
        ("Memcpy DtoD", 20, []),
    ):
        found = _schedule(tmp_path, _step(0, 300), launch(10, 90, 1, "cudaMemcpyAsync"), kernel(name, 20, dur, 1))
        assert [wait.until for wait in found.host_waits] == until, (name, dur)


def test_events_order_streams_from_the_last_work_before_the_record(tmp_path: Path) -> None:
    events = (
        *(_step(0, 500), launch(10, 5, 1), launch(20, 2, 5, "hipEventRecord"), launch(22, 1, 3, tid=2)),
        *(launch(24, 2, 6, "cuStreamWaitEvent"), launch(25, 1, 4, tid=2), launch(30, 5, 2)),
        *(
            kernel("long", 20, 150, 1),
            kernel("after the record", 171, 20, 3),
            kernel("of another thread", 180, 5, 4, 8),
        ),
        kernel("waits", 200, 10, 2, 9),
    )
    found = _schedule(tmp_path, *events)
    assert found.after == ((), (), (), (0,))
    assert found.ready_ns.tolist() == [10 * US, 170 * US, 25 * US, 170 * US]
    without_record = tuple(event for event in events if event["name"] != "hipEventRecord")
    assert _schedule(tmp_path, *without_record).after == ((), (), (), (1,))  # what was issued before the wait


@pytest.mark.parametrize(
    ("durations", "chosen"),
    [([7], 0), ([7, 1], 0), ([7, 3, 1], 1), ([7, 3, 5, 1], 2), ([8, 2, 4, 6, 99], 2), ([9, 1, 1, 9, 3, 5], 4)],
)
def test_the_typical_step_is_the_lower_median_of_all_but_the_last(
    tmp_path: Path, durations: list[int], chosen: int
) -> None:
    events = []
    for number, dur in enumerate(durations):
        at = 1000 * number
        events += [_step(at, 100 + dur, number), launch(at + 1, 1, number + 1), kernel("a", at + 3, 2, number + 1)]
    found = typical([schedule_of(step) for step in _steps(tmp_path, *events)])
    assert found.step.name == f"ProfilerStep#{chosen}"


def _nested(draw: st.DrawFn, first: int, last: int, depth: int) -> list[tuple[int, int, int]]:
    """Calls (begin, end, depth) that lie in each other or beside each other."""
    if depth > 3 or last - first < 4 or not draw(st.booleans()):
        return []
    begin = draw(st.integers(first, last - 3))
    end = draw(st.integers(begin + 2, last))
    return [
        (begin, end, depth),
        *_nested(draw, begin + 1, end - 1, depth + 1),
        *_nested(draw, end + 1, last, depth),
    ]


@settings(max_examples=25)
@given(st.data())
def test_a_launch_is_in_the_modules_and_the_phase_of_all_calls_around_it(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    kinds = {
        f"{MODULE}M": "python_function",
        "aten::mm": "cpu_op",
        "MmBackward0": "cpu_op",
        "Optimizer.step#Adam": "user_annotation",
        "other": "user_annotation",
    }
    events, calls = [_step(0, 100)], []
    for thread in (1, 2):
        for begin, end, _ in data.draw(st.composite(_nested)(1, 90, 0)):
            name = data.draw(st.sampled_from(sorted(kinds)))
            calls.append((thread, begin, end, f"{name}{len(calls)}"))
            events.append(host(calls[-1][3], begin, end - begin, kinds[name], thread))
    where = data.draw(st.lists(st.tuples(st.integers(1, 2), st.integers(1, 90)), min_size=1, max_size=4, unique=True))
    events += [launch(at + 0.4, 0.1, number + 1, tid=thread) for number, (thread, at) in enumerate(where)]
    events += [kernel("k", 200 + 10 * number, 5, number + 1) for number in range(len(where))]
    path = write_profile(tmp_path_factory.mktemp("profile") / "a.json", events)
    (step,) = steps_of(read_profile(path))
    for label, call in zip(labels_of(step), step.call.tolist(), strict=True):
        thread, at = int(step.profile.rows.tid[call]), step.profile.rows.ts_ns[call] / US
        around = sorted(one for one in calls if one[0] == thread and one[1] <= at < one[2])
        names = [name for *_, name in around]
        assert label.module == ".".join(name[len(MODULE) :] for name in names if name.startswith(MODULE))
        operators = [name for name in names if name.startswith(("aten", "Mm"))]
        found = "" if label.operator == NONE else step.profile.texts[step.profile.rows.name[label.operator]]
        assert found == (operators[-1] if operators else "")
        is_update, is_backward = (any(word in name for name in names) for word in ("Optimizer", "Backward"))
        assert label.phase.name == ("OPTIMIZER" if is_update else "BACKWARD" if is_backward else "FORWARD")
