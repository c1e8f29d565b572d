"""DeepSpeed's JSON and accelerate's YAML read as recipes."""

import json

import pytest

from forerun.common.errors import ForerunError
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.complete import complete_plan
from forerun.describe.plan.plan import Plan
from forerun.describe.recipe.read import read_recipe
from forerun.interfaces.report.launch.tools import launch_files

LLAMA = load_model("llama-3.1-8b")
FIELDS = (
    "zero_stage",
    "micro_batch",
    "n_microbatches",
    "dp_shard",
    "precision",
    "offload",
    "optimizer",
    "global_batch",
)


def plan_of(path, gpus=None):
    values, batch, gpus = read_recipe(path).under({"seq_len": 4096}, None, gpus)
    return complete_plan(values, n_gpus=gpus, global_batch=batch)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("count", [1, 4])
def test_what_launch_writes_for_deepspeed_is_read_back(stage, precision, count, tmp_path):
    plan = Plan(
        4096, micro_batch=2, n_microbatches=count, dp_shard=8, zero_stage=stage, precision=precision, stack="deepspeed"
    )
    files = launch_files(plan, LLAMA, load_cluster("h100-sxm"), "deepspeed")
    (tmp_path / "ds_config.json").write_text(files["ds_config.json"])
    back = plan_of(tmp_path / "ds_config.json", 8)
    assert [getattr(back, name) for name in FIELDS] == [getattr(plan, name) for name in FIELDS]
    assert back.stack == "deepspeed"


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("mode", ["none", "full"])
def test_what_launch_writes_for_accelerate_is_read_back(stage, mode, tmp_path):
    mode = mode if stage else "none"
    plan = Plan(4096, dp_shard=8, zero_stage=stage, activation_checkpointing=mode, stack="pytorch")
    files = launch_files(plan, LLAMA, load_cluster("h100-sxm"), "accelerate")
    (tmp_path / "accelerate.yaml").write_text(files["accelerate.yaml"])
    back = plan_of(tmp_path / "accelerate.yaml")
    names = (*FIELDS, "activation_checkpointing", "stack")
    assert [getattr(back, name) for name in names] == [getattr(plan, name) for name in names]


def test_values_that_are_left_to_the_trainer_are_left_open(tmp_path):
    config = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    assert (plan_of(tmp_path / "ds.json", 4).zero_stage, plan_of(tmp_path / "ds.json", 4).micro_batch) == (2, 1)
    with pytest.raises(ForerunError, match="does not say the model; name the model before --recipe"):
        read_recipe(tmp_path / "ds.json").named_model()


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.json", "{", "not JSON"),
        ("a.json", "[]", "expected keys and values"),
        ("a.json", "{}", "has neither train_batch_size"),
        ("a.json", '{"zero_optimization": {"stage": 4}}', "must be at most 3"),
        ("a.json", '{"zero_optimization": {"stage": "x"}}', "must be a whole number"),
        ("a.yaml", "distributed_type: TPU", "'TPU' is not read"),
        ("a.yaml", "distributed_type: FSDP\nnum_processes: many", "must be a whole number"),
    ],
)
def test_a_wrong_file_is_one_line(name, text, says, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(ForerunError, match=says) as caught:
        read_recipe(tmp_path / name)
    assert "\n" not in str(caught.value)
