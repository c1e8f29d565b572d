"""torch.compile sees nothing of the tracer: regions have the graphs and breaks that they have without it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="tracing needs torch")
PROGRAM = Path(__file__).parent / "captured_regions.py"
NAMES = (
    "forward only",
    "fused update inside",
    "multi-tensor update inside",
    "plain update inside",
    "own update inside",
    "whole step",
    "whole step, breaks",
    "whole step, recomputed",
    "whole step, recomputed with breaks",
    "whole step, replicated",
    "optimizer alone",
    "fused optimizer alone",
    "scheduler",
    "hooks",
    "closure",
    "own function",
    "values",
    "saves",
    "reduces",
    "sharded",
)


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    """What Dynamo captured of each program, with the tracer and without it."""
    folder = tmp_path_factory.mktemp("captured")
    runs = {}
    for how in ("traced", "plain"):
        command = [sys.executable, str(PROGRAM), str(folder / how), how]
        runs[how] = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
    for run in runs.values():
        _, errors = run.communicate(timeout=600)
        assert run.returncode == 0, errors[-4000:]
    return {how: json.loads((folder / how).read_text(encoding="utf-8")) for how in runs}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_region_has_the_graphs_and_breaks_that_it_has_without_the_tracer(captured, name):
    assert captured["traced"][name] == captured["plain"][name]
    assert captured["plain"][name]["graphs"] or captured["plain"][name]["breaks"]


@pytest.mark.slow
def test_every_program_is_compared_and_none_falls_back(captured):
    assert captured["traced"].pop("notes") == []
    assert tuple(captured["traced"]) == NAMES
