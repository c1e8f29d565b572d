"""A course's lab notebook on ASTRA-sim and STAGE, run as its author runs it.

Its commands go through a shell with `forerun` in the place of the two programs, as docs/astra.md sets it up. Its two
functions that read the output, `sanity_check` and `extract_metric`, are written anew from what they do.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from forerun.core.network.topology.registry import make

ROOT = Path(__file__).parents[2]
SANITY = ROOT.parent / "shared" / "golden" / "stage" / "sanity_check_EXACT"
DOC = (ROOT / "docs" / "astra.md").read_text(encoding="utf-8")
COMMAND = Path(sys.executable).with_name("forerun")
BINARY = "env/astra-sim/build/astra_analytical/build/bin/AstraSim_Analytical_Congestion_Unaware"
FIGURES = {
    "wall_time": 3556872116,
    "gpu_time": 919786681,
    "comm_time": 3521411134,
    "per_comp_bound": 83.794,
    "comp_util": 85.661,
    "mem_util": 28.401,
    "op_intensity": 3523.082,
    "peak_memory_usage": 19676528640,
}
"""what the notebook shows of its sanity check"""


def sanity_check(lines):
    """Whether both texts that the notebook looks for are in the lines."""
    texts = (
        "sys[0] finished, 3556872116 cycles, exposed communication 2637085435 cycles.",
        "[info] sys[0] peak memory usage: 19676528640",
    )
    return sum(text in line for line in lines for text in texts) == len(texts)


NAMES = {
    "Wall time": ("wall_time", int),
    "GPU time": ("gpu_time", int),
    "Comm time": ("comm_time", int),
    "Compute bound percentage": ("per_comp_bound", float),
    "Average compute utilization": ("comp_util", float),
    "Average memory utilization": ("mem_util", float),
    "Average operation intensity": ("op_intensity", float),
    "peak memory usage": ("peak_memory_usage", int),
}


def extract_metric(lines):
    """The metrics of sys[0]: what is behind the colon of lines whose third word is a logger and fifth names sys[0]."""
    metrics = dict.fromkeys((key for key, _ in NAMES.values()), 0)
    for line in lines:
        words = line.split(" ")
        if words[2] in ("[statistics]", "[workload]") and "sys[0]" in words[4]:
            parts = line.split(": ")
            if len(parts) == 2:
                key, kind = next(value for name, value in NAMES.items() if name in parts[0])
                metrics[key] = kind(parts[1].replace("\n", "").replace("%", ""))
    return metrics


COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """The notebook's folder, with `forerun` behind the names of the two programs."""
    folder = tmp_path_factory.mktemp("lab")
    set_up = re.search(r"```sh\n(mkdir -p env/.*?)```", DOC, re.S)[1]
    subprocess.run(["bash", "-c", set_up], cwd=folder, check=True, timeout=60)
    return folder


@pytest.fixture(scope="module")
def run_command(lab):
    """A shell command of the notebook: lines of both streams, as they come."""

    def run(command):
        paths = f"{COMMAND.parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            command, shell=True, cwd=lab, env={**os.environ, "PATH": paths}, timeout=600, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        return done.stdout.splitlines(keepends=True)

    return run


def astra_command(workload, config, equals=False):
    flags = {
        "workload-configuration": workload,
        "comm-group-configuration": f"{workload}.json",
        "system-configuration": f"{config}/system.json",
        "network-configuration": f"{config}/network.yml",
        "remote-memory-configuration": f"{config}/remote_memory.json",
    }
    return " ".join([BINARY, *(f"--{name}{'=' if equals else ' '}{value}" for name, value in flags.items())])


@pytest.fixture(scope="module")
def sanity_outputs(lab, run_command):
    """The sanity check, with `=` and with a space between flags and values."""
    if not SANITY.is_dir():
        pytest.skip("the configuration of the sanity check is not here")
    config = lab / "astrasim_configs" / "sanity_check"
    config.mkdir(parents=True)
    for name in ("system.json", "network.yml", "remote_memory.json"):
        shutil.copy(SANITY / name, config / name)
    run_command(
        "python env/symbolic_tensor_graph/main.py --output_dir workloads --output_name sanity_check "
        "--comm_group_file sanity_check.json --dp 2 --tp 2 --pp 2 --sp 2 --weight_sharded 0 --activation_recompute 1 "
        "--din 32000 --dout 32000 --dmodel 8192 --dff 28672 --head 64 --seq 1024 --batch 512 --num_stacks 8 "
    )
    files = ("workloads/sanity_check", "astrasim_configs/sanity_check")
    return [run_command(astra_command(*files, equals=equals)) for equals in (False, True)]


