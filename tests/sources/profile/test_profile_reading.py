import gzip
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profile_files import host, kernel, launch, write_profile

from forerun.common.errors import ForerunError
from forerun.sources.profile import read
from forerun.sources.profile.event_keys import Key
from forerun.sources.profile.read import read_profile, read_profiles

EVENTS = [
    {"ph": "M", "name": "process_name", "pid": "Spans", "tid": 0, "ts": 1, "args": {"name": "python"}},
    host("aten::mm", 100, 20, **{"External id": 5, "Input Dims": [[2, 3], [3, 4]], "Sequence number": 1}),
    launch(105, 3, 11),
    {"ph": "s", "id": 11, "pid": 10, "tid": 1, "ts": 105, "cat": "ac2g", "name": "ac2g"},
    kernel("gemm<a, b>(float const*)", 112, 9, 11, **{"External id": 5}),
    {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "PyTorch Profiler", "ts": 1},
    {
        "ph": "i",
        "cat": "cpu_instant_event",
        "s": "t",
        "name": "[memory]",
        "pid": 10,
        "tid": 1,
        "ts": 101,
        "args": {"Bytes": 512, "Total Allocated": 4096, "Total Reserved": 8192, "Device Type": 1},
    },
]


def test_events_become_columns(tmp_path):
    found = read_profile(write_profile(tmp_path / "a.json", EVENTS, deviceProperties=[{"name": "A100"}]))
    rows = found.rows
    assert [found.texts[number] for number in rows.name] == [
        "aten::mm",
        "cudaLaunchKernel",
        EVENTS[4]["name"],
        "[memory]",
    ]
    assert rows.place.tolist() == [1, 2, 4, 6]
    assert rows.ts_ns.tolist() == [100_000, 105_000, 112_000, 101_000]
    assert rows.dur_ns.tolist() == [20_000, 3_000, 9_000, -1]
    assert rows.stream.tolist() == [-1, -1, 7, -1]
    assert rows.correlation.tolist() == [-1, 11, 11, -1]
    assert rows.external_id.tolist() == [5, -1, 5, -1]
    assert found.values(Key.TOTAL_RESERVED, -1).tolist() == [-1, -1, -1, 8192]
    dims = int(found.values(Key.INPUT_DIMS, -1)[0])
    assert json.loads(found.texts[dims]) == [[2, 3], [3, 4]]
    assert (found.n_events, found.without_duration, found.fractional) == (7, 1, False)
    assert (found.world_size, found.device_names) == (2, ("A100",))


def test_a_packed_file_reads_as_the_plain_one(tmp_path):
    plain = read_profile(write_profile(tmp_path / "a.json", EVENTS))
    packed = read_profile(write_profile(tmp_path / "a.json.gz", EVENTS))
    assert plain.texts == packed.texts
    assert all(np.array_equal(one, other) for one, other in zip(plain.rows, packed.rows, strict=True))


@pytest.mark.parametrize("piece", [16, 100, 1000])
def test_the_size_of_the_pieces_changes_nothing(tmp_path, monkeypatch, piece):
    path = write_profile(tmp_path / "a.json", EVENTS * 20)
    whole = read_profile(path)
    monkeypatch.setattr(read, "_PIECE", piece)
    monkeypatch.setattr(read, "_FIRST_TEXTS", 2)
    found = read_profile(path)
    assert found.texts == whole.texts
    assert all(np.array_equal(one, other) for one, other in zip(found.rows, whole.rows, strict=True))
    assert all(np.array_equal(one, other) for one, other in zip(found.extras, whole.extras, strict=True))


@given(
    ts=st.integers(0, 2 * 10**18), dur=st.integers(0, 10**12), name=st.text(max_size=12), stream=st.integers(-1, 2**40)
)
def test_times_texts_and_numbers_are_exact(tmp_path_factory, ts, dur, name, stream):
    event = kernel("x", 0, 0, 1, stream=stream) | {"name": name}
    text = json.dumps({"traceEvents": [event]})
    for field, value in (("ts", ts), ("dur", dur)):
        text = text.replace(f'"{field}": 0', f'"{field}": {value // 1000}.{value % 1000:03}')
    path = tmp_path_factory.mktemp("profile") / "a.json"
    path.write_text(text)
    found = read_profile(path)
    assert (found.rows.ts_ns[0], found.rows.dur_ns[0], found.rows.stream[0]) == (ts, dur, stream)
    assert found.texts[found.rows.name[0]] == name


def test_streams_may_be_texts_and_times_may_have_exponents(tmp_path):
    odd = kernel("k", 0, 1, 3) | {"args": {"stream": "7", "correlation": 3.0}, "ts": 1.5e3}
    other = kernel("k", 0, 1, 4, stream=0) | {"args": {"stream": "0x0"}, "tid": "stream 7"}
    rows = read_profile(write_profile(tmp_path / "a.json", [odd, other])).rows
    assert rows.stream.tolist() == [7, -1]
    assert rows.correlation.tolist() == [3, -1]
    assert rows.ts_ns.tolist() == [1_500_000, 0]
    assert rows.tid[1] < -1


