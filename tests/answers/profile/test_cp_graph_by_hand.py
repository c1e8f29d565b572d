"""Edges of the graph of a critical path and its longest path, by hand, from functions that are not compiled here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forerun.answers.profile import cp_graph, critical_path
from forerun.answers.profile.cp_graph import DeviceWork, Edges, EdgeType, GpuEvent, longest_path, without_doubles
from forerun.answers.profile.window import NONE

OPERATOR, DEPENDENCY, LAUNCH, DELAY, SYNC = EdgeType
KERNEL, STREAM_WAIT, EVENT_SYNC, STREAM_SYNC, CONTEXT_SYNC = GpuEvent


def plain(name: str) -> Any:
    function = getattr(cp_graph, name)
    return getattr(function, "py_func", function)


def listed(edges: Edges, count: int) -> list[tuple[Any, ...]]:
    return [tuple(column[i].item() for column in edges) for i in range(count)]


def stack(order: str, times: dict[str, tuple[float, float]], outside: str = "", blocking: str = "") -> Any:
    """Edges of events a, b, ... of one thread, which start at their first letter in `order` and end at the second."""
    names = sorted(times)
    row = np.array([names.index(name) for name in order])
    is_start = np.array([name not in order[:i] for i, name in enumerate(order)])
    time_us = np.array([times[name][side] for side in (0, 1) for name in names])
    edges = Edges.empty(20)
    inside, blocks = (np.array([(name in of) == yes for name in names]) for of, yes in ((outside, 0), (blocking, 1)))
    return listed(edges, plain("stack_edges")(row, is_start, time_us, inside, blocks, edges, 0))


A, B, C = (0.0, 10.0), (2.0, 5.0), (7.0, 8.0)


def test_a_stack_of_calls() -> None:
    assert stack("abba", {"a": A, "b": B}) == [
        (0, 2, OPERATOR, 2.0, 0), (2, 3, OPERATOR, 3.0, 1), (3, 1, OPERATOR, 5.0, 0),
    ]  # fmt: skip
    assert stack("abbcca", {"a": A, "b": B, "c": C})[2:4] == [(3, 4, OPERATOR, 2.0, 0), (4, 5, OPERATOR, 1.0, 2)]
    assert stack("abba", {"a": A, "b": B}, blocking="b")[1] == (2, 3, OPERATOR, 0.0, 1)
    assert stack("abba", {"a": A, "b": B}, blocking="a") == [
        (0, 2, OPERATOR, 2.0, 0), (2, 3, OPERATOR, 3.0, 1), (3, 1, OPERATOR, 0.0, 0),
    ]  # fmt: skip
    assert stack("abba", {"a": A, "b": B}, outside="b") == [(0, 1, OPERATOR, 10.0, 0)]
    assert stack("abba", {"a": A, "b": B}, outside="a") == [(2, 3, OPERATOR, 3.0, 1)]


def test_calls_after_each_other() -> None:
    times = {"a": (0.0, 3.0), "b": (5.0, 6.0), "c": (8.0, 12.0)}
    assert stack("aabbcc", times) == [
        (0, 1, OPERATOR, 3.0, 0),
        (1, 2, DEPENDENCY, 0.0, -1), (2, 3, OPERATOR, 1.0, 1),
        (3, 4, DEPENDENCY, 0.0, -1), (4, 5, OPERATOR, 4.0, 2),
    ]  # fmt: skip
    assert stack("aabbcc", times, outside="b")[1:] == [(1, 4, DEPENDENCY, 0.0, -1), (4, 5, OPERATOR, 4.0, 2)]


START = np.array([0.0, 0.0, 0.0, 0.0, 10.0, 16.0, 30.0, 40.0])
END = np.array([1.0, 1.0, 1.0, 1.0, 15.0, 20.0, 35.0, 45.0])
"""four calls, and kernels 4 to 7"""
USUAL = {"kind": KERNEL, "stream": 0, "launch": -1, "launch_us": 3.0, "queue": 0.0, "launch_queue": 1.0}


def device(*entries: dict[str, Any], outside: tuple[int, ...] = ()) -> Any:
    """Edges of work, beside those of kernels themselves."""
    rows = [{"row": -1, **USUAL, "source": -1, "waiting": -1, **each} for each in entries]
    real = {"launch_us", "queue", "launch_queue"}
    work = DeviceWork(
        *(np.array([each[name] for each in rows], float if name in real else int) for name in DeviceWork._fields)
    )
    edges = Edges.empty(40)
    inside = ~np.isin(np.arange(len(START)), outside)
    found = listed(edges, plain("device_edges")(work, START, END, inside, 2, edges, 0))
    kernels = [each for each in found if each[2] == OPERATOR]
    assert kernels == [
        (2 * row, 2 * row + 1, OPERATOR, END[row] - START[row], row)
        for row in (each["row"] for each in rows if each["kind"] == KERNEL)
    ]
    return [each for each in found if each[2] != OPERATOR]


def test_a_kernel_begins_after_its_launch() -> None:
    first = {"row": 4, "launch": 0}
    assert device(first) == [(0, 8, LAUNCH, 7.0, -1)]
    assert device({**first, "launch": 1}) == [(2, 8, LAUNCH, 7.0, -1)]
    assert device(first, outside=(0,)) == []
    assert device({"row": 4}) == []
    assert device({**first, "launch_queue": 2.0}) == []
    assert device({**first, "queue": 1.0}) == []


@pytest.mark.parametrize(
    ("changes", "waits"),
    [
        ({"launch_us": 15.5}, False),
        ({"launch_us": 15.0}, True),
        ({"launch_us": 15.5, "queue": 1.0}, True),
        ({"launch_us": 15.5, "launch_queue": 2.0}, True),
    ],
)
def test_a_kernel_begins_after_the_one_before_it(changes: dict[str, Any], waits: bool) -> None:
    first, second = {"row": 4}, {"row": 5, "launch": 1, **changes}
    after_launch = (2, 10, LAUNCH, 16.0 - changes["launch_us"], -1)
    assert device(first, second) == [(9, 10, DELAY, 1.0, 4) if waits else after_launch]


def test_a_kernel_of_another_stream_is_not_before_it() -> None:
    assert device({"row": 4}, {"row": 5, "stream": 1, "launch": 1}) == [(2, 10, LAUNCH, 13.0, -1)]


def test_a_stream_waits_for_a_kernel_of_another_one() -> None:
    first, wait = {"row": 4}, {"kind": STREAM_WAIT, "source": 4, "waiting": 6, "stream": 1}
    later = {"row": 6, "stream": 1, "launch": 1}
    held = (9, 12, SYNC, 0.0, -1)
    assert device(first, wait, later) == [held]
    assert device(first, wait, {**later, "launch_us": 15.0}) == [held]
    assert device(first, wait, {**later, "launch_us": 16.0}) == [held, (2, 12, LAUNCH, 14.0, -1)]
    assert device(first, wait, later, outside=(4,)) == [(2, 12, LAUNCH, 27.0, -1)]
    for nothing in ({"source": -1}, {"waiting": -1}):
        assert device(first, {**wait, **nothing}, later) == [(2, 12, LAUNCH, 27.0, -1)]
    early = {"row": 5, "stream": 1}
    assert device(first, early, wait, later) == [held, (11, 12, DELAY, 10.0, 5)]
    longer = {**wait, "source": 5, "waiting": 7}
    assert device({"row": 5}, {"row": 4, "stream": 1}, longer, {**later, "row": 7}) == [(11, 14, SYNC, 0.0, -1)]
    equal = {**wait, "source": 4, "waiting": 7}
    assert device({"row": 4}, {"row": 4, "stream": 1}, equal, {**later, "row": 7}) == [(9, 14, SYNC, 0.0, -1)]


def test_the_host_waits_for_the_device() -> None:
    kernels = ({"row": 4, "stream": 1}, {"row": 5}, {"row": 6})
    event = {"kind": EVENT_SYNC, "launch": 2, "source": 5}
    before = device(*kernels)
    assert device(*kernels, event) == [*before, (11, 5, SYNC, 0.0, -1)]
    assert device(*kernels, {**event, "launch": 0, "source": 4}) == [*before, (9, 1, SYNC, 0.0, -1)]
    stream = {"kind": STREAM_SYNC, "launch": 2}
    assert device(*kernels, stream) == [*before, (13, 5, SYNC, 0.0, -1)]
    assert device(*kernels, {**stream, "stream": 1}) == [*before, (9, 5, SYNC, 0.0, -1)]
    context = {**stream, "kind": CONTEXT_SYNC}
    assert device(*kernels, context) == [*before, (9, 5, SYNC, 0.0, -1), (13, 5, SYNC, 0.0, -1)]
    assert device(context, *kernels) == before
    for one in (event, stream, context):
        assert device(*kernels, {**one, "launch": -1}) == before
        assert device(*kernels, one, outside=(2,)) == before
    assert device(*kernels, {**event, "source": -1}) == before
    assert device(*kernels, {**event, "source": 0}, outside=(0,)) == before


def edges(*rows: tuple[int, int, float]) -> Edges:
    source, target, weight = (np.array(column) for column in zip(*rows, strict=True))
    return Edges(source, target, np.zeros(len(rows), np.int8), weight.astype(float), np.arange(len(rows)))


@pytest.mark.parametrize(
    ("rows", "path"),
    [
        ([(5, 7, 1.0)], [0]),
        ([(1, 2, 1.0), (2, 3, 1.0), (1, 3, 1.5)], [0, 1]),
        ([(1, 2, 1.0), (2, 3, 1.0), (1, 3, 2.5)], [2]),
        ([(1, 3, 2.0), (1, 2, 1.0), (2, 3, 1.0)], [0]),
        ([(1, 2, 1.0), (2, 3, 1.0), (1, 3, 2.0)], [0, 1]),
        ([(1, 2, -5.0), (2, 3, 1.0), (4, 3, 0.5)], [0, 1]),
        ([(9, 8, 1.0), (8, 7, 1.0), (3, 2, 5.0)], [2]),
        ([(1, 2, 1.0), (2, 1, 1.0)], None),
        ([(1, 2, 1.0), (2, 3, 1.0), (3, 2, 1.0)], None),
    ],
)
def test_the_longest_path(
    rows: list[tuple[int, int, float]], path: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cp_graph, "_longest", plain("_longest"))
    found = longest_path(edges(*rows))
    if path is None:
        assert found is None
    else:
        assert found is not None
        assert (found[0].tolist(), found[1]) == (path, len({node for a, b, _ in rows for node in (a, b)}))


def test_of_doubles_the_first_place_and_the_last_values_stay() -> None:
    found = without_doubles(edges((1, 2, 1.0), (3, 4, 2.0), (1, 2, 3.0), (2, 1, 4.0)))
    assert list(zip(found.source, found.target, found.weight_us, found.event, strict=True)) == [
        (1, 2, 3.0, 2), (3, 4, 2.0, 1), (2, 1, 4.0, 3),
    ]  # fmt: skip
    assert len(without_doubles(Edges.empty(0)).source) == 0


def window(**columns: list[Any]) -> Any:
    """Events of a window, as the graph reads them."""
    arrays = {name: np.array(values) for name, values in columns.items()}

    class Window(SimpleNamespace):
        def named(self, names: frozenset[str]) -> Any:
            return np.isin(self.names, list(names))

    return Window(**arrays)


def test_the_part_is_the_hosts_events_within_it_and_what_they_launch() -> None:
    # of the host: at the start, before it, at the end, after it, without time; of the device: launched by the first,
    # by one outside, by none; a stream that waits
    events = window(
        index=[3, 1, 2, 0, 8, 7, 6, 5, 4],
        ts_us=[10.0, 9.0, 20.0, 21.0, 15.0, 90.0, 12.0, 13.0, 0.0],
        dur_us=[1.0, 5.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0],
        stream=[NONE, NONE, NONE, NONE, NONE, 7, 7, 7, 7],
        linked=[7, 6, 0, NONE, NONE, 3, 1, NONE, NONE],
        names=["a"] * 8 + ["Stream Wait Event"],
    )
    assert critical_path._clipped(events, 10.0, 20.0).tolist() == [2, 0, 8, 5]


def test_threads_of_the_host_are_told_apart_by_process_and_thread() -> None:
    events = window(row=[0, 1, 2, 3, 4, 5, 6], stream=[-1, -1, -1, -1, 7, -1, -1])
    events.profile = SimpleNamespace(
        rows=SimpleNamespace(pid=np.array([1, 1, 2, 1, 1, 1, 2]), tid=np.array([5, 6, 6, 5, 9, 9, 6]))
    )
    threads = critical_path._host_threads(events, np.arange(7))
    assert [thread.tolist() for thread in threads] == [[0, 3], [1], [2, 6]]
    assert critical_path._host_threads(events, np.arange(0)) == []
