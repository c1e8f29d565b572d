"""Memory snapshots of allocators whose whole history is known: what a window of it shows is what really was there."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.common.errors import ForerunError
from forerun.sources.profile.memory_snapshot import MemorySnapshot, Moment, read_memory_snapshot

Event = dict[str, Any]


def _event(action: str, addr: int, size: int, time_us: int, **more: Any) -> Event:
    return {"action": action, "addr": addr, "size": size, "time_us": time_us, "frames": [], **more}


def _read(folder: Path, segments: list[Event], *traces: list[Event]) -> MemorySnapshot:
    path = folder / "a.pickle"
    path.write_bytes(pickle.dumps({"segments": segments, "device_traces": list(traces)}, protocol=4))
    return read_memory_snapshot(path)


def _block(address: int, size: int, state: str = "active_allocated") -> Event:
    return {"address": address, "size": size, "state": state, "frames": []}


def test_without_events_the_segments_tell_the_only_moment(tmp_path: Path) -> None:
    blocks = [_block(0, 30), _block(30, 50, "inactive"), _block(80, 7), _block(87, 13, "active_awaiting_free")]
    segments = [{"device": 0, "total_size": 100, "blocks": blocks}, {"device": 0, "total_size": 40, "blocks": []}]
    found = _read(tmp_path, segments)
    assert found.moments == (Moment(time_us=0, allocated=37, reserved=140),)
    assert [block.size for block in found.at_peak] == [30, 7]
    assert (found.peak, found.peak_reserved) == (found.moments[0], 140)
    assert (found.inactive, found.largest_inactive, found.retries, found.device) == (50, 50, 0, 0)
    assert _read(tmp_path, segments, []) == found


def test_the_device_with_most_events_is_read_and_no_other(tmp_path: Path) -> None:
    segments = [
        {"device": 0, "total_size": 1000, "blocks": [_block(0, 500), _block(500, 500, "inactive")]},
        {"device": 1, "total_size": 64, "blocks": [_block(0, 8)]},
        {"total_size": 4, "blocks": []},
    ]
    events = [
        _event("segment_alloc", 0, 64, 5),
        _event("alloc", 0, 8, 6),
        _event("oom", 0, 999, 7),
        _event("snapshot", 0, 0, 8),
        _event("oom", 0, 999, 9),
    ]
    found = _read(tmp_path, segments, [_event("alloc", 0, 500, 1)], events)
    assert (found.device, found.retries, found.inactive, found.largest_inactive) == (1, 2, 0, 0)
    assert found.moments == tuple(
        Moment(*one) for one in ((5, 0, 4), (5, 0, 68), (6, 8, 68), (7, 8, 68), (8, 8, 68), (9, 8, 68))
    )
    assert (found.peak, found.peak_reserved) == (Moment(6, 8, 68), 68)


def test_of_equal_peaks_the_first_counts_and_it_may_be_before_all_events(tmp_path: Path) -> None:
    freed = [_event("free_requested", 0, 40, 3), _event("alloc", 64, 40, 4)]
    found = _read(tmp_path, [{"total_size": 128, "blocks": [_block(64, 40)]}], freed)
    assert [moment.allocated for moment in found.moments] == [40, 0, 40]
    assert [block.where for block in found.at_peak] == ["before the first event"]
    assert found.peak is found.moments[0]


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[tuple[str, int, int]], int, dict[int, int]]:
    """Allocations and frees in order (action, address, size), how many of them are not recorded, and what is left."""
    live: dict[int, int] = {}
    done = []
    for _ in range(draw(st.integers(1, 25))):
        address = 512 * draw(st.integers(0, 5))
        if address in live:
            done.append(("free_requested", address, live.pop(address)))
        else:
            live[address] = draw(st.integers(1, 512))
            done.append(("alloc", address, live[address]))
    return done, draw(st.integers(0, len(done))), live


@given(histories())
def test_a_window_shows_what_was_there(
    tmp_path_factory: pytest.TempPathFactory, history: tuple[list[tuple[str, int, int]], int, dict[int, int]]
) -> None:
    done, unseen, left = history
    events = [_event(action, address, size, time) for time, (action, address, size) in enumerate(done)][unseen:]
    blocks = [_block(address, size) for address, size in left.items()]
    found = _read(tmp_path_factory.mktemp("p"), [{"device": 0, "total_size": 4096, "blocks": blocks}], events)
    live: dict[int, int] = {}
    states = [dict(live)]
    for action, address, size in done:
        live = {key: value for key, value in live.items() if key != address}
        if action == "alloc":
            live[address] = size
        states.append(live)
    seen = states[unseen:]
    assert [moment.allocated for moment in found.moments] == [sum(state.values()) for state in seen]
    assert {moment.reserved for moment in found.moments} == {4096}
    assert [moment.time_us for moment in found.moments[1:]] == list(range(unseen, len(done)))
    largest = max(seen, key=lambda state: sum(state.values()))
    assert [block.size for block in found.at_peak] == sorted(largest.values(), reverse=True)


@pytest.mark.parametrize(
    ("key", "value", "fits"),
    [
        ("size", (1 << 50) - 1, True),
        ("size", 1 << 50, False),
        ("size", -1, False),
        ("size", True, False),
        ("size", 5.0, False),
        ("addr", (1 << 64) - 1, True),
        ("addr", 1 << 64, False),
        ("time_us", 1 << 50, False),
    ],
)
def test_sizes_and_addresses_have_limits(tmp_path: Path, key: str, value: object, fits: bool) -> None:
    event = _event("alloc", 0, 1, 2) | {key: value}
    if fits:
        assert len(_read(tmp_path, [], [event]).at_peak) == 1
    else:
        with pytest.raises(ForerunError, match=f"{key}: expected a number of bytes"):
            _read(tmp_path, [], [event])


def test_a_snapshot_of_nothing_is_refused(tmp_path: Path) -> None:
    for traces in ((), ([],)):
        with pytest.raises(ForerunError, match="no segments and no events"):
            _read(tmp_path, [], *traces)


def test_what_an_old_snapshot_does_not_say_is_nothing(tmp_path: Path) -> None:
    """Releases before 2.1 write no times."""
    found = _read(tmp_path, [{"blocks": []}], [{"action": "alloc", "size": 5}, {"action": "segment_alloc"}])
    assert found.moments == (Moment(0, 0, 0), Moment(0, 5, 0), Moment(0, 5, 0))
