"""Plan fields from text and files, and plans completed from GPUs and batch."""

import pytest

from forerun.common.errors import ForerunError, ImpossiblePlan
from forerun.describe.plan.complete import complete_plan
from forerun.describe.plan.fields import FIELD_TYPES, from_text, plan_fields
from forerun.describe.plan.plan import Plan


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("tp", "8", 8),
        ("zero_stage", "3", 3),
        ("compile", "true", True),
        ("compile", "off", False),
        ("ddp_bucket_mib", "12.5", 12.5),
        ("layers_per_stage", "8,8,16", (8, 8, 16)),
        ("pp_schedule", "interleaved1f1b", "Interleaved1F1B"),
        ("dp_shard", "-1", -1),
        ("stack", "megatron-core", "megatron-core"),
    ],
)
def test_text_becomes_the_value(name, text, value):
    assert from_text(name, text) == value


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tp", "eight", "--tp: expected a whole number, got 'eight'"),
        ("zero_stage", "4", "--zero-stage: expected one of 0, 1, 2, 3, got '4'"),
        ("precision", "bf17", "--precision: expected one of bf16"),
        ("compile", "maybe", "--compile: expected true or false"),
        ("ddp_bucket_mib", "big", "--ddp-bucket-mib: expected a number"),
        ("layers_per_stage", "8,x", "--layers-per-stage: expected a whole number, got 'x'"),
    ],
)
def test_other_text_is_refused(name, text, message):
    with pytest.raises(ForerunError) as error:
        from_text(name, text)
    assert message in str(error.value)


def test_every_field_is_understood():
    plan = Plan(seq_len=128)
    assert plan_fields({name: getattr(plan, name) for name in FIELD_TYPES}, "here") == {
        name: getattr(plan, name) for name in FIELD_TYPES
    }


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tpp": 8}, "plan.yaml: unknown key 'tpp'; did you mean tp?"),
        ({"tp": "8"}, "plan.yaml: tp: expected a whole number, got '8'"),
        ({"tp": True}, "plan.yaml: tp: expected a whole number, got True"),
        ({"compile": 1}, "plan.yaml: compile: expected true or false, got 1"),
        ({"zero_stage": True}, "plan.yaml: zero_stage: expected one of 0, 1, 2, 3, got True"),
        ({"layers_per_stage": [8, 8.5]}, "plan.yaml: layers_per_stage: expected a list of whole numbers"),
    ],
)
def test_a_wrong_key_or_type_is_named(values, message):
    with pytest.raises(ForerunError) as error:
        plan_fields(values, "plan.yaml")
    assert message in str(error.value)


def test_the_rest_of_the_gpus_is_sharded():
    assert complete_plan({"seq_len": 8, "tp": 4}, n_gpus=32).dp_shard == 8
    assert complete_plan({"seq_len": 8, "tp": 4, "dp_shard": -1, "dp_replicate": 2}, n_gpus=32).dp_shard == 4
    assert complete_plan({"seq_len": 8, "dp_shard": 8, "dp_replicate": -1}, n_gpus=32).dp_replicate == 4
    assert complete_plan({"seq_len": 8, "dp_shard": 8, "tp": 2}).world_size == 16


def test_the_batch_gives_the_micro_batches():
    plan = complete_plan({"seq_len": 8, "micro_batch": 2}, n_gpus=4, global_batch=32)
    assert (plan.n_microbatches, plan.global_batch) == (4, 32)


@pytest.mark.parametrize(
    ("values", "gpus", "batch", "message"),
    [
        ({"seq_len": 8, "tp": 3}, 32, None, "tp 3 does not divide 32 GPUs"),
        ({"seq_len": 8, "dp_shard": 4, "tp": 4}, 32, None, "dp_shard 4 x tp 4 = 16 GPUs, not 32"),
        ({"seq_len": 8, "micro_batch": 3}, 4, 32, "global batch 32 is not a multiple of micro_batch 3 x 4"),
        ({"seq_len": 8, "n_microbatches": 3}, 4, 32, "= 12 sequences, not the global batch of 32"),
    ],
)
def test_degrees_that_do_not_multiply_are_impossible(values, gpus, batch, message):
    with pytest.raises(ImpossiblePlan) as error:
        complete_plan(values, gpus, batch)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("values", "gpus", "message"),
    [
        ({"tp": 2}, 8, "seq_len is missing"),
        ({"seq_len": 8, "dp_shard": -1}, None, "give --gpus"),
        ({"seq_len": 8, "dp_shard": -1, "dp_replicate": -1}, 8, "only one of"),
        ({"seq_len": 8}, 0, "gpus must be at least 1"),
    ],
)
def test_what_is_missing_is_named(values, gpus, message):
    with pytest.raises(ForerunError, match=message):
        complete_plan(values, gpus)
