"""Wrist's use: traces of one model under many configurations, a limit of memory, a histogram, the best and its time."""

import csv
import json
from pathlib import Path

import pytest
from command_here import run_here
from saved_programs import plan_of, program_of

from forerun.core.program.storage import save

CONFIGURATIONS = {
    "shard2cp2tp2": {"dp_shard": 2, "cp": 2, "tp": 2, "micro_batch": 4},
    "shard4tp2": {"dp_shard": 4, "tp": 2, "micro_batch": 2},
    "shard8": {"dp_shard": 8},
    "hybrid": {"dp_replicate": 2, "dp_shard": 4},
    "more": {"dp_shard": 8, "micro_batch": 2},
    "large": {"dp_shard": 8, "micro_batch": 12},
}


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """Programs of eight GPUs: four of the same tokens, one of twice as many, one that does not fit."""
    folder = tmp_path_factory.mktemp("wrist") / "traces"
    folder.mkdir()
    for name, fields in CONFIGURATIONS.items():
        save(program_of(plan_of(**fields)), folder / f"{name}.program")
    return folder


def forerun(folder: Path, *arguments: object) -> str:
    done = run_here(folder, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_folder_of_traces_with_80_gb(traces):
    """`sim_fx -t ./traces -l 80.0`."""
    ask = ("plan", "--programs", "traces", "--cluster", "h100-sxm", "--memory-limit", "80GB")
    text, record = forerun(traces.parent, *ask), json.loads(forerun(traces.parent, *ask, "--json"))
    assert record["memory_limit_gib"] == pytest.approx(74.5, abs=0.01)
    assert [each["file"] for each in record["out_of_memory"]] == ["large.program"]
    assert "Step times (# simulated)" in text
    assert sum(each["simulated"] for each in record["runtime_histogram"]) == 5
    rates = [each["tokens_per_s_per_gpu"] for each in record["top"]]
    assert rates == sorted(rates, reverse=True)
    best = record["best"]
    words = ", ".join(f"{axis} {size}" for axis, size in best["groups"].items())
    assert f"Best by tokens: {best['file']} ({words}), {best['tokens_per_s_per_gpu']:,.0f} tok/s/GPU, " in text


def test_the_degrees_of_the_best_trace_are_those_of_its_program(traces):
    ask = ("plan", "--programs", "traces", "--cluster", "h100-sxm", "--objective", "time", "--json")
    found = {each["file"]: each["groups"] for each in json.loads(forerun(traces.parent, *ask))["top"]}
    assert found["shard8.program"]["dp_shard"] == 8
    assert found["hybrid.program"] == {"dp_shard": 4, "dp_replicate": 2}
    assert {"tp": 2, "cp": 2}.items() <= found["shard2cp2tp2.program"].items()


def test_axes_as_lists_name_every_plan_once(tmp_path):
    """dp_shard, dp_replicate, cp, tp and pp as lists: the four names of one data-parallel plan are one row."""
    degrees = ("--dp-shard", "1,2,4,8", "--dp-replicate", "1,2,4,8", "--cp", "1,2", "--tp", "1,2", "--pp", "1,2")
    question = ("--cluster", "h100-sxm", "--gpus", 8, "--seq-len", 2048, "--global-batch", 32)
    why = ("--why", "dp_shard=8,dp_replicate=1,zero_stage=0")
    ask = ("plan", "llama-3.2-1b", *question, *degrees, *why, "--csv", "plans.csv", "--json")
    record = json.loads(forerun(tmp_path, *ask))
    counts = record["counts"]
    assert counts.pop("considered") == sum(counts.values())
    assert counts["renamed"] > 0
    assert record["why"]["text"].startswith("executes the same step as dp_replicate 8, dp_shard 1: ")
    with (tmp_path / "plans.csv").open() as file:
        rows = list(csv.DictReader(file))
    keys = ("cp", "tp", "pp", "micro_batch", "activation_checkpointing", "pp_schedule", "virtual_stages")
    keys = (*keys, "stack", "compile")
    replicated = [
        tuple(row[key] for key in keys)
        for row in rows
        if row["zero_stage"] == "0" and row["status"] != "renamed" and row["cp"] == "1"
    ]
    assert len(replicated) == len(set(replicated)) > 0
    assert sum(row["status"] == "renamed" for row in rows) == counts["renamed"]
