"""`forerun experiment`: what is typed, what is printed, what is written."""

import json
from pathlib import Path

import pytest
import yaml

from forerun.interfaces.cli.experiment import spread

EXAMPLE = Path(__file__).parents[3] / "examples" / "experiment.yaml"
SMALL = {
    "hardware": {"gpu_model": "A100", "num_gpus_per_node": 8, "network_bandwidth_gbps": 100},
    "model": {"model_type": "gpt2", "num_layers": 4, "sequence_length": 512},
    "training": {"batch_size_per_gpu": 4, "num_iterations": 20, "num_nodes": 2},
}


@pytest.fixture
def small(tmp_path):
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SMALL))
    return "small.yaml"


def test_values_after_one_name_belong_to_it():
    several = {"--nodes", "--set"}
    assert spread(["f", "--nodes", "1", "2", "--strong"], several) == ["f", "--nodes", "1", "--nodes", "2", "--strong"]
    assert spread(["f", "--nodes", "1", "--out", "x", "y"], several) == ["f", "--nodes", "1", "--out", "x", "y"]
    assert spread(["--set", "a.b=-1", "c.d=2"], several) == ["--set", "a.b=-1", "--set", "c.d=2"]
    assert spread(["--nodes=1", "2"], several) == ["--nodes=1", "2"]


@pytest.mark.slow
def test_a_run_tells_figures_bottlenecks_and_what_helps(forerun, tmp_path):
    done = forerun("experiment", "run", EXAMPLE, "--out", "results", "--history")
    assert done.returncode == 0, done.stderr
    for text in (
        "sequences/s",
        "Bottlenecks",
        "Simulated again with",
        "Recommended",
        "100 Gb/s = 12.5 GB/s",
        "dollars",
    ):
        assert text in done.stdout, text
    names = {path.name for path in (tmp_path / "results").iterdir()}
    kinds = ("config.yaml", "results.json", "bottlenecks.json", "iterations.csv", "events.csv", "events.perfetto.json")
    assert {f"gpt2-four-nodes_{kind}" for kind in kinds} <= names
    pictures = {"iteration_breakdown.png", "resource_utilization.png", "memory_over_time.png", "timeline.png"}
    assert pictures | {"report.html"} <= names
    again = forerun("experiment", "run", "results/gpt2-four-nodes_config.yaml", "--json", "--no-analysis")
    told = json.loads((tmp_path / "results" / "gpt2-four-nodes_results.json").read_text())
    assert json.loads(again.stdout)["summary"] == told["summary"]


@pytest.mark.slow
def test_a_study_of_scales_names_the_break_down_and_the_best(forerun, small, tmp_path):
    nodes = ("--nodes", 1, 2, 4)
    done = forerun("experiment", "scale", small, *nodes, "--strong", "--out", "out", "--jobs", 1)
    assert done.returncode == 0, done.stderr
    assert "strong scaling" in done.stdout
    assert "fastest: " in done.stdout
    assert (tmp_path / "out" / "scaling_efficiency.png").is_file()
    record = json.loads(forerun("experiment", "scale", small, *nodes, "--weak", "--json", "--jobs", 1).stdout)
    efficiency = [point["efficiency"] for point in record["points"]]
    assert efficiency[0] == 1
    assert efficiency == sorted(efficiency, reverse=True)


@pytest.mark.slow
def test_a_comparison_stands_beside_the_experiment_itself(forerun, small):
    patterns = ("--patterns", "ring_allreduce", "parameter_server")
    done = forerun("experiment", "compare", small, *patterns, "--precisions", "fp32", "--jobs", 1)
    assert done.returncode == 0, done.stderr
    for text in ("as described", "ring_allreduce", "parameter_server", "fp32", "+0.0%"):
        assert text in done.stdout


@pytest.mark.slow
def test_stragglers_that_are_set_are_told(forerun, small):
    disturbed = ("--set", "training.stragglers={probability: 0.05, slowdown: 2.0}", "training.num_iterations=50")
    done = forerun("experiment", "stragglers", small, *disturbed, "--jobs", 1)
    assert done.returncode == 0, done.stderr
    assert "50 iterations under disturbances" in done.stdout
    assert "slowest rank costs" in done.stdout


