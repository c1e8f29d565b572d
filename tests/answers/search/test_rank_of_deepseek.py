"""Where DeepSeek's own plan of DeepSeek-V3 stands among the plans that a search finds for the same run.

The plan: arXiv 2412.19437, section 3, with the batch and the GPUs of arXiv 2505.09343, table 4. The multi-token
prediction module counts as a 62nd layer.
"""

from dataclasses import replace

import pytest

from forerun.answers.analysis.predict import predict
from forerun.answers.search.search import search
from forerun.answers.search.standing import standing, unchosen_fields
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan

MODEL = replace(load_model("deepseek-v3"), n_layers=62)
CLUSTER = load_cluster("h800-sxm")
PLAN = Plan(
    seq_len=4096,
    n_microbatches=120,
    dp_shard=128,
    pp=16,
    ep=64,
    zero_stage=1,
    pp_schedule="DualPipe",
    virtual_stages=2,
    expert_overlap=True,
    precision="fp8",
    fp8_recipe="block",
    activation_checkpointing="selective",
    recompute_modules=("layernorm", "mla_up_proj", "moe_act"),
    moment_dtype="bf16",
    stack="hai-llm",
)


@pytest.mark.long
def test_the_plan_is_among_the_first_five_and_near_the_best():
    found = search(MODEL, CLUSTER, 2048, 4096, 15360, fixed=unchosen_fields(PLAN), keep=5, workers=1)
    place = standing(predict(MODEL, PLAN, CLUSTER), found.top(5))
    assert place.rank <= 5
    assert 0 <= place.behind < 0.03
