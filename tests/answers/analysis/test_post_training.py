"""A step of GRPO or PPO: its stages by known answers, and what must hold between them."""

from dataclasses import replace

import pytest

from forerun.answers.analysis.post_training import PostTraining, post_training_step, scoring_time_s
from forerun.answers.analysis.setup import Setup
from forerun.answers.analysis.simulate_setup import simulate_setup
from forerun.common.errors import ForerunError, ImpossiblePlan
from forerun.common.units import GIB
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan

MODEL = replace(load_model("llama-3.2-1b"), n_layers=4)
PLAN = Plan(seq_len=2048, micro_batch=2, n_microbatches=2, dp_shard=8)
SETUP = Setup(MODEL, PLAN, load_cluster("h100-sxm"))
UPDATE = simulate_setup(SETUP)


def step(setup: Setup = SETUP, **around):
    update = UPDATE if setup is SETUP else simulate_setup(setup)
    return post_training_step(setup, update, PostTraining(**{"generated_tokens_per_s": 2000.0, **around}))


def named(made) -> dict[str, float]:
    return {stage.name: stage.time_s for stage in made.stages}


def test_generation_takes_its_tokens_over_the_stated_rate_of_all_gpus():
    made = step(generated_share=0.75)
    assert made.generated_tokens == 0.75 * 8 * 4 * 2048
    assert named(made)["generation"] == pytest.approx(0.75 * 4 * 2048 / 2000.0)
    assert made.step_time_s == pytest.approx(sum(named(made).values()))


def test_a_scoring_pass_is_what_a_reference_model_adds():
    with_reference = simulate_setup(replace(SETUP, plan=replace(PLAN, reference=True)))
    by_hand = with_reference.prediction.step_time_s - UPDATE.prediction.step_time_s
    assert scoring_time_s(SETUP) == pytest.approx(by_hand)
    assert named(step())["scores of the trained model"] == pytest.approx(by_hand)
    assert "scores of the trained model" not in named(step(old_scores=False))
    assert 0.2 < by_hand / UPDATE.prediction.step_time_s < 0.5


def test_a_critic_like_the_model_doubles_the_work_and_shares_the_memory():
    alone, both = step(), step(critic=MODEL)
    assert named(both)["update of the critic"] == pytest.approx(named(both)["update"])
    more = named(both)["update"] + scoring_time_s(SETUP)
    assert both.step_time_s - alone.step_time_s == pytest.approx(more)
    resident = max(int(cls.resident_bytes.sum()) for cls in UPDATE.program.rank_classes) / GIB
    assert both.device_gib - alone.device_gib == pytest.approx(resident)


def test_the_memory_of_the_engine_counts_while_it_generates():
    small, large = step(generation_gib=1.0), step(generation_gib=78.0)
    assert small.fits
    assert not large.fits
    assert large.stages[0].device_gib - small.stages[0].device_gib == pytest.approx(77.0)
    assert large.device_gib == large.stages[0].device_gib


@pytest.mark.parametrize(
    "wrong",
    [{"generated_tokens_per_s": 0.0}, {"generated_share": 0.0}, {"generated_share": 1.5}, {"generation_gib": -1.0}],
)
def test_impossible_figures_are_refused(wrong):
    with pytest.raises(ForerunError, match="must be"):
        step(**wrong)


def test_a_scoring_pass_that_the_plan_does_not_run_is_refused():
    pipeline = replace(SETUP, plan=Plan(seq_len=2048, n_microbatches=4, dp_shard=2, pp=2))
    with pytest.raises(ImpossiblePlan, match="reference model runs without pipelines"):
        step(pipeline)
