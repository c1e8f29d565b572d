"""Symbolic Programs that look like saved traces."""

from dataclasses import replace

from forerun.describe.cluster.catalog import load_cluster
from forerun.describe.model.catalog import load_model
from forerun.describe.plan.plan import Plan
from forerun.sources.symbolic.build import build

H100 = load_cluster("h100-sxm")
MODEL = replace(load_model("llama-3.1-8b"), n_layers=2)
STACK = "pytorch"
DATA_PARALLEL = ("dp_replicate", "dp_shard", "dp_all", "dp_expert", "dp_expert_all")


def plan_of(**fields):
    """A plan with the stack that Programs are read with."""
    return Plan(**{"seq_len": 4096, "stack": STACK, **fields})


def program_of(plan, cluster=H100, model=MODEL, **meta):
    """The Program of a plan, with the meta of a trace."""
    program = build(model, plan, cluster)
    axes = [group.axis for group in program.groups]
    shards = ("dp_shard", "dp_expert") if plan.zero_stage == 3 else ()
    told = {
        "source": "trace",
        "torch": "2.13.0",
        "world_size": plan.world_size,
        "gpus_per_node": cluster.node_size,
        "tokens_per_step": plan.tokens_per_step,
        "data_parallel": [i for i, axis in enumerate(axes) if axis in DATA_PARALLEL],
        "sharded": [i for i, axis in enumerate(axes) if axis in shards],
    }
    return replace(program, meta={**told, **meta})


def with_group_ranks(program):
    """`program` with a list of ranks for each group, as a trace has."""
    ranks = [[i * group.inner for i in range(group.size)] for group in program.groups]
    return replace(program, meta={**program.meta, "group_ranks": ranks})
