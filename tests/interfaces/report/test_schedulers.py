"""Job files of schedulers start launch.sh on every node, with its place among them."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import yaml

from forerun.common.errors import UnknownName
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan
from forerun.interfaces.report.launch.tools import NOTES, launch_files, write_launch

CLUSTER = load_cluster("h100-sxm")
LLAMA = load_model("llama-3.1-8b")
PLAN = Plan(seq_len=4096, dp_shard=24)
SCONTROL = '#!/bin/bash\n[ "$*" = "show hostnames node[1-3]" ] && printf "node1\\nnode2\\nnode3\\n"\n'
SRUN = '#!/bin/bash\nfor node in 0 1 2; do SLURM_NODEID=$node "$@"; done\n'
TORCHRUN = '#!/bin/bash\necho "$@" | tr "\\n" " "; echo\n'


def written(tmp_path, scheduler, **programs):
    """Writes launch files with a job file into a folder with a space in its name, and programs on its path."""
    folder = tmp_path / "a run"
    files = launch_files(PLAN, LLAMA, CLUSTER, "torchtitan", scheduler)
    write_launch(folder, files)
    (folder / "bin").mkdir()
    for name, text in {"torchrun": TORCHRUN, **programs}.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    return folder, files


def started(folder, words, **environment):
    path = os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", **environment}
    done = subprocess.run(words, cwd=folder, env=path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def place(line):
    """Returns the values of torchrun's options in `line`."""
    words = line.split()
    return [words[words.index(f"--{name}") + 1] for name in ("nnodes", "nproc-per-node", "node-rank", "master-addr")]


def test_slurm_starts_each_node_with_its_rank_and_passes_arguments_on(tmp_path):
    folder, files = written(tmp_path, "slurm", scontrol=SCONTROL, srun=SRUN)
    asked = [
        line.removeprefix("#SBATCH --") for line in files["slurm.sbatch"].splitlines() if line.startswith("#SBATCH")
    ]
    assert asked == ["nodes=3", "ntasks-per-node=1", "gpus-per-node=8"]
    lines = started(
        folder, ["bash", "slurm.sbatch", "--steps", "7"], SLURM_JOB_NUM_NODES="3", SLURM_JOB_NODELIST="node[1-3]"
    )
    assert [place(line) for line in lines] == [["3", "8", str(rank), "node1"] for rank in range(3)]
    assert all(line.split()[-2:] == ["--steps", "7"] for line in lines)


def test_skypilot_runs_a_node_with_the_variables_that_it_sets(tmp_path):
    folder, files = written(tmp_path, "skypilot")
    task = yaml.safe_load(files["skypilot.yaml"])
    assert task["resources"] == {"accelerators": "H100:8"}
    assert task["num_nodes"] == 3
    given = {"SKYPILOT_NUM_NODES": "3", "SKYPILOT_NODE_RANK": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    (line,) = started(folder, ["bash", "-c", task["run"]], SKYPILOT_NODE_IPS="10.0.0.4\n10.0.0.5\n10.0.0.6", **given)
    assert place(line) == ["3", "8", "2", "10.0.0.4"]


@pytest.mark.parametrize(
    ("preset", "tool", "name"),
    [
        ("a100-40gb-sxm", "torchtitan", "A100"),
        ("a100-80gb-sxm", "torchtitan", "A100-80GB"),
        ("rtx-4090", "torchtitan", "RTX4090"),
        ("v100-dgx1", "deepspeed", "V100-32GB"),
        ("v100-dgx1-16gb", "deepspeed", "V100"),
    ],
)
def test_skypilot_has_its_own_names_of_accelerators(preset, tool, name):
    plan = PLAN if tool == "torchtitan" else replace(PLAN, precision="fp16", stack="deepspeed")
    files = launch_files(plan, LLAMA, load_cluster(preset), tool, "skypilot")
    assert yaml.safe_load(files["skypilot.yaml"])["resources"]["accelerators"].split(":")[0] == name


def test_ray_runs_a_node_in_each_bundle(tmp_path, monkeypatch):
    cluster_utils = pytest.importorskip("ray.cluster_utils", reason="Ray is an extra; make ray installs it")
    folder, _ = written(tmp_path, "ray")
    monkeypatch.chdir(folder)  # as the working directory that `ray job submit` gives to all nodes
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    cluster = cluster_utils.Cluster()
    try:
        for _ in range(3):
            cluster.add_node(num_cpus=1, num_gpus=8, object_store_memory=80 * 2**20)
        lines = started(
            folder, [sys.executable, "ray_job.py", "--steps", "7"], RAY_ADDRESS=cluster.address, RAY_DEDUP_LOGS="0"
        )
    finally:
        cluster.shutdown()
    places = sorted(place(line[line.index("--nnodes") :]) for line in lines if "--nnodes" in line)
    assert [each[:3] for each in places] == [["3", "8", str(rank)] for rank in range(3)]
    assert len({each[3] for each in places}) == 1


def test_notes_say_what_is_left_and_an_unknown_scheduler_is_named(tmp_path):
    assert "slurm.sbatch starts launch.sh on every node" in written(tmp_path, "slurm")[1][NOTES]
    with pytest.raises(UnknownName, match="unknown scheduler 'pbs'"):
        launch_files(PLAN, LLAMA, CLUSTER, "torchtitan", "pbs")
