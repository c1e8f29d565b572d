"""Collectives and messages against reference results, to the nanosecond."""

import json
from pathlib import Path

import pytest

from forerun.astrasim.astra.collective_cases import case_results

GOLDEN = Path(__file__).parents[2].parent / "shared" / "golden"
FILES = ["micro_1d", "micro_multidim", "micro_subgroup", "micro_p2p", "congestion_aware_1d", "congestion_aware_p2p"]
RESULTS = {"ok", "time_ns_max", "time_ns_per_rank"}


@pytest.mark.parametrize("name", FILES)
def test_every_case_is_equal_to_the_nanosecond(name):
    path = GOLDEN / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"no reference results at {path}")
    expected = [json.loads(line) for line in path.read_text().splitlines()]
    inputs = [json.dumps({key: value for key, value in case.items() if key not in RESULTS}) for case in expected]
    wrong = []
    for case, result in zip(expected, case_results(inputs), strict=True):
        if case["case"] != result["case"] or not agrees(case, result):
            wrong.append((case, result))
    assert not wrong, f"{len(wrong)} of {len(expected)}, such as {wrong[0]}"
    assert len(expected) > 10


def agrees(case, result):
    if not case["ok"]:
        return "error" in result
    if "error" in result or result["time_ns_max"] != case["time_ns_max"]:
        return False
    everyone = dict.fromkeys(map(str, range(case["npus"])), case["time_ns_max"])
    expected, seen = case["time_ns_per_rank"] or everyone, result["time_ns_per_rank"] or everyone
    return expected == seen