def test_the_sanity_check_passes(sanity_outputs):
    for lines in sanity_outputs:
        assert sanity_check(lines), "".join(lines[:20])


def test_every_metric_is_extracted(sanity_outputs):
    for lines in sanity_outputs:
        assert extract_metric(lines) == FIGURES


def test_rank_0_prints_the_eleven_lines_that_the_notebook_shows(sanity_outputs):
    """Time stamps apart. The first lines are those of the rings that the ranks make; 10 ranks end before rank 0."""
    lines = sanity_outputs[0]
    first = next(i for i, line in enumerate(lines) if "sys[0] finished" in line)
    assert all(re.match(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}\] \[", line) for line in lines)
    assert [line.split("] ", 1)[1].rstrip("\n") for line in lines[first : first + 11]] == [
        "[workload] [info] sys[0] finished, 3556872116 cycles, exposed communication 2637085435 cycles.",
        "[statistics] [info] sys[0]. Post statistics processing start.",
        "[statistics] [info] sys[0]. Post statistics processing end.",
        "[statistics] [info] sys[0], Wall time: 3556872116",
        "[statistics] [info] sys[0], GPU time: 919786681",
        "[statistics] [info] sys[0], Comm time: 3521411134",
        "[statistics] [info] sys[0], Compute bound percentage: 83.794%",
        "[statistics] [info] sys[0], Average compute utilization: 85.661%",
        "[statistics] [info] sys[0], Average memory utilization: 28.401%",
        "[statistics] [info] sys[0], Average operation intensity: 3523.082",
        "[workload] [info] sys[0] peak memory usage: 19676528640",
    ]
    assert sum("[system::topology::RingTopology] [info] " in line for line in lines[:first]) == 100
    assert first == 100 + 10 * 11


def test_the_pipeline_of_part_2(lab, run_command):
    """STAGE with flags written as Python prints them, configurations as the notebook generates them."""
    config = lab / "astrasim_configs" / "dgx_16"
    config.mkdir(parents=True)
    algorithms = ["direct", "halvingDoubling"]
    system = {
        "scheduling-policy": "LIFO", "endpoint-delay": 10, "active-chunks-per-dimension": 4,
        "preferred-dataset-splits": 10, "boost-mode": 0, "collective-optimization": "localBWAware",
        "track-local-mem": 1, "trace-enabled": 1, "roofline-enabled": 1, "local-mem-bw": 3000, "peak-perf": 900,
        **{f"{kind}-implementation": algorithms for kind in COLLECTIVES},
    }  # fmt: skip
    network = {
        "topology": ["FullyConnected", "Switch"], "npus_count": [8, 2], "bandwidth": [128.5714, 25],
        "latency": [20, 100],
    }  # fmt: skip
    (config / "system.json").write_text(json.dumps(system))
    (config / "network.yml").write_text(yaml.dump(network))
    (config / "remote_memory.json").write_text('{"memory-type": "NO_MEMORY_EXPANSION"}\n')
    run_command(
        "python env/symbolic_tensor_graph/main.py --output_dir workloads --output_name llama_70b_1 "
        "--comm_group_file llama_70b_1.json --num_stacks 16 --din 32000 --dout 32000 --dp 4 --weight_sharded 0 "
        "--tp 4 --pp 1 --sp 1 --activation_recompute True --dmodel 8192 --dff 28672 --head 64 --seq 1024 --batch 512 "
    )
    metrics = extract_metric(run_command(astra_command("workloads/llama_70b_1", "astrasim_configs/dgx_16")))
    assert all(metrics.values())
    assert metrics["wall_time"] > metrics["gpu_time"]


def test_task_1_1_a_mesh_joins_neighbours_in_both_directions():
    mesh = make("Mesh2D", (4, 4), 50.0, 500.0)
    mesh.check()
    links = mesh.links()
    joined = {*zip(links.src.tolist(), links.dst.tolist(), strict=True)}
    assert joined == {
        (a, b)
        for a in range(16)
        for b in range(16)
        if abs(a % 4 - b % 4) + abs(a // 4 - b // 4) == 1
    }  # fmt: skip
    degree = np.bincount(links.src)
    assert [*degree[[0, 3, 12, 15]]] == [2] * 4
    assert sorted(degree) == [2] * 4 + [3] * 8 + [4] * 4


def test_task_1_2_messages_go_along_x_first():
    mesh = make("Mesh2D", (4, 4), 50.0, 500.0)
    assert mesh.route(1, 7) == [1, 2, 3, 7]
    assert mesh.route(14, 5) == [14, 13, 9, 5]


EXPLORATION = yaml.safe_load((ROOT / "examples" / "dse-llama-gpt.yaml").read_text()) | {
    "sample": {"n": 20, "seed": 0},
    "memory_limit": "80 GB",
}
del EXPLORATION["memory_limit_gib"]


@pytest.fixture(scope="module")
def explored(lab):
    """Runs of `forerun dse` on the notebook's two design spaces."""

    def run(*options):
        (lab / "space.yaml").write_text(yaml.safe_dump(EXPLORATION, sort_keys=False))
        whole = [COMMAND, "dse", "space.yaml", "--out", "submission", "--no-plot", "--json", *options]
        done = subprocess.run(whole, cwd=lab, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, done.stderr
        results = [json.loads((lab / "submission" / f"{name}.json").read_text()) for name in PAIRS]
        return json.loads(done.stdout), results

    return run


PAIRS = ("llama-70b_system-1", "gpt-175b_system-2")
SAMPLED = {
    "8_1_8_1_0", "1_64_1_1_0", "8_8_1_1_0", "16_2_2_1_0", "2_2_16_1_0", "2_32_1_1_0", "32_1_2_1_0", "2_8_4_1_1",
    "2_8_4_1_0", "2_2_16_1_1", "1_8_8_1_1", "2_1_32_1_0", "1_1_64_1_0", "8_1_8_1_1", "1_8_8_1_0", "4_16_1_1_1",
}  # fmt: skip
"""points of Llama-70B that the notebook's log names, as far as it is shown"""


def best(results, limit_bytes=float("inf")):
    within = {key: point for key, point in results.items() if point["peak_memory_usage"] <= limit_bytes}
    return min(within, key=lambda key: within[key]["wall_time"])


def test_part_3_finds_the_notebooks_best_points_in_its_sample(explored):
    record, (llama, gpt) = explored()
    assert len(llama) == len(gpt) == 20
    assert llama.keys() >= SAMPLED
    assert (best(llama), best(gpt)) == ("32_1_2_1_0", "16_4_1_1_0")
    assert (best(llama, 80e9), best(gpt, 80e9)) == ("8_1_8_1_1", "4_8_2_1_1")
    metrics = ["wall_time", "gpu_time", "comm_time", "per_comp_bound", "comp_util", "mem_util", "op_intensity"]
    assert list(llama["8_1_8_1_1"]) == [*metrics, "peak_memory_usage", "dp", "tp", "sp", "pp", "ar"]
    for pair in record["pairs"]:
        axes = {reason["axis"] for reason in pair["reasons"]}
        assert axes == {"dp", "tp", "sp", "activation_recompute", None}
        assert all(reason["text"] for reason in pair["reasons"])


def test_the_memory_of_the_best_points_is_that_of_the_notebooks_build(explored, lab):
    points = {"llama-70b": ["32_1_2_1_0", "8_1_8_1_1"], "gpt-175b": ["16_4_1_1_0", "4_8_2_1_1"]}
    (lab / "best.json").write_text(json.dumps(points))
    _, (llama, gpt) = explored("--release", "2025-03", "--points", "best.json")
    assert (best(llama), best(gpt)) == ("32_1_2_1_0", "16_4_1_1_0")
    assert llama["8_1_8_1_1"]["peak_memory_usage"] / 1e9 == pytest.approx(67, abs=0.2)
    assert round(gpt["4_8_2_1_1"]["peak_memory_usage"] / 1e9, 2) == 42.74
