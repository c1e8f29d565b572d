"""Profiles linked with execution traces: by number of the operator, by order, and what can't be linked."""

import gzip
import json

import pytest
from command_here import run_here

from forerun.common.errors import ForerunError
from forerun.sources.profile.link import link, read_packed_json

NAMES = ["aten::linear", "aten::t", "aten::transpose", "aten::as_strided", "aten::addmm", "aten::empty", "aten::relu"]
TENSOR = [14, 15, 0, 64, 4, "cuda:0"]


def executed(number, name, thread=1, record=0, shapes=(), types=(), values=()):
    """A node as releases before 2024 write it."""
    of = {"rf_id": record, "tid": thread, "inputs": values, "input_shapes": shapes, "input_types": types}
    return {"id": number, "name": name, **of}


def newer(number, name, thread=1, record=0, shapes=(), types=(), values=()):
    attributes = {"rf_id": record, "tid": thread}
    inputs = {"values": values, "shapes": shapes, "types": types}
    return {
        "id": number,
        "name": name,
        "inputs": inputs,
        "attrs": [{"name": k, "value": attributes[k]} for k in attributes],
    }


def operator(name, at, tid=9, **arguments):
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": tid, "ts": at, "dur": 1, "args": arguments}


@pytest.mark.parametrize("node", [executed, newer])
def test_operators_of_one_number_are_one(node):
    nodes = [
        node(2, "[pytorch|profiler|execution_trace|thread]"),
        node(3, "aten::mm", 1, 77, [[8, 4]], ["Tensor(float)"]),
    ]
    events = [operator("aten::mm", 5, **{"Record function id": 77}), operator("aten::add", 7)]
    found = link({"traceEvents": events}, {"nodes": nodes}, "x")
    assert (found.matched, found.operators) == (1, 2)
    assert events[0]["args"]["Input Dims"] == [[8, 4]]
    assert events[0]["args"]["Input type"] == ["float"]
    assert "Input Dims" not in events[1]["args"]


def test_an_attribute_without_a_proper_name_tells_nothing():
    node = newer(3, "aten::mm", record=77)
    node["attrs"].append({"name": ["rf_id"], "value": 78})
    events = [operator("aten::mm", 5, **{"Record function id": 77})]
    assert link({"traceEvents": events}, {"nodes": [node]}, "x").matched == 1


def test_without_numbers_the_order_of_names_tells_in_every_step():
    nodes = [executed(k, name, 1, 100 + k, [[k]]) for k, name in enumerate([*NAMES, "aten::sum"], 2)]
    steps = [operator(name, at) for at, name in enumerate([*NAMES, "aten::sum", "x", *NAMES, "aten::sum"])]
    found = link({"traceEvents": steps[::-1]}, {"nodes": nodes}, "x")
    assert found.matched == 16
    assert [event["args"].get("Input Dims") for event in steps][8:11] == [None, [[2]], [[3]]]


def test_what_a_profile_says_itself_stays():
    events = [operator("aten::mm", 5, **{"Record function id": 77, "Input Dims": [[1]]})]
    link({"traceEvents": events}, {"nodes": [executed(3, "aten::mm", 1, 77, [[8, 4]])]}, "x")
    assert events[0]["args"]["Input Dims"] == [[1]]


def test_a_collective_and_its_kernel_say_what_the_trace_says():
    inputs = [[TENSOR], 12, 821, 0, "all_gather", [], [], 2]
    node = newer(3, "record_param_comms", 1, 7, [], ["GenericList[Tensor(c10::BFloat16)]"], inputs)
    kernel = {"ph": "X", "cat": "kernel", "name": "ncclKernel", "ts": 6, "dur": 1, "args": {"External id": 40}}
    events = [operator("record_param_comms", 5, **{"Record function id": 7, "External id": 40}), kernel]
    link({"traceEvents": events}, {"nodes": [node]}, "x")
    said = kernel["args"]
    assert (said["Collective name"], said["dtype"], said["Group size"]) == ("all_gather", "BFloat16", 2)
    assert (said["In msg nelems"], said["Out msg nelems"]) == (64, 128)


@pytest.mark.parametrize(
    ("profile", "trace", "problem"),
    [
        ([], {"nodes": []}, "expected a profile of PyTorch"),
        ({"traceEvents": []}, {}, "expected an execution trace of PyTorch"),
        ({"traceEvents": [operator("a", 1)]}, {"nodes": [executed(1, "b", 1, 3)]}, "are both of one run?"),
    ],
)
def test_what_can_not_be_linked_is_one_line(profile, trace, problem):
    with pytest.raises(ForerunError, match=problem):
        link(profile, trace, "x")


def test_the_command_writes_a_profile(tmp_path):
    events = [operator("aten::mm", 5, **{"Record function id": 77})]
    (tmp_path / "p.json.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    (tmp_path / "t.json").write_text(json.dumps({"nodes": [executed(3, "aten::mm", 1, 77, [[8, 4]])]}))
    done = run_here(tmp_path, "profile", "link", "p.json.gz", "t.json", "-o", "linked.json.gz")
    assert done.stdout == "1 of 1 operators of the profile are in the trace; linked.json.gz says both\n"
    assert read_packed_json(tmp_path / "linked.json.gz")["traceEvents"][0]["args"]["Input Dims"] == [[8, 4]]


def test_a_file_that_is_cut_short_is_one_line(tmp_path):
    (tmp_path / "p.json.gz").write_bytes(gzip.compress(b"{}" * 1000)[:-12])
    with pytest.raises(ForerunError, match="cut short"):
        read_packed_json(tmp_path / "p.json.gz")
