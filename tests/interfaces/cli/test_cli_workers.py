"""Commands that simulate many things write the same bytes after they were killed half-way, and on Ray."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from forerun.interfaces.cli.main import run

JOBS = """
nodes: 2
policies: [fifo, easy, srtf, las]
drawn: {number: 40, per_hour: 9, median_s: 900, gpus: {1: 1, 8: 1}}
"""
RUN = """
gpus: 64
days: 3
step: {seconds: 5, tokens: 4M}
failures: {preset: llama-3, rate: 100}
checkpoint: {blocking_s: 60, load_s: 60}
"""
SIZES = {"din": 64, "dout": 64, "dmodel": 64, "dff": 64, "seq": 64, "batch": 64, "head": 8, "num_stacks": 2}
EXPLORATION = {
    "workloads": {
        "tiny": dict.fromkeys(("din", "dout", "dmodel", "dff", "seq", "batch"), 64) | {"head": 8, "num_stacks": 2}
    },
    "systems": {
        "ring": {
            "system": {"roofline-enabled": 1, "local-mem-bw": 300, "peak-perf": 45},
            "network": {"topology": ["Ring"], "npus_count": [8], "bandwidth": 50.0, "latency": 500.0},
        }
    },
    "plan": {"weight_sharded": False},
}
FILES = {"jobs.yaml": JOBS, "run.yaml": RUN, "dse.yaml": yaml.safe_dump(EXPLORATION)}
COMMANDS = {
    "cluster": ["cluster", "jobs.yaml", "--jobs", "1", "--store", "jobs.sqlite", "--csv", "jobs.csv"],
    "run": ["run", "run.yaml", "--runs", "20", "--jobs", "1", "--store", "runs.sqlite", "--csv", "runs.csv"],
    "dse": ["dse", "dse.yaml", "--jobs", "1", "--out", "out", "--no-plot"],
}
SCALE = ["experiment", "scale", "resnet50-a100", "--nodes", "1", "2", "--out", "scaled"]
TASKS = {
    "cluster": ("forerun.answers.jobs.description", "JobsRequest.schedule", 2),
    "run": ("forerun.answers.goodput.walks", "walk", 30),
    "dse": ("forerun.astrasim.dse.evaluate", "Evaluator.outcome", 5),
}
"""the function that does the work of a command: its module and name, and the call at which the process is killed"""
KILLED = """
import importlib, os, signal, sys
from forerun.astrasim.dse import explore
from forerun.interfaces.cli.main import run
module, name, last, *command = sys.argv[1:]
*outer, inner = name.split(".")
place = importlib.import_module(module)
for each in outer:
    place = getattr(place, each)
whole, calls = getattr(place, inner), 0
def counted(*arguments):
    global calls
    calls += 1
    if calls > int(last):
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(*arguments)
setattr(place, inner, counted)
explore._KEPT_EVERY_S = 0.0
run(command)
"""


@pytest.mark.parametrize("name", list(COMMANDS))
def test_a_killed_command_goes_on_to_the_same_bytes(name: str, tmp_path: Path, monkeypatch, capsys) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
        for file, text in FILES.items():
            (folder / file).write_text(text)
    module, function, last = TASKS[name]
    script = [sys.executable, "-c", KILLED, module, function, str(last), *COMMANDS[name]]
    victim = subprocess.run(script, cwd=broken, capture_output=True, text=True)
    assert victim.returncode == -signal.SIGKILL, victim.stderr
    assert not written(broken)
    printed = []
    for folder in (whole, broken):
        monkeypatch.chdir(folder)
        assert run(COMMANDS[name]) == 0
        printed.append(capsys.readouterr().out)
    assert written(broken) == written(whole) != {}
    if name == "dse":
        assert f"{last} known from before" in printed[1]
    else:
        assert printed[0] == printed[1]


@pytest.mark.slow
def test_ray_writes_the_same_files(tmp_path: Path, monkeypatch) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed (pip install 'forerun[ray]')")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
    try:
        for executor in ("local", "ray"):
            folder = tmp_path / executor
            folder.mkdir()
            for file, text in FILES.items():
                (folder / file).write_text(text)
            monkeypatch.chdir(folder)
            for command in (*COMMANDS.values(), SCALE):
                assert run([*command, "--executor", executor]) == 0
    finally:
        ray.shutdown()
    local, on_ray = (written(tmp_path / executor) for executor in ("local", "ray"))
    assert set(local) >= {"jobs.csv", "runs.csv", "out/results.csv", "scaled/resnet50-a100_scales.csv"}
    assert on_ray == local


def written(folder: Path) -> dict[str, bytes]:
    """What a command wrote beside its store."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix in (".csv", ".json", ".parquet")
    }
