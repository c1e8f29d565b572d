"""`--network` of predict and plan."""

import json
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"
CONFIG = EXAMPLES / "llama-3.1-8b" / "config.json"
QUESTION = ("--cluster", "h100-sxm", "--gpus", 64, "--seq-len", 4096, "--tp", 8)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("network-*.yml")), ids=lambda path: path.stem)
def test_predict_runs_on_an_example_network(forerun, path):
    done = forerun("predict", CONFIG, *QUESTION, "--network", path, "--json")
    assert done.returncode == 0, done.stderr
    network = json.loads(done.stdout)["network"]
    assert network["npus"] == 64
    assert {axis["axis"] for axis in network["axes"]} == {"tp", "dp_shard"}


def test_predict_prints_the_busiest_links(forerun):
    done = forerun("predict", CONFIG, *QUESTION, "--network", "switch:8@450/300,switch:8@50/1350", "--explain")
    assert done.returncode == 0, done.stderr
    assert "Busiest links of Switch 8 at 450 GB/s, Switch 8 at 50 GB/s" in done.stdout
    assert "dp_shard: NPU 0 -> switch 72" in done.stdout
    assert "Busiest links" not in forerun("predict", CONFIG, *QUESTION).stdout


def test_plan_repeats_its_winner_on_the_network(forerun):
    question = ("--cluster", "h100-sxm", "--gpus", 8, "--seq-len", 4096, "--global-batch", 8, "--pp", 1, "--cp", 1)
    done = forerun("plan", CONFIG, *question, "--network", "ring:8@50/500", "--workers", 1)
    assert done.returncode == 0, done.stderr
    command = next(line for line in done.stdout.splitlines() if "forerun predict" in line).split()[1:]
    assert "ring:8@50/500" in command
    step = next(line for line in done.stdout.splitlines() if line.startswith("step time")).split()[2:]
    again = forerun(*command)
    assert step == next(line for line in again.stdout.splitlines() if line.startswith("step time")).split()[2:]


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ("switch:8@450/300", "joins 8 NPUs (Switch 8 at 450 GB/s), the run has 64 GPUs"),
        ("nowhere.yml", "nowhere.yml"),
        ("swatch:8@450/300", "swatch"),
    ],
)
def test_a_network_that_does_not_do_is_one_line(forerun, network, message):
    done = forerun("predict", CONFIG, *QUESTION, "--network", network)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
