"""`--launch TOOL --launch-out FOLDER` of predict and plan."""

from __future__ import annotations

import json

import pytest

QUESTION = ("llama-3.2-1b", "--cluster", "h100-sxm", "--seq-len", "4096")
SEARCH = (*QUESTION, "--gpus", "8", "--global-batch", "16", "--tp", "1,2", "--pp", "1", "--cp", "1", "--workers", "1")


def test_predict_writes_its_plan(forerun, tmp_path):
    plain = forerun("predict", *QUESTION, "--dp-shard", "8", "--json")
    out = ("--launch", "torchtitan", "--scheduler", "slurm", "--launch-out", "a/b")
    done = forerun("predict", *QUESTION, "--dp-shard", "8", "--json", *out)
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain.stdout
    assert "a/b: forerun_torchtitan.py, launch.sh, slurm.sbatch, notes.txt" in done.stderr
    assert "data_parallel_shard_degree=8" in (tmp_path / "a" / "b" / "forerun_torchtitan.py").read_text()
    assert (tmp_path / "a" / "b" / "launch.sh").stat().st_mode & 0o100


def test_plan_writes_the_best_plan(forerun, tmp_path):
    done = forerun("plan", *SEARCH, "--json", "--launch", "deepspeed", "--launch-out", "run", "--stack", "deepspeed")
    assert done.returncode == 0, done.stderr
    best = json.loads(done.stdout)["best"]["plan"]
    config = json.loads((tmp_path / "run" / "ds_config.json").read_text())
    assert config["train_micro_batch_size_per_gpu"] == best["micro_batch"]
    assert config["train_batch_size"] == 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--launch", "torchtitan"), "--launch: give --launch-out too"),
        (("--launch-out", "run"), "--launch-out: give --launch too"),
        (("--launch", "titan", "--launch-out", "run"), "unknown tool 'titan'"),
        (("--scheduler", "slurm"), "--scheduler: give --launch too"),
        (("--launch", "torchtitan", "--launch-out", "run", "--scheduler", "pbs"), "unknown scheduler 'pbs'"),
        (
            ("--launch", "accelerate", "--launch-out", "run", "--pp", "2"),
            "--launch accelerate: pp 2: accelerate has no",
        ),
    ],
)
def test_what_cannot_be_written_is_one_line(options, message, forerun, tmp_path):
    done = forerun("predict", *QUESTION, *options)
    assert done.returncode == 2
    assert f"error: {message}" in done.stderr
    assert not (tmp_path / "run").exists()


def test_saved_programs_have_no_launch_files(forerun):
    done = forerun(
        *("plan", "--programs", ".", "--cluster", "h100-sxm", "--launch", "torchtitan", "--launch-out", "run")
    )
    assert done.returncode == 2
    assert "--launch: not with --programs" in done.stderr
