"""Arrival of every message on links: reference patterns of a congestion-aware network."""

import json
from pathlib import Path

import pytest

from forerun.astrasim.messages.traffic import read_cases, run_cases

FILE = Path(__file__).parents[3] / "shared" / "golden" / "network_traffic.json"
pytestmark = pytest.mark.skipif(not FILE.exists(), reason=f"reference results are not there: {FILE}")


def test_every_message_arrives_at_its_tick():
    expected = json.loads(FILE.read_text())
    cases = read_cases(FILE)
    assert [case.name for case in cases] == list(expected)
    assert len(cases) == 43
    for record in run_cases(cases):
        want = expected[record["case"]]
        assert record.get("finish_ns") == want["finish_ns"], record["case"]
        assert record["arrival_ns"] == [message["arrival_ns"] for message in want["messages"]], record["case"]


def test_the_inputs_alone_decide(tmp_path):
    inputs = {
        name: {key: value for key, value in case.items() if key != "finish_ns"}
        | {"messages": [{k: v for k, v in message.items() if k != "arrival_ns"} for message in case["messages"]]}
        for name, case in json.loads(FILE.read_text()).items()
    }
    (tmp_path / "inputs.json").write_text(json.dumps(inputs))
    assert list(run_cases(read_cases(tmp_path / "inputs.json"))) == list(run_cases(read_cases(FILE)))
