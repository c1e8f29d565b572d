"""What a plan's checkpoint holds, and memory at the stages of initialisation."""

from dataclasses import replace

import pytest

from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.model.parameters import parameter_count
from forerun.describe.plan.plan import Plan
from forerun.describe.stacks.catalog import load_stack
from forerun.sources.symbolic.training_state import training_state

MODEL = load_model("llama-3.1-8b")
WORLDS = {
    "fsdp": {"dp_shard": 64},
    "hsdp": {"dp_replicate": 4, "dp_shard": 16},
    "ddp": {"zero_stage": 0, "dp_shard": 8},
    "zero1": {"zero_stage": 1, "dp_shard": 8, "stack": "megatron-core"},
    "tp": {"dp_shard": 8, "tp": 8},
    "pp": {"dp_shard": 8, "pp": 4, "n_microbatches": 8},
    "cp": {"dp_shard": 8, "cp": 2},
}


def state(model=MODEL, **fields):
    plan = Plan(**({"seq_len": 4096} | fields))
    return training_state(model, plan, load_cluster("h100-sxm"), load_stack(plan.stack))


@pytest.mark.parametrize("world", WORLDS)
def test_a_checkpoint_holds_every_parameter_once(world):
    """12 bytes a parameter: fp32 weights and Adam's two moments; 14 where a bf16 copy lives beside them."""
    saved, parameters = state(**WORLDS[world]).saved, parameter_count(MODEL)
    assert saved.total_bytes / parameters == pytest.approx(14 if world in ("zero1", "ddp") else 12, rel=0.002)
    ranks = Plan(seq_len=1, **WORLDS[world]).world_size
    assert saved.saved_bytes * ranks >= saved.total_bytes * (1 - 1e-9)
    assert saved.held_bytes >= saved.saved_bytes * (1 - 1e-9)


def test_replicas_share_the_saving_and_load_everything():
    one, four = state(dp_shard=16).saved, state(dp_shard=16, dp_replicate=4).saved
    assert four.saved_bytes == pytest.approx(one.saved_bytes / 4)
    assert four.held_bytes == one.held_bytes
    assert four.held_total_bytes == 4 * one.held_total_bytes


def test_experts_are_saved_once_however_they_are_spread():
    model = load_model("mixtral-8x7b")
    totals = [state(model, dp_shard=16, ep=ep).saved.total_bytes for ep in (1, 2, 8)]
    assert totals == pytest.approx([totals[0]] * 3, rel=1e-6)
    assert totals[0] / parameter_count(model) == pytest.approx(12, rel=0.002)


def test_stages_without_sharding_are_the_whole_model():
    stages = {(stage.way, stage.name): stage for stage in state(stack="simple-fsdp").init}
    whole = stages["direct", "model"].allocated_bytes
    assert whole == pytest.approx(4 * parameter_count(MODEL), rel=0.001)
    assert stages["direct", "sharded"].peak_bytes == whole
    assert stages["meta", "to_empty"].allocated_bytes == whole
    assert ("meta", "init_weights, gathered") not in stages


@pytest.mark.parametrize("ranks", [2, 8, 64])
@pytest.mark.parametrize("stack", ["simple-fsdp", "torchtitan"])
def test_stages_of_fsdp(stack, ranks):
    stages = {(stage.way, stage.name): stage for stage in state(stack=stack, dp_shard=ranks).init}
    whole, shards = stages["direct", "model"].allocated_bytes, stages["meta", "to_empty"].allocated_bytes
    assert shards == pytest.approx(whole / ranks, rel=0.001)
    largest = 4 * MODEL.vocab * MODEL.hidden
    assert stages["direct", "sharded"].peak_bytes == whole + largest // ranks  # the embedding is first
    batch = stages["direct", "batch"].allocated_bytes - stages["direct", "sharded"].allocated_bytes
    assert 2 * 8 * 4096 <= batch < 2 * 8 * 4096 + 2**20  # token ids and labels; flex attention's mask
    gathered = stages.get(("meta", "init_weights, gathered"))
    assert (gathered is not None) == (stack == "simple-fsdp")
    if gathered is not None:
        assert gathered.peak_bytes - shards == pytest.approx(largest / 2 * (1 + 1 / ranks), rel=1e-6)


def test_the_most_so_far_never_falls_nor_lies_below_what_is_allocated():
    for way in ("meta", "direct"):
        stages = [stage for stage in state(dp_shard=8).init if stage.way == way]
        assert all(stage.peak_bytes >= stage.allocated_bytes for stage in stages)
        assert [stage.peak_bytes for stage in stages] == sorted(stage.peak_bytes for stage in stages)


def test_a_model_that_no_rank_can_hold_whole_is_made_on_meta_alone():
    assert {stage.way for stage in state(dp_shard=8, tp=8).init} == {"meta"}


def test_stacks_that_initialise_in_another_way_say_nothing():
    assert state(**WORLDS["zero1"]).init == ()


def test_tied_matrices_are_there_once():
    tied = replace(MODEL, tied_embeddings=True)
    saved = [state(model, dp_shard=8).saved.total_bytes for model in (MODEL, tied)]
    assert saved[0] - saved[1] == pytest.approx(12 * MODEL.vocab * MODEL.hidden, rel=1e-6)


@pytest.mark.parametrize("stack", ["simple-fsdp", "torchtitan"])
def test_a_model_on_meta_takes_no_memory_until_it_is_made_empty(stack):
    stages = [stage for stage in state(stack=stack, dp_shard=8).init if stage.way == "meta"]
    assert [stage.name for stage in stages[:4]] == ["model", "sharded", "to_empty", "init_weights"]
    assert [(stage.allocated_bytes, stage.peak_bytes) for stage in stages[:2]] == [(0, 0), (0, 0)]
    assert stages[2].allocated_bytes == stages[3].allocated_bytes > 0
