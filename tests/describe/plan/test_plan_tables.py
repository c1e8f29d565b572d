"""The rules say the same of a table of plans as of each of its plans."""

import random

import numpy as np
import pytest

from forerun.answers.search.table import PlanTable
from forerun.common.errors import ForerunError
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.constraints import RULES, refuse
from forerun.describe.plan.fields import FIELD_TYPES, choices
from forerun.describe.plan.plan import DEFAULT_ORDER, Plan

VALUES = {
    "seq_len": (1024, 4096, 8192, 6144),
    "micro_batch": (1, 2, 4),
    "n_microbatches": (1, 2, 6, 8, 16),
    **dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep"), (1, 1, 2, 3, 4, 8)),
    "mesh_order": (DEFAULT_ORDER, "cp-tp-dp_shard-dp_replicate-pp", "pp-dp_shard-tp-dp_replicate-cp"),
    "prefetch": (1, 0, 2),
    "ddp_bucket_mib": (0.0, 25.0),
    "shard_min_mib": (0.0, 1.0),
    "document_lengths": ((), (64, 192)),
    "loss_chunks": (1, 1, 4),
    "lora_rank": (0, 0, 8),
    "lora_targets": (("q_proj", "v_proj"), ()),
    "virtual_stages": (1, 1, 2, 4),
    "layers_per_stage": (None, None, (16, 16), (20, 12), (10, 10, 12), (8, 8, 8, 8), (16, 8)),
    "etp": (1, 1, 2),
    "expert_imbalance": (1.0, 1.5),
    "expert_routing": ("balanced", "balanced", "uniform", "zipf:1"),
    "checkpoint_every": (1, 2),
    "attention": ("auto", "flash2", "naive"),
    "activation_offload": (0.0, 0.5),
    "stack": ("torchtitan", "megatron-core"),
}


def random_plan(draw: random.Random, often: float) -> Plan:
    """A plan with about a share `often` of its fields other than by default."""
    while True:
        fields = {"seq_len": draw.choice(VALUES["seq_len"])}
        for name in FIELD_TYPES:
            if name != "seq_len" and draw.random() < often:
                fields[name] = draw.choice(VALUES.get(name) or choices(name) or (False, True))
        try:
            return Plan(**fields)
        except ForerunError:
            continue


def drawn(seed: int, count: int = 400) -> list[Plan]:
    """Plans of which some break one rule, some many, some none."""
    draw = random.Random(seed)
    return [random_plan(draw, draw.choice((0.1, 0.25, 0.6))) for _ in range(count)]


@pytest.mark.parametrize("model", ["llama-3.1-8b", "mixtral-8x7b", "deepseek-v2-lite", "gpt2-xl"])
@pytest.mark.parametrize("cluster", ["h100-sxm", "b200-sxm"])
def test_a_table_is_refused_as_its_plans_are(model, cluster):
    model, cluster = load_model(model), load_cluster(cluster)
    plans = drawn(hash_of(model.name))
    table = PlanTable.of(plans)
    broken = np.full(len(plans), -1)
    for number, rule in reversed(list(enumerate(RULES))):
        here = np.broadcast_to(rule.broken(model, table, cluster), len(plans))
        broken[here] = number
    seen = set()
    for plan, number in zip(plans, broken.tolist(), strict=True):
        refusal = refuse(model, plan, cluster)
        assert (None if refusal is None else refusal.rule) == (None if number < 0 else RULES[number].name), plan
        if refusal:
            assert refusal.reason
            assert "\n" not in refusal.reason
        seen.add(number)
    assert -1 in seen
    assert len(seen) > 6


def hash_of(name: str) -> int:
    return sum(map(ord, name))


def test_a_table_gives_back_its_plans():
    plans = drawn(1)
    table = PlanTable.of(plans)
    assert [table.plan(row) for row in range(len(table))] == plans
    some = table.take(np.array([5, 3]))
    assert [some.plan(row) for row in range(len(some))] == [plans[5], plans[3]]
    for name in ("world_size", "fsdp", "dp", "n_stages", "global_batch", "tokens_per_step"):
        assert getattr(table, name).tolist() == [getattr(plan, name) for plan in plans], name
