"""Plans of every kind for the tests of launch configurations."""

from __future__ import annotations

import random
from dataclasses import replace

from forerun.common.errors import ForerunError
from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.model.spec import ModelSpec
from forerun.describe.plan.constraints import refuse
from forerun.describe.plan.fields import FIELD_TYPES, choices
from forerun.describe.plan.plan import DEFAULT_ORDER, Plan

CLUSTER = load_cluster("b200-sxm")
MODELS = [load_model(name) for name in ("llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3", "gpt2-xl", "llama-3.2-1b")]
_OTHERS = {
    "seq_len": (4096, 8192),
    "micro_batch": (1, 2, 4),
    "n_microbatches": (1, 2, 8, 16),
    **dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep"), (1, 1, 2, 4)),
    "mesh_order": (DEFAULT_ORDER, "tp-cp-pp-dp_shard-dp_replicate", "dp_shard-tp-cp-dp_replicate-pp"),
    "prefetch": (1, 1, 0, 2),
    "ddp_bucket_mib": (0.0, 0.0, 100.0, 40.0),
    "shard_min_mib": (0.0, 0.0, 1.0),
    "document_lengths": ((), (), (512, 1536)),
    "loss_chunks": (1, 1, 4),
    "lora_rank": (0, 0, 8, 16),
    "lora_targets": (("q_proj", "v_proj"), ("down_proj",)),
    "virtual_stages": (1, 1, 2, 4),
    "layers_per_stage": (None,),
    "etp": (1, 1, 2),
    "dispatcher": ("auto", "auto", "alltoall", "deepep"),
    "recompute_modules": ((), ("layernorm", "moe_act"), ("core_attn",)),
    "expert_imbalance": (1.0, 1.5),
    "expert_routing": ("balanced", "balanced", "zipf:1"),
    "checkpoint_every": (1, 1, 2),
    "attention": ("auto", "auto", "sdpa", "flash2", "flash3", "flash4", "flex", "cudnn"),
    "activation_offload": (0.0, 0.0, 0.5),
    "stack": ("torchtitan", "megatron-core", "deepspeed", "pytorch"),
}
_USUAL = 0.7
"""how often a field stays as it is by default: what no tool takes would else be in every plan"""
_AXES = ("seq_len", "micro_batch", "n_microbatches", "dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "zero_stage")


def values_of(name: str) -> tuple[object, ...]:
    """Values to try for a field."""
    return _OTHERS.get(name) or choices(name) or (False, True)


def random_case(number: int) -> tuple[ModelSpec, Plan]:
    """A model and a plan that it can be trained with, the same for the same number."""
    draw = random.Random(number)
    while True:
        model = draw.choice(MODELS)
        fields = {"seq_len": 4096}
        for name in sorted(FIELD_TYPES, key=lambda field: field == "mesh_order"):
            if name in _AXES or draw.random() > _USUAL:
                fields[name] = draw.choice(values_of(name))
        if model.n_layers % 4 == 0 and fields["pp"] == 2 and draw.random() < 0.3:
            half = model.n_layers // 2
            fields |= {"layers_per_stage": (half + 1, half - 1), "virtual_stages": 1, "pp_schedule": "1F1B"}
        plan = Plan(**fields)
        if possible(model, plan):
            return model, plan


def possible(model: ModelSpec, plan: Plan) -> bool:
    """Whether `model` can be trained so."""
    return refuse(model, plan, CLUSTER) is None


def neighbours(model: ModelSpec, plan: Plan) -> list[tuple[str, Plan]]:
    """Possible plans that differ from `plan` in one field, with its name."""
    others = []
    for name in FIELD_TYPES:
        for value in dict.fromkeys(values_of(name)):
            try:
                other = replace(plan, **{name: value})
            except ForerunError:
                continue
            if value != getattr(plan, name) and possible(model, other):
                others.append((name, other))
    return others
