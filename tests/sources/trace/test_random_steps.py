"""Random models, traced eagerly, as AOTAutograd's graphs and as Inductor's kernels: what must agree does."""

import json
import os
import runpy
import sys
from pathlib import Path

import pytest
from warm_process import fork, wait

pytest.importorskip("torch", reason="tracing needs torch")
PROGRAM = Path(__file__).parent / "random_steps.py"
FEW, MANY = (16, 2), (int(os.environ.get("RANDOM_PROGRAMS", "500")), 12)
"""how many programs run eagerly, and how many of these in the two other ways too; 10,000 take an hour"""


@pytest.fixture(
    scope="module",
    params=[pytest.param(FEW, marks=pytest.mark.slow, id="few"), pytest.param(MANY, marks=pytest.mark.long, id="many")],
)
def steps(request, tmp_path_factory):
    """The steps of each program by the way in which it ran."""
    out = tmp_path_factory.mktemp("random") / "steps.json"

    def run():
        os.chdir(out.parent)
        sys.argv = [str(PROGRAM), str(out), *map(str, request.param)]
        runpy.run_path(str(PROGRAM), run_name="__main__")

    with out.with_suffix(".txt").open("wb") as sink:
        code = wait(fork(run, sink.fileno(), {}), 7200)
    assert code == 0, out.with_suffix(".txt").read_text()[-4000:]
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["notes"] == []
    assert len(found["steps"]) == request.param[0]
    assert sum(len(step) == 3 for step in found["steps"]) == request.param[1]
    return found["steps"]


def test_no_size_is_negative(steps):
    assert min(step["least"] for ways in steps for step in ways.values()) >= 0


def test_a_recording_read_back_is_the_one_that_was_written(steps):
    assert all(step["comes_back"] for ways in steps for step in ways.values())


def test_each_pass_has_the_flops_of_eager_mode(steps):
    for ways in steps:
        for phase in ("FORWARD", "BACKWARD"):
            assert len({step["flops"].get(phase, 0.0) for step in ways.values()}) == 1, ways


def test_collectives_beside_recomputation_are_those_of_eager_mode(steps):
    for ways in steps:
        assert all(step["messages"] == ways["eager"]["messages"] for step in ways.values()), ways


def test_a_compiled_program_saves_no_more_than_an_eager_one(steps):
    """Where nothing is checkpointed: a compiled checkpoint may save other tensors than the inputs of its region."""
    for ways in steps:
        if "RECOMPUTE" in ways["eager"]["flops"]:
            continue
        assert all(step["saved_bytes"] <= ways["eager"]["saved_bytes"] for step in ways.values()), ways
