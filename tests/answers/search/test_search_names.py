"""Plans under several names are searched once."""

from dataclasses import replace

import pytest

from forerun.answers.analysis.predict import predict
from forerun.answers.search.search import search
from forerun.answers.search.space import Tally, make_space
from forerun.answers.search.why import why
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.canonical import canonical

H100 = load_cluster("h100-sxm")
MODEL = replace(load_model("llama-3.2-1b"), n_layers=2)
ASK = (MODEL, H100, 8, 2048, 16)
LISTS = {
    "dp_shard": [1, 2, 4, 8],
    "dp_replicate": [1, 2, 4, 8],
    "tp": [1, 2],
    "cp": [1],
    "pp": [1, 2],
    "micro_batch": [1],
    "sequence_parallel": [True, False],
    "reshard_after_forward": ["default", "always", "never"],
    "activation_checkpointing": ["none", "full"],
    "selective_policy": ["op", "mlp"],
    "pp_schedule": ["1F1B", "GPipe"],
}


@pytest.fixture(scope="module")
def result():
    return search(*ASK, fixed=LISTS, workers=1)


def test_every_plan_is_counted_once(result):
    counts = result.counts
    assert counts["considered"] == sum(counts.values()) - counts["considered"]
    assert counts["renamed"] == result.renamed > counts["considered"] / 2
    statuses = [row["status"] for row in result.to_rows()]
    assert statuses.count("renamed") == counts["renamed"]
    assert len(statuses) == counts["considered"] - counts["impossible"]


def test_no_two_plans_that_are_searched_have_equal_forms(result):
    table = result.outcome.table
    forms = [canonical(MODEL, table.plan(row)) for row in range(len(table))]
    assert len(set(forms)) == len(forms)
    renamed = result.outcome.renamed
    for row in range(len(renamed)):
        assert canonical(MODEL, renamed.table.plan(row)) == forms[int(renamed.stands[row])]


def test_other_names_take_as_long_and_as_much_memory(result):
    renamed, table = result.outcome.renamed, result.outcome.table
    for row in range(0, len(renamed), max(1, len(renamed) // 12)):
        one = predict(MODEL, renamed.table.plan(row), H100)
        other = predict(MODEL, table.plan(int(renamed.stands[row])), H100)
        figures = ("step_time_s", "peak_allocated_gib", "peak_reserved_gib", "device_gib", "tokens_per_s_per_gpu")
        assert [getattr(one, name) for name in figures] == [getattr(other, name) for name in figures]


def test_names_that_are_listed_alone_are_searched():
    """What stands for a plan has to be in the space: dp_shard 8 without sharding alone is not left out."""
    tally = Tally()
    fixed = {**LISTS, "dp_shard": [8], "dp_replicate": [1], "zero_stage": [0], "reshard_after_forward": ["always"]}
    plans = list(make_space(*ASK, {**fixed, "selective_policy": ["mlp"]}).plans(tally))
    assert {plan.dp_shard for plan in plans} == {8}
    assert {plan.selective_policy for plan in plans} == {"mlp"}


def test_the_default_space_names_every_plan_once():
    tally = Tally()
    list(make_space(*ASK).plans(tally))
    assert tally.renamed is not None
    assert len(tally.renamed) == 0


def test_a_whole_space_has_one_schedule_of_one_micro_batch():
    """GPipe and 1F1B run one micro batch alike; that is all that the whole space names twice."""
    tally = Tally()
    table = make_space(*ASK, extent="whole").table(tally)
    assert tally.renamed is not None
    renamed = [tally.renamed.table.plan(row) for row in range(len(tally.renamed))]
    assert {(plan.pp_schedule, plan.n_microbatches) for plan in renamed} == {("GPipe", 1)}
    assert {table.plan(int(row)).pp_schedule for row in tally.renamed.stands} == {"1F1B"}


def test_why_answers_for_another_name_with_the_one_that_stands_for_it(result):
    asked = {"dp_shard": 8, "dp_replicate": 1, "zero_stage": 0, "tp": 1, "activation_checkpointing": "none"}
    verdict = why(result, asked, make_space(*ASK, {**LISTS, **asked}))
    assert verdict.text.startswith("executes the same step as dp_replicate 8, dp_shard 1: rank ")
    assert verdict.plan is not None
    assert (verdict.plan.dp_replicate, verdict.plan.dp_shard) == (8, 1)
    other = replace(verdict.plan, dp_replicate=1, dp_shard=8)
    assert result.reason_of(other) == "executes the same step as dp_replicate 8, dp_shard 1"
