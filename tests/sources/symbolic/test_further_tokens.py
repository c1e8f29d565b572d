"""Modules that predict further tokens (MTP): what they hold, what they compute, and where."""

from dataclasses import replace

import pytest

from forerun.answers.analysis.predict import predict
from forerun.common.errors import ForerunError, ImpossiblePlan
from forerun.core.program.validate import problems
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.model.layer_parameters import layer_parameters
from forerun.describe.model.parameters import active_parameter_count, model_flops_per_token, parameter_count
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.constraints import check_plan
from forerun.describe.plan.plan import Plan
from forerun.sources.symbolic.build import build

CLUSTER = load_cluster("h100-sxm")
SMALL = ModelSpec("small", 4, 256, 8, 4, 32, 512, 1000)
MOE = replace(load_model("deepseek-v2-lite"), name="moe", n_layers=3, vocab=1024)


def with_modules(model: ModelSpec, modules: int) -> ModelSpec:
    return replace(model, mtp_modules=modules)


@pytest.mark.parametrize("model", [SMALL, MOE, load_model("deepseek-v3")], ids=lambda model: model.name)
def test_a_module_is_a_layer_with_three_norms_and_a_projection(model: ModelSpec) -> None:
    layer = sum(layer_parameters(model, model.n_layers - 1).values())
    more = layer + 3 * model.hidden + 2 * model.hidden * model.hidden
    assert parameter_count(with_modules(model, 2)) - parameter_count(model) == 2 * more


def test_the_module_of_deepseek_v3_has_the_published_size() -> None:
    """11.5 billion parameters of its own (github.com/deepseek-ai/DeepSeek-V3, README_WEIGHTS.md), and two tables that
    it shares, of 0.9 billion each."""
    model = load_model("deepseek-v3")
    more = parameter_count(with_modules(model, 1)) - parameter_count(model)
    assert 11.5e9 <= more < 11.65e9
    active = active_parameter_count(with_modules(model, 1)) - active_parameter_count(model)
    assert 0.65e9 < active < 0.75e9


@pytest.mark.parametrize("model", [SMALL, MOE], ids=lambda model: model.name)
@pytest.mark.parametrize("modules", [1, 3])
def test_a_step_without_recomputation_computes_the_model_flops(model: ModelSpec, modules: int) -> None:
    """HFU is MFU where nothing is computed again: what kernels compute is what the formula says."""
    with_some = with_modules(model, modules)
    plan = Plan(seq_len=512, dp_shard=4)
    prediction = predict(with_some, plan, CLUSTER)
    without = predict(model, plan, CLUSTER)
    assert prediction.mfu is not None
    assert prediction.hfu is not None
    assert without.mfu is not None
    assert without.hfu is not None
    assert prediction.hfu / prediction.mfu == pytest.approx(without.hfu / without.mfu, rel=0.01)
    assert prediction.step_time_s > without.step_time_s


def test_flops_are_those_of_a_layer_a_projection_and_the_head() -> None:
    one, none = (model_flops_per_token(with_modules(SMALL, modules), 512) for modules in (1, 0))
    deeper = model_flops_per_token(replace(SMALL, n_layers=5), 512)
    beside = 6 * (2 * 256 * 256 + 3 * 256 + 1000 * 256)
    assert one - none == pytest.approx(deeper - none + beside, rel=1e-12)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(seq_len=512, dp_shard=8, activation_checkpointing="full"),
        Plan(seq_len=512, dp_shard=8, activation_checkpointing="selective", compile=True),
        Plan(seq_len=512, tp=2, dp_shard=4, sequence_parallel=True, n_microbatches=2),
        Plan(seq_len=512, tp=2, pp=2, n_microbatches=4, stack="megatron-core", zero_stage=1, dp_shard=2),
        Plan(seq_len=512, pp=2, n_microbatches=4, pp_schedule="ZB1P", dp_shard=2),
        Plan(seq_len=512, cp=2, dp_shard=4, precision="fp8"),
        Plan(seq_len=512, dp_shard=4, loss_chunks=4),
    ],
    ids=["full", "compiled", "tp", "megatron", "zero-bubble", "cp", "loss-chunks"],
)
@pytest.mark.parametrize("model", [SMALL, MOE], ids=lambda model: model.name)
def test_programs_are_sound_and_take_more_of_everything(model: ModelSpec, plan: Plan) -> None:
    if model.moe and plan.dp_shard >= 4 and plan.tp == 1:
        plan = replace(plan, ep=4)
    with_some = with_modules(model, 1)
    assert problems(build(with_some, plan, CLUSTER)) == []
    more, less = predict(with_some, plan, CLUSTER), predict(model, plan, CLUSTER)
    assert more.step_time_s > less.step_time_s
    assert more.peak_allocated_gib > less.peak_allocated_gib


