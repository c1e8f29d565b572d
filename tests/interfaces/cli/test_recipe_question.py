"""The question that a recipe asks of a search, with and without what options say."""

from __future__ import annotations

import pytest

from forerun.common.errors import ForerunError, ImpossiblePlan
from forerun.interfaces.cli.recipe_question import recipe_question

TOML = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
seq_len = 4096
[parallelism]
data_parallel_shard_degree = 8
[activation_checkpoint]
mode = "full"
"""
"""of 8 GPUs, with 16 sequences a step"""


@pytest.mark.parametrize(
    ("options", "sizes", "has_own_plan"),
    [
        ({}, {}, True),
        ({"dp_shard": 8, "activation_checkpointing": "full"}, {}, True),
        ({"tp": 2}, {}, False),
        ({"dp_shard": 8, "activation_checkpointing": "none"}, {}, False),
        ({}, {"seq_len": 8192}, False),
        ({}, {"gpus": 16, "batch": 64}, False),
        ({}, {"batch": 64}, False),
    ],
)
def test_the_plan_of_a_recipe_stands_where_options_ask_about_the_same_run(options, sizes, has_own_plan, tmp_path):
    (tmp_path / "train.toml").write_text(TOML)
    found = recipe_question(tmp_path / "train.toml", None, options, *map(sizes.get, ("seq_len", "gpus", "batch")))
    assert (found.seq_len, found.gpus, found.batch) == (
        sizes.get("seq_len", 4096), sizes.get("gpus", 8), sizes.get("batch", 16),
    )  # fmt: skip
    assert (found.plan is not None) == has_own_plan
    assert options.items() <= found.fixed.items()
    if found.plan is not None:
        assert (found.plan.dp_shard, found.plan.micro_batch, found.plan.world_size) == (8, 2, 8)


def test_how_many_sequences_other_gpus_train_on_is_not_guessed(tmp_path):
    (tmp_path / "train.toml").write_text(TOML)
    with pytest.raises(ForerunError, match="does not say how many sequences a step has; give --global-batch"):
        recipe_question(tmp_path / "train.toml", None, {}, None, 16, None)


def test_a_plan_that_can_not_run_is_refused_unless_another_run_is_asked_about(tmp_path):
    (tmp_path / "train.toml").write_text(TOML.replace("= 2\n", "= 2\nglobal_batch_size = 20\n"))
    with pytest.raises(ImpossiblePlan):
        recipe_question(tmp_path / "train.toml", None, {}, None, None, None)
    found = recipe_question(tmp_path / "train.toml", None, {}, None, 8, 32)
    assert (found.batch, found.plan) == (32, None)
    with pytest.raises(ForerunError, match="does not say on how many GPUs it runs; give --gpus"):
        recipe_question(tmp_path / "train.toml", None, {}, None, None, 32)
