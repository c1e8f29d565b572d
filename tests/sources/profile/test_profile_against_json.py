"""The compiled reader of profiles against Python's own reader of JSON, on events with values of every kind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.sources.profile import read
from forerun.sources.profile.event_keys import ARGUMENT_SPELLINGS, TEXT_KEYS, Key
from forerun.sources.profile.profile import Profile
from forerun.sources.profile.read import read_profile

Event = dict[str, Any]
texts = st.text(max_size=10) | st.sampled_from(["kernel", "[memory]", "cpu_op", '"quoted" \\ back', "12 bytes, x"])
whole = st.integers(-(10**15), 10**15)
others = st.sampled_from(
    [None, True, [], {}, [1, [2]], {"args": {"stream": 1}}, "", "x", "7", " 7", "0x0", "-3", "1e3"]
)
numbers = whole | st.sampled_from([2.0, 7.9, -0.5, 1e6])
arguments = st.dictionaries(st.sampled_from([*ARGUMENT_SPELLINGS, "kernel", "ts", "dur", "a"]), numbers | others)
times = st.integers(0, 10**12) | st.integers(0, 10**12).map(lambda thousandths: thousandths / 1000)
events = st.fixed_dictionaries(
    {"ts": times, "name": texts},
    optional={
        "ph": st.sampled_from(["X", "i", "M", "Xi", "", 88, None]),
        "cat": texts,
        "dur": times | st.none(),
        "pid": whole | texts,
        "tid": whole | texts | st.just([5]),
        "args": arguments | others,
        "id": others,
        "stream": whole,
    },
)


def _number(value: object) -> float | None:
    """The number that a value is, also as a text; None for any other value."""
    if isinstance(value, str):
        try:
            found = json.loads(value) if value == value.strip() else None
        except ValueError:
            return None
        return found if isinstance(found, (int, float)) and not isinstance(found, bool) else None
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _rows(listed: list[Event]) -> Iterator[tuple[int, Event]]:
    """The events that a profile keeps, with their places."""
    for place, event in enumerate(listed):
        if ("cat" in event and event.get("dur") is not None) or (
            event.get("ph") == "i" and event["name"] == "[memory]"
        ):
            yield place, event


def _argument(event: Event, key: Key) -> Any:
    args = event.get("args")
    said = args if isinstance(args, dict) else {}
    return [said[name] for name, one in ARGUMENT_SPELLINGS.items() if one == key and name in said]


def _check(found: Profile, listed: list[Event]) -> None:
    rows, kept = found.rows, list(_rows(listed))
    assert rows.place.tolist() == [place for place, _ in kept]
    assert rows.ts_ns.tolist() == [round(event["ts"] * 1000) for _, event in kept]
    lasting = [event.get("dur") for _, event in kept]
    assert rows.dur_ns.tolist() == [-1 if dur is None else round(dur * 1000) for dur in lasting]
    assert [found.texts[number] for number in rows.name] == [event["name"] for _, event in kept]
    said = [event.get("cat") for _, event in kept]
    assert [found.texts[number] if number >= 0 else None for number in rows.cat] == said
    for column, field in ((rows.pid, "pid"), (rows.tid, "tid")):
        values = [event.get(field, 0) for _, event in kept]
        number_of = dict(zip(map(str, values), column.tolist(), strict=True))
        for value, number in zip(values, column.tolist(), strict=True):
            assert number == value if isinstance(value, int) else number <= -(1 << 41)
            assert number_of[str(value)] == number
    for column, key in ((rows.stream, Key.STREAM), (rows.correlation, Key.CORRELATION)):
        values = [(_argument(event, key) or [None])[-1] for _, event in kept]
        wanted = [-1 if (number := _number(value)) is None else int(number) for value in values]
        assert column.tolist() == wanted
    for key in set(ARGUMENT_SPELLINGS.values()) - {Key.STREAM, Key.CORRELATION, Key.EXTERNAL_ID}:
        for (_, event), value in zip(kept, found.values(key, float("nan")).tolist(), strict=True):
            _check_argument(found, key, _argument(event, key), value)
    left = [event for place, event in enumerate(listed) if place not in {place for place, _ in kept}]
    assert (found.n_events, found.without_duration) == (len(listed), sum(one.get("ph") == "X" for one in left))
    fractions = [time for event in listed for time in (event["ts"], event.get("dur")) if isinstance(time, float)]
    if not fractions:
        assert not found.fractional


def _check_argument(found: Profile, key: Key, said: list[Any], value: float) -> None:
    """Of several spellings of a key any may count."""
    if key in TEXT_KEYS:
        shown = [one if isinstance(one, str) else json.dumps(one) for one in said]
        assert (found.texts[int(value)] in shown) if said else value != value
        return
    wanted = [_number(one) for one in said]
    known = [one if key == Key.BANDWIDTH else int(one) for one in wanted if one is not None]
    assert value == pytest.approx(next((one for one in known if one == value), known[-1])) if known else value != value


@settings(max_examples=25)
@given(listed=st.lists(events, min_size=1, max_size=6), piece=st.sampled_from([64, 1 << 12]), ascii_only=st.booleans())
def test_every_event_reads_as_python_reads_it(
    tmp_path_factory: pytest.TempPathFactory, listed: list[Event], piece: int, ascii_only: bool
) -> None:
    listed = [*listed, {"ts": 1, "dur": 2, "name": "last", "cat": "kernel", "args": {"stream": 3}}]
    path = tmp_path_factory.mktemp("profile") / "a.json"
    path.write_text(json.dumps({"traceEvents": listed, "b": [1, "]"]}, ensure_ascii=ascii_only), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read, "_PIECE", piece)
        patch.setattr(read, "_FIRST_TEXTS", 2)
        found = read_profile(path)
    _check(found, listed)
    assert found.metadata == {"b": [1, "]"]}
