"""What links a profile with an execution trace: the calls of collectives, threads of names, and packed files."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from forerun.common.errors import ForerunError
from forerun.sources.profile import link as module
from forerun.sources.profile.link import link, read_packed_json

Event = dict[str, Any]
TENSOR = [14, 15, 0, 64, 4, "cuda:0"]


def _node(number: int, name: str, thread: int = 1, record: int = 0, **inputs: Any) -> Event:
    return {"id": number, "name": name, "rf_id": record, "tid": thread, "inputs": inputs}


def _operator(name: str, at: float, tid: int = 9, dur: float = 1, **arguments: Any) -> Event:
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": tid, "ts": at, "dur": dur, "args": arguments}


def _linked(events: list[Any], nodes: list[Any]) -> tuple[int, int]:
    found = link({"traceEvents": events}, {"nodes": nodes}, "x")
    return found.matched, found.operators


@pytest.mark.parametrize(
    ("values", "types", "expected"),
    [
        ([[TENSOR], 1, "allreduce", 4], ["Tensor(float)"], ("allreduce", 64, "Float", 4, 64)),
        ([[TENSOR, TENSOR], "all_gather", 4], ["", "Tensor(c10::Half)"], ("all_gather", 128, "Half", 4, 512)),
        ([[TENSOR], [TENSOR], "all_gather", 4], ["Tensor(float)"], ("all_gather", 64, "Float", 4, 256)),
        ([[TENSOR], "send", 2], ["Tensor(unsigned char)"], ("send", 64, "unsigned char", 2, 64)),
        ([[TENSOR], "allreduce", 1], ["Tensor(float)"], ("allreduce", 64, None, None, None)),
        ([[TENSOR], "allreduce", True], ["Tensor(float)"], ("allreduce", 64, None, None, None)),
        ([[TENSOR], "allreduce", 4], [], ("allreduce", 64, None, None, None)),
        ([[TENSOR], "no name", 4], ["Tensor(float)"], (None, None, None, None, None)),
        ([], ["Tensor(float)"], (None, None, None, None, None)),
        ("allreduce", ["Tensor(float)"], (None, None, None, None, None)),
    ],
)
def test_the_inputs_of_a_call_tell_the_collective(values: Any, types: list[str], expected: tuple[Any, ...]) -> None:
    events = [_operator("record_param_comms", 5, **{"Record function id": 7})]
    node = _node(3, "record_param_comms", record=7, values=values, types=types, shapes=[])
    assert _linked(events, [node]) == (1, 1)
    keys = ("Collective name", "In msg nelems", "dtype", "Group size", "Out msg nelems")
    assert tuple(events[0]["args"].get(key) for key in keys) == expected


def test_other_operators_say_their_shapes_and_types_only() -> None:
    events = [_operator("aten::mm", 5, **{"Record function id": 7})]
    types = ["Tensor(c10::BFloat16)", "Int", 5, "GenericList[Tensor(float)]"]
    _linked(events, [_node(3, "aten::mm", record=7, values=[[TENSOR], "allreduce", 4], types=types, shapes=[[2]])])
    wanted = {"Record function id": 7, "Input Dims": [[2]], "Input type": ["c10::BFloat16", "", "float"]}
    assert events[0]["args"] == wanted


def test_one_number_of_another_name_is_no_match() -> None:
    events = [_operator("aten::mm", 5, **{"Record function id": 7})]
    with pytest.raises(ForerunError, match="are both of one run"):
        _linked(events, [_node(3, "aten::add", record=7)])


def _names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


def test_threads_are_found_whole_by_the_order_of_their_nodes() -> None:
    wanted = _names("aten::op", 8)
    nodes = [_node(10 + place, name, 3, shapes=[[place]]) for place, name in enumerate(wanted)][::-1]
    nodes += [_node(100 + place, name, 4, shapes=[[99]]) for place, name in enumerate(wanted[:7])]
    events = [_operator(name, 50 - number) for number, name in enumerate(wanted[::-1])]
    other = [_operator(name, at, tid=8) for at, name in enumerate([*wanted[:4], "between", *wanted[4:]])]
    assert _linked([*events, *other], nodes) == (8, 17)
    assert [event["args"]["Input Dims"] for event in events[::-1]] == [[[place]] for place in range(8)]
    assert not any(event["args"] for event in other)


def test_fewer_than_eight_operators_are_found_nowhere() -> None:
    wanted = _names("aten::op", 7)
    nodes = [_node(10 + place, name, 3) for place, name in enumerate(wanted)]
    with pytest.raises(ForerunError, match="are both of one run"):
        _linked([_operator(name, at) for at, name in enumerate(wanted)], nodes)


def test_a_thread_that_repeats_is_found_every_time() -> None:
    wanted = _names("aten::op", 8)
    nodes = [_node(10 + place, name, 3, shapes=[[place]]) for place, name in enumerate(wanted)]
    events = [_operator(name, at) for at, name in enumerate(["first", *wanted * 3, "x", *wanted])]
    assert _linked(events, nodes) == (32, 34)
    said = [event["args"]["Input Dims"][0][0] for event in events if event["args"]]
    assert said == list(range(8)) * 4


def test_the_outer_of_two_operators_that_begin_together_comes_first() -> None:
    wanted = _names("aten::op", 8)
    nodes = [_node(10 + place, name, 3, shapes=[[place]]) for place, name in enumerate(wanted)]
    events = [_operator(name, 5, dur=50 - at) for at, name in enumerate(wanted)][::-1]
    assert _linked(events, nodes) == (8, 8)


@pytest.mark.parametrize(
    "change", [{"ph": "i"}, {"cat": "kernel"}, {"args": 5}, {"ts": "1"}, {"dur": None}], ids=lambda one: next(iter(one))
)
def test_what_is_no_operator_is_left_alone(change: Event) -> None:
    good = _operator("aten::mm", 5, **{"Record function id": 7})
    odd = _operator("aten::mm", 6, **{"Record function id": 7}) | change
    before = dict(odd)
    assert _linked([good, odd, 5, None], [_node(3, "aten::mm", record=7, shapes=[[2]]), 7, {"name": "x"}]) == (1, 1)
    assert odd == before


def test_an_annotation_counts_as_an_operator_and_may_lack_arguments() -> None:
    good = _operator("step", 5, **{"Record function id": 7}) | {"cat": "user_annotation"}
    bare = _operator("x", 6)
    del bare["args"]
    assert _linked([good, bare], [_node(3, "step", record=7)]) == (1, 2)


def test_kernels_get_what_their_own_call_says_beside_what_they_say() -> None:
    def kernel(number: int, **said: Any) -> Event:
        return {"ph": "X", "cat": "kernel", "name": "nccl", "ts": 6, "dur": 1, "args": {"External id": number, **said}}

    calls = [_operator("record_param_comms", at, **{"Record function id": at, "External id": at}) for at in (7, 8)]
    kernels = [kernel(7), kernel(8, dtype="Own"), kernel(9), {"cat": "kernel"}]
    nodes = [
        _node(at, "record_param_comms", record=at, values=[[TENSOR], name, 2], types=["Tensor(float)"], shapes=[[64]])
        for at, name in ((7, "allreduce"), (8, "broadcast"))
    ]
    assert _linked([*calls, *kernels], nodes) == (2, 2)
    said = {"In msg nelems": 64, "Out msg nelems": 64, "Group size": 2}
    assert kernels[0]["args"] == {"External id": 7, "Collective name": "allreduce", "dtype": "Float", **said}
    assert kernels[1]["args"] == {"External id": 8, "Collective name": "broadcast", "dtype": "Own", **said}
    assert kernels[2:] == [kernel(9), {"cat": "kernel"}]


def test_a_file_may_unpack_to_three_hundred_times_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(gzip.compress(b'{"a": [' + b"1," * 200 + b"1]}"))
    assert read_packed_json(path) == {"a": [1] * 201}
    path.write_bytes(gzip.compress(b"[" + b" " * 5_000_000 + b"]"))
    assert 300 * path.stat().st_size < 5_000_000
    with pytest.raises(ForerunError, match="unpacks to more than it should"):
        read_packed_json(path)
    monkeypatch.setattr(module, "_MOST_RATIO", 2000)
    assert read_packed_json(path) == []
    path.write_bytes(b"\x1f\x8b\x08" + b"damaged")
    with pytest.raises(ForerunError, match="damaged gzip file"):
        read_packed_json(path)