def test_of_doubled_keys_the_last_counts(tmp_path):
    text = json.dumps({"traceEvents": [kernel("k", 5, 1, 3)]}).replace('"ts": 5', '"ts": 4, "ts": 6')
    (tmp_path / "a.json").write_text(text)
    assert read_profile(tmp_path / "a.json").rows.ts_ns.tolist() == [6000]


def test_ranks_come_from_the_file_its_name_or_its_place(tmp_path):
    stated = write_profile(tmp_path / "rank7.json", EVENTS, distributedInfo={"rank": 3, "world_size": 8})
    named = write_profile(tmp_path / "rank-5.json", EVENTS, distributedInfo=None)
    neither = write_profile(tmp_path / "a.json", EVENTS, distributedInfo=[])
    assert [(one.rank, one.path) for one in read_profiles([stated, named, neither])] == [
        (0, str(neither)),
        (3, str(stated)),
        (5, str(named)),
    ]
    with pytest.raises(ForerunError, match="are both of rank 3"):
        read_profiles([stated, stated])


def _with(**change: object) -> bytes:
    return json.dumps({"traceEvents": [EVENTS[0], kernel("k", 5, 1, 3) | change]}).encode()


def _without(key: str) -> bytes:
    event = kernel("k", 5, 1, 3)
    del event[key]
    return json.dumps({"traceEvents": [event]}).encode()


BROKEN = {
    "empty": (b"", "cut short"),
    "text": (b"hello", "is not one JSON object"),
    "list": (b"[]", "is not one JSON object"),
    "nothing": (b"{}", "holds no traceEvents"),
    "other": (b'{"nodes": []}', "holds no traceEvents"),
    "no events": (b'{"traceEvents": []}', "traceEvents is empty"),
    "no list": (b'{"traceEvents": {"a": 1}}', "not a list"),
    "twice": (b'{"traceEvents": [], "traceEvents": []}', "twice"),
    "only flows": (json.dumps({"traceEvents": [EVENTS[3]]}).encode(), "no event has a duration"),
    "cut": (_with()[:-40], "cut short"),
    "cut in the list": (b'{"traceEvents": [', "cut short"),
    "not an object": (b'{"traceEvents": [5]}', "event 0, byte 17: an entry of traceEvents is not an object"),
    "no comma": (_with().replace(b"}, {", b"} {"), "event 1, byte"),
    "comma at the end": (_with().replace(b"}}]", b"}},]"), "not JSON"),
    "NaN": (_with(dur=float("nan")), "dur is not a number"),
    "infinite": (_with(dur=float("inf")), "dur is not a number"),
    "negative": (_with(dur=-3), "event 1, .*dur is not a number of microseconds from 0 to"),
    "endless": (_with(dur=10**15), "dur is not a number of microseconds from 0 to three years"),
    "huge": (_with(ts=10**30), "ts is not a number"),
    "text as time": (_with(ts="5"), "ts is not a number"),
    "list as time": (_with(ts=[5]), "ts is not a number"),
    "number as name": (_with(name=5), "not a text"),
    "list as category": (_with(cat=["kernel"]), "not a text"),
    "no ts": (_without("ts"), "no ts"),
    "no name": (_without("name"), "no name"),
    "deep": (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b', "traceEvents": []}', "nested too deeply"),
    "bad member": (b'{"a": tru, "traceEvents": []}', "not JSON"),
    "gzip cut": (gzip.compress(_with())[:-12], "can't be unpacked"),
    "gzip damaged": (gzip.compress(_with())[:20] + b"xxxxxxxxxxxxxx", "can't be unpacked"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_one_clear_error(tmp_path, kind):
    content, message = BROKEN[kind]
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(ForerunError, match=message) as error:
        read_profile(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    "events",
    [
        "^5",
        "{^5: 1}",
        '{"ts" ^1}',
        '{"ts": ^tru}',
        '{"a": 1 ^"b": 2}',
        '{"a": 1, ^2}',
        '{"a": {"b": 1}, "c": ^}',
        '{"args": {^5}}',
        '{"args": {"b": 1 ^"c": 2}}',
        '{"args": {"b" ^"c"}}',
        '{"a": 1} ^{"b": 2}',
        '{"a": 1}, ^]',
        '{"a": 1}, ^7]',
        '{"ts": ^"x", "dur": 1}',
        '{"ts": 1, "dur": ^-3}',
        '{"ts": 1, "name": ^[1]}',
        '{"ts": 1, "cat": ^{"a": 1}}',
    ],
)
@pytest.mark.parametrize("before", ["", "  ", '{"ph": "M", "name": "process_name", "args": {"name": "x"}},'])
def test_an_error_names_the_byte_where_it_is(tmp_path, events, before):
    text = f'{{"traceEvents": [{before}{events}]}}'
    path = tmp_path / "a.json"
    path.write_text(text.replace("^", ""))
    with pytest.raises(ForerunError, match=f"byte {text.index('^')}: "):
        read_profile(path)


def test_a_file_that_unpacks_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(read, "_ALWAYS_UNPACKED", 1 << 20)
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * (1 << 26)))
    with pytest.raises(ForerunError, match="unpacks to more than"):
        read_profile(path)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ForerunError, match=r"no\.json: can't be read: No such file"):
        read_profile(tmp_path / "no.json")
