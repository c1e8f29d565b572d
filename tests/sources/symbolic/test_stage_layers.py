"""How a stack cuts a model into pipeline stages where the plan does not say."""

from dataclasses import replace

import pytest

from forerun.answers.analysis.predict import predict, predict_setup
from forerun.answers.analysis.setup import Setup
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan
from forerun.describe.stacks.catalog import load_stack
from forerun.sources.symbolic.schedule import layers_of_stages, stage_layers

MODEL = replace(
    load_model("llama-3-8b"),
    n_layers=24, hidden=2048, n_heads=32, n_kv_heads=32, head_dim=64, ffn_hidden=4096, vocab=50257,
)  # fmt: skip
PLAN = Plan(seq_len=512, n_microbatches=16, zero_stage=0, stack="nanotron")


@pytest.mark.parametrize(
    ("pp", "expected"),
    [
        (2, [14, 10]),
        (4, [7, 7, 6, 4]),
        (8, [4, 3, 3, 4, 3, 3, 4, 0]),  # the head weighs as two and a half layers, a stage of its own
        (16, [2, 2, 1, 2, 2, 1, 2, 2, 1, 2, 2, 1, 2, 2, 0, 0]),
    ],
)
def test_nanotron_ends_a_stage_with_the_layer_that_passes_its_share(pp: int, expected: list[int]) -> None:
    plan = replace(PLAN, pp=pp)
    assert stage_layers(MODEL, plan, load_stack("nanotron")) == expected
    assert stage_layers(MODEL, plan, load_stack("megatron-core")) == layers_of_stages(24, plan)
    assert predict(MODEL, plan, load_cluster("h100-sxm")).step_time_s > 0


def test_what_a_plan_says_of_its_stages_holds() -> None:
    said = replace(PLAN, pp=4, layers_per_stage=(9, 5, 5, 5))
    assert stage_layers(MODEL, said, load_stack("nanotron")) == [9, 5, 5, 5]
    assert stage_layers(MODEL, PLAN, load_stack("nanotron")) == [24]


@pytest.mark.parametrize(("samples", "copies"), [(1, 0), (2, 1)])
def test_several_samples_with_the_sequence_first_keep_a_copy_of_attentions_output(samples: int, copies: int) -> None:
    plan = replace(PLAN, seq_len=4096, n_microbatches=1, micro_batch=samples)
    stack = load_stack("nanotron")
    with_copies, without = (
        predict_setup(Setup(MODEL, plan, load_cluster("h100-sxm"), changed_stack=replace(stack, sequence_first=first)))
        for first in (True, False)
    )
    size = copies * MODEL.n_layers * samples * plan.seq_len * MODEL.hidden * 2 / 2**30
    assert with_copies.peak_allocated_gib - without.peak_allocated_gib == pytest.approx(size, abs=0.01)