@pytest.mark.parametrize("size", ["small", "medium", "large"])
def test_a_preset_is_run_by_name_or_option_and_its_file_can_be_copied(forerun, size):
    told = forerun("experiment", "run", "--preset", size, "--no-analysis").stdout
    path, text = preset_file(told), forerun("experiment", "run", size, "--no-analysis").stdout
    assert path.parent.name == "presets"
    assert told.split("\n\n", 1)[1] == text
    copied = forerun("experiment", "run", "--config", path, "--no-analysis", "--json")
    named = forerun("experiment", "run", "--preset", size, "--no-analysis", "--json")
    assert json.loads(copied.stdout) == json.loads(named.stdout)


def preset_file(told):
    """The file that the output names."""
    (line,) = [line for line in told.splitlines() if line.startswith("experiment file: ")]
    return Path(line.removeprefix("experiment file: ").removesuffix(" (copy it to make it your own)"))


def test_a_scaling_study_is_that_of_the_scale_command(forerun, small):
    ours = forerun("experiment", "run", small, "--scaling", "--nodes", 1, 2, "--json")
    theirs = forerun("experiment", "scale", small, "--nodes", 1, 2, "--json", "--jobs", 1)
    assert json.loads(ours.stdout) == json.loads(theirs.stdout)


def test_presets_and_keys_are_listed(forerun):
    assert "resnet50-a100" in forerun("experiment", "presets").stdout
    assert "hardware.network_bandwidth_gbps" in forerun("experiment", "keys").stdout


BAD = [
    (("run", "nowhere.yaml"), "nowhere.yaml"),
    (("run", "resnet51"), "resnet51"),
    (("run", "SMALL", "--set", "training.batch=3"), "batch"),
    (("run", "SMALL", "--set", "training.num_nodes"), "expected SECTION.KEY=VALUE"),
    (("run", "SMALL", "--set", "training.num_nodes=[1"), "--set training.num_nodes"),
    (("run", "SMALL", "--set", "training.num_nodes=two"), "num_nodes"),
    (("run", "SMALL", "--history"), "--out"),
    (("run",), "no experiment is named"),
    (("run", "SMALL", "--preset", "medium"), "FILE|PRESET and --preset each name an experiment"),
    (("run", "--preset", "middle"), "medium"),
    (("run", "--example", "6"), "--example"),
    (("run", "--example", "3", "--history", "--out", "x"), "--history"),
    (("run", "--example", "4", "--scaling"), "--scaling"),
    (("run", "--config", "nowhere.yaml"), "nowhere.yaml"),
    (("run", "SMALL", "--nodes", "1", "2"), "--nodes goes with --scaling"),
    (("run", "SMALL", "--out", "small.yaml"), "small.yaml"),
    (("scale", "SMALL"), "--nodes"),
    (("scale", "SMALL", "--nodes", "1", "two"), "--nodes"),
    (("scale", "SMALL", "--nodes", "0"), "--nodes"),
    (("compare", "SMALL"), "nothing to compare"),
    (("stragglers", "SMALL"), "nothing disturbs the run"),
]


@pytest.mark.parametrize(("arguments", "named"), BAD, ids=lambda value: value if isinstance(value, str) else value[0])
def test_bad_input_is_one_line(forerun, small, tmp_path, arguments, named):
    done = forerun("experiment", *[small if each == "SMALL" else each for each in arguments])
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert named in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.yaml"]


def test_code_that_a_file_names_is_said_and_no_code_refuses_it(forerun, tmp_path):
    (tmp_path / "mine.py").write_text("open('ran', 'a').write('x')\ndef flat(ranks, size):\n    return 0.001\n")
    (tmp_path / "own.yaml").write_text(
        "hardware: {gpu_model: A100}\nmodel: {preset: resnet18}\n"
        "training: {batch_size_per_gpu: 1, num_nodes: 2, jitter: {compute: 0.02}, "
        "communication_pattern: 'mine.py:flat'}\n"
    )
    refused = forerun("experiment", "run", "own.yaml", "--no-code", "--out", "out")
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: own.yaml: ")
    assert "--no-code refuses it" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "out").exists()
    for study in (["run"], ["scale", "--nodes", "1", "2"], ["stragglers"]):
        done = forerun("experiment", study[0], "own.yaml", *study[1:], "--json")
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("warning: ") == 1
        assert "names Python code" in done.stderr
    assert (tmp_path / "ran").exists()
    assert forerun("experiment", "run", "small", "--no-code").stderr == ""
