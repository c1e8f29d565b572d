"""`forerun predict --recipe FILE`: the same answer as the options that say the same, and one line for bad input."""

from __future__ import annotations

import json

import pytest

TOML = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 4096
[parallelism]
data_parallel_shard_degree = 8
[activation_checkpoint]
mode = "none"
"""
OPTIONS = ("llama-3.1-8b", "--seq-len", "4096", "--dp-shard", "8", "--cluster", "h100-sxm", "--json")
SCRIPT = "python pretrain_gpt.py --tensor-model-parallel-size $(touch ran) --seq-length 4096 --micro-batch-size 1\n"


def test_a_recipe_is_the_options_that_say_the_same(forerun, tmp_path):
    (tmp_path / "train.toml").write_text(TOML)
    done = forerun("predict", "--recipe", "train.toml", "--cluster", "h100-sxm", "--json")
    assert done.returncode == 0, done.stderr
    plain = json.loads(forerun("predict", *OPTIONS).stdout)
    assert json.loads(done.stdout)["step_time_s"] == plain["step_time_s"]


def test_options_and_the_model_override_the_recipe(forerun, tmp_path):
    (tmp_path / "train.toml").write_text(TOML + "[own]\nx = 1\n")
    more = ("llama-3.2-1b", "--tp", "2", "--dp-shard", "4", "--cluster", "h100-sxm", "--json")
    done = forerun("predict", *more, "--recipe", "train.toml")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["plan"]["tp"], answer["plan"]["dp_shard"], answer["plan"]["seq_len"]) == (2, 4, 4096)
    assert "Forerun does not use own.x." in done.stdout


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("missing.toml", None, "missing.toml: can't be read"),
        ("cut.toml", TOML[:-3], "cut.toml: not TOML"),
        ("typed.toml", TOML.replace("4096", '"4096x"'), "typed.toml: training.seq_len must be a whole number"),
        ("flavor.toml", TOML.replace("8B", "9B"), "sizes of torchtitan's llama3 9B; name the model before --recipe"),
        ("rest.toml", TOML.replace("= 8", "= -1"), "say how many with --gpus"),
        ("train.sh", SCRIPT, "tensor-model-parallel-size must be a whole number"),
        ("train.sh", "echo", "has none of Megatron-LM's arguments"),
        ("train.py", "import os", "nothing is run"),
        ("train.bin", "x", "ends in .bin"),
    ],
)
def test_a_wrong_recipe_is_one_line(name, text, message, forerun, tmp_path):
    if text is not None:
        (tmp_path / name).write_text(text)
    done = forerun("predict", "--recipe", name, "--cluster", "h100-sxm")
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "ran").exists()


def test_a_search_asks_what_the_recipe_says_and_ranks_its_plan(forerun, tmp_path):
    (tmp_path / "train.toml").write_text(TOML)
    small = (
        "--recipe",
        "train.toml",
        "--cluster",
        "h100-sxm",
        "--max-tp",
        "1",
        "--max-pp",
        "1",
        "--json",
        "--top",
        "2",
    )
    done = forerun("plan", *small)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert [answer[name] for name in ("n_gpus", "seq_len", "global_batch")] == [8, 4096, 8]
    own, plans = answer["recipe"], answer["top"]
    assert own["plan"]["activation_checkpointing"] == "none"
    assert {plan["plan"]["stack"] for plan in plans} == {own["plan"]["stack"]}
    assert own["rank"] == 1 + sum(plan["step_time_s"] < own["step_time_s"] for plan in plans)
    assert own["behind"] == pytest.approx(own["step_time_s"] / plans[0]["step_time_s"] - 1)


def test_a_search_says_what_the_recipe_leaves_open(forerun, tmp_path):
    (tmp_path / "rest.toml").write_text(TOML.replace("= 8", "= -1"))
    open_recipe = ("plan", "--recipe", "rest.toml", "--cluster", "h100-sxm")
    assert "does not say on how many GPUs it runs; give --gpus" in forerun(*open_recipe).stderr
    assert "does not say how many sequences a step has" in forerun(*open_recipe, "--gpus", "8").stderr
    assert "give --recipe or --programs, not both" in forerun(*open_recipe, "--programs", ".").stderr
