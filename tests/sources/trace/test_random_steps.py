"""Random models, traced eagerly, as AOTAutograd's graphs and as Inductor's kernels: what must agree does."""

import copy
import json
import os
from pathlib import Path

import pytest
from step_properties import violations
from warm_process import fork, run_file, wait

pytest.importorskip("torch", reason="tracing needs torch")
PROGRAM = Path(__file__).parent / "random_steps.py"
FEW, MANY = (20, 2), (400, 30)
"""how many programs run eagerly, and how many of these in the two other ways too"""


@pytest.fixture(
    scope="module",
    params=[pytest.param(FEW, marks=pytest.mark.slow, id="few"), pytest.param(MANY, marks=pytest.mark.long, id="many")],
)
def steps(request, tmp_path_factory):
    """The steps of each program by the way in which it ran."""
    out = tmp_path_factory.mktemp("random") / "steps.json"
    eager, compiled = request.param

    def run():
        os.chdir(out.parent)
        run_file(PROGRAM, str(eager), "--compiled", str(compiled), "--out", str(out))

    with out.with_suffix(".txt").open("wb") as sink:
        code = wait(fork(run, sink.fileno(), {}), 7200)
    assert code == 0, out.with_suffix(".txt").read_text()[-4000:]
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["notes"] == []
    assert len(found["steps"]) == eager
    assert sum(len(step) == 3 for step in found["steps"]) == compiled
    return found["steps"]


def test_traces_of_random_programs_agree_where_they_must(steps):
    assert [problem for ways in steps for problem in violations(ways)] == []


def test_the_checks_would_notice(steps):
    """Each figure of a step, changed."""
    ways = steps[0]
    eager = ways["eager"]
    assert eager["counted"] is not None
    changed = {
        "least": -1.0,
        "comes_back": False,
        "in_order": False,
        "products": eager["products"] + 1,
        "program": [eager["program"][0] + 1, *eager["program"][1:]],
        "flops": eager["flops"] | {"FORWARD": 0.0},
        "messages": [*eager["messages"], [0, 1.0]],
        "saved_bytes": -1,
    }
    for name, value in changed.items():
        other = copy.deepcopy(ways)
        other["eager"][name] = value
        assert list(violations(other)), name
