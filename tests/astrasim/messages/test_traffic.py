"""Patterns of messages read from JSON, and the command that runs them."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.astrasim.messages.traffic import Case, read_cases, run_cases
from forerun.common.errors import ForerunError
from forerun.core.network.network_file import parse_topology
from forerun.interfaces.cli.main import run

MESSAGES = [{"start_ns": 0, "src": 0, "dst": 1, "bytes": 50_000}, {"start_ns": 7, "src": 0, "dst": 1, "bytes": 50_000}]
CASE = {
    "topology": ["Ring", 4],
    "bandwidth_GBps": 50,
    "latency_ns": 500,
    "bandwidth_unit": "GB/s",
    "messages": MESSAGES,
}


def one(case, **options):
    return next(run_cases([Case("one", case)], **options))


def cases_of(tmp_path, data):
    (tmp_path / "cases.json").write_text(json.dumps(data))
    return read_cases(tmp_path / "cases.json")


def test_a_case_says_when_each_message_arrives():
    assert one(CASE) == {
        "case": "one",
        "ok": True,
        "finish_ns": 2500,
        "arrival_ns": [1500, 2500],
        "messages": [message | {"arrival_ns": at} for message, at in zip(MESSAGES, [1500, 2500], strict=True)],
    }


def test_bandwidth_is_of_two_to_the_thirty_bytes_unless_told():
    assert one({**CASE, "bandwidth_unit": "GiB/s"})["arrival_ns"] == [500 + 931, 500 + 931 * 2]
    assert one({key: value for key, value in CASE.items() if key != "bandwidth_unit"}) == one(
        {**CASE, "bandwidth_unit": "GiB/s"}
    )


def test_flows_share_what_queues_give_in_turn():
    same_start = {**CASE, "messages": [{"src": 0, "dst": 1, "bytes": 50_000}] * 2}
    assert one(same_start, model="flows")["arrival_ns"] == [2500.0, 2500.0]
    assert one(same_start)["arrival_ns"] == [1500, 2500]


def test_the_hottest_links_come_first():
    record = one(CASE, hottest=3)
    assert record["hottest"] == [
        {"src": 0, "dst": 1, "busy_ns": 2000.0, "bytes": 100_000, "messages": 2, "utilisation": 0.8}
    ]


@pytest.mark.parametrize("topology", [[["Ring", 4], ["Mesh2D", 2, 2]], "ring:4,mesh2d:2x2"])
def test_several_dimensions(topology):
    message = {"src": 0, "dst": 15, "bytes": 50_000}
    case = {**CASE, "topology": topology, "bandwidth_GBps": [50, 25], "latency_ns": [500, 0], "messages": [message]}
    assert one(case)["arrival_ns"] == [1500 + 2 * 2000]


def test_a_case_may_hold_a_network_as_its_file_would():
    network = {"topology": ["Ring"], "npus_count": [4], "bandwidth": [50], "latency": [500], "bandwidth_unit": "GB/s"}
    assert one({"network": network, "messages": MESSAGES}) == one(CASE)


def test_another_network_may_be_asked_for():
    slow = parse_topology("switch:4@25GBps/0")
    assert one(CASE, network=slow)["arrival_ns"] == [4000, 6000]


def test_a_file_holds_one_case_a_list_or_cases_by_name(tmp_path):
    assert [case.name for case in cases_of(tmp_path, {"a": CASE, "b": CASE})] == ["a", "b"]
    assert [case.name for case in cases_of(tmp_path, [CASE, {**CASE, "case": "mine"}])] == ["0", "mine"]
    assert [case.name for case in cases_of(tmp_path, CASE)] == ["cases"]


def test_files_that_are_none_are_refused(tmp_path):
    for content, message in (
        (b"{", "not JSON"),
        (b"\xff", "not UTF-8"),
        (b"3", "expected an object of cases"),
        (b"[" * 10**5, "not JSON"),
    ):
        (tmp_path / "cases.json").write_bytes(content)
        with pytest.raises(ForerunError, match=message):
            read_cases(tmp_path / "cases.json")
    with pytest.raises(ForerunError, match="can't be read"):
        read_cases(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"topology": ["Rong", 4]}, "unknown topology 'Rong'"),
        ({"topology": []}, 'such as ["Mesh2D", 4, 4]'),
        ({"topology": ["Mesh2D", 4]}, "Mesh2D takes 2 sizes"),
        ({"bandwidth_GBps": None}, "bandwidth is None"),
        ({"messages": 3}, "messages must be a list"),
        ({"messages": [3]}, "message 0 must be an object"),
        ({"messages": [{"src": 0, "bytes": 4}]}, "message 0 has no dst"),
        ({"messages": [{"src": 0, "dst": 1, "bytes": 0.5}]}, "message 0 has bytes '0.5', not a whole number"),
        ({"messages": [{"src": 0, "dst": 4, "bytes": 1}]}, "there is no NPU 4; its NPUs are 0 to 3"),
        ({"messages": [{"src": 1, "dst": 1, "bytes": 1}]}, "message 0 goes to its own sender"),
        ({"messages": [*MESSAGES, {"src": 1, "dst": 0, "bytes": 0}]}, "message 2 has no bytes"),
        ({"network": 3}, "network must be an object"),
    ],
)
def test_a_case_that_makes_no_sense_has_an_error(change, message):
    record = one({**CASE, **change})
    assert not record["ok"]
    assert message in record["error"]


def test_a_case_without_a_topology_says_what_a_case_has():
    assert "key 'topology' is missing" in one({"messages": []})["error"]


def test_the_command_prints_a_line_for_each_case(tmp_path, capsys):
    (tmp_path / "cases.json").write_text(json.dumps({"good": CASE, "bad": {**CASE, "topology": ["Rong", 4]}}))
    assert run(["traffic", str(tmp_path / "cases.json"), "--hottest", "1"]) == 0
    good, bad = map(json.loads, capsys.readouterr().out.splitlines())
    assert (good["case"], good["finish_ns"], len(good["hottest"])) == ("good", 2500, 1)
    assert (bad["case"], bad["ok"]) == ("bad", False)


def test_the_command_takes_another_network_and_model(tmp_path, capsys):
    (tmp_path / "cases.json").write_text(json.dumps(CASE))
    (tmp_path / "network.yml").write_text(
        "topology: [Switch]\nnpus_count: [4]\nbandwidth: [25]\nlatency: [0]\nbandwidth_unit: GB/s\n"
    )
    arguments = [
        "traffic",
        str(tmp_path / "cases.json"),
        "--network",
        str(tmp_path / "network.yml"),
        "--model",
        "flows",
    ]
    assert run(arguments) == 0
    assert json.loads(capsys.readouterr().out)["finish_ns"] == pytest.approx(4000)


def test_the_command_refuses_a_file_that_is_not_there(tmp_path, capsys):
    assert run(["traffic", str(tmp_path / "none.json")]) == 2
    assert "can't be read" in capsys.readouterr().err


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
wild = st.fixed_dictionaries(
    {
        "topology": st.sampled_from([["Ring", 4], ["Mesh2D", 2, 3], "switch:4", [["Ring", 3], ["Switch", 2]]])
        | json_values,
        "bandwidth_GBps": st.sampled_from([50, [50, 50], 1e-300]) | json_values,
        "latency_ns": st.just(500) | json_values,
        "messages": json_values
        | st.lists(
            st.fixed_dictionaries(
                {key: st.integers(-1, 5) | json_values for key in ("start_ns", "src", "dst", "bytes")}
            ),
            max_size=3,
        ),
    },
    optional={"network": json_values, "bandwidth_unit": json_values},
)


@settings(max_examples=100)
@given(st.lists(wild | json_values, max_size=3), st.sampled_from(["links", "flows"]))
def test_any_cases_give_arrivals_or_errors(contents, model):
    cases = [Case(str(number), content) for number, content in enumerate(contents)]
    records = list(run_cases(cases, model, hottest=2))
    assert [record["case"] for record in records] == [case.name for case in cases]
    for record in records:
        assert json.loads(json.dumps(record, allow_nan=False)).keys() & {"finish_ns", "error"}
