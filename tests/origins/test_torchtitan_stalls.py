"""torchtitan's loop: what profiling, garbage collection, metrics and checkpoints cost when they are switched on."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from forerun.cost.periodic import periodic_constants
from forerun.trace import titan

sys.path.append(str(Path(__file__).parents[1] / "trace"))
import standin_torchtitan

COMMAND = Path(sys.executable).with_name("forerun")
FACTS = Path(__file__).resolve().parents[2].parent / "shared" / "goodput.md"
PLAN = ("llama-3.1-8b", "--cluster", "h100-sxm", "--seq-len", "8192", "--activation-checkpointing", "full")
DEFAULTS = {"gc": 50, "metrics": 10}
"""what torchtitan does without being asked"""
SWITCHED_ON = (
    *("--override", "profiling.enable_profiling=true", "--override", "profiling.profile_freq=100"),
    *("--override", "checkpoint.enable=true", "--override", "checkpoint.async_mode=async"),
)


def forerun(folder, *arguments, path=None):
    """What `forerun ARGUMENTS` prints."""
    environment = dict(os.environ)
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(path), environment.get("PYTHONPATH", "")])
    words = [str(COMMAND), *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=folder, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def stalls(record):
    return {stall["name"]: stall for stall in record["loop"]["stalls"]}


def test_every_branch_is_listed_with_its_stall(tmp_path):
    every = "checkpoint=500,profile=100,memory_snapshot=100,gc=50,metrics=10"
    text = forerun(tmp_path, "predict", *PLAN, "--dp-shard", 64, "--every", every, "--storage", "0.5,50")
    table = text.partition("With the periodic work of the training loop")[2]
    for kind, steps in (part.split("=") for part in every.split(",")):
        assert re.search(rf"^  {kind} +{steps} steps +\d.*%$", table, re.MULTILINE), kind
    assert re.search(r"mean step .* tokens/s/GPU", table)
    assert "storage: 0.5 GB/s a rank, 50 GB/s in all" in " ".join(table.split())


def test_blocking_parts_of_asynchronous_saves_are_those_of_512_gpus(tmp_path):
    """Llama 3 8B: under half a second, and 0.06 s with pinned memory."""
    if not FACTS.is_file():
        pytest.skip(f"{FACTS} is not here")
    row = next(line for line in FACTS.read_text().splitlines() if line.startswith("| torchtitan/DCP Llama3-8B"))
    most_s, pinned_s = (float(number) for number in re.findall(r"< ([\d.]+) async; ([\d.]+) with pinned", row)[0])
    found = {}
    for mode in ("async", "async_with_pinned_mem"):
        options = ("--every", "checkpoint=500", "--checkpoint-mode", mode, "--json")
        found[mode] = json.loads(forerun(tmp_path, "predict", *PLAN, "--dp-shard", 512, *options))
    assert stalls(found["async"])["checkpoint"]["stall_s"] < most_s
    assert stalls(found["async_with_pinned_mem"])["checkpoint"]["stall_s"] == pytest.approx(pinned_s, rel=0.35)


def test_checkpointed_regions_leave_the_garbage_that_the_constants_say():
    torch = pytest.importorskip("torch")
    checkpoint = pytest.importorskip("torch.utils.checkpoint").checkpoint
    layers = [torch.nn.Linear(8, 8) for _ in range(5)]

    def step():
        x = torch.ones(2, 8)
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False)
        x.sum().backward()

    step()
    gc.collect()
    gc.disable()
    try:
        for _ in range(4):
            step()
        found = gc.collect(1)
    finally:
        gc.enable()
    assert found / (4 * len(layers)) == pytest.approx(periodic_constants().gc.objects_per_checkpointed_region, abs=1)


@pytest.mark.slow
def test_a_trace_keeps_what_is_switched_on(tmp_path):
    """A package in torchtitan's place; its trainer refuses to run with what a trace leaves out."""
    standin_torchtitan.install(tmp_path / "path")
    _traced_stalls(tmp_path, tmp_path / "path")


def _missing():
    try:
        return "" if version("torchtitan").startswith("0.2") else "torchtitan 0.2.2 is not installed"
    except PackageNotFoundError:
        return f"torchtitan is not installed; supported: {', '.join(titan.SUPPORTED)}"


@pytest.mark.slow
@pytest.mark.skipif(bool(_missing()), reason=_missing() or "installed")
def test_torchtitan_itself_says_what_its_loop_does(tmp_path):
    _traced_stalls(tmp_path, None)


def _traced_stalls(folder, path):
    """Trace with everything switched on, and predict what was traced."""
    program = folder / "step.program"
    run = ("trace", "--torchtitan", "llama3", "llama3_debugmodel", "--world-size", 8, "-o", program)
    forerun(folder, *run, *SWITCHED_ON, path=path)
    predict = ("predict", "--program", program, "--cluster", "h100-sxm", "--json")
    found = json.loads(forerun(folder, *predict))
    every = {name: stall["every_steps"] for name, stall in stalls(found).items()}
    assert every == DEFAULTS | {"checkpoint": 500, "profile": 100}
    assert all(stall["stall_s"] > 0 for stall in stalls(found).values())
    assert found["loop"]["checkpoint"]["mode"] == "async"
    assert found["loop"]["mean_step_time_s"] > found["step_time_s"]
    off = json.loads(forerun(folder, *predict, "--every", "checkpoint=0,profile=0,gc=0,metrics=0"))
    assert "loop" not in off
    assert off["step_time_s"] == found["step_time_s"]
