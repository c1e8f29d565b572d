"""`forerun predict --allocator`: the caching allocator's figures beside a prediction."""

import json

import pytest
from saved_programs import plan_of, program_of

from forerun.core.program.storage import save

ASK = ("llama-3.1-8b", "--cluster", "h100-sxm", "--dp-shard", 8, "--seq-len", 4096)


def record_of(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_plan_under_two_settings(forerun):
    plain = record_of(forerun("predict", *ASK, "--allocator", "default", "--json"))
    grown = record_of(forerun("predict", *ASK, "--allocator", "expandable_segments:True", "--json"))
    without = record_of(forerun("predict", *ASK, "--json"))
    shown = {name: value for name, value in grown.items() if name not in ("allocator", "explain")}
    assert shown == {name: value for name, value in without.items() if name != "explain"}  # the stack's own settings
    assert plain["peak_reserved_gib"] == plain["allocator"]["reserved_gib"]
    assert "under default settings" in " ".join(plain["explain"])
    assert "under expandable_segments:True" in " ".join(without["explain"])
    held, less = plain["allocator"], grown["allocator"]
    assert held["settings"]["expandable_segments"] is False
    assert less["settings"]["expandable_segments"] is True
    assert held["allocated_gib"] == pytest.approx(plain["peak_allocated_gib"], rel=0.01)
    assert held["reserved_gib"] > less["reserved_gib"] > plain["peak_allocated_gib"]
    assert held["steps_reserved_gib"][-1] == held["reserved_gib"]
    assert len(held["steps_reserved_gib"]) == 3
    assert held["out_of_memory"] is False


def test_in_words(forerun):
    done = forerun("predict", *ASK, "--allocator", "default")
    assert done.returncode == 0, done.stderr
    figures, times = done.stdout.splitlines()[-2:]
    assert figures.startswith("allocator    ")
    assert figures.endswith("unused at the peak")
    assert times.endswith("requests to CUDA, 0 retries in 3 steps of every rank")


def test_a_saved_program_that_runs_out_of_memory(forerun, tmp_path):
    save(program_of(plan_of(dp_shard=8, n_microbatches=8)), tmp_path / "fsdp.program")
    ask = ("--program", "fsdp.program", "--cluster", "h100-sxm", "--allocator", "default")
    whole = record_of(forerun("predict", *ask, "--json"))
    assert whole["allocator"]["allocated_gib"] == pytest.approx(whole["peak_allocated_gib"], rel=0.01)
    limit = ("--memory-limit", 8)
    short = record_of(forerun("predict", *ask, *limit, "--json"))["allocator"]
    assert short["out_of_memory"]
    assert short["retries"] > 0
    assert short["reserved_gib"] <= short["available_gib"]
    words = forerun("predict", *ask, *limit).stdout
    assert "allocator    out of memory in step 1: " in words
    assert "retries in 1 step of every rank" in words


def test_settings_that_pytorch_refuses(forerun):
    done = forerun("predict", *ASK, "--allocator", "max_split_size_mb:10")
    assert done.returncode == 2
    assert done.stderr == "error: allocator settings: max_split_size_mb is more than 20, not 10\n"
