"""A refused degree names the degrees next to it that fit."""

import pytest

from forerun.common.errors import ImpossiblePlan
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.constraints import check_plan
from forerun.describe.plan.plan import Plan

CLUSTER = load_cluster("h100-sxm")
MANY = {"pp_schedule": "Interleaved1F1B", "virtual_stages": 2, "n_microbatches": 8}


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("llama-3.1-8b", {"tp": 3}, "32 attention heads are not divisible by tp 3; tp 1, 2 or 4 fits"),
        ("llama-3.1-8b", {"tp": 48}, "not divisible by tp 48; tp 2, 4, 8, 16 or 32 fits"),
        ("llama-3.1-8b", {"cp": 3}, "seq_len 4096 is not divisible by cp 3; cp 1, 2 or 4 fits"),
        ("llama-3.1-8b", {"pp": 33}, "fewer than the 33 stages of pp 33; pp 28, 29, 30, 31 or 32 fits"),
        ("llama-3.1-8b", {"pp": 6, **MANY}, "8 micro batches are not divisible by pp 6; pp 2, 4 or 8 fits"),
        ("mixtral-8x7b", {"ep": 6, "dp_shard": 24}, "8 experts are not divisible by ep 6; ep 1, 2, 4 or 8 fits"),
        ("llama-3.1-8b", {"ep": 6, "dp_shard": 6}, "llama-3.1-8b is dense; ep 1 fits"),
    ],
)
def test_the_message_names_what_fits(name, fields, message):
    with pytest.raises(ImpossiblePlan) as refused:
        check_plan(load_model(name), Plan(4096, **fields), CLUSTER)
    assert str(refused.value).endswith(message)


@pytest.mark.parametrize("tp", range(1, 9))
def test_what_is_named_can_run(tp):
    model = load_model("qwen2.5-7b")  # 28 heads and 4 of keys and values
    try:
        check_plan(model, Plan(4096, tp=tp), CLUSTER)
    except ImpossiblePlan as error:
        named = str(error).partition("; tp ")[2].removesuffix(" fits").replace(" or ", ", ").split(", ")
        assert named
        for value in named:
            check_plan(model, Plan(4096, tp=int(value)), CLUSTER)