def test_all_memory_of_a_step_is_freed_at_its_end() -> None:
    for plan in (Plan(seq_len=512, dp_shard=4), Plan(seq_len=512, dp_shard=4, activation_checkpointing="full")):
        program = build(with_modules(SMALL, 2), plan, CLUSTER)
        left = 0
        for number in program.rank_classes[0].block.tolist():
            block = program.blocks[number]
            left += int(block.tensor_bytes @ ((block.tensor_free < 0).astype(int) - (block.tensor_alloc < 0)))
        assert left == 0


def test_the_last_stage_holds_a_copy_of_the_embedding_and_sums_its_gradient() -> None:
    plan = Plan(seq_len=512, pp=2, n_microbatches=4, stack="megatron-core", zero_stage=0)
    plain, some = (build(model, plan, CLUSTER) for model in (SMALL, with_modules(SMALL, 1)))
    assert "tied embedding gradients" not in [channel.name for channel in plain.channels]
    assert "tied embedding gradients" in [channel.name for channel in some.channels]
    first, last = (int(one.resident_bytes.sum()) for one in some.rank_classes)
    assert int(plain.rank_classes[0].resident_bytes.sum()) == first
    own = sum(layer_parameters(SMALL, 3).values()) + 3 * 256 + 2 * 256 * 256 + 1000 * 256
    more = last - int(plain.rank_classes[1].resident_bytes.sum())
    state = 18  # bf16 weights, fp32 gradients, masters and two moments
    assert more == pytest.approx(own * state, rel=0.02)


def test_one_rank_holds_the_embedding_once() -> None:
    plan = Plan(seq_len=512, stack="megatron-core", zero_stage=0)
    plain, some = (build(model, plan, CLUSTER).rank_classes[0] for model in (SMALL, with_modules(SMALL, 1)))
    own = sum(layer_parameters(SMALL, 3).values()) + 3 * 256 + 2 * 256 * 256
    assert int((some.resident_bytes - plain.resident_bytes).sum()) == pytest.approx(own * 18, rel=0.02)


@pytest.mark.parametrize("changes", [{"lora_rank": 8}, {"reference": True}, {"activation_offload": 0.5}], ids=str)
def test_what_modules_do_not_run_with_is_one_line(changes: dict[str, object]) -> None:
    plan = replace(Plan(seq_len=512, dp_shard=4), **changes)  # type: ignore[arg-type]
    with pytest.raises(ImpossiblePlan, match="modules that predict further tokens") as error:
        check_plan(with_modules(SMALL, 1), plan, CLUSTER)
    assert "\n" not in str(error.value)


def test_models_that_cannot_have_modules_are_one_line() -> None:
    for changes in ({"causal": False}, {"layer_input": 8}, {"layers": ((), (("shared_kv", True),))}):
        with pytest.raises(ForerunError, match="mtp_modules need a causal model"):
            replace(SMALL, mtp_modules=1, **changes)  # type: ignore[arg-type]
